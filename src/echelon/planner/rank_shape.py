"""The part of a model that one rank stores and computes, as a shape of its own."""

from dataclasses import replace
from functools import lru_cache

from echelon.planner.model_shape import ModelShape
from echelon.planner.plan import ParallelPlan


def divide_shape(shape: ModelShape, plan: ParallelPlan) -> ModelShape:
    """Return the shape of a rank's part under tensor parallelism: its heads, its part of the MLP and the vocabulary.

    It has some of the experts, and computes as many for a token as it could need. Norms, biases, routers and the hidden
    size stay whole. Sizes that do not divide are refused by `check_tensor_parallel`.
    """
    return shape if plan.tp == 1 else _divide(shape, plan.tp)


@lru_cache(maxsize=64)
def _divide(shape: ModelShape, tp: int) -> ModelShape:
    matrices = (sum(each.count * each.size for each in shape.linears) + shape.num_expert_parameters) // shape.num_layers
    layer = shape.num_layer_parameters - matrices + matrices // tp
    experts = tuple(replace(each, num_experts=each.num_experts // tp) for each in shape.experts)
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
        experts=experts,
        num_idle_parameters=sum(
            each.count
            * each.size
            * (each.num_experts - min(each.num_experts, shape.num_chosen_experts))
            // each.num_experts
            for each in experts
        ),
    )
