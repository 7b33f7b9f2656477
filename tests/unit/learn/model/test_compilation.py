"""Layers compiled inside DDP: each is one graph, whatever the size of the buckets."""

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from echelon.learn.model.compilation import apply_compile
from echelon.learn.model.parts import find_layers
from tests.families import small_model


@pytest.fixture
def one_process():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    torch._dynamo.reset()


def test_ddp_does_not_cut_the_graph_of_a_layer(one_process, monkeypatch):
    """By default Dynamo compiles a graph for each bucket, here one for each parameter."""
    graphs = []

    def record(graph, _):
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(dist, "_DEFAULT_FIRST_BUCKET_BYTES", 1)
    model = small_model("llama", num_hidden_layers=2).train().base_model
    with torch._dynamo.config.patch(optimize_ddp=True):
        apply_compile(find_layers(model), record)
        divided = DistributedDataParallel(model, bucket_cap_mb=1e-5)
        divided(torch.zeros(2, 16, dtype=torch.int64), use_cache=False).last_hidden_state.sum().backward()
    assert len(graphs) == 1
