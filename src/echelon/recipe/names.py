"""What a recipe can name: a table for each kind of part, and the type of a key that takes such names.

A row is all that echelon has to know of a part beside the file that holds it: adding an optimizer, a file format or an
objective is a new file and a row here. Rows say where a part is, and it is imported when it is used.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from echelon.extensions import EXTENSION, is_extension
from echelon.recipe.data_formats import RECORD_FORMATS


@dataclass(frozen=True)
class OptimizerRow:
    """Where the rule is built, as `build(config, is_layer_matrix)`, and how many numbers it keeps for a trained one.

    `moments` counts those of matrices in the layers; `moments_elsewhere` those of the rest, as many where it is None.
    `packed`: they are stored in 8 bits.
    """

    place: str
    moments: int
    moments_elsewhere: int | None = None
    packed: bool = False


OPTIMIZERS: dict[str, OptimizerRow] = {
    "adamw": OptimizerRow("echelon.optimizer.rules:build_adamw", moments=2),
    "adamw_8bit": OptimizerRow("echelon.optimizer.rules:build_adamw", moments=2, packed=True),
    "adafactor": OptimizerRow("echelon.optimizer.adafactor:build_adafactor", moments=0),
    "lion": OptimizerRow("echelon.optimizer.rules:build_lion", moments=1),
    "muon": OptimizerRow("echelon.optimizer.muon:build_muon", moments=1, moments_elsewhere=2),
    "sgd": OptimizerRow("echelon.optimizer.rules:build_sgd", moments=1),
}
"""By `optim.name`."""

OPTIMIZER_FROM_OUTSIDE = OptimizerRow("", moments=2)
"""What is taken of an optimizer that is no row: moments as AdamW has."""

_TEXT_SUFFIXES = """
    .txt .text .md .markdown .rst .tex .org .adoc .log .csv .tsv .json .yaml .yml .toml .ini .cfg
    .conf .xml .html .htm .css .scss .sql .py .pyi .pyx .c .h .cc .cpp .cxx .hpp .hh .cu .cuh .m .mm .java .kt
    .scala .go .rs .swift .js .jsx .ts .tsx .vue .rb .php .pl .pm .lua .r .jl .hs .ml .mli .ex .exs .erl .clj
    .lisp .el .scm .f90 .f .cs .fs .vb .dart .zig .nim .sh .bash .zsh .fish .ps1 .bat .cmake .mk .proto .graphql
    .tf .gradle .srt .vtt
"""


@dataclass(frozen=True)
class FormatRow:
    """Where the reader of a format is, and the suffixes its files have.

    `in_folders`: files of a folder are taken for it by their suffix. Source trees hold .bin and .npy of every kind.
    `has_records`: its files hold records with named fields, of which a recipe can name those to read.
    """

    place: str
    suffixes: tuple[str, ...] = ()
    compressible: bool = False
    in_folders: bool = True
    has_records: bool = False


_READERS = "echelon.data.readers"

FORMATS: dict[str, FormatRow] = {
    "text": FormatRow(f"{_READERS}.text:TextReader", tuple(sorted(_TEXT_SUFFIXES.split())), compressible=True),
    "jsonl": FormatRow(f"{_READERS}.lines:JsonLinesReader", (".jsonl", ".ndjson"), compressible=True, has_records=True),
    "json": FormatRow(f"{_READERS}.arrays:ArrayReader", compressible=True, has_records=True),
    "csv": FormatRow(f"{_READERS}.separated:SeparatedReader", (".csv", ".tsv"), compressible=True, has_records=True),
    "parquet": FormatRow(f"{_READERS}.columns:ParquetReader", (".parquet", ".pq"), has_records=True),
    "arrow": FormatRow(f"{_READERS}.columns:ArrowReader", (".arrow", ".feather", ".ipc"), has_records=True),
    "hub": FormatRow(f"{_READERS}.datasets:HubReader", in_folders=False, has_records=True),
    "nanogpt": FormatRow(f"{_READERS}.ids:NanogptReader", (".bin",), in_folders=False),
    "npy": FormatRow(f"{_READERS}.ids:NumpyReader", (".npy",), in_folders=False),
    "megatron": FormatRow(f"{_READERS}.megatron:MegatronReader", (".idx",), in_folders=False),
}
"""The formats of files, by `data.train[].format`."""

OBJECTIVES: dict[str, str] = {
    "causal_lm": "echelon.objectives.causal_lm:build_causal_lm",
    "dpo": "echelon.objectives.dpo:build_dpo",
}
"""By `objective.name`. Each is called with the recipe's section."""


SYNCHRONIZERS: dict[str, str] = {"every_step": "echelon.sync.every_step:EveryStep"}
"""By `sync.name`. Each is called with the recipe's section, the replica and the meshes."""

_UNBUILT_SYNCHRONIZERS = ("local_sgd", "diloco", "parameter_server", "quorum")


class OneOf:
    """Marks a text of a recipe that is one of some names, or `package.module:Name` from outside of echelon."""

    def __init__(self, names: Iterable[str]) -> None:
        self.names = list(names)

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        outside = {"type": "string", "pattern": f"^{EXTENSION.pattern}$", "examples": ["package.module:Name"]}
        return {"anyOf": [{"type": "string", "enum": self.names}, outside]} if self.names else outside

    def _check(self, name: str) -> str:
        if name not in self.names and not EXTENSION.fullmatch(name):
            known = f"{', '.join(self.names)} or " if self.names else ""
            raise PydanticCustomError("name", f"{known}package.module:Name")
        return name


OptimizerName = Annotated[str, OneOf(OPTIMIZERS)]
FormatName = Annotated[str, OneOf(["auto", *FORMATS, *RECORD_FORMATS])]
SynchronizerName = Annotated[str, OneOf([*SYNCHRONIZERS, *_UNBUILT_SYNCHRONIZERS])]
ObjectiveName = Annotated[str, OneOf(OBJECTIVES)]


OwnName = Annotated[str, OneOf(())]
Options = dict[str, Any] | None
"""What a part of one's own is made with, by the names of its arguments."""


def check_has_options(key: str, name: str, options: Mapping[str, Any] | None) -> None:
    """Raise ValueError for options of what takes none: a name of echelon's own has keys of its own in the section."""
    if options and not is_extension(name):
        section = key.rpartition(".")[0]
        raise ValueError(
            f"{section}.options={options} has no meaning with {key}={name}; it is for package.module:Name of your own; "
            "remove it."
        )
