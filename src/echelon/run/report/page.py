"""A report as one HTML file: no address, readable on a phone, light or dark like the reader's system.

The page of a run in progress has a script, which asks its own server for the page again.
"""

import base64
import hashlib
from html import escape
from pathlib import Path

from echelon.ground.redaction import make_printable
from echelon.run.report.blocks import Bars, Block, Curves, HeatMap, Lines, Listing, Pairs, Report, Table, Timeline
from echelon.run.report.drawing import draw_bars, draw_curves, draw_heat_map, draw_timeline

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
    """Return the report as an HTML document, which updates itself if `refresh_seconds` are given."""
    policy, script = _POLICY, ""
    if refresh_seconds is not None:
        update = _UPDATE % (1000 * refresh_seconds)
        digest = base64.b64encode(hashlib.sha256(update.encode()).digest()).decode()
        policy, script = f"{_POLICY}; connect-src 'self'; script-src 'sha256-{digest}'", f"<script>{update}</script>"
    figures = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in report.figures)
    sections = "".join(
        f"<section><h2>{escape(section.title)}</h2>{''.join(map(_render_block, section.blocks))}</section>"
        for section in report.sections
    )
    tone = "bad" if report.is_bad else "good"
    status = f' <small class="{tone}">{escape(report.status)}</small>' if report.status else ""
    cards = f'<dl class="figures">{figures}</dl>' if figures else ""
    return make_printable(
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(report.title)}</title><style>\n{_STYLE.read_text(encoding='utf-8')}</style></head>\n<body><main>"
        f'<h1>{escape(report.title)}{status}</h1><p class="quiet">{escape(report.summary)}</p>{cards}{sections}'
        f"</main>{script}</body></html>\n"
    )


def _render_block(block: Block) -> str:
    match block:
        case Pairs():
            rows = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in block.rows)
            return f'<dl class="pairs">{rows}</dl>'
        case Table():
            return _render_table(block)
        case Curves():
            return draw_curves(block)
        case Bars():
            return draw_bars(block)
        case Timeline():
            return draw_timeline(block)
        case HeatMap():
            return draw_heat_map(block)
        case Lines():
            kind = "" if block.tone == "plain" else f' class="note {block.tone}"'
            return "".join(f"<p{kind}>{escape(line)}</p>" for line in block.lines)
        case Listing():
            return f"<details><summary>{escape(block.name)}</summary><pre>{escape(block.text)}</pre></details>"


def _render_table(table: Table) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in table.head)
    rows = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in table.rows)
    kind = ' class="words"' if table.is_text else ""
    return f'<div class="wide"><table{kind}><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'
