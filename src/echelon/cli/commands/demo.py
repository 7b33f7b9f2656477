"""`echelon demo`: trains, evaluates, samples and reports, with the commands that users give themselves."""

import json
import shlex
import time
from pathlib import Path
from typing import Annotated

import typer

from echelon.cli.commands.arguments import FreshOption, OverridesArgument, read_recipe
from echelon.cli.commands.report import report
from echelon.cli.commands.terminal import show
from echelon.cli.commands.train import train
from echelon.cli.commands.trained_models import evaluate, generate
from echelon.ground.errors import ConfigError
from echelon.ground.sizes import render_seconds
from echelon.ground.stop_request import stops_told

_RECIPE = Path(__file__).with_name("demo.yaml")
_PROMPT = "def __init__(self, path"
_SAMPLE_TOKENS, _TEMPERATURE, _TOP_P = 160, 0.6, 0.9


def demo(
    overrides: OverridesArgument = None,
    *,
    out: Annotated[Path | None, typer.Option(metavar="FOLDER")] = None,
    nproc: Annotated[str | None, typer.Option(metavar="N|auto")] = None,
    fresh: FreshOption = False,
) -> None:
    """Train a small model on text that is here already.

    The text is the source of Python's standard library. Then evaluates the model, samples from it and writes a report,
    in two to four minutes on two CPU cores.

    Args:
        out: the folder of the run. Default: runs/demo.
        nproc: processes. Default: two; one if there is a single GPU.
    """
    from echelon.ground.launch_environment import launch_role

    if (role := launch_role()) != "local":
        raise ConfigError(
            f"echelon demo starts its own processes, but the environment shows that a launcher started it ({role}); "
            "start it with plain `echelon demo`."
        )
    started = time.monotonic()
    given = [*(overrides or []), *([] if out is None else [f"run.dir={json.dumps(str(out))}"])]
    run = read_recipe(_RECIPE, given, quiet=True).run.dir
    count = nproc or str(_choose_num_processes())
    show(f"== training a small Llama on the source of Python's standard library; processes: {count}")
    _train(given, count, fresh)
    with stops_told():
        show("== evaluating it on text that was held out from training")
        evaluate(run, nproc="1")
        show(f"== letting it continue {_PROMPT!r}")
        generate(run, prompt=_PROMPT, max_tokens=_SAMPLE_TOKENS, temperature=_TEMPERATURE, top_p=_TOP_P, nproc="1")
        show("== drawing what happened")
        report([str(run)])
    show(f"== done in {render_seconds(time.monotonic() - started)}")
    for line in _next_lines(run):
        show(line)


def _choose_num_processes() -> int:
    """Two, to show a run of several processes; one on a machine with a single GPU."""
    from echelon.planner.hardware.gpu_check import count_visible

    return min(2, count_visible() or 2)


def _train(overrides: list[str], nproc: str, fresh: bool) -> None:
    """Train to the end. Raises typer.Exit with the code of `echelon train` if it ended otherwise."""
    try:
        train(_RECIPE, overrides, nproc=nproc, fresh=fresh)
    except typer.Exit as ending:
        if ending.exit_code:
            raise


def _next_lines(run: Path) -> list[str]:
    """What to do after the demo, for the folder of its run."""
    folder = shlex.quote(str(run))
    return [
        f"next: open {folder}/report.html in a browser: loss, speed, memory and the recipe of this run",
        f"next: echelon generate {folder} --prompt 'class '",
        "next, with your own text: echelon init my-model.yaml, set data.train in it, echelon train my-model.yaml",
        "next, to learn more: docs/tutorial-text.md in echelon's repository; echelon --help lists all commands",
    ]
