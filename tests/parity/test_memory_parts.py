"""The memory of a step by part, measured in the rehearsal, compared with values by hand."""

from dataclasses import astuple, replace

import pytest
import torch

from echelon.learn.objectives.causal_lm import CausalLM
from echelon.planner.memory import estimate_parts
from echelon.planner.plan import ParallelPlan
from echelon.planner.shape import build_shape
from tests.families import microbatch_of, small_config
from tests.parity.training import Row, build_engine, write_recipe

pytestmark = pytest.mark.dist

CONFIG = small_config("llama")
# Width 64, keys and values 32, MLP 128, 2 layers, 256 tokens in the vocabulary: 7 matrices and 2 norms in a layer.
LAYER = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128 + 2 * 64
PARAMETERS, TENSORS = 2 * LAYER + 2 * 256 * 64 + 64, 2 * 9 + 3
BATCH, LENGTH = 4, 64
TOKENS = BATCH * LENGTH
# A norm keeps its input, the normed input, and its output. Attention keeps query, key, value, output, and a number per
# head. The MLP keeps gate, its activation, up, and their product. All in fp32, as are the tables of positions.
NORM = 4 * 3 * 64
KEPT = 2 * NORM + 4 * (2 * 64 + 2 * 32 + 4) + 4 * 4 * 128
POSITIONS = 2 * LENGTH * 16 * 4
# The hidden states, which the planner counts for the loss. They are measured with the activations.
HIDDEN = 4 * TOKENS * 64
# The logits and their gradient; the gradient of the hidden states; that of the head.
LOSS = 2 * 4 * TOKENS * 256 + HIDDEN + 4 * 256 * 64


def measure(rank, world_size, path, plan, config=CONFIG):
    """The measured parts, and those of the planner."""
    torch._dynamo.reset()
    engine, meshes = build_engine(path, config, plan, "aot_eager")
    tokens = torch.randint(0, 256, (BATCH, LENGTH), generator=torch.Generator().manual_seed(0))
    rehearsal = engine.rehearse(microbatch_of(tokens).cut(meshes.sequence_part), plan.num_microbatches, CausalLM())
    return rehearsal.memory, estimate_parts(build_shape(config), replace(plan, sequence_len=LENGTH), "cpu")


def measure_both(workers, text, tmp_path, plan, config=CONFIG):
    recipe = write_recipe(Row(), tmp_path, text, steps=4)
    plan = replace(plan, micro_batch_size=BATCH, num_microbatches=2)
    first, second = workers.run(measure, 2, str(recipe), plan, config)
    assert first == second, "every rank knows the largest of all"
    return first


DDP = ParallelPlan("ddp", dp_replicate=2)
TP = {"dp_replicate": 1, "tp": 2, "sequence_parallel": True}
FSDP = ParallelPlan("fsdp", dp_shard=2, reshard_after_forward=True, reduce_gradients="each")


@pytest.mark.parametrize(("plan", "share"), [(DDP, 1), (FSDP, 2)], ids=["ddp", "fsdp"])
def test_parts_by_hand(workers, text, tmp_path, plan, share):
    measured, planned = measure_both(workers, text, tmp_path, plan)
    tables = 2 * 8 * 4  # the frequencies of rotary positions, twice
    assert (measured.weights, measured.gradients) == (4 * PARAMETERS // share + tables, 4 * PARAMETERS // share)
    assert measured.optimizer == 8 * PARAMETERS // share + 4 * TENSORS  # each tensor counts its steps
    assert measured.activations == pytest.approx(TOKENS * (2 * KEPT + NORM) + POSITIONS, rel=0.05)
    assert measured.loss == pytest.approx(LOSS, rel=0.05)

    assert measured.weights == planned.weights + tables and measured.gradients == planned.gradients
    assert measured.optimizer == planned.optimizer + 4 * TENSORS
    assert measured.activations == pytest.approx(planned.activations, rel=0.1)
    assert measured.loss == pytest.approx(planned.loss - HIDDEN, rel=0.02)


@pytest.mark.parametrize(
    "kept",
    [
        {"activation_checkpointing": "full", "checkpoint_every": 2},
        pytest.param({"activation_checkpointing": "selective"}, marks=pytest.mark.slow),
        pytest.param({**TP, "activation_checkpointing": "selective"}, marks=pytest.mark.slow),
        pytest.param({"compile": True, "activation_memory_budget": 0.5}, marks=pytest.mark.slow),
        pytest.param({"compile": True, "activation_memory_budget": 0.0}, marks=pytest.mark.slow),
        pytest.param({"compile": True}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_the_planned_peak_of_layers_that_are_recomputed(workers, text, tmp_path, kept):
    measured, planned = measure_both(workers, text, tmp_path, replace(DDP, **kept))
    assert measured.activations - HIDDEN == pytest.approx(planned.activations, rel=0.1)
    assert sum(astuple(measured)) == pytest.approx(sum(astuple(planned)), rel=0.15)


MOE = small_config("qwen3_moe", moe_intermediate_size=64, num_experts_per_tok=4)
CP = replace(FSDP, dp_shard=1, cp=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plan", "config"),
    [
        (replace(CP, cp_method="allgather"), CONFIG),
        (replace(CP, cp_method="ulysses"), CONFIG),
        (replace(CP, cp_method="ring"), CONFIG),
        (replace(FSDP, ep=2), MOE),
    ],
    ids=["allgather", "ulysses", "ring", "ep"],
)
def test_what_was_sent_is_kept_by_selective_checkpointing(workers, text, tmp_path, plan, config):
    """The rehearsal, in which nothing is sent, holds as much as a step."""
    plan = replace(plan, activation_checkpointing="selective")
    measured, planned = measure_both(workers, text, tmp_path, plan, config)
    assert measured.activations - HIDDEN // plan.cp == pytest.approx(planned.activations, rel=0.06)


def test_gradients_wait_for_those_of_the_weights(workers, text, tmp_path):
    """Under `zero_bubble` the last of two stages keeps, twice, the gradient of the output of each product and norm."""
    plan = ParallelPlan("pp", pp=2, schedule="zero_bubble", stages=(1, 1), reduce_gradients="last")
    measured, planned = measure_both(workers, text, tmp_path, plan)
    query, key_value, width, last_norm = 64, 2 * 32, 64, 64
    waiting = 4 * TOKENS * (query + key_value + width + 2 * 128 + width + 2 * 64 + last_norm)
    # When they are there, the loss is over. A layer's backward pass holds a few tensors of the hidden size beside them.
    assert 0 <= measured.other - (2 * waiting - (measured.loss - HIDDEN)) < 8 * HIDDEN
    assert sum(astuple(measured)) == pytest.approx(sum(astuple(planned)), rel=0.1)


def test_checkpointed_layers_keep_their_inputs(workers, text, tmp_path):
    measured, _ = measure_both(workers, text, tmp_path, replace(DDP, activation_checkpointing="full"))
    by_hand = TOKENS * (2 * 4 * 64 + NORM) + POSITIONS
    assert measured.activations == pytest.approx(by_hand, rel=0.05)
    # Backward recomputes a layer, which needs more than the loss, which is over by then.
    assert 0 < measured.other < TOKENS * KEPT
