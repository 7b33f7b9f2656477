"""List every file under a folder, and record skipped files, so that nothing is skipped silently."""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

SKIPPED_FOLDERS = frozenset({"__pycache__", "site-packages", "dist-packages", "node_modules"})

Found = list[tuple[Path, str]]
"""Files with their paths relative to a folder."""


@dataclass
class LeftOut:
    """The skipped files of a source: for each reason, the count and the first path."""

    counts: dict[str, tuple[int, str]] = field(default_factory=dict)

    def note(self, reason: str, place: str) -> None:
        """Count one skipped path."""
        count, first = self.counts.get(reason, (0, place))
        self.counts[reason] = (count + 1, min(first, place))

    def describe(self) -> str | None:
        """Describe the skipped files in one line, `hidden files: 3 (.env, ...)`; None if there are none."""
        parts = (
            f"{reason}: {count:,} ({first}{', ...' if count > 1 else ''})"
            for reason, (count, first) in sorted(self.counts.items())
        )
        return "; ".join(parts) or None


def walk(root: Path, left_out: LeftOut, refuse: Callable[[OSError], Exception]) -> Found:
    """List every file under a folder, sorted by relative path, without hidden files and folders and cache folders.

    Links to folders are followed. Each real folder is read once, under its own name if it is below `root`. A link to a
    folder that contains `root` is skipped. For a folder that cannot be listed, raises the error that `refuse` returns.
    """
    files: Found = []
    seen: set[str] = set()
    links = [(root, "")]
    while links:
        deferred: Found = []
        for link, name in sorted(links, key=lambda item: item[1]):
            real = os.path.realpath(link)
            if name and (real in seen or Path(real) in Path(os.path.realpath(root)).parents):
                left_out.note("links to folders that are already read or contain this one", name)
                continue
            deferred += _list_tree(link, name, seen, left_out, refuse, files)
        links = deferred
    return sorted(files, key=lambda item: item[1])


def _list_tree(
    top: Path,
    name: str,
    seen: set[str],
    left_out: LeftOut,
    refuse: Callable[[OSError], Exception],
    found: Found,
) -> Found:
    """Add the files of a tree to `found` without following links. Returns the links to folders in it."""

    def fail(error: OSError) -> None:
        raise refuse(error) from error

    links: Found = []
    for folder, subfolders, files in os.walk(top, onerror=fail):
        path = Path(folder)
        relative = "/".join(part for part in (name, path.relative_to(top).as_posix()) if part not in ("", "."))
        real = os.path.realpath(folder)
        if real in seen:  # a link to a part of it was followed before
            subfolders[:] = []
            continue
        seen.add(real)
        descend = []
        for subfolder in sorted(subfolders):
            inner = f"{relative}/{subfolder}" if relative else subfolder
            if subfolder in SKIPPED_FOLDERS:
                left_out.note("folders of caches and packages", inner)
            elif subfolder.startswith("."):
                left_out.note("hidden folders", inner)
            elif (path / subfolder).is_symlink():
                links.append((path / subfolder, inner))
            else:
                descend.append(subfolder)
        subfolders[:] = descend
        for file in files:
            inner = f"{relative}/{file}" if relative else file
            if file.startswith("."):
                left_out.note("hidden files", inner)
            elif (path / file).is_file():
                found.append((path / file, inner))
            else:
                left_out.note("broken links and special files", inner)
    return links
