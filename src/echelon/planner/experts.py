"""The parts of a mixture of experts in a built model: its routers, and the weights of its experts."""

from collections.abc import Collection
from typing import Any

from echelon.ground.quiet_imports import import_bitsandbytes

EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")  # config keys for the number of experts


def count_experts(config: Any) -> int | None:
    """Return the number of experts that a text config sets; None if it sets none."""
    count = next((count for name in EXPERT_COUNTS if (count := getattr(config, name, None))), None)
    return count if isinstance(count, int) else None


def find_expert_weights(model: Any, layer: Any) -> dict[str, Any]:
    """Return the expert weights of a decoder layer, [experts, rows, columns] each, by name in the layer.

    `transformers` stores the weights of all experts of a layer in such tensors instead of linear layers. The kernels of
    convolutions have three dims too, and are not included.
    """
    from torch.nn.modules.conv import _ConvNd

    num_experts = count_experts(model.config.get_text_config(decoder=True))
    return {
        f"{path}.{leaf}": parameter
        for path, module in layer.named_modules()
        if path and not isinstance(module, _ConvNd)
        for leaf, parameter in module.named_parameters(recurse=False)
        if parameter.dim() == 3 and parameter.shape[0] == num_experts
    }


def find_recorded_routers(model: Any) -> dict[str, tuple[Any, int]]:
    """Return the modules whose outputs `transformers` records as router logits: (module, output index) by name."""
    gates: dict[str, tuple[Any, int]] = {}
    for prefix, part in model.named_modules():
        recorders = (getattr(part, "_can_record_outputs", None) or {}).get("router_logits", [])
        for recorder in recorders if isinstance(recorders, list) else [recorders]:
            gates |= _find_recorded(prefix, part, recorder)
    return {name: module for name, module in gates.items() if not any(other.startswith(f"{name}.") for other in gates)}


def _find_recorded(prefix: str, part: Any, recorder: Any) -> dict[str, tuple[Any, int]]:
    target, inside = getattr(recorder, "target_class", recorder), getattr(recorder, "layer_name", None)
    if not isinstance(target, type):
        return {}
    return {
        name: (module, getattr(recorder, "index", 1))
        for name, module in part.named_modules(prefix=prefix)
        if isinstance(module, target) and (inside is None or f".{inside}." in f".{name}.")
    }


def find_unadaptable(model: Any, linears: Collection[str]) -> set[str]:
    """Return those of a model's linear layers, given by full name, that cannot have an adapter.

    These are the routers of a mixture, which stay frozen, and layers with a name that PEFT applies to the experts: as
    it loads an adapter for some mixtures, it takes for example `gate_proj` as a name from before `transformers` 5, when
    each expert had linear layers.
    """
    routers = {id(module) for router, _ in find_recorded_routers(model).values() for module in router.modules()}
    modules = dict(model.named_modules())
    taken = _find_taken_names(model, {name.rpartition(".")[2] for name in linears})
    return {name for name in linears if id(modules[name]) in routers or name.rpartition(".")[2] in taken}


def _find_taken_names(model: Any, names: Collection[str]) -> set[str]:
    import_bitsandbytes()
    try:
        from peft import LoraConfig
        from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
    except ImportError:  # PEFT is not installed
        return set()
    taken = set()
    for name in names:
        config = LoraConfig(target_modules=[name])
        try:
            convert_peft_config_for_transformers(config, model=model, conversions=None)
        except ValueError:  # a name of one half of a fused weight
            taken.add(name)
        if config.target_modules != {name}:
            taken.add(name)
    return taken
