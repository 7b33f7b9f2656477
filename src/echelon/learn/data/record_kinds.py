"""Determine the kind of a source's records: plain text, token ids, or examples of an instruction format.

The kind is set once per source: by `format` or `fields` of the recipe, or by the fields of the first record. A record
of another kind is broken.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from echelon.ground.errors import DataError
from echelon.learn.data.readers import field_names
from echelon.learn.data.readers.arrays import is_array
from echelon.learn.data.readers.record import EITHER_FIELD, ExampleFields, Fields, SourceFile
from echelon.recipe.data_formats import PLAIN_FIELDS, RECORD_FORMATS, recognise_format
from echelon.recipe.names import FORMATS


class NamedFields(Protocol):
    """What the recipe says of a source's records."""

    @property
    def key(self) -> str:
        """The recipe key of the source, for messages."""

    @property
    def format(self) -> str:
        """The format of its files or records; `auto` if they are recognised."""

    @property
    def fields(self) -> Mapping[str, str]:
        """The names of the format's fields in the records."""


def has_records(format: str) -> bool:
    """Whether files of a format contain records with named fields."""
    return format in FORMATS and FORMATS[format].has_records


def settle_fields(source: NamedFields, files: Sequence[SourceFile]) -> tuple[SourceFile, ...]:
    """Set the fields to read in the files of a source.

    Raises DataError if the recipe names fields of an instruction format and the first record has none of them.
    """
    files = _find_arrays(source, files)
    records = [file for file in files if has_records(file.format)]
    if not records:
        return tuple(files)
    fields = _choose_fields(source, records)
    return tuple(replace(file, fields=fields) if has_records(file.format) else file for file in files)


def has_known_fields(renames: Mapping[str, str], names: Collection[str]) -> bool:
    """Whether records with these fields are of a supported kind."""
    known = _own_names(renames, names)
    return not known.isdisjoint(PLAIN_FIELDS) or recognise_format(known) is not None


def _choose_fields(source: NamedFields, records: Sequence[SourceFile]) -> Fields | ExampleFields:
    renames = tuple(sorted(source.fields.items()))
    is_plain = bool(renames) and all(name in PLAIN_FIELDS for name in source.fields)
    if source.format in RECORD_FORMATS and source.format != "tokens":
        return ExampleFields(source.format, renames)
    found = None if is_plain else _recognise(source, records)
    if found is not None:
        return ExampleFields(found, renames)
    if not is_plain and renames:
        raise DataError(
            f"{source.key}.fields: with these names, the first record of {records[0].path} does not have the fields of "
            f"any format; its fields are {', '.join(_first_names(records)) or 'none'}. Set {source.key}.format to one "
            f"of {', '.join(RECORD_FORMATS)}."
        )
    if renames:
        return Fields(source.fields.get("text"), source.fields.get("input_ids"))
    return Fields(text=None) if source.format == "tokens" else EITHER_FIELD


def _recognise(source: NamedFields, records: Sequence[SourceFile]) -> str | None:
    """Recognise the format of the first record. If several match, the one whose fields the recipe names."""
    names = _own_names(source.fields, _first_names(records))
    if source.format == "tokens":
        return "tokens" if "labels" in names else None
    meant = [name for name, row in RECORD_FORMATS.items() if source.fields and set(row.required) <= set(source.fields)]
    return next((name for name in meant if set(source.fields) & set(names)), None) or recognise_format(names)


def _first_names(records: Sequence[SourceFile]) -> tuple[str, ...]:
    """Return the field names of the first record in any of the files."""
    return next((names for file in records if (names := field_names(file))), ())


def _own_names(renames: Mapping[str, str], names: Collection[str]) -> set[str]:
    """Translate the field names of a record to the formats' own names."""
    renamed = {ours for ours, theirs in renames.items() if theirs in names}
    return renamed | (set(names) - set(renames) - set(renames.values()))


def _find_arrays(source: NamedFields, files: Sequence[SourceFile]) -> Sequence[SourceFile]:
    """Treat .json files as arrays of records if all files of the source contain records, else as plain text."""
    is_json = [file.format == "text" and ".json" in file.path.suffixes[-2:] for file in files]
    pairs = list(zip(files, is_json, strict=True))
    if source.format != "auto" or not all(could_be or has_records(file.format) for file, could_be in pairs):
        return files
    found = []
    for file, could_be in pairs:
        array = replace(file, format="json")
        if could_be and is_array(file) and has_known_fields(source.fields, field_names(array)):
            file = array
        found.append(file)
    return found
