"""Loss on held-out text: during training on all ranks, and by `echelon eval` for a run or an HF folder."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from echelon.checkpoint.adapted import read_run_recipe
from echelon.checkpoint.export import TRAINING
from echelon.data.loader import LONGEST, Microbatch, Padding, build_microbatch, set_width
from echelon.data.prepared import ValidationSet
from echelon.data.shards import Dataset, unigram_entropy
from echelon.distributed.mesh import Meshes
from echelon.engines.engine import Evaluation
from echelon.errors import ConfigError
from echelon.inference.held_out import open_held_out, prepare_given
from echelon.inference.target import find_device, load_first_weights, load_target
from echelon.inference.team import Host, Team
from echelon.model.traits import find_traits
from echelon.objectives.causal_lm import CausalLM
from echelon.objectives.loss import IGNORE
from echelon.objectives.objective import Objective, build_objective
from echelon.objectives.outputs import ObjectiveModule
from echelon.run_files import is_model_folder
from echelon.scratch import scratch_folder
from echelon.stopping import StopRequest, agreed_stop
from echelon.stored import read_json

EVAL_TOKENS = {"cuda": 8192, "cpu": 2048}  # tokens per forward pass of `echelon eval`
DEFAULT_BATCHES = 200
ROUNDS_PER_LOOK = 16  # a stop request waits for at most this many microbatches


@dataclass(frozen=True)
class EvalResult:
    """Mean loss in nats per target token, and derived metrics; for preference pairs, mean loss and rewards per pair."""

    loss: float
    num_targets: int
    bytes_per_token: float | None
    num_pairs: int | None = None
    reward_accuracy: float | None = None
    """Fraction of pairs whose chosen answer has the larger reward."""
    reward_margin: float | None = None
    """Mean difference between the rewards of the chosen and the rejected answer."""

    @property
    def count(self) -> int:
        """The number of terms in the means: target tokens, or pairs."""
        return self.num_targets if self.num_pairs is None else self.num_pairs

    @property
    def perplexity(self) -> float | None:
        """exp(loss); infinite on overflow. None for pairs, whose loss is not per token."""
        if self.num_pairs is not None:
            return None
        return math.exp(self.loss) if self.loss < 700 else math.inf

    @property
    def bits_per_byte(self) -> float | None:
        """loss / ln 2 * tokens / bytes, comparable between models with different tokenizers; None if unknown."""
        if not self.bytes_per_token or self.num_pairs is not None:
            return None
        return self.loss / math.log(2) / self.bytes_per_token

    def row(self) -> dict[str, float | int | None]:
        """Return the result as JSON values."""
        return {
            "loss": self.loss,
            "perplexity": self.perplexity,
            "bits_per_byte": self.bits_per_byte,
            "target_tokens": self.num_targets,
            "pairs": self.num_pairs,
            "reward_accuracy": self.reward_accuracy,
            "reward_margin": self.reward_margin,
        }


@dataclass(frozen=True)
class EvalResults:
    """The result of each named validation set."""

    sets: dict[str, EvalResult]

    @property
    def whole(self) -> EvalResult:
        """The result over all sets as one text: every target token, or pair, counts once."""
        results = list(self.sets.values())
        num_targets = sum(each.num_targets for each in results)
        pairs = [each.num_pairs for each in results if each.num_pairs is not None]
        sizes = [each.num_targets * each.bytes_per_token for each in results if each.bytes_per_token is not None]
        known = num_targets > 0 and len(sizes) == len(self.sets)
        return EvalResult(
            _mean(results, [each.loss for each in results]) or 0.0,
            num_targets,
            sum(sizes) / num_targets if known else None,
            sum(pairs) if pairs else None,
            _mean(results, [each.reward_accuracy for each in results]),
            _mean(results, [each.reward_margin for each in results]),
        )

    def select(self, name: str | None) -> EvalResult:
        """Return the result of the set that `evaluate.select_by` names; None for all sets together."""
        return self.whole if name is None else self.sets[name]

    def row(self, step: int) -> dict[str, Any]:
        """Return the row for metrics.jsonl."""
        sets = {name: result.row() for name, result in self.sets.items()}
        return {"kind": "eval", "step": step, **self.whole.row(), "sets": sets}


def _mean(results: Sequence[EvalResult], values: Sequence[float | None]) -> float | None:
    """Return the mean over the terms of all results; None if one of the values is unknown."""
    known = [value for value in values if value is not None]
    if len(known) < len(results):
        return None
    counts = [each.count for each in results]
    return sum(value * count for value, count in zip(known, counts, strict=True)) / max(1, sum(counts))


def count_labels(objective: Objective, batch: Microbatch) -> Tensor:
    """Return a microbatch's number of loss terms and of labels, for the sums of an evaluation; fp64."""
    return torch.stack([objective.count(batch), (batch.labels != IGNORE).sum()]).double()


