"""Checks of a job before it is submitted, also of the packages that it needs; the result lists the checks left to
its target.

Recipes with secrets are refused: they are stored in plain text, on this machine and at the target.
"""

import logging
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from echelon.ground.errors import (
    ConfigError,
    DataError,
    EchelonError,
    HubUnreachableError,
    MissingSettingError,
    PlanError,
)
from echelon.ground.extras import EXTRAS, find_missing_package, pip_command
from echelon.ground.sizes import render_bytes
from echelon.launch.job import JobSpec, Launcher, find_launcher
from echelon.launch.ray.submission import INSTALLERS, read_packages
from echelon.launch.sagemaker.request import find_trained_recipe
from echelon.launch.sagemaker.staging import CHECKPOINT_DIR
from echelon.launch.source_bundle import list_extras
from echelon.learn.data.corpus import list_corpus
from echelon.learn.data.prepare import prepare_data
from echelon.learn.data.prepare_spec import prepare_spec
from echelon.learn.data.shared_folders import is_given
from echelon.learn.data.source import find_absent
from echelon.learn.data.templates import load_template
from echelon.learn.model.hub import find_commits
from echelon.planner.choose import resolve_plan
from echelon.planner.hardware.accelerators import Cluster, parse_devices
from echelon.planner.hardware.job_machines import find_machines
from echelon.planner.machines import choose_instance, find_cluster
from echelon.planner.memory import estimate_memory
from echelon.planner.model_shape import ModelShape
from echelon.planner.plan_fields import choose_precision
from echelon.planner.replica_limits import refuse_living_on
from echelon.recipe.document import Recipe
from echelon.recipe.launch_sections import LaunchConfig
from echelon.recipe.messages import read_fault
from echelon.recipe.names import LAUNCHERS, NATIVE
from echelon.recipe.render import find_secret_keys, plain_value, recipe_mapping
from echelon.recipe.yaml_text import show_value
from echelon.run.folder.cost import check_budget, describe_cost, find_price_at_target
from echelon.run.folder.run_folder import RunFolder
from echelon.run.lifecycle.model_checks import check_model, find_checkpoint_out_of_reach

logger = logging.getLogger(__name__)

_INSTANCE_TYPE, _REGION = "launch.sagemaker.instance_type", "launch.sagemaker.region"
# The bare name, also with extras or a version: no path, address, direct reference, or part of another name.
_NAMESAKE = r"echelon(?=[\s'\"\[=<>~!;&|]|$)(?!(\[[^\]]*\])?\s*@)"
_INSTALLS_NAMESAKE = re.compile(rf"\b(?:pip3?|uv)\b[^;&|#]*\binstall\b[^;&|#]*[\s'\"]{_NAMESAKE}")


@dataclass(frozen=True)
class CheckedJob:
    """The launcher of a job, the files that it submits, and lines for the user.

    `missing`: the settings without which it cannot be submitted; the files then have placeholders in their place.
    """

    launcher: Launcher
    texts: dict[str, str]
    lines: tuple[str, ...]
    missing: tuple[EchelonError, ...] = ()


def check_job(job: JobSpec) -> CheckedJob:
    """Run all checks that are possible on this machine; returns the job exactly as it will be submitted.

    Raises ConfigError, DataError or PlanError naming the key, for missing settings all of their keys.
    """
    filled, lines, missing = _fill_missing(job)
    if len(missing) == 1:
        raise missing[0]
    if missing:
        raise refuse_missing(missing, shown=False)
    return _check_whole(filled, lines, ())


def preview_job(job: JobSpec) -> CheckedJob:
    """Like `check_job`, but with placeholders for settings that are missing, for a look at what would be submitted."""
    filled, lines, missing = _fill_missing(job)
    try:
        return _check_whole(filled, lines, missing)
    except EchelonError as error:
        if not missing:
            raise
        raise refuse_missing([*missing, error], shown=False) from error


def refuse_missing(missing: Sequence[EchelonError], shown: bool = True) -> ConfigError:
    """The error with all missing settings; `shown`: with the placeholder of each, which the user sees in its place."""
    one = len(missing) == 1
    lines = [f"nothing can be submitted yet; {'one setting is' if one else f'{len(missing)} settings are'} not right:"]
    for error in missing:
        words = str(error)
        if shown and isinstance(error, MissingSettingError):
            value = next(iter(error.placeholders.values()))
            words += " Left out here." if value is None else f" Shown here as {show_value(plain_value(value))}."
        lines.append(f"  - {words}")
    return ConfigError("\n".join(lines), [read_fault(str(error)) for error in missing])


