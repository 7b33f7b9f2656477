"""Loss on held-out text: during training over all ranks, and by command over a run or an HF folder."""

import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from glob import has_magic
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from echelon.data.loader import Microbatch, build_microbatch, trim_padding
from echelon.data.prepare import PrepareSpec, prepare
from echelon.data.prepared import PreparedData, ValidationSet, open_prepared
from echelon.data.shards import Dataset, unigram_entropy
from echelon.data.source import PYTHON_STDLIB, Source
from echelon.engines import Evaluation
from echelon.errors import ConfigError
from echelon.loss import IGNORE
from echelon.mesh import Meshes
from echelon.model.build import is_model_folder
from echelon.objective import CausalLM, ObjectiveModule
from echelon.recipe import Recipe, load_recipe
from echelon.run_folder import RunFolder
from echelon.stopping import StopRequest, agreed_stop
from echelon.train.sampler import encode_prompts
from echelon.train.target import find_device, load_target

EVAL_TOKENS = 8192  # tokens of one forward pass of `echelon eval`
DEFAULT_BATCHES = 200
ROUNDS_PER_LOOK = 16  # how many microbatches a stop waits for at most


@dataclass(frozen=True)
class EvalResult:
    """Mean loss in nats per target token, and what follows from it."""

    loss: float
    num_targets: int
    bytes_per_token: float | None

    @property
    def perplexity(self) -> float:
        """exp(loss); infinite where that overflows."""
        return math.exp(self.loss) if self.loss < 700 else math.inf

    @property
    def bits_per_byte(self) -> float | None:
        """loss / ln 2 * tokens / bytes, which models with different tokenizers can be compared by; None if unknown."""
        return None if not self.bytes_per_token else self.loss / math.log(2) / self.bytes_per_token

    def row(self) -> dict[str, float | int | None]:
        """JSON values."""
        return {
            "loss": self.loss,
            "perplexity": self.perplexity,
            "bits_per_byte": self.bits_per_byte,
            "target_tokens": self.num_targets,
        }


@dataclass(frozen=True)
class EvalResults:
    """The result of each named validation set."""

    sets: dict[str, EvalResult]

    @property
    def whole(self) -> EvalResult:
        """All sets as one text: every target token counts once."""
        results = self.sets.values()
        count = sum(each.num_targets for each in results)
        loss = sum(each.loss * each.num_targets for each in results) / max(1, count)
        sizes = [each.num_targets * each.bytes_per_token for each in results if each.bytes_per_token is not None]
        known = count > 0 and len(sizes) == len(self.sets)
        return EvalResult(loss, count, sum(sizes) / count if known else None)

    def select(self, name: str | None) -> EvalResult:
        """The set that `evaluate.select_by` names; None: all of them."""
        return self.whole if name is None else self.sets[name]

    def row(self, step: int) -> dict[str, Any]:
        """The row of metrics.jsonl."""
        sets = {name: result.row() for name, result in self.sets.items()}
        return {"kind": "eval", "step": step, **self.whole.row(), "sets": sets}


