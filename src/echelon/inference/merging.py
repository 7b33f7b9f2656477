"""Merges an adapter into the frozen weights, and measures the difference.

The merge never has more than a few modules in memory. For the comparison the model with the adapter runs first, then,
in its place, the merged one: log-probabilities of a few sequences are kept in between.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from echelon.checkpoint.adapted import read_run_recipe, run_skeleton
from echelon.checkpoint.export import export_run, load_run_model
from echelon.checkpoint.folder import checkpoint_of
from echelon.checkpoint.model_card import render_card
from echelon.data.shards import NO_LABEL, Dataset
from echelon.errors import ConfigError, DataError
from echelon.inference.evaluate import read_in_order
from echelon.inference.held_out import open_run_text
from echelon.inference.target import find_device, load_target
from echelon.stored import write_json, write_text

logger = logging.getLogger(__name__)

COMPARED_SEQUENCES = 32
KEPT_BYTES = 4 * 2**30
"""Of log-probabilities in host memory."""


@dataclass(frozen=True)
class Comparison:
    """A merged model compared with the unmerged one, on `tokens` target tokens of `text` (held-out, or training) text.

    `kl` is the mean over tokens of KL(adapter || merged), in nats; losses are mean cross-entropies.
    """

    kl: float
    loss_adapter: float
    loss_merged: float
    tokens: int
    text: str

    def describe(self) -> str:
        """Return the comparison in one line."""
        return (
            f"merged model compared with the adapter on {self.tokens:,} {self.text} tokens: KL divergence "
            f"{self.kl:.3g} nats per token, loss {self.loss_merged:.4f} (adapter: {self.loss_adapter:.4f})"
        )


def merge_run(run: Path, out: Path, dtype: str, which: str | None) -> Comparison | None:
    """Write a run's checkpoint as an HF folder with the adapter merged, and compare the two models.

    The adapter is merged into the weights that it was trained with, for `qlora` the dequantised ones. The measurements
    are written to merge.json and README.md of the folder.

    Returns:
        The comparison; None if the run's text is no longer available.

    Raises:
        ConfigError: the run trained no adapter, or `out` exists. Also the errors of `export_run`.
    """
    if not read_run_recipe(run).adapter.is_adapter:
        raise ConfigError(f"--merge: the run {run} has no adapter to merge; remove --merge.")
    export_run(run, out, dtype, which, find_device())
    try:
        dataset, text = _find_text(run)
    except DataError as error:
        logger.warning(f"the merged model was not compared with the adapter: {error}")
        return None
    # A model in fp32, and the logits of a sequence.
    device = find_device(num_bytes=5 * sum(each.numel() for each in run_skeleton(run).parameters()))
    kept = list(keep_log_probabilities(load_run_model(run, device, which), dataset))
    comparison = compare_with(kept, load_target(out, device)[0], dataset, text)
    write_json(out / "merge.json", asdict(comparison))
    step = checkpoint_of(run, which).step
    write_text(out / "README.md", render_card(run, step, comparison=comparison.describe()))
    logger.info(comparison.describe())
    return comparison


def _find_text(run: Path) -> tuple[Dataset, str]:
    data = open_run_text(run)
    return (data.validation[0].dataset, "held-out") if data.validation else (data.train, "training")


def keep_log_probabilities(model: PreTrainedModel, dataset: Dataset) -> Iterator[Tensor]:
    """Yield the fp32 log-probabilities at the target tokens of the first sequences, [targets, vocabulary], on the CPU.

    There are `COMPARED_SEQUENCES`, or as many as `KEPT_BYTES` may hold, at least one.
    """
    each_bytes = 4 * dataset.sequence_len * model.get_output_embeddings().weight.shape[0]
    count = max(1, min(COMPARED_SEQUENCES, KEPT_BYTES // each_bytes, dataset.num_samples))
    for index in range(count):
        yield _log_probabilities(model, dataset, index)[0].cpu()


def compare_with(kept: Sequence[Tensor], merged: PreTrainedModel, dataset: Dataset, text: str) -> Comparison:
    """Compare a merged model with what `keep_log_probabilities` yielded of the model with the adapter."""
    sums, count = np.zeros(3), 0
    for index, ours in enumerate(kept):
        theirs, labels = _log_probabilities(merged, dataset, index)
        ours = ours.to(theirs.device)
        kl = F.kl_div(theirs, ours, reduction="sum", log_target=True)
        losses = [F.nll_loss(each, labels, reduction="sum") for each in (ours, theirs)]
        sums += [float(each) for each in (kl, *losses)]
        count += len(labels)
    kl_mean, adapter_loss, merged_loss = (sums / max(1, count)).tolist()
    return Comparison(max(0.0, kl_mean), adapter_loss, merged_loss, count, text)


@torch.no_grad()
def _log_probabilities(model: PreTrainedModel, dataset: Dataset, index: int) -> tuple[Tensor, Tensor]:
    """Return fp32 log-probabilities at a sequence's target tokens, [targets, vocabulary], and the targets."""
    row = read_in_order(dataset, index, 1, dataset.num_samples).to(model.device)
    places = {} if row.position_ids is None else {"position_ids": row.position_ids}
    chosen = row.labels != NO_LABEL
    logits = model(input_ids=row.input_ids, use_cache=False, **places).logits[chosen]
    return F.log_softmax(logits.float(), dim=-1), row.labels[chosen]
