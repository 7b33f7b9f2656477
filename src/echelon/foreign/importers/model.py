"""Import the model, tokenizer and adapter of another tool's file."""

from typing import Any

from echelon.foreign.importers.ledger import Defaults, Ledger, put_default
from echelon.recipe.aliases import read_value, spellings
from echelon.recipe.yaml_text import show_value

_PLACE_OF_MODEL = "path/to/model"
# Implementations with the same result; if the recipe sets none, transformers selects the fastest available one.
_ATTENTION = ("sdpa", "eager", "flash_attention_2", "flash_attention_3", "flex_attention")
_CAUSAL = ("CausalLM", "LMHeadModel")


def carry_model(ledger: Ledger, tool: str) -> None:
    """Import the model, its attention implementation, its tokenizer and added tokens."""
    names: tuple[str, ...] = ("model",) if tool in ("llamafactory-v1", "ms-swift") else ("base_model_name_or_path",)
    if ledger.move("model.checkpoint", *names) is None:
        ledger.put("model.checkpoint", _PLACE_OF_MODEL, "not in the file")
        ledger.remark(f"the file has no model; set model.checkpoint (currently {_PLACE_OF_MODEL}).")
    if ledger.peek("trust_remote_code"):
        ledger.move("model.trust_remote_code")
    names = (*spellings("tokenizer"), "tokenizer_name_or_path")
    if ledger.peek(*names) == ledger.values["model.checkpoint"]:
        ledger.take(*names)
    else:
        ledger.move("tokenizer", *names)
    kind = ledger.peek("model_type", "cls_model_config")
    if kind is not None and not str(kind).endswith(_CAUSAL):
        ledger.refuse("model_type", "the model is not a causal language model.")
    revision = ledger.find("model_revision", "revision_of_model")
    if revision is not None and ledger.take(revision) != "main":
        ledger.refuse(
            revision,
            "a Hub model is loaded at its newest revision; download the revision you need and give its folder.",
        )
    if ledger.peek("output_router_logits") is True:
        ledger.put("objective.router_loss", True, "output_router_logits: true")
        ledger.differ("output_router_logits", "echelon computes the router loss per sequence, not per batch.")
    elif ledger.find("output_router_logits") is not None:
        ledger.take("output_router_logits")
    _carry_attention(ledger)
    _carry_tokens(ledger)


def _carry_attention(ledger: Ledger) -> None:
    if (full := ledger.find("attn_implementation")) is not None:
        if ledger.given[full] in _ATTENTION:
            ledger.put("model.attn_implementation", ledger.take(full), f"{full}: {ledger.given[full]}")
        else:
            ledger.need_not(full, "transformers selects the fastest attention implementation; the result is the same.")
        return
    full = ledger.find("flash_attn", "flash_attention", "sdp_attention", "eager_attention")
    if full is None or ledger.given[full] in (False, "auto"):
        if full is not None:
            ledger.need_not(full, "transformers selects the attention implementation if the recipe sets none.")
        return
    value = ledger.take(full)
    named = {"sdp_attention": "sdpa", "eager_attention": "eager", "flash_attention": "flash_attention_2"}
    ours = named.get(full) or read_value("flash_attn", value)
    ledger.put("model.attn_implementation", ours, f"{full}: {show_value(value)}")


def _carry_tokens(ledger: Ledger) -> None:
    tokens: list[str] = []
    for name in ("tokens", "new_special_tokens", "add_special_tokens", "add_tokens"):
        if (value := ledger.peek(name)) and not isinstance(value, bool):
            full = ledger.find(name)
            tokens += ledger.words(name)
            ledger.put("model.new_tokens", list(tokens), f"{full}: {show_value(value)}")
    if isinstance(special := ledger.peek("special_tokens"), dict):
        ledger.expand("special_tokens", special)
        for name in special:
            full = f"special_tokens.{name}"
            if special[name] and name == "eos_token":
                ledger.differ(
                    full, "it ends plain texts and answers that no chat template ends; the tokenizer keeps its own eos."
                )
            elif special[name] and name == "pad_token":
                ledger.need_not(full, "padding is never a target, whichever token it is.")
            elif special[name]:
                ledger.differ(full, "the tokenizer's own token is used; it must be the same.")