def build_result(objective: Objective, sums: Sequence[float], bytes_per_token: float | None) -> EvalResult:
    """Compute the result of a set from its sums: those of `count_labels`, then `Objective.evaluation_sums`."""
    count, num_labels, *totals = sums
    loss, *measures = [total / max(1.0, count) for total in totals]
    pairs = int(count) if objective.unit == "pairs" else None
    rewards = dict(zip(objective.measures, measures, strict=True))
    return EvalResult(loss, int(num_labels), bytes_per_token, pairs, **rewards)


class Evaluator:
    """Evaluates the same held-out sequences of every set each time, in order, divided over the ranks.

    Every rank must have the same weights, also those of other replicas: see `Synchronizer.agreed`.
    """

    def __init__(
        self,
        sets: Sequence[ValidationSet],
        objective: Objective,
        num_sequences: int,
        micro_batch_size: int,
        meshes: Meshes,
        device: torch.device,
        padding: Padding = LONGEST,
    ) -> None:
        """`num_sequences`: the maximum per set. `padding`: the width of microbatches."""
        self.stopped_by: str | None = None
        """The signal that interrupted an evaluation."""
        self._sets = sets
        self._objective = objective
        self._num_sequences = num_sequences
        self._micro_batch_size = micro_batch_size
        self._meshes = meshes
        self._device = device
        self._padding = padding

    def run(
        self, evaluation: Evaluation, stop: StopRequest, beat: Callable[[], None] = lambda: None
    ) -> EvalResults | None:
        """Evaluate all sets; return None if a rank received a stop request meanwhile (see `stopped_by`).

        `beat` is called before each forward pass.
        Collective: every rank runs the same number of forward passes, padded with empty rows at the end.
        """
        width = 3 + len(self._objective.measures)
        sums = torch.zeros(len(self._sets), width, dtype=torch.float64, device=self._device)
        for index, each in enumerate(self._sets):
            for number, microbatch in enumerate(self._microbatches(each.dataset), start=1):
                if number % ROUNDS_PER_LOOK == 0:
                    self.stopped_by = self._agree_to_stop(stop)
                    if self.stopped_by is not None:
                        return None
                beat()
                sums[index, :2] += count_labels(self._objective, microbatch)
                sums[index, 2:] += evaluation.sums(microbatch)
        for group in (self._meshes.loss, self._meshes.outer):
            if group is not None:
                dist.all_reduce(sums, group=group)
        return EvalResults(
            {
                each.name: build_result(self._objective, values, each.bytes_per_token)
                for each, values in zip(self._sets, sums.tolist(), strict=True)
            }
        )

    def _agree_to_stop(self, stop: StopRequest) -> str | None:
        flags = torch.tensor(stop.flags(), dtype=torch.float64, device=self._device)
        dist.all_reduce(flags, group=self._meshes.everyone)
        return agreed_stop(flags.tolist())

    def _microbatches(self, dataset: Dataset) -> Iterator[Microbatch]:
        per_round = self._micro_batch_size * self._meshes.data_size
        stop = min(self._num_sequences, dataset.num_samples)
        for first in range(0, stop, per_round):
            start = first + self._meshes.data_rank * self._micro_batch_size
            whole = read_in_order(dataset, start, self._micro_batch_size, stop, self._padding)
            yield whole.cut(self._meshes.sequence_part).to(self._device)


def read_in_order(dataset: Dataset, start: int, count: int, stop: int, padding: Padding = LONGEST) -> Microbatch:
    """Read sequences start..start+count of a dataset; those from `stop` on repeat sequence 0 without targets."""
    ids = np.arange(start, start + count, dtype=np.int64)
    inside = ids < stop
    samples = dataset.read_samples(np.where(inside, ids, 0))
    samples.labels[~inside] = IGNORE
    return build_microbatch(set_width(samples, padding=padding), ids, ids, padding)


