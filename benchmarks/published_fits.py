"""Which published runs fit into the memory of their devices as echelon would train them, and why the others do not.

Those programs keep other bytes than echelon does. For a run that does not fit, the smallest set of differences is named
with which it would.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from echelon.planner.choose import MEMORY_HEADROOM
from echelon.planner.memory import estimate_memory
from echelon.planner.plan import ParallelPlan
from published import SOURCES, Case
from published_memory import DEEPSPEED


@dataclass(frozen=True)
class Difference:
    """What a program does otherwise. applies: to which runs. change: the plan with it. saved: bytes that it lacks."""

    words: str
    applies: Callable[[Case], bool]
    change: Callable[[ParallelPlan], ParallelPlan] = lambda plan: plan
    saved: Callable[[Case], float] = lambda case: 0.0


def count_waiting(case: Case) -> float:
    """Bytes of the receive buffers of a rank in the middle of a pipeline, beyond those of microbatches in flight."""
    plan = case.plan
    hidden = plan.micro_batch_size * plan.sequence_len // plan.cp * case.shape.hidden_size * 2
    stages = len(plan.stages)
    share = plan.tp if plan.sequence_parallel and case.software.divides_borders else 1
    return 2 * stages // plan.pp * hidden * (plan.num_microbatches - min(stages, plan.num_microbatches) / share)


def count_headroom(case: Case) -> float:
    """The bytes that echelon leaves free."""
    return MEMORY_HEADROOM * (case.cluster.accelerator.memory_bytes or 0)


DIFFERENCES = (
    Difference("Less than 10 % of the memory was free.", lambda case: True, saved=count_headroom),
    Difference(
        "The source does not say what was recomputed, and it fits if everything was.",
        lambda case: not case.states_checkpointing,
        lambda plan: replace(plan, activation_checkpointing="full"),
    ),
    Difference(
        "PyTorch's pipelines have a receive buffer for each microbatch of a step, the source's for those in flight.",
        lambda case: case.plan.pp > 1,
        saved=count_waiting,
    ),
    Difference(
        "Gradients were summed in 16 bits, which echelon does in fp32.",
        lambda case: case.gradients == "fp16" and case.source in DEEPSPEED,
        lambda plan: replace(plan, precision=replace(plan.precision, reduce="bfloat16")),
    ),
    Difference(
        "The source does not say whether DeepSpeed kept layer inputs in host memory, and it fits if it did.",
        lambda case: case.source in DEEPSPEED,
        lambda plan: replace(plan, activation_offloading=True),
    ),
)


def fits(case: Case, differences: Sequence[Difference] = ()) -> bool:
    """Whether the bytes that echelon would need are there, with these differences."""
    memory, plan = case.cluster.accelerator.memory_bytes, case.planned
    assert memory is not None
    for each in differences:
        plan = each.change(plan)
    saved = sum(each.saved(case) for each in differences)
    return estimate_memory(case.shape, plan).total - saved <= (1 - MEMORY_HEADROOM) * memory


def find_differences(case: Case) -> tuple[Difference, ...] | None:
    """The fewest differences with which the run fits; None if it does not with any of them."""
    known = [each for each in DIFFERENCES if each.applies(case)]
    chosen = (each for count in range(len(known) + 1) for each in combinations(known, count))
    return next((each for each in chosen if fits(case, each)), None)


def report_fits(cases: Sequence[Case]) -> Iterator[str]:
    """Lines of Markdown: the runs that fit by source, and for the others the differences with which they would."""
    found = [(case.source, find_differences(case)) for case in cases]
    yield from ("## Memory: which runs fit", "")
    yield f"All of these runs did run. One fits if echelon would leave {MEMORY_HEADROOM:.0%} of the memory free. For a"
    yield "run that does not, the fewest differences are counted with which it would, so one run may count in several:"
    yield from ("", *(f"{number}. {each.words}" for number, each in enumerate(DIFFERENCES, 1)), "")
    numbers = [str(number) for number in range(1, len(DIFFERENCES) + 1)]
    yield f"| source | runs | fit | {' | '.join(numbers)} | none of them |"
    yield f"|---|---|---{'|---' * len(numbers)}|---|"
    for source in (*dict.fromkeys(case.source for case in cases), None):
        chosen = [each for name, each in found if source in (name, None)]
        known = [each for each in chosen if each is not None]
        counts = [len(chosen), known.count(()), *(sum(one in each for each in known) for one in DIFFERENCES)]
        shown = " | ".join(str(count) for count in (*counts, chosen.count(None)))
        yield f"| {'all' if source is None else SOURCES[source]} | {shown} |"
    yield ""
