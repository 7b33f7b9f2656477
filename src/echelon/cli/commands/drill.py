"""`echelon drill`: inject the faults of long runs into a short run."""

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from echelon.cli.commands.arguments import (
    NprocOption,
    OverridesArgument,
    RecipeArgument,
    parse_hosts,
    parse_nproc,
    read_recipe,
)
from echelon.cli.commands.terminal import report_failure, show
from echelon.ground.stop_request import STOP_SIGNALS, handled

if TYPE_CHECKING:
    from echelon.recipe.launch_sections import LaunchConfig
    from echelon.tools.drill.crew import Crew
    from echelon.tools.drill.exercise import FaultEffect

_COLUMNS = f"{'fault':<22} {'noticed after':>13} {'recovered after':>15} {'steps lost':>10} {'starts':>6}  identical"


def drill(
    recipe_path: RecipeArgument,
    overrides: OverridesArgument = None,
    *,
    nproc: NprocOption = "auto",
    hosts: Annotated[str | None, typer.Option(metavar="A,B")] = None,
    links: bool = False,
    only: Annotated[list[str] | None, typer.Option(metavar="FAULT")] = None,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Inject faults into a small version of a recipe. Reports the recovery from each; exit code 1 if one failed.

    Args:
        hosts: run it on these machines, over ssh, and lose machines too.
        links: with `hosts`: also cut and slow down a link, by tc, as root.
        only: inject this fault only; may be repeated.
        as_json: print a JSON object for each fault.
    """
    from echelon.tools.drill.exercise import run_drill

    recipe = read_recipe(recipe_path, [*(overrides or []), *([] if hosts is None else [parse_hosts(hosts)])])
    crew = None if hosts is None else _gather(recipe.launch, parse_nproc(nproc), links)
    num_processes = crew.num_training if crew is not None else parse_nproc(nproc) or _choose_num_processes()
    failed: list[str] = []
    with _stops_noted() as asked:
        stop = lambda: next(iter(asked), None)  # noqa: E731
        found = run_drill(recipe, recipe_path, overrides or [], num_processes, stop, crew, links, only or ())
        for number, finding in enumerate(found):
            if as_json:
                show(json.dumps(asdict(finding)))
            else:
                show(_render(finding) if number else f"{_COLUMNS}\n{_render(finding)}")
            if not finding.identical:
                failed.append(finding.fault)
    if failed:
        report_failure(f"the run did not recover from {', '.join(failed)}; see above", 1)
        raise typer.Exit(1)


def _gather(launch: "LaunchConfig", num_processes: int | None, links: bool) -> "Crew":
    from echelon.run.lifecycle.process_group import default_num_processes
    from echelon.tools.drill.crew import Crew

    crew = Crew.of(launch, num_processes or default_num_processes())
    if links:
        crew.check_links()
    return crew


def _choose_num_processes() -> int:
    """At least two on a CPU, since a single rank has no peer that could detect its faults; one per GPU."""
    from torch.cuda import is_available

    from echelon.run.lifecycle.process_group import default_num_processes

    return default_num_processes() if is_available() else max(2, default_num_processes())


@contextmanager
def _stops_noted() -> Iterator[list[str]]:
    """Make signals ask the drill to stop, which then ends its processes; yields the list of received signals.

    Under nohup SIGHUP stays ignored.
    """
    asked: list[str] = []
    numbers = [*STOP_SIGNALS, *([signal.SIGHUP] if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN else [])]
    with handled(numbers, lambda number, _: asked.append(signal.Signals(number).name)):
        yield asked


def _render(finding: "FaultEffect") -> str:
    from echelon.tools.drill.trial import Likeness

    noticed, recovered = map(_seconds, (finding.noticed_seconds, finding.recovered_seconds))
    line = f"{finding.fault:<22} {noticed:>13} {recovered:>15} {finding.lost_steps:>10} {finding.starts:>6}  "
    yes = "yes" if finding.compared == Likeness.BITS else f"yes, {finding.compared}"
    return line + (yes if finding.identical else f"no: {finding.trouble or 'different result'}; see {finding.folder}")


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} s"
