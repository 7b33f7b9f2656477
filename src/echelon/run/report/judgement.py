"""What a run achieved, in plain sentences: has it learned, does it overfit, was it still improving, what comes next.

Each sentence follows from the losses of the run by the rules below; where they are too few, it says so. A run that
trains from rewards is judged by these: did the reward rise, also on prompts held out.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from echelon.run.report.blocks import (
    Point,
    read_number,
    read_numbers,
    read_points,
    read_value,
    render_number,
    render_percent,
)
from echelon.run.report.run_record import RunRecord

_FEWEST_STEPS, _FEWEST_EVALUATIONS = 20, 3
# A loss must be lower by this share than that of a model without context, or than the first loss, to count as learned.
_LEARNED = 0.02
_RISEN = 0.01  # an evaluation loss that is higher than the lowest one by this share has risen
_FELL = 0.005  # a loss that fell by this share in the last fifth of the steps was still falling
_LAST = 0.2
_DECAYED = 0.2  # a learning rate below this share of its peak
_MATTERS = 0.1  # rewards differ by this share of their spread within a group at the beginning


Learning = Literal["learned", "not", "worse"]
Fit = Literal["good", "overfitting", "unstable", "unknown"]


@dataclass(frozen=True)
class _Curves:
    """Losses by step, without steps that were not applied. entropy: the loss of a model without context, if known."""

    train: Sequence[Point]
    held: Sequence[Point]
    entropy: float | None

    @property
    def first(self) -> float:
        return statistics.median(loss for _, loss in self.train[: self._near])

    @property
    def last(self) -> float:
        return statistics.median(loss for _, loss in self.train[-self._near :])

    @property
    def _near(self) -> int:
        return max(1, min(10, len(self.train) // 10))

    def train_at(self, step: float) -> float:
        """The training loss around a step."""
        middle = min(range(len(self.train)), key=lambda index: abs(self.train[index][0] - step))
        return statistics.median(loss for _, loss in self.train[max(0, middle - self._near) : middle + self._near + 1])


def judge_run(record: RunRecord) -> list[str]:
    """Return two to four sentences about a run; none before its first step."""
    if sentences := _judge_rewards(record):
        return sentences
    applied = [row for row in record.train_rows if row.get("skipped") is not True]
    entropies = [read_number(event, "unigram_entropy") for event in record.starts]
    is_taught = any("cross_entropy" in row for row in record.eval_rows)  # its loss is the distance from a teacher
    entropy = None if is_taught or not entropies else entropies[-1]
    curves = _Curves(read_points(applied, "loss"), read_points(record.eval_rows, "loss"), entropy)
    if not (count := len(curves.train)):
        return []
    if count < _FEWEST_STEPS:
        steps = "1 step has" if count == 1 else f"{count} steps have"
        return [f"Too short to say whether the model has learned: {steps} a loss, at least {_FEWEST_STEPS} are needed."]
    learning, learned = _judge_learning(curves)
    fit, fitting = _judge_fitting(curves)
    is_falling, trend = _judge_trend(curves, record)
    shows_trend = learning == "learned" and fit in ("good", "unknown")
    return [learned, fitting, *([trend] if shows_trend else []), _advise(record, learning, fit, is_falling)]


def describe_context(loss: float, entropy: float) -> str:
    """What a loss says beside the entropy of the token frequencies of the same text."""
    other = "that of a model that only knows how often each token occurs (unigram_entropy)"
    if loss > (1 - _LEARNED) * entropy:
        return f"The loss is no lower than {other}: this model has not learned from context yet."
    return f"The loss is {render_number(entropy - loss, 3)} lower than {other}: this model predicts from context."


def _judge_learning(curves: _Curves) -> tuple[Learning, str]:
    """Whether the model has learned. Without the entropy, the first training loss is what it is compared with."""
    first, last = curves.first, curves.last
    change = f"from {render_number(first)} to {render_number(last)}"
    if last > first + _LEARNED * abs(first):
        return "worse", f"It has not learned: the training loss rose {change}."
    if curves.entropy is not None:
        name, loss = ("evaluation", curves.held[-1][1]) if curves.held else ("training", last)
        limit = f"the {render_number(curves.entropy)} of a model that only knows how often each token occurs"
        result = f"the {name} loss is {render_number(loss)}"
        if loss > (1 - _LEARNED) * curves.entropy:
            return "not", f"It has not learned from context yet: {result}, not below {limit}."
        return "learned", f"It has learned: {result}, below {limit}; training began at {render_number(first)}."
    if last > first - _LEARNED * abs(first):
        return "not", f"It has hardly learned: the training loss went {change}."
    return "learned", f"It has learned: the training loss fell {change}."


def _judge_fitting(curves: _Curves) -> tuple[Fit, str]:
    """Whether it overfits: the evaluation loss rises while the training loss falls."""
    held = curves.held
    if len(held) < _FEWEST_EVALUATIONS:
        count = ("no evaluation", "one evaluation", "two evaluations")[len(held)]
        every = max(1, round(curves.train[-1][0] / 5))
        need = "" if held else ", with held-out text (data.validation_fraction)"
        return "unknown", (
            f"Whether it overfits cannot be seen from {count}; at least {_FEWEST_EVALUATIONS} are needed, such as by "
            f"train.eval_every={every}{need}."
        )
    step, best = min(held, key=lambda point: point[1])
    last = held[-1][1]
    if last <= best + _RISEN * abs(best):
        return "good", "There is no sign of overfitting: the evaluation loss is at its lowest, or within 1 % of it."
    rise = (
        f"the evaluation loss was lowest at step {step:,.0f} ({render_number(best)}) and is {render_number(last)} now"
    )
    if curves.last < curves.train_at(step):
        return "overfitting", f"It is overfitting: {rise}, while the training loss went on falling."
    return "unstable", f"Training became unstable: {rise}, and the training loss has not fallen since then."


def _judge_trend(curves: _Curves, record: RunRecord) -> tuple[bool, str]:
    """Whether the loss still fell in the last fifth of the steps, by more than its noise."""
    end = curves.train[-1][0]
    if len(curves.held) >= _FEWEST_EVALUATIONS:
        earlier = [point for point in curves.held if point[0] <= (1 - _LAST) * end] or [curves.held[0]]
        (since, start), last, noise, name = earlier[-1], curves.held[-1][1], 0.0, "evaluation"
    else:
        size = max(4, round(_LAST * len(curves.train)))
        early, late = curves.train[-2 * size : -size], curves.train[-size:]
        losses = [[loss for _, loss in points] for points in (early, late)]
        start, last = map(statistics.mean, losses)
        noise = 2 * sum(statistics.variance(tail) / size for tail in losses) ** 0.5
        since, name = late[0][0], "training"
    share = (start - last) / (abs(start) or 1.0)
    if share > _FELL and start - last <= noise:
        return True, (
            f"Whether it was still improving cannot be told: from step {since:,.0f} on, the training loss changed by "
            "less than it goes up and down from step to step."
        )
    if share > _FELL:
        return (
            True,
            f"It was still improving: the {name} loss fell by {render_percent(share)} from step {since:,.0f} on.",
        )
    return False, f"It has levelled off: the {name} loss hardly fell from step {since:,.0f} on{_blame_rate(record)}."


def _blame_rate(record: RunRecord) -> str:
    """The learning rate as a cause of a flat end, if it has decayed."""
    rates = read_numbers(record.train_rows, "learning_rate")
    if not rates or rates[-1] > _DECAYED * max(rates):
        return ""
    return f", where the learning rate was down to {rates[-1]:.1e} of at most {max(rates):.1e}"


def _advise(record: RunRecord, learning: Learning, fit: Fit, is_falling: bool) -> str:
    """What to do next: the key of the recipe, or the command."""
    if record.summary.status not in ("done", "running"):
        return "Next: the same command goes on from the newest checkpoint."
    if fit == "overfitting" and read_value(record.recipe, "checkpoint", "keep_best") is True:
        return "Next: use the best weights (--checkpoint best), and train on more text or for fewer steps."
    if fit == "overfitting":
        return (
            "Next: train on more text or for fewer steps. checkpoint.keep_best=true keeps the best weights, and "
            "evaluate.early_stopping=3 ends such a run."
        )
    rate = read_number(record.recipe, "optim", "learning_rate")
    if fit == "unstable" or learning == "worse":
        lower = "a lower optim.learning_rate" if rate is None else f"optim.learning_rate={rate / 3:.1g}"
        return f"Next: train again with {lower} and --fresh."
    longer = _name_longer(record)
    if learning == "not":
        return (
            f"Next: train for longer ({longer}), or with a higher optim.learning_rate. `echelon data RECIPE` shows "
            "what the model reads."
        )
    if is_falling:
        return f"Next: train for longer: the same command with {longer} goes on from here."
    return "Next: more steps alone will hardly help; more text, a larger model or another optim.learning_rate may."


def _name_longer(record: RunRecord) -> str:
    """The override that doubles the length of a run."""
    for name in ("steps", "tokens", "epochs"):
        if (value := read_number(record.recipe, "train", name)) is not None:
            return f"train.{name}={2 * value:.12g}"
    return "a higher train.steps"


def _judge_rewards(record: RunRecord) -> list[str]:
    """Return two or three sentences about the rewards of a run; none if its rows have no reward."""
    rewards, spreads = (read_points(record.train_rows, name) for name in ("reward", "reward_spread"))
    if not rewards:
        return []
    if len(rewards) < _FEWEST_STEPS:
        return [
            f"Too short to say whether the model has learned: {len(rewards)} steps have a reward, at least "
            f"{_FEWEST_STEPS} are needed."
        ]
    near = max(1, min(20, len(rewards) // 5))
    first, last = _mean(rewards[:near]), _mean(rewards[-near:])
    early, late = _mean(spreads[:near]), _mean(spreads[-near:])
    change = f"from {render_number(first)} to {render_number(last)} (means of {near} steps)"
    matters = _MATTERS * max(early, 1e-6)
    has_learned = last > first + matters
    if has_learned:
        learned = f"It has learned: the mean reward rose {change}."
    elif last < first - matters:
        learned = f"It has not learned: the mean reward fell {change}."
    else:
        learned = f"It has hardly learned: the mean reward went {change}."
    held = read_points(record.eval_rows, "reward")
    return [learned, *([_judge_held_out(held, matters)] if held else []), _advise_rewards(has_learned, early, late)]


def _mean(points: Sequence[Point]) -> float:
    return statistics.fmean(value for _, value in points)


def _judge_held_out(held: Sequence[Point], matters: float) -> str:
    step, best = max(held, key=lambda point: point[1])
    last = held[-1][1]
    if last < best - matters:
        return (
            f"On held-out prompts it was better before: {render_number(best)} at step {step:.0f}, "
            f"{render_number(last)} at the end."
        )
    if len(held) == 1:
        return f"On held-out prompts the reward is {render_number(last)}."
    return f"On held-out prompts the reward went from {render_number(held[0][1])} to {render_number(last)}."


def _advise_rewards(has_learned: bool, early: float, late: float) -> str:
    if late < 0.2 * early:
        return (
            "Next: other prompts: at the end the answers to one prompt had nearly the same reward (reward_spread "
            f"{render_number(late)}, {render_number(early)} at first), from which nothing is learned."
        )
    if has_learned:
        return "Next: train for longer: the same command with more train.steps goes on from here."
    return "Next: look at samples.jsonl: does the reward prefer the better answers? Then another optim.learning_rate."
