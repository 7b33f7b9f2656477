"""Under DDP a rank has each gradient once: it is a view of a bucket, during and between steps."""

import pytest
import torch

from echelon.learn.objectives.causal_lm import CausalLM
from echelon.learn.parallel import data_parallel
from echelon.planner.plan import ParallelPlan, Precision
from tests.families import microbatch_of, small_config
from tests.parity.training import Row, build_engine, write_recipe

pytestmark = pytest.mark.dist

NUM_STEPS = 3


def observe(rank, world_size, path, precision, num_microbatches):
    """In each step, the storages of buckets and of gradients, and whether backward passes found gradients; bytes."""
    plan = ParallelPlan("ddp", dp_replicate=2, num_microbatches=num_microbatches, precision=precision)
    buckets, gradients, found = {}, {}, []

    def note_bucket(group, bucket):
        storage = bucket.buffer().untyped_storage()
        buckets[storage.data_ptr()] = storage.nbytes()
        return hook(group, bucket)

    def note_gradient(parameter):
        storage = parameter.grad.untyped_storage()
        gradients[storage.data_ptr()] = storage.nbytes()

    hook, data_parallel.sum_gradients = data_parallel.sum_gradients, note_bucket
    engine, _ = build_engine(path, small_config("llama"), plan)
    trained = list(engine.trained.values())
    for parameter in trained if num_microbatches > 1 else ():
        parameter.register_post_accumulate_grad_hook(note_gradient)
    engine.decoder.base_model.register_forward_pre_hook(lambda *_: found.append(trained[0].grad is not None))
    generator = torch.Generator().manual_seed(rank)

    def build():
        return microbatch_of(torch.randint(0, 256, (1, 8), generator=generator))

    engine.rehearse(build(), num_microbatches, CausalLM())
    steps = []
    for step in range(NUM_STEPS):
        for each in (buckets, gradients, found):
            each.clear()
        engine.forward_backward(step, [build() for _ in range(num_microbatches)], torch.tensor(48.0), CausalLM())
        for parameter in trained:
            note_gradient(parameter)
        engine.clip(1.0)
        engine.step(1e-3, torch.tensor(True))
        steps.append((dict(buckets), dict(gradients), list(found)))
    data_parallel.sum_gradients = hook
    return steps, sum(parameter.nbytes for parameter in trained)


@pytest.mark.parametrize(
    ("precision", "num_microbatches"),
    [(Precision(), 3), (Precision(compute="bfloat16"), 3), (Precision(), 1)],
    ids=["fp32", "bf16", "one microbatch"],
)
def test_gradients_of_every_microbatch_are_in_the_buckets(workers, text, tmp_path, precision, num_microbatches):
    """One of several finds those before it, the first one zeros; an only one finds none, and nothing is cleared."""
    recipe = write_recipe(Row(), tmp_path, text, steps=4)
    for steps, num_bytes in workers.run(observe, 2, str(recipe), precision, num_microbatches):
        first, *_ = steps[-1]
        assert sum(first.values()) == num_bytes
        # with one microbatch a step there is one rehearsal, and DDP's final buckets come with the second backward pass
        for buckets, gradients, found in steps if num_microbatches > 1 else steps[1:]:
            assert gradients == buckets == first
            assert found == [num_microbatches > 1] * num_microbatches


def count_graphs(rank, world_size, path):
    """How many graphs two equal layers, each larger than a bucket, and the loss are compiled to."""
    config, graphs = small_config("llama", hidden_size=256, intermediate_size=1024), []

    def count(graph, inputs):
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    engine, _ = build_engine(path, config, ParallelPlan("ddp", dp_replicate=2, compile=True), count)
    engine.rehearse(microbatch_of(torch.zeros(1, 8, dtype=torch.int64)), 1, CausalLM())
    return len(graphs)


def test_a_layer_larger_than_a_bucket_is_one_graph(workers, text, tmp_path):
    """DDP's first bucket is 1 MiB, and a layer here has 4 MB of weights. The second graph is that of the loss."""
    assert workers.run(count_graphs, 2, str(write_recipe(Row(), tmp_path, text, steps=4))) == [2, 2]
