"""`--json` on the commands around a job: stdout has the result alone, and stderr ends with the error."""

import json

import pytest

from tests.dist.command import write_recipe


def test_a_run_as_json(echelon, tmp_path):
    write_recipe(tmp_path)
    done = echelon("train", "recipe.json", "--nproc", "2", "--json")
    run = json.loads(done.out)
    assert (done.code, run["name"], run["status"], run["step"], run["num_steps"]) == (0, "tiny", "done", 6, 6)
    assert run["loss"] > 0 and "step 6/6" in done.err, "what people read goes to stderr"
    assert json.loads(echelon("runs", "--json").out)["runs"] == [run]
    assert json.loads(echelon("status", "tiny", "--json").out) == {"jobs": [], "runs": [run]}

    changed = echelon("train", "recipe.json", "optim.learning_rate=0.5", "--json")
    error = json.loads(changed.err.splitlines()[-1])["error"]
    assert (changed.code, changed.out, error["code"], error["key"]) == (2, "", 2, "run.dir")
    assert "optim.learning_rate" in error["rule"] and error["fix"].startswith("restore these keys to resume it")


@pytest.mark.slow
def test_an_error_of_a_rank_is_the_last_line(echelon, tmp_path):
    """Rank 0 reports it to its parent, whose stderr also has the lines of the run."""
    write_recipe(tmp_path, optim={"learning_rate": 1e30}, fault={"on_bad_step": "stop"})
    ended = echelon("train", "recipe.json", "--nproc", "1", "--json")
    error = json.loads(ended.err.splitlines()[-1])["error"]
    assert (ended.code, ended.out, error["code"]) == (1, "", 1)
    assert "must be finite" in error["message"]
    assert f"echelon: {error['message']}" in (tmp_path / "runs" / "tiny" / "logs" / "console.log").read_text()


@pytest.mark.slow
def test_the_job_and_its_status_as_json(echelon, tmp_path):
    write_recipe(tmp_path)
    dry = echelon("launch", "recipe.json", "--to", "local", "--dry-run", "--json")
    assert dry.code == 0 and "echelon" in "".join(json.loads(dry.out)["files"].values())
    ended = echelon("launch", "recipe.json", "--to", "local", "--follow", "--json")
    job = json.loads(ended.out)
    assert (ended.code, job["target"], job["state"], job["exit_code"], job["step"]) == (0, "local", "done", 0, 6)
    assert json.loads(echelon("status", job["name"], "--json").out)["jobs"] == [job]
