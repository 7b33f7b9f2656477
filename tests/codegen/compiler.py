"""A backend of `torch.compile` that compiles each graph with inductor, and then interprets it on fake tensors."""

from functools import partial

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.decomposition import select_decomp_table


def backend():
    """The decompositions and the division into forward and backward graphs are inductor's."""
    return aot_autograd(
        fw_compiler=partial(_compile, is_backward=False),
        bw_compiler=partial(_compile, is_backward=True),
        partition_fn=min_cut_rematerialization_partition,
        decompositions=select_decomp_table(),
    )


def _compile(graph, examples, is_backward):
    compile_fx_inner(graph, examples, is_backward=is_backward)
    return make_boxed_func(graph.forward)


def compile_alone(function):
    """Compile a function of fake tensors, as one graph."""
    return torch.compile(function, backend=backend(), fullgraph=True)
