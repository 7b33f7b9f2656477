"""What `make parity-table` keeps of each row that it compares: JSON lines, which a run that was killed goes on from."""

import hashlib
import json
import os
import platform
import re
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from tests.parity.training import Row

ROOT = Path(__file__).parents[2]
_TRAINED_BY = ("src/echelon/**/*.py", "tests/parity/*.py", "tests/families.py")


@dataclass(frozen=True)
class Difference:
    """How far a row is from the single process, over all steps.

    loss: absolute. loss_share: relative to the reference's loss. norm: of gradient norms, relative. weight: absolute,
    of any weight after the last step.
    """

    loss: float
    loss_share: float
    norm: float
    weight: float


@dataclass(frozen=True)
class Measured:
    """A row that was compared. `environment`: versions, hardware, date and the digest of the source."""

    row: Row
    difference: Difference
    equal: bool
    """Whether it is within its bounds, and batches and evaluations are the reference's."""
    seconds: float
    environment: Mapping[str, Any]

    @property
    def name(self) -> str:
        """The row's, in the tests."""
        return str(self.row)

    def to_line(self) -> str:
        """A line of the file: the options that are not those of the plainest row, and what was measured."""
        options = {item.name: getattr(self.row, item.name) for item in fields(Row)}
        changed = {name: value for name, value in options.items() if value != getattr(Row(), name)}
        numbers = {name: float(f"{value:.4g}") for name, value in asdict(self.difference).items()}
        return json.dumps({"row": changed, **numbers, "equal": self.equal, "seconds": round(self.seconds, 1)}) + "\n"


def digest_source() -> str:
    """Stands for all source that decides what a row measures: rows of another one are measured again."""
    digest = hashlib.sha256()
    for pattern in _TRAINED_BY:
        for path in sorted(ROOT.glob(pattern)):
            digest.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def describe_machine() -> dict[str, Any]:
    """Versions, hardware and date, and which source."""
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "python": platform.python_version(),
        **{package: metadata.version(package) for package in ("echelon", "torch", "transformers")},
        "processor": _processor_name(),
        "cores": os.cpu_count(),
        "source": digest_source(),
        "commit": describe_commit(),
    }


def describe_commit(root: Path = ROOT) -> str:
    """The commit that is checked out, with `-dirty` if a file of its source has changed since; "" outside of git."""
    try:
        commit = _git(root, "rev-parse", "--short=12", "HEAD").strip()
        changed = _git(root, "status", "--porcelain", "--", *(f":(glob){pattern}" for pattern in _TRAINED_BY))
    except (OSError, subprocess.CalledProcessError):
        return ""
    return commit + "-dirty" * bool(changed)


def _git(root: Path, *arguments: str) -> str:
    return subprocess.run(["git", "-C", root, *arguments], capture_output=True, text=True, check=True).stdout


def _processor_name() -> str:
    try:
        [name, *_] = re.findall(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except (OSError, ValueError):
        return platform.processor() or platform.machine()
    return name.strip()


def read_measured(paths: Iterable[Path]) -> list[Measured]:
    """The last measurement of each row in these files, in order; a torn line is none."""
    found: dict[str, Measured] = {}
    for path in paths:
        environment: Mapping[str, Any] = {}
        for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
            try:
                content = json.loads(line)
            except ValueError:
                continue
            environment = content.get("environment", environment)
            if "row" in content:
                difference = Difference(*(content[item.name] for item in fields(Difference)))
                row = Row(**content["row"])
                found[str(row)] = Measured(row, difference, content["equal"], content["seconds"], environment)
    return list(found.values())


def begin(path: Path, environment: Mapping[str, Any]) -> None:
    """Say where the rows that follow were measured."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _append(path, json.dumps({"environment": environment}) + "\n")


def append(path: Path, measured: Measured) -> None:
    """Add a row, below the environment it was measured in."""
    _append(path, measured.to_line())


def _append(path: Path, line: str) -> None:
    """In one write, for several processes may write to one file; behind the torn line of a killed run, if any."""
    with path.open("ab+", buffering=0) as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 1))
        torn = file.read() not in (b"", b"\n")
        file.write(("\n" * torn + line).encode())


def choose_rows(names: Iterable[str], measured: Iterable[Measured], source: str, part: tuple[int, int]) -> set[str]:
    """Which rows are to be run: of the `part` (number, of how many), those that were not found equal already."""
    number, count = part
    done = {each.name for each in measured if each.equal and each.environment["source"] == source}
    mine = [name for index, name in enumerate(dict.fromkeys(names)) if index % count == number - 1]
    return set(mine) - done


def parse_part(text: str) -> tuple[int, int]:
    """`2/4`: the second of four parts. Raises ValueError."""
    number, count = (int(word) for word in text.split("/"))
    if not 1 <= number <= count:
        raise ValueError(f"{text} is no part; use for example 1/4 to 4/4")
    return number, count
