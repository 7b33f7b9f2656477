"""Activation offloading: gradients, the order of copies, what moves and how long it stays; a GPU shows the speed."""

from functools import partial

import pytest
import torch
from torch import nn

from echelon.learn.model.compilation import apply_compile
from echelon.learn.model.parts import find_layers
from echelon.learn.objectives.causal_lm import CausalLM
from echelon.learn.objectives.outputs import ObjectiveModule
from echelon.learn.parallel.kept_activations import checkpoint_activations, offload_activations
from tests.families import small_model
from tests.late_copies import LateCopies
from tests.unit.learn.model.test_document_mask import packed

DEPTH = 4
DROPOUT = {"attn_pdrop": 0.1, "resid_pdrop": 0.1, "n_layer": DEPTH}


def build(family="llama", side=None, checkpointing="none", compiles=False, smallest=1, horizon=1, **fields):
    """A small model, offloaded if `side` is given."""
    depth = {} if family == "gpt2" else {"num_hidden_layers": DEPTH}
    model = small_model(family, **depth, **fields).train()
    layers = find_layers(model)
    checkpoint_activations(layers, checkpointing)
    if compiles:
        apply_compile(layers, "aot_eager")
    if side is not None:
        offload_activations(layers, side, smallest, horizon)
    return model


def differentiate(model, precision=torch.float32):
    """The loss of packed documents; gradients are left in the model."""
    torch.manual_seed(0)
    module = ObjectiveModule(model)
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == torch.bfloat16):
        loss = module(packed(), CausalLM().loss_sum)
    loss.backward()
    return loss


def assert_same_gradients(model, expected):
    for (name, parameter), other in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(parameter.grad, other.grad), name


@pytest.mark.parametrize("early", [False, True], ids=["late", "early"])
@pytest.mark.parametrize(
    ("family", "precision", "options"),
    [
        ("llama", torch.float32, {}),
        ("llama", torch.bfloat16, {}),
        ("llama", torch.float32, {"checkpointing": "full"}),
        ("gpt2", torch.float32, DROPOUT),
        ("gpt2", torch.bfloat16, {"checkpointing": "full", **DROPOUT}),
        ("gemma2", torch.bfloat16, {}),
        ("mixtral", torch.float32, {}),
    ],
)
def test_gradients_are_the_same_bit_for_bit(family, precision, options, early):
    side = LateCopies(early)
    plain, offloaded = build(family, **options), build(family, side, **options)
    for _ in range(2):  # in the second step buffers are used again
        assert torch.equal(differentiate(plain, precision), differentiate(offloaded, precision))
    assert_same_gradients(offloaded, plain)
    assert side.diary.count("save") == side.diary.count("load") > 0


@pytest.mark.slow
def test_compiled_layers_offload_what_full_checkpointing_keeps():
    side = LateCopies()
    torch._dynamo.reset()
    hidden = 2 * 32 * 64 * 4  # larger than the state of the random generator, which is saved too
    plain, offloaded = (build(side=each, checkpointing="full", compiles=True, smallest=hidden) for each in (None, side))
    differentiate(plain)
    differentiate(offloaded)
    assert_same_gradients(offloaded, plain)
    assert side.diary.count("save") == side.diary.count("load") == DEPTH - 1


def watch(model, side, on_forward=lambda place: None, on_backward=lambda place: None):
    """Note in the diary which layer begins to run; call the functions when a layer has run, and as backward begins."""

    def begin(place, *_):
        side.layer = place
        side.diary.append(f"forward {place}")

    def turn(place, gradient):
        side.layer = place
        side.diary.append(f"backward {place}")
        on_backward(place)

    def end(place, module, inputs, output):
        on_forward(place)
        output.register_hook(partial(turn, place))

    for place, layer in enumerate(find_layers(model)):
        layer.register_forward_pre_hook(partial(begin, place))
        layer.register_forward_hook(partial(end, place))


def test_copies_run_beside_the_next_layer_and_come_back_one_layer_ahead():
    """With full checkpointing a layer saves one tensor. Nothing waits for the copy of the layer that runs."""
    side = LateCopies()
    model = build(side=side, checkpointing="full")
    watch(model, side)
    differentiate(model)
    assert side.diary == [
        "forward 0", "save",
        "forward 1", "save", "wait",
        "forward 2", "save", "wait",
        "forward 3", "wait",
        "backward 3", "load",
        "backward 2", "wait", "load",
        "backward 1", "wait", "load",
        "backward 0", "wait",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("horizon", "backward"),
    [
        (0, ["backward 3", "backward 2", "load", "wait", "backward 1", "load", "wait", "backward 0", "load", "wait"]),
        (2, ["backward 3", "load", "load", "backward 2", "wait", "load", "backward 1", "wait", "backward 0", "wait"]),
        (9, ["backward 3", "load", "load", "load", "backward 2", "wait", "backward 1", "wait", "backward 0", "wait"]),
    ],
)
def test_layers_come_back_as_far_ahead_as_the_horizon(horizon, backward):
    """With full checkpointing a layer saves one tensor, and the last one, which comes first, keeps it on the device."""
    side, plain = LateCopies(), build(checkpointing="full")
    model = build(side=side, checkpointing="full", horizon=horizon)
    watch(model, side)
    differentiate(model)
    differentiate(plain)
    assert side.diary[side.diary.index("backward 3") :] == backward
    assert_same_gradients(model, plain)


