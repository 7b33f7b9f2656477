"""Import the datasets of files of TRL, the alignment handbook and the scripts of transformers."""

from typing import Any

from echelon.foreign.importers.ledger import Ledger, Trainer
from echelon.foreign.importers.sources import Read, build_source, is_hub_id, put_split
from echelon.foreign.importers.wording import Wording
from echelon.recipe.inputs import is_template
from echelon.recipe.yaml_text import show_value

# The columns that a handbook dataset keeps, and the format that each implies.
_COLUMNS = {"messages": "messages", "chosen": "preference", "conversations": "sharegpt",
            "completion": "prompt_completion", "text": None}  # fmt: skip


def read_hf(ledger: Ledger, trainer: Trainer | None) -> Read:
    """Read the data keys of a file of the Hugging Face family, except lengths."""
    wording = _template(ledger)
    mixture = ledger.peek("dataset_mixture")
    if isinstance(mixture, dict):
        train = _mixture(ledger, mixture)
    elif isinstance(ledger.peek("datasets"), list):
        train = _listed(ledger, "datasets")
    elif isinstance(mixer := ledger.peek("dataset_mixer"), dict):
        train = _mixer(ledger, mixer)
    else:
        train = _named(ledger, trainer)
    field = ledger.take("dataset_text_field")
    for source in train if field not in (None, "text") else ():
        source["fields"] = {"text": field}
    limit = ledger.number("max_train_samples")
    for source in train if limit is not None else ():
        source["max_samples"] = int(limit or 0)
    for source in train if trainer == "kto" else ():
        if source.get("format") == "prompt_completion":
            source["format"] = "unpaired_preference"
    plain = True if trainer == "transformers" or field is not None else None
    return Read(tuple(train), tuple(_held_out(ledger, trainer)), () if plain else (wording,), plain)


def _template(ledger: Ledger) -> Wording:
    if (full := ledger.find("chat_template_path", "chat_template")) is None:
        return Wording(None, "the tokenizer's own")
    value = str(ledger.take(full))
    if not is_template(value) and not value.endswith((".jinja", ".j2")):
        ledger.refuse(full, "it is neither a Jinja template nor a .jinja or .j2 file; give one of them.")
    return Wording(value, full if is_template(value) else f"{full}: {value}")


def _mixture(ledger: Ledger, mixture: dict[str, Any]) -> list[dict[str, Any]]:
    ledger.expand("dataset_mixture", mixture)
    size = ledger.find("dataset_mixture.test_split_size")
    if size is not None and isinstance(ledger.given[size], float) and ledger.given[size] < 1:
        ledger.put("data.validation_fraction", ledger.take(size), f"{size}: {show_value(ledger.given[size])}")
        ledger.differ(size, "the held-out documents are selected by a hash of each document, not by a shuffle.")
    elif size is not None:
        ledger.lose(
            size,
            "a number of held-out records is not supported; set data.validation or a fraction, "
            "data.validation_fraction.",
        )
    if ledger.find("dataset_mixture.seed"):
        ledger.need_not("dataset_mixture.seed", "the order follows run.seed.")
    return _listed(ledger, "dataset_mixture.datasets")


def _listed(ledger: Ledger, full: str) -> list[dict[str, Any]]:
    items = ledger.given[full]
    ledger.expand(full, {str(index): item for index, item in enumerate(items)})
    for index, item in enumerate(items):
        ledger.expand(f"{full}.{index}", item if isinstance(item, dict) else {"path": item})
    ledger.reasons["data.train"] = full
    return [_item(ledger, f"{full}.{index}") for index in range(len(items))]


def _item(ledger: Ledger, name: str) -> dict[str, Any]:
    path = str(ledger.take(f"{name}.id", f"{name}.path"))
    config = ledger.take(f"{name}.config", f"{name}.name")
    columns = ledger.peek(f"{name}.columns")
    columns = [str(column) for column in columns] if isinstance(columns, list) else []
    form = next((form for column, form in _COLUMNS.items() if column in columns), None)
    ledger.take(f"{name}.columns")
    if "chat_template_kwargs" in columns:
        ledger.refuse(f"{name}.columns", "template settings per record are not supported.")
    fields = {column: column for column in columns if column in ("prompt",) and form == "preference"}
    source = build_source(path, form, fields, None if config == "default" else config)
    put_split(ledger, f"{name}.split", source)
    _carry_share(ledger, name, source)
    return source


def _carry_share(ledger: Ledger, name: str, source: dict[str, Any]) -> None:
    """Import a fraction of a dataset as a slice of its split."""
    share = ledger.number(f"{name}.weight", f"{name}.fraction")
    if share is not None and share < 1 and "split" in source:
        source["split"] = f"{source['split']}[:{share * 100:g}%]"
        ledger.differ(
            str(next(key for key in (f"{name}.weight", f"{name}.fraction") if key in ledger.given)),
            "the first records are used, not a random selection.",
        )
    elif share is not None and share != 1:
        ledger.refuse(f"{name}.weight", "a part of a dataset is selected by data.train.0.split; this is not a part.")


def _mixer(ledger: Ledger, mixer: dict[str, Any]) -> list[dict[str, Any]]:
    """Import the handbook's older form: `{ID: fraction}`, with training and evaluation splits in a separate key."""
    ledger.take("dataset_mixer")
    splits = ledger.words("dataset_splits")
    ledger.reasons["data.train"] = "dataset_mixer"
    if any(share != 1 for share in mixer.values()):
        ledger.refuse(
            "dataset_mixer", "fractions of datasets are given as splits; list the datasets in dataset_mixture."
        )
    sources = []
    for path in mixer:
        source = build_source(str(path), None, {})
        sources.append({**source, "split": splits[0] if splits else "train"})
    if len(splits) > 1:
        ledger.values["data.validation"] = [{**source, "split": splits[1]} for source in sources]
        ledger.reasons["data.validation"] = "dataset_splits"
    return sources


def _named(ledger: Ledger, trainer: Trainer | None) -> list[dict[str, Any]]:
    if (full := ledger.find("dataset_name", "train_file", "dataset")) is None:
        return []
    ledger.reasons["data.train"] = f"{full}: {show_value(ledger.given[full])}"
    config = ledger.take("dataset_config", "dataset_config_name") if full == "dataset_name" else None
    form, fields = None, {}
    if trainer == "grpo":
        form, fields = "prompt", {"prompt": str(ledger.take("dataset_prompt_column") or "prompt")}
    source = build_source(str(ledger.take(full)), form, fields, config)
    put_split(ledger, "dataset_train_split", source)
    return [source]


def _held_out(ledger: Ledger, trainer: Trainer | None) -> list[dict[str, Any]]:
    if (full := ledger.find("validation_file")) is not None:
        ledger.reasons["data.validation"] = "validation_file"
        return [build_source(str(ledger.take(full)), None, {})]
    evaluates = ledger.given.get("eval_strategy") not in (None, "no")
    name = ledger.given.get("dataset_name")
    if evaluates and trainer not in (None, "transformers") and name is not None and is_hub_id(str(name)):
        split = ledger.take("dataset_test_split")
        ledger.reasons["data.validation"] = "dataset_test_split" if split else "the default of TRL"
        return [{"path": str(name), "format": "hub", "split": split or "test"}]
    if ledger.find("dataset_test_split"):
        ledger.need_not("dataset_test_split", "nothing is evaluated.")
    return []
