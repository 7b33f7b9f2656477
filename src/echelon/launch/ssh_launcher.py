"""`--to torchrun`: one agent per machine, started over ssh in a working directory that all machines share.

`Ssh` and `on_each` run commands on other machines with this machine's `ssh`.
"""

import re
import shlex
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from typing_extensions import override

from echelon.ground.errors import ConfigError, LaunchError, MissingSettingError
from echelon.ground.variables import asked_environment
from echelon.launch.job import NAME, JobRecord, JobSpec, JobStatus, Launcher, RecordForm, Submitted
from echelon.launch.records import Log, name_ending, rarely, read_exit_code
from echelon.launch.shell import join_words, limit_command, prepare_lines, watched_lines
from echelon.recipe.launch_sections import LaunchConfig
from echelon.run.supervise.outcome import DONE, STOPPED

CONNECT_SECONDS = 10
"""Timeout of a connection."""

# ssh's exit code when the connection failed, not the command.
_NO_CONNECTION = 255
# Admits nothing that ssh or a shell would interpret as anything but a name.
HOST = r"[A-Za-z0-9][A-Za-z0-9._-]*"
USER = r"[A-Za-z0-9_][A-Za-z0-9._@\\-]*"

Answer = TypeVar("Answer")

_LOOK_SECONDS = 1.0
# Asking over ssh whether an agent is alive is slow, so it is rare; an agent that ended leaves a file.
_ASK_SECONDS = 15.0
# Files in the job's folder, which every machine sees.
_AGENT, _START, _PASTE = "agent.sh", "start.sh", "by-hand.txt"
# Compares the command line, since process ids are reused.
_FIND = f'group=$(cat "$0/host-$1.pid") && grep -qsaF "$0/{_AGENT}" "/proc/$group/cmdline"'
_RUNS = "runs"
_LOOK = f"if {_FIND}; then echo lives; else echo gone; fi"
_STOP = f'if {_FIND}; then kill -TERM -- "-$group" && echo asked; else echo gone; fi'


@dataclass(frozen=True)
class Ssh:
    """How `ssh` is called: without prompts, and with the recipe's options."""

    options: tuple[str, ...] = ()

    def command(self, host: str, argv: Sequence[str]) -> list[str]:
        """The command line that runs `argv` on the host; every argument arrives unchanged."""
        settings = ["-T", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECT_SECONDS}"]
        return ["ssh", *settings, *self.options, "--", host, shlex.join(argv)]

    def run(self, host: str, argv: Sequence[str], seconds: float = 60.0) -> str:
        """Run a command and return its output. Raises LaunchError if it fails or the host cannot be reached."""
        command = self.command(host, argv)
        try:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=seconds,
                check=False,
                start_new_session=True,  # the caller handles Ctrl-C
            )
        except FileNotFoundError:
            raise LaunchError("ssh is not installed on this machine; install the OpenSSH client.") from None
        except subprocess.TimeoutExpired:
            raise LaunchError(f"{host} did not answer within {seconds:.0f} s.") from None
        if done.returncode == _NO_CONNECTION:
            raise LaunchError(
                f"ssh cannot reach {host}: {explain(done.stderr)}; `{shlex.join(self.command(host, ['true']))}` must "
                "work without a prompt."
            )
        if done.returncode != 0:
            raise LaunchError(f"{host}: {explain(done.stderr) or f'exit code {done.returncode}'}.")
        return done.stdout


def find_ssh(launch: LaunchConfig) -> Ssh:
    """The ssh settings of the recipe."""
    return Ssh(launch.torchrun.ssh_options)


