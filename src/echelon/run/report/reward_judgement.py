"""What a run that trains from rewards achieved, in plain sentences: did the reward rise, also on prompts held out."""

import statistics
from collections.abc import Sequence

from echelon.run.report.blocks import Point
from echelon.run.report.nested import read_points
from echelon.run.report.numbers import render_number
from echelon.run.report.run_record import RunRecord

_FEWEST_STEPS = 20
# A difference of rewards counts if it is this share of their spread within a group at the beginning.
_MATTERS = 0.1


def judge_rewards(record: RunRecord) -> list[str]:
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
    return [learned, *([_judge_held_out(held, matters)] if held else []), _advise(has_learned, early, late)]


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


def _advise(has_learned: bool, early: float, late: float) -> str:
    if late < 0.2 * early:
        return (
            "Next: other prompts: at the end the answers to one prompt had nearly the same reward (reward_spread "
            f"{render_number(late)}, {render_number(early)} at first), from which nothing is learned."
        )
    if has_learned:
        return "Next: train for longer: the same command with more train.steps goes on from here."
    return "Next: look at samples.jsonl: does the reward prefer the better answers? Then another optim.learning_rate."
