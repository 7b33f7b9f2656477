"""Dockerfiles: what hadolint (`make lint`) does not check. No daemon runs here, so no test builds an image."""

import re
from collections.abc import Iterable

import pytest

from tests.house.source_tree import ROOT

FILES = sorted((ROOT / "docker").glob("*.Dockerfile"))
ADMITTED = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
ROOT_ALLOWED = {"aws"}  # SageMaker starts its containers as root


def find_faults(text: str, admitted: Iterable[str], root_allowed: bool) -> list[str]:
    """Rules that a Dockerfile breaks: a pinned base that can be replaced, a user, the tested versions, the context."""
    lines = re.sub(r"\\\n", " ", text).splitlines()
    copied = {source for line in lines if line.startswith("COPY ") for source in line.split()[1:-1]}
    pip = [line for line in lines if re.search(r"\bpip install\b", line)]
    rules = {
        "ARG BASE names no release": re.search(r"^ARG BASE=\S+/\S+:[\w.-]*\d[\w.-]*$", text, re.MULTILINE),
        "FROM is not ${BASE}": [line for line in lines if line.startswith("FROM ")] == ["FROM ${BASE}"],
        "no USER, by number": root_allowed or re.search(r"^USER [1-9]\d*$", text, re.MULTILINE),
        "pip without -c": pip and all(" -c " in line for line in pip),
        "COPY of what .dockerignore leaves out": copied and copied <= set(admitted),
    }
    return [rule for rule, holds in rules.items() if not holds]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_images_are_pinned_and_need_no_root(path):
    assert find_faults(path.read_text(encoding="utf-8"), ADMITTED, path.stem in ROOT_ALLOWED) == []


def test_the_context_of_a_build_has_only_what_is_named():
    lines = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if not line.startswith("#")]
    assert lines[0] == "*" and all((ROOT / name).exists() for name in ADMITTED)
    assert {path.stem for path in FILES} == {"cpu", "cuda", "aws"}


def test_broken_dockerfiles_are_found():
    bad = "ARG BASE=docker.io/library/python:latest\nFROM python\nCOPY . .\nRUN pip install x\nUSER 0\n"
    assert len(find_faults(bad, ADMITTED, False)) == 5
    assert len(find_faults(bad, ADMITTED, True)) == 4