def check_hosts(launch: LaunchConfig) -> None:
    """Raise ConfigError unless the hosts are valid names, each listed once."""
    hosts = launch.torchrun.hosts
    if not hosts:
        raise MissingSettingError(
            "launch.torchrun.hosts is empty; name the machines with --hosts a,b or in the recipe.",
            {"launch.torchrun.hosts": [f"SET-host-{number}" for number in range(1, launch.node_range[0] + 1)]},
        )
    for host in hosts:
        if "@" in host:
            raise ConfigError(
                f"launch.torchrun.hosts: {host} contains a user; set launch.torchrun.ssh_options=[-l, "
                f"{host.partition('@')[0]}], and write only {host.partition('@')[2]}."
            )
        if not re.fullmatch(HOST, host):
            raise ConfigError(
                f"launch.torchrun.hosts: {host!r} is neither a host name nor an IPv4 address; use letters, digits, "
                "dots, dashes and _, starting with a letter or digit."
            )
    if len(set(hosts)) < len(hosts):
        twice = next(host for host in hosts if hosts.count(host) > 1)
        raise ConfigError(f"launch.torchrun.hosts names {twice} twice; give each machine once.")
    if len(hosts) > 1 and (local := {"localhost", "127.0.0.1"} & set(hosts)):
        raise ConfigError(
            f"launch.torchrun.hosts: {local.pop()} is a different machine on each host; use an address that the other "
            "hosts can reach."
        )


def on_each(hosts: Sequence[str], ask: Callable[[str], Answer]) -> dict[str, Answer | LaunchError]:
    """Call `ask` for all hosts in parallel; return each host's answer or error, in the order of the hosts."""

    def attempt(host: str) -> Answer | LaunchError:
        try:
            return ask(host)
        except LaunchError as error:
            return error

    with ThreadPoolExecutor(max_workers=32) as pool:
        return dict(zip(hosts, pool.map(attempt, hosts), strict=True))


def explain(errors: str) -> str:
    """The last line of the error output, which has the reason; ssh's warnings come before it."""
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    return lines[-1].rstrip(".") if lines else ""


