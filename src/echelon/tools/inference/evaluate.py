"""Loss on held-out text by `echelon eval`, for a run or an HF folder."""

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from echelon.ground.errors import ConfigError
from echelon.ground.run_files import is_model_folder
from echelon.ground.scratch import scratch_folder
from echelon.learn.checkpoint.adapted import read_run_recipe
from echelon.learn.data.shards import unigram_entropy
from echelon.learn.distributed.runtime import Runtime
from echelon.learn.evaluation import EvalResult, EvalResults
from echelon.learn.objectives.causal_lm import CausalLM
from echelon.learn.opened import OpenedModel, one_process
from echelon.tools.inference.held_out import open_held_out, prepare_given


def evaluate_model(
    target: Path, data: Path | None = None, checkpoint: str | None = None, team: Runtime | None = None
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
        and sets: the same metrics for each named set. For preferences: loss, reward_accuracy and reward_margin per pair
        or answer, pairs or answers, and tokens; for labelled texts: loss, accuracy, macro_f1, labels (texts, predicted
        and right of each), texts, and tokens.

    Raises:
        ConfigError: an HF folder without `data`, or a run without held-out text.
    """
    if data is None and is_model_folder(target):
        raise ConfigError(f"{target} is an HF folder without text; give text with --data PATH.")
    opened = OpenedModel(target, checkpoint, team or one_process())
    with ExitStack() as stack:
        if data is None:
            if read_run_recipe(target).draws_answers:
                raise ConfigError(
                    f"{target} was trained from rewards, and its held-out prompts have no answers to evaluate; its own "
                    "evaluations are in metrics.jsonl, or give text with --data PATH."
                )
            sets, source, objective = open_held_out(target), "held-out text of the run", opened.objective
        else:
            given, compares = prepare_given(opened, data, stack.enter_context(scratch_folder("eval")))
            sets, source, objective = [given], str(data), opened.objective if compares else CausalLM()
        found: dict[str, EvalResult] = {}
        for held_out in sets:
            # The size of a microbatch does not depend on the number of processes: rounding depends on it.
            size = min(opened.plan.micro_batch_size, max(1, held_out.dataset.num_samples))
            result = opened.evaluate(opened.held_out(held_out.dataset, micro_batch_size=size), objective)
            found[held_out.name] = replace(result, bytes_per_token=held_out.bytes_per_token)
        results = EvalResults(found)
        entropy = unigram_entropy([held_out.dataset for held_out in sets])
        entropies = {held_out.name: unigram_entropy([held_out.dataset]) for held_out in sets}
    return {
        **_render(results.whole, entropy),
        "data": source,
        "sequence_len": opened.plan.sequence_len,
        "sets": {name: _render(result, entropies[name]) for name, result in results.sets.items()},
    }


def _render(result: EvalResult, entropy: float) -> dict[str, Any]:
    if not result.is_per_token:
        return {"loss": result.loss, **result.own_measures, result.unit: result.count, "tokens": result.num_targets}
    return {
        "loss": result.loss,
        "perplexity": result.perplexity,
        "bits_per_byte": result.bits_per_byte,
        "unigram_entropy": entropy,
        "tokens": result.num_targets,
    }
