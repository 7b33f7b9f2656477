"""Reads the prompts of `echelon generate`. Does not import torch, so that a wrong file is refused at once."""

import json
from pathlib import Path
from typing import Any

from echelon.ground.errors import ConfigError
from echelon.ground.stored import MAX_ROWS_BYTES, read_text


def read_prompts(path: Path) -> list[dict[str, Any]]:
    """Read the prompts of a file: the non-empty lines of a .txt, or .jsonl records with a `prompt` field.

    Raises:
        ConfigError: the message names the file and the invalid line.
    """
    if path.suffix not in (".txt", ".jsonl"):
        raise ConfigError(f"--prompts {path}: give a .txt with one prompt per line, or a .jsonl with a `prompt` field.")
    try:
        lines = read_text(path, MAX_ROWS_BYTES).split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--prompts {path} cannot be read: {error}; give a text file in UTF-8.") from error
    records = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            records.append({"prompt": line} if path.suffix == ".txt" else _parse_record(path, number, line))
    if not records:
        raise ConfigError(f"--prompts {path} contains no prompt; give at least one line.")
    return records


def _parse_record(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"--prompts {path}, line {number} is not JSON: {error}; correct that line.") from error
    if not isinstance(record, dict) or not isinstance(record.get("prompt"), str):
        raise ConfigError(f'--prompts {path}, line {number} has no string `prompt`; write {{"prompt": "..."}}.')
    return record