class TorchrunLauncher(Launcher):
    """Starts an agent on each host. The job's folder has each agent's output, process id and exit code."""

    record_form = RecordForm(
        id=NAME,
        place={"hosts": f"{HOST}(,{HOST})*", "folder": r"/[^\0]*", "ssh_options": r"[^\0]*", "user?": USER},
        needs_own=True,
    )
    sees_files = keeps_others = has_spares = True
    way_of_secrets = "keep it in a file on each machine, and read it in launch.setup: `NAME=$(cat FILE)`, `export NAME`"

    @override
    def find_packages(self, launch: LaunchConfig) -> tuple[str, str]:
        return ("shared", "") if self.starts_this_python(launch, launch.python) else super().find_packages(launch)

    @override
    def check(self, job: JobSpec) -> list[str]:
        launch = job.recipe.launch
        hosts = launch.torchrun.hosts
        check_machines(launch)
        workdir = _workdir(job)
        if not workdir.is_absolute():
            raise ConfigError(f"launch.torchrun.workdir={workdir} is not an absolute path; start it with a slash.")
        return [
            f"{len(hosts)} hosts, which must share {workdir}; rendezvous at {hosts[0]}:{launch.torchrun.port}",
            f"output goes to {job.folder}/host-NAME.log",
        ]

    @override
    def render(self, job: JobSpec) -> dict[str, str]:
        """The ssh commands run here, the script they run on each host, and lines to paste by hand."""
        ssh = find_ssh(job.recipe.launch)
        hosts = job.recipe.launch.torchrun.hosts
        starts = [shlex.join(ssh.command(host, _start_words(job, host))) for host in hosts]
        return {
            _START: "\n".join(starts) + "\n",
            _AGENT: _render_agent(job),
            _PASTE: _render_lines(job),
        }

    @override
    def submit(self, job: JobSpec) -> Submitted:
        """If a host cannot be reached, stops the agents already started."""
        launch = job.recipe.launch
        ssh, hosts = find_ssh(launch), launch.torchrun.hosts
        place = {
            "hosts": ",".join(hosts),
            "folder": str(_folder(job)),
            "ssh_options": shlex.join(ssh.options),
        }
        answers = on_each(hosts, lambda host: ssh.run(host, _start_words(job, host)))
        failed = [answer for answer in answers.values() if isinstance(answer, LaunchError)]
        if failed:
            started = [host for host, answer in answers.items() if not isinstance(answer, LaunchError)]
            on_each(started, lambda host: ssh.run(host, ["bash", "-c", _STOP, place["folder"], host]))
            raise failed[0]
        return Submitted(job.name, place)

    @override
    def status(self, record: JobRecord) -> JobStatus:
        """Asks each host without an exit code whether its agent is alive."""
        hosts = record.place["hosts"].split(",")
        codes = _read_codes(record, hosts)
        silent = [host for host in hosts if host not in codes]
        answers = on_each(silent, lambda host: _ask(record, host, _LOOK)) if silent else {}
        codes |= _read_codes(record, silent)  # ended in between
        states = {host: _describe_host(codes.get(host), answers.get(host)) for host in hosts}
        detail = "; ".join(f"{host}: {state}" for host, state in states.items())
        if _RUNS in states.values():
            return JobStatus("running", detail)
        if not codes:
            is_unreached = any(isinstance(answer, LaunchError) for answer in answers.values())
            return JobStatus("unknown" if is_unreached else "failed", detail)
        # Hosts lost during the run left a failure or no code; those that stayed to the end agree.
        ending = next((code for code in (DONE, STOPPED) if code in codes.values()), max(codes.values()))
        return JobStatus(name_ending(ending), detail, ending)

    @override
    def logs(self, record: JobRecord, follow: bool) -> Iterator[str]:
        """Each line has its host's name as prefix."""
        hosts = record.place["hosts"].split(",")
        width = max(map(len, hosts))
        logs = {host: Log(record.folder / f"host-{host}.log") for host in hosts}
        is_over = rarely(lambda: self.status(record).state != "running", _ASK_SECONDS)
        while True:
            ended = not follow or all(_read_code(record, host) is not None for host in hosts) or is_over()
            for host, log in logs.items():
                yield from (f"{host:<{width}} | {line}" for line in log.read(ended))
            if ended:
                return
            time.sleep(_LOOK_SECONDS)

    @override
    def cancel(self, record: JobRecord) -> None:
        """All machines save as soon as one of them gets the signal."""
        hosts = record.place["hosts"].split(",")
        answers = on_each(hosts, lambda host: _ask(record, host, _STOP))
        if "asked" in answers.values():
            return
        for answer in answers.values():
            if isinstance(answer, LaunchError):
                raise answer
        raise LaunchError(f"{record.name} has ended already.")


def _read_codes(record: JobRecord, hosts: Sequence[str]) -> dict[str, int]:
    """The exit codes of the hosts that have left one."""
    return {host: code for host in hosts if (code := _read_code(record, host)) is not None}


def _describe_host(code: int | None, answer: str | LaunchError | None) -> str:
    """The state of a host: its exit code, or else its answer."""
    if code is not None:
        return f"exit code {code}"
    if isinstance(answer, LaunchError):
        return str(answer)
    return _RUNS if answer == "lives" else "lost"


def check_machines(launch: LaunchConfig) -> None:
    """Raise ConfigError unless the hosts can be named, and `launch.nodes` fits their number."""
    check_hosts(launch)
    count, (fewest, most) = len(launch.torchrun.hosts), launch.node_range
    if not fewest <= count <= most:
        raise ConfigError(
            f"launch.nodes={launch.nodes} does not fit the {count} hosts of launch.torchrun.hosts; use "
            f"launch.nodes={count}, or 1:{count} for a run that continues without lost hosts."
        )


def meeting_options(launch: LaunchConfig) -> tuple[str, ...]:
    """The options of `echelon train` by which the agents meet."""
    torchrun = launch.torchrun
    interface = () if torchrun.interface is None else ("--interface", torchrun.interface)
    return ("--nodes", str(launch.nodes), "--rendezvous", f"{torchrun.hosts[0]}:{torchrun.port}", *interface)


def agent_command(job: JobSpec) -> tuple[str, ...]:
    """The command of each machine: `echelon train` as the agent of that machine."""
    launch = job.recipe.launch
    return limit_command(launch, (*job.train_command(str(_folder(job) / "recipe.yaml")), *meeting_options(launch)))


