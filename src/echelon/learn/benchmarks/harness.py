"""Tasks of EleutherAI's lm-eval, if it is installed: found by their names or in files, and scored on a model."""

import importlib
import io
import logging
import math
import random
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from echelon.ground.errors import ConfigError, EchelonError
from echelon.ground.extras import missing_package
from echelon.learn.benchmarks.task_files import (
    build_task,
    is_question_file,
    is_task_file,
    name_tasks,
    read_task,
    read_task_name,
)

Numbers = Mapping[str, Mapping[str, float]]
"""The metrics of each task, by lm-eval's names: `acc`, `acc_stderr`, ..., with the filter if the task names one."""
# With each result lm-eval describes this machine and its own source, which starts pip and git for seconds.
_DESCRIPTIONS: Mapping[str, Callable[..., object]] = {
    "add_env_info": lambda report: None,
    "get_git_commit_hash": lambda: None,
}


@dataclass(frozen=True)
class TaskScores:
    """What lm-eval has measured: the metrics of each task, and whether more is better of a metric."""

    numbers: Numbers
    rises: Mapping[str, Mapping[str, bool]]

    def row(self, step: int, seconds: float) -> dict[str, Any]:
        """Return the row for metrics.jsonl. `seconds`: what the tasks took."""
        tasks = {
            task: {name: value if math.isfinite(value) else None for name, value in values.items()}
            for task, values in self.numbers.items()
        }
        return {"kind": "tasks", "step": step, "seconds": seconds, "tasks": tasks}

    def find(self, name: str) -> float | None:
        """Return the value of TASK/METRIC, negative where more is better; None if it is not known."""
        task, _, metric = name.rpartition("/")
        value = self.numbers.get(task, {}).get(metric)
        if value is None or not math.isfinite(value):
            return None
        return -value if self.rises.get(task, {}).get(metric.partition(",")[0], True) else value


class Tasks:
    """Tasks of lm-eval that are ready to run, any number of times."""

    def __init__(self, named: Sequence[str | Mapping[str, Any]], include: Sequence[Path], asked: str) -> None:
        """Find tasks by their names, or as lm-eval's own mappings; `include`: files and folders with further ones.

        Args:
            asked: the option or the recipe key that names them, for messages.

        Raises:
            ConfigError: lm-eval is not installed, or has no such task.
        """
        self._evaluator, self._metrics, manager = _import_harness(asked)
        self._given = [task if isinstance(task, str) else dict(task) for task in named]
        self._folder = tempfile.TemporaryDirectory(prefix="echelon-tasks-")  # removed with this object
        for number, path in enumerate(path for path in include if path.is_file()):
            # lm-eval reads whole folders. A file that includes another one stands for it alone.
            text = f"include: {path.resolve()}\ntask: {read_task_name(path, asked)}\n"
            Path(self._folder.name, f"{number}.yaml").write_text(text, encoding="utf-8")
        folders = [self._folder.name, *(str(path) for path in include if not path.is_file())]
        task_names = set(manager(include_path=folders, include_defaults=False).all_tasks)
        # The files of its own tasks are thousands, which are read only if one is asked for.
        needs_own = any(isinstance(task, str) and task not in task_names for task in self._given)
        self._manager = _keep_loaded(manager)(include_path=folders, include_defaults=needs_own)
        for task in self._given:
            if isinstance(task, str) and not self._manager.match_tasks([task]):
                raise ConfigError(
                    f"{asked}: lm-eval has no task {task}; `lm-eval ls tasks` lists its tasks, and "
                    + (
                        "--include-path FOLDER adds task files."
                        if asked.startswith("--")
                        else "a path that ends in .yaml or .jsonl is a task file."
                    )
                )

    def score(self, model: Any, limit: int | None = None, resamples: bool = True) -> TaskScores | None:
        """Run the tasks on a model of lm-eval; None in a process other than the first of its machine.

        The state of all random numbers is as before afterwards, although lm-eval seeds them.

        Args:
            limit: number of examples per task; None for all.
            resamples: whether to estimate the standard errors of metrics that are no means, in a process for each core.
                Without, they are NaN.
        """
        with ExitStack() as stack:
            stack.enter_context(_random_state_kept())
            stack.enter_context(_replaced(self._evaluator, _DESCRIPTIONS))
            if not resamples:
                stack.enter_context(_replaced(self._metrics, {"bootstrap_stderr": lambda *_, **__: math.nan}))
            report = self._evaluator.simple_evaluate(
                model, tasks=self._given, task_manager=self._manager, limit=limit, log_samples=False
            )
        if report is None:
            return None
        numbers = {task: dict(_read_metrics(values)) for task, values in report["results"].items()}
        return TaskScores(numbers, report.get("higher_is_better", {}))


