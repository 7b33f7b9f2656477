"""Everything that waits for a GPU, as numbered calls of nine minutes each: see benchmarks/README.md.

    benchmarks/gpu.sh CALL OUT_FOLDER [--wheels FOLDER] [--only PART ...] [--minutes 9] [--size tiny]

A call is a list of parts, each a program of its own. A part that fails, hangs or needs more time than is left does not
stop the others. OUT_FOLDER gets at most 8 files: summary.md, and what each part printed. The summary has each line as
soon as a part has printed it, so it is right whenever the call is killed.

This file and what it imports need only the standard library, because the first part may install the rest.
"""

import argparse
import contextlib
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "src"))
from echelon.ground.launch_environment import torch_environment  # noqa: E402

MAX_FILES = 8
MINUTES = 9.0
# From SIGINT, at which a program prints what it has, to SIGKILL; and the time kept for it at the end of a call.
GRACE_SECONDS = 20.0
# Lines of a part's output in the summary: all of a table, the end of anything else.
_TABLE_LINES, _OTHER_LINES = 200, 40

ECHELON = ("torch", "transformers", "pydantic", "yaml", "jinja2", "safetensors", "fsspec", "typer", "rich")
PYTEST = (*ECHELON, "pytest", "xdist", "psutil", "accelerate")
PEER = (*ECHELON, "accelerate")
FINETUNING = (*PEER, "peft", "bitsandbytes")


@dataclass(frozen=True)
class Part:
    """One program of a call: the arguments of Python.

    seconds: after so many of a call's nine minutes it is stopped; the last part of a call may use all that is left.
    least: with less time left it is not started. needs: the packages without which it is not started. A `{seconds}` in
    the command is replaced by the seconds that it has. tiny: the command of `--size tiny`, by default the same with
    that option. processes: how many it runs side by side, which share the cores when they compile.
    """

    name: str
    command: tuple[str, ...]
    seconds: float
    least: float
    needs: tuple[str, ...] = ()
    is_table: bool = True
    tiny: tuple[str, ...] | None = None
    processes: int = 1


@dataclass(frozen=True)
class Call:
    """A numbered call. `extras`: packages that some rows of its tables need, each row saying so itself.

    gpus: how many it needs; the first visible ones are used.
    """

    title: str
    parts: tuple[Part, ...]
    extras: tuple[str, ...] = ()
    gpus: int = 1


def _pytest(*arguments: str) -> tuple[str, ...]:
    return ("-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider", "--durations=10", *arguments)


def _workers(number: int) -> tuple[str, ...]:
    return ("-n", str(number), "--dist", "worksteal", "-vra")


_ALONE = ("tests/gpu/test_gpu_memory.py", "tests/gpu/test_gpu_host.py")
_ONE_EACH = ("tests/gpu/test_gpu_records.py", "tests/gpu/test_gpu_communicator.py")
_COMMAND = ("tests/gpu/test_gpu_cli.py",)
_ELSEWHERE = [f"--ignore={path}" for path in (*_ALONE, *_COMMAND)]
_PRETRAINING = ("benchmarks/pretraining.py", "--seconds", "{seconds}")
_FINETUNING = ("benchmarks/finetuning.py", "--pairs", "1", "--seconds", "{seconds}")
_TECHNIQUES = ("benchmarks/techniques.py",)
_OVERHEAD = ("benchmarks/overhead.py", "--precision", "bf16")

