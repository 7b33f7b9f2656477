"""The part of a model that one rank stores and computes, as a shape of its own."""

from dataclasses import replace

from echelon.planner.model_shape import ModelShape
from echelon.planner.plan import ParallelPlan


def divide_shape(shape: ModelShape, plan: ParallelPlan) -> ModelShape:
    """Return the shape of a rank's part under tensor parallelism: its heads, its part of the MLP and the vocabulary.

    Norms, biases and the hidden size stay whole. Sizes that do not divide are refused by `check_tensor_parallel`.
    """
    tp = plan.tp
    if tp == 1:
        return shape
    matrices = sum(each.count * each.size for each in shape.linears) // shape.num_layers
    layer = shape.num_layer_parameters - matrices + matrices // tp
    tables = shape.num_embedding_parameters * (1 if shape.tied_embeddings else 2)
    outside = shape.num_parameters - shape.num_layers * shape.num_layer_parameters - tables + tables // tp
    return replace(
        shape,
        num_heads=shape.num_heads // tp,
        num_kv_heads=shape.num_kv_heads // tp,
        intermediate_size=shape.intermediate_size // tp,
        vocab_size=shape.vocab_size // tp,
        num_parameters=outside + shape.num_layers * layer,
        num_embedding_parameters=shape.num_embedding_parameters // tp,
        num_layer_parameters=layer,
    )
