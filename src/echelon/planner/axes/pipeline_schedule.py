"""Seconds that a pipeline takes for a step under each schedule, with stages of any cost: its actions, one by one.

The order of a rank's actions is that of PyTorch's schedules: GPipe (Huang et al. 2019, arXiv:1811.06965), 1F1B and its
interleaved form (Narayanan et al. 2021, arXiv:2104.04473), and zero bubble (Qi et al. 2023, arXiv:2401.10241, ZB1P). An
action starts when its rank has done the one before it and the neighbouring stage has sent what it needs.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from echelon.recipe.training import PipelineSchedule

# Steps with more actions are computed up to this number; each further round of microbatches adds as much time as the
# last one that is computed.
_MOST_ACTIONS = 20_000
_PLACES = 5  # decimal places of a stage's share of the busiest rank, so that equal pipelines are computed once

_KINDS = "FBIW"  # forward, backward, its halves: gradients of inputs, gradients of weights


def fits_schedule(schedule: PipelineSchedule, num_ranks: int, num_microbatches: int) -> bool:
    """Whether PyTorch's schedule takes this number of microbatches."""
    match schedule:
        case "gpipe":
            return True
        case "1f1b":
            return num_microbatches >= num_ranks
        case "interleaved" | "zero_bubble":
            return num_microbatches % max(1, num_microbatches // num_ranks) == 0


def microbatches_kept(
    schedule: PipelineSchedule, num_ranks: int, rank: int, stages_per_rank: int, num_microbatches: int
) -> int:
    """Return how many microbatches each stage of a process keeps the activations of at once, at most.

    Args:
        rank: of the process in its pipeline.
    """
    behind = num_ranks - 1 - rank
    match schedule:
        case "gpipe":
            kept = num_microbatches
        case "1f1b":
            kept = behind + 1
        case "interleaved":
            per_round = num_microbatches // max(1, num_microbatches // num_ranks)
            kept = -(-((stages_per_rank - 1) * per_round + 2 * behind + 1) // stages_per_rank)
        case "zero_bubble":
            kept = num_ranks  # weights' gradients wait until the others are sent
    return min(kept, num_microbatches)


def passes_deferred(schedule: PipelineSchedule, rank: int, stages_per_rank: int, num_microbatches: int) -> int:
    """Return how many backward passes of a process wait at once for the gradients of their weights.

    Only `zero_bubble` computes these later than the gradients of activations: rank 0 directly after them, every
    following rank one microbatch later than the rank before. The first stage has no gradients of activations to send.
    """
    if schedule != "zero_bubble" or (rank == 0 and stages_per_rank == 1):
        return 0
    return min(rank + 1, stages_per_rank * num_microbatches)


@dataclass(frozen=True)
class StageTime:
    """Seconds of one microbatch in one stage.

    Attributes:
        forward: the forward pass.
        inputs: the gradients of its inputs, with what is recomputed for them.
        weights: the gradients of its weights, which zero bubble computes later.
    """

    forward: float
    inputs: float
    weights: float

    @property
    def total(self) -> float:
        """Forward and backward pass."""
        return self.forward + self.inputs + self.weights


def bubble_seconds(
    schedule: PipelineSchedule, num_ranks: int, stages: Sequence[StageTime], num_microbatches: int
) -> float:
    """Return the seconds in which the rank with the most work waits for others, in a step.

    Args:
        stages: all stages in the order of the model; stage s is on rank s modulo num_ranks.
    """
    busiest, shares = _divide_by_busiest(num_ranks, stages)
    totals = [sum(shares[3 * stage : 3 * stage + 3]) for stage in range(len(stages))]
    worked = num_microbatches * max(sum(totals[rank::num_ranks]) for rank in range(num_ranks))
    return busiest * max(0.0, _step_length(schedule, num_ranks, shares, num_microbatches, 1.0) - worked)


def shared_seconds(
    schedule: PipelineSchedule, num_ranks: int, stages: Sequence[StageTime], num_microbatches: int, sharing: float
) -> float:
    """Return the seconds of a step whose ranks share cores, `sharing` of them one core; one that waits leaves its part.

    Args:
        stages: as above, each with the seconds that it takes while all ranks compute.
    """
    busiest, shares = _divide_by_busiest(num_ranks, stages)
    return busiest * _step_length(schedule, num_ranks, shares, num_microbatches, sharing)


def waiting_share(
    schedule: PipelineSchedule, num_ranks: int, stages: Sequence[StageTime], num_microbatches: int
) -> float:
    """Return the share of a step in which a rank waits for others, the mean over all ranks; arguments as above."""
    loads = [sum(stage.total for stage in stages[rank::num_ranks]) for rank in range(num_ranks)]
    seconds = num_microbatches * max(loads) + bubble_seconds(schedule, num_ranks, stages, num_microbatches)
    return 1 - num_microbatches * sum(loads) / (num_ranks * seconds)


def _divide_by_busiest(num_ranks: int, stages: Sequence[StageTime]) -> tuple[float, tuple[float, ...]]:
    """(seconds of the rank with the most work for one microbatch, the three times of each stage as shares of them)."""
    busiest = max(sum(stage.total for stage in stages[rank::num_ranks]) for rank in range(num_ranks))
    times = (seconds for stage in stages for seconds in (stage.forward, stage.inputs, stage.weights))
    return busiest, tuple(round(seconds / busiest, _PLACES) if busiest else 0.0 for seconds in times)


@lru_cache(maxsize=4096)
def _step_length(
    schedule: PipelineSchedule, num_ranks: int, shares: tuple[float, ...], num_microbatches: int, sharing: float
) -> float:
    """The time of a step for stages whose three times follow each other in `shares`."""
    num_stages, size = len(shares) // 3, round_size(schedule, num_ranks, num_microbatches)
    rounds = num_microbatches // size
    more = max(0, rounds - max(2, _MOST_ACTIONS // (2 * num_stages * size)))
    count = num_microbatches - more * size

    def run(count: int) -> float:
        actions = _list_actions(schedule, num_ranks, num_stages, count)
        if sharing > 1:
            return _run_shared(actions, shares, num_ranks, sharing)
        return _run(actions, shares, num_ranks)

    length = run(count)
    return length + more * (length - run(count - size)) if more else length


def round_size(schedule: PipelineSchedule, num_ranks: int, num_microbatches: int) -> int:
    """The microbatches that a rank computes in one of its stages before it goes on with the next."""
    if schedule in ("gpipe", "1f1b"):
        return min(num_ranks, num_microbatches)
    return num_microbatches // max(1, num_microbatches // num_ranks)


def _list_times(shares: Sequence[float]) -> list[float]:
    """The times of the four kinds of actions of each stage."""
    stages = zip(shares[::3], shares[1::3], shares[2::3], strict=True)
    return [seconds for forward, inputs, weights in stages for seconds in (forward, inputs + weights, inputs, weights)]


def _run(actions: Sequence[tuple[int, int, int]], shares: Sequence[float], num_ranks: int) -> float:
    """The time at which the last action is done."""
    taken = _list_times(shares)
    clock, done = [0.0] * num_ranks, [0.0]
    for rank, needed, index in actions:
        start, ready = clock[rank], done[needed]
        clock[rank] = end = (ready if ready > start else start) + taken[index]
        done.append(end)
    return max(clock)


def _run_shared(
    actions: Sequence[tuple[int, int, int]], shares: Sequence[float], num_ranks: int, sharing: float
) -> float:
    """The same, for ranks that are the faster the fewer of them compute, at most `sharing` times as fast."""
    taken, now, done = _list_times(shares), 0.0, [True] + [False] * len(actions)
    queues: list[list[int]] = [[] for _ in range(num_ranks)]
    for number in range(len(actions), 0, -1):
        queues[actions[number - 1][0]].append(number)
    left = [taken[index] for _, _, index in actions]
    while any(queues):
        first = [queue[-1] for queue in queues if queue]
        active = [number for number in first if done[actions[number - 1][1]]]
        speed = min(sharing, num_ranks / len(active))
        passed = min(left[number - 1] for number in active)
        now += passed / speed
        for number in active:
            left[number - 1] -= passed
            if left[number - 1] <= 1e-9:
                done[number] = True
                queues[actions[number - 1][0]].pop()
    return now


@lru_cache(maxsize=128)
def _list_actions(
    schedule: PipelineSchedule, num_ranks: int, num_stages: int, count: int
) -> tuple[tuple[int, int, int], ...]:
    """All actions of a step, each after those that it needs: its rank, the number of the action whose result another
    stage sends (from 1; 0 for none), and the place of its seconds: four kinds for each stage.
    """
    orders = [list(_order(schedule, num_ranks, num_stages // num_ranks, count, rank)) for rank in range(num_ranks)]
    numbers: dict[tuple[str, int, int], int] = {}
    actions: list[tuple[int, int, int]] = []
    places = [0] * num_ranks
    total = sum(map(len, orders))
    while len(actions) < total:
        for rank, order in enumerate(orders):
            while places[rank] < len(order):
                kind, stage, index = order[places[rank]]
                sender = ("F", stage - 1, index) if kind == "F" else ("B", stage + 1, index)
                is_sent = kind != "W" and 0 <= sender[1] < num_stages
                if is_sent and sender not in numbers:
                    break
                actions.append((rank, numbers[sender] if is_sent else 0, 4 * stage + _KINDS.index(kind)))
                numbers["B" if kind == "I" else kind, stage, index] = len(actions)
                places[rank] += 1
    return tuple(actions)


def _order(
    schedule: PipelineSchedule, num_ranks: int, per_rank: int, count: int, rank: int
) -> Iterator[tuple[str, int, int]]:
    """The actions of one rank: (kind, stage, microbatch)."""
    size, behind, total = round_size(schedule, num_ranks, count), num_ranks - 1 - rank, per_rank * count
    splits = schedule == "zero_bubble"
    ahead = {"gpipe": total, "1f1b": behind, "zero_bubble": (per_rank - 1) * size + behind}.get(
        schedule, (per_rank - 1) * size + 2 * behind
    )
    ahead = min(ahead, total)

    def place(number: int, is_forward: bool) -> tuple[int, int]:
        turn, within = divmod(number, size)
        round_number, local = divmod(turn, per_rank)
        return (local if is_forward else per_rank - 1 - local) * num_ranks + rank, round_number * size + within

    for number in range(ahead):
        yield ("F", *place(number, True))
    for number in range(total):
        if ahead + number < total:
            yield ("F", *place(ahead + number, True))
        yield ("I" if splits else "B", *place(number, False))
        if splits and number >= rank:
            yield ("W", *place(number - rank, False))
    for number in range(max(0, total - rank), total) if splits else ():
        yield ("W", *place(number, False))
