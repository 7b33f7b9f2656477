"""Compiled layers are whole graphs: Dynamo's counters after steps of a real engine."""

from pathlib import Path

import numpy as np
import pytest
import torch

from echelon.data.loader import build_microbatch
from echelon.data.shards import Samples
from echelon.distributed.mesh import build_mesh
from echelon.engines.native import build_native_engine
from echelon.model.build import load_config
from echelon.objectives.causal_lm import CausalLM
from echelon.planner.plan import ParallelPlan, Precision
from echelon.recipe import load_recipe
from families import small_config
from training import Row, write_recipe

pytestmark = pytest.mark.dist

DECODERS = ["qwen2", "qwen3", "mistral", "gemma", "gemma2", "gemma3_text", "gpt2", "mixtral", "qwen3_moe"]


def build_batch(width, has_documents):
    """Two sequences; with documents, each has two."""
    tokens, places = np.zeros((2, width), dtype=np.int64), np.arange(2)
    documents = np.tile(np.arange(width, dtype=np.int32) * 2 // width, (2, 1)) if has_documents else None
    return build_microbatch(Samples(tokens, tokens, documents, has_documents), places, places)


def find_breaks(rank, world_size, path, family, has_documents, checkpointing):
    """The reasons of graph breaks in a step, and the number of graphs."""
    recipe, _ = load_recipe(Path(path))
    plan = ParallelPlan(
        "ddp", compile=True, activation_checkpointing=checkpointing, precision=Precision(compute="bfloat16")
    )
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    meshes, config = build_mesh(plan, "cpu"), load_config(small_config(family))
    engine = build_native_engine(recipe, config, plan, meshes, CausalLM(), torch.device("cpu"), count)
    engine.rehearse(build_batch(16, has_documents), 1)
    return dict(torch._dynamo.utils.counters["graph_break"]), len(graphs)


@pytest.mark.parametrize(
    ("family", "adapter", "has_documents", "checkpointing"),
    [
        ("llama", "qlora", False, "none"),
        *(
            pytest.param(family, adapter, has_documents, checkpointing, marks=pytest.mark.slow)
            for family, adapter, has_documents, checkpointing in [
                *(("llama", adapter, True, "none") for adapter in ("full", "lora", "qlora", "qlora fp4")),
                *(("llama", adapter, False, "full") for adapter in ("full", "lora", "qlora")),
                *(("llama", adapter, False, "selective") for adapter in ("full", "qlora")),
                *((family, adapter, True, "none") for family in DECODERS for adapter in ("full", "lora", "qlora")),
            ]
        ),
    ],
)
def test_no_graph_break(workers, text, tmp_path, family, adapter, has_documents, checkpointing):
    """At most two graphs: the input of the first of two layers needs no gradient if only adapters are trained."""
    recipe = write_recipe(Row(family=family, adapter=adapter), tmp_path, text, steps=4)
    [(breaks, num_graphs)] = workers.run(find_breaks, 1, str(recipe), family, has_documents, checkpointing)
    assert not breaks
    assert 1 <= num_graphs <= 2
