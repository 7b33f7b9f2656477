"""The recipe that `echelon init` writes: commented, small, and ready to train on the user's text."""

import shlex
from pathlib import Path

from echelon.ground.stored import read_text
from echelon.recipe.yaml_text import render_inline


def render_starter(name: str = "my-run", text_path: str = "text.txt", file: str = "recipe.yaml") -> str:
    """Return the YAML of a recipe that trains a small Llama from scratch on `text_path`, with comments.

    `file`: the path of the recipe, which its first lines name in commands.
    """
    named, read_from = f"  name: {render_inline(name)} ", f"    - path: {render_inline(text_path)} "
    text = read_text(Path(__file__).with_name("starter.yaml"))
    return text.format(name=named, path=read_from, file=shlex.quote(file))
