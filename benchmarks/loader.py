"""The loader: tokens per second of one process, from a cold and a warm page cache, in random order, without training.

Prepares a corpus with `tokenizer: bytes`, so that it is large, then reads batches of a small recipe for some seconds:
twice after the shards were removed from the page cache, once after they were read into it.
"""

import argparse
import itertools
import os
import shutil
import tempfile
import time
from contextlib import closing
from pathlib import Path

from echelon.learn.data.feed import open_feed
from echelon.learn.data.loader import BatchPlace
from echelon.learn.data.prepare import prepare_data
from echelon.learn.data.prepared import open_prepared
from echelon.recipe.document import Recipe
from echelon.recipe.load import load_recipe
from large_corpus import RECIPE, drop_from_cache, write_corpus


def read_batches(recipe: Recipe, prepared: Path, seconds: float) -> tuple[float, float, float]:
    """Read batches; return tokens per second, per processor second, and the longest wait for a batch in seconds."""
    data = open_prepared(prepared, recipe.data.sequence_len, recipe.data.document_mask)
    tokens, longest = 0, 0.0
    began, used = time.perf_counter(), time.process_time()
    with closing(open_feed(recipe, data, BatchPlace(8))) as feed:
        for step in itertools.count():
            if time.perf_counter() - began >= seconds:
                break
            tokens += feed.batch(step).num_tokens
            longest = max(longest, feed.wait_seconds)
    return tokens / (time.perf_counter() - began), tokens / (time.process_time() - used), longest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=float, default=600.0)
    parser.add_argument("--sequence-len", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--step-rate", type=float, default=11_400.0, help="tokens per second of the fastest step")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="loader-"))
    try:
        write_corpus(folder / "corpus.jsonl", int(arguments.megabytes * 1e6))
        length = arguments.sequence_len
        overrides = [
            "tokenizer=bytes", f"data.sequence_len={length}", f"model.config.max_position_embeddings={length}",
            f"data.train=[{{path: {folder / 'corpus.jsonl'}}}]", f"data.prepared_dir={folder / 'prepared'}",
        ]  # fmt: skip
        recipe, _ = load_recipe(RECIPE, overrides)
        prepared = prepare_data(recipe).path
        print(f"{arguments.megabytes:g} MB of text, sequences of {length} tokens, load {os.getloadavg()[0]:.1f}\n")
        print("| page cache | tokens/s | tokens per processor s | longest wait, s | times the fastest step |")
        print("|---|---|---|---|---|")
        for cache in ("cold", "cold", "warm"):
            if cache == "cold":
                drop_from_cache(folder)
            else:
                for path in prepared.rglob("*.bin"):
                    path.read_bytes()
            rate, own, longest = read_batches(recipe, prepared, arguments.seconds)
            print(
                f"| {cache} | {rate:,.0f} | {own:,.0f} | {longest:.3f} | {rate / arguments.step_rate:.0f} |", flush=True
            )
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
