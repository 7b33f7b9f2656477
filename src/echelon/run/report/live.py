"""The state of a run in progress, as a short report that is made again and again from its files."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from echelon.run.report.blocks import Block, Curves, Listing, Report, Table
from echelon.run.report.run_record import read_record
from echelon.run.report.sections import build_report

REFRESH_SECONDS = 2.0
_SECTIONS = ("Messages", "Loss", "Metrics of the loop", "Throughput", "Where the time went", "Network", "Events")
# A reading of the files of a long run takes so long; it may take at most this share of the time.
_READING_SHARE = 0.2


def read_live(path: Path) -> Report:
    """Return the report of a run's present state, without traces. Raises ConfigError if there is no such run."""
    whole = build_report(read_record(path, with_traces=False))
    return replace(whole, sections=[section for section in whole.sections if section.title in _SECTIONS])


def shorten(report: Report) -> Report:
    """Return the report for a terminal: of each section, its first picture and its sentences."""
    sections = [replace(section, blocks=list(_keep(section.blocks))) for section in report.sections]
    return replace(report, sections=[section for section in sections if section.blocks])


def _keep(blocks: Sequence[Block]) -> Iterator[Block]:
    has_curves = False
    for block in blocks:
        if isinstance(block, Table | Listing) or (has_curves and isinstance(block, Curves)):
            continue
        has_curves |= isinstance(block, Curves)
        yield block


def follow(path: Path, sleep: Callable[[float], None] = time.sleep) -> Iterator[Report]:
    """Yield the state of a run until it no longer runs, that state included. Raises ConfigError as `read_live`."""
    while True:
        began = time.monotonic()
        report = read_live(path)
        yield report
        if report.status != "running":
            return
        took = time.monotonic() - began
        sleep(max(REFRESH_SECONDS, took / _READING_SHARE))
