"""`echelon train --profile` with real processes: the parts of a step add up to what the run measured."""

import gzip
import json

import pytest

from echelon.run.folder.run_folder import RunFolder
from echelon.run.report.trace import read_traces
from tests.dist.command import write_recipe

# A step takes about half a second, so that what is between steps is a small part of it.
WIDE = {
    "model_type": "llama", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 128,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_the_parts_of_a_step_add_up_to_its_time(echelon, tmp_path, parallel):
    write_recipe(
        tmp_path, model={"config": WIDE}, data={"train": "text.txt", "sequence_len": 128}, parallel=parallel,
        train={"steps": 26, "global_batch_size": 16}, profile={"ranks": [0, 1]}, checkpoint={"every": 100},
    )  # fmt: skip
    ended = echelon("train", "recipe.json", "--nproc", "2", "--profile")
    assert ended.code == 0 and "profile: steps 20 to 24 are in" in ended.out
    run = RunFolder(tmp_path / "runs" / "tiny")
    rows = {row["step"]: row["step_seconds"] for row in run.read_metrics().rows if row["kind"] == "train"}
    traces, _ = read_traces(run.path)
    assert [trace.rank for trace in traces] == [0, 1]
    for trace in traces:
        assert [step.step for step in trace.steps] == [20, 21, 22, 23, 24]
        assert all(sum(step.parts.values()) == pytest.approx(step.seconds) for step in trace.steps)
        # A row's time is from the end of a step to the end of the next, with the few milliseconds between them.
        whole, taken = sum(step.seconds for step in trace.steps), sum(rows[step] for step in range(20, 25))
        assert whole == pytest.approx(taken, rel=0.03)
        for part in ("matrix products", "exposed communication", "host"):
            assert sum(step.parts[part] for step in trace.steps) > 0
    names = {each.name for each in traces[0].collectives}
    assert "all_reduce" in names and ("all_gather" in names) == (parallel == "fsdp")
    content = json.loads(gzip.decompress(run.trace_path(20, 0).read_bytes()))
    regions = {event["name"] for event in content["traceEvents"] if event.get("cat") == "user_annotation"}
    wanted = {f"echelon {name}" for name in ("step 20", "data", "forward", "backward", "clip", "update")}
    assert wanted <= regions
    assert "exposed communication" in echelon("report", "tiny", "--text").out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"steps": [5, 3]}, "profile.steps=[5, 3] records steps 5 to 7, but the run has 6"),
        ({"steps": [2, 1], "ranks": [1]}, "profile.ranks=[1]: the run has 1 processes"),
    ],
)
def test_steps_and_ranks_that_do_not_exist_are_refused(echelon, tmp_path, settings, message):
    write_recipe(tmp_path, profile=settings)
    ended = echelon("train", "recipe.json", "--nproc", "1")
    assert ended.code == 2 and message in ended.err
