"""A drill on several machines: their agents are started over ssh, and processes, machines and links are lost."""

import shlex
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO

from typing_extensions import override

from echelon.ground.errors import ConfigError, LaunchError
from echelon.launch.shell import join_words, prepare_lines
from echelon.launch.ssh_launcher import Ssh, check_hosts, check_machines, find_ssh, meeting_options, on_each
from echelon.recipe.launch_sections import LaunchConfig
from echelon.run.supervise.outcome import DONE, FAILED, STOPPED
from echelon.tools.drill.faults import InjectedFault
from echelon.tools.drill.trial import Process, RunningCommand, Trial

# Longer than a machine may be silent before the others count it as lost.
_CUT_SECONDS, _SLOW_SECONDS = 30, 10
_LOOK_SECONDS = 0.05
# A queue drops packets that are larger than its burst.
_SHAPES = {"cut": "tbf rate 1kbit burst 16 latency 1ms", "slow": "tbf rate 1mbit burst 32kbit latency 400ms"}
# Replaces the queue of the interface to another host ($0) by one of a shape ($1), and removes it after $2 seconds.
_SHAPE = """
as=; [ "$(id -u)" = 0 ] || as="sudo -n"
device=$(ip -o route get "$(getent ahostsv4 "$0" | head -n 1 | cut -d ' ' -f 1)" | sed 's/.* dev \\([^ ]*\\).*/\\1/')
queue="dev $device root"
$as tc qdisc replace $queue tbf rate 1gbit burst 1mbit latency 1ms && $as tc qdisc del $queue || exit 1
setsid sh -c "sleep 0.5; $as tc qdisc replace $queue $1; sleep $2; $as tc qdisc del $queue" \\
    > /dev/null 2>&1 < /dev/null &
"""


@dataclass(frozen=True)
class Crew:
    """The machines of a drill, of which the first is the rendezvous; all share the working directory.

    `num_processes`: on each.
    """

    launch: LaunchConfig
    num_processes: int

    @staticmethod
    def of(launch: LaunchConfig, num_processes: int) -> "Crew":
        """The machines of `launch.torchrun.hosts`. Raises ConfigError unless there are two that can be named."""
        check_hosts(launch)
        hosts = launch.torchrun.hosts
        if len(hosts) < 2:
            raise ConfigError(f"--hosts {hosts[0]} is one machine; run `echelon drill` there, or give two hosts.")
        if launch.node_range[1] == 1:  # the default
            launch = launch.model_copy(update={"nodes": len(hosts)})
        check_machines(launch)
        return Crew(launch, num_processes)

    @property
    def hosts(self) -> tuple[str, ...]:
        """Their names."""
        return self.launch.torchrun.hosts

    @property
    def ssh(self) -> Ssh:
        """How they are reached."""
        return find_ssh(self.launch)

    @property
    def workdir(self) -> Path:
        """The working directory on each."""
        workdir = self.launch.torchrun.workdir
        return Path.cwd() if workdir is None else Path(workdir)

    @property
    def num_training(self) -> int:
        """The processes that train at first."""
        return self.num_processes * self.launch.max_training

    @property
    def may_shrink(self) -> bool:
        """Whether a job goes on with fewer machines."""
        return self.launch.node_range[0] < self.launch.max_training

    def agent_words(self, command: Sequence[str], note: Path) -> list[str]:
        """What starts the agent of a machine, which notes its process id. `command`: the words after `echelon`."""
        train = join_words((self.launch.python, "-m", "echelon", *command, *meeting_options(self.launch)))
        lines = (*prepare_lines(self.launch, self.workdir), f"echo $$ > {shlex.quote(str(note))}", f"exec {train}")
        return ["bash", "-c", "\n".join(lines)]

    def check_links(self) -> None:
        """Raise ConfigError unless links can be cut: it takes root, or sudo without a password, and tc."""
        answers = on_each(self.hosts[-1:], lambda host: self.shape(host, "slow", 0))
        for host, answer in answers.items():
            if isinstance(answer, LaunchError):
                raise ConfigError(f"--links: {host} cannot change its network queue ({answer}); leave --links out.")

    def shape(self, host: str, shape: str, seconds: int) -> None:
        """Cut off or slow down what a machine sends, for so long."""
        self.ssh.run(host, ["bash", "-c", _SHAPE, self.hosts[0], _SHAPES[shape], str(seconds)])


