"""The code inside a SageMaker container, tested without one: files, the failure file, exit codes, quoting."""

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import zipfile
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from echelon.ground.checksums import write_manifest
from echelon.ground.errors import ConfigError, LaunchError
from echelon.launch.sagemaker import container, enter
from echelon.launch.source_bundle import PACKAGE
from echelon.learn.checkpoint.folder import Checkpoint, remove
from echelon.recipe.load import load_recipe
from echelon.run.folder.run_folder import RunFolder
from echelon.run.supervise.outcome import Outcome
from tests.unit.recipe_samples import RECIPE

# As real jobs log it, except for the order of hosts, which is not guaranteed.
RESOURCES = {
    "current_host": "algo-10",
    "current_instance_type": "ml.p4d.24xlarge",
    "current_group_name": "homogeneousCluster",
    "hosts": ["algo-10", "algo-1", "algo-2"],
    "network_interface_name": "eth0",
    "instance_groups": [
        {
            "instance_group_name": "homogeneousCluster",
            "instance_type": "ml.p4d.24xlarge",
            "hosts": ["algo-10", "algo-1", "algo-2"],
        }
    ],
}
CHANNEL = {"TrainingInputMode": "File", "S3DistributionType": "FullyReplicated", "RecordWrapperType": "None"}
GIVEN = RECIPE | {"data": {"train": "/opt/ml/input/data/train", "sequence_len": 32}}


@pytest.fixture
def base(tmp_path):
    """The files of a container."""
    config = tmp_path / "ml" / "input" / "config"
    config.mkdir(parents=True)
    (config / "resourceconfig.json").write_text(json.dumps(RESOURCES))
    (config / "inputdataconfig.json").write_text(json.dumps({"train": CHANNEL, "echelon": CHANNEL}))
    (config / "hyperparameters.json").write_text('{"mp_parameters": "{\\"partitions\\": 2}", "epochs": "3"}')
    return tmp_path / "ml"


def write_recipe(base, **sections):
    path = base / "input" / "data" / "echelon" / "recipe.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(GIVEN | sections))
    return path


def test_reads_the_files_of_a_real_job(base):
    found = container.read_container(base, {})
    assert found.hosts == ("algo-1", "algo-2", "algo-10")
    assert (found.host, found.interface, found.instance_type) == ("algo-10", "eth0", "ml.p4d.24xlarge")
    assert found.channels == ("echelon", "train")
    assert found.describe() == [
        "container: algo-10 of 3 (ml.p4d.24xlarge); channels echelon, train",
        "container: hyperparameters epochs, mp_parameters are ignored; the recipe has all settings",
    ]


def test_uses_the_variables_of_a_toolkit_without_the_files(tmp_path):
    told = {
        "SM_HOSTS": '["algo-2", "algo-1"]',
        "SM_CURRENT_HOST": "algo-2",
        "SM_NETWORK_INTERFACE_NAME": "eth1",
        "SM_CURRENT_INSTANCE_TYPE": "ml.g5.xlarge",
    }
    found = container.read_container(tmp_path, told)
    assert (found.host, found.hosts) == ("algo-2", ("algo-1", "algo-2"))
    assert (found.interface, found.instance_type) == ("eth1", "ml.g5.xlarge")
    assert container.read_container(tmp_path, {}).hosts == ("algo-1",)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "resourceconfig.json is not JSON"),
        ("[]", "is not a JSON object"),
        ('{"hosts": "algo-1"}', "not a list of names"),
        ('{"hosts": ["algo-1"], "current_host": "algo-3"}', "'algo-3', which is not among algo-1"),
    ],
)
def test_refuses_files_of_another_format(base, text, said):
    (base / "input" / "config" / "resourceconfig.json").write_text(text)
    with pytest.raises(ConfigError, match=said):
        container.read_container(base, {})


def test_refuses_a_run_folder_that_ends_with_the_container(base):
    write_recipe(base)
    with pytest.raises(ConfigError) as refused:
        container.run(base, {})
    assert f"set run.dir={base}/checkpoints/demo" in str(refused.value)


def test_passes_hosts_and_efa_to_training(base, tmp_path, caplog):
    caplog.set_level(logging.INFO, "echelon")
    found = container.read_container(base, {})
    assert container.find_variables(found, {"HF_HOME": "/data"}, tmp_path) == {
        "NCCL_DEBUG": "WARN",
        "SM_HOSTS": '["algo-1", "algo-2", "algo-10"]',
        "SM_CURRENT_HOST": "algo-10",
        "SM_NETWORK_INTERFACE_NAME": "eth0",
        "SM_CURRENT_INSTANCE_TYPE": "ml.p4d.24xlarge",
    }
    driver = tmp_path / "bus" / "pci" / "drivers" / "efa"
    driver.mkdir(parents=True)
    card = tmp_path / "class" / "infiniband" / "rdmap16s27" / "device"
    card.mkdir(parents=True)
    (card / "driver").symlink_to(driver)
    own = {"FI_PROVIDER": "tcp", "NCCL_DEBUG": "INFO", "HF_HOME": "/data"}
    given = container.find_variables(found, own, tmp_path)
    assert not {"FI_PROVIDER", "NCCL_DEBUG"} & given.keys()
    assert given["RDMAV_FORK_SAFE"] == "1"
    assert caplog.messages == ["container: EFA, RDMAV_FORK_SAFE=1"]