CALLS = {
    0: Call(
        "the figures that matter most, if there is only one call",
        (
            Part("figures", (*_PRETRAINING, "figures", "--rounds", "2"), 265, 100, PEER),
            Part("alone", _pytest(*_ALONE, *_ONE_EACH, "-rA"), 60, 30, PYTEST, False,
                 tiny=_pytest(*_ALONE, *_ONE_EACH, "-rA")),
            Part("sampling", ("benchmarks/rollouts.py", "--rounds", "2"), 40, 25, ECHELON),
            Part("adapters", (*_FINETUNING, "--blocks", "2", "--steps", "4", "lora-bf16", "qlora-bf16"), 60, 50,
                 FINETUNING),
            Part("nccl", ("benchmarks/nccl_on_one_gpu.py", "--seconds", "{seconds}"), 25, 20, ECHELON),
        ),
        ("bitsandbytes", "torchtitan"),
    ),
    1: Call(
        "the tests that need a GPU",
        (
            Part("tests", _pytest("tests/gpu", *_ELSEWHERE, *_workers(8)), 300, 60, PYTEST, False,
                 tiny=_pytest("tests/gpu", *_ELSEWHERE, *_workers(2), "--on-cpu"), processes=8),
            Part("memory-and-host", _pytest(*_ALONE, "-rA"), 150, 30, PYTEST, False, tiny=_pytest(*_ALONE, "-rA")),
        ),
        ("bitsandbytes", "liger_kernel"),
    ),
    2: Call(
        "pretraining: 1.3 billion parameters at 2,048 tokens",
        (
            Part("peers", (*_PRETRAINING, "peers"), 270, 100, PEER),
            Part("variants", (*_PRETRAINING, "variants"), 180, 60, ECHELON),
        ),
        ("torchtitan",),
    ),
    3: Call(
        "fine-tuning: LoRA and QLoRA of 0.9 and of 8 billion parameters",
        (
            Part("small", (*_FINETUNING, "--blocks", "4", "--steps", "6", "lora-bf16", "qlora-bf16",
                           "lora-bf16-examples", "lora-bf16-liger", "lora-bf16-unsloth"), 180, 60, FINETUNING),
            Part("large", (*_FINETUNING, "--blocks", "4", "--steps", "3", "qlora-8b", "lora-8b", "qlora-8b-liger",
                           "lora-8b-liger", "qlora-8b-unsloth", "lora-8b-unsloth"), 270, 120, FINETUNING),
        ),
        ("liger_kernel", "unsloth"),
    ),
    4: Call(
        "float8, long sequences, packed documents",
        (
            Part("float8", (*_PRETRAINING, "float8"), 150, 60, ECHELON),
            Part("long", (*_PRETRAINING, "long"), 150, 60, ECHELON),
            Part("packed", (*_PRETRAINING, "packed"), 150, 60, ECHELON),
        ),
        ("torchao",),
    ),
    5: Call(
        "what each technique saves and costs",
        (
            Part("techniques", (*_TECHNIQUES, "--seconds", "{seconds}"), 450, 120, ECHELON,
                 tiny=(*_TECHNIQUES, "--seconds", "{seconds}", "--rounds", "1", "--size", "tiny")),
        ),
    ),
    6: Call(
        "whole runs of the command, and the trainer's own time",
        (
            Part("command", _pytest(*_COMMAND, "-rA"), 270, 120, PYTEST, False,
                 tiny=_pytest(*_COMMAND, "-rA", "--on-cpu")),
            Part("overhead", (*_OVERHEAD, "--size", "small", "--compile", "--rounds", "5", "--steps", "20"), 180, 60,
                 ECHELON, False, tiny=(*_OVERHEAD, "--size", "tiny", "--rounds", "1", "--steps", "2")),
        ),
    ),
    7: Call(
        "on two GPUs: a lost process of a quorum, and one that is replaced",
        (Part("losses", ("benchmarks/lost_gpus.py", "--seconds", "{seconds}"), 440, 120, ECHELON),),
        gpus=2,
    ),
    8: Call(
        "one GPU in the place of many: a rank among ghosts, and ranks that share it, perturbed",
        (
            Part("ghosts", ("benchmarks/ghosts.py", "--seconds", "{seconds}"), 300, 100, PEER),
            Part("perturbed", ("benchmarks/nccl_on_one_gpu.py", "--perturb", "1", "--seconds", "{seconds}"), 150, 60,
                 ECHELON),
        ),
        ("torchtitan", "torchao"),
    ),
}  # fmt: skip
PREFLIGHT_SECONDS, INSTALL_SECONDS = 45.0, 25.0


@dataclass
class Result:
    """How a part ended."""

    name: str
    outcome: str
    seconds: float = 0.0
    printed: Sequence[str] = ()
    is_table: bool = True
    is_good: bool = True


