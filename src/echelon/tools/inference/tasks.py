"""Evaluates a run or an HF folder with EleutherAI's lm-eval, if it is installed."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from echelon.learn.benchmarks.harness import Tasks, TaskScores
from echelon.learn.benchmarks.task_files import build_task, read_task
from echelon.learn.distributed.objects import broadcast_object
from echelon.learn.distributed.runtime import Runtime
from echelon.learn.opened import OpenedModel, one_process

_BATCH_SIZE = 8


def evaluate_with_harness(
    target: Path,
    tasks: Sequence[str | Mapping[str, Any]],
    include_path: Path | None = None,
    limit: int | None = None,
    checkpoint: str | None = None,
    team: Runtime | None = None,
) -> dict[str, Any]:
    """Run lm-eval tasks on the model, without exporting it first. Every process of a team runs all of them.

    Args:
        tasks: names of lm-eval's tasks, or tasks as mappings, as in its task files.
        include_path: a folder with additional task files.
        limit: number of examples per task; None for all.

    Returns:
        The metrics of each task, by lm-eval's names, the same in every process.

    Raises:
        ConfigError: lm-eval is not installed, or has no such task.
    """
    asked = "--lm-eval" if all(isinstance(task, str) for task in tasks) else "--tasks"
    suite = Tasks(tasks, () if include_path is None else (include_path,), asked)
    from echelon.learn.benchmarks.harness_model import AnyPrefix  # lm-eval is there

    opened = OpenedModel(target, checkpoint, team or one_process(), may_score=False)
    found: TaskScores | None = opened.run(
        lambda: suite.score(AnyPrefix(opened.model, opened.tokenizer, _BATCH_SIZE), limit)
    )
    if opened.size > 1:
        found = broadcast_object(found, opened.meshes.everyone)
    assert found is not None, "the first process has the results"
    return {task: dict(values) for task, values in found.numbers.items()}


def evaluate_task(
    target: Path, path: Path, checkpoint: str | None = None, team: Runtime | None = None
) -> dict[str, Any]:
    """Score the choices of a .jsonl file with lm-eval. Every process of a team scores all of them.

    Returns:
        task, examples, and three accuracies, each with its standard error: acc by log-likelihood, acc_norm by
        log-likelihood per character of the choice, acc_bytes per UTF-8 byte; and random, the accuracy of guessing.

    Raises:
        ConfigError: the file cannot be used, or lm-eval is not installed.
    """
    examples = read_task(path)
    task = build_task(path.stem, examples)
    found = evaluate_with_harness(target, [task], checkpoint=checkpoint, team=team)[path.stem]
    names = [f"{name}{end}" for name in ("acc", "acc_norm", "acc_bytes") for end in ("", "_stderr")]
    guessed = sum(1 / len(example.choices) for example in examples) / len(examples)
    result: dict[str, Any] = {"task": path.stem, "examples": len(examples)}
    return result | {name: found.get(name) for name in names} | {"random": guessed}
