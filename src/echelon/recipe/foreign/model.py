"""Model, tokenizer and adapter of another tool's file."""

from typing import Any

from echelon.recipe.aliases import read_value, spellings
from echelon.recipe.foreign.ledger import Ledger
from echelon.recipe.foreign.reading import Tool
from echelon.recipe.yaml_text import show_value

_PLACE_OF_MODEL = "path/to/model"


def carry_model(ledger: Ledger, tool: Tool) -> None:
    """The model, its code, its attention, its tokenizer and the tokens added to it."""
    if ledger.move("model.checkpoint", "base_model_name_or_path") is None:
        ledger.put("model.checkpoint", _PLACE_OF_MODEL, "not in the file")
        ledger.remark(f"the file names no model: set model.checkpoint, {_PLACE_OF_MODEL} for now.")
    if ledger.peek("trust_remote_code"):
        ledger.move("model.trust_remote_code")
    names = (*spellings("tokenizer"), "tokenizer_name_or_path")
    if ledger.peek(*names) == ledger.values["model.checkpoint"]:
        ledger.take(*names)
    else:
        ledger.move("tokenizer", *names)
    _carry_attention(ledger)
    _carry_tokens(ledger)


def _carry_attention(ledger: Ledger) -> None:
    if (full := ledger.find("attn_implementation")) is not None:
        ledger.put("model.attn_implementation", ledger.take(full), f"{full}: {ledger.given[full]}")
        return
    full = ledger.find("flash_attn", "flash_attention", "sdp_attention", "eager_attention")
    if full is None or ledger.given[full] in (False, "auto"):
        if full is not None:
            ledger.need_not(full, "attention is chosen by transformers where the recipe is silent.")
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
            ledger.lose(
                f"special_tokens.{name}",
                "the roles of tokens are the tokenizer's own; one that the vocabulary lacks goes to model.new_tokens.",
            )


def carry_adapter(ledger: Ledger, tool: Tool) -> None:
    """Which parameters are trained: the method, its rank and scale, the modules it is beside, the 4-bit weights."""
    method = _find_method(ledger, tool)
    if method is None:
        for name in ("lora_r", "lora_rank", "lora_alpha", "lora_dropout", "lora_target_modules", "lora_target_linear"):
            if ledger.find(name) is not None:
                ledger.need_not(name, "every parameter is trained, no adapter is made.")
        return
    ledger.put("adapter.method", method, _reason(ledger, "adapter", "finetuning_type", "use_peft", "peft_type"))
    full = ledger.find(*spellings("adapter.r"), "r")
    rank = ledger.number(*spellings("adapter.r"), "r")
    if rank is not None:
        ledger.put("adapter.r", rank, f"{full}: {rank:g}")
    else:
        rank = {"hf": 16 if ledger.given.get("use_peft") else 8}.get(tool, 8)
        ledger.put("adapter.r", rank, f"the default of {tool}")
    if ledger.move("adapter.alpha") is None:
        alpha = {"llamafactory": 2 * rank, "axolotl": 2 * rank}.get(tool, 32 if ledger.given.get("use_peft") else 8)
        ledger.put("adapter.alpha", alpha, f"the default of {tool}")
    if ledger.move("adapter.dropout") is None:
        dropout = 0.05 if tool == "hf" and ledger.given.get("use_peft") else 0.0
        ledger.put("adapter.dropout", dropout, f"the default of {tool}")
    _carry_targets(ledger)
    if ledger.peek("use_rslora", "peft_use_rslora"):
        ledger.move("adapter.rslora", "use_rslora", "peft_use_rslora")
    _carry_initial_values(ledger, method)
    if method == "qlora":
        _carry_quantisation(ledger, tool)


def _reason(ledger: Ledger, *names: str) -> str:
    for name in names:
        for full, value in ledger.given.items():
            if full.rpartition(".")[2] == name and value is not None:
                return f"{full}: {show_value(value)}"
    return "a LoRA configuration"


