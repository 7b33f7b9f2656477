"""A malicious pickle."""

import os
import pickle
from pathlib import Path


class Hostile:
    """An object that creates a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def hostile_pickle(path: Path) -> bytes:
    """A pickle that creates the folder `path` when it is loaded."""
    return pickle.dumps(Hostile(path))
