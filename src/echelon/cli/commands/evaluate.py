"""`echelon eval`: held-out loss, questions, or tasks of lm-eval."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from echelon.cli.commands.arguments import CheckpointOption, JsonOption, ShardsOption, TargetArgument, parse_nproc
from echelon.cli.commands.sharded import run_with_model
from echelon.cli.commands.terminal import log_to_stderr, show
from echelon.run.report.judgement import describe_context

if TYPE_CHECKING:
    from echelon.learn.distributed.runtime import Runtime as Team


def evaluate(
    target: TargetArgument,
    data_path: Annotated[
        Path | None,
        typer.Option("--data", metavar="PATH", help="Text to evaluate on instead of the run's held-out text."),
    ] = None,
    task: Annotated[
        Path | None, typer.Option("--tasks", metavar="FILE.jsonl", help="Multiple-choice questions to score instead.")
    ] = None,
    harness: Annotated[
        str | None, typer.Option("--lm-eval", metavar="TASK[,TASK]", help="Tasks of lm-eval to run instead.")
    ] = None,
    include_path: Annotated[
        Path | None,
        typer.Option("--include-path", metavar="FOLDER", help="Folder with your own task files, for --lm-eval."),
    ] = None,
    limit: Annotated[
        int | None, typer.Option("--limit", min=1, help="Maximum number of examples per task, for --lm-eval.")
    ] = None,
    checkpoint: CheckpointOption = None,
    nproc: ShardsOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Evaluate a run or a model on held-out text or on tasks. Shows loss and perplexity, or accuracy."""
    from echelon.cli.api.models import check_target, check_texts, find_target
    from echelon.cli.api.models import evaluate as evaluate_target

    log_to_stderr()
    num_processes = parse_nproc(nproc)
    check_target(target, checkpoint)
    check_texts(data_path, task)
    find_target(target, checkpoint)
    names = () if harness is None else harness.split(",")

    def work(team: "Team | None") -> None:
        result = evaluate_target(
            target,
            data_path,
            tasks=task,
            lm_eval=names,
            include_path=include_path,
            limit=limit,
            checkpoint=checkpoint,
            team=team,
        )
        for line in [json.dumps(result, default=str)] if as_json else render_lines(result):
            show(line)

    run_with_model(target, num_processes, work)


def render_lines(values: dict[str, Any], indent: str = "") -> Iterator[str]:
    """A line for each value; nested mappings are indented. A single set is left out, as it equals the total."""
    for key, value in values.items():
        if isinstance(value, dict):
            if key != "sets" or len(value) > 1:
                yield f"{indent}{key}:"
                yield from render_lines(value, indent + "  ")
        else:
            yield f"{indent}{key}: {_render_value(value)}"
            if key == "unigram_entropy" and None not in (value, values["loss"]):
                yield f"{indent}{describe_context(values['loss'], value)}"


def _render_value(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, float) else "unknown" if value is None else str(value)
