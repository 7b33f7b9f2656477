"""The parts of a training step that `python -m tests.codegen` compiles, by name."""

from functools import partial

import torch

from echelon.learn.model.parts import HeadArithmetic
from echelon.learn.objectives.loss import loss_and_gradient
from echelon.learn.optimizer.adafactor import Adafactor
from echelon.learn.optimizer.muon import orthogonalize
from echelon.learn.optimizer.rules import AdamW, Lion, MomentumSGD
from echelon.learn.optimizer.slot import num_blocks
from echelon.learn.optimizer.stepper import update_stored
from tests.codegen.compiler import compile_alone
from tests.codegen.layers import compile_capped, compile_layer, compile_liger

TOKENS, VOCABULARY = 2048, 32000
PARAMETER = (2048, 5632)


def compile_loss(cap):
    logits = torch.empty(TOKENS, VOCABULARY, device="cuda", dtype=torch.bfloat16)
    labels = torch.zeros(TOKENS, device="cuda", dtype=torch.long)
    compile_alone(lambda *inputs: loss_and_gradient(*inputs, HeadArithmetic(1.0, cap), 1.0))(logits, labels)


def compile_update(rule, num_coefficients, weight, gradient, state, tables=None, lines=None):
    """The update of one parameter: see `update_stored`."""
    update = compile_alone(partial(update_stored, rule))
    update(weight, gradient, state, tables or {}, lines, _new(num_coefficients), _new((), torch.bool))


def _new(shape, dtype=None):
    return torch.empty(shape, device="cuda", dtype=dtype)


def compile_lion():
    compile_update(Lion((0.9, 0.99)), 4, _new(PARAMETER), _new(PARAMETER), {"momentum": _new(PARAMETER)})


def compile_sgd():
    """Of bf16 weights with a remainder: fp32 ones have PyTorch's own kernel."""
    weight, state = _new(PARAMETER, torch.bfloat16), {"momentum": _new(PARAMETER)}
    state["remainder"] = _new(PARAMETER, torch.bfloat16)
    compile_update(MomentumSGD(0.9), 3, weight, _new(PARAMETER, torch.bfloat16), state)


def compile_adamw(storage):
    """AdamW with fp32 weights, with bf16 ones that have a remainder or are rounded at random, or with 8-bit moments."""
    dtype = torch.bfloat16 if storage in ("remainder", "random") else torch.float32
    state = {"exp_avg": _new(PARAMETER), "exp_avg_sq": _new(PARAMETER)}
    options = {}
    if storage == "remainder":
        state["remainder"] = _new(PARAMETER, dtype)
    elif storage == "random":
        rows, width = PARAMETER
        options["lines"] = (_new((rows, 1), torch.int32), _new((1, width), torch.int32))
    elif storage == "packed":
        scales = (PARAMETER[0], num_blocks(PARAMETER[1]))
        state = {
            f"{key}.{part}": _new(*kind)
            for key in state
            for part, kind in (("codes", (PARAMETER, torch.uint8)), ("scales", (scales,)))
        }
        options["tables"] = {True: _new(256), False: _new(256)}
    compile_update(AdamW((0.9, 0.99), 1e-8), 7, _new(PARAMETER, dtype), _new(PARAMETER, dtype), state, **options)


def compile_adafactor():
    """Its three passes over a parameter."""
    passes, (rows, width) = Adafactor().compiled(compile_alone).passes, PARAMETER
    passes.sum_squares(_new(PARAMETER))
    passes.find_update(_new(PARAMETER), _new(PARAMETER), _new((rows, 1)), _new((1, width)), _new((1, 1)))
    passes.move(_new(PARAMETER), _new(PARAMETER), _new(()), _new(()), _new((), torch.bool))


def compile_muon():
    compile_alone(orthogonalize)(_new(PARAMETER))


PROGRAMS = {
    "loss": partial(compile_loss, None),
    "capped loss": partial(compile_loss, 30.0),
    "layer": compile_layer,
    "layer with repeated heads": partial(compile_layer, key_heads=4),
    "layer, plain causal": partial(compile_layer, key_heads=4, packed=False),
    "layer, selective": partial(compile_layer, key_heads=4, kept="selective"),
    "layer, full": partial(compile_layer, key_heads=4, kept="full"),
    "layer, plain causal, full": partial(compile_layer, key_heads=4, packed=False, kept="full"),
    "layer on two ranks, selective": partial(compile_layer, key_heads=4, packed=False, cp="ulysses", kept="selective"),
    "layer of experts, selective": partial(compile_layer, model_type="mixtral", key_heads=4, kept="selective"),
    "layer with LoRA": partial(compile_layer, method="lora"),
    "layer with LoRA, selective": partial(compile_layer, method="lora", kept="selective"),
    "layer with LoRA, full": partial(compile_layer, method="lora", kept="full"),
    "layer with QLoRA": partial(compile_layer, method="qlora"),
    "layer in float8": partial(compile_layer, float8=True),
    "layer with Liger's kernels": compile_liger,
    "layer with soft-capped attention": compile_capped,
    "lion": compile_lion,
    "sgd, bf16 weights with a remainder": compile_sgd,
    "adamw": partial(compile_adamw, "plain"),
    "adamw, bf16 weights with a remainder": partial(compile_adamw, "remainder"),
    "adamw, bf16 weights rounded at random": partial(compile_adamw, "random"),
    "adamw, 8-bit moments": partial(compile_adamw, "packed"),
    "adafactor": compile_adafactor,
    "muon": compile_muon,
}
