"""README.md of what leaves a run: what it is, what it was trained on, with which figures, by which recipe."""

import json
from pathlib import Path
from typing import Any

import yaml

from echelon.manifest import read_json
from echelon.recipe import Recipe, load_recipe
from echelon.run_folder import RunFolder


def render_card(run: Path, step: int, is_adapter: bool = False, comparison: str | None = None) -> str:
    """A model card, with the front matter that the hub reads.

    Args:
        step: of the checkpoint that is written.
        comparison: what was measured of a merged model beside its adapter, in a line.
    """
    folder = RunFolder(run)
    recipe, _ = load_recipe(folder.recipe_path)
    method = "full training" if recipe.adapter.method == "full" else recipe.adapter.method
    base = recipe.model.checkpoint
    front: dict[str, Any] = {"library_name": "peft" if is_adapter else "transformers", "tags": ["echelon", method]}
    front |= {} if base is None else {"base_model": base}
    kind = "An adapter" if is_adapter else "A model with its adapter merged" if recipe.adapter.is_adapter else "A model"
    start = f"beginning with {base}" if base is not None else "beginning with weights of its own"
    lines = [
        "---", yaml.safe_dump(front, sort_keys=True).strip(), "---", "", f"# {recipe.run.name}", "",
        f"{kind}, trained with echelon by {method}, {start}; step {step:,}.", "",
        "## Data", "", *_data_lines(recipe), "",
        "## Figures", "", *_figure_lines(folder, step), *([f"- {comparison}"] if comparison else []), "",
        "## Loading", "", "```python", *_loading_lines(recipe, is_adapter), "```", "",
        "## Recipe", "", "```yaml", folder.recipe_path.read_text().strip(), "```", "",
    ]  # fmt: skip
    return "\n".join(lines)


def _data_lines(recipe: Recipe) -> list[str]:
    lines = [f"- trained on {source.label} ({source.format})" for source in recipe.data.train]
    return [*lines, *(f"- validated on {source.label} ({source.format})" for source in recipe.data.validation)]


def _figure_lines(folder: RunFolder, step: int) -> list[str]:
    rows = [json.loads(line) for line in folder.metrics_path.read_text().splitlines() if line.strip()]
    lines = []
    for kind, what in (("train", "training"), ("eval", "held-out")):
        row = next((row for row in reversed(rows) if row["kind"] == kind and row["step"] <= step), None)
        if row is not None and row["loss"] is not None:
            tokens = f", {row['tokens']:,} tokens seen" if kind == "train" else ""
            lines.append(f"- {what} loss {row['loss']:.4f} at step {row['step']:,}{tokens}")
    if folder.environment_path.is_file():
        packages = read_json(folder.environment_path).get("packages", {})
        used = [name for name in ("torch", "transformers", "peft", "bitsandbytes") if name in packages]
        versions = ", ".join(f"{name} {packages[name]}" for name in used)
        lines += [f"- {versions}"] if versions else []
    return lines


def _loading_lines(recipe: Recipe, is_adapter: bool) -> list[str]:
    if not is_adapter:
        return [
            "from transformers import AutoModelForCausalLM, AutoTokenizer", "",
            'model = AutoModelForCausalLM.from_pretrained("this/folder")',
            'tokenizer = AutoTokenizer.from_pretrained("this/folder")',
        ]  # fmt: skip
    grow = ["base.resize_token_embeddings(len(tokenizer))"] if recipe.model.new_tokens else []
    return [
        "from peft import PeftModel", "from transformers import AutoModelForCausalLM, AutoTokenizer", "",
        'tokenizer = AutoTokenizer.from_pretrained("this/folder")',
        f'base = AutoModelForCausalLM.from_pretrained("{recipe.model.checkpoint or "the/first/weights"}")',
        *grow,
        'model = PeftModel.from_pretrained(base, "this/folder")',
    ]  # fmt: skip
