"""The drill as its user runs it: every fault is done, noticed and survived."""

import json

import pytest

from command import CommandLine, assert_no_orphan, write_recipe

pytestmark = pytest.mark.dist


@pytest.mark.slow
def test_every_fault_is_survived(capfd, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ECHELON_TEST_MARK", str(tmp_path))
    write_recipe(tmp_path, parallel="fsdp")
    ending = CommandLine(capfd, monkeypatch)("drill", "recipe.json", "--nproc", "2", "--json")
    rows = [json.loads(line) for line in ending.out.splitlines() if line.startswith("{")]
    findings = {row["fault"]: row for row in rows}
    assert ending.code == 0, ending
    assert len(findings) == 7 and all(each["identical"] for each in findings.values())
    assert findings["SIGTERM"]["lost_steps"] == 0 and findings["SIGTERM"]["starts"] == 2
    for name in ("a rank killed", "a rank hangs"):
        assert findings[name]["starts"] == 1 and findings[name]["lost_steps"] > 0, "restarted by itself"
    assert findings["the agent killed"]["starts"] == 2 and findings["the agent killed"]["noticed_seconds"] < 10
    assert findings["a rank hangs"]["noticed_seconds"] > 10
    assert findings["the disk is full"]["lost_steps"] == 0 and findings["the disk is full"]["starts"] == 1
    assert findings["NaN in the weights"]["starts"] == 3
    assert not (tmp_path / "runs" / "tiny-drill").exists()
    assert_no_orphan()
