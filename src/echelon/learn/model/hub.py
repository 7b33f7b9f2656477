"""Models, tokenizers and datasets of the Hugging Face hub: resolves their commits, and downloads them.

All downloads are made here, and uploads in `hub_upload.py`; the other modules read local folders. The first process of
a run resolves each name to a commit once, and every machine downloads that commit: a repository may change between two
downloads.
"""

import logging
import platform
import re
import socket
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from enum import Enum
from glob import escape
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from typing_extensions import override

from echelon.ground.errors import ConfigError, DataError, EchelonError, HubUnreachableError, first_line, is_disk_full
from echelon.ground.progress import Progress
from echelon.ground.sizes import render_bytes
from echelon.ground.stored import read_json, read_text, write_json
from echelon.recipe.document import Recipe
from echelon.recipe.inputs import SourceConfig
from echelon.recipe.rollout import RewardConfig

logger = logging.getLogger(__name__)

CONNECT_SECONDS = 5.0
DATASET = "datasets/"
"""Prefix of dataset names in a mapping that also contains model names, as in URLs of the hub."""

_COMMIT = re.compile(r"[0-9a-f]{40}")
# Files at the top of a repository; its subfolders contain the same model in other formats.
_FILES = re.compile(r"[^/]+\.(json|txt|model|jinja|tiktoken)|additional_chat_templates/[^/]+\.jinja")
_INDEX, _WEIGHTS = "model.safetensors.index.json", "model.safetensors"
_POLL_SECONDS = 0.5
_PROGRESS_SECONDS = 10.0


class Part(Enum):
    """Which files of a model are needed: config.json, all files except weights, or all files."""

    CONFIG = "config"
    FILES = "files"
    WEIGHTS = "weights"


@dataclass(frozen=True)
class HubModel:
    """A model or tokenizer of the hub. `key`: its recipe key. `code`: whether to download its Python files."""

    name: str
    key: str
    part: Part
    code: bool = False

    @override
    def __str__(self) -> str:
        """Return the start of a message about it: key=name."""
        return f"{self.key}={self.name}"


def is_hub_reachable() -> bool:
    """Whether the hub, or the proxy in front of it, accepts connections, and HF_HUB_OFFLINE is not set.

    Takes a few seconds at most: the hub's own client retries for half a minute.
    """
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    endpoint = urlsplit(constants.ENDPOINT)
    proxy = getproxies().get(endpoint.scheme)
    if proxy and not proxy_bypass(endpoint.hostname or ""):
        endpoint = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    port = endpoint.port or (443 if endpoint.scheme == "https" else 80)
    try:
        socket.create_connection((endpoint.hostname or "", port), timeout=CONNECT_SECONDS).close()
    except OSError:
        return False
    return True


def is_hub_name(name: str) -> bool:
    """Whether a value of the recipe is a hub id: the hub allows that name, and no such local path exists."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return not Path(name).exists()


def find_models(recipe: Recipe, weights: bool = True) -> list[HubModel]:
    """Return the models and tokenizers that the recipe needs from the hub, each name once.

    With `weights` False, weights are not needed yet.
    """
    models: dict[str, HubModel] = {}
    code, part = recipe.model.trust_remote_code, Part.WEIGHTS if weights else Part.FILES
    if isinstance(recipe.tokenizer, str) and recipe.tokenizer != "bytes" and is_hub_name(recipe.tokenizer):
        models[recipe.tokenizer] = HubModel(recipe.tokenizer, "tokenizer", Part.FILES, code)
    if recipe.model.checkpoint is not None and is_hub_name(recipe.model.checkpoint):
        models[recipe.model.checkpoint] = HubModel(recipe.model.checkpoint, "model.checkpoint", part, code)
    if recipe.objective.teacher_in_memory and (teacher := recipe.objective.teacher) and is_hub_name(teacher):
        models[teacher] = HubModel(teacher, "objective.teacher", part, code)
    for index, reward in enumerate(recipe.reward):
        if (path := reward.model_path) is not None and is_hub_name(path):
            models[path] = HubModel(path, f"reward.{index}.options.path", part, code)
    return list(models.values())


def find_commits(recipe: Recipe, known: Mapping[str, str]) -> dict[str, str]:
    """Return the commit of every model and dataset that the recipe needs from the hub: from `known`, else the newest.

    Raises ConfigError for a missing repository, HubUnreachableError if neither the hub nor the cache has the answer.
    """
    commits = {}
    for model in find_models(recipe):
        commits[model.name] = known.get(model.name) or _find_newest(model)
    for key, source in _sources(recipe):
        name = f"{DATASET}{dataset_name(source.path)}"
        if "@" not in source.path:
            commits[name] = known.get(name) or find_dataset_commit(source.path, f"{key}.path={source.path}")
    return commits


def describe_commits(commits: Mapping[str, str]) -> list[str]:
    """Return lines for the user, one per model or dataset."""
    return [f"hub: {name} is at commit {commit}" for name, commit in commits.items()]


def find_dataset_commit(path: str, where: str) -> str:
    """Return the newest commit of a dataset, `ORG/NAME` or `ORG/NAME/CONFIG`.

    Raises the errors of `find_commits`; their messages start with `where`.
    """
    from huggingface_hub import HfApi

    name = dataset_name(path)
    with _explained(where, "dataset", f"https://huggingface.co/datasets/{name}"):
        if not is_hub_reachable():
            raise HubUnreachableError(
                f"{where}: {describe_unreachable()}",
                "Download the dataset on a machine with network access, store it with its save_to_disk, and give "
                "that folder.",
            )
        return str(HfApi().dataset_info(name).sha)


def dataset_name(path: str) -> str:
    """Return the repository of a dataset's path: `ORG/NAME` of `ORG/NAME/CONFIG@COMMIT`."""
    return "/".join(path.partition("@")[0].split("/")[:2])


