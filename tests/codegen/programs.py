"""Compiles one part of a training step for an H100 that is not there: python -m tests.codegen.programs NAME FOLDER.

Prints JSON: how many kernels there are, those that failed, and the code that calls them.
"""

import json
import sys
from functools import partial
from pathlib import Path

from tests.codegen.fake_gpu import fake_tensors, install

TOKENS, VOCABULARY = 2048, 32000
ROWS, LENGTH, HIDDEN, HEADS, WIDTH, DOCUMENTS = 8, 2048, 2048, 16, 128, 64
PARAMETER = (2048, 5632)


def compile_graphs(function, *inputs):
    """Compile a function, and its backward pass if an input needs a gradient, as inductor does."""
    from torch._functorch.aot_autograd import aot_function, make_boxed_func
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.decomposition import select_decomp_table

    def compile_graph(graph, examples, is_backward):
        compile_fx_inner(graph, examples, is_backward=is_backward)
        return make_boxed_func(graph.forward)

    compiled = aot_function(
        function,
        fw_compiler=partial(compile_graph, is_backward=False),
        bw_compiler=partial(compile_graph, is_backward=True),
        partition_fn=min_cut_rematerialization_partition,
        decompositions=select_decomp_table(),
    )
    result = compiled(*inputs)
    if any(each.requires_grad for each in inputs):
        result.sum().backward()


def compile_loss(cap):
    import torch

    from echelon.learn.model.parts import HeadArithmetic
    from echelon.learn.objectives.loss import loss_and_gradient

    logits = torch.empty(TOKENS, VOCABULARY, device="cuda", dtype=torch.bfloat16)
    labels = torch.zeros(TOKENS, device="cuda", dtype=torch.long)
    compile_graphs(lambda *inputs: loss_and_gradient(*inputs, HeadArithmetic(1.0, cap), 1.0), logits, labels)


def compile_layer(key_heads):
    """A layer of Llama on packed documents. Plain causal attention is not traced: torch asks the driver what it can."""
    import torch
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    import echelon.learn.model.attention
    from echelon.learn.model.varlen_attention import VARLEN

    assert echelon.learn.model.attention  # registers the kernels by name
    config = LlamaConfig(
        hidden_size=HIDDEN, intermediate_size=5504, num_attention_heads=HEADS, num_key_value_heads=key_heads,
        num_hidden_layers=1, max_position_embeddings=LENGTH,
    )  # fmt: skip
    config._attn_implementation = VARLEN
    layer = LlamaDecoderLayer(config, 0)
    new = partial(torch.empty, device="cuda", dtype=torch.bfloat16)
    weights = {name: new(each.shape).requires_grad_() for name, each in layer.named_parameters()}
    starts = torch.empty(DOCUMENTS + 1, device="cuda", dtype=torch.int32)

    def run(hidden, cosine, sine, starts, *values):
        options = {"position_embeddings": (cosine, sine), "attention_mask": None}
        options |= {"cu_seq_lens_q": starts, "max_length_q": LENGTH}
        weights_now = dict(zip(weights, values, strict=True))
        return torch.func.functional_call(layer, weights_now, (hidden,), options)

    rotations = [new(ROWS, LENGTH, WIDTH) for _ in range(2)]
    compile_graphs(run, new(ROWS, LENGTH, HIDDEN).requires_grad_(), *rotations, starts, *weights.values())


def compile_update(rule, num_coefficients, weight, gradient, state, tables=None, lines=None):
    """The update of one parameter: see `update_stored`."""
    import torch

    from echelon.learn.optimizer.compiled_update import update_stored

    given = [weight, gradient, *state.values(), *(tables or {}).values(), *(lines or ())]
    coefficients, commit = _new(num_coefficients), _new((), torch.bool)

    def run(*inputs):
        weight, gradient, *rest, coefficients, commit = inputs
        rest = iter(rest)
        moments, codes = ({key: next(rest) for key in found or {}} for found in (state, tables))
        update_stored(rule, weight, gradient, moments, codes, lines and (*rest,), coefficients, commit)

    compile_graphs(run, *given, coefficients, commit)


def _new(shape, dtype=None):
    import torch

    return torch.empty(shape, device="cuda", dtype=dtype)


def compile_lion():
    from echelon.learn.optimizer.rules import Lion

    compile_update(Lion((0.9, 0.99)), 4, _new(PARAMETER), _new(PARAMETER), {"momentum": _new(PARAMETER)})


def compile_adamw(storage):
    """AdamW with fp32 weights, with bf16 ones that have a remainder or are rounded at random, or with 8-bit moments."""
    import torch

    from echelon.learn.optimizer.eight_bit import num_blocks
    from echelon.learn.optimizer.rules import AdamW

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


def compile_muon():
    from echelon.learn.optimizer.muon import orthogonalize

    compile_graphs(orthogonalize, _new(PARAMETER))


PROGRAMS = {
    "loss": partial(compile_loss, None),
    "capped loss": partial(compile_loss, 30.0),
    "layer": partial(compile_layer, HEADS),
    "layer with repeated heads": partial(compile_layer, 4),
    "lion": compile_lion,
    "adamw": partial(compile_adamw, "plain"),
    "adamw, bf16 weights with a remainder": partial(compile_adamw, "remainder"),
    "adamw, bf16 weights rounded at random": partial(compile_adamw, "random"),
    "adamw, 8-bit moments": partial(compile_adamw, "packed"),
    "muon": compile_muon,
}


def main():
    name, folder = sys.argv[1:]
    compiled = install(Path(folder))
    with fake_tensors():
        PROGRAMS[name]()
    print(json.dumps({"kernels": compiled.kernels.total(), "failures": compiled.failures, "code": compiled.code}))


if __name__ == "__main__":
    main()
