"""Multiple-choice tasks from a local file, scored by log-likelihood in the same way as lm-eval."""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from echelon.data.panics import panics_told
from echelon.errors import ConfigError
from echelon.inference.target import find_device, load_target
from echelon.inference.team import Host, Team
from echelon.planner.model_shape import logits_chunk_tokens
from echelon.stored import MAX_ROWS_BYTES, read_text

CONTEXT_FIELDS = ("context", "question", "prompt")


@dataclass(frozen=True)
class Example:
    """One line of a task: a context, the possible continuations, and the index of the correct one."""

    line: int
    context: str
    choices: tuple[str, ...]
    answer: int


@dataclass(frozen=True)
class Scored:
    """A sequence whose tokens from `start` on are scored."""

    ids: tuple[int, ...]
    start: int


def read_task(path: Path) -> list[Example]:
    """Read the examples of a .jsonl file: `context` (or `question`, `prompt`), `choices`, and `answer`, index or text.

    Raises:
        ConfigError: the message names the file and the first invalid line.
    """
    try:
        lines = read_text(path, MAX_ROWS_BYTES).split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--tasks {path} cannot be read: {error}; give a .jsonl file in UTF-8.") from error
    examples = [_parse_example(path, number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not examples:
        raise ConfigError(f"--tasks {path} contains no example; give at least one line.")
    return examples


def _parse_example(path: Path, number: int, line: str) -> Example:
    where = f"--tasks {path}, line {number}"
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where} is not JSON: {error}; correct that line.") from error
    contexts = [record[name] for name in CONTEXT_FIELDS if name in record] if isinstance(record, dict) else []
    if len(contexts) != 1 or not _is_text(contexts[0]) or not contexts[0].strip():
        raise ConfigError(f"{where}: give exactly one of {', '.join(CONTEXT_FIELDS)}, a string that is not empty.")
    choices = record.get("choices")
    if not isinstance(choices, list) or len(choices) < 2 or not all(map(_is_text, choices)):
        raise ConfigError(f"{where}: `choices` must be a list of at least two strings, none of them empty.")
    return Example(number, contexts[0], tuple(choices), _find_answer(record.get("answer"), choices, where))


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value)


def _find_answer(answer: object, choices: list[str], where: str) -> int:
    """Return the index of the correct choice, given by its index or its text. Raises ConfigError."""
    if isinstance(answer, str) and choices.count(answer) == 1:
        return choices.index(answer)
    if isinstance(answer, bool) or not isinstance(answer, int) or not 0 <= answer < len(choices):
        raise ConfigError(
            f"{where}: `answer` is {answer!r}; give the index of the correct choice, 0 to {len(choices) - 1}, or its "
            "text."
        )
    return answer


def evaluate_task(target: Path, path: Path, checkpoint: str | None = None, team: Team | None = None) -> dict[str, Any]:
    """Score a task's choices by their log-likelihood after the context. Every process of a team scores all of them.

    Returns:
        task, examples, and three accuracies, each with its standard error: acc by log-likelihood, acc_norm by
        log-likelihood per character of the choice, acc_bytes per UTF-8 byte; and random, the accuracy of guessing.

    Raises:
        ConfigError: the file cannot be used, or a choice is too long for the model.
    """
    examples = read_task(path)
    host = Host(team or Team(find_device()))
    model, tokenizer = load_target(target, host, checkpoint)
    pairs = [
        encode_pair(tokenizer, each.context, f" {choice}", f"--tasks {path}, line {each.line}")
        for each in examples
        for choice in each.choices
    ]
    limit = getattr(model.config, "max_position_embeddings", None)
    cut = [cut_left(pair, limit) for pair in pairs]
    scores = iter(host.run(lambda: score_continuations(model, cut)))
    by_choice = [[next(scores) for _ in each.choices] for each in examples]
    right: dict[str, list[bool]] = {"acc": [], "acc_norm": [], "acc_bytes": []}
    for example, found in zip(examples, by_choice, strict=True):
        lengths = {
            "acc": [1] * len(found),
            "acc_norm": [len(choice) for choice in example.choices],
            "acc_bytes": [len(choice.encode("utf-8", "surrogatepass")) for choice in example.choices],
        }
        for name, divisors in lengths.items():
            normed = [score / divisor for score, divisor in zip(found, divisors, strict=True)]
            right[name].append(normed.index(max(normed)) == example.answer)
    result: dict[str, Any] = {"task": path.stem, "examples": len(examples)}
    for name, hits in right.items():
        result[name] = sum(hits) / len(hits)
        result[f"{name}_stderr"] = standard_error(hits)
    return result | {"random": sum(1 / len(each.choices) for each in examples) / len(examples)}


