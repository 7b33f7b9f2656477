"""A large corpus: the memory needed to prepare it, and the waits for data when it is read from a cold disk.

The script writes a .jsonl of the given size from the source of the standard library, and prepares it with
`benchmarks/stdlib.yaml` while it measures the memory of every process. It then removes the shards from the page cache,
trains the recipe's model for some steps, and prints how long the steps waited for data. All files are deleted at the
end.
"""

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[1]
RECIPE = ROOT / "benchmarks" / "stdlib.yaml"


def read_library() -> list[str]:
    """The modules of the running Python, including tests, if they are UTF-8."""
    texts = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")):
        if "site-packages" not in path.parts:
            try:
                texts.append(path.read_text(encoding="utf-8"))
            except UnicodeDecodeError:
                continue
    return [text for text in texts if len(text) > 200]


def make_documents(seed: int = 0) -> Iterator[str]:
    """Generate documents of 200 to 60,000 characters without end: parts of modules with a unique first line."""
    texts, rng = read_library(), random.Random(seed)
    number = 0
    while True:
        text = rng.choice(texts)
        length = int(min(60_000, 200 * 2 ** rng.uniform(0, 8.2)))
        start = rng.randrange(max(1, len(text) - length))
        yield f"# document {number}\n{text[start : start + length]}"
        number += 1


def write_corpus(path: Path, num_bytes: int) -> int:
    """Write documents as .jsonl up to this number of bytes; return the number of documents."""
    written = count = 0
    with path.open("w", encoding="utf-8") as stream:
        for count, text in enumerate(make_documents(), 1):
            written += stream.write(json.dumps({"id": count, "text": text}) + "\n")
            if written >= num_bytes:
                break
    return count


def run_measured(command: list[str]) -> tuple[float, dict[str, int]]:
    """Run a command; return its seconds, and the peak resident bytes of the parent, the largest child, and all."""
    peaks = {"parent": 0, "largest worker": 0, "all together": 0}
    started = time.monotonic()
    process = psutil.Popen(command, cwd=ROOT)
    while process.poll() is None:
        try:
            parent = process.memory_info().rss
            children = [child.memory_info().rss for child in process.children(recursive=True)]
        except psutil.NoSuchProcess:
            continue
        for name, value in zip(peaks, (parent, max(children, default=0), parent + sum(children)), strict=True):
            peaks[name] = max(peaks[name], value)
        time.sleep(0.1)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
    return time.monotonic() - started, peaks


def drop_from_cache(folder: Path) -> str:
    """Remove the files of a folder from the page cache; return how."""
    os.sync()
    for path in folder.rglob("*.bin"):
        with path.open("rb") as stream:
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    try:
        Path("/proc/sys/vm/drop_caches").write_text("1\n")
    except OSError:
        return "posix_fadvise(DONTNEED) on every shard"
    return "posix_fadvise(DONTNEED) on every shard, and drop_caches"


def report_waits(metrics: Path) -> None:
    """Print the share of each step spent waiting for data."""
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    rows = [row for row in rows if row["kind"] == "train"]
    shares = [row["data_wait_seconds"] / row["step_seconds"] for row in rows]
    seconds = statistics.median(row["step_seconds"] for row in rows)
    print(f"| steps, median seconds | {len(rows)}, {seconds:.3f} |")
    total = sum(row["data_wait_seconds"] for row in rows) / sum(row["step_seconds"] for row in rows)
    largest = max(range(len(shares)), key=shares.__getitem__)
    print(f"| data wait, median share of a step | {statistics.median(shares):.3%} |")
    print(f"| data wait, share of all steps together | {total:.3%} |")
    print(f"| data wait, largest share of a step | {shares[largest]:.3%} (step {largest + 1}) |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=10.0)
    parser.add_argument("--tokenizer", help="value of the recipe key; default: the recipe's, trained on the corpus")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument(
        "--folder", type=Path, help="a folder with free space for three times the size; default: a temporary one"
    )
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="large-corpus-", dir=arguments.folder))
    corpus = folder / "corpus.jsonl"
    overrides = [
        f"data.train=[{{path: {corpus}}}]", f"run.dir={folder}/run", f"data.prepared_dir={folder}/prepared",
        f"data.prepare_workers={arguments.workers}", f"train.steps={arguments.steps}", "optim.warmup=5",
        "evaluate.batches=1",
    ]  # fmt: skip
    if arguments.tokenizer:
        overrides.append(f"tokenizer={arguments.tokenizer}")
    try:
        count = write_corpus(corpus, int(arguments.gigabytes * 1e9))
        size = corpus.stat().st_size
        print(f"{size / 1e9:.2f} GB, {count:,} documents, {arguments.workers} workers, load {os.getloadavg()[0]:.1f}")
        seconds, peaks = run_measured([sys.executable, "-m", "echelon", "data", "--prepare", str(RECIPE), *overrides])
        print("\n| | |\n|---|---|")
        print(f"| prepared, in {seconds:.0f} s | {size / seconds / 1e6:.1f} MB/s |")
        for name, value in peaks.items():
            print(f"| peak resident memory, {name} | {value / 2**20:.0f} MiB |")
        print(f"| page cache emptied by | {drop_from_cache(folder)} |", flush=True)
        subprocess.run(
            [sys.executable, "-m", "echelon", "train", str(RECIPE), *overrides], check=True, cwd=ROOT,
            stdout=subprocess.DEVNULL,
        )  # fmt: skip
        report_waits(folder / "run" / "metrics.jsonl")
        print(f"| load at the end | {os.getloadavg()[0]:.1f} |")
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
