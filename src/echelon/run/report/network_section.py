"""The section of a report about the network: what ranks send in collectives, and what interfaces carry."""

import statistics
from collections.abc import Iterator, Mapping
from typing import Any

from echelon.ground.redaction import redact_text
from echelon.ground.sizes import render_bytes, render_rate
from echelon.run.report.blocks import Block, Lines, Table
from echelon.run.report.nested import read_mapping, read_number
from echelon.run.report.numbers import render_percent
from echelon.run.report.run_record import RunRecord

_SMALL = 0.0005  # collectives with a smaller share of what is sent, such as those of a start, have no row


def build_network(record: RunRecord) -> Iterator[Block]:
    """Yield the blocks of the section; none if nothing was sent, or if an older version recorded nothing."""
    pairs = [
        (sent, seconds)
        for row in record.steady_rows
        if (sent := read_number(row, "sent_bytes")) and (seconds := read_number(row, "step_seconds"))
    ]
    if not pairs:
        return
    rate = sum(sent for sent, _ in pairs) / sum(seconds for _, seconds in pairs)
    median = render_bytes(statistics.median(sent for sent, _ in pairs))
    yield Lines([f"In a step each rank sends {median} in collectives, {render_rate(rate)} on average."])
    waits = record.values("message_wait_seconds")
    if waits:
        share = sum(waits) / (sum(record.values("step_seconds")) or 1.0)
        yield Lines([f"Even the busiest process waited for messages for {render_percent(share)} of the time of steps."])
    found = record.find_events("network")
    if found:
        yield from _list_last(found[-1])


def _list_last(event: Mapping[str, Any]) -> Iterator[Block]:
    """Tables of the last start that ended: its collectives by group, and the interfaces of rank 0's machine."""
    sent, seconds = read_mapping(event, "collectives"), read_number(event, "seconds")
    known = {name: count for name in sent if (count := read_number(sent, name))}
    if known:
        whole = sum(known.values())
        rows = sorted((item for item in known.items() if item[1] >= _SMALL * whole), key=lambda item: -item[1])
        yield Table(
            ("sent by rank 0, with evaluations and saves", "bytes", "share"),
            [(redact_text(name), render_bytes(count), render_percent(count / whole)) for name, count in rows],
        )
    interfaces = read_mapping(event, "interfaces")
    if interfaces and seconds:
        rates = []
        for name in interfaces:
            ways = [read_number(interfaces, name, way) or 0.0 for way in ("sent", "received")]
            rates.append((redact_text(name), *(render_rate(amount / seconds) for amount in ways)))
        yield Table((f"interface of {redact_text(str(event.get('host')))}, all programs", "sent", "received"), rates)
