"""Sections of the recipe: run, model, tokenizer, adapter and data."""

import math
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from echelon.recipe.data_formats import check_fields
from echelon.recipe.key_limits import Case, Limit, OnlyWith
from echelon.recipe.names import FormatName, Options, OwnName, check_has_options
from echelon.recipe.section import (
    MAX_NAME,
    AnyPath,
    Count,
    Flag,
    Number,
    PathOrName,
    Positive,
    Section,
    Whole,
    address,
    distinct,
    expand_list,
    folder_name,
    rule,
)

DEFAULT_VALIDATION_FRACTION = 0.01


class RunConfig(Section):
    """The name of the run, its folder, and the seed of all random numbers."""

    name: Annotated[str, folder_name("run.name")] = Field(
        description="Name of the run: letters, digits, `.`, `_` and `-`."
    )
    dir: AnyPath = Field(
        default_factory=lambda run: Path("runs") / run["name"],
        description="The run folder. Default: `runs/NAME`. An existing run is resumed.",
    )
    seed: Whole = Field(0, ge=0, lt=2**32, description="Seed of the initial weights, the data order and dropout.")

    @field_validator("dir")
    @classmethod
    def _dir_can_be_moved_aside(cls, path: Path) -> Path:
        if len(path.name.encode()) > MAX_NAME:
            raise ValueError(
                f"run.dir={path}: the name of the folder has {len(path.name.encode())} bytes, and may have {MAX_NAME}; "
                "shorten it."
            )
        return path


ROPE_TYPES = ("linear", "dynamic", "yarn", "llama3")
"""The kinds of scaled rotary positions that a recipe can ask for, as `transformers` names them."""


class ModelConfig(Section):
    """The model: an existing one to continue from, or the shape of a new one. Exactly one of the two."""

    checkpoint: PathOrName | None = Field(
        None, description="Initial weights: a folder, a hub id, or the folder of another run."
    )
    config: dict[str, Any] | None = Field(
        None,
        description="A new model, as fields of its `transformers` config: `model_type`, and the fields that differ "
        "from the family's defaults. The default of `vocab_size` is the tokenizer's size, rounded up to a multiple "
        "of 64.",
    )
    trust_remote_code: Flag = Field(False, description="Allow code that comes with the checkpoint to run.")
    attn_implementation: str | None = Field(
        None,
        description="Attention implementation of `transformers`: `sdpa`, `eager`, `flash_attention_2`, ... Default: "
        "chosen by the device, the model and the data (docs/document-masks.md).",
    )
    rope: dict[str, Any] | None = Field(
        None,
        description="Scale rotary positions, for sequences longer than the model's: `{rope_type: yarn, factor: 4}`. "
        "The fields are those of `rope_parameters` in a config of `transformers` (docs/fine-tuning.md).",
    )
    new_tokens: Annotated[tuple[str, ...], distinct("model.new_tokens")] = Field(
        (), description="Tokens to add to the vocabulary, one id each: `[<|im_start|>, <|im_end|>]`."
    )

    @rule
    def _exactly_one_origin(self) -> None:
        if self.checkpoint is not None and self.config is not None:
            raise ValueError(
                "model.checkpoint and model.config are both given; a model starts from one of them: remove the other."
            )
        if self.checkpoint is None and not self.config:
            raise ValueError(
                "model needs exactly one of model.checkpoint (weights to start from) and model.config "
                "(the shape of a new model); give one."
            )
        if self.config is not None and not isinstance(self.config.get("model_type"), str):
            raise ValueError("model.config.model_type is missing; name the family, for example model_type: llama.")

    @rule
    def _scales_positions(self) -> None:
        if self.rope is None:
            return
        numbers = {name: value for name, value in self.rope.items() if name != "rope_type" and value is not None}
        if (kind := self.rope.get("rope_type")) not in ROPE_TYPES:
            raise ValueError(f"model.rope.rope_type={kind!r:.80} must be one of {', '.join(ROPE_TYPES)}.")
        for name, value in numbers.items():
            if not isinstance(value, int | float) or not (isinstance(value, bool) or 0 < value < math.inf):
                raise ValueError(f"model.rope.{name}={value!r:.80} must be a finite number above 0.")
        if isinstance(factor := numbers.get("factor"), bool | None) or factor < 1:
            raise ValueError("model.rope.factor must be a number of 1 or more: how many times longer sequences may be.")
        if type(length := numbers.get("original_max_position_embeddings", 1)) is not int:
            raise ValueError(f"model.rope.original_max_position_embeddings={length} must be a whole number.")


