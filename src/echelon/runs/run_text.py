"""Which prepared text a run reads: noted in its folder, so that every rank opens that and none prepares its own."""

from dataclasses import dataclass
from pathlib import Path

from echelon.errors import DataError
from echelon.runs.run_rows import RunRows
from echelon.stored import read_as, write_json


@dataclass(frozen=True)
class RunText:
    """The prepared text that a run reads, and what stands for its content, wherever it lies."""

    prepared: str
    digest: str | None


class TextRecord:
    """data.json of a run folder; where it is damaged, the newest start in events.jsonl says the same."""

    def __init__(self, folder: Path, rows: RunRows) -> None:
        self.path = folder / "data.json"
        self._rows = rows

    def write_prepared_path(self, path: Path, digest: str | None = None) -> None:
        """Note which prepared text the run reads, so that every rank opens that and none prepares its own.

        `digest` stands for its content, wherever it lies.
        """
        write_json(self.path, {"prepared": str(path.resolve()), "digest": digest})

    def read_texts(self) -> list[RunText]:
        """Which text the run reads, as data.json says and as the newest start in events.jsonl does, of which one may be
        damaged; none where the run has not begun.

        Raises DataError where data.json is damaged and there is no such start.
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
                found.append(RunText(prepared, digest))
                break
        if damage is not None and not found:
            raise DataError(
                f"{self.path} does not say which text the run reads ({damage}); restore it, or remove it and "
                "start `echelon train` with the run's recipe and the same text, which writes it again."
            )
        return found

    def read_prepared_path(self) -> Path:
        """The prepared text the run reads. Raises DataError when the run never got that far, or nothing tells."""
        paths = [Path(text.prepared) for text in self.read_texts()]
        if not paths:
            raise DataError(
                f"{self.path} does not name the prepared text of this run; run `echelon train` once to write it."
            )
        return next((path for path in paths if path.is_dir()), paths[0])

    def read_data_digest(self) -> str | None:
        """What `write_prepared_path` was told of the content; None when nothing was noted. Raises DataError."""
        return next((text.digest for text in self.read_texts()), None)
