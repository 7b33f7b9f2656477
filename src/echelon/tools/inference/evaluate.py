"""Loss on held-out text: during training on all ranks, and by `echelon eval` for a run or an HF folder."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from echelon.ground.errors import ConfigError
from echelon.ground.run_files import is_model_folder
from echelon.ground.scratch import scratch_folder
from echelon.ground.stored import read_json
from echelon.learn.checkpoint.adapted import read_run_recipe
from echelon.learn.checkpoint.export import TRAINING
from echelon.learn.data.loader import Microbatch
from echelon.learn.data.prepared import ValidationSet
from echelon.learn.data.shards import unigram_entropy
from echelon.learn.engines.engine import Evaluation
from echelon.learn.engines.module_evaluation import ModuleEvaluation
from echelon.learn.evaluation import EvalResult, EvalResults, read_in_order, sum_up
from echelon.learn.model.traits import find_traits
from echelon.learn.objectives.causal_lm import CausalLM
from echelon.learn.objectives.objective import Objective, build_objective
from echelon.learn.objectives.outputs import ObjectiveModule, OutputsFn
from echelon.tools.inference.held_out import find_objective, open_held_out, prepare_given
from echelon.tools.inference.target import find_device, load_first_weights, load_target
from echelon.tools.inference.team import Host, Team

EVAL_TOKENS = {"cuda": 8192, "cpu": 2048}  # tokens per forward pass of `echelon eval`


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
        and sets: the same metrics for each named set. For preferences: loss, reward_accuracy and reward_margin per pair
        or answer, pairs or answers, and tokens; for labelled texts: loss, accuracy, macro_f1, labels (texts, predicted
        and right of each), texts, and tokens.

    Raises:
        ConfigError: an HF folder without `data`, or a run without held-out text.
    """
    if data is None and is_model_folder(target):
        raise ConfigError(f"{target} is an HF folder without text; give text with --data PATH.")
    team = team or Team(find_device())
    host, reference = Host(team), Host(team)
    model, tokenizer = load_target(target, host, checkpoint, may_score=True)
    sequence_len = _find_window(target, model)
    objective: Objective = CausalLM()
    with ExitStack() as stack:
        if data is None:
            recipe = read_run_recipe(target)
            if recipe.draws_answers:
                raise ConfigError(
                    f"{target} was trained from rewards, and its held-out prompts have no answers to evaluate; its own "
                    "evaluations are in metrics.jsonl, or give text with --data PATH."
                )
            sets, source = open_held_out(target), "held-out text of the run"
            # What a model says of text can be told without its teacher.
            objective = CausalLM() if recipe.objective.teacher is not None else build_objective(recipe.objective)
        else:
            scratch = stack.enter_context(scratch_folder("eval"))
            trained = find_objective(target, model)
            given, compares = prepare_given(target, data, model, tokenizer, trained, sequence_len, scratch)
            sets, source = [given], str(data)
            objective = build_objective(trained) if compares else objective
        traits = find_traits(model, sequence_len)
        module = ObjectiveModule(model, traits=traits).eval()
        if objective.needs_reference and not read_run_recipe(target).adapter.is_adapter:
            module.refer_to(ObjectiveModule(load_first_weights(target, reference), traits=traits).eval())
        batch = EVAL_TOKENS[team.device.type] // sequence_len

        def run(microbatch: Microbatch, compute: OutputsFn) -> Tensor:
            found: Tensor = host.run(lambda: reference.run(lambda: module(microbatch, compute)))
            return found

        evaluation = ModuleEvaluation(run, objective)
        results = EvalResults(
            {held_out.name: _evaluate_set(evaluation, objective, held_out, batch, team) for held_out in sets}
        )
        entropy = unigram_entropy([held_out.dataset for held_out in sets])
        entropies = {held_out.name: unigram_entropy([held_out.dataset]) for held_out in sets}
    return {
        **_render(results.whole, entropy),
        "data": source,
        "sequence_len": sequence_len,
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


def _evaluate_set(
    evaluation: Evaluation, objective: Objective, given: ValidationSet, batch: int, team: Team
) -> EvalResult:
    """Evaluate a set, divided over the team: every process has the same number of microbatches of `batch` sequences.

    The size of a microbatch does not depend on the number of processes: rounding depends on it.
    """
    num_samples = given.dataset.num_samples
    batch = max(1, min(batch, num_samples))
    microbatches = (
        read_in_order(given.dataset, first + team.rank * batch, batch, num_samples)
        for first in range(0, num_samples, batch * team.size)
    )
    return sum_up(evaluation, objective, microbatches, team.add_up, team.device, given.bytes_per_token)


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
