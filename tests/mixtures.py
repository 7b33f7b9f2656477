"""Three sources of different formats and sizes, with the weights 0.5, 0.3 and 0.2."""

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

WEIGHTS = (0.5, 0.3, 0.2)


def write_sources(folder: Path) -> list[dict[str, Any]]:
    """Write a folder of text, a .jsonl file and a Parquet file under `folder`; return the entries of `data.train`."""
    (folder / "notes").mkdir(parents=True)
    for number in range(4):
        (folder / "notes" / f"{number}.txt").write_text(f"note {number}. " * 300)
    code, chat = (
        [f"{name} line {number} " * 9 for number in range(count)] for name, count in (("code", 40), ("chat", 20))
    )
    (folder / "code.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in code))
    pyarrow.parquet.write_table(pyarrow.table({"text": chat}), folder / "chat.parquet")
    return [
        {"path": str(folder / "notes"), "weight": WEIGHTS[0]},
        {"path": str(folder / "code.jsonl"), "weight": WEIGHTS[1]},
        {"path": str(folder / "chat.parquet"), "weight": WEIGHTS[2], "name": "chat"},
    ]
