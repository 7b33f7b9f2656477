"""Records which prepared text a run reads, so that all ranks open the same one and none prepares its own."""

from dataclasses import dataclass
from pathlib import Path

from echelon.ground.checksums import MANIFEST
from echelon.ground.errors import DataError
from echelon.ground.stored import read_as, write_json
from echelon.run.folder.run_rows import RunRows


@dataclass(frozen=True)
class RunText:
    """The path of the prepared text that a run reads, and a digest of its content, independent of the path.

    packing: whether samples share sequences; None for plain text.
    """

    prepared: str
    digest: str | None
    packing: bool | None = None


class TextRecord:
    """data.json of a run folder; if it is damaged, the newest start in events.jsonl has the same information."""

    def __init__(self, folder: Path, rows: RunRows) -> None:
        self.path = folder / "data.json"
        self._rows = rows

    def write_prepared_path(self, path: Path, digest: str | None = None, packing: bool | None = None) -> None:
        """Record the prepared text that the run reads. `digest` and `packing`: see RunText."""
        write_json(self.path, {"prepared": str(path.resolve()), "digest": digest, "packing": packing})

    def read_texts(self) -> list[RunText]:
        """Return the run's text according to data.json and to the newest start in events.jsonl.

        One of the two may be damaged. Empty if the run has not started. Raises DataError if data.json is damaged and
        there is no such start.
        """
        found, damage = list[RunText](), None
        try:
            found.append(read_as(self.path, RunText))
        except FileNotFoundError:
            pass
        except (OSError, ValueError) as error:
            damage = error
        for event in reversed(self._rows.read_events()):
            if isinstance(prepared := event.get("prepared"), str) and isinstance(digest := event.get("digest"), str):
                packing = event.get("packing")
                found.append(RunText(prepared, digest, packing if isinstance(packing, bool) else None))
                break
        if damage is not None and not found:
            raise DataError(
                f"{self.path}: cannot read which text the run uses ({damage}); restore it, or remove it and run "
                "`echelon train` with the run's recipe and the same text, which writes it again."
            )
        return found

    def read_prepared_path(self) -> Path:
        """Return the path of the run's prepared text. Raises DataError if it is not recorded."""
        paths = [Path(text.prepared) for text in self.read_texts()]
        if not paths:
            raise DataError(
                f"{self.path}: the prepared text of this run is not recorded; run `echelon train` once to write it."
            )
        return next((path for path in paths if (path / MANIFEST).is_file()), paths[0])

    def read_data_digest(self) -> str | None:
        """Return the digest that `write_prepared_path` recorded; None if there is none. Raises DataError."""
        return next((text.digest for text in self.read_texts()), None)

    def read_packing(self) -> bool | None:
        """Return whether the run's samples share sequences; None if that is not recorded. Raises DataError."""
        return next((text.packing for text in self.read_texts()), None)
