"""Merges an adapter into the frozen weights, and measures the difference.

The merge never has more than a few modules in memory. For the comparison the model with the adapter runs first, then,
in its place, the merged one: log-probabilities of a few sequences are kept in between.
"""

import gc
import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from echelon.ground.errors import ConfigError, DataError
from echelon.ground.stored import read_json, write_json, write_text
from echelon.learn.checkpoint.adapted import read_run_recipe, run_skeleton
from echelon.learn.checkpoint.export import export_run
from echelon.learn.checkpoint.folder import checkpoint_of
from echelon.learn.checkpoint.model_card import render_card
from echelon.learn.data.shards import NO_LABEL, Dataset
from echelon.learn.distributed.runtime import Runtime
from echelon.learn.evaluation import read_in_order
from echelon.learn.opened import OpenedModel, one_process
from echelon.tools.inference.evaluate import open_run_text

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


def merge_run(
    run: Path, out: Path, dtype: str, which: str | None, check: Callable[[Path], object] = lambda writing: None
) -> None:
    """Write a run's checkpoint as an HF folder with the adapter merged; for `check` see `export_run`.

    The adapter is merged into the weights that it was trained with, for `qlora` the dequantised ones.

    Raises:
        ConfigError: the run trained no adapter, or `out` exists. Also the errors of `export_run`.
    """
    if not read_run_recipe(run).adapter.is_adapter:
        raise ConfigError(f"--merge: the run {run} has no adapter to merge; remove --merge.")
    export_run(run, out, dtype, which, one_process().device, check)


def compare_merged(run: Path, out: Path, which: str | None, team: Runtime | None = None) -> Comparison | None:
    """Compare a merged model with the checkpoint that it was merged from, one after the other. Collective.

    The measurements are written to merge.json and README.md of the folder `out`.

    Args:
        team: the processes that share each of the two models, and the sequences; None for this one alone.

    Returns:
        The comparison; None if the run's text is no longer available, or has no targets.
    """
    try:
        dataset, text = _find_text(run)
    except DataError as error:
        logger.warning(f"the merged model was not compared with the adapter: {error}")
        return None
    if team is None:  # a model in fp32, and the logits of a sequence
        team = one_process(num_bytes=5 * sum(parameter.numel() for parameter in run_skeleton(run).parameters()))
    kept = _keep_log_probabilities(run, team, which, dataset)
    gc.collect()  # frees the first model: the hooks of `fully_shard` refer to each other
    comparison = _compare(kept, out, team, dataset, text)
    if not comparison.tokens:
        logger.warning(f"the merged model was not compared with the adapter: the {text} text has no targets")
        return None
    if team.rank > 0:
        return comparison
    write_json(out / "merge.json", asdict(comparison))
    step = checkpoint_of(run, which).step
    dtype = read_json(out / "config.json")["dtype"]
    write_text(out / "README.md", render_card(run, step, comparison=comparison.describe(), dtype=dtype))
    logger.info(comparison.describe())
    return comparison


def _find_text(run: Path) -> tuple[Dataset, str]:
    data = open_run_text(run)
    return (data.validation[0].dataset, "held-out") if data.validation else (data.train, "training")


def _keep_log_probabilities(run: Path, team: Runtime, which: str | None, dataset: Dataset) -> list[Tensor]:
    """Return the log-probabilities by the adapter at the targets of this process's sequences, on the CPU.

    Together the processes have the first `COMPARED_SEQUENCES`, or as many as `KEPT_BYTES` of each may hold, at least
    one.
    """
    opened = OpenedModel(run, which, team, may_score=False)
    each_bytes = 4 * dataset.sequence_len * opened.model.get_output_embeddings().weight.shape[0]
    rounds = -(-min(COMPARED_SEQUENCES, dataset.num_samples) // opened.size)
    mine = (number * opened.size + opened.rank for number in range(max(1, min(rounds, KEPT_BYTES // each_bytes))))
    return [opened.run(partial(_log_probabilities, opened.model, dataset, index))[0].cpu() for index in mine]


def _compare(kept: Sequence[Tensor], out: Path, team: Runtime, dataset: Dataset, text: str) -> Comparison:
    """Compare a merged model with what `_keep_log_probabilities` returned of the model with the adapter."""
    merged = OpenedModel(out, None, team, may_score=False)
    sums = torch.zeros(4, dtype=torch.float64, device=team.device)
    for number, of_adapter in enumerate(kept):
        work = partial(_log_probabilities, merged.model, dataset, number * merged.size + merged.rank)
        theirs, labels = merged.run(work)
        ours = of_adapter.to(team.device)
        kl = F.kl_div(theirs, ours, reduction="sum", log_target=True)
        losses = [F.nll_loss(logits, labels, reduction="sum") for logits in (ours, theirs)]
        sums += torch.stack([kl, *losses, torch.tensor(len(labels), device=team.device)])
    merged.add_up(sums)
    *totals, count = sums.tolist()
    kl_mean, adapter_loss, merged_loss = (total / max(1.0, count) for total in totals)
    return Comparison(max(0.0, kl_mean), adapter_loss, merged_loss, int(count), text)


def _log_probabilities(model: PreTrainedModel, dataset: Dataset, index: int) -> tuple[Tensor, Tensor]:
    """Return fp32 log-probabilities at a sequence's target tokens, [targets, vocabulary], and the targets."""
    row = read_in_order(dataset, index, 1, min(COMPARED_SEQUENCES, dataset.num_samples)).to(model.device)
    places = {} if row.position_ids is None else {"position_ids": row.position_ids}
    chosen = row.labels != NO_LABEL
    logits = model(input_ids=row.input_ids, use_cache=False, **places).logits[chosen]
    return F.log_softmax(logits.float(), dim=-1), row.labels[chosen]
