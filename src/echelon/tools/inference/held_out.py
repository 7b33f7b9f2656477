"""The text for `echelon eval`: a run's held-out text, or text that the user gives, read like the run's own."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from echelon.ground.errors import ConfigError, DataError
from echelon.ground.logs import warnings_only
from echelon.ground.run_files import is_run
from echelon.learn.checkpoint.adapted import read_run_recipe
from echelon.learn.data.preflight import InstructionOptions, find_answers
from echelon.learn.data.prepare import prepare
from echelon.learn.data.prepare_spec import PrepareSpec, prepare_spec
from echelon.learn.data.prepared import PreparedData, ValidationSet, open_prepared
from echelon.learn.data.source import Source, list_files
from echelon.learn.model.traits import describe_obstacle
from echelon.learn.opened import OpenedModel
from echelon.recipe.data_formats import LABELLED_FORMAT
from echelon.recipe.document import Recipe
from echelon.recipe.names import Answers, list_objectives
from echelon.run.folder.run_folder import RunFolder

_KINDS: dict[Answers, str] = {
    "pairs": "preference pairs (chosen, rejected)",
    "judged": "judged answers (label)",
    "labelled": "texts with labels (label)",
}


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
    wanted = objective.row.answers
    source = _find_source(path, recipe, LABELLED_FORMAT if wanted == "labelled" else None)
    formats = {file.fields.format for file in list_files(source) if file.fields.format is not None}
    answers = find_answers(formats)
    if answers not in (None, wanted) and not objective.scores_texts:
        raise ConfigError(
            f"--data {path} contains {_KINDS[answers]}, which only a run with objective.name="
            f"{list_objectives(answers)} can be evaluated on; give text or conversations."
        )
    if objective.scores_texts and answers != wanted:
        assert wanted is not None
        raise ConfigError(
            f"--data {path} has other records than {_KINDS[wanted]}; {target} is a model that scores texts "
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
    elif wanted is not None:  # the end of a text is where it has its score
        cut = length if wanted == "labelled" else None
        options = InstructionOptions(answers=wanted, scores_texts=True, labels=objective.labels, max_text_tokens=cut)
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
    own = prepare_spec(recipe)
    instruction = InstructionOptions(separator=own.separator)
    if formats:
        answers = find_answers(formats)
        instruction = replace(own.instruction, chat_template=None, answers=answers, takes_prompts=False)
    return replace(
        spec,
        separator=own.separator,
        packing=own.packing,
        document_mask=own.document_mask,
        on_overlong=own.on_overlong,
        max_broken_fraction=own.max_broken_fraction,
        instruction=instruction,
    )