class TrainTokenizerConfig(Section):
    """A byte-level BPE tokenizer trained on the training text."""

    vocab_size: Whole = Field(ge=257, description="Size of the vocabulary, including the 256 bytes and special tokens.")


class TrainedTokenizerConfig(Section):
    """A tokenizer to be trained before the model is."""

    train: TrainTokenizerConfig = Field(description="Train a byte-level BPE tokenizer on the training text.")


_ADAPTER = OnlyWith("adapter.method", ("lora", "qlora", "dora"), "which trains every parameter")
_NO_ADAPTER = "names expert weights, of which PEFT has no such adapter"
_IN_4_BITS = OnlyWith("adapter.method", ("qlora",), "which has no weights in 4 bits")


class AdapterConfig(Section):
    """Which parameters are trained: all, or a low-rank adapter on frozen weights."""

    around = "adapter."
    limits = (
        Case("adapter.target_parameters", (), (
            Limit("adapter.method", ("lora", "qlora"), _NO_ADAPTER),
            Limit("adapter.dropout", (0.0,), _NO_ADAPTER),
            Limit("adapter.init", ("default",), _NO_ADAPTER),
            Limit("adapter.quantize_experts", (False,), f"{_NO_ADAPTER} in 4 bits"),
        ), "remove adapter.target_parameters"),
        Case("adapter.method", ("qlora", "dora"), (
            Limit("adapter.init", ("default",), "does not allow this start, which changes the frozen weights"),
        ), "use adapter.method=lora"),
    )  # fmt: skip

    method: Literal["full", "lora", "qlora", "dora"] = Field(
        "full",
        description="`full` trains every parameter; `lora` a low-rank adapter; `qlora` the same on 4-bit "
        "weights; `dora` a low-rank direction and a magnitude.",
    )
    r: Annotated[Count, _ADAPTER] = Field(16, description="rank of the adapter.")
    alpha: Annotated[Positive, _ADAPTER] = Field(
        32.0, description="scale: the adapter's output is multiplied by alpha / r."
    )
    dropout: Annotated[Number, Field(ge=0, lt=1), _ADAPTER] = Field(0.0, description="dropout on the adapter's input.")
    target_modules: Annotated[Literal["all-linear"] | tuple[str, ...], _ADAPTER] = Field(
        "all-linear",
        description="the linear layers with an adapter, by the last part of their names: `[q_proj, v_proj]`. "
        "`all-linear`: all except the head.",
    )
    target_parameters: Annotated[
        Literal["experts"] | tuple[str, ...], distinct("adapter.target_parameters"), _ADAPTER
    ] = Field(
        (),
        description="expert weights of a mixture with an adapter in addition, by the ends of their names: "
        "`[experts.gate_up_proj, experts.down_proj]`. `experts`: all of them.",
    )
    modules_to_save: Annotated[tuple[str, ...], distinct("adapter.modules_to_save"), _ADAPTER] = Field(
        (),
        description="modules trained in full in addition to the adapter, by the last part of their names: the "
        "embedding, the head, norms or linear layers, such as `[embed_tokens, lm_head]`. Tied weights are trained as "
        "one.",
    )
    rslora: Annotated[Flag, _ADAPTER] = Field(
        False, description="multiply by alpha / sqrt(r) instead (rank-stabilised LoRA)."
    )
    init: Annotated[Literal["default", "pissa"], _ADAPTER] = Field(
        "default",
        description="initialization: `default` starts with zero output; `pissa` takes the principal singular vectors "
        "out of the frozen weight (with `lora` alone).",
    )
    quant_type: Annotated[Literal["nf4", "fp4"], _IN_4_BITS] = Field("nf4", description="the 4-bit data type.")
    double_quant: Annotated[Flag, _IN_4_BITS] = Field(True, description="also quantize the scales.")
    quantize_experts: Annotated[Flag, _IN_4_BITS] = Field(
        False, description="store the expert weights of a mixture in 4 bits too."
    )

    @property
    def is_adapter(self) -> bool:
        """Whether the weights of the model are frozen."""
        return self.method != "full"

    @rule
    def _something_is_trained(self) -> None:
        if not self.target_modules and not self.target_parameters:
            raise ValueError(
                "adapter.target_modules=[] leaves nothing to train; name linear layers, or set it to all-linear."
            )

    @rule
    def _trained_once(self) -> None:
        both = [name for name in self.modules_to_save if name in self.target_modules]
        if both and self.target_modules != "all-linear":
            raise ValueError(
                f"adapter.modules_to_save and adapter.target_modules both name {both[0]}: it is either trained in full "
                "or gets an adapter; remove it from one of them."
            )


