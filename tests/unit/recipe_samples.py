"""A small valid recipe, and a loader for recipe text."""

from pathlib import Path

import yaml

from echelon.recipe.document import Recipe
from echelon.recipe.load import load_recipe

SMALL = """\
run: {name: small}
model:
  config: {model_type: llama, hidden_size: 64}
tokenizer: bytes
data:
  train: [{path: text.txt}]
  sequence_len: 64
train:
  steps: 100
  global_batch_size: 8
optim:
  learning_rate: 3e-4
"""
DEMO = """
run: {name: demo}
model: {config: {model_type: llama, hidden_size: 64, num_hidden_layers: 1, num_attention_heads: 2}}
tokenizer: bytes
data: {train: text.txt, sequence_len: 32}
train: {steps: 10, global_batch_size: 4}
optim: {learning_rate: 0.001}
"""
"""What is launched in tests of launchers; each adds its `launch`."""
RECIPE = yaml.safe_load(DEMO)


def write_recipe(folder: Path, text: str = SMALL) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def load_text(folder: Path, text: str = SMALL, *overrides: str) -> tuple[Recipe, list[str]]:
    return load_recipe(write_recipe(folder, text), overrides)
