"""Machines by ssh: the commands, byte for byte, refusals, and the life of a job with a fake ssh."""

import json
import os
import shlex
import shutil
import stat
import time
from pathlib import Path

import psutil
import pytest

from echelon.ground.errors import ConfigError, LaunchError
from echelon.launch.records import make_job, submit_job
from echelon.launch.ssh_launcher import TorchrunLauncher
from echelon.recipe.load import parse_recipe
from tests.unit.recipe_samples import DEMO
from tests.waiting import wait_until

GOLDEN = Path(__file__).parent / "golden" / "torchrun"
RECIPE = DEMO + "launch: {to: torchrun, nodes: 2, torchrun: {hosts: [a, b]}}\n"
# Runs on this machine what ssh would run remotely: through a shell, which splits the command into words.
SSH = """#!/bin/sh
while [ "$1" != -- ]; do shift; done
[ "$2" = unreachable ] && printf 'Warning: something\\nssh: connect to host unreachable: No route\\n' >&2 && exit 255
exec sh -c "$3"
"""
# A fake Python: records its arguments, then runs until it is stopped.
TRAINING = """#!/bin/bash
printf '%s\\n' "$@" "$ODD" "$PWD" > words.$$
trap 'echo saved; exit 3' TERM
exec 2> shell-words
echo begun
while [ ! -e finish ]; do sleep 0.05; done
exit $(cat finish)
"""
ODD = 'it\'s $HOME "quoted" \\ and\nanother line'


def make(workdir, *overrides, name="demo-20300102-030405"):
    recipe, _ = parse_recipe(RECIPE, "recipe.yaml", list(overrides))
    return make_job(recipe, Path(workdir), name)


@pytest.fixture
def shared(tmp_path, monkeypatch):
    """A working directory with an awkward name that "both machines" see, with fake programs."""
    folder = tmp_path / "it's shared"
    folder.mkdir()
    for name, text in (("ssh", SSH), ("training", TRAINING)):
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(text)
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.chdir(folder)
    return folder


def submit(job):
    return submit_job(job, TorchrunLauncher(), TorchrunLauncher().render(job))


def await_state(record, *states):
    deadline = time.monotonic() + 60
    while (now := TorchrunLauncher().status(record)).state not in states:
        assert time.monotonic() < deadline, now
        time.sleep(0.05)
    return now


def await_lines(path, count):
    wait_until(lambda: path.exists() and path.read_text().count("\n") >= count)


def await_end(pid):
    wait_until(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("plain", []),
        (
            "all",
            [
                "launch.nodes='1:2'", "launch.nproc_per_node=8", "launch.python=/opt/py 3/bin/python",
                "launch.setup=[module load cuda, 'source \"/opt/a b/activate\"']", "fault.max_restarts=7",
                'launch.env={GREETING: "it\'s $5\\nnow"}',
                "launch.max_hours=1.5",
                "launch.torchrun={hosts: [10.0.0.7, node-2.cluster], port: 1234, user: me, interface: ib0, "
                "workdir: /mnt/a b, ssh_options: [-p, '2222', -o, ProxyJump=gate]}",
            ],
        ),
    ],
)  # fmt: skip
def test_the_rendered_commands(name, overrides):
    texts = TorchrunLauncher().render(make("/work dir", *overrides))
    assert list(texts) == ["start.sh", "agent.sh", "by-hand.txt"]
    for file, text in texts.items():
        assert text == (GOLDEN / f"{name}-{file}").read_text(), file


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("launch.torchrun.hosts=[]", "launch.torchrun.hosts is empty"),
        ("launch.torchrun.hosts=[a, a]", "names a twice"),
        ("launch.torchrun.hosts=[a, -oProxyCommand=reboot]", "neither a host name nor an IPv4 address"),
        ("launch.torchrun.hosts=[a, 'b;reboot']", "neither a host name nor an IPv4 address"),
        ("launch.torchrun.hosts=[a, me@b]", r"set launch.torchrun.ssh_options=\[-l, me\]"),
        ("launch.torchrun.hosts=[localhost, b]", "is a different machine on each host"),
        ("launch.torchrun.hosts=[a, b, c]", "launch.nodes=2 does not fit the 3 hosts"),
        ("launch.nodes='3:4'", "launch.nodes=3:4 does not fit the 2 hosts"),
        ("launch.torchrun.workdir=shared", "is not an absolute path"),
    ],
)
def test_invalid_jobs_are_refused_before_anything_starts(override, words):
    with pytest.raises(ConfigError, match=words):
        TorchrunLauncher().check(make("/work", override))