def test_the_device_holds_what_the_running_layer_saved_and_no_more():
    """Of earlier layers only the embeddings remain, which `transformers` holds itself."""
    side, forward, backward = LateCopies(), {}, {}
    model = build(side=side)

    def look_forward(place):
        forward[place] = side.layers_on_device("save") - {0}

    def look_back(place):
        backward[place] = side.layers_on_device("load")

    watch(model, side, look_forward, look_back)
    differentiate(model)
    assert forward == {0: set(), 1: {1}, 2: {2}, 3: set()}
    # while layer 3 is differentiated, what layer 2 saved is loaded, and so on
    assert backward == {3: set(), 2: {3}, 1: {2}, 0: {1}}
    assert not side.layers_on_device("load")


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16], ids=str)
def test_storages_move_once_and_weights_masks_and_rotary_tables_not_at_all(precision):
    """Nor the copies of weights that autocast makes. The sizes are such that none is that of another tensor."""
    side, width, inner, tokens, number = LateCopies(), 96, 136, 2 * 32, precision.itemsize
    model = build(side=side, hidden_size=width, intermediate_size=inner)
    watch(model, side)
    differentiate(model, precision)
    assert {layer for layer, *_ in side.moved["save"]} == {0, 1, 2}  # what the last layer saves stays
    places = [(layer, address) for layer, address, *_ in side.moved["save"]]
    assert len(places) == len(set(places))
    sizes = {size for _, _, size, _ in side.moved["save"]}
    assert {number * tokens * each for each in (width, inner)} <= sizes
    weights = {number * width * each for each in (width, width // 2, inner)}
    tables = {tokens * 32} if precision != torch.float32 else {tokens * 32, tokens * width // 4 * number}
    assert not sizes & (weights | tables)


def test_small_tensors_stay():
    side = LateCopies()
    smallest = 2 * 32 * 128 * 4
    differentiate(build(side=side, smallest=smallest))
    assert {size for _, _, size, _ in side.moved["save"]} == {smallest}


def test_buffers_are_used_again_also_if_there_was_no_backward_pass():
    side = LateCopies()
    model = build(side=side)
    differentiate(model)
    count = len(side.buffers)
    module = ObjectiveModule(model)
    for _ in range(2):
        module(packed(), CausalLM().loss_sum)
        differentiate(model)
    assert len(side.buffers) == count
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def test_a_pass_that_is_abandoned_leaves_no_copy_behind():
    """Neither one on its way to the host, nor one on its way back: both would use memory that is free again."""
    side, plain = LateCopies(), build()
    model = build(side=side)
    layers = find_layers(model)
    rotary = model.model.rotary_emb(torch.ones(1, 4, 64), torch.arange(4)[None])
    for _ in range(2):
        hidden = torch.ones(1, 4, 64, requires_grad=True)
        for layer in layers[:2]:
            hidden = layer(hidden, position_embeddings=rotary)
    del hidden

    def fail(gradient):
        raise ValueError("in the middle")

    module = ObjectiveModule(model)
    handle = layers[2].register_forward_hook(lambda *parts: parts[-1].register_hook(fail) and None)
    with pytest.raises(ValueError, match="in the middle"):
        module(packed(), CausalLM().loss_sum).backward()
    handle.remove()
    model.zero_grad()
    for each in (model, plain):
        differentiate(each)
    assert_same_gradients(model, plain)


def test_nothing_moves_without_gradients():
    side = LateCopies()
    with torch.no_grad():
        ObjectiveModule(build(side=side).eval())(packed(), CausalLM().loss_sum)
    assert not side.diary


def test_a_graph_can_be_differentiated_twice():
    plain, offloaded = build(), build(side=LateCopies())
    for model in (plain, offloaded):
        total = model.model(packed().input_ids, use_cache=False).last_hidden_state.square().sum()
        total.backward(retain_graph=True)
        total.backward()
    for ours, theirs in zip(find_layers(offloaded).parameters(), find_layers(plain).parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


class InPlace(nn.Module):
    """Changes what the exponential saved for its backward pass."""

    def forward(self, hidden):
        return hidden.exp().mul_(2)


def test_a_saved_tensor_that_is_changed_in_place_is_refused():
    layers = nn.ModuleList([InPlace(), nn.Linear(8, 8), nn.Linear(8, 8)])
    offload_activations(layers, LateCopies(), 1)
    hidden = layers[0](torch.ones(4, 8, requires_grad=True))
    with pytest.raises(RuntimeError, match=r"shape \(4, 8\) .* changed in place; .*activation_offloading=false"):
        layers[1](hidden)
