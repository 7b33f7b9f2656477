"""Which attention a model runs: the one its config means, and without asking the device about masks nobody needs."""

from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from echelon.errors import ConfigError
from echelon.model.parts import FAMILIES

# `sdpa` under a name for which `transformers` builds no mask: without one, that function is causal by itself.
PLAIN_CAUSAL = "echelon_plain_causal"
AttentionInterface.register(PLAIN_CAUSAL, sdpa_attention_forward)


def choose_attention(config: PretrainedConfig, wanted: str | None) -> str | None:
    """The attention to ask `transformers` for; None leaves it the choice.

    Soft-capped scores (Gemma-2) rule out `sdpa`, and not every release of `transformers` says so: some compute without
    the capping, in silence.

    Raises:
        ConfigError: `sdpa` was asked for and cannot compute this model.
    """
    softcap = getattr(config, "attn_logit_softcapping", None)
    if softcap is None:
        return wanted
    if wanted == "sdpa":
        raise ConfigError(
            f"model.attn_implementation=sdpa cannot cap attention scores, and the model's attn_logit_softcapping is "
            f"{softcap}; use eager or flex_attention, or leave it out."
        )
    return wanted or "eager"


def apply_plain_causal(model: PreTrainedModel, sequence_len: int) -> None:
    """Spare a model on `sdpa` its mask, where every layer attends to the whole past of sequences of this length.

    To learn that no mask is needed, `transformers` looks at the positions, and so lets the host wait for the device in
    every forward pass. The result is the same bit for bit; any other model is left as it is.
    """
    config = model.config
    if config._attn_implementation == "sdpa" and config.model_type in FAMILIES and _is_plain(config, sequence_len):
        model.set_attn_implementation(PLAIN_CAUSAL)


def _is_plain(config: PretrainedConfig, sequence_len: int) -> bool:
    kinds = set(getattr(config, "layer_types", None) or ())
    window = getattr(config, "sliding_window", None)
    is_causal = getattr(config, "is_causal", True) and not getattr(config, "use_bidirectional_attention", False)
    return is_causal and kinds <= {"full_attention", "sliding_attention"} and (window is None or window >= sequence_len)
