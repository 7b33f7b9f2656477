"""Compiled layers are whole graphs: Dynamo's counters after steps of a real engine."""

import logging
from functools import partial
from unittest import mock

import numpy as np
import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import aot_eager
from torch._functorch.partitioners import min_cut_rematerialization_partition

from echelon.learn.data.loader import build_microbatch
from echelon.learn.data.shards import Samples
from echelon.learn.model import compilation
from echelon.learn.objectives.causal_lm import CausalLM
from echelon.planner.plan import ParallelPlan, Precision
from tests.families import small_config
from tests.parity.training import Row, build_engine, prepare, with_ranks, write_recipe

pytestmark = pytest.mark.dist

# A Llama's layer has seven matrices, which a full checkpoint multiplies by again but for the last one.
SEVEN = {"none": (7, 14), "selective": (7, 14), "full": (7, 20)}
DECODERS = ["qwen2", "qwen3", "mistral", "gemma", "gemma2", "gemma3_text", "gpt2", "mixtral", "qwen3_moe"]


def build_batch(width, has_documents):
    """Two sequences; with documents, each has two."""
    tokens, places = np.zeros((2, width), dtype=np.int64), np.arange(2)
    documents = np.tile(np.arange(width, dtype=np.int32) * 2 // width, (2, 1)) if has_documents else None
    return build_microbatch(Samples(tokens, tokens, documents, has_documents), places, places)


def find_breaks(rank, world_size, path, family, has_documents, checkpointing):
    """The reasons of graph breaks in a step, and the number of graphs."""
    precision, graphs = Precision(compute="bfloat16"), []
    plan = ParallelPlan("ddp", compile=True, activation_checkpointing=checkpointing, precision=precision)

    def count(graph, inputs):
        graphs.append(graph)
        return aot_eager(graph, inputs)

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    engine, _ = build_engine(path, small_config(family), plan, count)
    engine.rehearse(build_batch(16, has_documents), 1, CausalLM())
    return dict(torch._dynamo.utils.counters["graph_break"]), len(graphs)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "adapter", "has_documents", "checkpointing"),
    [
        ("llama", "qlora", False, "none"),
        *(("llama", adapter, True, "none") for adapter in ("full", "lora", "qlora", "qlora fp4")),
        *(("llama", adapter, False, "full") for adapter in ("full", "lora", "qlora")),
        *(("llama", adapter, False, "selective") for adapter in ("full", "qlora")),
        *((family, adapter, True, "none") for family in DECODERS for adapter in ("full", "lora", "qlora")),
    ],
)
def test_no_graph_break(workers, text, tmp_path, family, adapter, has_documents, checkpointing):
    """One graph of the loss, and at most two of layers: the first layer's input needs no gradient with adapters."""
    recipe = write_recipe(Row(family=family, adapter=adapter), tmp_path, text, steps=4)
    [(breaks, num_graphs)] = workers.run(find_breaks, 1, str(recipe), family, has_documents, checkpointing)
    assert not breaks
    assert 2 <= num_graphs <= 3


def count_products(rank, world_size, path, plan, config):
    """The products in the graphs of forward and of backward passes, which layers share."""
    products = {"forward": 0, "backward": 0}

    def count(name, graph, inputs):
        products[name] += sum(node.target is torch.ops.aten.mm.default for node in graph.graph.nodes)
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    passes = {f"{name[0]}w_compiler": partial(count, name) for name in ("forward", "backward")}
    backend = aot_autograd(**passes, partition_fn=min_cut_rematerialization_partition)
    engine, meshes = build_engine(path, config, plan, backend)
    engine.rehearse(build_batch(16, False).cut(meshes.sequence_part), 1, CausalLM())
    return products


@pytest.mark.parametrize(
    ("parallel", "family", "expected"),
    [
        ({"dp_shard": 2, "ep": 2}, "mixtral", {"none": (5, 10), "selective": (5, 10), "full": (5, 10)}),
        pytest.param({"dp_shard": 1, "cp": 2}, "llama", SEVEN, marks=pytest.mark.slow),
        pytest.param({"dp_shard": 1, "cp": 2, "cp_method": "ulysses"}, "llama", SEVEN, marks=pytest.mark.slow),
    ],
)
def test_checkpointed_layers_that_exchange_inside_are_compiled(workers, text, tmp_path, parallel, family, expected):
    """All products but those of experts are in graphs. A selective checkpoint repeats none; a full one repeats those of
    a layer that is one graph, the last one excepted, and runs graphs again of a layer that is several."""
    found = {}
    for checkpointing in ("none", "selective", "full"):
        row = with_ranks(Row(parallel, family=family, compile=True, checkpointing=checkpointing), 2, micro_batch=2)
        path, plan = prepare(row, tmp_path / checkpointing, text, 4)
        ranks = workers.run(count_products, 2, str(path), plan, row.config())
        assert ranks[0] == ranks[1]
        found[checkpointing] = ranks[0]["forward"], ranks[0]["backward"]
    assert found == expected