def _fill_missing(job: JobSpec) -> tuple[JobSpec, list[str], tuple[EchelonError, ...]]:
    """The job with placeholders for missing settings, the lines of its launcher, and an error for each setting.

    Raises the error of a setting that is there and wrong, with all that are missing.
    """
    recipe = job.recipe
    if recipe.launch.to is None:
        raise ConfigError(f"launch.to is not set; add --to with one of {', '.join(LAUNCHERS)}.")
    launcher = find_launcher(recipe.launch.to)
    if recipe.launch.num_spares and not launcher.has_spares:
        raise ConfigError(
            f"launch.nodes={recipe.launch.nodes}: no machine waits as a spare with launch.to={recipe.launch.to}, only "
            f"with torchrun and slurm; use launch.nodes={recipe.launch.max_training}."
        )
    refuse_secrets(recipe)
    if not launcher.keeps_others:
        refuse_living_on(recipe)
    spec = prepare_spec(recipe)
    missing: list[EchelonError] = []
    if launcher.sees_files:
        missing += find_absent((*spec.train, *spec.validation))

    def check(job: JobSpec) -> list[str]:
        lines = launcher.check(job)
        if not _lacks_machines(recipe):
            check_budget(job.recipe, find_price_at_target(job.recipe))
        return lines

    return _collect_missing(job, check, missing)


def _collect_missing(
    job: JobSpec, check: Callable[[JobSpec], list[str]], missing: list[EchelonError]
) -> tuple[JobSpec, list[str], tuple[EchelonError, ...]]:
    """Like `_fill_missing`, of a check of a job; `missing`: what is missing already."""
    while True:
        try:
            return job, check(job), tuple(missing)
        except MissingSettingError as error:
            missing.append(error)
            job = replace(job, recipe=_fill(job.recipe, error.placeholders))
        except EchelonError as error:
            if not missing:
                raise
            raise refuse_missing([*missing, error], shown=False) from error


def _lacks_machines(recipe: Recipe) -> bool:
    """Whether a SageMaker job has no machines yet, so that its price and its memory are unknown."""
    settings = recipe.launch.sagemaker
    return recipe.launch.to == "sagemaker" and settings.instance_type is None and not settings.instance_groups


def _fill(recipe: Recipe, placeholders: Mapping[str, Any]) -> Recipe:
    """The recipe with these values, by dotted key."""
    plain = recipe_mapping(recipe)
    for key, value in placeholders.items():
        *sections, name = key.split(".")
        parent: Any = plain
        for part in sections:
            parent = parent[int(part)] if isinstance(parent, list) else parent.setdefault(part, {})
        parent[name] = plain_value(value)
    return Recipe.model_validate(plain)


def _check_whole(job: JobSpec, lines: Sequence[str], missing: tuple[EchelonError, ...]) -> CheckedJob:
    """Check the data, the model and the plan of a job without missing settings; `lines` are its launcher's."""
    recipe, target = job.recipe, job.recipe.launch.to
    assert target is not None
    notes: list[str] = []
    launcher = find_launcher(target)
    if launcher.sees_files and not any(isinstance(error, DataError) for error in missing):
        with _left_to_the_job(target, notes):
            if target == "local":
                find_commits(recipe, {})
            spec = prepare_spec(recipe)
            if not is_given(spec):
                list_corpus(spec.train, spec.validation)
    if target == "sagemaker":
        with _left_to_the_job(target, notes):
            _check_uploads(recipe)
    trained = _find_trained_recipe(recipe)
    unset = {key for error in missing if isinstance(error, MissingSettingError) for key in error.placeholders}
    machines_known = _INSTANCE_TYPE not in unset
    checked: list[str] = []
    with _left_to_the_job(target, notes):
        checked = _check_model(trained, find_target_cluster(trained) if machines_known else None)
    told = [*lines, *checked, *notes, *describe_packages(trained)]
    if machines_known:
        told += _describe_price(job if _REGION not in unset else replace(job, recipe=_fill(recipe, {_REGION: None})))
    return CheckedJob(launcher, launcher.render(job), tuple(told), missing)


