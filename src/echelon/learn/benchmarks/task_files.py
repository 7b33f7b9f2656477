"""Task files: questions with choices (.jsonl) as a task of lm-eval, and the names in lm-eval's own files (.yaml)."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from echelon.ground.errors import ConfigError
from echelon.ground.stored import MAX_ROWS_BYTES, read_text

CONTEXT_FIELDS = ("context", "question", "prompt")


@dataclass(frozen=True)
class Example:
    """One line of a task: a context, the possible continuations, and the index of the correct one."""

    context: str
    choices: tuple[str, ...]
    answer: int


def read_task(path: Path, asked: str = "--tasks") -> list[Example]:
    """Read the examples of a .jsonl file: `context` (or `question`, `prompt`), `choices`, and `answer`, index or text.

    `asked`: the option or the recipe key that names the file, for messages.

    Raises:
        ConfigError: the message names the file and the first invalid line.
    """
    try:
        lines = read_text(path, MAX_ROWS_BYTES).split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{asked} {path} cannot be read: {error}; give a .jsonl file in UTF-8.") from error
    examples = [
        _parse_example(f"{asked} {path}, line {number}", line)
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]
    if not examples:
        raise ConfigError(f"{asked} {path} contains no example; give at least one line.")
    return examples


def _parse_example(where: str, line: str) -> Example:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where} is not JSON: {error}; correct that line.") from error
    contexts = [record[name] for name in CONTEXT_FIELDS if name in record] if isinstance(record, dict) else []
    if len(contexts) != 1 or not _is_text(contexts[0]) or not contexts[0].strip():
        raise ConfigError(f"{where}: give exactly one of {', '.join(CONTEXT_FIELDS)}, a string that is not empty.")
    choices = record.get("choices")
    if not isinstance(choices, list) or len(choices) < 2 or not all(map(_is_text, choices)):
        raise ConfigError(f"{where}: `choices` must be a list of at least two strings, none of them empty.")
    return Example(contexts[0], tuple(choices), _find_answer(record.get("answer"), choices, where))


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value)


def _find_answer(answer: object, choices: list[str], where: str) -> int:
    """Return the index of the correct choice, given by its index or its text. Raises ConfigError."""
    if isinstance(answer, str) and choices.count(answer) == 1:
        return choices.index(answer)
    if isinstance(answer, bool) or not isinstance(answer, int) or not 0 <= answer < len(choices):
        raise ConfigError(
            f"{where}: `answer` is {answer!r}; give the index of the correct choice, 0 to {len(choices) - 1}, or its "
            "text."
        )
    return answer


def build_task(name: str, examples: Sequence[Example]) -> dict[str, Any]:
    """Return a task of lm-eval, as its task files would describe it, that scores the choices of these examples.

    Its metrics are accuracies: acc by log-likelihood, acc_norm by log-likelihood per character of the choice, acc_bytes
    per UTF-8 byte.
    """
    rows = [
        {"context": example.context, "choices": list(example.choices), "answer": example.answer} for example in examples
    ]

    def build_dataset(**_: Any) -> dict[str, Any]:
        import datasets

        return {"test": datasets.Dataset.from_list(rows)}

    return {
        "task": name,
        "custom_dataset": build_dataset,
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "context",
        "doc_to_choice": "choices",
        "doc_to_target": "answer",
        "metric_list": [
            {"metric": name, "aggregation": "mean", "higher_is_better": True}
            for name in ("acc", "acc_norm", "acc_bytes")
        ],
    }


class _Names(yaml.SafeLoader):
    """Reads a file of lm-eval without running what its `!function` tags name."""


_Names.add_multi_constructor("!", lambda loader, tag, node: None)


def read_task_name(path: Path, asked: str) -> str:
    """Return the name that a task file of lm-eval (.yaml) gives its task.

    Raises:
        ConfigError: it cannot be read, or describes a group or no task.
    """
    try:
        fields = yaml.load(read_text(path, MAX_ROWS_BYTES), _Names)  # a SafeLoader, which makes plain values alone
    except (OSError, ValueError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(f"{asked} {path} cannot be read: {reason}; give a task file of lm-eval in YAML.") from error
    name = fields.get("task") if isinstance(fields, dict) else None
    if not isinstance(name, str):
        raise ConfigError(
            f"{asked} {path} names no task of its own: its key `task` must be a name; give a file that describes one "
            "task of lm-eval, not a group."
        )
    return name


def name_tasks(entries: Sequence[str], asked: str) -> list[str]:
    """Return the name of each task, by which its results are called. Needs no lm-eval.

    Raises ConfigError for a file that cannot be used, and for a name that occurs twice.
    """
    names = []
    for entry in entries:
        name = entry
        if is_question_file(entry):
            read_task(Path(entry), asked)
            name = Path(entry).stem
        elif is_task_file(entry):
            name = read_task_name(Path(entry), asked)
        if name in names:
            raise ConfigError(f"{asked}: two tasks have the name {name}; rename one of them, or remove it.")
        names.append(name)
    return names


def is_question_file(entry: str) -> bool:
    """Whether a task is a file of questions."""
    return entry.endswith(".jsonl")


def is_task_file(entry: str) -> bool:
    """Whether a task is a task file of lm-eval."""
    return entry.endswith((".yaml", ".yml"))
