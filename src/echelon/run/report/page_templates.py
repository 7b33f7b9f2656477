"""Fills the templates that stand beside this file. Values are escaped for HTML and XML."""

from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from echelon.ground.redaction import make_printable


def render_template(name: str, **values: Any) -> str:
    """Return a template of this folder with these values, and control characters replaced."""
    return make_printable(_environment().get_template(name).render(values))


@cache
def _environment() -> Environment:
    loader = FileSystemLoader(Path(__file__).parent)
    return Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)