def _find_method(ledger: Ledger, tool: Tool) -> str | None:
    """lora, qlora or dora, or None for full fine-tuning; the keys that say it are accounted for."""
    bits = ledger.peek("quantization_bit")
    four = bool(ledger.peek("load_in_4bit", "use_4bit")) or bits == 4
    eight = bool(ledger.peek("load_in_8bit", "use_8bit")) or bits == 8
    word = ledger.take("adapter", "finetuning_type", "peft_type")
    peft = ledger.take("use_peft", "use_lora")
    dora = bool(ledger.take("use_dora", "peft_use_dora"))
    has_config = ledger.find("lora_r", "lora_rank", "r", "lora_alpha", "target_modules") is not None
    wanted = str(word).lower() if word else "lora" if peft or (tool == "hf" and has_config and peft is None) else None
    if tool == "llamafactory" and not word:
        wanted = "lora"
    if wanted in (None, "full"):
        if four or eight:
            for name in ("load_in_4bit", "load_in_8bit", "quantization_bit", "use_4bit", "use_8bit"):
                if ledger.peek(name):
                    ledger.lose(
                        name, "quantised weights cannot be trained without an adapter; set adapter.method=qlora."
                    )
        return None
    if wanted not in ("lora", "qlora", "dora"):
        name = "adapter" if "adapter" in ledger.given else "finetuning_type"
        ledger.differ(
            name, "echelon has lora, qlora and dora, and lora is written; look whether that is what you want."
        )
    if dora:
        if four or wanted == "qlora":
            ledger.lose(ledger.find("load_in_4bit", "quantization_bit") or "adapter", "dora has no 4-bit weights here.")
        return "dora"
    ledger.take("load_in_4bit", "use_4bit")
    if eight:
        full = ledger.find("load_in_8bit", "use_8bit", "quantization_bit")
        ledger.lose(full or "load_in_8bit", "frozen weights stay in bf16 here, or take 4 bits: adapter.method=qlora.")
    elif bits == 4:
        ledger.take("quantization_bit")
    return "qlora" if four or wanted == "qlora" else "lora"


def _carry_targets(ledger: Ledger) -> None:
    linear = ledger.peek("lora_target_linear")
    full = ledger.find("lora_target_modules", "lora_target", "target_modules")
    value: Any = ledger.take("lora_target_modules", "lora_target", "target_modules")
    if linear:
        ledger.move("adapter.target_modules", "lora_target_linear")
        ledger.put("adapter.target_modules", "all-linear", "lora_target_linear: true")
        if full is not None and value:
            ledger.need_not(full, "lora_target_linear takes all of them.")
        return
    if isinstance(value, str) and value not in ("all", "all-linear") and not any(mark in value for mark in "*|()\\[^$"):
        value = [name.strip() for name in value.split(",")]
    if value in ("all", "all-linear") or value == ["all-linear"]:
        value = "all-linear"
    elif isinstance(value, str):
        assert full is not None
        ledger.differ(
            full, "modules are named by the last parts of their names, not by a pattern; all-linear is written."
        )
        value = "all-linear"
    if not value:
        ledger.put("adapter.target_modules", ["q_proj", "v_proj"], "PEFT's default for most models")
        ledger.remark(
            "the file names no target modules: PEFT takes q_proj and v_proj of most models, and they are written; "
            "adapter.target_modules: all-linear learns more for little."
        )
    else:
        ledger.put("adapter.target_modules", value, f"{full}: {show_value(value)}")


def _carry_initial_values(ledger: Ledger, method: str) -> None:
    full = ledger.find("init_lora_weights", "peft_init_lora_weights", "pissa_init")
    if full is None:
        return
    value = ledger.take(full)
    if value is True and full != "pissa_init":
        return
    if "pissa" in str(value) or full == "pissa_init":
        if value and method == "lora":
            ledger.put("adapter.init", "pissa", f"{full}: {show_value(value)}")
            if "niter" in str(value):
                ledger.differ(full, "pissa is computed by a whole singular value decomposition.")
        elif value:
            ledger.lose(full, f"pissa changes the frozen weights, which adapter.method={method} does not allow.")
    else:
        ledger.lose(full, "first values are PEFT's default or pissa.")


def _carry_quantisation(ledger: Ledger, tool: Tool) -> None:
    kind = ledger.peek("bnb_4bit_quant_type", "quantization_type")
    if kind is not None:
        ledger.move("adapter.quant_type", "bnb_4bit_quant_type", "quantization_type")
    names = ("bnb_4bit_use_double_quant", "use_bnb_nested_quant", "double_quantization")
    if ledger.move("adapter.double_quant", *names) is None:
        ledger.put("adapter.double_quant", tool != "hf", f"the default of {tool}")
    if (full := ledger.find("bnb_4bit_compute_dtype")) is not None:
        ledger.need_not(full, "4-bit weights are computed with in train.precision.")