def test_hub_files_are_stored_where_there_is_most_space(base, tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.INFO, "echelon")
    found = container.read_container(base, {})
    room = {base: 20, tmp_path: 500}
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr("shutil.disk_usage", lambda place: SimpleNamespace(free=room[place] * 2**30))
    assert container.find_variables(found, {}, tmp_path)["HF_HOME"] == f"{tmp_path}/huggingface"
    assert f"container: HF_HOME={tmp_path}/huggingface, 500 GiB free" in caplog.messages
    warm = base / "sagemaker" / "warmpoolcache"
    warm.mkdir(parents=True)
    room[warm] = 1
    assert container.find_variables(found, {}, tmp_path)["HF_HOME"] == f"{warm}/huggingface"
    warm.rmdir()
    room[base] = 500
    assert container.find_variables(found, {}, tmp_path)["HF_HOME"] == f"{base}/huggingface"
    for name in ("HF_HOME", "HF_HUB_CACHE", "XDG_CACHE_HOME"):
        assert "HF_HOME" not in container.find_variables(found, {name: "/mine"}, tmp_path)


def test_waits_for_names(monkeypatch, caplog):
    caplog.set_level(logging.INFO, "echelon")
    monkeypatch.setattr(container, "_LOOK_SECONDS", 0.01)
    answers = iter([False, False, True, True])
    monkeypatch.setattr(container, "_resolves", lambda name: next(answers))
    container.await_names(["algo-1", "algo-2"])
    assert caplog.messages == ["container: waiting for the address of algo-1"]
    monkeypatch.setattr(container, "_resolves", lambda name: False)
    with pytest.raises(LaunchError, match="algo-3 has no address after 0 s"):
        container.await_names(["algo-3"], 0.0)


def test_a_missing_channel_is_named_with_its_host(base):
    data = {"train": [{"path": str(base / "input" / "data" / "train")}], "sequence_len": 32}
    write_recipe(base, data=data, run={"name": "tiny", "dir": str(base / "checkpoints" / "tiny")})
    with pytest.raises(ConfigError) as refused:
        container.run(base, {})
    place = f"{base}/input/data/train"
    assert f"data.train.0.path={place}: there is no {place} in the container of algo-10" in str(refused.value)


def test_trains_with_the_number_of_processes_of_the_recipe(base):
    recipe, _ = load_recipe(write_recipe(base, launch={"nproc_per_node": 2}))
    argv = container.train_command(recipe, Path("a 'b' $c\n.yaml"))
    assert argv == [sys.executable, "-m", "echelon", "train", "a 'b' $c\n.yaml", "--nproc", "2"]


def test_the_cause_is_the_last_message_of_echelon():
    said = ["echelon: a note", "W1122 something", "echelon: rank 1: the loss is not finite", "  at step 7", ""]
    assert container.find_message(said) == "rank 1: the loss is not finite\n  at step 7"
    assert container.find_message(["Traceback", "ModuleNotFoundError: torch"]) == "ModuleNotFoundError: torch"
    assert container.find_message([]) == ""


@pytest.fixture
def restored():
    """Restores the signal handlers, which a container replaces permanently."""
    before = {each: signal.getsignal(each) for each in enter.STOP_SIGNALS}
    yield
    for each, handler in before.items():
        signal.signal(each, handler)


@pytest.mark.parametrize(
    ("script", "outcome"),
    [
        ("echo hello >&2; echo 'echelon: no such key' >&2; exit 2", Outcome(2, "no such key")),
        ("kill -KILL $$", Outcome(1, "echelon train was killed by SIGKILL")),
        ("kill -TERM $PPID; sleep 9", Outcome(1, "stopped by SIGTERM before training began; start the same job again")),
        ("echo 'echelon: rank 1 is gone' >&2; kill -TERM $PPID; sleep 9", Outcome(1, "rank 1 is gone")),
        (
            "trap 'echo echelon: saved >&2; exit 3' USR1; kill -USR1 $PPID; while :; do sleep 0.05; done",
            Outcome(3, "saved"),
        ),
    ],
)
def test_how_training_ended(script, outcome, restored, capfd):
    assert container.run_training(["bash", "-c", script], os.environ, lambda: None) == outcome
    assert capfd.readouterr().err.count("echelon: ") == script.count("echelon: ")