def _describe_price(job: JobSpec) -> Iterator[str]:
    recipe, target = job.recipe, job.recipe.launch.to
    assert target is not None
    rate = find_price_at_target(recipe)
    if rate is None and target != "local":
        yield "cost: the price of these machines is unknown; set budget.usd_per_hour, the price of one machine"
    num_steps = None if recipe.train.epochs is not None else recipe.num_steps(0)
    yield from describe_cost(recipe, find_run_folder(target, recipe.run.dir), rate, job.nodes[1], num_steps)


@contextmanager
def _left_to_the_job(target: str, notes: list[str]) -> Iterator[None]:
    """Add a note instead of an error if the hub cannot be reached from here: the job's machines may reach it."""
    try:
        yield
    except HubUnreachableError as error:
        if target == "local":
            raise
        notes.append(f"hub: not checked, left to the machines of the job: {error.reason}")


def _check_uploads(recipe: Recipe) -> None:
    """Raise DataError or ConfigError for local data files that cannot be used as the recipe says.

    In the container the sources are in separate folders, so overlap of training and validation data is no longer
    detectable there.
    """
    spec = prepare_spec(recipe)
    if str(spec.prepared_dir).startswith(("s3:/", "/opt/ml/")):
        return
    if is_given(spec):
        prepare_data(recipe)
        return
    train, validation = (
        [source for source in sources if source.format != "hub" and not source.path.startswith(("s3://", "/opt/ml/"))]
        for sources in (spec.train, spec.validation)
    )
    list_corpus(train, validation)
    if recipe.data.chat_template is not None:
        load_template(recipe.data.chat_template)


def settle_instance(recipe: Recipe) -> Recipe:
    """Replace the instance type `auto` by a concrete type and log the choice. Raises PlanError."""
    if recipe.launch.to != "sagemaker" or recipe.launch.sagemaker.instance_type != "auto":
        return recipe
    if (why := find_checkpoint_out_of_reach(recipe)) is not None:
        raise ConfigError(f"launch.sagemaker.instance_type=auto: {why}, so its size is unknown; set a type.")
    try:
        shape = check_model(recipe, elsewhere=True).shape
    except HubUnreachableError as error:
        raise ConfigError(
            f"launch.sagemaker.instance_type=auto: the size of the model is unknown ({error.reason}); set a type."
        ) from error
    choice = choose_instance(recipe, shape, recipe.launch.max_training)
    for line in choice.describe():
        logger.info(line)
    sagemaker = recipe.launch.sagemaker.model_copy(update={"instance_type": choice.instance.name})
    return recipe.model_copy(update={"launch": recipe.launch.model_copy(update={"sagemaker": sagemaker})})


def find_target_cluster(recipe: Recipe) -> Cluster | None:
    """The hardware that the recipe specifies, None if it does not. Raises ConfigError if it is incomplete."""
    launch = recipe.launch
    if launch.to == "sagemaker":
        machines = find_machines(launch)
        return find_cluster(recipe, machines.weakest, machines.count)
    if launch.accelerator is None:
        return None
    if not (count := _count_devices(launch)):
        raise ConfigError(
            f"launch.accelerator={launch.accelerator}: the number per machine is unknown; set "
            "launch.nproc_per_node, or omit launch.accelerator."
        )
    return parse_devices(f"{launch.max_training * count}x{launch.accelerator}", count)


def _count_devices(launch: LaunchConfig) -> int | None:
    """The number of devices requested per machine; None if the recipe does not set it."""
    if launch.nproc_per_node != "auto":
        return launch.nproc_per_node
    count: int | None = getattr(getattr(launch, launch.to or "", None), "gpus_per_node", None)
    return count


def _find_trained_recipe(recipe: Recipe) -> Recipe:
    """The recipe as its target trains it: `launch.sagemaker.distribution` may change the plan."""
    if recipe.launch.to != "sagemaker":
        return recipe
    return find_trained_recipe(recipe)


def _check_model(recipe: Recipe, cluster: Cluster | None) -> list[str]:
    """Lines about the checks that are left to the target, and the memory the plan needs on these machines.

    Raises ConfigError, DataError or PlanError for a model that the target would refuse, or that does not fit there.
    """
    elsewhere = recipe.launch.to != "local"
    if cluster is not None:
        choose_precision(recipe, cluster)  # needs no model, which may be out of reach
    if elsewhere and (why := find_checkpoint_out_of_reach(recipe)) is not None:
        return [f"left to train: the model, and whether the plan fits the memory of the machines ({why})"]
    checked = check_model(recipe, elsewhere)
    lines = [f"left to train: {line}" for line in checked.left]
    return lines if cluster is None else [*lines, _check_plan(recipe, checked.shape, cluster)]


