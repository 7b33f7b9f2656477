"""The memory that the programs of published measurements keep on their fullest rank: inputs of a row, not of echelon.

Those programs keep other bytes than echelon does: whole logits, weights and gradients in half precision, buffers. They
are counted as their sources describe them, stage by stage of a pipeline.

- Megatron-DeepSpeed (Megatron-LM with DeepSpeed's ZeRO-1, 2021 and 2022): fp16 weights and gradients, or bf16 ones
  with a sum of gradients in fp32 beside them (its BF16_Optimizer); 12 bytes of AdamW per parameter, divided over
  data-parallel ranks (Rajbhandari et al. 2020, arXiv:1910.02054, section 3.1); activations of Korthikanti et al. 2022
  (arXiv:2205.05198), equations 1 and 2; logits in fp16 and in fp32, which become their exponentials and their gradient
  in place (vocab_parallel_cross_entropy). Two constants are fitted: the reserved over the counted bytes (the memory is
  that of nvidia-smi, with what the allocator could not use again), and bytes of buffers (DeepSpeed's buckets, NCCL's
  channels).
- torchtitan: fp32 shards of weights, gradients and AdamW; two layers gathered in bf16, and the unit of embedding and
  head; its selective checkpointing keeps every second product and attention's output; logits in bf16, in fp32, their
  softmax and gradient in fp32. Since 2025 it compiles the loss, which keeps bf16 logits and their gradient. It sets
  expandable segments, with which the allocator loses next to nothing: nothing is fitted.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from published import Case

DEEPSPEED = ("bsv100", "tr11")
_RATIOS = [1 + 0.01 * step for step in range(41)]
_BUFFERS = [0.25e9 * step for step in range(17)]


@dataclass(frozen=True)
class Allocator:
    """What an allocator reserves: a multiple of the counted bytes, and a constant."""

    ratio: float = 1.0
    buffers: float = 0.0

    def reserve(self, counted: float) -> float:
        """Bytes for those that were counted."""
        return counted * self.ratio + self.buffers


def count_bytes(case: Case) -> float:
    """Bytes of tensors on the fullest rank."""
    return _count_torchtitan(case) if case.source == "torchtitan" else max(_count_stages(case))


def fit_allocator(cases: Sequence[Case]) -> Allocator:
    """The constants with the smallest mean distance of logarithms."""
    counted = [(count_bytes(each), each.memory_bytes) for each in cases]

    def loss(found: Allocator) -> float:
        return math.fsum(abs(math.log(found.reserve(size) / measured)) for size, measured in counted)

    return min((Allocator(ratio, buffers) for ratio in _RATIOS for buffers in _BUFFERS), key=loss)


def score_memory(cases: Sequence[Case]) -> tuple[dict[str, list[tuple[Case, float]]], dict[str, Allocator]]:
    """(by source, each row with predicted bytes over measured ones; the constants, fitted without that source)."""
    known = [each for each in cases if each.memory_bytes is not None]
    scored: dict[str, list[tuple[Case, float]]] = {}
    allocators = {}
    for source in dict.fromkeys(each.source for each in known):
        others = [each for each in known if each.source in DEEPSPEED and each.source != source]
        allocators[source] = fit_allocator(others) if source in DEEPSPEED else Allocator()
        scored[source] = [
            (each, allocators[source].reserve(count_bytes(each)) / each.memory_bytes)
            for each in known
            if each.source == source
        ]
    return scored, allocators


def _count_stages(case: Case) -> Iterator[float]:
    """Megatron-DeepSpeed: bytes of a rank of each pipeline stage, with 1F1B."""
    shape, plan = case.shape, case.plan
    hidden, tokens = shape.hidden_size, plan.micro_batch_size * plan.sequence_len
    layer = (12 * hidden**2 + 13 * hidden) / plan.tp
    table = shape.vocab_size * hidden / plan.tp  # tied: the first and the last stage have it
    weights = 4 + (4 if case.gradients == "fp32" else 0) + 12 / (plan.dp_replicate * plan.dp_shard)
    whole = tokens * hidden * (10 + 24 / plan.tp)
    whole += 5 * shape.num_heads * plan.sequence_len * tokens / plan.tp
    kept, redone = (2 * tokens * hidden, whole) if plan.activation_checkpointing == "full" else (whole, 0.0)
    for stage, count in enumerate(_uniform_layers(shape.num_layers, plan.pp)):
        is_last = stage == plan.pp - 1
        states = weights * (count * layer + (table if is_last or stage == 0 else 0))
        logits = 6 * tokens * shape.vocab_size / plan.tp if is_last else 0
        in_flight = min(plan.pp - stage, plan.num_microbatches)
        yield states + in_flight * count * kept + max(redone, logits)


def _uniform_layers(num_layers: int, stages: int) -> list[int]:
    """The layers of each stage; embedding and head count as layers if only so all have as many."""
    if num_layers % stages and (num_layers + 2) % stages == 0:
        count = (num_layers + 2) // stages
        return [count - 1, *[count] * (stages - 2), count - 1]
    return [num_layers // stages + (stage < num_layers % stages) for stage in range(stages)]


def _count_torchtitan(case: Case) -> float:
    shape, plan = case.shape, case.plan
    hidden, inner = shape.hidden_size, shape.intermediate_size
    key_value = shape.num_kv_heads * shape.head_dim
    tokens = plan.micro_batch_size * plan.sequence_len / plan.cp
    ranks = plan.dp_shard * plan.cp * plan.tp
    states = 16 * shape.num_parameters / ranks
    gathered = 2 * (2 * shape.num_layer_parameters + 2 * shape.vocab_size * hidden) / plan.tp
    selective = (hidden + key_value + inner + hidden + hidden) / plan.tp + hidden / plan.tp
    kept = selective if plan.activation_checkpointing != "full" else hidden / plan.tp
    per_logit = 4 if case.date >= "2025" and plan.compile else 14
    logits = per_logit * tokens * shape.vocab_size / plan.tp + 4 * tokens * hidden
    layer = 2 * tokens * (4 * hidden + (2 * hidden + 2 * key_value + 4 * inner) / plan.tp)
    redone = layer if plan.activation_checkpointing == "full" else 0.0
    return states + gathered + 2 * tokens * kept * shape.num_layers + max(logits, redone)
