"""What is trained on what: run, model, tokenizer, adapter, data and objective."""

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, field_validator, model_validator

from echelon.recipe.data_formats import check_fields
from echelon.recipe.names import FormatName, ObjectiveName, Options, check_has_options
from echelon.recipe.section import AnyPath, Count, Flag, Number, PathOrName, Positive, Section, Whole, check_folder_name

DEFAULT_VALIDATION_FRACTION = 0.01


def _check_words(key: str, words: tuple[str, ...]) -> tuple[str, ...]:
    """Words of a list, each there once and none of them empty. Raises ValueError naming the key."""
    for place, word in enumerate(words):
        if not word.strip():
            raise ValueError(f"{key} has an empty name; remove it.")
        if word in words[:place]:
            raise ValueError(f"{key} has {word!r} twice; remove one.")
    return words


class RunConfig(Section):
    """The name of the run, where it lives, and the seed everything random is drawn from."""

    name: str = Field(description="Name of the run: letters, digits, `.`, `_` and `-`.")
    dir: AnyPath = Field(
        default_factory=lambda run: Path("runs") / run["name"],
        description="The run folder. Default: `runs/NAME`. Training into an existing one resumes it.",
    )
    seed: Whole = Field(0, ge=0, lt=2**32, description="Seed of the initial weights, the data order and dropout.")

    @field_validator("name")
    @classmethod
    def _name_is_a_folder_name(cls, name: str) -> str:
        return check_folder_name("run.name", name)


class ModelConfig(Section):
    """The model: an existing one to continue from, or the shape of a new one. Exactly one of the two."""

    checkpoint: PathOrName | None = Field(
        None, description="Weights to start from: a folder, a hub id, or the folder of another run."
    )
    config: dict[str, Any] | None = Field(
        None,
        description="A new model, as the fields of its `transformers` config: `model_type` and what differs from that "
        "family's defaults. Without `vocab_size` it takes the tokenizer's, rounded up to a multiple of 64.",
    )
    trust_remote_code: Flag = Field(False, description="Allow code that comes with the checkpoint to run.")
    attn_implementation: str | None = Field(
        None, description="Attention of `transformers`: `sdpa`, `eager`, `flash_attention_2`. Default: its own choice."
    )
    new_tokens: tuple[str, ...] = Field(
        (), description="Tokens to add to the checkpoint's vocabulary, each one id: `[<|im_start|>, <|im_end|>]`."
    )

    @field_validator("new_tokens")
    @classmethod
    def _new_tokens_differ(cls, tokens: tuple[str, ...]) -> tuple[str, ...]:
        return _check_words("model.new_tokens", tokens)

    @model_validator(mode="after")
    def _exactly_one_origin(self) -> Self:
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
        return self


class TrainTokenizerConfig(Section):
    """A byte-level BPE tokenizer trained on the training text."""

    vocab_size: Whole = Field(ge=257, description="Tokens of the new tokenizer, the 256 bytes and specials included.")


class TrainedTokenizerConfig(Section):
    """A tokenizer to be trained before the model is."""

    train: TrainTokenizerConfig = Field(description="Train a byte-level BPE tokenizer on the training text.")