def count_graphs(rank, world_size, path, compiles):
    """The number of graphs of a step, and the line about repeated compilations."""
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return aot_eager(graph, inputs)

    torch._dynamo.reset()
    torch._dynamo.utils.clear_compilation_metrics()
    engine, _ = build_engine(path, small_config("llama"), ParallelPlan("ddp", compile=compiles), count)
    engine.rehearse(build_batch(16, False), 1, CausalLM())
    return len(graphs), compilation.describe_recompiles()


@pytest.mark.slow
def test_the_optimizer_is_compiled_with_the_layers(workers, text, tmp_path):
    """Lion is one graph more than AdamW, whose kernel needs none."""
    lion, adamw = (write_recipe(Row(optimizer=name), tmp_path / name, text, steps=4) for name in ("lion", "adamw"))
    [(num_with_lion, line)] = workers.run(count_graphs, 1, str(lion), True)
    [(num_with_adamw, _)] = workers.run(count_graphs, 1, str(adamw), True)
    assert num_with_lion == num_with_adamw + 1 and line is None
    assert workers.run(count_graphs, 1, str(lion), False) == [(0, None)]


def train_in_many_shapes(rank, world_size, path, config, max_graphs):
    """Train and evaluate with batches of many widths: the graph breaks, the line at the end, the warnings."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch._dynamo.utils.clear_compilation_metrics()
    warnings, handler = [], logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())
    compilation.logger.addHandler(handler)
    try:
        with mock.patch.object(compilation, "MAX_GRAPHS", max_graphs):
            engine, _ = build_engine(path, config, ParallelPlan("ddp", compile=True), "eager")
        for width in (16, 32, 24, 64, 40, 8):
            engine.rehearse(build_batch(width, True), 1, CausalLM())
        with engine.evaluation(CausalLM()) as evaluation:
            for width in (16, 32, 24):
                evaluation.sums(build_batch(width, True))
    finally:
        compilation.logger.removeHandler(handler)
    return dict(torch._dynamo.utils.counters["graph_break"]), compilation.describe_recompiles(), warnings


def check_many_shapes(workers, text, folder, config, adapter, num_again, max_graphs=compilation.MAX_GRAPHS):
    recipe = write_recipe(Row(family=config["model_type"], adapter=adapter), folder, text, steps=4)
    [(breaks, line, warnings)] = workers.run(train_in_many_shapes, 1, str(recipe), config, max_graphs)
    assert line.startswith(f"compile: layers and the loss were compiled {num_again} more time")
    return breaks, warnings


@pytest.mark.slow
def test_two_graphs_serve_all_widths_and_one_evaluation(workers, text, tmp_path):
    """The first width, any width, and evaluation: two more than one. The loss: the first number of tokens, and any."""
    assert check_many_shapes(workers, text, tmp_path, small_config("llama"), "full", 3) == ({}, [])


@pytest.mark.slow
def test_adapters_need_two_more_graphs(workers, text, tmp_path):
    """One for the first layer, whose input needs no gradient, with the first width and with any. Layers with and
    without a window share graphs."""
    kinds = ["sliding_attention", "sliding_attention", "full_attention"]
    config = small_config("gemma3_text", num_hidden_layers=len(kinds), layer_types=kinds, sliding_window=8)
    assert check_many_shapes(workers, text, tmp_path, config, "lora", 5) == ({}, [])


@pytest.mark.slow
def test_the_limit_of_graphs_is_a_warning(workers, text, tmp_path):
    _, [warning] = check_many_shapes(workers, text, tmp_path, small_config("llama"), "full", 3, max_graphs=2)
    assert warning.startswith("compile: layers have been compiled for 2 shapes and modes, the most that are kept;")
    assert "Set data.packing: true" in warning


def test_graph_breaks_are_counted():
    torch._dynamo.utils.counters.clear()
    assert compilation.describe_graph_breaks() is None

    @torch.compile(backend="eager")
    def broken(values):
        total = values + 1
        torch._dynamo.graph_break()
        return total * 2

    broken(torch.ones(3))
    line = compilation.describe_graph_breaks()
    torch._dynamo.utils.counters.clear()
    assert line is not None and line.startswith("compile: 1 graph break, at which")
