"""Tokenization compared with `datasets.map`, with the same .jsonl, tokenizer and number of processes, and ids on disk.

In each round both sides run in turn, in separate processes. `datasets` loads the file, maps a function that calls the
tokenizer on batches, and saves to disk; its caches are empty each time. echelon prepares the file without held-out
text. Both read the text, tokenize it, append eos to each document, and write all ids to files.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import islice
from pathlib import Path

from large_corpus import make_documents, write_corpus

SIDES = ("datasets.map", "echelon")


def tokenize_with_datasets(corpus: Path, tokenizer_dir: Path, target: Path, workers: int) -> int:
    """Tokenize in the usual way with `datasets`; return the number of ids."""
    import datasets
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir)
    eos = tokenizer.eos_token_id

    def encode(batch: dict) -> dict:
        found = tokenizer(batch["text"], add_special_tokens=False, return_attention_mask=False)["input_ids"]
        return {"input_ids": [[*ids, eos] for ids in found], "length": [len(ids) + 1 for ids in found]}

    loaded = datasets.load_dataset("json", data_files=str(corpus), split="train", cache_dir=str(target / "cache"))
    mapped = loaded.map(encode, batched=True, num_proc=workers, remove_columns=loaded.column_names)
    mapped.save_to_disk(target / "saved", num_proc=workers)
    return sum(mapped["length"])


def tokenize_with_echelon(corpus: Path, tokenizer_dir: Path, target: Path, workers: int) -> int:
    """Tokenize with `prepare`; return the number of ids."""
    from echelon.learn.data.prepare import prepare
    from echelon.learn.data.prepare_spec import PrepareSpec
    from echelon.learn.data.source import Source

    spec = PrepareSpec(
        train=(Source("data.train.0", str(corpus)),),
        validation=(),
        validation_fraction=0.0,
        tokenizer=str(tokenizer_dir),
        checkpoint=None,
        prepared_dir=target,
        sequence_len=1024,
        workers=workers,
    )
    return sum(record.tokens for record in prepare(spec).manifest.streams["train"])


def run_side(side: str, corpus: Path, tokenizer_dir: Path, workers: int) -> None:
    """Run one side in this process; print its seconds, without imports, and its number of ids."""
    import datasets
    import transformers  # noqa: F401

    import echelon.learn.data.prepare  # noqa: F401

    datasets.disable_progress_bars()
    target = Path(tempfile.mkdtemp(dir=corpus.parent))
    run = tokenize_with_echelon if side == "echelon" else tokenize_with_datasets
    started = time.monotonic()
    num_ids = run(corpus, tokenizer_dir, target, workers)
    print(json.dumps({"seconds": time.monotonic() - started, "ids": num_ids}))
    shutil.rmtree(target)


def measure(side: str, corpus: Path, tokenizer_dir: Path, workers: int) -> dict[str, float]:
    """Run one side in a separate process."""
    command = [sys.executable, __file__, "--side", side, "--corpus", str(corpus), "--tokenizer", str(tokenizer_dir)]
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(
        [*command, "--workers", str(workers)], check=True, stdout=subprocess.PIPE, text=True, env=environment
    )
    return json.loads(done.stdout.splitlines()[-1])


def compare(megabytes: float, workers: int, rounds: int, vocab_size: int) -> None:
    """Run both sides in turn, and print a table."""
    from echelon.learn.data.tokenizer import train_tokenizer

    folder = Path(tempfile.mkdtemp(prefix="tokenize-"))
    try:
        corpus, tokenizer_dir = folder / "corpus.jsonl", folder / "tokenizer"
        count = write_corpus(corpus, int(megabytes * 1e6))
        train_tokenizer(islice(make_documents(), 4000), vocab_size).save_pretrained(tokenizer_dir)
        print(f"{megabytes:g} MB of .jsonl, {count:,} documents, {vocab_size:,} ids, {workers} processes each")
        seconds: dict[str, list[float]] = {side: [] for side in SIDES}
        for index in range(rounds):
            order = SIDES if index % 2 == 0 else SIDES[::-1]
            results = {side: measure(side, corpus, tokenizer_dir, workers) for side in order}
            assert len({result["ids"] for result in results.values()}) == 1, f"the numbers of ids differ: {results}"
            for side, result in results.items():
                seconds[side].append(result["seconds"])
        print(f"load {os.getloadavg()[0]:.1f}\n\n| | median | spread over {rounds} rounds |\n|---|---|---|")
        for side, found in seconds.items():
            rates = sorted(megabytes / each for each in found)
            print(f"| {side} | {statistics.median(rates):.2f} MB/s | {rates[0]:.2f} to {rates[-1]:.2f} |")
        ratios = sorted(theirs / ours for theirs, ours in zip(seconds[SIDES[0]], seconds[SIDES[1]], strict=True))
        print(f"| echelon / datasets.map | {statistics.median(ratios):.2f} | {ratios[0]:.2f} to {ratios[-1]:.2f} |")
    finally:
        shutil.rmtree(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=float, default=150.0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--vocab-size", type=int, default=16384)
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--corpus", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--tokenizer", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.side:
        run_side(arguments.side, arguments.corpus, arguments.tokenizer, arguments.workers)
    else:
        compare(arguments.megabytes, arguments.workers, arguments.rounds, arguments.vocab_size)


if __name__ == "__main__":
    main()
