"""The parts that a recipe can name: tables of optimizers, file formats and objectives, and others by entry points.

To add an optimizer, a format or an objective, write a file and add a row here. A row holds the import path of the part,
which is imported when it is used. An engine is a builder and a row that an entry point names.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Annotated, Any, Literal

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from echelon.ground.extensions import EXTENSION, is_extension
from echelon.ground.plugins import Plugins
from echelon.ground.sizes import join_words
from echelon.recipe.data_formats import RECORD_FORMATS
from echelon.recipe.key_limits import Limit
from echelon.recipe.section import Section


@dataclass(frozen=True)
class OptimizerRow:
    """The import path of the builder, `build(config, is_layer_matrix)`, and the size of the optimizer's state.

    `moments` is the number of state values per parameter of the matrices in the layers, `moments_elsewhere` that of all
    other parameters; None: the same number. `packed`: the values are stored in 8 bits.
    """

    place: str
    moments: int
    moments_elsewhere: int | None = None
    packed: bool = False


OPTIMIZERS: dict[str, OptimizerRow] = {
    "adamw": OptimizerRow("echelon.learn.optimizer.rules:build_adamw", moments=2),
    "adamw_8bit": OptimizerRow("echelon.learn.optimizer.rules:build_adamw", moments=2, packed=True),
    "adafactor": OptimizerRow("echelon.learn.optimizer.adafactor:build_adafactor", moments=0),
    "lion": OptimizerRow("echelon.learn.optimizer.rules:build_lion", moments=1),
    "muon": OptimizerRow("echelon.learn.optimizer.muon:build_muon", moments=1, moments_elsewhere=2),
    "sgd": OptimizerRow("echelon.learn.optimizer.rules:build_sgd", moments=1),
}
"""The optimizers by `optim.name`."""

OPTIMIZER_FROM_OUTSIDE = OptimizerRow("", moments=2)
"""The assumption for an optimizer without a row: as many moments as AdamW."""

_TEXT_SUFFIXES = """
    .txt .text .md .markdown .rst .tex .org .adoc .log .csv .tsv .json .yaml .yml .toml .ini .cfg
    .conf .xml .html .htm .css .scss .sql .py .pyi .pyx .c .h .cc .cpp .cxx .hpp .hh .cu .cuh .m .mm .java .kt
    .scala .go .rs .swift .js .jsx .ts .tsx .vue .rb .php .pl .pm .lua .r .jl .hs .ml .mli .ex .exs .erl .clj
    .lisp .el .scm .f90 .f .cs .fs .vb .dart .zig .nim .sh .bash .zsh .fish .ps1 .bat .cmake .mk .proto .graphql
    .tf .gradle .srt .vtt
