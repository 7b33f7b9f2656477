"""The order of gathers, layers and reductions in real processes, and an unchanged result of `parallel.prefetch`."""

from functools import partial

import pytest
import torch
import torch.distributed as dist

from echelon.learn.model.parts import find_layers
from echelon.learn.objectives.causal_lm import CausalLM
from echelon.learn.parallel.data_parallel import ExchangeReduceScatter, find_units
from echelon.planner.plan import ParallelPlan
from tests.families import microbatch_of, small_config
from tests.parity.training import Row, build_engine, write_recipe

pytestmark = pytest.mark.dist

DEPTH = 4
CONFIG = {**small_config("llama"), "num_hidden_layers": DEPTH}
LAYERS = [f"gather {place}" for place in range(DEPTH)]
FSDP = {"dp_shard": 2, "reshard_after_forward": True, "reduce_gradients": "each"}


class Recorded:
    """An all-gather that notes which unit it gathers."""

    def __init__(self, name, diary):
        self._name, self._diary = name, diary

    def allocate(self, size, *, dtype, device):
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        self._diary.append(f"gather {self._name}")
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)


class Reduced(ExchangeReduceScatter):
    """A reduce-scatter that notes which unit it reduces, and how many numbers."""

    def __init__(self, name, diary):
        self._name, self._diary = name, diary

    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        self._diary.append(f"reduce {self._name} {input_tensor.numel()}")
        super().__call__(output_tensor, input_tensor, group, op)


def record_step(rank, world_size, path, plan, config):
    """The gathers, layers and reductions of one step in order, the loss, and the norm of the gradients."""
    engine, _ = build_engine(path, config, plan)
    diary = []
    layers = find_layers(engine.decoder)
    names = {engine.parallel.module: "rest", **{layer: str(place) for place, layer in enumerate(layers)}}
    for unit in find_units(engine.parallel.module):
        unit.set_custom_all_gather(Recorded(names.get(unit, "end"), diary))
        unit.set_custom_reduce_scatter(Reduced(names.get(unit, "end"), diary))
    for place, layer in enumerate(layers):  # inside the layer: after the gathers that its start triggers
        note = partial(lambda word, *_: diary.append(word), f"forward {place}")
        layer.input_layernorm.register_forward_pre_hook(note)
        note = partial(lambda word, *_: diary.append(word), f"backward {place}")
        layer.mlp.register_full_backward_pre_hook(note)
    microbatch = microbatch_of(torch.arange(32).view(2, 16) + rank)
    sums = engine.forward_backward(0, [microbatch], torch.tensor(32.0), CausalLM())
    return diary, float(sums.loss), float(engine.clip(None))


def orders(diary):
    """(forward, backward) parts of a diary, without reductions."""
    diary = [word for word in diary if not word.startswith("reduce")]
    turn = diary.index(f"forward {DEPTH - 1}") + 1
    return diary[:turn], diary[turn:]


@pytest.fixture(scope="module")
def path(text, tmp_path_factory):
    return str(write_recipe(Row(), tmp_path_factory.mktemp("prefetch"), text, steps=4))


@pytest.fixture(scope="module")
def recorded(workers, path):
    plans = {count: ParallelPlan("fsdp", prefetch=count, **FSDP) for count in (None, 1, 2)}
    return {count: workers.run(record_step, 2, path, plan, CONFIG)[0] for count, plan in plans.items()}


def test_gradients_of_the_head_are_reduced_beside_the_layers_and_those_of_the_embedding_last(recorded):
    """The head has 256 x 64 numbers, as the embedding; the norm has 64."""
    diary = recorded[None][0]
    assert diary.index("gather end") == diary.index(f"forward {DEPTH - 1}") + 1
    last = [word for word in diary if not word.startswith("gather")][DEPTH:]
    assert last[:2] == [f"reduce end {257 * 64}", f"backward {DEPTH - 1}"] and last[-1] == f"reduce rest {256 * 64}"


def test_a_tied_head_is_one_unit_with_the_embedding(workers, path):
    config = {**CONFIG, "tie_word_embeddings": True}
    diary = workers.run(record_step, 2, path, ParallelPlan("fsdp", **FSDP), config)[0][0]
    assert not any(" end" in word for word in diary) and diary[-1] == f"reduce rest {257 * 64}"


def test_layers_are_gathered_ahead_in_both_directions(recorded):
    forward, backward = orders(recorded[2][0])
    assert forward == [
        "gather rest", "gather 0", "gather 1", "gather 2", "forward 0", "gather 3", "forward 1", "gather end",
        "forward 2", "forward 3",
    ]  # fmt: skip
    assert backward == [
        "gather 3", "gather 2", "gather 1", "backward 3", "gather 0", "backward 2", "backward 1", "backward 0",
    ]  # fmt: skip
    forward, backward = orders(recorded[1][0])
    assert forward[:4] == ["gather rest", "gather 0", "gather 1", "forward 0"]
    assert backward[:3] == ["gather 3", "gather 2", "backward 3"]


def test_without_it_a_layer_is_gathered_as_it_starts(recorded):
    forward, _ = orders(recorded[None][0])
    assert forward[:5] == ["gather rest", "gather 0", "forward 0", "gather 1", "forward 1"]


@pytest.mark.parametrize("count", [1, 2])
def test_the_planned_number_of_layers_is_gathered_at_once(recorded, count):
    forward, _ = orders(recorded[count][0])
    gathered = [
        len([word for word in forward[:place] if word in LAYERS]) - int(word.split()[1])
        for place, word in enumerate(forward)
        if word.startswith("forward")
    ]
    assert max(gathered) == 1 + count


def test_the_result_and_the_number_of_gathers_do_not_change(recorded):
    plain, *others = recorded.values()
    for diary, loss, norm in others:
        assert (loss, norm) == plain[1:]
        assert sorted(diary) == sorted(plain[0])
