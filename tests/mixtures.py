"""Three sources of different formats and sizes, in the shares 0.5, 0.3 and 0.2."""

import json
from pathlib import Path
from typing import Any

WEIGHTS = (0.5, 0.3, 0.2)


def write_sources(folder: Path) -> list[dict[str, Any]]:
    """A folder of text and two .jsonl files under `folder`; the entries of `data.train`."""
    (folder / "notes").mkdir(parents=True)
    for number in range(4):
        (folder / "notes" / f"{number}.txt").write_text(f"note {number}. " * 300)
    for name, count in (("code.jsonl", 40), ("chat.jsonl", 20)):
        lines = [json.dumps({"text": f"{name} line {number} " * 9}) for number in range(count)]
        (folder / name).write_text("\n".join(lines))
    return [
        {"path": str(folder / "notes"), "weight": WEIGHTS[0]},
        {"path": str(folder / "code.jsonl"), "weight": WEIGHTS[1]},
        {"path": str(folder / "chat.jsonl"), "weight": WEIGHTS[2], "name": "chat"},
    ]
