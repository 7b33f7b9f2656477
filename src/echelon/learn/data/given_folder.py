"""A prepared folder that a recipe names itself: `data.prepared_dir` with a manifest. The text is not read.

So tokens that were prepared on one machine can be used on others, which need not have the text. The settings that
decided the content are stored beside the tokens, and must be those of the recipe.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from echelon.ground.errors import ConfigError
from echelon.ground.stored import read_json, write_json
from echelon.learn.data.catalog import MANIFEST_NAME, Manifest
from echelon.learn.data.prepare_spec import PrepareSpec
from echelon.learn.data.prepared import PreparedData, open_prepared
from echelon.learn.data.templates import load_template
from echelon.learn.data.tokenizer import tokenizer_fingerprint

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SETTINGS_NAME = "settings.json"
_ADDRESS = re.compile(r"[a-z][a-z0-9+]*:/")


def is_given(spec: PrepareSpec) -> bool:
    """Whether `data.prepared_dir` is itself a prepared folder, instead of a folder of them.

    Raises ConfigError for the address of an object store, which only a container of SageMaker turns into a folder.
    """
    if _ADDRESS.match(str(spec.prepared_dir)):
        raise ConfigError(
            f"data.prepared_dir={str(spec.prepared_dir).replace(':/', '://', 1)}: only jobs with launch.to=sagemaker "
            "take an address; copy it to this machine and give the folder."
        )
    return (spec.prepared_dir / MANIFEST_NAME).is_file()


def describe_settings(spec: PrepareSpec, tokenizer: "PreTrainedTokenizerFast | None") -> dict[str, Any]:
    """What decides the content of a prepared folder besides its text, by recipe key, as JSON holds it.

    Without `tokenizer`, one is trained on the text.
    """
    options = asdict(spec.instruction)
    template, separator = options.pop("chat_template"), options.pop("separator")
    sources = [
        [source.key, source.name, source.split, source.max_samples, dict(source.fields)] for source in _sources(spec)
    ]
    return {
        "tokenizer": spec.tokenizer if tokenizer is None else tokenizer_fingerprint(tokenizer),
        "model.new_tokens": list(spec.new_tokens),
        "data.train and data.validation": sources,
        "data.validation_fraction": 0.0 if spec.validation else spec.validation_fraction,
        "data.document_separator": separator,
        "data.deduplicate": spec.deduplicate,
        "data.max_broken_fraction": spec.max_broken_fraction,
        "data.chat_template": template and sha256(load_template(template).encode()).hexdigest(),
        **{f"data.{name}": list(value) if isinstance(value, tuple) else value for name, value in options.items()},
    }


def _sources(spec: PrepareSpec) -> tuple[Any, ...]:
    return (*spec.train, *spec.validation)


def save_settings(folder: Path, spec: PrepareSpec, tokenizer: "PreTrainedTokenizerFast | None") -> None:
    """Write what decided the content of a prepared folder."""
    write_json(folder / SETTINGS_NAME, describe_settings(spec, tokenizer))


def open_given(
    spec: PrepareSpec,
    tokenizer: "PreTrainedTokenizerFast | None",
    find_obstacle: Callable[[], str | None],
    *,
    verify: bool = False,
) -> PreparedData:
    """Open the folder that the recipe names.

    Raises ConfigError for a setting of the recipe with which it would have another content, and the errors of
    `open_prepared`.
    """
    folder = spec.prepared_dir
    try:
        stored = read_json(folder / SETTINGS_NAME)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"data.prepared_dir={folder}: {SETTINGS_NAME} cannot be read ({error}), so it is unknown for which recipe "
            "it was made; run `echelon data --prepare` again, with this version of echelon."
        ) from error
    _refuse_differences(folder, stored, describe_settings(spec, tokenizer))
    prepared = open_prepared(folder, spec.sequence_len, spec.document_mask, verify=verify)
    _refuse_other_samples(folder, spec, prepared.manifest)
    obstacle = find_obstacle() if prepared.apart else None
    if obstacle is not None:
        raise ConfigError(
            f"data.prepared_dir={folder} has sequences of several documents: {obstacle}; prepare it with "
            "data.packing=false."
        )
    return replace(prepared, loaded=tokenizer)


def _refuse_differences(folder: Path, stored: Any, wanted: Mapping[str, Any]) -> None:
    settings = stored if isinstance(stored, dict) else {}
    different = [key for key, value in wanted.items() if key not in settings or settings[key] != value]
    if different:
        raise ConfigError(
            f"data.prepared_dir={folder} was prepared with another {' and another '.join(different)}; run `echelon "
            "data --prepare` with this recipe, or use the recipe with which it was prepared."
        )


def _refuse_other_samples(folder: Path, spec: PrepareSpec, manifest: Manifest) -> None:
    rule = manifest.samples
    packing = True if rule is None else rule.packing
    for key, asked, actual in (
        ("data.packing", packing if spec.packing == "auto" else spec.packing, packing),
        ("data.on_overlong", spec.on_overlong, spec.on_overlong if rule is None else rule.on_overlong),
    ):
        if asked != actual:
            raise ConfigError(
                f"data.prepared_dir={folder} was prepared with {key}={str(actual).lower()}, but the recipe has "
                f"{str(asked).lower()}; prepare it again, or change {key}."
            )
