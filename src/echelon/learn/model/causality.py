"""Tests whether a model's attention is causal by running a small copy of it.

The copy runs twice on the CPU, on two sequences that differ from some token on. If the logits before
that token differ, the model sees later tokens, and next-token training would leak the labels.
"""

import copy
import json
from functools import lru_cache, partial

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

from echelon.ground.errors import ConfigError
from echelon.learn.model.build import build_on_meta
from echelon.learn.model.small_copy import (
    MAX_PARAMETERS,
    SMALL_PARAMETERS,
    ConfigKey,
    count_parameters,
    other_tokens,
    random_tokens,
    randomize,
    smaller_copies,
    transformers_silenced,
)

_LENGTH = 12
# Rounding changes earlier logits by up to 1e-6 of the largest one (experts group tokens differently); a leak changes
# them by 0.1 or more.
_TOLERANCE = 1e-4
# The config fields, with their values, that make a model causal in families where that is configurable.
_SWITCHES = (("is_decoder", True), ("causal", True), ("is_causal", True), ("use_bidirectional_attention", False))


def check_is_causal(config: PretrainedConfig, trust_remote_code: bool = False) -> None:
    """Refuse a model whose attention is not causal, and a small model whose forward pass fails.

    Takes tenths of a second, once per config and process. A model passes unchecked if no copy with at most 100 M
    parameters can be built, or if the copy does not run: a handful of architectures in `transformers` 5.

    Raises:
        ConfigError: the message names the field that would make the model causal, if there is one.
    """
    if not sees_what_follows(ConfigKey(config, trust_remote_code)):
        return
    fix = "use a causal family, for example llama"
    for name, value in _SWITCHES:
        if getattr(config, name, value) != value:
            changed = copy.deepcopy(config)
            setattr(changed, name, value)
            if not sees_what_follows(ConfigKey(changed, trust_remote_code)):
                written = json.dumps(value)
                fix = f"set {name}: {written} in model.config (for a checkpoint, in its config.json), or {fix}"
                break
    raise ConfigError(
        f"model: in this {config.model_type} model positions attend to later tokens, and next-token prediction "
        f"requires causal attention; {fix}."
    )


@lru_cache(maxsize=64)
def sees_what_follows(key: ConfigKey) -> bool:
    """Return whether a later token changes an earlier logit; False if no copy could be run.

    Raises:
        ConfigError: the model is small enough to run unreduced, and its forward pass fails.
    """
    with transformers_silenced():
        # Building a model sets the dtype of its config, which is the caller's.
        if count_parameters(build_on_meta(copy.deepcopy(key.config), None, *key.others)) <= SMALL_PARAMETERS:
            return _try_as_is(key)
        for small in smaller_copies(key.config):
            try:
                if count_parameters(build_on_meta(small, None, *key.others)) <= MAX_PARAMETERS:
                    return _try(small, *key.others)
            except Exception:  # a reduced config may break a family's own assumptions in any way
                continue
        return False


def _try_as_is(key: ConfigKey) -> bool:
    try:
        return _try(key.config, *key.others)
    except Exception as error:  # transformers raises many types of exception
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(
            f"model: a forward pass of this {key.config.model_type} model fails ({type(error).__name__}: {reason}); "
            "correct model.config."
        ) from error


def _try(config: PretrainedConfig, trust_remote_code: bool) -> bool:
    """Return whether a later token changes an earlier logit of a model with this config.

    In a mixture of experts a rounding error can change the choice of experts, but not in both precisions.
    """
    single, double = (
        partial(measure_leak, config, trust_remote_code, dtype) for dtype in (torch.float32, torch.float64)
    )
    if single() <= _TOLERANCE:
        return False
    try:
        return double() > _TOLERANCE
    except RuntimeError:  # a kernel without fp64
        return True


@torch.no_grad()
def measure_leak(config: PretrainedConfig, trust_remote_code: bool, dtype: torch.dtype) -> float:
    """Return the change of the earlier logits, as a fraction of the largest one. Keeps the global random state."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(
            copy.deepcopy(config), dtype=dtype, trust_remote_code=trust_remote_code
        ).eval()
        randomize(model)
        tokens = random_tokens(model, 1, _LENGTH)
    half = _LENGTH // 2
    others = torch.cat([tokens[:, :half], other_tokens(model, tokens[:, half:])], dim=1)
    first, second = (model(input_ids=ids, use_cache=False).logits[:, :half] for ids in (tokens, others))
    return float((first - second).abs().max() / first.abs().max())
