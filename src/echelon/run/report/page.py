"""A report as one HTML file: no address, readable on a phone, light or dark like the reader's system.

The page of a run in progress has a script, which asks its own server for the page again.
"""

import base64
import hashlib
from pathlib import Path
from typing import Any

from echelon.run.report.blocks import Bars, Block, Curves, HeatMap, Report, Timeline
from echelon.run.report.drawing import plot_bars, plot_curves, plot_heat_map, plot_timeline
from echelon.run.report.page_templates import render_template

_STYLE = Path(__file__).with_name("page.css")

# Nothing is loaded, whatever a name or a message in the run's files contains.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
# Takes the page again, and keeps what the reader has opened; says so if nobody answers.
_UPDATE = """setInterval(async () => {
  try {
    const answer = await fetch('/'), page = new DOMParser().parseFromString(await answer.text(), 'text/html')
    if (!answer.ok) throw answer.status
    const opened = [...document.querySelectorAll('details[open] summary')].map(each => each.textContent)
    document.querySelector('main').replaceWith(page.querySelector('main'))
    document.querySelectorAll('details').forEach(each => each.open = opened.includes(each.firstChild.textContent))
  } catch { document.querySelector('h1 small').textContent = 'echelon watch does not answer' }
}, %d)"""


def render_page(report: Report, refresh_seconds: float | None = None) -> str:
    """Return the page; with `refresh_seconds` it asks the server that it came from for itself that often."""
    policy, script = _POLICY, ""
    if refresh_seconds is not None:
        script = _UPDATE % (1000 * refresh_seconds)
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        policy = f"{_POLICY}; connect-src 'self'; script-src 'sha256-{digest}'"
    return render_template(
        "page.html.jinja",
        report=report,
        sections=[(section.title, [_plot(block) for block in section.blocks]) for section in report.sections],
        policy=policy,
        script=script,
        style=_STYLE.read_text(encoding="utf-8"),
    )


def _plot(block: Block) -> tuple[str, Any]:
    """Return the name of a block's macro in the template, and what that shows."""
    kind = type(block).__name__.lower()
    match block:
        case Curves():
            return kind, plot_curves(block)
        case Bars():
            return kind, plot_bars(block)
        case Timeline():
            return kind, plot_timeline(block)
        case HeatMap():
            return kind, plot_heat_map(block)
        case _:
            return kind, block