def open_tasks(entries: Sequence[str], asked: str) -> Tasks:
    """Find tasks by lm-eval's names, in task files of lm-eval (.yaml), and in files of questions (.jsonl).

    Raises ConfigError as `Tasks`, also for a file that cannot be used.
    """
    return Tasks(
        [
            build_task(Path(entry).stem, read_task(Path(entry), asked)) if is_question_file(entry) else name
            for entry, name in zip(entries, name_tasks(entries, asked), strict=True)
        ],
        [Path(entry) for entry in entries if is_task_file(entry)],
        asked,
    )


def try_tasks(tasks: Tasks, asked: str) -> TaskScores:
    """Run one example of each task on a model that knows nothing: fetches the data, and finds what cannot run.

    Raises ConfigError: a task cannot run here; the message has lm-eval's reason.
    """
    from echelon.learn.benchmarks.harness_model import KnowsNothing

    try:
        with quiet_harness():
            scores = tasks.score(KnowsNothing(), limit=1, resamples=False)
    except EchelonError:
        raise
    except Exception as error:  # a task is a program of its own
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise ConfigError(f"{asked}: lm-eval cannot run the tasks here ({reason}); correct or remove them.") from error
    assert scores is not None, "called before there are other processes"
    return scores


@contextmanager
def quiet_harness() -> Iterator[None]:
    """Scope in which lm-eval and the progress bars of its libraries print nothing but errors."""
    loggers = [logging.getLogger(name) for name in ("lm_eval", "datasets")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with redirect_stderr(io.StringIO()):
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _read_metrics(values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield the metrics. lm-eval names a metric `acc,none`: the metric, and the filter of the answers."""
    for key, value in values.items():
        if "," in key and isinstance(value, int | float):
            yield key.removesuffix(",none"), float(value)


def _keep_loaded(manager: Any) -> Any:
    """Return lm-eval's manager of tasks as one that loads them once: data is read, or fetched, once in a run."""

    def load(self: Any, tasks: Any) -> Any:
        if not hasattr(self, "loaded"):
            self.loaded = manager.load(self, tasks)
        return self.loaded

    # Versions before 0.4.10 have another method, and load tasks each time.
    return type("KeptTasks", (manager,), {"load": load}) if hasattr(manager, "load") else manager


@contextmanager
def _random_state_kept() -> Iterator[None]:
    """Scope after which the generators of Python, numpy and torch go on as if nothing had been drawn."""
    with ExitStack() as stack:
        stack.callback(random.setstate, random.getstate())
        stack.callback(np.random.set_state, np.random.get_state())
        devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
        stack.enter_context(torch.random.fork_rng(devices=devices))
        yield


@contextmanager
def _replaced(module: Any, functions: Mapping[str, Callable[..., object]]) -> Iterator[None]:
    """Scope in which these functions of a module are others; those that its version does not have are left out."""
    kept = {name: getattr(module, name) for name in functions if hasattr(module, name)}
    for name in kept:
        setattr(module, name, functions[name])
    try:
        yield
    finally:
        for name, value in kept.items():
            setattr(module, name, value)


def _import_harness(asked: str) -> tuple[Any, Any, Any]:
    """Import lm-eval: its evaluator, its metrics, and its manager of tasks."""
    try:
        with quiet_harness():
            evaluator, metrics, tasks = (
                importlib.import_module(f"lm_eval.{name}") for name in ("evaluator", "api.metrics", "tasks")
            )
            return evaluator, metrics, tasks.TaskManager
    except ImportError as error:
        raise missing_package(asked, error.name or "lm_eval", "lm-eval") from error
