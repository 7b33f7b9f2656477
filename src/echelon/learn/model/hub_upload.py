"""Uploads an exported folder to a repository of the Hugging Face hub.

The token is read by `huggingface_hub` alone, from HF_TOKEN or the login of `hf auth login`: echelon neither stores nor
logs it.
"""

import logging
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from typing_extensions import override

from echelon.ground.errors import ConfigError, EchelonError, HubUnreachableError, first_line
from echelon.ground.sizes import render_bytes
from echelon.learn.model.hub import describe_unreachable, is_hub_reachable

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Repository:
    """A model repository to upload to: `NAME` or `OWNER/NAME`, and a branch; None for the main one."""

    name: str
    private: bool = False
    revision: str | None = None

    @override
    def __str__(self) -> str:
        """Return the start of a message about it."""
        return f"--push {self.name}"


def open_repository(wanted: Repository) -> Repository:
    """Create the repository and its branch if they do not exist; return it with its full name, OWNER/NAME.

    Raises:
        ConfigError: no token, an invalid name, a name that belongs to others, or an existing public repository although
            `private` is set.
        HubUnreachableError: there is no connection to the hub.
    """
    from huggingface_hub import HfApi, get_token

    if get_token() is None:
        raise ConfigError(
            f"{wanted}: no token is set; set HF_TOKEN to a token with write access, or log in with `hf auth login`."
        )
    if not is_hub_reachable():
        raise HubUnreachableError(
            f"{wanted}: {describe_unreachable()}",
            "Export to a folder without --push, and upload it from a machine with network access: hf upload "
            f"{wanted.name} FOLDER .",
        )
    api = HfApi()
    with _explained(wanted):
        name = api.create_repo(wanted.name, private=wanted.private or None, exist_ok=True).repo_id
        api.auth_check(name, write=True)
        is_public = not api.model_info(name).private
        if wanted.revision is not None:
            api.create_branch(name, branch=wanted.revision, exist_ok=True)
    if wanted.private and is_public:
        raise ConfigError(
            f"{wanted} --private: the repository {name} exists and is public; remove --private, or choose another name."
        )
    return Repository(name, wanted.private, wanted.revision)


def upload_folder(folder: Path, repository: Repository) -> str:
    """Upload a folder in one commit; return the URL of the commit. What the hub already has is not sent again.

    Raises:
        EchelonError: the upload failed; the message has the command that repeats it.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]

    disable_progress_bars()
    files = [path for path in folder.rglob("*") if path.is_file()]
    size = sum(path.stat().st_size for path in files)
    logger.info(f"push: uploading {folder} to {repository.name}: {len(files)} files, {render_bytes(size)}")
    try:
        commit = HfApi().upload_folder(
            repo_id=repository.name,
            folder_path=folder,
            revision=repository.revision,
            commit_message="Upload a model trained with echelon",
        )
    except Exception as error:  # the client also raises the errors of its HTTP library
        again = ["hf", "upload", repository.name, str(folder), "."]
        again += [] if repository.revision is None else ["--revision", repository.revision]
        raise EchelonError(
            f"{repository}: the upload failed ({first_line(error)}); the export in {folder} is complete. Repeat the "
            f"upload with: {shlex.join(again)}"
        ) from error
    return str(commit.commit_url)


@contextmanager
def _explained(wanted: Repository) -> Iterator[None]:
    """Turn errors of the hub's client into one message."""
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        yield
    except HFValidationError as error:
        raise ConfigError(f"{wanted}: {first_line(error)}") from error
    except HfHubHTTPError as error:
        code = error.response.status_code
        if code == 401:
            raise ConfigError(
                f"{wanted}: the hub rejects the token; set HF_TOKEN to a valid token, or log in with `hf auth login`."
            ) from error
        if code in (403, 404):
            raise ConfigError(
                f"{wanted}: the name is taken or belongs to others: the token may not write there; choose a name of "
                "your own account or organization, or a token with write access."
            ) from error
        raise EchelonError(f"{wanted}: the hub refused the repository ({first_line(error)}).") from error
    except OSError as error:
        raise EchelonError(f"{wanted}: the connection to the hub failed ({first_line(error)}); try again.") from error
