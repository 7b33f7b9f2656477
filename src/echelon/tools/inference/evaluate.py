"""`echelon eval` for a run or an HF folder: the loss on its held-out text, or on text that the user gives, which is
read like the run's own; and the tasks of lm-eval, if it is installed."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from echelon.ground.errors import ConfigError, DataError
from echelon.ground.logs import warnings_only
from echelon.ground.run_files import is_model_folder, is_run
from echelon.ground.scratch import scratch_folder
from echelon.learn.benchmarks.harness import Tasks, TaskScores
from echelon.learn.benchmarks.task_files import build_task, read_task
from echelon.learn.checkpoint.adapted import read_run_recipe
from echelon.learn.data.preflight import InstructionOptions, find_answers
from echelon.learn.data.prepare import prepare
from echelon.learn.data.prepare_spec import PrepareSpec, prepare_spec
from echelon.learn.data.prepared import PreparedData, ValidationSet, open_prepared
from echelon.learn.data.shards import unigram_entropy
from echelon.learn.data.source import Source, list_files
from echelon.learn.distributed.objects import broadcast_object
from echelon.learn.distributed.runtime import Runtime
from echelon.learn.evaluation import EvalResult, EvalResults
from echelon.learn.model.traits import describe_obstacle
from echelon.learn.objectives.causal_lm import CausalLM
from echelon.learn.opened import OpenedModel, one_process
from echelon.recipe.data_formats import LABELLED_FORMAT
from echelon.recipe.document import Recipe
from echelon.recipe.names import Answers, list_objectives
from echelon.run.folder.run_folder import RunFolder

_KINDS: dict[Answers, str] = {
    "pairs": "preference pairs (chosen, rejected)",
    "judged": "judged answers (label)",
    "labelled": "texts with labels (label)",
}
_BATCH_SIZE = 8


def open_run_text(run: Path) -> PreparedData:
    """Open the prepared text of a run. Raises DataError if it is no longer available."""
    recipe = read_run_recipe(run)
    return open_prepared(RunFolder(run).text.read_prepared_path(), recipe.sample_len, recipe.data.document_mask)


def open_held_out(run: Path) -> Sequence[ValidationSet]:
    """Open a run's validation sets. Raises ConfigError if it has none."""
    prepared = open_run_text(run)
    if not prepared.validation:
        raise ConfigError(f"{run} has no held-out text (data.validation_fraction is 0); give text with --data PATH.")
    return prepared.validation


def prepare_given(opened: OpenedModel, path: Path, scratch: Path) -> tuple[ValidationSet, bool]:
    """Prepare the user's text in sequences like those of the run; for an HF folder, with a recipe's defaults.

    Conversations are rendered with the tokenizer's template, which is the run's.

    Args:
        scratch: folder for the prepared tokens.

    Returns:
        The set, and whether it consists of preferences or labelled texts.

    Raises:
        ConfigError: preferences or labelled texts for a model not trained on such, or other texts for a model that
            scores them, conversations without a template, or packed documents that the model cannot keep apart.
        DataError: the text cannot be used.
    """
    target, objective, length = opened.source, opened.trained_for, opened.plan.sequence_len
    recipe = read_run_recipe(target) if is_run(target) else None
    expected = objective.row.answers
    source = _find_source(path, recipe, LABELLED_FORMAT if expected == "labelled" else None)
    formats = {file.fields.format for file in list_files(source) if file.fields.format is not None}
    answers = find_answers(formats)
    if answers not in (None, expected) and not objective.scores_texts:
        raise ConfigError(
            f"--data {path} contains {_KINDS[answers]}, which only a run with objective.name="
            f"{list_objectives(answers)} can be evaluated on; give text or conversations."
        )
    if objective.scores_texts and answers != expected:
        assert expected is not None
        raise ConfigError(
            f"--data {path} has other records than {_KINDS[expected]}; {target} is a model that scores texts "
            f"(objective.name={objective.name}), and is evaluated on these alone."
        )
    opened.tokenizer.save_pretrained(scratch / "tokenizer")
    spec = PrepareSpec(
        train=(source,),
        validation=(),
        validation_fraction=0.0,
        tokenizer=str(scratch / "tokenizer"),
        checkpoint=None,
        prepared_dir=scratch / "prepared",
        sequence_len=length,
        tokenizer_name=str(target),
    )
    if recipe is not None:
        spec = _as_own(spec, recipe, formats)
    elif expected is not None:  # the end of a text is where it has its score
        cut = length if expected == "labelled" else None
        options = InstructionOptions(answers=expected, scores_texts=True, labels=objective.labels, max_text_tokens=cut)
        spec = replace(spec, on_overlong="drop", instruction=options)
    with warnings_only("echelon.learn.data"):  # this text is neither trained on nor kept
        prepared = prepare(spec, find_obstacle=lambda: describe_obstacle(opened.traits, opened.model.config))
    [record] = prepared.manifest.streams["train"]
    density = None if record.text_bytes is None else record.text_bytes / max(1, record.tokens)
    return ValidationSet(path.name or str(path), prepared.train, density), answers is not None


