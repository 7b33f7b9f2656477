"""What decides the content of prepared data: the recipe's settings, as `prepare` takes them."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from echelon.learn.data.preflight import InstructionOptions
from echelon.learn.data.prepared import DocumentMask
from echelon.learn.data.shards import MAX_SHARD_TOKENS
from echelon.learn.data.source import Source
from echelon.learn.data.stream.options import StreamOptions, stream_options
from echelon.learn.data.tokenizer import EOS
from echelon.learn.model.model_folder import find_model_dir
from echelon.recipe.data_formats import LABELLED_FORMAT

if TYPE_CHECKING:
    from echelon.recipe.document import Recipe

Packing = bool | Literal["auto"]
"""`data.packing`: whether samples share sequences. `auto`: if the model can keep their documents apart."""


@dataclass(frozen=True)
class PrepareSpec:
    """The input of `prepare`. `tokenizer`: a name, a vocabulary size to train, or None for the checkpoint's.

    `tokenizer_name`: how messages name it; by default the path that it was loaded from.
    """

    train: tuple[Source, ...]
    validation: tuple[Source, ...]
    validation_fraction: float
    tokenizer: str | int | None
    checkpoint: str | None
    prepared_dir: Path
    sequence_len: int
    prepared_remote: str | None = None
    stream: StreamOptions | None = None
    workers: int | None = None
    trust_remote_code: bool = False
    mixture: bool = False
    separator: str | None = EOS
    deduplicate: bool = False
    max_broken_fraction: float = 0.001
    max_shard_tokens: int = MAX_SHARD_TOKENS
    packing: Packing = "auto"
    document_mask: DocumentMask = "auto"
    on_overlong: Literal["cut", "drop", "refuse"] = "cut"
    instruction: InstructionOptions = field(default_factory=InstructionOptions)
    new_tokens: tuple[str, ...] = ()
    tokenizer_name: str | None = None


def prepare_spec(recipe: "Recipe") -> PrepareSpec:
    """Collect the recipe's settings for its data."""
    data = recipe.data
    tokenizer, keeps_ends = recipe.tokenizer, recipe.draws_answers or recipe.objective.scores_texts
    is_labelled = recipe.objective.row.answers == "labelled"
    records = LABELLED_FORMAT if is_labelled else None
    return PrepareSpec(
        train=_sources("data.train", data.train, records, by_files=data.stream is not None),
        validation=_sources("data.validation", data.validation, records),
        validation_fraction=data.validation_fraction or 0.0,
        tokenizer=tokenizer if tokenizer is None or isinstance(tokenizer, str) else tokenizer.train.vocab_size,
        checkpoint=recipe.model.checkpoint and find_model_dir(recipe.model.checkpoint),
        prepared_dir=Path(recipe.prepared_dir),
        sequence_len=recipe.sample_len,
        prepared_remote=data.prepared_remote,
        stream=stream_options(recipe),
        workers=None if data.prepare_workers == "auto" else int(data.prepare_workers),
        trust_remote_code=recipe.model.trust_remote_code,
        mixture=data.is_mixture,
        separator=data.document_separator,
        deduplicate=data.deduplicate,
        max_broken_fraction=data.max_broken_fraction,
        # With `judged`, the answer of a sequence is compared with the prompt of the next one.
        packing=False if recipe.samples_answers or recipe.objective.row.answers == "judged" else data.packing,
        document_mask=data.document_mask,
        # The end of a prompt is what the model answers to, and that of a text is where it has its score.
        on_overlong="drop" if keeps_ends and data.on_overlong == "cut" else data.on_overlong,
        instruction=InstructionOptions(
            chat_template=data.chat_template,
            train_on=data.train_on,
            system_prompt=data.system_prompt,
            separator=data.document_separator,
            answers=recipe.objective.row.answers,
            eot_tokens=data.eot_tokens,
            scores_texts=recipe.objective.scores_texts,
            labels=recipe.objective.labels,
            takes_prompts=recipe.objective.on_policy_fraction == 1,
            max_text_tokens=recipe.sample_len if is_labelled and data.on_overlong == "cut" else None,
        ),
        new_tokens=recipe.model.new_tokens,
    )


def _sources(key: str, configs: Sequence[Any], records: str | None, by_files: bool = False) -> tuple[Source, ...]:
    return tuple(
        Source(
            f"{key}.{index}",
            config.path,
            config.format,
            config.fields,
            config.label,
            config.split,
            config.max_samples,
            json.dumps(config.options or {}, sort_keys=True, default=str),
            records,
            by_files,
        )
        for index, config in enumerate(configs)
    )
