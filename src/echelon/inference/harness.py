"""Evaluates a run or an HF folder with EleutherAI's lm-eval, if it is installed."""

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from echelon.errors import ConfigError
from echelon.inference.target import find_device, load_target
from echelon.inference.team import Host, Team


def evaluate_with_harness(
    target: Path,
    tasks: Sequence[str],
    include_path: Path | None = None,
    limit: int | None = None,
    checkpoint: str | None = None,
) -> dict[str, Any]:
    """Run lm-eval tasks on the model, without exporting it first.

    Args:
        include_path: a folder with additional task files.
        limit: number of examples per task; None for all.

    Returns:
        The numbers that lm-eval reports for each task, by lm-eval's names.

    Raises:
        ConfigError: lm-eval is not installed, or has no such task.
    """
    manager, models, evaluator = _import_harness()
    known = manager.TaskManager(include_path=None if include_path is None else str(include_path))
    if missing := [task for task in tasks if not known.match_tasks([task])]:
        raise ConfigError(
            f"--lm-eval {missing[0]}: lm-eval has no such task; `lm-eval ls tasks` lists its tasks, and --include-path "
            "FOLDER adds task files."
        )
    model, tokenizer = load_target(target, Host(Team(find_device())), checkpoint)
    wrapped = models.HFLM(pretrained=model, tokenizer=tokenizer, backend="causal", batch_size=8)
    report = evaluator.simple_evaluate(wrapped, tasks=list(tasks), task_manager=known, limit=limit, log_samples=False)
    return {task: dict(_numbers(values)) for task, values in report["results"].items()}


def _numbers(values: dict[str, Any]) -> list[tuple[str, Any]]:
    """Return the numeric metrics. lm-eval names a metric `acc,none`: the metric, and the filter of the answers."""
    return [(key.removesuffix(",none"), value) for key, value in values.items() if isinstance(value, int | float)]


def _import_harness() -> tuple[Any, Any, Any]:
    try:
        return tuple(
            importlib.import_module(f"lm_eval.{name}") for name in ("tasks", "models.huggingface", "evaluator")
        )  # type: ignore[return-value]
    except ImportError as error:
        raise ConfigError(
            f"--lm-eval requires a package that is not installed ({error.name}); run pip install 'echelon[lm-eval]', "
            "or score choices from a local file with --tasks FILE.jsonl."
        ) from error