def encode_pair(tokenizer: PreTrainedTokenizerBase, context: str, continuation: str, where: str) -> Scored:
    """Encode a context with its continuation, and split at the length of the context encoded alone.

    Trailing spaces of the context are moved to the continuation first: most tokenizers attach a space to the following
    word. lm-eval splits in the same way (`TemplateLM._encode_pair`).
    """
    stripped = context.rstrip()
    continuation = context[len(stripped) :] + continuation
    with panics_told(tokenizer.name_or_path, where):
        start = len(tokenizer(stripped, add_special_tokens=False)["input_ids"])
        ids = tokenizer(stripped + continuation, add_special_tokens=False)["input_ids"]
    if not 0 < start < len(ids):
        raise ConfigError(f"{where}: the context or a choice has no token of its own; make it longer.")
    return Scored(tuple(ids), start)


def cut_left(pair: Scored, limit: int | None) -> Scored:
    """Truncate the start of the context so that the pair fits the model's positions."""
    excess = 0 if limit is None else max(0, len(pair.ids) - 1 - limit)  # the last token is only a target
    if excess >= pair.start:
        raise ConfigError(
            f"--tasks: a choice has {len(pair.ids) - pair.start} tokens, and the model has only {limit} positions; "
            "shorten the choice."
        )
    return Scored(pair.ids[excess:], pair.start - excess)


def score_continuations(model: PreTrainedModel, pairs: Sequence[Scored]) -> list[float]:
    """Return each sequence's log-likelihood, in nats, of the tokens from `start` on. Batches longest first."""
    order = sorted(range(len(pairs)), key=lambda index: -len(pairs[index].ids))
    scores = [0.0] * len(pairs)
    room = logits_chunk_tokens(model.get_output_embeddings().weight.shape[0])
    while order:
        size = max(1, room // len(pairs[order[0]].ids))
        batch, order = order[:size], order[size:]
        for index, score in zip(batch, _score_batch(model, [pairs[index] for index in batch]), strict=True):
            scores[index] = score
    return scores


@torch.no_grad()
def _score_batch(model: PreTrainedModel, pairs: Sequence[Scored]) -> Iterator[float]:
    width = max(len(pair.ids) for pair in pairs) - 1
    # Right padding: attention is causal, so no token sees it.
    rows = [[*pair.ids[:-1], *pair.ids[-1:] * (width - len(pair.ids) + 1)] for pair in pairs]
    logits: Tensor = model(input_ids=torch.tensor(rows, device=model.device), use_cache=False).logits
    for pair, row in zip(pairs, logits, strict=True):
        chosen = row[pair.start - 1 : len(pair.ids) - 1].float().log_softmax(-1)
        targets = torch.tensor(pair.ids[pair.start :], device=chosen.device)
        yield float(chosen.gather(1, targets[:, None]).sum())


def standard_error(hits: Sequence[bool]) -> float | None:
    """Return the standard error of the mean, from the sample standard deviation; None for a single example."""
    if len(hits) < 2:
        return None
    mean = sum(hits) / len(hits)
    return math.sqrt(sum((hit - mean) ** 2 for hit in hits) / (len(hits) - 1) / len(hits))
