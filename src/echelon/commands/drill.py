"""`echelon drill`: what a long run meets, done to a short one on purpose."""

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from echelon.commands import NprocOption, OverridesArgument, RecipeArgument, parse_nproc, read_recipe, say

if TYPE_CHECKING:
    from echelon.drill.exercise import Finding

_COLUMNS = f"{'fault':<22} {'noticed after':>13} {'recovered after':>15} {'steps lost':>10} {'starts':>6}  identical"


def drill(
    recipe_path: RecipeArgument,
    overrides: OverridesArgument = None,
    nproc: NprocOption = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object for each fault.")] = False,
) -> None:
    """Run the recipe small, do to it what a long run meets, and report what each fault cost. Exit code 1 if any was not
    survived."""
    from echelon.drill.exercise import run_drill
    from echelon.runtime import default_num_processes

    recipe = read_recipe(recipe_path, overrides)
    # One rank alone has no peer that could notice anything.
    num_processes = parse_nproc(nproc) or max(2, default_num_processes())
    findings = []
    for finding in run_drill(recipe, recipe_path, overrides or [], num_processes, say):
        findings.append(finding)
        if as_json:
            say(json.dumps(asdict(finding)))
    if not as_json:
        say(_COLUMNS)
        for finding in findings:
            say(_render(finding))
    if not all(finding.identical for finding in findings):
        raise typer.Exit(1)


def _render(finding: "Finding") -> str:
    noticed, recovered = map(_seconds, (finding.noticed_seconds, finding.recovered_seconds))
    line = f"{finding.fault:<22} {noticed:>13} {recovered:>15} {finding.lost_steps:>10} {finding.starts:>6}  "
    return line + ("yes" if finding.identical else f"no: {finding.trouble or 'another result'}; see {finding.folder}")


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} s"