def fetch_models(recipe: Recipe, commits: Mapping[str, str], weights: bool = True) -> None:
    """Download the recipe's models and tokenizers from the hub, except files that are already cached.

    Called by the first process of each machine, before a process group exists: a download may take longer than its
    timeout. With `weights` False, weights are not downloaded. Raises the errors of `fetch`.
    """
    for model in find_models(recipe, weights):
        fetch(model, _pinned(model, commits))


def fetch_other_configs(recipe: Recipe) -> None:
    """Download the config.json of teachers and reward models, from which a plan counts them; not if the hub is away.

    Raises ConfigError if the hub refuses one.
    """
    if recipe.objective.teacher is None and not any(reward.is_model for reward in recipe.reward):
        return
    for model in find_models(recipe):
        if model.key.startswith(("objective.", "reward.")):
            with suppress(HubUnreachableError):
                fetch(replace(model, part=Part.CONFIG))


def write_commits(path: Path, commits: Mapping[str, str]) -> None:
    """Write a run's commits to its hub.json, so that all its machines and restarts use the same ones."""
    if commits:
        write_json(path, dict(commits))
    else:
        path.unlink(missing_ok=True)


def read_commits(path: Path) -> dict[str, str]:
    """Read the commits that `write_commits` wrote; empty if there is no file. Raises DataError for a damaged file."""
    try:
        commits = read_json(path)
        if not all(_COMMIT.fullmatch(commit) for commit in commits.values()):
            raise ValueError("it contains an invalid commit")
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise DataError(
            f"{path}: cannot read the hub commits that this run started with ({error}); restore the file "
            "from a copy of the run, or remove it to continue with the newest commits."
        ) from error
    return dict(commits)


def with_copies(recipe: Recipe, commits: Mapping[str, str], weights: bool = True) -> Recipe:
    """Return the recipe with hub ids replaced by this machine's local copies. Makes no network request.

    Raises HubUnreachableError if there is no complete local copy.
    """
    copies = {model.name: str(_find_copy(model, _pinned(model, commits))) for model in find_models(recipe, weights)}
    changes: dict[str, Any] = {}
    if recipe.model.checkpoint in copies:
        changes["model"] = recipe.model.model_copy(update={"checkpoint": copies[recipe.model.checkpoint]})
    if isinstance(recipe.tokenizer, str) and recipe.tokenizer in copies:
        changes["tokenizer"] = copies[recipe.tokenizer]
    if recipe.objective.teacher in copies:
        changes["objective"] = recipe.objective.model_copy(update={"teacher": copies[recipe.objective.teacher]})
    if any(reward.model_path in copies for reward in recipe.reward):
        changes["reward"] = tuple(_with_copy(reward, copies) for reward in recipe.reward)
    pinned = {part: tuple(_pin(source, commits) for source in getattr(recipe.data, part)) for part in _PARTS}
    if any(pinned[part] != getattr(recipe.data, part) for part in _PARTS):
        changes["data"] = recipe.data.model_copy(update=pinned)
    return recipe.model_copy(update=changes) if changes else recipe


def _with_copy(reward: RewardConfig, copies: Mapping[str, str]) -> RewardConfig:
    if (path := reward.model_path) is None or path not in copies:
        return reward
    return reward.model_copy(update={"options": {**(reward.options or {}), "path": copies[path]}})


