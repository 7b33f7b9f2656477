"""A pickle as an attacker writes it."""

import os
import pickle
from pathlib import Path


class Hostile:
    """Unpickling it makes a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def hostile_pickle(path: Path) -> bytes:
    """Whoever unpickles it makes the folder `path`."""
    return pickle.dumps(Hostile(path))