class Evaluator:
    """The same held-out sequences of every set each time, in order, shared out over the ranks."""

    def __init__(
        self,
        sets: Sequence[ValidationSet],
        num_sequences: int,
        micro_batch_size: int,
        meshes: Meshes,
        device: torch.device,
    ) -> None:
        """`num_sequences`: of each set, at most."""
        self.stopped_by: str | None = None
        """The signal that ended an evaluation before its end."""
        self._sets = sets
        self._num_sequences = num_sequences
        self._micro_batch_size = micro_batch_size
        self._meshes = meshes
        self._device = device

    def run(
        self, evaluation: Evaluation, stop: StopRequest, beat: Callable[[], None] = lambda: None
    ) -> EvalResults | None:
        """Evaluate; None when a rank was asked to stop meanwhile, by the signal `stopped_by`.

        `beat` is called before each forward pass.
        Collective: every rank runs the same number of forward passes, the last ones partly empty.
        """
        sums = torch.zeros(len(self._sets), 2, dtype=torch.float64, device=self._device)
        for index, each in enumerate(self._sets):
            for number, microbatch in enumerate(self._microbatches(each.dataset), start=1):
                if number % ROUNDS_PER_LOOK == 0:
                    self.stopped_by = self._agree_to_stop(stop)
                    if self.stopped_by is not None:
                        return None
                beat()
                sums[index, 0] += evaluation.loss_sum(microbatch)
                sums[index, 1] += (microbatch.labels != IGNORE).sum()
        dist.all_reduce(sums, group=self._meshes.loss)
        return EvalResults(
            {
                each.name: EvalResult(total / max(1.0, count), int(count), each.bytes_per_token)
                for each, (total, count) in zip(self._sets, sums.tolist(), strict=True)
            }
        )

    def _agree_to_stop(self, stop: StopRequest) -> str | None:
        flags = torch.tensor(stop.flags(), dtype=torch.float64, device=self._device)
        dist.all_reduce(flags, group=self._meshes.loss)
        return agreed_stop(flags.tolist())

    def _microbatches(self, dataset: Dataset) -> Iterator[Microbatch]:
        per_round = self._micro_batch_size * self._meshes.data_size
        stop = min(self._num_sequences, dataset.num_samples)
        for first in range(0, stop, per_round):
            start = first + self._meshes.data_rank * self._micro_batch_size
            yield read_in_order(dataset, start, self._micro_batch_size, stop).to(self._device)


def check_evaluation(recipe: Recipe, data: PreparedData) -> None:
    """Raise ConfigError for what `evaluate` and `checkpoint.keep_best` ask of validation sets or prompts in vain."""
    wanted, sets = recipe.evaluate, data.validation
    names = [each.name for each in sets]
    if wanted.select_by is not None and wanted.select_by not in names:
        have = f"use one of {', '.join(names)}" if names else "there is none; hold some text out"
        raise ConfigError(f"evaluate.select_by={wanted.select_by}: no validation set has this name; {have}.")
    for key, value in (
        ("checkpoint.keep_best", recipe.checkpoint.keep_best),
        ("evaluate.early_stopping", wanted.early_stopping),
        ("evaluate.prompts", wanted.prompts),
    ):
        if value and not sets:
            raise ConfigError(
                f"{key} goes with evaluations, and no text is held out to evaluate on; set data.validation_fraction, "
                "or give data.validation."
            )
    if wanted.early_stopping and recipe.train.eval_every is None:
        raise ConfigError(
            "evaluate.early_stopping needs evaluations on the way, and train.eval_every is null; set "
            "train.eval_every to a number of steps."
        )
    if wanted.prompts:
        _check_prompts(recipe, data)


def _check_prompts(recipe: Recipe, data: PreparedData) -> None:
    wanted = recipe.evaluate
    room = recipe.data.sequence_len - wanted.prompt_tokens
    for prompt, ids in zip(wanted.prompts, encode_prompts(wanted.prompts, data.tokenizer), strict=True):
        if len(ids) > room:
            raise ConfigError(
                f"evaluate.prompts: {prompt[:40]!r} has {len(ids)} tokens; with evaluate.prompt_tokens="
                f"{wanted.prompt_tokens} more it is longer than data.sequence_len={recipe.data.sequence_len}; shorten "
                "the prompt or lower evaluate.prompt_tokens."
            )


def read_in_order(dataset: Dataset, start: int, count: int, stop: int, *, trim: bool = True) -> Microbatch:
    """Sequences start..start+count of a dataset; those at or beyond `stop` repeat the first one without targets.

    `trim`: without the padding that all of them end with.
    """
    ids = np.arange(start, start + count, dtype=np.int64)
    inside = ids < stop
    samples = dataset.read_samples(np.where(inside, ids, 0))
    samples.labels[~inside] = IGNORE
    return build_microbatch(trim_padding(samples) if trim else samples, ids, ids)


