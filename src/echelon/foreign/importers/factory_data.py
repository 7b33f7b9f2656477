"""Import the datasets of LLaMA-Factory files: names in `dataset_info.json` or, in v1, a YAML file of datasets."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from echelon.foreign.importers.ledger import Ledger
from echelon.foreign.importers.source_file import find_beside
from echelon.foreign.importers.sources import Read, Wording, build_source, factory_wording, unknown_roles
from echelon.ground.errors import ConfigError
from echelon.ground.stored import read_json, read_text
from echelon.recipe.inputs import is_template
from echelon.recipe.yaml_text import parse_yaml, show_value

_ALPACA = {"prompt": "instruction", "query": "input", "response": "output", "system": "system",
           "history": "history"}  # fmt: skip
_TAGS = {"user_tag": ("user", "human"), "assistant_tag": ("assistant", "gpt"), "system_tag": ("system", "system"),
         "observation_tag": ("tool", "observation")}  # fmt: skip
_MEDIA = ("images", "videos", "audios")
# The supported keys of an entry of dataset_info.json; the keys of other hubs are other addresses of the same data.
_READ = {"hf_hub_url", "file_name", "columns", "tags", "ranking", "formatting", "split", "subset", "num_samples",
         "ms_hub_url", "om_hub_url", "folder"}  # fmt: skip


def read_factory(ledger: Ledger, folder: Path) -> Read:
    """Read the data keys of a LLaMA-Factory file, except lengths.

    `folder` is the file's folder; `dataset_dir` is searched there and in its parents.
    """
    wording = _template(ledger)
    limit = ledger.number("max_samples")
    sources = _sources(ledger, "dataset", folder, limit)
    held_out = _sources(ledger, "eval_dataset", folder, limit)
    if (full := ledger.find("interleave_probs")) is not None:
        shares = ledger.take(full)
        shares = [float(share) for share in shares.split(",")] if isinstance(shares, str) else shares
        for source, share in zip(sources, shares, strict=False):
            source["weight"] = share
        ledger.take("mix_strategy")
    plain = ledger.given.get("stage") == "pt"
    return Read(tuple(sources), tuple(held_out), () if wording is None or plain else (wording,), plain or None)


def _template(ledger: Ledger) -> Wording | None:
    if (full := ledger.find("template")) is None:
        return Wording(None, "the tokenizer's own")
    name = str(ledger.take(full))
    wording = factory_wording(name, f"{full}: {name}")
    if ledger.given.get("stage") == "pt":
        if name == "llama3":
            ledger.differ(
                full, "a text ends with the tokenizer's eos in echelon, with <|end_of_text|> in LLaMA-Factory."
            )
        return None
    if wording is None:
        ledger.refuse(
            full, "this template is not known to echelon; remove the key to use the tokenizer's own template."
        )
    elif wording.difference:
        ledger.differ(full, wording.difference)
    return wording


def _sources(ledger: Ledger, name: str, folder: Path, limit: float | None) -> list[dict[str, Any]]:
    value = ledger.peek(name)
    if not (names := ledger.words(name)):
        return []
    data_dir = str(ledger.take("dataset_dir") or ledger.given.get("dataset_dir") or "data")
    table = find_beside(folder, f"{data_dir}/dataset_info.json")
    entries = _read_table(table) if table is not None else {}
    ledger.reasons["data.validation" if name == "eval_dataset" else "data.train"] = f"{name}: {show_value(value)}"
    sources = [_source(ledger, name, Path(data_dir), dataset, entries) for dataset in names]
    for source in sources if limit is not None and name == "dataset" else ():
        source["max_samples"] = min(int(limit or 0), source.get("max_samples", int(limit or 0)))
    return sources


def _read_table(path: Path) -> dict[str, Any]:
    try:
        table = read_json(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as JSON: {error}.") from None
    if not isinstance(table, dict):
        raise ConfigError(f"{path} is not a mapping of datasets; correct it and import the file again.")
    return table


def _source(ledger: Ledger, name: str, data_dir: Path, dataset: str, known: Mapping[str, Any]) -> dict[str, Any]:
    entry = known.get(dataset)
    if not isinstance(entry, dict):
        ledger.differ(name, f"{dataset} was not found in a dataset_info.json in {data_dir}; its path is assumed.")
        return {"path": str(data_dir / f"{dataset}.json")}
    columns, tags = entry.get("columns") or {}, entry.get("tags") or {}
    if media := [column for column in _MEDIA if column in columns]:
        ledger.refuse(name, f"{dataset} has {', '.join(media)}, but echelon trains only on text.")
    if left := sorted(set(entry) - _READ):
        ledger.refuse(name, f"{dataset} in dataset_info.json sets {', '.join(left)}, which echelon does not support.")
    if tags and (unknown := unknown_roles({role: tags.get(tag, default) for tag, (role, default) in _TAGS.items()})):
        ledger.refuse(name, f"{dataset} has the roles {', '.join(unknown)}, which would be read as other roles.")
    form, fields = _form(ledger, name, dataset, entry, columns, tags)
    path = entry.get("hf_hub_url") or str(data_dir / entry.get("file_name", f"{dataset}.json"))
    source = build_source(str(path), form, fields, entry.get("subset"))
    if source.get("format") == "hub":
        source["split"] = entry.get("split", "train")
    if entry.get("num_samples"):
        source["max_samples"] = entry["num_samples"]
    return source


def _form(
    ledger: Ledger,
    name: str,
    dataset: str,
    entry: Mapping[str, Any],
    columns: Mapping[str, str],
    tags: Mapping[str, str],
) -> tuple[str | None, dict[str, str]]:
    is_judged = "kto_tag" in columns and ledger.given.get("stage") == "kto"
    if entry.get("formatting") == "sharegpt":
        return _form_of_turns(entry, columns, tags, is_judged)
    if entry.get("ranking") or is_judged:
        ledger.refuse(
            name, f"{dataset} has preferences as texts, to which LLaMA-Factory applies a chat template and echelon "
            "does not; rewrite them as conversations."
        )  # fmt: skip
        return "preference", {}
    if ledger.given.get("stage") == "pt":
        return None, {"text": columns["prompt"]} if "prompt" in columns else {}
    return "alpaca", {ours: columns[key] for key, ours in _ALPACA.items() if key in columns}


def _form_of_turns(
    entry: Mapping[str, Any], columns: Mapping[str, str], tags: Mapping[str, str], is_judged: bool
) -> tuple[str, dict[str, str]]:
    """Return the format and the field names of records with turns."""
    by_role = tags.get("role_tag") == "role"
    form = "messages" if by_role else "sharegpt"
    keys = ("messages", "role", "content") if by_role else ("conversations", "from", "value")
    theirs = (columns.get("messages"), tags.get("role_tag"), tags.get("content_tag"))
    fields = {ours: name for ours, name in zip(keys, theirs, strict=True) if name}
    fields |= {column: columns[column] for column in ("system", "tools") if column in columns}
    if is_judged:
        judged = {"messages": columns.get("messages", "conversations"), "label": columns["kto_tag"]}
        return "unpaired_messages", {**judged, **_turns(fields)}
    if not entry.get("ranking"):
        return form, fields
    pairs = {"prompt": columns.get("messages", "conversations"), "chosen": columns["chosen"]}
    return "preference", {**pairs, "rejected": columns["rejected"], **_turns(fields)}


def _turns(fields: Mapping[str, str]) -> dict[str, str]:
    """Return the fields of a turn by their names in the format `preference`."""
    ours = {"role": "role", "content": "content", "from": "role", "value": "content"}
    return {ours[key]: name for key, name in fields.items() if key in ours}


_CONVERTERS: Mapping[str, str] = {"alpaca": "alpaca", "sharegpt": "sharegpt", "pair": "preference"}
_READ_V1 = {"path", "source", "converter", "size", "split", "streaming", "weight"}


def read_factory_v1(ledger: Ledger, folder: Path) -> Read:
    """Read the datasets of a v1 file. Only they show whether the objective is DPO; the file does not specify it."""
    text = ledger.take("custom_chat_template")
    wording = Wording(text, "custom_chat_template") if text else Wording(None, "the tokenizer's own")
    if text and not is_template(str(text)):
        ledger.refuse("custom_chat_template", "it is not a Jinja template.")
    train, held_out = (_sources_v1(ledger, name, folder) for name in ("train_dataset", "eval_dataset"))
    return Read(tuple(train), tuple(held_out), (wording,))


def _sources_v1(ledger: Ledger, name: str, folder: Path) -> list[dict[str, Any]]:
    if (value := ledger.take(name)) is None:
        return []
    ledger.reasons["data.validation" if name == "eval_dataset" else "data.train"] = f"{name}: {value}"
    path = find_beside(folder, str(value))
    if not str(value).endswith((".yaml", ".yml")):
        ledger.refuse(
            name, "its records are in v1's own format, with weights and media; rewrite them as text messages."
        )
        return []
    table = parse_yaml(read_text(path), str(path))[0] if path is not None else None
    if not isinstance(table, dict):
        ledger.refuse(
            name, "the dataset file was not found; run the import in the folder in which the tool is started."
        )  # fmt: skip
        return []
    return [_source_v1(ledger, name, dataset, entry) for dataset, entry in table.items()]


def _source_v1(ledger: Ledger, name: str, dataset: str, entry: Any) -> dict[str, Any]:
    entry = entry if isinstance(entry, dict) else {}
    if left := sorted(set(entry) - _READ_V1):
        ledger.refuse(name, f"{dataset} sets {', '.join(left)}, which echelon does not support.")
    converter = entry.get("converter")
    if converter is not None and converter not in _CONVERTERS:
        ledger.refuse(name, f"{dataset} uses the converter {converter}, which echelon does not support.")
    if converter is None:
        ledger.refuse(
            name, f"the records of {dataset} are in v1's own format, with weights and media; rewrite them as messages."
        )
    if converter == "alpaca":
        ledger.differ(name, "echelon joins instruction and input with a line end, LLaMA-Factory v1 without one.")
    form = _CONVERTERS.get(str(converter), "messages")
    source = build_source(str(entry.get("path", "")), form, {})
    if source.get("format") == "hub":
        source["split"] = entry.get("split", "train")
    if entry.get("size"):
        source["max_samples"] = entry["size"]
    if entry.get("weight") not in (None, 1, 1.0):
        ledger.refuse(
            name, f"{dataset} sets weight, which repeats records; echelon repeats data only with train.epochs."
        )
    return source
