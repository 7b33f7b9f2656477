"""Merges an adapter into the frozen weights, and measures the difference."""

import logging
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from echelon.checkpoint.adapted import load_adapted, read_run_recipe, run_skeleton
from echelon.checkpoint.export import export_run
from echelon.checkpoint.model_card import render_card
from echelon.data.shards import NO_LABEL, Dataset
from echelon.errors import ConfigError, DataError
from echelon.inference.evaluate import read_in_order
from echelon.inference.held_out import open_run_text
from echelon.inference.target import find_device, load_target
from echelon.stored import write_json, write_text

logger = logging.getLogger(__name__)

COMPARED_SEQUENCES = 32


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
        ConfigError: the run trained no adapter, or `out` exists. Also the errors of `export_run` and `load_adapted`.
    """
    if not read_run_recipe(run).adapter.is_adapter:
        raise ConfigError(f"--merge: the run {run} has no adapter to merge; remove --merge.")
    # At most two models in fp32, and the logits of a sequence.
    device = find_device(num_bytes=10 * sum(each.numel() for each in run_skeleton(run).parameters()))
    adapted = load_adapted(run, device, which)
    export_run(run, out, dtype, which, adapted)
    try:
        dataset, text = _find_text(run)
    except DataError as error:
        logger.warning(f"the merged model was not compared with the adapter: {error}")
        return None
    merged, _ = load_target(out, device)
    comparison = compare_models(adapted.model, merged, dataset, text)
    write_json(out / "merge.json", asdict(comparison))
    write_text(out / "README.md", render_card(run, adapted.step, comparison=comparison.describe()))
    logger.info(comparison.describe())
    return comparison


def _find_text(run: Path) -> tuple[Dataset, str]:
    data = open_run_text(run)
    return (data.validation[0].dataset, "held-out") if data.validation else (data.train, "training")


@torch.no_grad()
def compare_models(adapter: nn.Module, merged: nn.Module, dataset: Dataset, text: str) -> Comparison:
    """Compare both models on the first sequences of a dataset, one at a time; log-probabilities are in fp32."""
    device = next(merged.parameters()).device
    sums, count = np.zeros(3), 0
    for index in range(min(COMPARED_SEQUENCES, dataset.num_samples)):
        row = read_in_order(dataset, index, 1, dataset.num_samples).to(device)
        places = {} if row.position_ids is None else {"position_ids": row.position_ids}
        chosen = row.labels != NO_LABEL
        ours, theirs = (
            F.log_softmax(model(input_ids=row.input_ids, use_cache=False, **places).logits[chosen].float(), dim=-1)
            for model in (adapter, merged)
        )
        labels = row.labels[chosen]
        kl = F.kl_div(theirs, ours, reduction="sum", log_target=True)
        losses = [F.nll_loss(each, labels, reduction="sum") for each in (ours, theirs)]
        sums += [float(each) for each in (kl, *losses)]
        count += len(labels)
    kl_mean, adapter_loss, merged_loss = (sums / max(1, count)).tolist()
    return Comparison(max(0.0, kl_mean), adapter_loss, merged_loss, count, text)