def torchrun_command(job: JobSpec) -> tuple[str, ...]:
    """The same job under torchrun itself, which does its own restarts; see docs/elastic.md."""
    launch = job.recipe.launch
    torchrun = launch.torchrun
    nproc, nodes = str(launch.nproc_per_node), str(launch.nodes).partition("+")[0]
    conf = "last_call_timeout=10,keep_alive_interval=2,keep_alive_max_attempt=5"
    names = () if torchrun.interface is None else ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    interface = (f"{name}={torchrun.interface}" for name in names)
    return limit_command(launch, (
        "env", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1", *interface, launch.python, "-m", "torch.distributed.run",
        "--nnodes", nodes, "--nproc-per-node", nproc, "--max-restarts", str(job.recipe.fault.max_restarts),
        "--rdzv-backend", "c10d", "--rdzv-id", job.name, "--rdzv-endpoint", f"{torchrun.hosts[0]}:{torchrun.port}",
        "--rdzv-conf", conf, "-m", "echelon", "train", str(_folder(job) / "recipe.yaml"),
    ))  # fmt: skip


def _workdir(job: JobSpec) -> Path:
    """The path of the shared working directory on the hosts."""
    workdir = job.recipe.launch.torchrun.workdir
    return job.workdir if workdir is None else Path(workdir)


def _folder(job: JobSpec) -> Path:
    """The path of the job's folder on the hosts."""
    return _workdir(job) / job.folder


def _start_words(job: JobSpec, host: str) -> list[str]:
    return ["bash", str(_folder(job) / _AGENT), host]


def _find_asked(launch: LaunchConfig) -> dict[str, str]:
    """The variables about GPUs: as many as there are processes if the recipe names their type, else any of a host."""
    if (name := launch.accelerator) is None:
        return asked_environment(None, "launch.to=torchrun")
    count = launch.nproc_per_node if isinstance(launch.nproc_per_node, int) else 1
    return {} if name.lower() == "cpu" else asked_environment(count, f"launch.accelerator={name}")


def _render_agent(job: JobSpec) -> str:
    lines = (
        "#!/bin/bash",
        "# agent.sh HOST starts this host's agent in the background, in its own session, so that it outlives ssh.",
        f"files={shlex.quote(str(_folder(job)))}/host-$1",
        'if [ "$2" != here ]; then',
        '  setsid bash "$0" "$1" here < /dev/null > "$files.log" 2>&1 &',
        "  # Its process id is its process group's too, which exists, and handles signals, once the file does.",
        '  until [ -s "$files.pid" ] || ! kill -0 $! 2> /dev/null; do sleep 0.02; done',
        "  exit",
        "fi",
        *watched_lines(
            job.recipe.launch,
            _workdir(job),
            agent_command(job),
            '"$files.code"',
            ['echo $$ > "$files.pid"'],
            _find_asked(job.recipe.launch),
        ),
    )
    return "\n".join(lines) + "\n"


def _render_lines(job: JobSpec) -> str:
    launch = job.recipe.launch
    lines = (
        f"# To start the job without ssh, paste this on each of {', '.join(launch.torchrun.hosts)}. The recipe is",
        f"# in {job.folder} after the launch; any other copy that all hosts see works as well.",
        *prepare_lines(launch, _workdir(job), _find_asked(launch)),
        join_words(agent_command(job)),
        "",
        "# The same with torchrun, instead of the last line:",
        join_words(torchrun_command(job)),
    )
    return "\n".join(lines) + "\n"


def _ask(record: JobRecord, host: str, script: str) -> str:
    user = ("-l", record.place["user"]) if "user" in record.place else ()  # of earlier versions
    ssh = Ssh((*shlex.split(record.place["ssh_options"]), *user))
    return ssh.run(host, ["bash", "-c", script, record.place["folder"], host], seconds=30).strip()


def _read_code(record: JobRecord, host: str) -> int | None:
    return read_exit_code(record.folder / f"host-{host}.code")
