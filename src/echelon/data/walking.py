"""Lists every file under a folder, and the files that are skipped, so that nothing is skipped silently."""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

SKIPPED_FOLDERS = frozenset({"__pycache__", "site-packages", "dist-packages", "node_modules"})

Found = list[tuple[Path, str]]
"""Files with their paths relative to a folder."""


@dataclass
class LeftOut:
    """What of a source is not read: by the reason, how often, and the first place."""

    counts: dict[str, tuple[int, str]] = field(default_factory=dict)

    def note(self, reason: str, place: str) -> None:
        """Count one more."""
        count, first = self.counts.get(reason, (0, place))
        self.counts[reason] = (count + 1, min(first, place))

    def describe(self) -> str | None:
        """All of it in a line, `hidden files: 3 (.env, ...)`; None where there is nothing."""
        parts = (
            f"{reason}: {count:,} ({first}{', ...' if count > 1 else ''})"
            for reason, (count, first) in sorted(self.counts.items())
        )
        return "; ".join(parts) or None


def walk(root: Path, left_out: LeftOut, refuse: Callable[[OSError], Exception]) -> Found:
    """Every file under a folder, sorted by relative path; hidden files and folders and those of caches are left out.

    Links to folders are followed, each real folder is read once: under its own name where it has one below `root`. A
    link to a folder that holds `root` itself is left out. A folder that cannot be listed raises what `refuse` makes of
    it.
    """
    found: Found = []
    seen: set[str] = set()
    links = [(root, "")]
    while links:
        deferred: Found = []
        for link, name in sorted(links, key=lambda item: item[1]):
            real = os.path.realpath(link)
            if name and (real in seen or Path(real) in Path(os.path.realpath(root)).parents):
                left_out.note("links to folders that are read or hold this one", name)
                continue
            for folder, place in _list_tree(link, name, seen, left_out, refuse, found):
                deferred.append((folder, place))
        links = deferred
    return sorted(found, key=lambda item: item[1])


def _list_tree(
    top: Path,
    name: str,
    seen: set[str],
    left_out: LeftOut,
    refuse: Callable[[OSError], Exception],
    found: Found,
) -> Found:
    """Take in the files of a tree without following links; returns the links to folders in it."""

    def fail(error: OSError) -> None:
        raise refuse(error) from error

    links: Found = []
    for folder, subfolders, files in os.walk(top, onerror=fail):
        here = Path(folder)
        place = "/".join(part for part in (name, here.relative_to(top).as_posix()) if part not in ("", "."))
        real = os.path.realpath(folder)
        if real in seen:  # a link to a part of it was followed before
            subfolders[:] = []
            continue
        seen.add(real)
        descend = []
        for each in sorted(subfolders):
            inner = f"{place}/{each}" if place else each
            if each in SKIPPED_FOLDERS:
                left_out.note("folders of caches and packages", inner)
            elif each.startswith("."):
                left_out.note("hidden folders", inner)
            elif (here / each).is_symlink():
                links.append((here / each, inner))
            else:
                descend.append(each)
        subfolders[:] = descend
        for each in files:
            inner = f"{place}/{each}" if place else each
            if each.startswith("."):
                left_out.note("hidden files", inner)
            elif (here / each).is_file():
                found.append((here / each, inner))
            else:
                left_out.note("links to nothing and special files", inner)
    return links
