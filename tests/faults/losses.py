"""What lost processes cost: the rows of benchmarks/results/lost-processes-cpu.jsonl, and the page beside it.

Tests add to it only where ECHELON_LOSSES_COUNT is set, as `make losses` does.
"""

import json
import os
import platform
import signal
import time
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from statistics import median

from tests.dist.command import read_lines

COUNT = os.environ.get("ECHELON_LOSSES_COUNT")  # of all losses at random moments together
ROWS = Path(__file__).parents[2] / "benchmarks" / "results" / "lost-processes-cpu.jsonl"
RANDOM = "any moment"
LOST, JOINED, REPLACED = "replica_lost", "replica_joined", "process_lost"
PROCESSES, MACHINES = "processes of one machine", "emulated machines"


@dataclass(frozen=True)
class Loss:
    """One injected loss, of one process or of more at once.

    Attributes:
        held: seconds from the death until the others went on; None for a process that was starting, for which the
            others did not wait, or waited already.
        back: seconds from the death until it was replaced and trained; None where that is not known.
        again: steps that were finished before it, and done again.
    """

    held: float | None
    back: float | None
    again: int


@dataclass(frozen=True)
class Strike:
    """Processes that were killed, and the last step that was finished then.

    `is_starting`: killed before it trained; then nothing may be recorded of it.
    """

    pids: frozenset[int]
    step: int
    is_starting: bool = False


class Struck:
    """What a test kills of a job; mixed into one, which has the folder `run`, `last_step` and `events`."""

    def __init__(self):
        self.strikes = []

    def read_pids(self):
        """The process of each rank."""
        return self.run.read_pids()

    def strike(self, rank, number=signal.SIGKILL, is_starting=False):
        """Send a signal to the process of a rank."""
        pid, step = self.read_pids()[rank], self.last_step()
        os.kill(pid, number)
        if number == signal.SIGKILL:
            self.strikes.append(Strike(frozenset([pid]), step, is_starting))

    def describe_losses(self):
        """See the function of the same name."""
        return list(describe_losses(self.events(LOST, JOINED, REPLACED), self.strikes))

    def keep_losses(self, case, moment):
        """Write down what the losses at a chosen moment have cost."""
        keep(case, moment, self.describe_losses())


def describe_losses(events, strikes):
    """The losses of a run, from its events and what was killed. Fails unless each is recorded, and nothing else is."""
    lost = [event for event in events if event["event"] != JOINED]
    killed = frozenset[int]().union(*(strike.pids for strike in strikes))
    assert {event["pid"] for event in lost} <= killed, (lost, strikes)
    assert len({event["pid"] for event in lost}) == len(lost), lost
    for strike in strikes:
        found = [event for event in lost if event["pid"] in strike.pids]
        assert found or strike.is_starting, (strike, events)
        held = max((event["seconds"] for event in found), default=None)
        again = max((strike.step - event["step"] for event in found), default=0)
        yield Loss(held, find_return(events, found), max(0, again))


def find_return(events, found):
    """Seconds from a death until what was lost was there again; None if that is not known."""
    if not found:
        return None
    if found[0]["event"] == REPLACED:
        return max(event["seconds"] for event in found)
    later = events[events.index(found[-1]) + 1 :]
    joined = next((event for event in later if event["replica"] == found[-1]["replica"]), None)
    if joined is None or joined["event"] != JOINED:
        return None
    return joined["time"] - found[-1]["time"] + found[-1]["seconds"]


def keep(case, moment, losses, where=PROCESSES, outcome="went on"):
    """Replace what this test has written, where it is to be written, and write the page from all.

    Args:
        outcome: what the others did.
    """
    if not COUNT:
        return
    test = os.environ["PYTEST_CURRENT_TEST"].rpartition(" ")[0]
    row = {"test": test, "case": case, "moment": moment, "where": where, "outcome": outcome, "date": today()}
    row["losses"] = [[shorten(value) for value in asdict(loss).values()] for loss in losses]
    before, key = read_lines(ROWS) if ROWS.exists() else [], ("test", "case", "moment")
    kept = [other for other in before if any(other[word] != row[word] for word in key)]
    save_report([*kept, row])


