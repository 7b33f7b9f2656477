"""Fixtures for tests of single modules."""

import sys

import pytest

from echelon.cli.main import main


@pytest.fixture
def echelon(tmp_path, monkeypatch, capsys):
    """Call a command in a temporary folder; returns its exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["echelon", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        return int(ended.value.code or 0), *capsys.readouterr()

    return run