@dataclass
class Runner:
    """Runs parts one after the other until the deadline, and keeps the summary up to date."""

    out: Path
    heading: str
    minutes: float = MINUTES
    is_tiny: bool = False
    environment: dict[str, str] = field(default_factory=lambda: dict(os.environ))
    results: list[Result] = field(default_factory=list)
    missing: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        self._started = time.monotonic()
        self._writing = threading.Lock()

    @property
    def seconds_left(self) -> float:
        """The seconds until the deadline, without those that stopping a part may take."""
        return self._started + 60 * self.minutes - time.monotonic() - GRACE_SECONDS

    def run(self, part: Part, is_last: bool = False) -> Result:
        """Run a part, or say why not."""
        left, absent = self.seconds_left, [name for name in part.needs if name in self.missing]
        if absent:
            result = Result(part.name, f"skipped: needs {', '.join(absent)}, see preflight", is_good=False)
        elif left < part.least:
            result = Result(part.name, f"skipped: needs {part.least:.0f} s, {max(left, 0):.0f} s left", is_good=False)
        else:
            print(f"== {part.name}", flush=True)
            result = self._run(part, left if is_last else min(part.seconds * self.minutes / MINUTES, left))
        print(f"{part.name}: {result.outcome}", flush=True)
        self.results.append(result)
        self.write_summary()
        return result

    def _run(self, part: Part, limit: float) -> Result:
        command = part.command
        if self.is_tiny:
            command = part.tiny or (*command, "--size", "tiny")
        command = tuple(word.replace("{seconds}", f"{limit - GRACE_SECONDS:.0f}") for word in command)
        started = time.monotonic()
        with (self.out / f"{part.name}.log").open("wb", buffering=0) as log:
            program = subprocess.Popen(
                [sys.executable, *command], cwd=ROOT, env=self.environment | torch_environment(part.processes),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE, stderr=log, process_group=0,
            )  # fmt: skip
            printed: list[str] = []

            def show() -> None:
                seconds = time.monotonic() - started
                self.write_summary(Result(part.name, "running", seconds, tuple(printed), part.is_table))

            show()
            reader = threading.Thread(target=_copy_lines, args=(program.stdout, log, printed, show), daemon=True)
            reader.start()
            try:
                outcome = _wait(program, limit)
            finally:
                _kill(program)
                reader.join(5)
        seconds = time.monotonic() - started
        return Result(part.name, outcome, seconds, tuple(printed), part.is_table, outcome == "done")

    def write_summary(self, *running: Result) -> None:
        """Write summary.md at once: a table of the parts, then what each of them has printed."""
        with self._writing:
            results = [*self.results, *running]
            lines = [f"# {self.heading}", "", "| part | result | seconds |", "|---|---|---|"]
            lines += [f"| {each.name} | {each.outcome} | {each.seconds:.0f} |" for each in results]
            for each in results:
                if each.printed:
                    lines += ["", f"## {each.name}", "", *_excerpt(each)]
            written = self.out / "summary.md.new"
            written.write_text("\n".join(lines) + "\n", encoding="utf-8")
            written.replace(self.out / "summary.md")


def _copy_lines(stream: Iterator[bytes], log: "object", printed: list[str], show: Callable[[], None]) -> None:
    """Copy what a program prints to its log and to a list of lines; `show` is called after each."""
    for line in stream:
        log.write(line)
        printed.append(line.decode(errors="replace").rstrip())
        show()


def _wait(program: subprocess.Popen, limit: float) -> str:
    """Wait for a program; at its time limit interrupt it and its processes, as Ctrl-C does. Returns how it ended."""
    try:
        code = program.wait(limit)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(program.pid, signal.SIGINT)
        try:
            program.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            return f"killed: did not end {GRACE_SECONDS:.0f} s after its limit of {limit:.0f} s"
        return f"stopped at its limit of {limit:.0f} s"
    return "done" if code == 0 else f"failed: exit code {code}"


def _kill(program: subprocess.Popen) -> None:
    """Kill what is left of a program and the processes that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(program.pid, signal.SIGKILL)
    program.wait()


def _excerpt(result: Result) -> list[str]:
    """What the summary shows of a part's output."""
    if result.is_table:
        return list(result.printed[:_TABLE_LINES])
    return ["```text", *result.printed[-_OTHER_LINES:], "```"]


