"""`make check`: runs suites of tests in parts, some at a time, remembers each result, and prints a table.

A restart runs what has not yet passed with the same source. The results are in `.check/results.jsonl`, a line for each
test that began and another when it ended; the output of each part is in `.check/logs`. This module is also the pytest
plugin that writes those lines: a kill loses only the tests that were running.
"""

import argparse
import hashlib
import json
import os
import queue
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# What pytest runs, as in the make target of the same name.
SUITES = {
    "test": "",
    "faults": 'tests/faults -m "slow or not slow"',
    "launchers": "tests/launchers -m slow",
    "slow": "tests/benchmarks tests/dist tests/docs tests/peer tests/unit -m slow",
    "fuzz": "tests/fuzz -m slow --show-capture=no",
    "parity": 'tests/parity -m "not gpu"',
}
LINT = (
    "ruff check src tests",
    "ruff format --check src tests",
    "mypy",
    "zizmor --offline --no-progress --strict-collection .github",
    "hadolint docker/cpu.Dockerfile docker/cuda.Dockerfile docker/aws.Dockerfile",
)
MOST_TESTS = 40  # of a part
BAD = ("failed", "broken")


class Results:
    """The lines of a file, by test. Several processes append to it."""

    def __init__(self, path: Path, source: str):
        self.path, self.source = path, source

    def add(self, test: str, outcome: str, seconds: float = 0.0, note: str = "") -> None:
        """`outcome`: began, passed, skipped, failed, or broken: it did not end by itself."""
        line = {"source": self.source, "test": test, "outcome": outcome, "seconds": round(seconds, 2), "note": note}
        with self.path.open("a", encoding="utf-8") as out:
            out.write(json.dumps(line) + "\n")

    def read(self, start: int = 0, every_source: bool = False) -> dict[str, dict]:
        """The last line of each test, from the byte `start`. `every_source`: a test that passed with another, too."""
        newest: dict[str, dict] = {}
        if self.path.exists():
            for text in self.path.read_bytes()[start:].decode().splitlines():
                line = json.loads(text)
                if line["source"] == self.source or (every_source and line["outcome"] == "passed"):
                    newest[line["test"]] = line
        return newest


class Recorder:
    """The pytest plugin: writes how each test ends, and stops when the process that started it is gone."""

    def __init__(self, results: Results):
        self.results, self.parent = results, os.getppid()
        self.reports: list[pytest.TestReport] = []

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        if os.getppid() != self.parent:
            pytest.exit("make check has ended", returncode=2)
        self.reports = []
        self.results.add(nodeid, "began")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.reports.append(report)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        worst = min(self.reports, key=lambda report: ("failed", "skipped", "passed").index(report.outcome))
        crash = getattr(worst.longrepr, "reprcrash", None)
        note = crash.message if crash else worst.longrepr[2] if worst.skipped else worst.longreprtext
        seconds = sum(report.duration for report in self.reports)
        self.results.add(nodeid, worst.outcome, seconds, note.strip().partition("\n")[0][:300])


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--results", nargs=2, metavar=("FILE", "SOURCE"), help="append the result of each test to FILE")


def pytest_configure(config: pytest.Config) -> None:
    path, source = config.getoption("--results")
    config.pluginmanager.register(Recorder(Results(Path(path), source)))


@dataclass(frozen=True)
class Part:
    """Tests of one file, or one command of `make lint`."""

    name: str
    tests: tuple[str, ...]


