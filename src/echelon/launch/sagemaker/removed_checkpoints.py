"""Remove in S3 what a run has removed in its checkpoint folder.

SageMaker copies new files of the folder to S3, and copies all of them back at a restart, but removes none: checkpoints
that `checkpoint.keep_last` has removed would cost money, and come back. So would what it copies of a checkpoint while
that is written, replaced or removed, in a folder of another name.
"""

import logging
import time
from pathlib import Path
from typing import Any

from echelon.ground.run_files import UNFINISHED

logger = logging.getLogger(__name__)

_LATE_SECONDS = 600.0
_CONNECT_SECONDS, _READ_SECONDS, _ATTEMPTS = 5, 20, 2


class CheckpointRemover:
    """Looks at the checkpoints of a run, `folder`, whose copy is at `address` in S3.

    Only checkpoints that it has seen in the folder are removed, and the unfinished folders of those that it has seen
    come or go. An error ends it with one line: the run goes on.
    """

    def __init__(self, folder: Path, address: str, region: str | None) -> None:
        self._folder, self._region = folder, region
        self._bucket, _, prefix = address.removeprefix("s3://").partition("/")
        self._prefix = f"{prefix.strip('/')}/".lstrip("/")
        self._seen = self._list()
        self._due: dict[str, float] = {}
        self._s3: Any = None
        self._works = True

    def look(self) -> None:
        """Remove the copies of what has gone since the last look, and of what went shortly before.

        A file that SageMaker was copying meanwhile arrives later.
        """
        if not self._works:
            return
        for name in self._list_due():
            try:
                self._remove(f"{self._prefix}{name}/")
            except Exception as error:  # boto3 is missing, or AWS refuses: neither may end a run
                self._works = False
                logger.warning(
                    f"container: removed checkpoints stay in S3 below s3://{self._bucket}/{self._prefix}, and come "
                    f"back at a restart ({' '.join(str(error).split())}); the role of the job needs s3:ListBucket and "
                    "s3:DeleteObject there"
                )
                return

    def _list_due(self) -> list[str]:
        """The folders whose copies may be in S3, but which are not here."""
        now, clock = self._list(), time.monotonic()
        changed, self._seen = self._seen ^ now, now
        steps = {name.partition("-")[2] for name in changed}
        gone = changed | {f"{kind}-{step}" for kind in UNFINISHED for step in steps}
        due = {**self._due, **dict.fromkeys(gone, clock + _LATE_SECONDS)}
        self._due = {name: until for name, until in due.items() if until > clock and name not in now}
        return sorted(self._due)

    def _list(self) -> set[str]:
        kinds = ("step", *UNFINISHED)
        return {path.name for kind in kinds for path in self._folder.glob(f"{kind}-*") if path.is_dir()}

    def _remove(self, prefix: str) -> None:
        if self._s3 is None:
            import boto3
            from botocore.config import Config

            retries: Any = {"total_max_attempts": _ATTEMPTS, "mode": "standard"}
            settings = Config(connect_timeout=_CONNECT_SECONDS, read_timeout=_READ_SECONDS, retries=retries)
            self._s3 = boto3.Session(region_name=self._region).resource("s3", config=settings)
        for answer in self._s3.Bucket(self._bucket).objects.filter(Prefix=prefix).delete():
            if errors := answer.get("Errors"):
                raise PermissionError(f"{errors[0].get('Code')}: {errors[0].get('Message')}")