def evaluate_model(target: Path, data: Path | None = None, checkpoint: str | None = None) -> dict[str, Any]:
    """Loss of a checkpoint of a run, or of an HF folder, in fp32 in this process.

    Args:
        target: a run folder or an HF folder.
        data: text to evaluate on; None takes all of a run's held-out text, set by set.
        checkpoint: newest, best or a step of a run; None: the newest.

    Returns:
        loss (nats per token), perplexity, bits_per_byte, unigram_entropy (what a model of token frequencies alone would
        reach on the same text), tokens, data, and sets: the same of each named set. The first ones are of all sets.

    Raises:
        ConfigError: an HF folder without `data`, or a run that holds nothing out.
    """
    if data is not None and not data.exists() and not has_magic(str(data)) and str(data) != PYTHON_STDLIB:
        raise ConfigError(f"--data {data}: no such file or folder, seen from {Path.cwd()}; give text to evaluate on.")
    if data is None and is_model_folder(target):
        raise ConfigError(f"{target} is an HF folder and holds no text; give the text with --data PATH.")
    device = find_device()
    model, tokenizer = load_target(target, device, checkpoint)
    sequence_len = _sequence_len(target, model)
    with ExitStack() as stack:
        if data is None:
            sets, source = _held_out(target, sequence_len), "held-out text of the run"
        else:
            scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            sets, source = [_prepare_text(data, tokenizer, sequence_len, scratch)], str(data)
        module = ObjectiveModule(model).eval()
        batch = max(1, EVAL_TOKENS // sequence_len)
        results = EvalResults({each.name: _evaluate_set(module, each, batch, device) for each in sets})
        entropy = unigram_entropy([each.dataset for each in sets])
        entropies = {each.name: unigram_entropy([each.dataset]) for each in sets}
    return {
        **_render(results.whole, entropy),
        "data": source,
        "sets": {name: _render(result, entropies[name]) for name, result in results.sets.items()},
    }


def _render(result: EvalResult, entropy: float) -> dict[str, Any]:
    return {
        "loss": result.loss,
        "perplexity": result.perplexity,
        "bits_per_byte": result.bits_per_byte,
        "unigram_entropy": entropy,
        "tokens": result.num_targets,
    }


@torch.no_grad()
def _evaluate_set(module: ObjectiveModule, given: ValidationSet, batch: int, device: torch.device) -> EvalResult:
    total, count = 0.0, 0
    for microbatch in _read_all(given.dataset, batch, device):
        total += float(module(microbatch, CausalLM()))
        count += int((microbatch.labels != IGNORE).sum())
    return EvalResult(total / max(1, count), count, given.bytes_per_token)


def _sequence_len(target: Path, model: PreTrainedModel) -> int:
    if is_model_folder(target):
        return min(1024, getattr(model.config, "max_position_embeddings", 1024))
    recipe, _ = load_recipe(RunFolder(target).recipe_path)
    return recipe.data.sequence_len


def _held_out(target: Path, sequence_len: int) -> Sequence[ValidationSet]:
    recipe, _ = load_recipe(RunFolder(target).recipe_path)
    prepared = open_prepared(RunFolder(target).read_prepared_path(), sequence_len, recipe.data.document_mask)
    if not prepared.validation:
        raise ConfigError(f"{target} holds no text out (data.validation_fraction is 0); give some with --data PATH.")
    return prepared.validation


def _prepare_text(path: Path, tokenizer: PreTrainedTokenizerBase, sequence_len: int, scratch: Path) -> ValidationSet:
    tokenizer.save_pretrained(scratch / "tokenizer")
    spec = PrepareSpec(
        train=(Source("--data", str(path)),),
        validation=(),
        validation_fraction=0.0,
        tokenizer=str(scratch / "tokenizer"),
        checkpoint=None,
        prepared_dir=scratch / "prepared",
        sequence_len=sequence_len,
    )
    prepared = prepare(spec, lambda line: None)
    [record] = prepared.manifest.streams["train"]
    density = None if record.text_bytes is None else record.text_bytes / max(1, record.tokens)
    return ValidationSet(path.name or str(path), prepared.train, density)


def _read_all(dataset: Dataset, batch: int, device: torch.device) -> Iterator[Microbatch]:
    for start in range(0, dataset.num_samples, batch):
        yield read_in_order(dataset, start, batch, dataset.num_samples).to(device)