def evaluate_model(
    target: Path, data: Path | None = None, checkpoint: str | None = None, team: Team | None = None
) -> dict[str, Any]:
    """Evaluate a checkpoint of a run, or an HF folder. Collective; the result is the same in every process.

    Args:
        target: a run folder or an HF folder.
        data: text to evaluate on; None for all validation sets of a run.
        checkpoint: newest, best or a step of a run; None for the newest.
        team: the processes that share the model and the text; None for this one alone.

    Returns:
        loss (nats per token), perplexity, bits_per_byte, unigram_entropy (the loss of a model that only knows token
        frequencies, on the same text), tokens, data, sequence_len (tokens per sequence), all over all sets together;
        and sets: the same metrics for each named set. For preference pairs: loss, reward_accuracy and reward_margin per
        pair, pairs and tokens.

    Raises:
        ConfigError: an HF folder without `data`, or a run without held-out text.
    """
    if data is None and is_model_folder(target):
        raise ConfigError(f"{target} is an HF folder without text; give text with --data PATH.")
    team = team or Team(find_device())
    host, reference = Host(team), Host(team)
    model, tokenizer = load_target(target, host, checkpoint)
    sequence_len = _find_window(target, model)
    objective: Objective = CausalLM()
    with ExitStack() as stack:
        if data is None:
            sets, source = open_held_out(target), "held-out text of the run"
            objective = build_objective(read_run_recipe(target).objective)
        else:
            scratch = stack.enter_context(scratch_folder("eval"))
            given, pairs = prepare_given(target, data, model, tokenizer, sequence_len, scratch)
            sets, source = [given], str(data)
            objective = build_objective(read_run_recipe(target).objective) if pairs else objective
        traits = find_traits(model, sequence_len)
        module = ObjectiveModule(model, traits=traits).eval()
        if objective.needs_reference and not read_run_recipe(target).adapter.is_adapter:
            module.refer_to(ObjectiveModule(load_first_weights(target, reference), traits=traits).eval())
        batch = EVAL_TOKENS[team.device.type] // sequence_len

        def add_up(microbatch: Microbatch) -> Tensor:
            sums: Tensor = host.run(lambda: reference.run(lambda: module(microbatch, objective.evaluation_sums)))
            return sums

        results = EvalResults({each.name: _evaluate_set(add_up, objective, each, batch, team) for each in sets})
        entropy = unigram_entropy([each.dataset for each in sets])
        entropies = {each.name: unigram_entropy([each.dataset]) for each in sets}
    return {
        **_render(results.whole, entropy),
        "data": source,
        "sequence_len": sequence_len,
        "sets": {name: _render(result, entropies[name]) for name, result in results.sets.items()},
    }


def _render(result: EvalResult, entropy: float) -> dict[str, Any]:
    if result.num_pairs is not None:
        return {
            "loss": result.loss,
            "reward_accuracy": result.reward_accuracy,
            "reward_margin": result.reward_margin,
            "pairs": result.num_pairs,
            "tokens": result.num_targets,
        }
    return {
        "loss": result.loss,
        "perplexity": result.perplexity,
        "bits_per_byte": result.bits_per_byte,
        "unigram_entropy": entropy,
        "tokens": result.num_targets,
    }


def _evaluate_set(
    add_up: Callable[[Microbatch], Tensor], objective: Objective, given: ValidationSet, batch: int, team: Team
) -> EvalResult:
    """Evaluate a set, divided over the team: every process has the same number of microbatches of `batch` sequences.

    The size of a microbatch does not depend on the number of processes: rounding depends on it.
    """
    sums = torch.zeros(3 + len(objective.measures), dtype=torch.float64, device=team.device)
    num_samples = given.dataset.num_samples
    batch = max(1, min(batch, num_samples))
    for first in range(0, num_samples, batch * team.size):
        start = first + team.rank * batch
        microbatch = read_in_order(given.dataset, start, batch, num_samples).to(team.device)
        sums[:2] += count_labels(objective, microbatch)
        sums[2:] += add_up(microbatch)
    return build_result(objective, team.add_up(sums).tolist(), given.bytes_per_token)


def _find_window(target: Path, model: PreTrainedModel) -> int:
    """Return the tokens per sequence: as in training, if the run or exported folder records it."""
    if not is_model_folder(target):
        return read_run_recipe(target).data.sequence_len
    try:
        length = read_json(target / TRAINING)["sequence_len"]
    except (OSError, ValueError, KeyError, TypeError):
        length = None  # another tool wrote this folder
    if isinstance(length, int) and length > 0:
        return length
    return min(1024, getattr(model.config, "max_position_embeddings", 1024))
