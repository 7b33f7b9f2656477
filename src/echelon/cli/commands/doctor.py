"""`echelon doctor`: check this machine, or several machines and the network between them."""

import json
import logging
import tempfile
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from echelon.cli.commands.arguments import JsonOption, parse_hosts
from echelon.cli.commands.terminal import report_failure, show
from echelon.ground.errors import ConfigError

if TYPE_CHECKING:
    from echelon.recipe.launch_sections import LaunchConfig
    from echelon.tools.doctor.link_probe import Examination
    from echelon.tools.doctor.verdict import Finding

logger = logging.getLogger(__name__)


def doctor(
    words: Annotated[list[str] | None, typer.Argument(metavar="[RECIPE] [KEY=VALUE]...")] = None,
    *,
    hosts: Annotated[str | None, typer.Option(metavar="A,B")] = None,
    as_json: JsonOption = False,
) -> None:
    """Check this machine, or several and their network. Exit code 1 if a problem is found.

    Args:
        words: a recipe whose launch section has the connection settings; overrides.
        hosts: check these machines and the network between them.
    """
    from echelon.tools.doctor.machine import examine_machine

    launch = _read_launch(words or [], hosts)
    measured: dict[str, Any] = {}
    if launch.torchrun.hosts:
        measured_links, findings = _examine_hosts(launch)
        measured = describe_links(measured_links)
        for finding in [] if as_json else findings:
            show(_render(finding))
    else:
        findings = []
        for finding in examine_machine(Path.cwd()):
            findings.append(finding)
            if not as_json:
                show(_render(finding))
    problems = [finding for finding in findings if not finding.is_well]
    if as_json:
        show(json.dumps({"is_well": not problems, "findings": [asdict(row) for row in findings], **measured}))
    if problems:
        report_failure(f"{len(problems)} of {len(findings)} checks found a problem", 1)
        raise typer.Exit(1)


def _read_launch(words: list[str], hosts: str | None) -> "LaunchConfig":
    """The launch section of the recipe, or a default one, with the overrides of the command line."""
    from echelon.recipe.load import load_recipe, parse_recipe
    from echelon.recipe.render import render_starter

    recipes = [word for word in words if "=" not in word]
    overrides = [word for word in words if "=" in word]
    if len(recipes) > 1:
        raise ConfigError(f"{', '.join(recipes)} are {len(recipes)} recipes; give one, followed by KEY=VALUE.")
    if other := next((word for word in overrides if not word.strip().startswith("launch.")), None):
        raise ConfigError(f"{other} is not used by echelon doctor; give keys of the launch section.")
    if hosts is not None:
        overrides.append(parse_hosts(hosts))
    recipe = (
        load_recipe(Path(recipes[0]), overrides)[0]
        if recipes
        else (parse_recipe(render_starter(), "the command line", overrides)[0])
    )
    return recipe.launch


def _examine_hosts(launch: "LaunchConfig") -> "tuple[Examination, list[Finding]]":
    from echelon.launch.ssh_launcher import check_hosts, find_ssh
    from echelon.tools.doctor.link_probe import examine, probe_script, probes_over_ssh
    from echelon.tools.doctor.verdict import judge

    check_hosts(launch)
    torchrun = launch.torchrun
    if len(torchrun.hosts) < 2:
        raise ConfigError(f"--hosts {torchrun.hosts[0]} is one machine; run `echelon doctor` there, or give two hosts.")
    workdir = Path.cwd() if torchrun.workdir is None else Path(torchrun.workdir)
    with ExitStack() as stack:
        seen = None
        with suppress(OSError):  # without write access the shared folder is not checked
            mark = stack.enter_context(tempfile.NamedTemporaryFile(dir=".", prefix=".echelon-doctor-"))
            seen = Path(mark.name).name
        script = probe_script(launch, workdir)
        probes = stack.enter_context(probes_over_ssh(torchrun.hosts, find_ssh(launch), script))
        found = examine(probes, torchrun.port, torchrun.interface, seen)
    return found, judge(found)


def _render(finding: "Finding") -> str:
    line = f"{'ok' if finding.is_well else 'problem':<8} {finding.subject:<12} {finding.words}"
    return line if finding.is_well else f"{line}; {finding.remedy}"


def describe_links(found: "Examination") -> dict[str, Any]:
    """The measurements, for JSON output."""

    def value(speed: Any) -> Any:
        return {"error": speed} if isinstance(speed, str) else None if speed is None else asdict(speed)

    def listed(pairs: Iterable[tuple[tuple[str, str], Any]]) -> list[dict[str, Any]]:
        return [{"hosts": list(pair), **result} for pair, result in pairs]

    return {
        "hosts": dict(found.facts),
        "clock_offsets": dict(found.offsets),
        "blocked": listed((pair, {"reasons": dict(why)}) for pair, why in found.blocked.items()),
        "pairs": listed((pair, value(speed)) for pair, speed in found.pairs.items()),
        "together": value(found.whole),
    }
