"""`echelon launch RUN --to sagemaker-endpoint`: serve the model of a run."""

import json
import logging
from collections.abc import Mapping
from pathlib import Path

from echelon.cli.commands.jobs import name_job
from echelon.cli.commands.submission import handed_over_whole, show_files
from echelon.cli.commands.terminal import show
from echelon.ground.errors import ConfigError

logger = logging.getLogger(__name__)


def refuse_options(options: Mapping[str, object]) -> None:
    """Raise ConfigError for the first of these options that is given."""
    for name, given in options.items():
        if given:
            raise ConfigError(f"{name} has no meaning with --to sagemaker-endpoint; remove it.")


def serve_run(run: Path, overrides: list[str], instance: str | None, dry_run: bool, as_json: bool) -> None:
    """Check, show or create the endpoint of a run. Raises ConfigError, PlanError or LaunchError."""
    from echelon.launch.job_checks import check_endpoint, refuse_missing
    from echelon.launch.records import make_job, submit_job
    from echelon.recipe.load import load_recipe
    from echelon.run.folder.run_folder import RunFolder

    if not (path := RunFolder(run).recipe_path).is_file():
        raise ConfigError(f"{run} is not a run folder, but --to sagemaker-endpoint serves one; give runs/NAME.")
    machine = [] if instance is None else [f"launch.sagemaker.endpoint.instance_type={json.dumps(instance)}"]
    recipe, _ = load_recipe(path, [*overrides, *machine, f"run.dir={json.dumps(str(run))}"])
    job = make_job(recipe, Path.cwd())
    checked = check_endpoint(job)
    if checked.missing and not dry_run:
        raise refuse_missing(checked.missing, shown=False)
    for line in checked.lines:
        logger.info(line)
    if dry_run:
        show_files(checked, as_json)
        return
    with handed_over_whole(job.name):
        record = submit_job(job, checked.launcher, checked.texts, "sagemaker-endpoint")
    if as_json:
        show(json.dumps(name_job(record)))
    else:
        show(f"created endpoint {record.id}; echelon status {record.name}, echelon cancel {record.name} deletes it")
