"""The teacher of a distillation: does it read the recipe's tokens, and are its values prepared?"""

from pathlib import Path
from typing import TYPE_CHECKING

from echelon.ground.errors import ConfigError
from echelon.ground.run_files import is_model_folder, is_run
from echelon.learn.checkpoint.given_models import fingerprint_model
from echelon.learn.data.prepared import PreparedData
from echelon.learn.data.taught import TaughtRecord, find_records, with_teacher
from echelon.learn.data.tokenizer import load_tokenizer
from echelon.learn.model.model_folder import find_model_dir
from echelon.recipe.document import Recipe

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_KEY = "objective.teacher"


def check_teacher(recipe: Recipe, tokenizer: "PreTrainedTokenizerFast") -> None:
    """Refuse a teacher that is not there, or to which a token id means something else than to the recipe's tokenizer.

    A teacher reads ids, so every id of the recipe's tokenizer must be the same token in its own; it may have more.

    Args:
        recipe: with hub ids replaced by local copies.

    Raises:
        ConfigError: it names the first id that differs.
        DataError: the teacher's folder has no tokenizer.
    """
    source = recipe.objective.teacher
    if source is None:
        return
    if not is_model_folder(Path(source)) and not is_run(Path(source)):
        if recipe.objective.top_k is not None:  # its values are there, or `open_taught` says that they are not
            return
        raise ConfigError(f"{_KEY}={source} is no run and no HF folder (config.json); give one of these, or a hub id.")
    theirs = load_tokenizer(find_model_dir(source), recipe.model.trust_remote_code, _KEY)
    if (difference := _find_difference(tokenizer, theirs)) is not None:
        raise ConfigError(
            f"{_KEY}={source} has another tokenizer than the recipe: {difference}. A teacher predicts tokens of its "
            "own tokenizer; use that one (tokenizer: FOLDER), or another teacher."
        )


def _find_difference(ours: "PreTrainedTokenizerFast", theirs: "PreTrainedTokenizerFast") -> str | None:
    names = [{number: token for token, number in one.get_vocab().items()} for one in (ours, theirs)]
    for number in sorted(names[0]):
        token, other = (known.get(number) for known in names)
        if token != other:
            meaning = "none of its tokens" if other is None else repr(other)
            return f"id {number} is {token!r} to the recipe's tokenizer, and {meaning} to the teacher's"
    return None


def describe_values(recipe: Recipe, data: PreparedData, fingerprint: str = "", vocab_size: int = 0) -> TaughtRecord:
    """Return what determines the teacher's values that a recipe with `objective.top_k` needs."""
    objective = recipe.objective
    assert objective.teacher is not None and objective.top_k is not None
    length, kind = data.train.sequence_len, (objective.top_k, objective.temperature)
    return TaughtRecord(objective.teacher, fingerprint, *kind, length, data.apart, vocab_size)


def open_taught(recipe: Recipe, data: PreparedData) -> PreparedData:
    """Return the data with the values of the recipe's teacher, if it has `objective.top_k`; else the data.

    The teacher need not be here; if it is, the values must be its own.

    Args:
        recipe: with hub ids replaced by local copies.

    Raises:
        ConfigError: they are not prepared, or another model has made them.
        DataError: they are damaged.
    """
    if recipe.objective.top_k is None:
        return data
    values = describe_values(recipe, data)
    source, records = Path(values.teacher), [pair for pair in find_records(data) if pair[1].fits(values)]
    fingerprint = fingerprint_model(source) if is_run(source) or is_model_folder(source) else None
    pairs = [pair for pair in records if fingerprint in (None, pair[1].fingerprint)]
    if len(pairs) == 1:
        return with_teacher(data, *pairs[0])
    command = f"`echelon data RECIPE --teacher {values.teacher} --top-k {values.top_k}`"
    if pairs:
        raise ConfigError(
            f"{_KEY}={values.teacher} does not exist here, and {data.path} has the values of {len(pairs)} teachers; "
            "copy the teacher to that path, or delete the folders of the other teachers."
        )
    teachers = sorted({record.teacher for _, record in records})
    made = f" The values there were made by other weights ({', '.join(teachers)})." if teachers else ""
    raise ConfigError(
        f"objective.top_k={values.top_k}: the log-probabilities of {_KEY}={values.teacher} for the data in {data.path} "
        f"are not prepared (objective.temperature={values.temperature:g}, data.sequence_len={values.sequence_len})."
        f"{made} Run {command}, or remove objective.top_k to have the teacher in memory."
    )