def _find_source(path: Path, recipe: Recipe | None, records: str | None) -> Source:
    """Return the source of the text; it uses the field names of the run's sources if they agree and fit the text.

    `records`: the format of all its records, if the model asks for one.
    """
    plain = Source("--data", str(path), records=records)
    namings = {tuple(sorted(source.fields.items())) for source in recipe.data.train} if recipe is not None else set()
    if len(namings) == 1 and (named := replace(plain, fields=dict(namings.pop()))).fields:
        with suppress(ConfigError, DataError):  # then the default field names of the formats are used
            if any(file.fields.format is not None for file in list_files(named)):
                return named
    return plain


def _as_own(spec: PrepareSpec, recipe: Recipe, formats: set[str]) -> PrepareSpec:
    """Apply the sequence settings of a run's recipe; those for conversations only if the text has any."""
    run_spec = prepare_spec(recipe)
    instruction = InstructionOptions(separator=run_spec.separator)
    if formats:
        answers = find_answers(formats)
        instruction = replace(run_spec.instruction, chat_template=None, answers=answers, takes_prompts=False)
    return replace(
        spec,
        separator=run_spec.separator,
        packing=run_spec.packing,
        document_mask=run_spec.document_mask,
        on_overlong=run_spec.on_overlong,
        max_broken_fraction=run_spec.max_broken_fraction,
        instruction=instruction,
    )


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
            held_out_text, compares = prepare_given(opened, data, stack.enter_context(scratch_folder("eval")))
            sets, source, objective = [held_out_text], str(data), opened.objective if compares else CausalLM()
        by_set: dict[str, EvalResult] = {}
        for held_out in sets:
            # The size of a microbatch does not depend on the number of processes: rounding depends on it.
            size = min(opened.plan.micro_batch_size, max(1, held_out.dataset.num_samples))
            result = opened.evaluate(opened.held_out(held_out.dataset, micro_batch_size=size), objective)
            by_set[held_out.name] = replace(result, bytes_per_token=held_out.bytes_per_token)
        results = EvalResults(by_set)
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


def evaluate_with_harness(
    target: Path,
    tasks: Sequence[str | Mapping[str, Any]],
    include_path: Path | None = None,
    limit: int | None = None,
    checkpoint: str | None = None,
    team: Runtime | None = None,
) -> dict[str, Any]:
    """Run lm-eval tasks on the model, without exporting it first. Every process of a team runs all of them.

    Args:
        tasks: names of lm-eval's tasks, or tasks as mappings, as in its task files.
        include_path: a folder with additional task files.
        limit: number of examples per task; None for all.

    Returns:
        The metrics of each task, by lm-eval's names, the same in every process.

    Raises:
        ConfigError: lm-eval is not installed, or has no such task.
    """
    asked = "--lm-eval" if all(isinstance(task, str) for task in tasks) else "--tasks"
    suite = Tasks(tasks, () if include_path is None else (include_path,), asked)
    from echelon.learn.benchmarks.harness_model import AnyPrefix  # lm-eval is there

    opened = OpenedModel(target, checkpoint, team or one_process(), may_score=False)
    scores: TaskScores | None = opened.run(
        lambda: suite.score(AnyPrefix(opened.model, opened.tokenizer, _BATCH_SIZE), limit)
    )
    if opened.size > 1:
        scores = broadcast_object(scores, opened.meshes.everyone)
    assert scores is not None, "the first process has the results"
    return {task: dict(values) for task, values in scores.numbers.items()}


def evaluate_task(
    target: Path, path: Path, checkpoint: str | None = None, team: Runtime | None = None
) -> dict[str, Any]:
    """Score the choices of a .jsonl file with lm-eval. Every process of a team scores all of them.

    Returns:
        task, examples, and three accuracies, each with its standard error: acc by log-likelihood, acc_norm by
        log-likelihood per character of the choice, acc_bytes per UTF-8 byte; and random, the accuracy of guessing.

    Raises:
        ConfigError: the file cannot be used, or lm-eval is not installed.
    """
    examples = read_task(path)
    task = build_task(path.stem, examples)
    scores = evaluate_with_harness(target, [task], checkpoint=checkpoint, team=team)[path.stem]
    names = [f"{name}{end}" for name in ("acc", "acc_norm", "acc_bytes") for end in ("", "_stderr")]
    guessed = sum(1 / len(example.choices) for example in examples) / len(examples)
    result: dict[str, Any] = {"task": path.stem, "examples": len(examples)}
    return result | {name: scores.get(name) for name in names} | {"random": guessed}
