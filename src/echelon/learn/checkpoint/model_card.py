"""The model card (README.md) of an export: the model, its training data, metrics and recipe."""

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from echelon.ground.errors import EchelonError
from echelon.ground.run_files import RunFiles, is_run
from echelon.ground.stored import read_as, read_json, read_text
from echelon.learn.model.hub import is_hub_name, read_commits, with_copies
from echelon.learn.model.stored_format import StoredFormat, find_stored_format
from echelon.recipe.document import Recipe
from echelon.recipe.inputs import AdapterConfig
from echelon.recipe.load import load_recipe


def _model_lines(recipe: Recipe) -> list[str]:
    """Return the code to load a model with transformers."""
    kind = _model_class(recipe)
    return [
        f"from transformers import {kind}, AutoTokenizer", "",
        f'model = {kind}.from_pretrained("this/folder")',
        'tokenizer = AutoTokenizer.from_pretrained("this/folder")',
    ]  # fmt: skip


def _model_class(recipe: Recipe) -> str:
    return "AutoModelForSequenceClassification" if recipe.objective.scores_texts else "AutoModelForCausalLM"


@dataclass(frozen=True)
class _Environment:
    """The part of environment.json that a card uses: versions by package."""

    packages: dict[str, str]


def render_card(
    run: Path, step: int, is_adapter: bool = False, comparison: str | None = None, dtype: str | None = None
) -> str:
    """Return a model card, with the front matter that the hub reads.

    Args:
        step: of the exported checkpoint.
        dtype: that the weights are written in; None for an adapter.
        comparison: a line with the measured difference between a merged model and the model with its adapter.
    """
    folder = RunFiles(run)
    recipe, _ = load_recipe(folder.recipe_path)
    method = "full training" if recipe.adapter.method == "full" else recipe.adapter.method
    base = recipe.model.checkpoint
    front: dict[str, Any] = {"library_name": "peft" if is_adapter else "transformers", "tags": ["echelon", method]}
    if base is not None and is_hub_name(base):  # the hub refuses a card with any other value
        front["base_model"] = base
    kind = "An adapter" if is_adapter else "A model with its adapter merged" if recipe.adapter.is_adapter else "A model"
    start = f"starting from {base}" if base is not None else "from newly initialized weights"
    stored = _find_stored(recipe, folder)
    loading = _adapter_lines(recipe, folder, stored) if is_adapter else _model_lines(recipe)
    lines = [
        "---", yaml.safe_dump(front, sort_keys=True).strip(), "---", "", f"# {recipe.run.name}", "",
        f"{kind}, trained with echelon by {method}, {start}; step {step:,}.", "",
        *([] if stored is None else [_describe_stored(stored, recipe.adapter, dtype), ""]),
        "## Data", "", *_data_lines(recipe), "",
        "## Figures", "", *_figure_lines(folder, step), *([f"- {comparison}"] if comparison else []), "",
        "## Loading", "", "```python", *loading, "```", "",
        "## Recipe", "", "```yaml", read_text(folder.recipe_path).strip(), "```", "",
    ]  # fmt: skip
    return "\n".join(lines)


def _find_stored(recipe: Recipe, folder: RunFiles) -> StoredFormat | None:
    """Return the format of the base's weights, if they are stored quantized and its config is on this machine."""
    with suppress(EchelonError, OSError, ValueError):
        base = with_copies(recipe, read_commits(folder.hub_path), weights=False).model.checkpoint
        return None if base is None else find_stored_format(base, read_json(Path(base) / "config.json"))
    return None


def _describe_stored(stored: StoredFormat, adapter: AdapterConfig, dtype: str | None) -> str:
    """Return the sentences about a base with quantized weights, and about what is written instead."""
    start = f"The base stores its weights as {stored}. They were read as plain numbers of {stored.dtype}"
    if dtype is not None:
        return f"{start}, and this folder has plain numbers of {dtype}: its config.json has no quantization_config."
    if adapter.method == "qlora" or stored.method not in _DEQUANTIZING:
        return f"{start}, which transformers cannot do here: merge the adapter with `echelon export RUN OUT --merge`."
    return f"{start}: load the base dequantized, as below."


