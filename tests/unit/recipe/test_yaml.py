"""YAML 1.2 scalars, line numbers, duplicate keys, and invalid text."""

import math
import time

import pytest
import yaml

from echelon.ground.errors import ConfigError
from echelon.recipe.load import load_recipe
from echelon.recipe.yaml_text import MAX_TEXT_BYTES, parse_yaml, render_yaml, show_value
from echelon.tools.sweep.sweep_file import load_sweep


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2e9", 2e9),
        ("3e-4", 0.0003),
        ("1E+2", 100.0),
        (".5", 0.5),
        ("-1.", -1.0),
        ("524_288", 524288),
        ("-7", -7),
        ("010", 10),
        ("0x10", 16),
        ("0o10", 8),
        (".inf", math.inf),
        ("-.INF", -math.inf),
        ("true", True),
        ("False", False),
        ("no", "no"),
        ("on", "on"),
        ("1:30", "1:30"),
        ("2024-01-01", "2024-01-01"),
        ("'2e9'", "2e9"),
        ("~", None),
        ("", None),
        ("e5", "e5"),
        ("1.2.3", "1.2.3"),
    ],
)
def test_scalars(text: str, value: object) -> None:
    parsed = parse_yaml(text, "here")[0]
    assert parsed == value
    assert type(parsed) is type(value)


@pytest.mark.parametrize(
    "value", ["2e9", "no", "1:30", "010", "null", "", "<<", "x: y", "0.5", "true", "é", 1e-8, 5, None]
)
def test_rendered_values_are_equal_in_both_versions_of_yaml(value: object) -> None:
    text = render_yaml({"key": value})
    assert parse_yaml(text, "here")[0] == {"key": value}
    assert yaml.safe_load(text) == {"key": value}


def test_every_key_has_its_line() -> None:
    origins = parse_yaml("a:\n  b: 1\n  c:\n  - x\n  - d: 2\n", "f.yaml")[1]
    assert origins["a", "b"] == "f.yaml, line 2"
    assert origins["a", "c", 0] == "f.yaml, line 4"
    assert origins["a", "c", 1, "d"] == "f.yaml, line 5"


def test_a_merged_mapping_is_copied() -> None:
    value = parse_yaml("a: &x {b: {c: 1}}\nd: {<<: *x, e: 2}\nf: *x\n", "f.yaml")[0]
    assert value == {"a": {"b": {"c": 1}}, "d": {"b": {"c": 1}, "e": 2}, "f": {"b": {"c": 1}}}
    value["a"]["b"]["c"] = 5
    assert value["d"]["b"]["c"] == value["f"]["b"]["c"] == 1


# Each list contains the previous one eight times: a billion entries in nine lines.
BOMB = "a: &a [x,x,x,x,x,x,x,x]\n" + "".join(
    f"{chr(97 + level)}: &{chr(97 + level)} [{','.join([f'*{chr(96 + level)}'] * 8)}]\n" for level in range(1, 9)
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 2\na: 3\n", "f.yaml, line 3: a is given twice (first at f.yaml, line 1); keep one."),
        ("a:\n  b: 1\n  b: 2\n", "f.yaml, line 3: b is given twice (first at f.yaml, line 2); keep one."),
        ("a: 1\nb: [\n", "f.yaml, line 3: this is not valid YAML"),
        ("a: 1\n\tb: 2\n", "f.yaml, line 2: this is not valid YAML"),
        ("a: !!python/object/apply:os.system [ls]\n", "f.yaml, line 1: this is not valid YAML"),
        ("a: &x [*x]\n", "f.yaml, line 1: this anchor contains itself; write it out."),
        ("a: \x00\n", "f.yaml: this is not valid YAML"),
        ("a: 1\nb: !!timestamp 2001-99-99\n", "f.yaml, line 2: this is not valid YAML: tag:yaml.org,2002:timestamp"),
        ("!!int x: 1\n", "f.yaml, line 1: this is not valid YAML"),
        ("!!set {a}: 1\n", "f.yaml, line 1: a key must be a word"),
        ("a: " + "9" * 5000, "f.yaml, line 1: '9999"),
        ('a: "\\ud800"', "f.yaml, line 1: a string has a character that cannot be stored in a file; remove it."),
        ("[" * 5000, "f.yaml: lists and mappings are nested"),
        ("a: " + "[" * 200 + "]" * 200, "f.yaml, line 1: lists and mappings are nested"),
        (BOMB, "f.yaml, line 1: with its anchors written out this has more than 50,000 entries; write fewer."),
        ("[a]: 1\n", "f.yaml, line 1: a key must be a word"),
        ("a: 1\n---\nb: 2\n", "f.yaml, line 2: this is not valid YAML"),
    ],
)
def test_invalid_text_is_refused_with_its_line(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_yaml(text, "f.yaml")
    assert str(caught.value).startswith(message)


def test_the_rest_of_a_huge_text_is_not_read(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr("echelon.recipe.yaml_text.MAX_PLACES", 50)
    with pytest.raises(ConfigError, match=r"^f.yaml: this YAML has more than 50 entries; write fewer.$"):
        parse_yaml("".join(f"k{number}: 1\n" for number in range(60)) + "}", "f.yaml")
    huge = "a: 1\n" * (MAX_TEXT_BYTES // 5 + 1)
    with pytest.raises(ConfigError, match=r"^f.yaml: this YAML is larger than 1.00 MiB; write less.$"):
        parse_yaml(huge, "f.yaml")
    path = tmp_path / "r.yaml"
    path.write_text(huge)
    for load in (load_recipe, load_sweep):
        with pytest.raises(ConfigError, match=r"r.yaml cannot be read: larger than 1.00 MiB.$"):
            load(path)


def test_values_are_shown_as_written() -> None:
    assert [show_value(value) for value in (None, True, "5", "a", [1, "b"], {"a": 0.5})] == [
        "null", "true", "'5'", "a", "[1, b]", "{a: 0.5}",
    ]  # fmt: skip
    assert len(show_value("x" * 500)) == 80


def test_deep_nesting_is_refused_at_once():
    """Without the limit on what PyYAML reads ahead, this takes a second."""
    started = time.process_time()
    with pytest.raises(ConfigError, match="nested more than 100 deep"):
        parse_yaml("[" * 100_000, "f.yaml")
    assert time.process_time() - started < 0.4