"""


@dataclass(frozen=True)
class FormatRow:
    """The import path of a format's reader, and the suffixes of its files.

    `in_folders`: in a folder, files with these suffixes are read as this format; not so for .bin and .npy, which have
    many uses. `has_records`: the files hold records with named fields, which a recipe can rename.
    """

    place: str
    suffixes: tuple[str, ...] = ()
    compressible: bool = False
    in_folders: bool = True
    has_records: bool = False


_READERS = "echelon.learn.data.readers"

FORMATS: dict[str, FormatRow] = {
    "text": FormatRow(f"{_READERS}.text:TextReader", tuple(sorted(_TEXT_SUFFIXES.split())), compressible=True),
    "jsonl": FormatRow(f"{_READERS}.lines:JsonLinesReader", (".jsonl", ".ndjson"), compressible=True, has_records=True),
    "json": FormatRow(f"{_READERS}.arrays:ArrayReader", compressible=True, has_records=True),
    "csv": FormatRow(f"{_READERS}.separated:SeparatedReader", (".csv", ".tsv"), compressible=True, has_records=True),
    "parquet": FormatRow(f"{_READERS}.columns:ParquetReader", (".parquet", ".pq"), has_records=True),
    "arrow": FormatRow(f"{_READERS}.columns:ArrowReader", (".arrow", ".feather", ".ipc"), has_records=True),
    "hub": FormatRow(f"{_READERS}.datasets:HubReader", in_folders=False, has_records=True),
    "mds": FormatRow(f"{_READERS}.mds:MdsReader", (".mds",), compressible=True, has_records=True),
    "nanogpt": FormatRow(f"{_READERS}.ids:NanogptReader", (".bin",), in_folders=False),
    "npy": FormatRow(f"{_READERS}.ids:NumpyReader", (".npy",), in_folders=False),
    "megatron": FormatRow(f"{_READERS}.megatron:MegatronReader", (".idx",), in_folders=False),
}
"""The file formats by `data.train[].format`."""


Answers = Literal["pairs", "judged", "prompts", "labelled"]
"""What the data of an objective on answers has: pairs of answers to one prompt; single answers, each judged good or
bad; prompts alone, which the model answers during training; or texts, each with a label."""

Head = Literal["vocabulary", "score"]
"""What a model computes from its last hidden states: a number for each token of the vocabulary, or scores of a text."""


@dataclass(frozen=True)
class ObjectiveRow:
    """The import path of the builder, which is called with the recipe's section, and what the objective needs.

    `answers`: what its data must be; None: single texts. `needs_reference`: whether it compares with the weights that
    training starts from. `losses`: the values of `objective.loss`, the default first. `head`: that of the model.
    """

    place: str
    answers: Answers | None = None
    needs_reference: bool = False
    losses: tuple[str, ...] = ()
    head: Head = "vocabulary"


_OBJECTIVES = "echelon.learn.objectives"
_DPO_LOSSES = (
    "sigmoid", "sigmoid_norm", "hinge", "ipo", "robust", "exo_pair", "nca_pair", "sppo_hard", "apo_zero", "apo_down"
)  # fmt: skip

OBJECTIVES: dict[str, ObjectiveRow] = {
    "causal_lm": ObjectiveRow(f"{_OBJECTIVES}.causal_lm:build_causal_lm"),
    "dpo": ObjectiveRow(f"{_OBJECTIVES}.pairs:build_dpo", "pairs", True, losses=_DPO_LOSSES),
    "orpo": ObjectiveRow(f"{_OBJECTIVES}.pairs:build_orpo", "pairs"),
    "simpo": ObjectiveRow(f"{_OBJECTIVES}.pairs:build_simpo", "pairs"),
    "cpo": ObjectiveRow(f"{_OBJECTIVES}.pairs:build_cpo", "pairs", losses=("sigmoid", "hinge", "ipo")),
    "kto": ObjectiveRow(f"{_OBJECTIVES}.kto:build_kto", "judged", True, losses=("kto", "apo_zero_unpaired")),
    "distill": ObjectiveRow(f"{_OBJECTIVES}.distill:build_distill", losses=("forward", "reverse", "jsd")),
    "grpo": ObjectiveRow(f"{_OBJECTIVES}.grpo:build_grpo", "prompts"),
    "reward": ObjectiveRow(f"{_OBJECTIVES}.scores:build_reward", "pairs", head="score"),
    "classification": ObjectiveRow(f"{_OBJECTIVES}.scores:build_classification", "labelled", head="score"),
}
"""The objectives by `objective.name`."""


def list_objectives(compares: Answers) -> str:
    """Name the objectives on such answers, for a message: `dpo or orpo`."""
    return join_words([name for name, row in OBJECTIVES.items() if row.answers == compares])


NATIVE = "native"


@dataclass(frozen=True)
class EngineRow:
    """One engine.

    Attributes:
        place: of the builder, `package.module:function`; it is called with an EngineSpec.
        section: for an engine of another package: the recipe's section of the engine's name, which only it reads.
        package: the package that it imports; the extra that installs it has the engine's name.
        strategies: the strategies of a plan that it can run, which `parallel: auto` chooses from; None: all.
        compiles: whether it can compile layers; `train.compile: auto` is off where it cannot.
        limits: the other keys of a recipe that it restricts.
        purpose: what it is for, for the user who chooses an engine.
        instead: what the native engine has in place of it.
        check: `package.module:function` without torch, called with a recipe and its plan; raises ConfigError or
            PlanError for what the limits cannot say.
    """

    place: str
    section: type[Section] | None = None
    package: str | None = None
    strategies: tuple[str, ...] | None = None
    compiles: bool = True
    limits: tuple[Limit, ...] = ()
    purpose: str = ""
    instead: str = ""
    check: str | None = None


# Parts of echelon and of other packages, by the key of the recipe. docs/new-parts.md says what each of them is.
ENGINES = Plugins[EngineRow]("engines", "engine")
LAUNCHERS = Plugins[Any]("launchers", "launch.to")
SYNCHRONIZERS = Plugins[Any]("synchronizers", "sync.name")
LOOPS = Plugins[Any]("loops", "objective.name")
TRACKERS = Plugins[Any]("trackers", "track")
SAMPLERS = Plugins[Any]("samplers", "rollout.sampler")
REWARDS = Plugins[Any]("rewards", "reward.name")
ENVIRONMENTS = Plugins[Any]("environments", "rollout.environment")
DIALECTS = Plugins[Any]("dialects", "engine")
"""Sections in another tool's spelling: functions that translate one in a draft, and return lines for the user."""