class AdapterConfig(Section):
    """Which parameters are trained: all of them, or a low-rank adapter beside frozen ones."""

    method: Literal["full", "lora", "qlora", "dora"] = Field(
        "full",
        description="`full` trains every parameter; `lora` a low-rank adapter; `qlora` the same beside weights in 4 "
        "bits; `dora` a low-rank direction and a magnitude.",
    )
    r: Count = Field(16, description="Rank of the adapter.")
    alpha: Positive = Field(32.0, description="Scale of the adapter: its output is multiplied by alpha / r.")
    dropout: Number = Field(0.0, ge=0, lt=1, description="Dropout on the adapter's input.")
    target_modules: Literal["all-linear"] | tuple[str, ...] = Field(
        "all-linear",
        description="The linear layers that get an adapter, by the last parts of their names: `[q_proj, v_proj]`. "
        "`all-linear`: all but the head.",
    )
    modules_to_save: tuple[str, ...] = Field(
        (),
        description="Modules that are trained whole beside the adapter, by the last part of their names: the "
        "embedding, the head, norms or linear layers, as `[embed_tokens, lm_head]`. What is tied is trained as one.",
    )
    rslora: Flag = Field(False, description="Multiply by alpha / sqrt(r) instead (rank-stabilised LoRA).")
    init: Literal["default", "pissa"] = Field(
        "default",
        description="First values: `default` adds nothing at first; `pissa` takes the principal singular vectors out "
        "of the frozen weight.",
    )
    quant_type: Literal["nf4", "fp4"] = Field("nf4", description="The 4-bit numbers of `qlora`.")
    double_quant: Flag = Field(True, description="Quantise the scales of `qlora` too.")

    @property
    def is_adapter(self) -> bool:
        """Whether anything is frozen."""
        return self.method != "full"

    @field_validator("target_modules")
    @classmethod
    def _targets_are_named(cls, targets: Any) -> Any:
        if not targets:
            raise ValueError(
                "adapter.target_modules=[] leaves nothing to train; name linear layers, or set it to all-linear."
            )
        return targets

    @field_validator("modules_to_save")
    @classmethod
    def _saved_modules_differ(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        return _check_words("adapter.modules_to_save", names)

    @model_validator(mode="after")
    def _trained_once(self) -> Self:
        both = [name for name in self.modules_to_save if name in self.target_modules]
        if both and self.target_modules != "all-linear":
            raise ValueError(
                f"adapter.modules_to_save and adapter.target_modules both name {both[0]}: it is trained whole, or gets "
                "an adapter; remove it from one."
            )
        return self

    @model_validator(mode="after")
    def _every_key_means_something(self) -> Self:
        for name, field in type(self).model_fields.items():
            if name == "method" or getattr(self, name) == field.default:
                continue
            if self.method == "full":
                raise ValueError(
                    f"adapter.{name}={getattr(self, name)} has no meaning with adapter.method=full, which trains every "
                    "parameter; set adapter.method to lora, qlora or dora, or remove it."
                )
            if name in ("quant_type", "double_quant") and self.method != "qlora":
                raise ValueError(
                    f"adapter.{name}={getattr(self, name)} is of 4-bit weights, which adapter.method={self.method} "
                    "does not have; set adapter.method=qlora, or remove it."
                )
        if self.init == "pissa" and self.method != "lora":
            raise ValueError(
                f"adapter.init=pissa changes the frozen weights, which adapter.method={self.method} does not allow; "
                "use adapter.method=lora, or adapter.init=default."
            )
        return self


class SourceConfig(Section):
    """One source of text."""

    name: str | None = Field(
        None, description="What lines and metrics call it, for example `code`. Default: the last part of `path`."
    )
    path: PathOrName = Field(
        description="A file, a folder (read recursively), a glob, a dataset of `save_to_disk`, the name of one on the "
        "hub (with `format: hub`), or `python-stdlib`: the source of the running Python's standard library, without "
        "its tests."
    )
    format: FormatName = Field("auto", description="`auto` tells it from the file's name.")
    options: Options = Field(None, description="Arguments of a reader of your own, by their names.")
    split: str | None = Field(
        None, description="The split of a Hugging Face dataset, on disk or on the hub, for example `train[:90%]`."
    )
    fields: dict[str, str] = Field(
        default_factory=dict,
        description="The names of the fields in your records where they differ from the format's: `{text: body}`, "
        "`{messages: dialogue, role: speaker}`.",
    )
    max_samples: Count | None = Field(
        None,
        description="Read the first so many records of the source, in its order, and no more; one that cannot be used "
        "counts too. Default: all.",
    )
    weight: Positive | None = Field(
        None,
        description="Share of this source among the sequences, relative to the others; one source with a weight makes "
        "all of them a mixture (1.0 where absent). Only for training. Default: each sequence of each source once an "
        "epoch.",
    )

    @property
    def label(self) -> str:
        """What lines and metrics call the source: its name, or the last part of its path."""
        return self.name or Path(self.path).name or self.path

    @field_validator("path")
    @classmethod
    def _path_is_given(cls, path: str) -> str:
        if not path.strip():
            raise ValueError("a source's path is empty; name a file or a folder.")
        return path


def is_template(text: str) -> bool:
    """Whether a chat template is given as its text, and neither by name nor by path."""
    return "{{" in text or "{%" in text


def expand_sources(value: Any) -> Any:
    """Write the shorthands `train: some/path` and `train: [some/path]` out as a list of `{path: ...}`."""
    sources = [value] if isinstance(value, str | dict | SourceConfig) else value
    if not isinstance(sources, list | tuple):
        return sources
    return [{"path": source} if isinstance(source, str) else source for source in sources]


Sources = Annotated[tuple[SourceConfig, ...], BeforeValidator(expand_sources)]


class DataConfig(Section):
    """The text, how it is cut into sequences, and what is held out of training."""

    train: Sources = Field(min_length=1, description="The text to train on. `train: some/path` is enough for one.")
    validation: Sources = Field((), description="Text to evaluate on. Default: held out of the training text.")
    validation_fraction: Number | None = Field(
        None,
        ge=0,
        lt=1,
        description=f"Share of the training text held out for evaluation, {DEFAULT_VALIDATION_FRACTION} when "
        "`validation` is not given; 0 holds out nothing. Of many documents, by a hash of each; of one, its end.",
    )
    sequence_len: Whole = Field(1024, ge=2, description="Tokens of one sequence.")
    packing: Flag = Field(
        True,
        description="Fill each sequence: plain text is joined and cut at `sequence_len`, other samples are packed "
        "whole. `false`: each document in a sequence of its own.",
    )
    document_mask: Flag | Literal["auto"] = Field(
        "auto",
        description="Keep documents in a sequence from attending to each other. `auto`: off for plain text that is "
        "joined, else on.",
    )
    chat_template: str | None = Field(
        None, description="Template of conversations: a file (Jinja), its text, or a name. Default: the tokenizer's."
    )
    eot_tokens: tuple[str, ...] = Field(
        (),
        description="Further tokens that end a turn, each one id of the tokenizer: learned where one ends what the "
        "assistant says, and generation stops at them.",
    )
    train_on: Literal["assistant", "last", "all"] = Field(
        "assistant",
        description="What of a conversation is learned: every turn of the assistant, the last one, or all its tokens. "
        "A turn with `train: false` is never.",
    )
    system_prompt: str | None = Field(None, description="System message of conversations that have none.")
    on_overlong: Literal["cut", "drop", "refuse"] = Field(
        "cut",
        description="What becomes of a sample longer than `sequence_len`: its end is cut off, it is left out, or the "
        "data is refused; how many, and how many tokens are lost, is printed.",
    )
    document_separator: str | None = Field(
        "eos", description="The token after each document: `eos`, another token by its text, or `null` for none."
    )
    deduplicate: Flag = Field(False, description="Use identical documents once; how many were left out is printed.")
    max_broken_fraction: Number = Field(
        0.001,
        ge=0,
        lt=1,
        description="Share of a source's records that may be unreadable: they are left out, counted and named. Beyond "
        "it the source is refused.",
    )
    prepared_dir: AnyPath | None = Field(
        None, description="Where tokenized text is kept for every run. Default: `prepared` beside the run folder."
    )
    prepare_workers: Count | Literal["auto"] = Field("auto", description="Processes that tokenize.")

    @field_validator("eot_tokens")
    @classmethod
    def _ends_of_turns_differ(cls, tokens: tuple[str, ...]) -> tuple[str, ...]:
        return _check_words("data.eot_tokens", tokens)

    @property
    def is_mixture(self) -> bool:
        """Whether the training sources are read in shares, each at its own pace."""
        return len(self.train) > 1 and any(source.weight is not None for source in self.train)

    @property
    def weights(self) -> tuple[float, ...]:
        """The weight of each source of a mixture."""
        return tuple(1.0 if source.weight is None else source.weight for source in self.train)

    @model_validator(mode="before")
    @classmethod
    def _hold_out_by_default(cls, values: Any) -> Any:
        if isinstance(values, dict) and not values.get("validation") and values.get("validation_fraction") is None:
            return {**values, "validation_fraction": DEFAULT_VALIDATION_FRACTION}
        return values

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        for part, sources in (("train", self.train if self.is_mixture else ()), ("validation", self.validation)):
            labels = [source.label for source in sources]
            for index, label in enumerate(labels):
                if label in labels[:index]:
                    raise ValueError(
                        f"data.{part}.{index} is called {label!r} as data.{part}.{labels.index(label)} is, and "
                        f"metrics tell them apart by name; give it a name: data.{part}.{index}.name."
                    )
        return self

    @model_validator(mode="after")
    def _fields_are_of_the_formats(self) -> Self:
        for part, sources in (("train", self.train), ("validation", self.validation)):
            for index, source in enumerate(sources):
                check_fields(f"data.{part}.{index}", source.format, source.fields)
                check_has_options(f"data.{part}.{index}.format", source.format, source.options)
        return self

    @model_validator(mode="after")
    def _validation_has_no_shares(self) -> Self:
        for index, source in enumerate(self.validation):
            if source.weight is not None:
                raise ValueError(
                    f"data.validation.{index}.weight={source.weight:g} has no meaning: each validation text is "
                    "measured by itself; remove it."
                )
        return self

    @model_validator(mode="after")
    def _one_way_to_hold_out(self) -> Self:
        if self.validation and self.validation_fraction is not None:
            raise ValueError(
                "data.validation and data.validation_fraction are both given; evaluate on texts of their own or on a "
                "share of the training text: remove one."
            )
        return self


class ObjectiveConfig(Section):
    """What is minimised."""

    name: ObjectiveName = Field(
        "causal_lm", description="`causal_lm` predicts the next token; `dpo` prefers chosen over rejected answers."
    )
    options: Options = Field(None, description="Arguments of an objective of your own, by their names.")
    beta: Positive = Field(0.1, description="Of `dpo`: how strongly the model is kept near the reference.")
    loss: Literal["sigmoid", "ipo"] = Field("sigmoid", description="Of `dpo`: the loss of a pair's margin.")
    label_smoothing: Number = Field(
        0.0, ge=0, lt=0.5, description="Of `dpo`: the probability that a preference is the wrong way round."
    )
    router_loss: Flag = Field(
        True, description="Of mixtures of experts: add the router loss that the model's config asks for."
    )

    @model_validator(mode="after")
    def _every_key_means_something(self) -> Self:
        check_has_options("objective.name", self.name, self.options)
        for name in ("beta", "loss", "label_smoothing"):
            if self.name != "dpo" and getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(
                    f"objective.{name}={getattr(self, name)} has no meaning with objective.name={self.name}; set "
                    "objective.name=dpo, or remove it."
                )
        if self.loss == "ipo" and self.label_smoothing:
            raise ValueError(
                f"objective.label_smoothing={self.label_smoothing} is of the sigmoid loss; remove it, or set "
                "objective.loss=sigmoid."
            )
        return self