@dataclass
class Check:
    """Runs the suites of `tests`, a list for each; `argv` starts pytest."""

    folder: Path
    results: Results
    tests: dict[str, list[str]]
    argv: list[str]
    keep: bool = False
    workers: int = 2
    running: set[subprocess.Popen] = field(default_factory=set)

    def run(self) -> int:
        """Run what has not passed; print the table. Return the exit status: 0 if every test passed or was skipped."""
        parts: queue.SimpleQueue[Part] = queue.SimpleQueue()
        for part in self.parts():
            parts.put(part)
        workers = [threading.Thread(target=self.work, args=(parts,)) for _ in range(self.workers)]
        try:
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()
        except KeyboardInterrupt:
            while not parts.empty():
                parts.get()
            for process in list(self.running):
                process.send_signal(signal.SIGINT)
        return self.print_table()

    def parts(self) -> Iterator[Part]:
        """In the order of the suites; a test that two suites have is run once."""
        done = {test for test, line in self.results.read(0, self.keep).items() if line["outcome"] == "passed"}
        left = list(dict.fromkeys(test for tests in self.tests.values() for test in tests if test not in done))
        for name, group in groupby(left, key=lambda test: test.partition("::")[0]):
            of_file = tuple(group)
            for start in range(0, len(of_file), MOST_TESTS):
                yield Part(name, of_file[start : start + MOST_TESTS])

    def work(self, parts: "queue.SimpleQueue[Part]") -> None:
        while True:
            try:
                part = parts.get_nowait()
            except queue.Empty:
                return
            started, begin = time.monotonic(), self.results.path.stat().st_size
            log = self.folder / "logs" / f"{Path(part.name).stem.replace(' ', '-')}-{begin}.log"
            if part.name in LINT:
                passed = self.start(shlex.split(part.name), log) == 0
                self.results.add(part.name, "passed" if passed else "failed", time.monotonic() - started)
            else:
                self.run_tests(part, log)
            lines = self.results.read(begin)
            counts = Counter(lines[test]["outcome"] for test in part.tests if test in lines)
            counted = ", ".join(f"{number} {outcome}" for outcome, number in counts.items())
            seen = f"; {log}" if counts.keys() & set(BAD) else ""
            took = time.monotonic() - started
            print(f"{time.strftime('%H:%M:%S')}  {part.name}: {counted} in {took:.0f} s{seen}", flush=True)

    def run_tests(self, part: Part, log: Path) -> None:
        """Run pytest, and again without the test in which it died."""
        left = part.tests
        while left:
            begin = self.results.path.stat().st_size
            status = self.start([*self.argv, *left], log)
            if status in (2, -signal.SIGINT):
                return  # interrupted
            lines = self.results.read(begin)
            if not lines.keys() & set(left):
                for test in left:
                    self.results.add(test, "broken", note=f"pytest ended with status {status} before the test")
                return
            for test in left:
                if lines.get(test, {}).get("outcome") == "began":
                    self.results.add(test, "broken", note=f"pytest ended with status {status} in the test")
            left = tuple(test for test in left if test not in lines)

    def start(self, argv: list[str], log: Path) -> int:
        """Run a command in a process group of its own, of which nothing is left; return its exit status."""
        with log.open("ab") as out:
            process = subprocess.Popen(argv, stdout=out, stderr=subprocess.STDOUT, cwd=ROOT, start_new_session=True)
            self.running.add(process)
            process.wait()
            self.running.remove(process)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        return process.returncode

    def print_table(self) -> int:
        lines = self.results.read(0, self.keep)
        form = "{:<10} {:>6} {:>7} {:>7} {:>7} {:>8} {:>8}"
        print("\n" + form.format("suite", "tests", "passed", "failed", "skipped", "not run", "minutes"))
        for suite, tests in self.tests.items():
            ran = [lines[test] for test in tests if test in lines]
            counts = Counter(line["outcome"] for line in ran)
            failed, ended = counts["failed"] + counts["broken"], len(ran) - counts["began"]
            minutes = sum(line["seconds"] for line in ran) / 60
            row = (len(tests), counts["passed"], failed, counts["skipped"], len(tests) - ended, f"{minutes:.1f}")
            print(form.format(suite, *row))
        all_ran = {test: lines[test] for tests in self.tests.values() for test in tests if test in lines}
        for reason, number in Counter(
            line["note"] for line in all_ran.values() if line["outcome"] == "skipped"
        ).items():
            print(f"{number} skipped: {reason.removeprefix('Skipped: ')}")
        bad = {test: line for test, line in all_ran.items() if line["outcome"] in BAD}
        for test, line in bad.items():
            print(f"{line['outcome']}: {test}: {line['note']}")
        old = sum(line["source"] != self.results.source for line in all_ran.values())
        if old:
            print(f"{old} of the results are those of an earlier source")
        ended = sum(line["outcome"] != "began" for line in all_ran.values())
        return 0 if not bad and ended == len({test for tests in self.tests.values() for test in tests}) else 1


def digest_source(root: Path) -> str:
    """Of all files by which a test may pass or fail; reports and tables that tests write are left out."""
    digest = hashlib.sha256(sys.version.encode())
    for folder in ("src", "tests", "benchmarks", "recipes", "docs"):
        for path in sorted((root / folder).rglob("*.*")):
            written = "results" in path.parts or "__pycache__" in path.parts or "egg-info" in str(path)
            if path.is_file() and not written:
                digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def collect(arguments: str) -> list[str]:
    """The tests that pytest would run. Raises SystemExit if it cannot collect them."""
    argv = [sys.executable, "-m", "pytest", "--collect-only", *shlex.split(arguments)]
    run = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True)
    if run.returncode != 0:
        sys.exit(run.stdout + run.stderr)
    return [line for line in run.stdout.splitlines() if "::" in line]


def main(arguments: Iterable[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.check", description=__doc__.partition("\n")[0])
    parser.add_argument("suites", nargs="*", help=f"of lint, {', '.join(SUITES)}; by default all")
    parser.add_argument("--keep", action="store_true", help="count what has passed with another source")
    parser.add_argument("--table", action="store_true", help="run nothing; print the table of what has been run")
    parser.add_argument("--workers", type=int, default=2, metavar="N", help="run N tests at a time; by default 2")
    parser.add_argument("--folder", type=Path, default=ROOT / ".check", help="where the results are")
    parser.add_argument("--limit", type=int, default=1800, metavar="SECONDS", help="of one test")
    options = parser.parse_args(arguments if arguments is None else list(arguments))
    suites = options.suites or ["lint", *SUITES]
    if unknown := set(suites) - {"lint", *SUITES}:
        parser.error(f"unknown suite {', '.join(sorted(unknown))}; use lint, {', '.join(SUITES)}")
    (options.folder / "logs").mkdir(parents=True, exist_ok=True)
    results = Results(options.folder.absolute() / "results.jsonl", digest_source(ROOT))
    results.path.touch()
    bin_folder = Path(sys.executable).parent
    os.environ["PATH"] = f"{bin_folder}{os.pathsep}{os.environ['PATH']}"
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    print(f"source {results.source}, results in {options.folder}", flush=True)
    tests = {suite: list(LINT) if suite == "lint" else collect(SUITES[suite]) for suite in suites}
    limit = ["-o", f"faulthandler_timeout={options.limit}", "-o", "faulthandler_exit_on_timeout=true"]
    argv = [sys.executable, "-m", "pytest", "-p", "tests.check", "--results", str(results.path), results.source, *limit]
    argv += ["-m", ""]
    check = Check(options.folder, results, tests, argv, options.keep, options.workers)
    return check.print_table() if options.table else check.run()


if __name__ == "__main__":
    sys.exit(main())