def test_a_spare_host_is_one_more():
    job = make("/work", "launch.nodes=2+1", "launch.torchrun.hosts=[a, b, c]")
    TorchrunLauncher().check(job)
    assert "--nodes 2+1 --rendezvous a:29400" in TorchrunLauncher().render(job)["agent.sh"]
    with pytest.raises(ConfigError, match=r"launch\.nodes=2\+1 does not fit the 4 hosts"):
        TorchrunLauncher().check(make("/work", "launch.nodes=2+1", "launch.torchrun.hosts=[a, b, c, d]"))


def test_a_range_accepts_fewer_hosts_than_its_maximum():
    lines = TorchrunLauncher().check(make("/work", "launch.nodes='1:4'"))
    assert lines[0] == "2 hosts, which must share /work; rendezvous at a:29400"


def test_a_job_runs_to_its_end_and_awkward_arguments_arrive_unchanged(shared):
    program = shared.parent / "bin" / "training"
    record = submit(make(shared, f"launch.python={program}", f"launch.env={{ODD: {json.dumps(ODD)}}}"))
    folder = shared / record.folder
    for host in "ab":  # each says so after it has written its words
        await_lines(folder / f"host-{host}.log", 1)
    expected = ["-m", "echelon", "train", str(folder / "recipe.yaml"), "--nodes", "2", "--rendezvous", "a:29400", ODD]
    words = [path.read_text() for path in shared.glob("words.*")]
    assert words == ["".join(f"{each}\n" for each in [*expected, shared])] * 2
    assert TorchrunLauncher().status(record).state == "running"
    (shared / "finish").write_text("0")
    ended = await_state(record, "done", "failed")
    assert (ended.state, ended.exit_code, ended.detail) == ("done", 0, "a: exit code 0; b: exit code 0")
    assert list(TorchrunLauncher().logs(record, follow=True)) == ["a | begun", "b | begun"]
    with pytest.raises(LaunchError, match="has ended already"):
        TorchrunLauncher().cancel(record)


def test_cancelling_signals_every_machine_and_the_code_is_recorded(shared):
    record = submit(make(shared, f"launch.python={shared.parent / 'bin' / 'training'}"))
    for host in "ab":
        await_lines(shared / record.folder / f"host-{host}.log", 1)
    TorchrunLauncher().cancel(record)
    assert await_state(record, "stopped", "failed").exit_code == 3
    assert list(TorchrunLauncher().logs(record, follow=False)) == ["a | begun", "a | saved", "b | begun", "b | saved"]


def test_a_failing_setup_is_a_failed_job(shared):
    assert await_state(submit(make(shared, "launch.setup=['exit 9']")), "failed").exit_code == 9


def test_an_unreachable_machine_ends_the_agents_on_the_others(shared):
    """Also an agent whose session does not exist yet when ssh would return."""
    setsid = shared.parent / "bin" / "setsid"
    setsid.write_text(f'#!/bin/sh\nsleep 0.3\nexec {shutil.which("setsid")} "$@"\n')
    setsid.chmod(0o755)
    job = make(shared, "launch.torchrun.hosts=[a, unreachable]", f"launch.python={shared.parent / 'bin' / 'training'}")
    with pytest.raises(LaunchError) as raised:
        submit(job)
    assert str(raised.value).startswith(
        "ssh cannot reach unreachable: ssh: connect to host unreachable: No route; `ssh -T -o BatchMode=yes"
    )
    await_end(int((job.folder / "host-a.pid").read_text()))


def test_a_machine_that_does_not_share_the_folder_is_named(shared):
    job = make(shared, f"launch.torchrun.workdir={shared.parent / 'elsewhere'}")
    with pytest.raises(LaunchError, match=r"^a: bash: .*elsewhere/jobs/demo-20300102-030405/agent.sh: No such file"):
        submit(job)


def test_rendered_lines_are_valid_shell_lines():
    """Each line of start.sh has exactly the arguments that `submit` runs."""
    job = make("/work dir", "launch.torchrun.ssh_options=[-l, me]")
    for line, host in zip(TorchrunLauncher().render(job)["start.sh"].splitlines(), "ab", strict=True):
        words = shlex.split(line)
        assert words[0] == "ssh" and words[words.index("--") + 1] == host and len(words) == words.index("--") + 3
