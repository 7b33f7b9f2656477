"""Evaluates a run or an HF folder with EleutherAI's lm-eval, if it is installed."""

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from echelon.ground.errors import ConfigError
from echelon.tools.inference.target import find_device, load_target
from echelon.tools.inference.team import Host, Team


def evaluate_with_harness(
    target: Path,
    tasks: Sequence[str | Mapping[str, Any]],
    include_path: Path | None = None,
    limit: int | None = None,
    checkpoint: str | None = None,
    team: Team | None = None,
) -> dict[str, Any]:
    """Run lm-eval tasks on the model, without exporting it first. Every process of a team runs all of them.

    Args:
        tasks: names of lm-eval's tasks, or tasks as mappings, as in its task files.
        include_path: a folder with additional task files.
        limit: number of examples per task; None for all.

    Returns:
        The numbers that lm-eval reports for each task, by lm-eval's names.

    Raises:
        ConfigError: lm-eval is not installed, or has no such task.
    """
    manager, models, evaluator = _import_harness()
    named = [task for task in tasks if isinstance(task, str)]
    known = manager.TaskManager(  # reads the files of thousands of tasks, if any of its own is asked for
        include_path=None if include_path is None else str(include_path), include_defaults=bool(named)
    )
    if missing := [task for task in named if not known.match_tasks([task])]:
        raise ConfigError(
            f"--lm-eval {missing[0]}: lm-eval has no such task; `lm-eval ls tasks` lists its tasks, and --include-path "
            "FOLDER adds task files."
        )
    host = Host(team or Team(find_device()))
    model, tokenizer = load_target(target, host, checkpoint)
    # lm-eval asks for a token that can stand for an empty context, and a tokenizer of bytes has none.
    prefix = next((id for id in (tokenizer.bos_token_id, tokenizer.eos_token_id) if id is not None), 0)

    def run() -> Any:
        wrapped = models.HFLM(
            pretrained=model, tokenizer=tokenizer, backend="causal", batch_size=8, prefix_token_id=prefix
        )
        return evaluator.simple_evaluate(wrapped, tasks=list(tasks), task_manager=known, limit=limit, log_samples=False)

    report = host.run(run)
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
            f"--tasks and --lm-eval require a package that is not installed ({error.name}); run pip install "
            "'echelon[lm-eval]'."
        ) from error
