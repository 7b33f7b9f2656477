"""Files of a Slurm job that only this machine sees."""

from pathlib import Path

from echelon.launch.records import make_job
from echelon.launch.slurm import list_local_files, render_needed
from echelon.recipe.load import parse_recipe
from tests.unit.recipe_samples import DEMO

# As Linux writes /proc/self/mounts: a space is \040, and the last of several at one place is seen.
MOUNTS = """\
overlay / overlay rw,relatime 0 0
/dev/nvme0n1 /home ext4 rw 0 0
files:/home /home nfs4 rw,vers=4.2 0 0
/dev/nvme1n1 /local\\040disk xfs rw 0 0
10.0.0.1@tcp:/fsx /fsx lustre rw 0 0
tmpfs /tmp tmpfs rw 0 0
"""


def list_lines(folder, workdir, *overrides):
    mounts = folder / "mounts"
    mounts.write_text(MOUNTS)
    recipe, _ = parse_recipe(DEMO + "launch: {to: slurm}\n", "recipe.yaml", list(overrides))
    return list_local_files(make_job(recipe, Path(workdir), "demo-20300102-030405"), mounts)


def test_a_job_on_shared_file_systems_has_no_line(tmp_path):
    assert list_lines(tmp_path, "/home/ann/project", "run.dir=/fsx/runs/demo", "launch.python=.venv/bin/python") == []


def test_each_local_file_system_is_one_line(tmp_path):
    lines = list_lines(
        tmp_path, "/home/ann", "run.dir=/tmp/demo", "data.train.0.path=/local disk/text", "tokenizer=/local disk/tok",
        "launch.python=/opt/venv/bin/python",
    )  # fmt: skip
    named = [line.partition("; if the job's machines")[0] for line in lines]
    assert named == [
        "run.dir=/tmp/demo: on /tmp, a file system of this machine (tmpfs)",
        "data.train.0.path=/local disk/text, tokenizer=/local disk/tok: on /local disk, "
        "a file system of this machine (xfs)",
        "launch.python=/opt/venv/bin/python: on /, a file system of this machine (overlay)",
    ]


def test_addresses_are_not_files(tmp_path):
    assert list_lines(tmp_path, "/fsx/work", "data.train.0.path='s3://bucket/text'") == []


def test_without_proc_nothing_is_said(tmp_path):
    recipe, _ = parse_recipe(DEMO, "recipe.yaml", [])
    assert list_local_files(make_job(recipe, tmp_path, "demo-20300102-030405"), tmp_path / "absent") == []


def test_of_what_is_not_there_yet_the_folder_above_is_needed(tmp_path):
    def needed(*overrides):
        recipe, _ = parse_recipe(DEMO + "launch: {to: slurm}\n", "recipe.yaml", list(overrides))
        return render_needed(make_job(recipe, tmp_path / "work", "demo-20300102-030405")).splitlines()

    for made in ("work/text.txt", "data/a.txt", "venv/python"):
        (tmp_path / made).parent.mkdir(exist_ok=True)
        (tmp_path / made).touch()
    overrides = (f"data.train.0.path={tmp_path}/data/*.txt", f"launch.python={tmp_path}/venv/python")
    assert needed(*overrides) == [f"{tmp_path}/{name}" for name in ("work", "data", "venv/python")]
    assert needed("run.dir=/absent/runs/demo") == [f"{tmp_path}/work", f"{tmp_path}/work/text.txt"]
    assert needed(*overrides, "launch.slurm.container={runtime: pyxis, image: a}") == [f"{tmp_path}/work"]
