"""Parallel tokenization: the same tokens from any number of processes, and an error when one fails; child processes."""

import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
from tokenizers import Tokenizer

from echelon.ground.errors import DataError
from echelon.ground.progress import Progress
from echelon.learn.data.readers.record import Broken, SourceFile, Span, hash_for_split
from echelon.learn.data.source import Source, list_files
from echelon.learn.data.tokenize import Encoding, Piece, Task, WorkerDiedError, plan_tasks, tokenize_tasks
from echelon.learn.data.tokenizer import train_tokenizer

LINE = "größe" * 12 + ", 語\n"
BYTES = Encoding("", None, None, 256)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Files from a few bytes to more than one span, and one that is not text."""
    folder = tmp_path_factory.mktemp("text")
    for index, repeats in enumerate([1, 14_000, 0, 3000, 1, 10, 500]):
        (folder / f"{index}.txt").write_text(f"{index}\n" + LINE * repeats if repeats else "")
    (folder / "7.txt").write_bytes(b"\xff")
    (folder / "8.txt").write_bytes(b"x" * 2**21 + b"\xff")
    return folder


def tasks_of(folder: Path) -> list[Task]:
    return list(plan_tasks(0, list_files(Source("data.train[0]", str(folder)))))


def test_any_number_of_processes_gives_the_tokens_of_the_whole_documents(folder):
    inner: Tokenizer = train_tokenizer([LINE * 9], 290).backend_tokenizer
    encoding = Encoding("", inner.to_str(), 0, 290)
    tasks = tasks_of(folder)
    assert len(tasks) == 2
    results = [[result for _, result in tokenize_tasks(tasks, encoding, workers)] for workers in (1, 2)]
    expected = []
    texts = [(folder / f"{index}.txt").read_text() for index in (0, 1, 3, 4, 5, 6)]
    for text in texts:
        expected += [*inner.encode_batch_fast([text])[0].ids, 0]
    for result in results:
        found = [each for task in result for each in task.found]
        pieces = [each for each in found if isinstance(each, Piece)]
        assert np.concatenate([piece.tokens for piece in pieces]).tolist() == expected
        assert [piece.hash for piece in pieces if piece.is_first] == [hash_for_split(text.encode()) for text in texts]
        assert [each.file.name for each in found if isinstance(each, Broken)] == ["7.txt", "8.txt"]
        assert sum(each.num_bytes for each in result) == sum(path.stat().st_size for path in folder.iterdir())


def test_a_large_vocabulary_takes_four_bytes():
    assert next(tokenize_tasks([Task(0, ())], BYTES, 1))[1].found == []
    encoding = Encoding("", None, 65536, 65537)
    path = Path(__file__)
    file = list_files(Source("data.train[0]", str(path)))[0]
    ((_, result),) = tokenize_tasks([Task(0, (Span(file, 0, file.size, file.size, True),))], encoding, 1)
    (piece,) = result.found
    assert piece.tokens.dtype == np.uint32
    assert piece.tokens.tolist() == [*path.read_bytes(), 65536]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_file_that_cannot_be_read_is_named(tmp_path, workers):
    path = tmp_path / "gone.txt"
    path.write_text("text")
    tasks = tasks_of(tmp_path)
    path.unlink()
    with pytest.raises(DataError, match=r"gone\.txt cannot be read"):
        list(tokenize_tasks(tasks, BYTES, workers))


def test_an_unexpected_error_in_a_worker_names_the_file():
    broken = SourceFile(path="no-path.txt", name="", format="text", size=1, mtime_ns=0, required=True)  # type: ignore[arg-type]
    with pytest.raises(WorkerDiedError, match=r"died \(exit code 1\) at no-path\.txt"):
        list(tokenize_tasks([Task(0, (Span(broken, 0, 1, 1, True),))], BYTES, 2))


@pytest.mark.parametrize("num_before", [0, 1, 2, 4])
def test_a_worker_that_dies_is_reported_and_none_is_left(folder, num_before, started):
    def tasks_and_a_kill() -> Iterator[Task]:
        tasks = tasks_of(folder) * 5
        yield from tasks[:num_before]
        for child in started():
            child.kill()
        yield from tasks

    with pytest.raises(WorkerDiedError, match=r"a tokenizing process died \(exit code -9\) at .*\.txt"):
        list(tokenize_tasks(tasks_and_a_kill(), BYTES, 2))
    assert not started()


def test_closing_early_stops_the_workers(folder, started):
    results = tokenize_tasks(tasks_of(folder) * 5, BYTES, 2)
    next(results)
    assert len(started()) == 2
    results.close()
    assert not started()


def test_workers_do_not_outlive_a_killed_parent(folder, tmp_path):
    script = tmp_path / "parent.py"
    script.write_text(
        "import multiprocessing, os, signal, sys\n"
        "from tests_path import tasks\n"
        "from echelon.learn.data.tokenize import Encoding, tokenize_tasks\n"
        "if __name__ == '__main__':\n"
        "    results = tokenize_tasks(tasks(sys.argv[1]), Encoding('', None, None, 256), 2)\n"
        "    next(results)\n"
        "    print(*[child.pid for child in multiprocessing.active_children()], flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    (tmp_path / "tests_path.py").write_text(
        "from echelon.learn.data.source import Source, list_files\n"
        "from echelon.learn.data.tokenize import plan_tasks\n"
        "def tasks(folder):\n"
        "    files = list_files(Source('data.train[0]', folder))\n"
        "    return list(plan_tasks(0, files))\n"
    )
    parent = subprocess.run([sys.executable, script, folder], capture_output=True, text=True, timeout=60)
    children = [int(word) for word in parent.stdout.split()]
    assert len(children) == 2, parent.stderr
    alive = [psutil.Process(pid) for pid in children if psutil.pid_exists(pid)]
    assert not psutil.wait_procs(alive, timeout=10)[1]


def test_workers_need_neither_torch_nor_transformers():
    heavy = "('torch', 'transformers')"
    code = f"import sys, echelon.learn.data.tokenize; print([name for name in sys.modules if name in {heavy}])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_progress_shows_bytes_rate_and_time_left(caplog):
    now = iter([0.0, 1.0, 2.5, 3.0, 4.0, 5.0])
    progress = Progress("tokenizing", 100 * 2**20, logging.getLogger(), clock=lambda: next(now))
    for _ in range(4):
        progress.add(25 * 2**20)
    progress.finish()
    assert caplog.messages == [
        "tokenizing: 50.0 MiB of 100 MiB, 20.0 MiB/s, about 2s left",
        "tokenizing: 100 MiB of 100 MiB, 20.0 MiB/s, 5.00 s in total",
    ]


def test_progress_is_told_once_at_its_end(caplog):
    now = iter([0.0, 2.0, 4.0, 4.0])
    progress = Progress("tokenizing", 2 * 2**20, logging.getLogger(), clock=lambda: next(now))
    for _ in range(2):
        progress.add(2**20)
    progress.finish()
    assert caplog.messages == [
        "tokenizing: 1.00 MiB of 2.00 MiB, 512 KiB/s, about 2s left",
        "tokenizing: 2.00 MiB of 2.00 MiB, 512 KiB/s, 4.00 s in total",
    ]


WORK = """
def work(connection, number):
    connection.send(number + 1)
"""
SCRIPT = """
from echelon.learn.data.child_process import ChildProcess
from work import work

print("begins")
child = ChildProcess(work, 41)
print(child.connection.recv())
print(child.wait_for_exit())
"""


def test_a_script_needs_no_guard(tmp_path):
    """Python would run it again in the new process, which would wait for the first one or start another one."""
    (tmp_path / "work.py").write_text(WORK)
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.stdout.split() == ["begins", "42", "0"], done.stderr
