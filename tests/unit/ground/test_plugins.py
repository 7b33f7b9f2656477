"""Parts by name: those of echelon, and those that another installed package registers."""

import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest

from echelon.ground import plugins
from echelon.ground.errors import ConfigError
from echelon.ground.plugins import Plugins, read_own

ROOT = Path(__file__).parents[3]


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder of installed packages, at the front of the path."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    plugins.read_installed.cache_clear()
    yield folder
    plugins.read_installed.cache_clear()


def install(folder, name, rows, group="echelon.rewards"):
    """Write the metadata of a distribution with these entry points."""
    info = folder / f"{name.replace('-', '_')}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = "".join(f"{key} = {place}\n" for key, place in rows.items())
    (info / "entry_points.txt").write_text(f"[{group}]\n{lines}")


def rewards():
    return Plugins("rewards", "reward.name")


def test_every_part_of_echelon_can_be_imported():
    kinds = [group.removeprefix("echelon.") for group in read_own() if group != "console_scripts"]
    needs = {"opentelemetry": "opentelemetry", "prometheus": "prometheus_client", "mlflow": "mlflow", "wandb": "wandb"}
    for kind in kinds:
        found = Plugins(kind, "key")
        assert found.own
        for name in found.own:
            if name in needs:
                pytest.importorskip(needs[name])
            assert found[name] is not None


def test_a_part_of_another_package_is_imported_when_it_is_used(site):
    install(site, "their-rewards", {"brief": "their_rewards:brief"})
    (site / "their_rewards.py").write_text("def brief(answers, records):\n    return [1.0] * len(answers)\n")
    found = rewards()
    assert "brief" in found and "brief" not in found.own and list(found) == [*found.own, "brief"]
    assert "their_rewards" not in sys.modules
    assert found["brief"](["a"], [{}]) == [1.0]
    assert len(found) == len(found.own) + 1


def test_two_packages_with_one_name_are_refused(site):
    install(site, "one-x", {"brief": "one:brief", "number": "one:number"})
    install(site, "two-x", {"brief": "two:brief"})
    with pytest.raises(ConfigError) as caught:
        rewards()["brief"]
    assert sorted(str(caught.value).split(" is registered by ")[1].split("; ")[0].split(" and ")) == [
        "one-x", "two-x",
    ]  # fmt: skip
    with pytest.raises(ConfigError, match=r"^reward\.name=number is echelon's own name, and one-x registers it too"):
        rewards()["number"]
    assert callable(rewards()["exact"])


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (None, "ModuleNotFoundError: No module named 'broken_x'"),
        ("raise RuntimeError('no licence')", "RuntimeError: no licence"),
        ("", "AttributeError: module 'broken_x' has no attribute 'brief'"),
    ],
)
def test_a_broken_part_is_one_line(site, monkeypatch, text, why):
    monkeypatch.delitem(sys.modules, "broken_x", raising=False)
    install(site, "broken-x", {"brief": "broken_x:brief"})
    if text is not None:
        (site / "broken_x.py").write_text(text)
    with pytest.raises(ConfigError) as caught:
        rewards()["brief"]
    assert str(caught.value) == (
        f"reward.name=brief: broken_x:brief, which broken-x registers, cannot be imported ({why}); repair or "
        "uninstall that package."
    )


def test_an_unknown_name_lists_the_known_ones(site):
    install(site, "their-x", {"brief": "x:y"})
    with pytest.raises(ConfigError, match=r"^reward\.name=brif: unknown name; use exact, .*regex, brief, or install"):
        rewards()["brif"]


def test_metadata_in_the_working_folder_adds_nothing(site, monkeypatch):
    install(site, "their-x", {"brief": "x:y"})
    monkeypatch.chdir(site)
    assert "brief" not in rewards()


def test_neither_a_start_nor_a_look_at_the_help_reads_metadata():
    code = (
        "import sys, echelon, echelon.cli.main, echelon.recipe\n"
        "from echelon.ground import plugins\n"
        "assert not plugins.read_own.cache_info().currsize and not plugins.read_installed.cache_info().currsize"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_without_a_checkout_the_rows_are_those_of_the_installation(site, monkeypatch):
    rows = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    assert {group: dict(names) for group, names in read_own().items() if group != "console_scripts"} == rows
    plugins.read_own.cache_clear()
    plugins.read_installed.cache_clear()
    monkeypatch.setattr(plugins, "__file__", str(site / "echelon" / "ground" / "plugins.py"))
    try:
        install(site, "echelon", {"native": "a:b"}, "echelon.engines")
        assert read_own() == {"echelon.engines": {"native": "a:b"}}
        plugins.read_own.cache_clear()
        monkeypatch.setattr(plugins, "read_installed", cache(dict))
        with pytest.raises(ConfigError, match="the metadata of echelon is not installed, which names its engines"):
            read_own()
    finally:
        plugins.read_own.cache_clear()