def carry_adapter(ledger: Ledger, tool: str, defaults: Defaults) -> None:
    """Import the adapter: its method, rank, alpha, target modules and quantization."""
    if (method := _find_method(ledger, tool)) is None:
        for name in ("lora_r", "lora_rank", "lora_alpha", "lora_dropout", "lora_target_modules", "lora_target_linear",
                     "lora_target_parameters", "lora_modules_to_save", "lora_target", "target_modules",
                     "quantize_moe_experts"):  # fmt: skip
            if ledger.find(name) is not None:
                ledger.need_not(name, "all parameters are trained; there is no adapter.")
        if "objective.router_loss" not in ledger.values:  # with an adapter, routers are frozen in both tools
            put_default(ledger, defaults, "objective.router_loss", False)
        return
    ledger.put("adapter.method", method, _reason(ledger, "adapter", "finetuning_type", "use_peft", "peft_type"))
    full = ledger.find(*spellings("adapter.r"), "r")
    if (rank := ledger.number(*spellings("adapter.r"), "r")) is not None:
        ledger.put("adapter.r", rank, f"{full}: {rank:g}")
    else:
        rank = defaults.rank
        put_default(ledger, defaults, "adapter.r", rank)
    if ledger.move("adapter.alpha") is None:
        put_default(ledger, defaults, "adapter.alpha", _default_alpha(defaults, tool, rank))
    if ledger.move("adapter.dropout") is None:
        put_default(ledger, defaults, "adapter.dropout", defaults.dropout)
    ledger.move("adapter.target_parameters")
    _carry_targets(ledger, defaults)
    saved = ledger.find("lora_modules_to_save", "modules_to_save", "additional_target")
    if saved is not None:
        ledger.put("adapter.modules_to_save", ledger.words(saved), f"{saved}: {show_value(ledger.given[saved])}")
    if ledger.peek("use_rslora", "peft_use_rslora"):
        ledger.move("adapter.rslora", "use_rslora", "peft_use_rslora")
    _carry_initial_values(ledger, method)
    if method == "qlora":
        _carry_quantisation(ledger, defaults)
    elif (full := ledger.find("quantize_moe_experts")) is not None:
        ledger.need_not(full, "only QLoRA has weights in 4 bits.")


def _default_alpha(defaults: Defaults, tool: str, rank: float) -> float:
    """The tool's default alpha. PEFT's default is 8 for any rank."""
    if defaults.alpha is not None:
        return defaults.alpha
    return defaults.alpha_of_rank * rank if tool == "llamafactory" else 8


def _reason(ledger: Ledger, *names: str) -> str:
    for name in names:
        for full, value in ledger.given.items():
            if full.rpartition(".")[2] == name and value is not None:
                return f"{full}: {show_value(value)}"
    return "a LoRA configuration"


def _find_method(ledger: Ledger, tool: str) -> str | None:
    """Return lora, qlora or dora, or None for full fine-tuning, and record the keys that specify it."""
    width = _find_width(ledger)
    named = ledger.find(*_METHOD_KEYS)
    method = _find_wanted(ledger, tool)
    dora = bool(ledger.take("use_dora", "peft_use_dora"))
    if method in (None, "full", "none"):
        for name in _WIDTH_KEYS:
            if width in (4, 8) and ledger.peek(name):
                ledger.refuse(
                    name, "quantized weights cannot be trained without an adapter; set an adapter or remove this key."
                )
        return None
    if method not in ("lora", "qlora", "dora"):
        assert named is not None
        ledger.refuse(named, "echelon supports full fine-tuning and the adapters lora, qlora and dora.")
        ledger.take(*_BITS)
        ledger.take("quantization_method")
        return None
    if dora and (width == 4 or method == "qlora"):
        ledger.refuse(
            ledger.find("load_in_4bit", "quantization_bit") or str(named), "dora is not supported with 4-bit weights."
        )
    _carry_width(ledger, width)
    return "dora" if dora else "qlora" if width == 4 else method


_METHOD_KEYS = ("adapter", "finetuning_type", "tuner_type", "train_type", "peft_type", "peft_config.name")
_BITS = ("quantization_bit", "quant_bits")
_WIDTH_KEYS = ("load_in_4bit", "load_in_8bit", *_BITS, "use_4bit", "use_8bit")


def _find_width(ledger: Ledger) -> int | None:
    """Return the bits of a frozen weight; None if the file does not set them."""
    bits = ledger.peek(*_BITS)
    if ledger.peek("load_in_4bit", "use_4bit") or bits == 4:
        return 4
    return 8 if ledger.peek("load_in_8bit", "use_8bit") else bits


def _find_wanted(ledger: Ledger, tool: str) -> str | None:
    """Return the method that the file names or that its keys imply; None for full fine-tuning."""
    peft = ledger.take("use_peft", "use_lora")
    if word := ledger.take(*_METHOD_KEYS):
        return str(word).lower()
    has_config = ledger.find("lora_r", "lora_rank", "r", "lora_alpha", "target_modules") is not None
    return (
        "lora"
        if peft or tool in ("llamafactory", "ms-swift") or (tool == "hf" and has_config and peft is None)
        else None
    )