@pytest.mark.parametrize(
    ("ended", "code"),
    [
        (Outcome(0), 0),
        (Outcome(3, "stopped by budget.max_hours=2; the newest checkpoint is step 9"), 0),
        (Outcome(3, "stopped by SIGTERM; the newest checkpoint is step 9"), 3),
        (Outcome(2, "no such key"), 2),
        (Outcome(1, "a rank failed"), 1),
    ],
)
def test_exit_codes(ended, code):
    assert container.translate(ended) == Outcome(code, ended.message)


def test_a_silent_exit_still_gives_a_message():
    assert "code 1" in container.translate(Outcome(1)).message


def test_records_are_kept_and_weights_are_not(tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.create()
    folder.metrics_path.write_text("{}\n")
    folder.log_path(3).write_text("a line\n")
    folder.log_path(4).write_text("of another host, at an earlier start\n")
    os.utime(folder.log_path(4), (1000, 1000))
    (folder.checkpoints_dir / "step-00000001").mkdir()
    (folder.path / ".lock").touch()

    def kept(name, leads):
        container.keep_records(folder, tmp_path / name, 2000, leads)
        return {str(path.relative_to(tmp_path / name)) for path in (tmp_path / name).rglob("*")}

    assert kept("led", True) == {"metrics.jsonl", "logs", "logs/rank-00003.log"}
    assert kept("followed", False) == {"logs", "logs/rank-00003.log"}
    container.keep_records(RunFolder(tmp_path / "none"), tmp_path / "nothing", 0, True)


@pytest.fixture
def markers(tmp_path):
    """Start a thread that makes and removes SageMaker's markers beside the files of folders."""
    ended = threading.Event()
    threads = []

    def start(*folders):
        threads.append(threading.Thread(target=put_markers, args=(folders, ended)))
        threads[-1].start()

    yield start
    ended.set()
    for thread in threads:
        thread.join()


def put_markers(folders, ended):
    while not ended.is_set():
        found = [(place, name) for folder in folders for place, _, names in os.walk(folder) for name in names]
        for place, name in found:
            for kind in ("uploading", "uploaded"):
                with suppress(OSError):  # the folder was renamed or removed
                    Path(place, f"{name}.sagemaker-{kind}").touch()
                    Path(place, f"{name}.sagemaker-{kind}").unlink()


def test_markers_of_a_running_upload_are_never_copied_and_harm_nothing(tmp_path, markers):
    folder = RunFolder(tmp_path / "run")
    folder.create()
    for name in ("recipe.yaml", "metrics.jsonl", "events.jsonl", "plan.json", "logs/rank-00000.log", "tensorboard/a"):
        (folder.path / name).parent.mkdir(exist_ok=True)
        (folder.path / name).write_text("{}\n")
    (folder.path / "plan.json.sagemaker-uploaded").touch()  # one that stays
    markers(folder.path)
    for number in range(80):
        container.keep_records(folder, tmp_path / "kept", 0, True)
        container.mirror(folder.path / "tensorboard", tmp_path / "events")
        saved = tmp_path / "run" / "checkpoints" / f"step-{number:08d}"
        saved.mkdir()
        (saved / "state.json").write_text("{}")
        write_manifest(saved)
        assert set(json.loads((saved / "manifest.json").read_text())["files"]) == {"state.json"}
        remove(Checkpoint(number, saved))
    assert not list(tmp_path.glob("run/checkpoints/*"))
    assert not [path for name in ("kept", "events") for path in (tmp_path / name).rglob("*sagemaker*")]
    assert {path.name for path in (tmp_path / "kept").iterdir()} == {
        "recipe.yaml", "metrics.jsonl", "events.jsonl", "plan.json", "logs"
    }  # fmt: skip


def test_event_files_are_copied_during_the_run(tmp_path):
    board = tmp_path / "tensorboard" / "events.1"
    board.parent.mkdir()
    board.write_text("a")
    container.mirror(board.parent, tmp_path / "out")
    board.write_text("ab")
    container.mirror(board.parent, tmp_path / "out")
    assert (tmp_path / "out" / "events.1").read_text() == "ab"


def test_the_failure_file_keeps_the_first_cause_in_1024_characters(tmp_path):
    enter.write_failure(tmp_path, "é" * 2000)
    enter.write_failure(tmp_path, "an echo")
    text = (tmp_path / "output" / "failure").read_text()
    assert len(text) == 1024
    assert text == "é" * 1023 + "…"


def test_an_unexpected_error_shows_no_secret(base, restored, monkeypatch, capfd):
    def fail(*_):
        raise RuntimeError("401 from https://me:word@host")

    monkeypatch.setattr(enter, "make_importable", lambda *_: None)
    monkeypatch.setattr(container, "run", fail)
    assert enter.work(base) == 1
    assert (base / "output" / "failure").read_text() == "RuntimeError: 401 from https://***@host"
    told = capfd.readouterr()
    assert "in fail" in told.err and "me:word" not in told.out + told.err


def pack(base, version):
    """The channel with the job's files. The echelon in it only installs packages, and has another version."""
    channel = base / "input" / "data" / "echelon"
    channel.mkdir(parents=True, exist_ok=True)
    parts = (
        "ground/__init__.py",
        "ground/errors.py",
        "ground/redaction.py",
        "launch/__init__.py",
        "launch/sagemaker/__init__.py",
    )
    with zipfile.ZipFile(channel / "echelon.zip", "w") as archive:
        archive.writestr("echelon/__init__.py", f'__version__ = "{version}"\n')
        for name in (*parts, "launch/sagemaker/install.py"):
            archive.writestr(f"echelon/{name}", (PACKAGE / name).read_bytes())
    return channel


def test_uses_the_images_echelon_only_in_the_same_version(base, monkeypatch, capfd):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PYTHONPATH", "before")
    enter.make_importable(pack(base, "1.0"))
    assert "from the channel" in capfd.readouterr().err
    assert (Path(sys.path[0]) / "echelon" / "__init__.py").exists()
    assert os.environ["PYTHONPATH"] == f"{sys.path[0]}{os.pathsep}before"
    monkeypatch.setattr(enter, "_find_installed", lambda name: "1.0")
    before = sys.path[0]
    enter.make_importable(pack(base, "1.0"))
    assert sys.path[0] == before
    assert enter.read_version(pack(base, "1.0") / "echelon.zip") == "1.0"


def start_entry(base, **pipes):
    """Start `enter.py` as a process, with the container's files in another folder."""
    script = f"import sys\nfrom pathlib import Path\nsys.path[:0] = [{str(Path(enter.__file__).parent)!r}]\n"
    script += f"import enter\nsys.exit(enter.main(Path({str(base)!r})))"
    return subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.PIPE, text=True, **pipes)


