"""Multiple-choice tasks from a local file, scored by lm-eval."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from echelon.ground.errors import ConfigError
from echelon.ground.stored import MAX_ROWS_BYTES, read_text
from echelon.tools.inference.harness import evaluate_with_harness
from echelon.tools.inference.team import Team

CONTEXT_FIELDS = ("context", "question", "prompt")


@dataclass(frozen=True)
class Example:
    """One line of a task: a context, the possible continuations, and the index of the correct one."""

    context: str
    choices: tuple[str, ...]
    answer: int


def read_task(path: Path) -> list[Example]:
    """Read the examples of a .jsonl file: `context` (or `question`, `prompt`), `choices`, and `answer`, index or text.

    Raises:
        ConfigError: the message names the file and the first invalid line.
    """
    try:
        lines = read_text(path, MAX_ROWS_BYTES).split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--tasks {path} cannot be read: {error}; give a .jsonl file in UTF-8.") from error
    examples = [_parse_example(path, number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not examples:
        raise ConfigError(f"--tasks {path} contains no example; give at least one line.")
    return examples


def _parse_example(path: Path, number: int, line: str) -> Example:
    where = f"--tasks {path}, line {number}"
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


def evaluate_task(target: Path, path: Path, checkpoint: str | None = None, team: Team | None = None) -> dict[str, Any]:
    """Score a task's choices with lm-eval. Every process of a team scores all of them.

    Returns:
        task, examples, and three accuracies, each with its standard error: acc by log-likelihood, acc_norm by
        log-likelihood per character of the choice, acc_bytes per UTF-8 byte; and random, the accuracy of guessing.

    Raises:
        ConfigError: the file cannot be used, or lm-eval is not installed.
    """
    examples = read_task(path)
    rows = [
        {"context": example.context, "choices": list(example.choices), "answer": example.answer} for example in examples
    ]

    def build_dataset(**_: Any) -> dict[str, Any]:
        import datasets

        return {"test": datasets.Dataset.from_list(rows)}

    task = {
        "task": path.stem,
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
    found = evaluate_with_harness(target, [task], checkpoint=checkpoint, team=team)[path.stem]
    names = [f"{name}{end}" for name in ("acc", "acc_norm", "acc_bytes") for end in ("", "_stderr")]
    guessed = sum(1 / len(example.choices) for example in examples) / len(examples)
    result: dict[str, Any] = {"task": path.stem, "examples": len(examples)}
    return result | {name: found.get(name) for name in names} | {"random": guessed}
