"""What a rank stores and sends under expert parallelism is what docs/expert-parallelism.md says."""

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from echelon.learn.objectives.causal_lm import CausalLM
from echelon.planner.plan import ParallelPlan
from echelon.planner.shape import build_shape
from tests.families import microbatch_of, small_config
from tests.parity.training import Row, build_engine, write_recipe

pytestmark = [pytest.mark.dist, pytest.mark.slow]

CONFIG = small_config("mixtral")
TOKENS, WIDTH, NUM_EXPERTS, CHOSEN, LAYERS = 8, 64, 4, 2, 2
PLAN = ParallelPlan("fsdp+ep", dp_shard=4, ep=2, reshard_after_forward=True, reduce_gradients="each")


class Payloads(TorchDispatchMode):
    """Counts collectives by name and bytes: of the whole tensor, or of an all-to-all what this rank gives to it."""

    def __init__(self):
        super().__init__()
        self.found = Counter()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if operation.namespace in ("c10d", "_c10d_functional"):
            name = operation.__name__.split(".")[0].replace("all_to_all_single", "alltoall_base_")
            tensor = args[1] if operation is torch.ops.c10d.alltoall_base_.default else args[0]
            if isinstance(tensor, torch.Tensor):
                self.found[name, tensor.numel() * tensor.element_size()] += 1
        return operation(*args, **(kwargs or {}))


def run_step(rank, world_size, path):
    """The numbers that this rank stores, and the collectives of a step of one microbatch."""
    engine, _ = build_engine(path, CONFIG, PLAN)
    microbatch = microbatch_of(torch.arange(TOKENS)[None] + 20 * rank)
    engine.rehearse(microbatch, 1, CausalLM())
    with Payloads() as payloads:
        engine.forward_backward(0, [microbatch], torch.tensor(1.0), CausalLM())
    stored = {key: sum(part.numel() for part in each.values()) for key, each in
              (("weights", engine.weights()), ("gradients", engine.gradients()))}  # fmt: skip
    return stored, payloads.found


def test_a_rank_stores_and_sends_what_the_page_says(workers, text, tmp_path):
    recipe = write_recipe(Row(family="mixtral"), tmp_path, text, steps=4)
    shape = build_shape(CONFIG)
    experts = shape.num_layer_experts
    rest = shape.num_layer_parameters - experts
    table = shape.num_embedding_parameters
    outside = {4 * table: 1, 4 * (table + WIDTH): 1}  # the embedding; the head and the norm before it
    everyone = workers.run(run_step, 4, str(recipe))
    rows = Counter()
    for stored, found in everyone:
        assert set(stored.values()) == {shape.num_parameters // 4}
        gathers = {bytes: count for (name, bytes), count in found.items() if name == "_allgather_base_"}
        assert gathers == {4 * experts // 2: 2 * LAYERS, 4 * rest: 2 * LAYERS, **outside}
        sent = Counter({bytes: count for (name, bytes), count in found.items() if name == "alltoall_base_"})
        fixed = Counter({4 * experts // 2: LAYERS, 4 * rest: LAYERS, **outside, 8 * NUM_EXPERTS: LAYERS})
        assert fixed <= sent
        tokens = sent - fixed
        assert tokens.total() == 4 * LAYERS
        assert tokens[4 * WIDTH * TOKENS * CHOSEN] >= 2 * LAYERS, "all pairs are sent, and all results come back"
        rows.update(tokens)
    assert sum(bytes * count for bytes, count in rows.items()) == 4 * 4 * LAYERS * 4 * WIDTH * TOKENS * CHOSEN