def save_report(rows):
    """Write the rows, and the page from them."""
    rows = sorted(rows, key=lambda row: (row["moment"] != RANDOM, row["where"] == MACHINES, row["case"], row["test"]))
    ROWS.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    ROWS.with_suffix(".md").write_text(render_report(rows))


def shorten(value):
    return None if value is None else round(value, 2)


def today():
    return time.strftime("%Y-%m-%d")


def render_report(rows):
    """The page as Markdown: losses at random moments by plan, and those at special moments."""
    at_random = [row for row in rows if row["moment"] == RANDOM]
    special = [row for row in rows if row["moment"] != RANDOM]
    count, apart = (
        sum(len(row["losses"]) for row in at_random if where in (None, row["where"])) for where in (None, MACHINES)
    )
    dates = [row["date"] for row in rows]
    starting = sum(loss[0] is None for row in at_random for loss in row["losses"])
    return "\n".join([
        "# Lost processes and machines, and what they cost",
        "",
        f"`make losses` kills processes by SIGKILL while a small Llama trains: {count:,} at random moments, {apart} of "
        "them in jobs on two to four machines that are emulated by network namespaces, and others at chosen moments. "
        f"Of the {count:,}, {starting} were processes that had just been started in place of a lost one. `quorum` "
        "and `parameter server`: [replicas](../../docs/quorum.md) and [workers](../../docs/parameter-server.md) that "
        "go on without a lost one until it is back. `replace`: [fault.on_lost_process: "
        "replace](../../docs/elastic.md#replacing-a-lost-process), where all wait for the new process.",
        "",
        "After each run was compared: every row is there once, in order, with the `batch_hash` of a run that lost "
        "nothing. With `replace` rows, last weights and optimizer state are those of that run bit for bit. A quorum "
        "is compared with one process: losses within 2e-5 of each other, last weights within 2e-5. The deaths that "
        "the run recorded are those that were caused, no job restarted, and no process was left.",
        "",
        f"Machine: {os.cpu_count()} shared CPU cores ({platform.machine()}), {platform.system()}; Python "
        f"{platform.python_version()}, torch {metadata.version('torch')}, transformers "
        f"{metadata.version('transformers')}; {min(dates)} to {max(dates)}. Other work ran beside it.",
        "",
        "Seconds held up: from the death until the others went on. Back: until the new process trained, most of which "
        "is its start. Steps again: finished before the loss, and done again; the step that was interrupted is not "
        "counted.",
        "",
        "## At random moments",
        "",
        "| | Where | Losses | Seconds held up, median | most | Back, median | most | Steps again, median | most |",
        "|---|---|---|---|---|---|---|---|---|",
        *(f"| {row['case']} | {row['where']} | {describe(row['losses'])} |" for row in at_random),
        *(f"| **{kind}, all** | | {describe(losses)} |" for kind, losses in group_by_kind(at_random)),
        "",
        "## At chosen moments",
        "",
        "| | Lost | Where | Losses | Seconds held up, median | most | Back, median | most | Steps again, median "
        "| most | The others |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
        *(
            f"| {row['case']} | {row['moment']} | {row['where']} | {describe(row['losses'])} | {row['outcome']} |"
            for row in special
        ),
        "",
    ])  # fmt: skip


def group_by_kind(rows):
    """All losses of a quorum, of parameter servers, and of processes that are replaced."""
    for kind in dict.fromkeys(row["case"].split(",")[0] for row in rows):
        yield kind, [loss for row in rows if row["case"].startswith(f"{kind},") for loss in row["losses"]]


def describe(losses):
    """How many losses, then the median and the worst of each figure."""
    held, back, again = ([value for value in values if value is not None] for values in zip(*losses, strict=True))
    shown = [f"{median(values):.1f} | {max(values):.1f}" if values else "- | -" for values in (held, back)]
    return " | ".join([str(len(losses)), *shown, f"{median(again):g} | {max(again)}"])
