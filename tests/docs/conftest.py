"""The option of `make pictures`."""

from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--draw-pictures", metavar="FOLDER", type=Path, help="draw the tutorials' pictures into FOLDER, from this run"
    )
