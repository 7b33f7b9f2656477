"""The section of a report about training from rewards: the curves, the time of its parts, and answers over time."""

import statistics
from collections.abc import Iterator, Sequence

from echelon.ground.redaction import redact_text
from echelon.run.report.blocks import Bars, Block, Curves, Series, Table
from echelon.run.report.nested import draw_lines, read_numbers, read_points
from echelon.run.report.numbers import render_number, render_percent
from echelon.run.report.run_record import RunRecord

_MEASURES = {
    "reward": "mean reward",
    "solved": "share with the full reward",
    "reward_spread": "spread within a group",
    "uniform_groups": "share of groups with equal rewards",
    "unjudged": "share without a reward",
    "answer_tokens": "tokens of an answer",
    "truncated": "share cut off",
    "turns": "turns of an answer",
    "entropy": "entropy, nats per token",
    "kl": "divergence from the reference",
    "clipped": "share of tokens clipped",
    "mismatch_max": "largest difference between sampler and training",
}
_PARTS = {"sample_seconds": "sampling", "reward_seconds": "rewards", "update_seconds": "updates"}
_NEAR, _MAX_STEPS, _MAX_ANSWERS, _MAX_LETTERS = 10, 8, 3, 100


def build_rewards(record: RunRecord) -> Iterator[Block]:
    """Yield the blocks of the section; none for a run without rewards."""
    if not (points := read_points(record.train_rows, "reward")):
        return
    held = read_points(record.eval_rows, "reward")
    lines = [*draw_lines("training", points), Series("held-out prompts, greedily", held, is_marked=True)]
    yield Curves("reward", "step", [line for line in lines if line.points])
    parts = sorted({name for row in record.train_rows for name in row if _is_part(name)})
    if parts:
        series = [Series(name.removeprefix("reward_"), read_points(record.train_rows, name)) for name in parts]
        yield Curves("reward of each function", "step", series)
    yield from _list_measures(record)
    means = [(word, read_numbers(record.steady_rows, name)) for name, word in _PARTS.items()]
    if all(seconds for _, seconds in means):
        yield Bars([("a step", [(word, statistics.fmean(seconds)) for word, seconds in means])], "seconds")
    yield from _list_answers(record)


def _is_part(name: str) -> bool:
    return name.startswith("reward_") and not name.endswith("_std") and name not in ("reward_spread", "reward_seconds")


def _list_measures(record: RunRecord) -> Iterator[Block]:
    rows = []
    for name, word in _MEASURES.items():
        if values := read_numbers(record.train_rows, name):
            near = min(_NEAR, len(values))
            ends = (statistics.fmean(values[:near]), statistics.fmean(values[-near:]))
            rows.append((word, *map(render_number, ends)))
    yield Table(("", "first steps", "last steps"), rows)


def _list_answers(record: RunRecord) -> Iterator[Block]:
    """Yield the answers to one prompt in some steps, spread over the run: the commonest ones, with their rewards."""
    answers = [row for row in record.samples if "reward" in row]
    steps = list(dict.fromkeys(row["step"] for row in answers))
    rows: list[Sequence[str]] = []
    for step in _spread(steps):
        at_step = [row for row in answers if row["step"] == step]
        by_text: dict[str, list[float | None]] = {}
        for row in at_step:
            by_text.setdefault(row["text"], []).append(row["reward"])
        common = sorted(by_text.items(), key=lambda item: -len(item[1]))[:_MAX_ANSWERS]
        for text, rewards in common:
            share, reward = len(rewards) / len(at_step), rewards[0]
            rows.append((
                str(step), _show(at_step[0]["prompt"]), _show(text), render_percent(share),
                "none" if reward is None else render_number(reward),
            ))  # fmt: skip
    if rows:
        yield Table(("step", "prompt", "answer", "share", "reward"), rows, is_text=True)


def _spread(steps: Sequence[int]) -> list[int]:
    """Return at most `_MAX_STEPS` of the steps, with the first and the last."""
    count = min(_MAX_STEPS, len(steps))
    if count < 2:
        return list(steps)
    return [steps[round(index * (len(steps) - 1) / (count - 1))] for index in range(count)]


def _show(text: str) -> str:
    """Return a text on one line, without secrets, cut where it is long."""
    line = " ".join(redact_text(text).split())
    return line if len(line) <= _MAX_LETTERS else f"{line[:_MAX_LETTERS]}..."