REWARD_MODEL = "model"
"""The name of a reward that is the score of a model, which runs in the training process."""


class OneOf:
    """Marks a text of a recipe that is one of these names, or `package.module:Name` for code outside echelon."""

    def __init__(self, *names: Collection[str], outside: bool = True, hidden: Collection[str] = ()) -> None:
        """`outside`: whether `package.module:Name` is one. `hidden`: names of parts that another key chooses."""
        self._names, self._outside, self._hidden = names, outside, hidden

    @property
    def own(self) -> list[str]:
        """Echelon's own names, which are the same on every machine."""
        names = chain(*(part.own if isinstance(part, Plugins) else part for part in self._names))
        return [name for name in names if name not in self._hidden]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        outside = {"type": "string", "pattern": f"^{EXTENSION.pattern}$", "examples": ["package.module:Name"]}
        named = {"type": "string", "enum": self.own}
        return named if not self._outside else {"anyOf": [named, outside]} if self.own else outside

    def _check(self, name: str) -> str:
        is_known = name not in self._hidden and any(name in names for names in self._names)
        if is_known or (self._outside and EXTENSION.fullmatch(name)):
            return name
        names = [part for part in chain(*self._names) if part not in self._hidden]
        *known, last = [*names, *(["package.module:Name"] if self._outside else [])]
        raise PydanticCustomError("name", f"{', '.join(known)} or {last}" if known else last)


OptimizerName = Annotated[str, OneOf(OPTIMIZERS)]
FormatName = Annotated[str, OneOf(["auto", *FORMATS, *RECORD_FORMATS])]
Target = Annotated[str, OneOf(LAUNCHERS, outside=False)]
Tracker = Annotated[str, OneOf(TRACKERS, outside=False)]
SamplerName = Annotated[str, OneOf(["native"], SAMPLERS, outside=False)]
SynchronizerName = Annotated[str, OneOf(SYNCHRONIZERS, hidden=("quorum",))]
ObjectiveName = Annotated[str, OneOf(OBJECTIVES)]
RewardName = Annotated[str, OneOf(REWARDS, [REWARD_MODEL])]
EnvironmentName = Annotated[str, OneOf(ENVIRONMENTS)]

OwnName = Annotated[str, OneOf()]
Options = dict[str, Any] | None
"""The arguments of a user's own part, by name."""


def check_has_options(key: str, name: str, options: Mapping[str, Any] | None) -> None:
    """Raise ValueError for options of a built-in part, which is configured by other keys of the section."""
    if options and not is_extension(name):
        section = key.rpartition(".")[0]
        raise ValueError(
            f"{section}.options={options} has no meaning with {key}={name}; it is for package.module:Name of your own; "
            "remove it."
        )