def _check_plan(recipe: Recipe, shape: ModelShape, cluster: Cluster) -> str:
    """A line about the memory that the plan needs there. Raises PlanError if it does not fit."""
    plan = resolve_plan(recipe, shape, cluster)
    needed = estimate_memory(shape, plan, cluster.kind).total
    there = cluster.accelerator.memory_bytes
    words = f"{plan.strategy} on {cluster.num_devices} x {cluster.accelerator.name} needs {render_bytes(needed)} each"
    if there is not None and needed > there:
        raise PlanError(
            f"parallel={plan.strategy}: the plan needs {render_bytes(needed)} on each {cluster.accelerator.name}, "
            f"which has {render_bytes(there)}; lower train.micro_batch_size, shard more (parallel: fsdp), set "
            "train.activation_checkpointing: full, or use more machines."
        )
    return f"plan: {words}" + ("" if there is None else f" of {render_bytes(there)}")


def find_run_folder(target: str, here: Path) -> RunFolder:
    """The run folder at the target. In a container it differs from the one here, which a local run may use."""
    return RunFolder(Path(CHECKPOINT_DIR) / here.name if target == "sagemaker" else here)


def refuse_secrets(recipe: Recipe) -> None:
    """Raise ConfigError for the first value that looks like a secret; the message has its key and no part of it.

    Checks the whole recipe: scripts and requests are made from it, and the job trains from a copy in which secrets
    are redacted. `launch.to` must be set.
    """
    assert recipe.launch.to is not None
    for key in find_secret_keys(recipe):
        raise ConfigError(
            f"{key} looks like a secret, and launch.to={recipe.launch.to} stores what it submits in plain text; "
            f"remove it, and {find_launcher(recipe.launch.to).way_of_secrets}."
        )


def describe_packages(recipe: Recipe) -> list[str]:
    """At most one line about the packages that the job needs, and who provides them.

    Raises ConfigError for a package that is missing where the job's Python is the one that runs this process, and for
    an installation of the other project that has echelon's name at the package index.
    """
    launch, needed = recipe.launch, list_extras(recipe)
    _refuse_namesake(launch)
    assert launch.to is not None
    source, where = find_launcher(launch.to).find_packages(launch)
    words = ", ".join(f"{extra} ({key})" for extra, key in needed.items())
    if source == "wheel":
        return [f"packages: {where} installs the wheel of echelon that the job brings{words and ', with '}{words}"]
    if source == "self" or not needed:
        return []
    if source == "shared":
        _refuse_missing(recipe, needed)
        return []
    if source == "there":
        return [f"packages: {where} must have echelon with its extras {words}; this cannot be checked here"]
    if others := [extra for extra in needed if extra not in EXTRAS]:
        where = f"{where} must contain {', '.join(others)}, which cannot be checked here"
        return [f"packages: {where}; the container installs what else it lacks"]
    return [f"packages: the container installs what its image lacks of echelon's extras {words}"]


def _refuse_namesake(launch: LaunchConfig) -> None:
    """Refuse `pip install echelon`: at the package index this is another project."""
    lines = [(f"setup.{index}", line) for index, line in enumerate(launch.setup) if _INSTALLS_NAMESAKE.search(line)]
    for tool in INSTALLERS:
        packages = read_packages(launch.ray.runtime_env.get(tool)) or []
        lines += [(f"ray.runtime_env.{tool}", line) for line in map(str, packages) if re.match(_NAMESAKE, line)]
    for key, line in lines:
        raise ConfigError(
            f"launch.{key}: {line} installs another project, which has this name at the package index; remove it: jobs "
            "of skypilot, and of ray with launch.ray.runtime_env.pip, bring a wheel of echelon; for other targets use "
            "an image that has it, or pip install with the address of a checkout or a wheel."
        )


def _refuse_missing(recipe: Recipe, needed: dict[str, str]) -> None:
    for extra, key in needed.items():
        if (package := find_missing_package(extra)) is not None:
            fix = f"run {sys.executable} -m {pip_command(extra)}"
            if extra == recipe.engine:
                fix = f"see docs/engines.md for how to install it, or use engine={NATIVE}"
            raise ConfigError(
                f"{key} requires the package {package}, which {sys.executable}, the Python of the job, does not have; "
                f"{fix}."
            )
