"""`echelon eval`: held-out loss, questions, or tasks of lm-eval."""

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

from echelon.cli.commands.arguments import JsonOption, ShardsOption, TargetArgument, parse_nproc, run_with_model
from echelon.cli.commands.options import OptionsOf
from echelon.cli.commands.terminal import log_to_stderr, show

if TYPE_CHECKING:
    from echelon.learn.distributed.runtime import Runtime as Team


def evaluate(
    target: TargetArgument,
    *,
    nproc: ShardsOption = "auto",
    as_json: JsonOption = False,
    **options: Annotated[Any, OptionsOf(["models:evaluate"], without=["team"])],
) -> None:
    """Evaluate a run or a model on held-out text or on tasks. Shows loss and perplexity, or accuracy."""
    from echelon.cli.api.models import check_target, check_texts, find_target
    from echelon.cli.api.models import evaluate as evaluate_target

    log_to_stderr()
    num_processes = parse_nproc(nproc)
    check_target(target, options.get("checkpoint"))
    check_texts(options.get("data"), options.get("tasks"))
    find_target(target, options.get("checkpoint"))

    def work(team: "Team | None") -> None:
        result = evaluate_target(target, team=team, **options)
        for line in [json.dumps(result, default=str)] if as_json else render_lines(result):
            show(line)

    run_with_model(target, num_processes, work)


def render_lines(values: dict[str, Any], indent: str = "") -> Iterator[str]:
    """A line for each value; nested mappings are indented. A single set is left out, as it equals the total."""
    from echelon.run.report.judgement import describe_context

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