def failure_of(base):
    return (base / "output" / "failure").read_text()


def test_a_stop_while_pip_runs_ends_both(base, tmp_path, monkeypatch):
    (pack(base, "1.0") / "requirements.txt").write_text("no-such-package-of-echelon\n")
    (tmp_path / "pip").mkdir()
    (tmp_path / "pip" / "__init__.py").touch()
    (tmp_path / "pip" / "__main__.py").write_text(
        "import os, sys, time\nif 'config' in sys.argv: sys.exit()\nprint(os.getpid(), flush=True)\ntime.sleep(60)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    process = start_entry(base, stdout=subprocess.PIPE)
    pip = int(process.stdout.readline())
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 1
    assert failure_of(base).startswith("stopped by SIGTERM before training began")
    with pytest.raises(ProcessLookupError):
        os.kill(pip, 0)


def test_process_one_forwards_signals_reaps_orphans_and_passes_the_code(base):
    """With a stub for echelon, to test only signals and exit codes."""
    channel = pack(base, "1.0")
    stand_in = """
import os, signal, sys, time
class Outcome:
    code, message = 3, "stopped by SIGTERM; saved 'all' of it"
def run(base, env):
    if os.fork() == 0:
        if os.fork() == 0:
            os._exit(7)
        os._exit(0)
    asked = []
    signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))
    sys.stderr.write("ready\\n"); sys.stderr.flush()
    while not asked:
        time.sleep(0.01)
    sys.stderr.write("asked\\n")
    if "die" in os.listdir(base):
        os.kill(os.getpid(), signal.SIGKILL)
    return Outcome
"""
    with zipfile.ZipFile(channel / "echelon.zip", "a") as archive:
        archive.writestr("echelon/launch/sagemaker/container.py", stand_in)

    def stop():
        process = start_entry(base)
        for line in process.stderr:
            if line == "ready\n":
                process.send_signal(signal.SIGTERM)
                break
        err = process.communicate(timeout=60)[1]
        return process.returncode, err

    assert stop() == (3, "asked\n")
    assert failure_of(base) == "stopped by SIGTERM; saved 'all' of it"
    (base / "output" / "failure").unlink()
    (base / "die").touch()
    assert stop()[0] == 128 + signal.SIGKILL
    assert (
        failure_of(base) == "echelon's own process was killed by SIGKILL (often because the machine ran out of memory)"
    )


def test_old_pythons_can_parse_the_entry_script():
    """The image's Python may be too old for echelon; the entry script must be able to report that."""
    import ast

    ast.parse(Path(enter.__file__).read_text(), feature_version=(3, 10))