def _carry_width(ledger: Ledger, width: int | None) -> None:
    """Record the bit width of frozen weights: 4 bits are part of the method, 8 bits differ, others are refused."""
    ledger.take("load_in_4bit", "use_4bit")
    full = ledger.find("load_in_8bit", "use_8bit", *_BITS)
    if width == 4:
        ledger.take(*_BITS)
    elif width == 8:
        ledger.differ(str(full), "frozen weights are kept in 16 bits instead of 8: more exact, but more memory.")
    elif width is not None:
        ledger.refuse(str(full), "frozen weights can have 4 bits (bitsandbytes) or 16 bits and more.")
    if ledger.take("quantization_method", "quant_config.name") not in (None, "bnb", "bitsandbytes"):
        ledger.refuse(
            ledger.find("quant_config.name") or "quantization_method",
            "4-bit weights are supported only with bitsandbytes.",
        )


def _carry_targets(ledger: Ledger, defaults: Defaults) -> None:
    names = ("lora_target_modules", "lora_target", "target_modules")
    full = ledger.find(*names)
    value: Any = ledger.take(*names)
    if ledger.peek("lora_target_linear"):
        ledger.move("adapter.target_modules", "lora_target_linear")
        ledger.put("adapter.target_modules", "all-linear", "lora_target_linear: true")
        if full is not None and value and value != "all-linear":
            _explain_targets(ledger, full, value)
        return
    value = _read_targets(value)
    if isinstance(value, str) and value != "all-linear":
        assert full is not None
        ledger.refuse(
            full, "modules are given by the last parts of their names, not by a pattern; write them as a list, for "
            "example [q_proj, v_proj]."
        )  # fmt: skip
    elif value:
        ledger.put("adapter.target_modules", value, f"{full}: {show_value(value)}")
    elif "adapter.target_parameters" in ledger.values:
        ledger.put("adapter.target_modules", [], "the file has target parameters alone")
    elif defaults.targets is not None:
        put_default(ledger, defaults, "adapter.target_modules", defaults.targets)
    else:
        ledger.put("adapter.target_modules", ["q_proj", "v_proj"], "PEFT's default for most models")
        ledger.remark(
            "the file has no target modules; the recipe has q_proj and v_proj, PEFT's default for most models. "
            "adapter.target_modules: all-linear adapts more layers for little more memory."
        )


def _explain_targets(ledger: Ledger, full: str, value: Any) -> None:
    """Record modules that are given in addition to `lora_target_linear` (every linear layer of the decoder)."""
    named = [str(target) for target in value] if isinstance(value, list) else [str(value)]
    if any("embed" in name or "head" in name for name in named):
        ledger.refuse(
            full,
            "embeddings and the output head cannot have an adapter; train them completely with lora_modules_to_save.",
        )
    else:
        ledger.need_not(full, "lora_target_linear selects every linear layer.")


def _read_targets(value: Any) -> Any:
    """Return module names as a list, or all-linear; a pattern stays a string."""
    if value in ("all", "all-linear", ["all"], ["all-linear"]):
        return "all-linear"
    if isinstance(value, str) and not any(mark in value for mark in "*|()\\[^$"):
        return [name.strip() for name in value.split(",")]
    return value


def _carry_initial_values(ledger: Ledger, method: str) -> None:
    if (full := ledger.find("init_lora_weights", "peft_init_lora_weights", "pissa_init")) is None:
        return
    value = ledger.take(full)
    if not value or (value is True and full != "pissa_init"):
        return
    if not ("pissa" in str(value) or full == "pissa_init"):
        ledger.refuse(full, "the supported initializations of an adapter are PEFT's default and pissa.")
    elif method != "lora":
        ledger.refuse(full, f"pissa changes the frozen weights, which adapter.method={method} does not allow.")
    else:
        ledger.put("adapter.init", "pissa", f"{full}: {show_value(value)}")
        steps = ledger.take("pissa_iter")
        if "niter" in str(value) or (full == "pissa_init" and steps != -1):
            ledger.differ(full, "pissa is computed by a full singular value decomposition, not by an approximation.")


def _carry_quantisation(ledger: Ledger, defaults: Defaults) -> None:
    if ledger.peek("bnb_4bit_quant_type", "quantization_type") is not None:
        ledger.move("adapter.quant_type", "bnb_4bit_quant_type", "quantization_type")
    if isinstance(more := ledger.peek("bnb_config_kwargs"), dict):
        ledger.expand("bnb_config_kwargs", more)
        for name in more:
            if name not in ("bnb_4bit_use_double_quant", "bnb_4bit_quant_type", "bnb_4bit_compute_dtype"):
                ledger.refuse(
                    f"bnb_config_kwargs.{name}", "the supported bitsandbytes settings are quant_type and double_quant."
                )
    ledger.move("adapter.quantize_experts")
    names = ("bnb_4bit_use_double_quant", "use_bnb_nested_quant", "double_quantization")
    if ledger.move("adapter.double_quant", *names) is None:
        put_default(ledger, defaults, "adapter.double_quant", defaults.double_quant)
    if (full := ledger.find("bnb_4bit_compute_dtype")) is not None:
        ledger.need_not(full, "computation with 4-bit weights uses train.precision.")