def _pinned(model: HubModel, commits: Mapping[str, str]) -> str:
    if model.name not in commits:
        raise ConfigError(
            f"{model}: this folder exists on the machine where the run was prepared, but not on {platform.node()}; "
            "copy the folder to the same path on every machine."
        )
    return commits[model.name]


_PARTS = ("train", "validation")


def _pin(source: SourceConfig, commits: Mapping[str, str]) -> SourceConfig:
    commit = commits.get(f"{DATASET}{dataset_name(source.path)}") if source.format == "hub" else None
    if commit is None or "@" in source.path:
        return source
    return source.model_copy(update={"path": f"{source.path}@{commit}", "name": source.label})


def _sources(recipe: Recipe) -> Iterator[tuple[str, SourceConfig]]:
    """Yield the sources that are datasets of the hub, with their recipe keys."""
    for part in _PARTS:
        for index, source in enumerate(getattr(recipe.data, part)):
            if source.format == "hub" and not Path(source.path).expanduser().is_dir():
                yield f"data.{part}.{index}", source


def fetch(model: HubModel, commit: str | None = None) -> Path:
    """Return this machine's copy of a model after downloading its missing files. `commit`: None for the newest.

    Raises ConfigError if the hub refuses it, HubUnreachableError if the hub cannot be reached and there is no complete
    copy, EchelonError if the download fails or the disk is full.
    """
    from huggingface_hub import HfApi

    if commit is None:
        commit = _find_newest(model)
    if not is_hub_reachable():
        return _find_copy(model, commit)
    with _explained(str(model), "model", f"https://huggingface.co/{model.name}"):
        siblings = HfApi().model_info(model.name, revision=commit, files_metadata=True).siblings or []
        sizes = {sibling.rfilename: sibling.size or 0 for sibling in siblings}
        folder = _download(model, commit, _choose_small(model, sizes), sizes, logging.DEBUG)
        if model.part is Part.WEIGHTS:
            files = _list_weights(folder, _INDEX in sizes)
            if missing := [name for name in files if name not in sizes]:
                raise ConfigError(
                    f"{model}: its repository has no {missing[0]}; echelon reads safetensors only, never pickled "
                    "weights: convert the checkpoint with `model.save_pretrained(...)` and give its folder."
                )
            folder = _download(model, commit, files, sizes, logging.INFO)
    return folder


def _choose_small(model: HubModel, names: Iterable[str]) -> list[str]:
    """Return the files to download other than weights. Raises ConfigError for a repository without a model."""
    pattern = re.compile(r"config\.json" if model.part is Part.CONFIG else _FILES.pattern)
    chosen = [name for name in names if pattern.fullmatch(name) or (model.code and name.endswith(".py"))]
    if model.key != "tokenizer" and "config.json" not in chosen:
        raise ConfigError(f"{model}: its repository on the hub has no config.json; give a model of transformers.")
    if not chosen:
        raise ConfigError(f"{model}: its repository on the hub has no tokenizer; give one that has.")
    return chosen


