"""Loss on held-out text: during training over all ranks, and by command over a run or an HF folder."""

import math
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from glob import has_magic
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from echelon.data.loader import Microbatch
from echelon.data.prepare import PrepareSpec, open_prepared, prepare
from echelon.data.shards import TokenDataset, unigram_entropy
from echelon.data.source import PYTHON_STDLIB, Source
from echelon.errors import ConfigError
from echelon.loss import IGNORE
from echelon.mesh import Meshes
from echelon.model.build import is_model_folder
from echelon.objective import CausalLM, ObjectiveModule
from echelon.recipe import load_recipe
from echelon.run_folder import RunFolder
from echelon.train.target import find_device, load_target

EVAL_TOKENS = 8192  # tokens of one forward pass of `echelon eval`
DEFAULT_BATCHES = 200


@dataclass(frozen=True)
class EvalResult:
    """Mean loss in nats per target token, and its exponential."""

    loss: float
    num_targets: int

    @property
    def perplexity(self) -> float:
        """exp(loss); infinite where that overflows."""
        return math.exp(self.loss) if self.loss < 700 else math.inf


class Evaluator:
    """The same held-out sequences every time, in order, shared out over the ranks."""

    def __init__(
        self, dataset: TokenDataset, num_sequences: int, micro_batch_size: int, meshes: Meshes, device: torch.device
    ) -> None:
        self._dataset = dataset
        self._num_sequences = min(num_sequences, dataset.num_samples)
        self._micro_batch_size = micro_batch_size
        self._meshes = meshes
        self._device = device

    @property
    def num_sequences(self) -> int:
        """How many held-out sequences one evaluation reads."""
        return self._num_sequences

    def run(self, loss_sum: Callable[[Microbatch], Tensor]) -> EvalResult:
        """Evaluate. Collective: every rank runs the same number of forward passes, the last ones partly empty."""
        sums = torch.zeros(2, dtype=torch.float64, device=self._device)
        for microbatch in self._microbatches():
            sums[0] += loss_sum(microbatch)
            sums[1] += (microbatch.labels != IGNORE).sum()
        dist.all_reduce(sums, group=self._meshes.loss)
        total, count = sums.tolist()
        return EvalResult(total / max(1.0, count), int(count))

    def _microbatches(self) -> Iterator[Microbatch]:
        per_round = self._micro_batch_size * self._meshes.data_size
        for first in range(0, self._num_sequences, per_round):
            start = first + self._meshes.data_rank * self._micro_batch_size
            yield read_in_order(self._dataset, start, self._micro_batch_size, self._num_sequences).to(self._device)


def read_in_order(dataset: TokenDataset, start: int, count: int, stop: int) -> Microbatch:
    """Sequences start..start+count of a dataset; those at or beyond `stop` repeat the first one without targets."""
    ids = np.arange(start, start + count, dtype=np.int64)
    inside = ids < stop
    inputs, labels = dataset.read_samples(np.where(inside, ids, 0))
    labels[~inside] = IGNORE
    return Microbatch(torch.from_numpy(inputs), torch.from_numpy(labels), ids, ids)


def evaluate_model(target: Path, data: Path | None = None) -> dict[str, float | int | str]:
    """Loss of a run's newest checkpoint, or of an HF folder, in fp32 in this process.

    Args:
        target: a run folder or an HF folder.
        data: text to evaluate on; None takes all of a run's held-out text.

    Returns:
        loss (nats per token), perplexity, unigram_entropy (what a model of token frequencies alone would reach on the
        same text), tokens, data.

    Raises:
        ConfigError: an HF folder without `data`, or a run that holds nothing out.
    """
    if data is not None and not data.exists() and not has_magic(str(data)) and str(data) != PYTHON_STDLIB:
        raise ConfigError(f"--data {data}: no such file or folder, seen from {Path.cwd()}; give text to evaluate on.")
    if data is None and is_model_folder(target):
        raise ConfigError(f"{target} is an HF folder and holds no text; give the text with --data PATH.")
    device = find_device()
    model, tokenizer = load_target(target, device)
    sequence_len = _sequence_len(target, model)
    with ExitStack() as stack:
        if data is None:
            dataset, source = _held_out(target, sequence_len), "held-out text of the run"
        else:
            scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            dataset, source = _prepare_text(data, tokenizer, sequence_len, scratch), str(data)
        module = ObjectiveModule(model).eval()
        total, count = 0.0, 0
        with torch.no_grad():
            for microbatch in _read_all(dataset, max(1, EVAL_TOKENS // sequence_len), device):
                total += float(module(microbatch, CausalLM()))
                count += int((microbatch.labels != IGNORE).sum())
        result = EvalResult(total / max(1, count), count)
        entropy = unigram_entropy(dataset)
    return {
        "loss": result.loss,
        "perplexity": result.perplexity,
        "unigram_entropy": entropy,
        "tokens": count,
        "data": source,
    }


def _sequence_len(target: Path, model: PreTrainedModel) -> int:
    if is_model_folder(target):
        return min(1024, getattr(model.config, "max_position_embeddings", 1024))
    recipe, _ = load_recipe(RunFolder(target).recipe_path)
    return recipe.data.sequence_len


def _held_out(target: Path, sequence_len: int) -> TokenDataset:
    prepared = open_prepared(RunFolder(target).read_prepared_path(), sequence_len)
    if not prepared.validation:
        raise ConfigError(f"{target} holds no text out (data.validation_fraction is 0); give some with --data PATH.")
    return prepared.validation[0].dataset


def _prepare_text(path: Path, tokenizer: PreTrainedTokenizerBase, sequence_len: int, scratch: Path) -> TokenDataset:
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
    return prepare(spec, lambda line: None).train


def _read_all(dataset: TokenDataset, batch: int, device: torch.device) -> Iterator[Microbatch]:
    for start in range(0, dataset.num_samples, batch):
        yield read_in_order(dataset, start, batch, dataset.num_samples).to(device)
