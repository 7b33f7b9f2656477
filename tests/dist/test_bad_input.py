"""Invalid input and failures of the environment, through the real command.

Each case must print one message on stderr with the key, the value, the rule and the fix, and exit with the right code
within seconds. It must print no traceback, and leave no process and no partial file that blocks the corrected command.
"""

import hashlib
import json
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from echelon.run.folder.run_folder import RunFolder
from tests.dist.command import (
    assert_no_orphan,
    await_line,
    finish,
    marked_processes,
    mount,
    process_of,
    read_lines,
    start,
    write_recipe,
)
from tests.waiting import wait_until

pytestmark = pytest.mark.dist

SECONDS = 60.0  # limit for a refusal on a busy machine; on an idle one it takes less than five


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A copy of a folder with a recipe and a run of 6 steps on two processes, saved at 3 and 6; the original path."""
    place = tmp_path_factory.mktemp("finished")
    write_recipe(place)
    command = [sys.executable, "-m", "echelon", "train", "recipe.json", "--nproc", "2"]
    subprocess.run(command, cwd=place, check=True, capture_output=True, timeout=120)
    return shutil.copytree(place, tmp_path_factory.mktemp("kept") / "copy"), place


@pytest.fixture
def run(echelon, finished, monkeypatch):
    """That run, restored at its original path, which is the working directory."""
    copy, place = finished
    shutil.rmtree(place)
    shutil.copytree(copy, place)
    monkeypatch.chdir(place)
    return RunFolder(Path("runs/tiny"))


def assert_refused(ending, code, *words):
    """Check that the command printed one message that contains these words, and no traceback."""
    assert ending.code == code, ending
    lines = ending.err.splitlines()
    assert lines and lines[0].startswith("echelon: "), ending.err
    assert sum(line.startswith("echelon: ") for line in lines) == 1, ending.err
    assert "Traceback" not in ending.out + ending.err
    missing = [word for word in words if word not in ending.err]
    assert not missing, f"{missing} not in: {ending.err}"
    assert ending.seconds < SECONDS


# Overrides and arguments, and words of the expected message. The parent refuses all of them.
REFUSALS = [
    (["data.train.0.path=nope.txt"], ["data.train.0.path=nope.txt", "no such file", "give a text file"]),
    (["data.train.0.path=empty.txt"], ["data.train.0.path=empty.txt", "empty", "Give text"]),
    (["data.train.0.path=no_text"], ["data.train.0.path=no_text", "contains no text file", "glob"]),
    (["data.train.0.path=letter.txt"], ["data.train.0 has 1 tokens", "at least 2", "Give more text"]),
    (["data.train.0.path=short.txt", "--nproc", "2"], ["1 samples of data.sequence_len=32", "at most 1 process"]),
    (["train.global_batch_size=1", "--nproc", "2"], ["train.global_batch_size=1", "2 ranks", "use 2"]),
    (
        ["data.train=[{path: text.txt}, {path: short.txt, weight: 1e-9}]"],
        ["data.train.1.weight=1e-09", "larger weight"],
    ),
    (
        ["data.train.0.path=text.txt", "train.steps=null", "train.epochs=1", "optim.warmup=100000"],
        ["optim.warmup=100000", "of the whole run", "use at most"],
    ),
    (
        ["train.batch_ramp={from: 1, over_tokens: 1e6, increment: 1}", "--nproc", "2"],
        ["train.batch_ramp: steps of 1 and 3 sequences", "2 ranks", "from: 2 with an increment of 2"],
    ),
    (["tokenizer=./nope"], ["tokenizer=./nope", "no such folder", "give a folder"]),
    (["tokenizer=far/too/long"], ["tokenizer=far/too/long", "no such folder"]),
    (["tokenizer=someone/nothing"], ["tokenizer=someone/nothing", "cannot be reached", "Give a folder"]),
    (["model.config.vocab_size=100"], ["model.config.vocab_size=100", "256 ids", "use 256 or more"]),
    (
        ["model.checkpoint=small"],
        ["model.checkpoint=small has a vocabulary of 128", "256 ids", "remove the key tokenizer"],
    ),
    (["model.checkpoint=nope"], ["model.checkpoint=nope", "there is no such folder", "Give a folder"]),
    (["model.checkpoint=no_text"], ["model.checkpoint=no_text", "no model.safetensors"]),
    (["run.dir=text.txt/run"], ["run.dir=text.txt/run", "Not a directory", "choose a folder you can write to"]),
    (["run.dir=no_text_either"], ["run.dir=no_text_either", "contains files but no run", "choose a new folder"]),
    (["parallel={dp_shard: 8}", "--nproc", "2"], ["dp_shard 8 needs 8 processes", "there are 2", "2 x 1 or 1 x 2"]),
    (["parallel=hsdp", "--nproc", "3"], ["parallel=hsdp", "needs an even number of processes", "not 3", "use 2 or 4"]),
    (["model.config.model_type=lama"], ["model.config.model_type='lama'", "did you mean llama"]),
    (["model.config.hidden_size=33"], ["num_attention_heads=2 does not divide model.config.hidden_size=33", "1 or 3"]),
    (["model.config.hiden_size=64"], ["model.config.hiden_size=64", "not a field", "did you mean hidden_size?"]),
    (["model.config.hidden_act=swigloo"], ["model.config", "swigloo"]),
    (["model.config.rms_norm_eps=tiny"], ["model.config", "rms_norm_eps", "expected float"]),
    (["model.attn_implementation=flish"], ["model.attn_implementation", "flish"]),
    (["data.sequence_len=128"], ["data.sequence_len=128", "max_position_embeddings=64", "64 or less"]),
    (["model.config={model_type: gpt2}", "data.sequence_len=2048"], ["data.sequence_len=2048", "1024", "or less"]),
    (["train.precision=fp8"], ["train.precision=fp8", "use train.precision=bf16"]),  # no GPU, or no torchao either
    (["train.master_weights=bf16_kahan"], ["train.master_weights=bf16_kahan", "fp32", "set train.precision=bf16"]),
    (["optim.learning_rate_multipliers={'*embed_token.*': 2}"], ["'*embed_token.*'", "model.embed_tokens.weight"]),
    (
        ["train.deterministic=true", "model.attn_implementation=flash_attention_2"],
        ["train.deterministic=true", "model.attn_implementation=flash_attention_2", "use sdpa"],
    ),
    (["train.setps=4"], ["train.setps is not a recipe key", "did you mean train.steps?"]),
    (["profile={api_key: hunter2}"], ["profile.api_key is not a recipe key", "steps, ranks, memory"]),
    (["track=[tensorboard]"], ["track: tensorboard", "not installed", "pip install 'tensorboard>="]),
    (["--nproc", "0"], ["--nproc 0", "use --nproc 2"]),
    (["--nproc", "abc"], ["--nproc abc", "use --nproc 2"]),
]


def test_refusals_name_the_fix_and_do_not_block_the_next_run(echelon, tmp_path, monkeypatch):
    recipe = write_recipe(tmp_path)
    for name, content in {"empty.txt": "", "letter.txt": "a", "short.txt": "hello there"}.items():
        (tmp_path / name).write_text(content)
    for folder in ("no_text", "no_text_either", "small"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "picture.png").write_bytes(b"\x89PNG")
    small = {"model_type": "llama", "vocab_size": 128, "hidden_size": 32, "num_attention_heads": 2}
    (tmp_path / "small" / "config.json").write_text(json.dumps(small))
    (tmp_path / "small" / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    monkeypatch.setitem(sys.modules, "tensorboard", None)  # as if it were not installed
    # No hub name resolves, wherever this test runs.
    monkeypatch.setattr("socket.create_connection", lambda *_, **__: (_ for _ in ()).throw(OSError("no network")))
    before = sorted(tmp_path.rglob("*"))
    for changes, words in REFUSALS:
        ending = echelon("train", recipe, *changes)
        assert_refused(ending, 2, *words)
        if not changes[0].startswith("data.train"):
            assert sorted(tmp_path.rglob("*")) == before or changes[0].startswith("run.dir"), changes
        before = sorted(tmp_path.rglob("*"))
    # An error in the recipe file names its line.
    (tmp_path / "typo.yaml").write_text("run: {name: x}\ntrain:\n  setps: 3\n")
    assert_refused(echelon("train", "typo.yaml"), 2, "typo.yaml, line 3: train.setps", "did you mean train.steps?")
    assert_refused(echelon("train", "nope.yaml"), 2, "nope.yaml does not exist", "echelon init")
    # All of these used the same run folder, and the corrected command trains in it. The text is shorter than a sample.
    echelon("train", recipe, "data.train.0.path=short.txt", "--nproc", "1", "train.steps=1").succeeded()
    [row] = read_lines(tmp_path / "runs" / "tiny" / "metrics.jsonl")
    assert row["target_tokens"] == 4 * (len("hello there") - 1)  # too short for held-out text


def test_eval_generate_and_export_refuse_unusable_folders(echelon, run):
    for command in (["eval"], ["generate", "--prompt", "a"], ["export", "out"]):
        name, *rest = command
        rest = [Path("out")] if name == "export" else rest
        assert_refused(echelon(name, "nope", *rest), 2, "nope is not a folder", "runs/NAME")
        Path("bare").mkdir(exist_ok=True)
        assert_refused(echelon(name, "bare", *rest), 2, "bare is n", "recipe.yaml")
    assert_refused(echelon("generate", run.path, "--prompt", ""), 2, "--prompt ''", "at least one")
    assert_refused(echelon("eval", run.path, "--data", "nope.txt"), 2, "--data nope.txt", "no such file")
    assert_refused(echelon("export", run.path, Path("runs")), 2, "is not an empty folder", "choose a new folder")
    assert_refused(echelon("export", run.path, "text.txt"), 2, "text.txt", "choose a new folder")
    assert_refused(echelon("export", run.path, "out", "--dtype", "int8"), 2, "--dtype int8", "fp32, bf16, fp16")

    newest = run.checkpoints_dir / "step-00000006"
    os.truncate(newest / "__1_0.distcp", 100)
    for command in (["eval", run.path], ["generate", run.path, "--prompt", "a"], ["export", run.path, "out"]):
        assert_refused(echelon(*command), 1, "damaged", "__1_0.distcp has 100 bytes", f"Remove {newest}")
    shutil.rmtree(newest)  # as the message says
    assert echelon("export", run.path, "out").code == 0
    assert_refused(echelon("eval", "out"), 2, "out is an HF folder", "--data PATH")
    assert_refused(echelon("export", "out", "again"), 2, "out is not a run folder")
    os.truncate(Path("out/model.safetensors"), 1000)
    assert_refused(echelon("eval", "out", "--data", "text.txt"), 2, "out cannot be loaded", "echelon export")

    shutil.rmtree(run.checkpoints_dir / "step-00000003")
    for command in (["eval", run.path], ["generate", run.path, "--prompt", "a"], ["export", run.path, "new"]):
        assert_refused(echelon(*command), 2, "has no checkpoint yet", "echelon train")
    assert not [path for path in Path().iterdir() if path.name.startswith(".writing")]


def test_existing_run(echelon, run):
    """An existing run that is finished, in use, of another recipe or of other text; and damaged prepared data."""
    train = ("train", "recipe.json", "--nproc", "2")
    ending = echelon(*train)
    assert ending.code == 0 and "has finished; raise train.steps" in ending.out
    assert_refused(echelon(*train, "optim.learning_rate=0.5"), 2, "optim.learning_rate: 0.001 -> 0.5", "--fresh")
    # An invalid request does not move the old run aside either.
    assert_refused(echelon(*train, "--fresh", "model.config.hidden_size=33"), 2, "hidden_size=33")
    assert run.is_finished()
    live = RunFolder(run.path)
    live.lock()
    assert_refused(echelon(*train), 2, f"run.dir={run.path}", f"live run (pid {os.getpid()}")
    live.unlock()

    more = (*train, "train.steps=8")
    [shard] = run.text.read_prepared_path().glob("train-*.bin")
    content = shard.read_bytes()
    shard.write_bytes(content[:-10])
    assert_refused(echelon(*more), 2, f"{shard.name} has {len(content) - 10} bytes", "prepare again")
    shard.write_bytes(content)
    tokenizer = shard.parent / "tokenizer" / "tokenizer.json"
    right = tokenizer.read_text()
    tokenizer.write_text(right.replace('"model":', '"normalizer": {"type": "NFC"}, "model":', 1).replace(
        '"normalizer": null', '"truncated": null'))  # fmt: skip
    assert_refused(echelon(*more), 2, "tokenizer.json has", "prepare again")
    tokenizer.write_text(right)
    text = Path("text.txt")
    before = text.stat()
    text.write_text(text.read_text().replace("plus", "less"))
    ending = echelon(*more)
    assert_refused(ending, 2, "data.train: the data differs from that of the run", "--fresh")
    assert "run: changed" not in ending.out  # the run still has its old recipe
    text.write_text(text.read_text().replace("less", "plus"))
    os.utime(text, ns=(before.st_atime_ns, before.st_mtime_ns))

    # The newest checkpoint is damaged and skipped with a message. More steps are requested, so the run resumes.
    os.truncate(run.checkpoints_dir / "step-00000006" / "__0_0.distcp", 5)
    ending = echelon(*more).succeeded()
    assert "run: changed train.steps: 6 -> 8" in ending.out
    assert "Skipping a damaged checkpoint" in ending.out and "Resuming from step-00000003" in ending.out
    assert [row["step"] for row in read_lines(run.metrics_path) if row["kind"] == "train"] == list(range(1, 9))
    assert run.is_finished()


class Hostile:
    """Creates a folder when it is unpickled."""

    def __init__(self, path):
        self._path = str(path)

    def __reduce__(self):
        return os.mkdir, (self._path,)


def test_resume_refuses_a_malicious_checkpoint(echelon, run):
    newest = run.checkpoints_dir / "step-00000006"
    content = pickle.dumps(Hostile(Path("owned")))
    (newest / ".metadata").write_bytes(content)
    manifest = json.loads((newest / "manifest.json").read_text())
    manifest["files"][".metadata"] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (newest / "manifest.json").write_text(json.dumps(manifest))
    ending = echelon("train", "recipe.json", "--nproc", "2", "train.steps=7")
    assert_refused(ending, 1, "step-00000006", "refused", ".mkdir")
    assert not Path("owned").exists()


@pytest.mark.slow
def test_non_finite_loss(echelon, run):
    """A non-finite loss ends a run that was started with --fresh, which moves the old run aside."""
    settings = ("optim.learning_rate=1e30", "optim.max_grad_norm=null", "checkpoint.every=1")
    ending = echelon("train", "recipe.json", "--nproc", "2", "--fresh", *settings)
    assert_refused(ending, 1, "step 2:", "must be finite", "update was not applied", "Lower optim.learning_rate")
    assert (run.path.with_name("tiny.old-1") / "outcome.json").exists()
    text = run.metrics_path.read_text()
    assert "NaN" not in text and "Infinity" not in text
    rows = read_lines(run.metrics_path)
    assert [(row["step"], row["skipped"]) for row in rows] == [(1, False), (2, True)]
    assert rows[1]["grad_norm"] is None
    failure = read_lines(run.events_path)[-1]
    assert (failure["event"], failure["step"], failure["code"]) == ("failure", 1, 1)
    # The previous checkpoint is kept, complete, and loads.
    assert [path.name for path in run.checkpoints_dir.iterdir()] == ["step-00000001"]
    assert echelon("export", run.path, "out").code == 0


@pytest.mark.slow
def test_full_disk(echelon, run):
    disk = Path("disk")
    big = Path("big.txt")
    big.write_text(Path("text.txt").read_text() * 40)
    mount(disk, "500k")
    try:
        prepare = ("data", "--prepare", "recipe.json", f"data.train.0.path={big}", "data.prepared_dir=disk/prepared")
        assert_refused(echelon(*prepare), 1, "disk/prepared", "No space left", "data.prepared_dir")
        assert_refused(echelon(*prepare, "tokenizer={train: {vocab_size: 300}}"), 1, "No space left")
        assert not list(disk.rglob("*.partial"))

        train = ("train", "recipe.json", "run.dir=disk/run", "data.prepared_dir=runs/prepared", "--nproc", "2")
        ending = echelon(*train, "checkpoint.every=1")
        assert_refused(ending, 1, "A checkpoint could not be saved to disk/run/checkpoints", "free on this disk")
        assert not list((disk / "run" / "checkpoints").iterdir())
        subprocess.run(["mount", "-o", "remount,size=20m", str(disk)], check=True)
        echelon(*train, "checkpoint.every=1").succeeded()
        rows = read_lines(disk / "run" / "metrics.jsonl")
        assert [row["step"] for row in rows if row["kind"] == "train"] == [1, 2, 3, 4, 5, 6]

        filler = disk / "filler"
        with pytest.raises(OSError), filler.open("wb") as file:
            while True:
                file.write(bytes(2**12))
        assert_refused(echelon(*train, "run.dir=disk/other"), 1, "the disk is full", "free space")
        assert_refused(echelon("export", "disk/run", "disk/out"), 1, "disk/out", "No space left")
        assert not list(disk.glob(".writing*"))
        filler.unlink()
        assert echelon("export", "disk/run", "disk/out").code == 0
        assert_refused(echelon(*train, "run.dir=/proc/run"), 2, "run.dir=/proc/run", "choose a folder you can write to")
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


@pytest.mark.slow
def test_stops_and_deaths_during_training(echelon, tmp_path):
    """SIGTERM, Ctrl-C and a killed rank, one after the other; each time the same command resumes."""
    write_recipe(tmp_path, train={"steps": 600, "log_every": 50}, checkpoint={"every": 20, "keep_last": 2})
    folder = RunFolder(tmp_path / "runs" / "tiny")
    command = ("train", "recipe.json", "--nproc", "2")

    def train_until_saved():
        saved = folder.newest_step() or 0
        job = start(*command)
        wait_until(lambda: (folder.newest_step() or 0) > saved, process=job)
        return job

    job = train_until_saved()
    assert_refused(echelon(*command), 2, "is in use by a live run", f"pid {job.pid}", "run.name")
    job.terminate()
    assert_refused(finish(job), 3, "stopped by SIGTERM at step", "newest checkpoint is step", "resumes from it")
    assert_no_orphan()

    job = train_until_saved()
    os.killpg(job.pid, signal.SIGINT)  # a terminal sends it to all processes
    assert_refused(finish(job), 3, "stopped by SIGINT at step", "newest checkpoint is step", "resumes from it")
    assert_no_orphan()

    command = (*command, "fault.max_restarts=0")
    job = train_until_saved()
    victim = process_of(folder, 1)
    victim.kill()
    assert_refused(finish(job), 1, f"rank 1 (pid {victim.pid}) was killed by SIGKILL", "rank-00001.log")
    assert_no_orphan()

    ending = finish(start(*command))
    assert ending.code == 0 and "Resuming from step-" in ending.out, ending
    steps = [row["step"] for row in read_lines(folder.metrics_path) if row["kind"] == "train"]
    assert steps == list(range(1, 601))
    wanted = ("start", "resume", "signal", "failure", "restart", "done")
    events = [row["event"] for row in read_lines(folder.events_path) if row["event"] in wanted]
    assert events == ["start", "signal", "resume", "signal", "resume", "failure", "resume", "done"]
    assert not list(folder.checkpoints_dir.glob(".*"))


def test_used_port_under_another_launcher(echelon, tmp_path):
    write_recipe(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        launched = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        ending = finish(start("train", "recipe.json", RANK="0", **launched))
    assert_refused(ending, 1, f"127.0.0.1:{port}", "in use", "MASTER_PORT")
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_refusal_under_torchrun_is_printed_before_the_ranks_end(echelon, tmp_path):
    write_recipe(tmp_path)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, "-m", "echelon", "train", "recipe.json", "parallel={dp_shard: 8}"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    said = [line for line in ended.stderr.splitlines() if line.startswith("echelon: ")]
    assert ended.returncode == 1  # torchrun's own exit code
    assert len(said) == 1 and "dp_shard 8 needs 8 processes, but there are 2" in said[0], ended.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_concurrent_preparation_and_a_stop_during_it(echelon, tmp_path):
    write_recipe(tmp_path, data={"prepare_workers": 2})
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{n:x} and {n * n:x} are {n * n + n:b}\n" for n in range(160_000)))
    prepared = tmp_path / "runs" / "prepared"

    job = start("data", "--prepare", "recipe.json")
    wait_until(lambda: list(prepared.glob("*.partial")) and len(marked_processes()) > 1, 40, job)
    job.terminate()
    assert_refused(finish(job), 1, "stopped by SIGTERM", "start the same command again")
    assert_no_orphan()
    assert [path.suffix for path in prepared.iterdir()] == [".lock"]

    jobs = [start("data", "--prepare", "recipe.json") for _ in range(2)]
    endings = [finish(job) for job in jobs]
    assert [ending.code for ending in endings] == [0, 0], endings
    assert sum("tokenizing: " in ending.out for ending in endings) == 1
    assert len({ending.out.splitlines()[-1] for ending in endings}) == 1
    assert sorted(path.suffix for path in prepared.iterdir()) == ["", ".lock"]


@pytest.mark.slow
def test_a_rank_that_hangs(echelon, run):
    """A suspended rank, as on a machine without free memory: its peer waits in a collective, and reports it."""
    fault = "fault={hang_seconds: 3, max_restarts: 0}"
    command = ("train", "recipe.json", "--nproc", "2", "train.steps=100000", "checkpoint.every=100000", fault)
    job = start(*command)
    await_line(run.metrics_path, '"step": 20,', job, seconds=120)
    process_of(run, 1).suspend()
    ending = finish(job, 60)
    assert_refused(
        ending, 1, "did not end within 3 s (fault.hang_seconds), and rank 1 does not answer", "rank-00000.log"
    )
    assert "trainer.py" in run.log_path(0).read_text(), "where each thread was"