class SourceConfig(Section):
    """One source of text."""

    name: str | None = Field(
        None, description="Its name in messages and metrics, for example `code`. Default: the last part of `path`."
    )
    path: PathOrName = Field(
        description="A file, a folder (read recursively), a glob, a dataset of `save_to_disk`, the name of a dataset "
        "on the hub (with `format: hub`), or `python-stdlib`: the source of the running Python's standard library, "
        "without its tests."
    )
    format: FormatName = Field("auto", description="`auto` detects it from the file name.")
    options: Options = Field(None, description="Arguments of a reader of your own, by their names.")
    split: str | None = Field(
        None, description="The split of a Hugging Face dataset, on disk or on the hub, for example `train[:90%]`."
    )
    fields: dict[str, str] = Field(
        default_factory=dict,
        description="Field names in your records that differ from those of the format: `{text: body}`, "
        "`{messages: dialogue, role: speaker}`.",
    )
    max_samples: Count | None = Field(
        None, description="Read only the first N records of the source; unusable records count too. Default: all."
    )
    weight: Positive | None = Field(
        None,
        description="Relative share of this source among the sequences. If any source has a weight, all sources form "
        "a mixture (default weight 1.0). Only for training. Default: every sequence of each source once per epoch.",
    )

    @property
    def label(self) -> str:
        """The name of the source in messages and metrics; default: the last part of its path."""
        return self.name or Path(self.path).name or self.path

    @field_validator("path")
    @classmethod
    def _path_is_given(cls, path: str) -> str:
        if not path.strip():
            raise ValueError("a source's path is empty; name a file or a folder.")
        return path


def is_template(text: str) -> bool:
    """Return whether a chat template is given as text, not as a name or a path."""
    return "{{" in text or "{%" in text


_SourceOrPath = SourceConfig | str
Sources = Annotated[
    tuple[SourceConfig, ...],
    BeforeValidator(partial(expand_list, key="path"), json_schema_input_type=_SourceOrPath | list[_SourceOrPath]),
]


class StreamConfig(Section):
    """Training text that is prepared while the run trains, instead of before."""

    window: Count = Field(
        description="Sequences in reading order that are shuffled together. A larger window mixes the text better, and "
        "more of it is prepared before the first step."
    )
    cache_gb: Positive = Field(
        20.0,
        description="Prepared tokens that a machine keeps on its disk, in GB (10^9 bytes); those used least recently "
        "are removed, except those of the current window and the next one.",
    )


_WHOLE = "would have to read all of the text first to"