class Agents:
    """The ssh commands of all agents, with the part of a Popen that a drill uses."""

    def __init__(self, processes: "Sequence[subprocess.Popen[bytes]]") -> None:
        self._processes = processes

    def poll(self) -> int | None:
        """The exit code of the job, once all agents have ended: those that stay to the end agree."""
        codes = [process.poll() for process in self._processes]
        if None in codes:
            return None
        return next((code for code in (DONE, STOPPED) if code in codes), FAILED)

    def wait(self) -> int:
        """Wait for the end."""
        while (code := self.poll()) is None:
            time.sleep(_LOOK_SECONDS)
        return code

    def kill(self) -> None:
        """Kill the ssh commands; the agents are killed by `CrewTrial`."""
        for process in self._processes:
            process.kill()

    def send_signal(self, number: int) -> None:
        """Send a signal to the ssh commands."""
        for process in self._processes:
            process.send_signal(number)


@dataclass(frozen=True)
class CrewTrial(Trial):
    """A run of a drill on several machines."""

    crew: Crew = field(kw_only=True)

    @override
    def start(self, log: IO[bytes]) -> Agents:
        return Agents(
            [
                subprocess.Popen(
                    self.crew.ssh.command(host, self.crew.agent_words(self.command, self._note(host))),
                    stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                )
                for host in self.crew.hosts
            ]
        )  # fmt: skip

    @override
    def end(self, process: Process) -> None:
        if process.poll() is None:
            on_each(self.crew.hosts, self.kill_all)
        process.kill()
        process.wait()

    def kill_all(self, host: str) -> None:
        """Kill all processes of this run on a machine, as a loss of its power does."""
        self._kill(host, "$(tree $agent)")

    def kill_agent(self, host: str) -> None:
        """Kill its agent."""
        self._kill(host, "$agent")

    def kill_rank(self, host: str) -> None:
        """Kill one of its ranks: the process that its agent has started last."""
        self._kill(host, "$(pgrep -n -P $agent)")

    def _note(self, host: str) -> Path:
        """The file with the process id of an agent."""
        return self.run.path.with_name(f"{self.run.path.name}-{host}.pid")

    def _kill(self, host: str, which: str) -> None:
        """Kill processes of this run: those that these words of the shell name, which know $agent and a tree of it."""
        lines = (
            f"cd {shlex.quote(str(self.crew.workdir))}",
            f"agent=$(cat {shlex.quote(str(self._note(host)))})",
            'tree() { echo "$1"; for child in $(pgrep -P "$1"); do tree "$child"; done; }',
            f"kill -KILL {which}",
        )
        with suppress(LaunchError):  # they have ended by themselves
            self.crew.ssh.run(host, ["bash", "-c", "\n".join(lines)])


def _on(act: Callable[[CrewTrial, str], None], number: int, job: RunningCommand) -> None:
    trial = job.trial
    assert isinstance(trial, CrewTrial)
    act(trial, trial.crew.hosts[number])


def _shape(shape: str, seconds: int, trial: CrewTrial, host: str) -> None:
    trial.crew.shape(host, shape, seconds)


MACHINE_FAULTS = (
    InjectedFault("a rank killed", partial(_on, CrewTrial.kill_rank, -1), loses_rank=True),
    InjectedFault("an agent killed", partial(_on, CrewTrial.kill_agent, -1), loses_rank=True, loses_machine=True),
    InjectedFault("a machine lost", partial(_on, CrewTrial.kill_all, -1), loses_rank=True, loses_machine=True),
    InjectedFault("the first machine lost", partial(_on, CrewTrial.kill_all, 0), loses_rank=True, loses_machine=True),
)
"""Each on the last machine, or the first one, which is the rendezvous."""

LINK_FAULTS = (
    InjectedFault(
        f"a link cut for {_CUT_SECONDS} s", partial(_on, partial(_shape, "cut", _CUT_SECONDS), -1), loses_rank=True,
        loses_machine=True, idle_seconds=_CUT_SECONDS,
    ),
    InjectedFault(
        "a slow link", partial(_on, partial(_shape, "slow", _SLOW_SECONDS), -1), starts=1, idle_seconds=_SLOW_SECONDS,
    ),
)  # fmt: skip