def _list_weights(folder: Path, has_index: bool) -> list[str]:
    """Return the weight files: those in the index, which is already downloaded, else the single safetensors file."""
    if not has_index:
        return [_WEIGHTS]
    try:
        names = set(read_json(folder / _INDEX)["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{folder / _INDEX} cannot be read ({error}); the repository on the hub is damaged."
        ) from error
    return sorted(str(name) for name in names)


def _download(model: HubModel, commit: str, names: list[str], sizes: Mapping[str, int], level: int) -> Path:
    """Download files into the cache, several at a time, and return the commit's folder. Logs progress at `level`."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]

    folder = _copy_folder(model, commit)
    missing = [name for name in names if not (folder / name).exists()]
    if not missing:
        return folder
    total = sum(sizes[name] for name in missing)
    logger.log(
        level,
        f"hub: fetching {model.name} at commit {commit[:12]}: {len(missing)} files, {render_bytes(total)}, to "
        f"{folder.parents[2]}",
    )
    disable_progress_bars()
    progress = Progress(f"hub: {model.name}", total, logger, level, _PROGRESS_SECONDS)
    blobs = folder.parents[1] / "blobs"
    before = _count_bytes(blobs)
    patterns = [escape(name) for name in missing]
    copying = ThreadPoolExecutor(1).submit(snapshot_download, model.name, revision=commit, allow_patterns=patterns)
    try:
        while wait([copying], _POLL_SECONDS).not_done:
            come = min(_count_bytes(blobs) - before, total)
            progress.add(max(0, come - progress.done_bytes))
    except BaseException:  # a stop, after whose message the client's threads go on until the process is ended
        logging.getLogger("huggingface_hub").setLevel(logging.CRITICAL)
        raise
    copying.result()
    if absent := [name for name in missing if not (folder / name).exists()]:  # it accepts a part if the hub fails
        raise OSError(f"{absent[0]} did not arrive")
    progress.add(total - progress.done_bytes)
    progress.finish()
    return folder


def _count_bytes(folder: Path) -> int:
    """Return the total size of the files in a folder, including those being written."""
    total = 0
    for path in folder.glob("*"):
        with suppress(OSError):  # renamed meanwhile
            total += path.stat().st_size
    return total


def _find_newest(model: HubModel) -> str:
    """Return a model's newest commit on the hub; if the hub cannot be reached, the newest one in the local cache.

    The cache stores it as huggingface_hub does: https://huggingface.co/docs/huggingface_hub/guides/manage-cache
    """
    from huggingface_hub import HfApi

    note = _cache_folder(model) / "refs" / "main"
    if is_hub_reachable():
        with _explained(str(model), "model", f"https://huggingface.co/{model.name}"):
            commit = str(HfApi().model_info(model.name).sha)
            with suppress(OSError):  # the cache may be read-only
                note.parent.mkdir(parents=True, exist_ok=True)
                note.write_text(commit, encoding="utf-8")
            return commit
    try:
        return read_text(note).strip()
    except OSError:
        raise _unreachable(model) from None


def _find_copy(model: HubModel, commit: str) -> Path:
    """Return a commit's folder in the cache, with weights if needed. Raises HubUnreachableError if incomplete."""
    folder = _copy_folder(model, commit)
    if not any((folder / name).is_file() for name in ("config.json", "tokenizer.json", "tokenizer_config.json")):
        raise _unreachable(model, commit)
    if model.part is Part.WEIGHTS and not all(
        (folder / name).is_file() for name in _list_weights(folder, (folder / _INDEX).exists())
    ):
        raise _unreachable(model, commit)
    return folder


def _cache_folder(model: HubModel) -> Path:
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    return Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=model.name, repo_type="model")


def _copy_folder(model: HubModel, commit: str) -> Path:
    return _cache_folder(model) / "snapshots" / commit


def _unreachable(model: HubModel, commit: str | None = None) -> HubUnreachableError:
    at = "" if commit is None else f" at commit {commit[:12]}"
    return HubUnreachableError(
        f"{model}: there is no such folder, {describe_unreachable()}, and the cache in "
        f"{_cache_folder(model).parent} has no complete copy of it{at}",
        f"Give a folder, or download it on a machine with network access (hf download {model.name}) and copy its "
        "cache.",
    )


def describe_unreachable() -> str:
    """Return why the hub cannot be reached from this machine."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return f"HF_HUB_OFFLINE is set on {platform.node()}"
    return f"the hub ({constants.ENDPOINT}) cannot be reached from {platform.node()}"


@contextmanager
def _explained(where: str, kind: str, page: str) -> Iterator[None]:
    """Turn errors of the hub's client into one message that starts with `where`. `page`: the repository's URL."""
    from huggingface_hub import get_token
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError

    token = "the token in use has no access" if get_token() else "no token is set"
    try:
        yield
    except EchelonError:
        raise
    except GatedRepoError as error:
        raise ConfigError(
            f"{where}: this {kind} is gated, and on {platform.node()} {token}; ask its owner for access at {page}, and "
            "set HF_TOKEN there to a token of that account."
        ) from error
    except RevisionNotFoundError as error:
        raise ConfigError(
            f"{where}: the hub no longer has the commit that this run started with ({first_line(error)}); copy the "
            "cache of a machine that has it, or pass --fresh to start over with the newest commit."
        ) from error
    except RepositoryNotFoundError as error:
        raise ConfigError(
            f"{where}: there is no such folder, and the hub has no such {kind}, or it is private ({token} on "
            f"{platform.node()}); check the id, give a folder, or set HF_TOKEN there."
        ) from error
    except Exception as error:  # the client also raises the errors of its HTTP library
        if isinstance(error, HfHubHTTPError) and error.response.status_code in (401, 403):
            raise ConfigError(
                f"{where}: the hub rejects the token on {platform.node()} ({first_line(error)}); set HF_TOKEN there to "
                "a valid token, or unset it."
            ) from error
        if is_disk_full(error):
            raise EchelonError(
                f"{where}: the disk of {platform.node()} is full; free space, or set HF_HOME to a folder on a larger "
                "disk."
            ) from error
        raise EchelonError(
            f"{where} could not be downloaded from the hub to {platform.node()} ({first_line(error)}); run the same "
            "command again; it skips completed files."
        ) from error
