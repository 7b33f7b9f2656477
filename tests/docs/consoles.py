"""Pictures of a console as SVG, drawn by rich, and the text in such a picture."""

import html
import io
import re
from collections import defaultdict

from rich.console import CONSOLE_SVG_FORMAT, Console
from rich.text import Text

WIDTH = 108
# Without the font that rich would load from a server; the size of letters does not depend on the font.
FORMAT = re.sub(r"@font-face \{\{.*?\}\}\n", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)


def draw_console(text: str, title: str) -> str:
    """The picture of a terminal window that shows this text; it has its own background, so it suits any page."""
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    for line in text.splitlines():
        shown = Text(line)
        shown.highlight_regex(r"^(\$|>) .*", "bold green")
        console.print(shown, highlight=False, no_wrap=True, overflow="ellipsis")
    return console.export_svg(title=title, code_format=FORMAT, unique_id="console")


def read_console(picture: str) -> list[str]:
    """The lines of the text in a picture."""
    lines: dict[int, str] = defaultdict(str)
    for number, text in re.findall(r'clip-path="url\(#console-line-(\d+)\)">(.*?)</text>', picture):
        lines[int(number)] += html.unescape(text).replace("\xa0", " ")
    return [lines[number].rstrip() for number in range(max(lines) + 1)]