def _data_lines(recipe: Recipe) -> list[str]:
    lines = [f"- trained on {source.label} ({source.format})" for source in recipe.data.train]
    return [*lines, *(f"- validated on {source.label} ({source.format})" for source in recipe.data.validation)]


def _figure_lines(folder: RunFiles, step: int) -> list[str]:
    rows = folder.read_metrics().rows
    lines = []
    for kind, what in (("train", "training"), ("eval", "held-out")):
        row = next((row for row in reversed(rows) if row["kind"] == kind and row["step"] <= step), None)
        if row is not None and row.get("loss") is not None:
            tokens = f", {row['tokens']:,} tokens seen" if row.get("tokens") is not None else ""
            lines.append(f"- {what} loss {row['loss']:.4f} at step {row['step']:,}{tokens}")
    with suppress(OSError, ValueError):  # without environment.json the card has no versions
        packages = read_as(folder.environment_path, _Environment).packages
        used = [name for name in ("torch", "transformers", "peft", "bitsandbytes") if name in packages]
        versions = ", ".join(f"{name} {packages[name]}" for name in used)
        lines += [f"- {versions}"] if versions else []
    return lines


def _expert_lines(adapter: AdapterConfig) -> list[str]:
    """Return the code that quantizes the experts of the base model, which transformers leaves in 16 bits."""
    return [
        "for module in list(base.modules()):", "    for name, weight in list(module.named_parameters(recurse=False)):",
        '        if weight.dim() == 3 and "experts" in type(module).__name__.lower():',
        f"            replace_parameter_4bit(module, name, compress_statistics={adapter.double_quant}, "
        f'quant_type="{adapter.quant_type}")',
    ]  # fmt: skip


# What makes transformers load the weights of a method as plain numbers.
_DEQUANTIZING = {
    "fp8": ("FineGrainedFP8Config", "dequantize=True"),
    "mxfp4": ("Mxfp4Config", "dequantize=True"),
    "compressed-tensors": ("CompressedTensorsConfig", "run_compressed=False"),
}


def _adapter_lines(recipe: Recipe, folder: RunFiles, stored: StoredFormat | None) -> list[str]:
    """Return the code to load an adapter with PEFT, with the 4-bit settings and new tokens that it was trained with."""
    adapter, base = recipe.adapter, recipe.model.checkpoint or "the/first/weights"
    kind, first, options = f"{_model_class(recipe)}, AutoTokenizer", list[str](), ""
    config = read_json(folder.model_dir / "config.json")
    if recipe.objective.scores_texts:
        names = list(config["id2label"].values())
        named = f"id2label={dict(enumerate(names))}, label2id={config['label2id']}"
        options += f", {named if recipe.objective.labels else 'num_labels=1'}, pad_token_id={config['pad_token_id']}"
    if is_run(Path(base)):
        first, base = [f"# first: echelon export {base} base"], "base"
    if adapter.method == "qlora":
        kind += ", BitsAndBytesConfig"
        settings = f'bnb_4bit_quant_type="{adapter.quant_type}", bnb_4bit_use_double_quant={adapter.double_quant}'
        first.append(f"in_4_bits = BitsAndBytesConfig(load_in_4bit=True, {settings})")
        options += ", quantization_config=in_4_bits"
    elif stored is not None and stored.method in _DEQUANTIZING:
        name, setting = _DEQUANTIZING[stored.method]
        kind += f", {name}"
        options += f", quantization_config={name}({setting})"
    packed = _expert_lines(adapter) if adapter.quantize_experts else []
    size = config.get("vocab_size", "len(tokenizer)")
    generation = list[str]()
    if not recipe.objective.scores_texts:
        kind += ", GenerationConfig"
        generation.append('model.generation_config = GenerationConfig.from_pretrained("this/folder")')
    grow = [f"base.resize_token_embeddings({size})"] if recipe.model.new_tokens else []
    return [
        *(["from bitsandbytes.nn.parametrize import replace_parameter_4bit"] if packed else []),
        "from peft import PeftModel", f"from transformers import {kind}", "",
        'tokenizer = AutoTokenizer.from_pretrained("this/folder")', *first,
        f'base = {_model_class(recipe)}.from_pretrained("{base}"{options})', *packed, *grow,
        'model = PeftModel.from_pretrained(base, "this/folder")',
        *generation,
    ]  # fmt: skip
