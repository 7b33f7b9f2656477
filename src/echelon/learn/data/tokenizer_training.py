"""Learns the merges of byte-level BPE from text, in a process that can be ended.

The trainer of `tokenizers` is native code: while it runs, no signal reaches Python. Imports neither torch nor
transformers, which the process does not need.
"""

from collections.abc import Iterable, Iterator
from itertools import chain
from multiprocessing.connection import Connection

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from echelon.ground.errors import EchelonError
from echelon.learn.data.child_process import ChildProcess, stops_held_back

END_OF_TEXT = "<|endoftext|>"

SMALL_CHARACTERS = 2**18
"""A text up to this size is learned from in this process: in less time than another one needs to start."""

_BATCH_CHARACTERS = 2**20


def learn_merges(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train byte-level BPE (GPT-2's splitting rule) with `<|endoftext|>`. The same texts give the same tokenizer.

    Raises EchelonError if the process dies, for example because it runs out of memory.
    """
    batches = _batches(texts)
    first = next(batches, [])
    second = next(batches, None)
    if second is None and sum(map(len, first)) <= SMALL_CHARACTERS:
        return _learn(first, vocab_size)
    rest = batches if second is None else chain([second], batches)
    with stops_held_back():
        child = ChildProcess(_serve, vocab_size)
    try:
        for batch in chain([first], rest, [[]]):
            child.connection.send(batch)
        return Tokenizer.from_str(child.connection.recv())
    except (EOFError, OSError) as error:
        raise EchelonError(
            f"the process that trains the tokenizer died (exit code {child.wait_for_exit()}); if it ran out of "
            "memory, free some, or train on less text: data.train.0.max_samples."
        ) from error
    finally:
        child.stop()


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    """Group texts: one message for each of many short texts would take longer than their counting."""
    batch: list[str] = []
    size = 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= _BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _serve(connection: Connection, vocab_size: int) -> None:
    """Learn from the batches of the pipe, up to an empty one, and send the tokenizer as JSON."""
    texts = chain.from_iterable(iter(connection.recv, []))
    connection.send(_learn(texts, vocab_size).to_str())


def _learn(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(END_OF_TEXT, special=True)],
        initial_alphabet=sorted(byte_characters()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def byte_characters() -> Iterator[str]:
    """Yield the printable character that byte-level tokenizers use for each byte, in order.

    Printable Latin-1 maps to itself, the other 68 bytes to the characters from U+0100 on (GPT-2's encoder.py).
    """
    num_shifted = 0
    for byte in range(256):
        if 33 <= byte <= 126 or 161 <= byte <= 172 or 174 <= byte <= 255:
            yield chr(byte)
        else:
            yield chr(256 + num_shifted)
            num_shifted += 1
