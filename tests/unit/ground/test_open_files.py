"""The limit of open files is raised, and an error that comes from it says so; in a process of its own."""

import subprocess
import sys

import pytest

from echelon.ground.open_files import count_ranks, explain_open_files

CODE = """
import os, resource, socket
from echelon.ground.open_files import allow_open_files, explain_open_files, read_limits

resource.setrlimit(resource.RLIMIT_NOFILE, (40, 60))
allow_open_files()
print(read_limits() == resource.getrlimit(resource.RLIMIT_NOFILE) == (60, 60))
opened = []
try:
    while len(opened) < 100:
        opened.append(socket.socket())
except OSError as error:
    told = explain_open_files(error)
del opened
print(told)
"""


def test_the_soft_limit_becomes_the_hard_one_and_an_error_names_it():
    command = [sys.executable, "-c", CODE]
    raised, told = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert raised == "True"
    assert told.startswith("too many open files: a process here may have 60 (ulimit -n)")


def test_what_gloo_says_is_known_and_other_errors_are_not():
    words = "[enforce fail at gloo/transport/tcp/socket.cc:24] rv != -1. -1 vs -1. socket: Too many open files"
    assert explain_open_files(RuntimeError(words)) is not None
    assert explain_open_files(OSError(2, "No such file or directory")) is None


@pytest.mark.parametrize(("limit", "ranks"), [(1024, 724), (800, 166), (65536, 65236), (100, 1)])
def test_ranks_are_counted(limit, ranks):
    """A rank has 3 connections with each other one: measured with 2 and 4 ranks, 7 and 13 sockets. Above 180 ranks
    rank 0 has one with each."""
    assert count_ranks(limit) == ranks