class DataConfig(Section):
    """The data, how it is split into sequences, and what is held out for validation."""

    around = "data."
    limits = (
        Case("data.stream", (), (
            Limit("data.validation_fraction", (None, 0), f"{_WHOLE} hold out a part: name files in data.validation"),
            Limit("data.deduplicate", (False,), f"{_WHOLE} find copies"),
            Limit("data.source", (None,), "reads the batches itself"),
        ), "remove data.stream"),
    )  # fmt: skip

    train: Sources = Field(min_length=1, description="Training data. `train: some/path` is a shorthand for one source.")
    validation: Sources = Field((), description="Validation data. Default: held out of the training data.")
    validation_fraction: Number | None = Field(
        None,
        ge=0,
        lt=1,
        description=f"Fraction of the training data held out for validation, {DEFAULT_VALIDATION_FRACTION} if "
        "`validation` is not given; 0 holds out nothing. Documents are chosen by a hash; of a single document, its "
        "end is held out.",
    )
    stream: StreamConfig | None = Field(
        None,
        description="Prepare the text of `train` while the run trains, a window ahead of it (docs/streaming.md): "
        "`{window: 8192}`. Only then may paths be addresses. Default: all is prepared before the first step.",
    )
    sequence_len: Whole = Field(1024, ge=2, description="Sequence length in tokens.")
    packing: Flag | Literal["auto"] = Field(
        "auto",
        description="Fill each sequence: plain text is joined and split at `sequence_len`, other samples are packed "
        "without splitting. `false`: one document per sequence. `auto`: as `true`, but without packing for samples if "
        "the model cannot keep the documents of a sequence apart; the reason is printed.",
    )
    document_mask: Flag | Literal["auto"] = Field(
        "auto",
        description="Prevent documents in a sequence from attending to each other. `auto`: off for plain text that is "
        "joined, otherwise on.",
    )
    chat_template: str | None = Field(
        None, description="Chat template: a Jinja file, its text, or a name. Default: the tokenizer's."
    )
    eot_tokens: Annotated[tuple[str, ...], distinct("data.eot_tokens")] = Field(
        (),
        description="Additional tokens that end a turn, each a single id of the tokenizer: a target if it ends a "
        "turn of the assistant; generation stops at them.",
    )
    train_on: Literal["assistant", "last", "all"] = Field(
        "assistant",
        description="Targets of a conversation: every turn of the assistant, only the last one, or all tokens. "
        "A turn with `train: false` is never a target.",
    )
    system_prompt: str | None = Field(None, description="System message for conversations without one.")
    on_overlong: Literal["cut", "drop", "refuse"] = Field(
        "cut",
        description="Reaction to a sample longer than `sequence_len`: truncate it, drop it, or refuse the "
        "data. The numbers of samples and lost tokens are printed.",
    )
    document_separator: str | None = Field(
        "eos", description="Token after each document: `eos`, the text of another token, or `null` for none."
    )
    deduplicate: Flag = Field(False, description="Remove duplicate documents; their number is printed.")
    max_broken_fraction: Number = Field(
        0.001,
        ge=0,
        lt=1,
        description="Fraction of a source's records that may be unreadable: they are skipped, counted and listed. "
        "Above this fraction the source is refused: 0.001 allows none of fewer than 1,000.",
    )
    prepared_dir: AnyPath | None = Field(
        None,
        description="Folder of prepared data, shared by all runs; or one prepared folder, which is used without "
        "its text. Default: `prepared` next to the run folder.",
    )
    prepared_remote: Annotated[str, address("data.prepared_remote", "prepared")] | None = Field(
        None,
        description="Object-store address through which machines share prepared data, such as `s3://bucket/prepared`, "
        "`gs://...` or `file:///...`: what is there is downloaded instead of prepared, and what is not is uploaded.",
    )
    prepare_workers: Count | Literal["auto"] = Field("auto", description="Processes that tokenize.")
    source: OwnName | None = Field(
        None,
        description="`package.module:Name` of a source of batches of your own (docs/batches.md), in place of the "
        "samples of `train` in their shuffled order.",
    )
    options: Annotated[Options, OnlyWith("data.source")] = Field(None, description="its arguments, by their names.")

    @property
    def is_mixture(self) -> bool:
        """Whether the training sources are a weighted mixture, each with its own epochs."""
        return len(self.train) > 1 and any(source.weight is not None for source in self.train)

    @property
    def weights(self) -> tuple[float, ...]:
        """The weight of each source of a mixture."""
        return tuple(1.0 if source.weight is None else source.weight for source in self.train)

    @model_validator(mode="before")
    @classmethod
    def _hold_out_by_default(cls, values: Any) -> Any:
        is_open = isinstance(values, dict) and not values.get("validation") and not values.get("stream")
        if is_open and values.get("validation_fraction") is None:
            return {**values, "validation_fraction": DEFAULT_VALIDATION_FRACTION}
        return values

    @rule
    def _a_stream_is_read_once_through(self) -> None:
        for index, source in enumerate(self.train if self.stream else ()):
            for key, value in (("weight", source.weight), ("max_samples", source.max_samples)):
                if value is not None:
                    raise ValueError(
                        f"data.train.{index}.{key}={value:g} does not go with data.stream, which reads each source "
                        "once, in order; remove one of the two."
                    )
            if source.path.startswith("hf://"):
                raise ValueError(
                    f"data.train.{index}.path={source.path} may change during the run; name the dataset as ORG/NAME "
                    "with format: hub, which is read at one commit."
                )

    @rule
    def _names_differ(self) -> None:
        for part, sources in (("train", self.train if self.is_mixture else ()), ("validation", self.validation)):
            labels = [source.label for source in sources]
            for index, label in enumerate(labels):
                if label in labels[:index]:
                    raise ValueError(
                        f"data.{part}.{index} has the name {label!r}, as data.{part}.{labels.index(label)} has, and "
                        f"metrics identify them by name; set another one: data.{part}.{index}.name."
                    )

    @rule
    def _fields_are_of_the_formats(self) -> None:
        for part, sources in (("train", self.train), ("validation", self.validation)):
            for index, source in enumerate(sources):
                check_fields(f"data.{part}.{index}", source.format, source.fields)
                check_has_options(f"data.{part}.{index}.format", source.format, source.options)

    @rule
    def _validation_has_no_shares(self) -> None:
        for index, source in enumerate(self.validation):
            if source.weight is not None:
                raise ValueError(
                    f"data.validation.{index}.weight={source.weight:g} has no effect: each validation set is "
                    "evaluated separately; remove it."
                )

    @rule
    def _one_way_to_hold_out(self) -> None:
        if self.validation and self.validation_fraction is not None:
            raise ValueError(
                "data.validation and data.validation_fraction are both given; evaluate on separate data or on a "
                "fraction of the training data: remove one."
            )