def run_call(runner: Runner, call: Call, wheels: Path | None, only: Sequence[str], scratch: Path) -> bool:
    """Install the wheels, look what is there, and run the parts; returns whether each of them was done."""
    if wheels is not None:
        files = sorted(map(str, wheels.resolve().glob("*.whl")))
        site = scratch / "site"
        options = ("--quiet", "--no-index", "--no-deps", "--no-compile", "--no-cache-dir", "--upgrade")
        command = ("-m", "pip", "install", *options, "--target", str(site), *files)
        runner.run(Part("wheels", command, INSTALL_SECONDS, 10, is_table=False, tiny=command))
        runner.environment["PYTHONPATH"] = os.pathsep.join([str(site), runner.environment["PYTHONPATH"]])
    chosen = [part for part in call.parts if not only or part.name in only]
    packages = list(dict.fromkeys([*(name for part in chosen for name in part.needs), *call.extras]))
    report = scratch / "missing.json"
    command = ("benchmarks/preflight.py", *packages, "--json", str(report))
    runner.run(Part("preflight", command, PREFLIGHT_SECONDS, 20, tiny=command))
    if report.exists():
        runner.missing = frozenset(json.loads(report.read_text()))
    for part in chosen:
        runner.run(part, is_last=part is chosen[-1])
    return all(result.is_good for result in runner.results)


def describe_source(root: Path = ROOT) -> str:
    """The commit of this checkout: $ECHELON_COMMIT, or the file COMMIT of a copy without git, or what git says."""
    said = os.environ.get("ECHELON_COMMIT", "").strip()
    if not said and (root / "COMMIT").is_file():
        said = (root / "COMMIT").read_text(encoding="utf-8").strip()
    # A copy may lie in a checkout of something else.
    if not said and _ask_git(root, "rev-parse", "--show-toplevel") == str(root.resolve()):
        said = _ask_git(root, "describe", "--always", "--dirty")
    return f"commit {said}" if said else "no commit known"


def _ask_git(root: Path, *asked: str) -> str:
    """What git prints about a folder; nothing if there is no git, or no repository."""
    try:
        return subprocess.run(
            ["git", "-C", str(root), *asked], capture_output=True, text=True, check=False
        ).stdout.strip()
    except OSError:
        return ""


def build_environment(gpus: int = 1) -> dict[str, str]:
    """The variables of every part: those that `echelon train` gives to its workers, and those of a call.

    Compiled kernels stay in torch's own folder: on a machine that is still warm, the next call finds them.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(gpus)))).split(",")
    path = [str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | torch_environment(1) | {
        "PYTHONPATH": os.pathsep.join(path), "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1",
        # On several GPUs HF Trainer would use DataParallel.
        "CUDA_VISIBLE_DEVICES": ",".join(visible[:gpus]),
    }  # fmt: skip


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="benchmarks/gpu.sh",
        description="Runs one numbered call on a machine with a GPU, and writes a summary.",
        epilog="; ".join(f"{number}: {call.title}" for number, call in CALLS.items()),
    )
    parser.add_argument("call", type=int, choices=CALLS)
    parser.add_argument("out", type=Path, metavar="OUT_FOLDER")
    parser.add_argument("--wheels", type=Path, help="folder of the wheels of packages that are missing on this machine")
    parser.add_argument("--only", nargs="+", metavar="PART", default=[], help="only these parts")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="the time of the whole call (default 9)")
    parser.add_argument("--size", choices=["full", "tiny"], default="full", help="tiny: a test on a CPU")
    arguments = parser.parse_args()
    names = [part.name for part in CALLS[arguments.call].parts]
    if unknown := [name for name in arguments.only if name not in names]:
        parser.error(f"--only {' '.join(unknown)}: call {arguments.call} has the parts {', '.join(names)}")
    if arguments.wheels is not None and not any(arguments.wheels.glob("*.whl")):
        parser.error(f"--wheels {arguments.wheels}: there are no wheels")
    return arguments


def main() -> None:
    arguments = parse_arguments()
    call = CALLS[arguments.call]
    arguments.out.mkdir(parents=True, exist_ok=True)
    for number in (signal.SIGTERM, signal.SIGINT):  # the limit of a whole session: end the running part
        signal.signal(number, signal.default_int_handler)  # also where SIGINT was ignored, which parts would inherit
    with tempfile.TemporaryDirectory() as folder:
        words = f"{time.strftime('%Y-%m-%d %H:%M UTC', time.gmtime())}, {describe_source()}"
        heading = f"GPU call {arguments.call}: {call.title} ({words}, Python {platform.python_version()})"
        environment = build_environment(call.gpus)
        runner = Runner(arguments.out.resolve(), heading, arguments.minutes, arguments.size == "tiny", environment)
        is_whole = run_call(runner, call, arguments.wheels, arguments.only, Path(folder))
    print((arguments.out / "summary.md").read_text(encoding="utf-8"))
    sys.exit(not is_whole)


if __name__ == "__main__":
    main()
