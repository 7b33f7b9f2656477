"""Converts weights between checkpoint files and the model in memory, by the rules of `transformers`.

The files of many families differ from the model in memory: GPT-2's names lack a prefix, and Mixtral's files store each
expert separately, while the model has one tensor per layer. `transformers` converts the whole model as it loads and
saves. This module applies the same rules group by group, so that no process needs memory for the whole model. It is the
only module that depends on these internals of `transformers`.
"""

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from echelon.ground.errors import CheckpointError, ConfigError, first_line

try:
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        Concatenate,
        MergeModulelist,
        PrefixChange,
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
    )
except ImportError as error:
    raise ConfigError(
        f"transformers: this version lacks functions that echelon needs to convert checkpoints ({error}); install a "
        "release that echelon allows (pip install 'transformers>=5.17,<6')."
    ) from error

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Conversion:
    """Weights that are converted together, and the weights that they become.

    Attributes:
        sources: the names before the conversion, in the order of their layers and experts.
        targets: the names after the conversion, with shapes.
    """

    sources: tuple[str, ...]
    targets: Mapping[str, Shape]
    _group: "_Group"

    @property
    def only_renames(self) -> bool:
        """Whether this is one weight whose content does not change."""
        return self._group.converter is None

    def convert(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the targets by name, given all sources by name. The result may share memory with them."""
        return self._group.convert(tensors)

    def of_rows(self, rows: slice) -> "Conversion | None":
        """Return the conversion of these rows of its only target; None if rows cannot be converted separately.

        With it a rank reads only its own experts of a fused weight.
        """
        if self._group.converter is None or len(self.targets) != 1 or not _stacks_rows(self._group.converter):
            return None
        (name, shape), sources = next(iter(self.targets.items())), self._group.sources
        if any(len(names) != shape[0] for names in sources.values()):
            return None
        part = {pattern: names[rows] for pattern, names in sources.items()}
        narrow = _Group(self._group.first, part, self._group.converter, self._group.renamings, self._group.skeleton)
        kept = tuple(name for names in part.values() for name in names)
        return Conversion(kept, {name: (len(range(shape[0])[rows]), *shape[1:])}, narrow)


def conversions_to_model(skeleton: PreTrainedModel, stored: Mapping[str, Shape]) -> list[Conversion]:
    """Return the conversions from a checkpoint's files to the model, those that `from_pretrained` applies.

    Args:
        skeleton: the plain model on meta.
        stored: the shape of each weight in the files. Weights that the model does not have are ignored.

    Raises:
        CheckpointError: weights that must be converted together do not fit together.
    """
    renamings, converters = _split(get_model_conversion_mapping(skeleton))
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    live, prefix = skeleton.state_dict(), skeleton.base_model_prefix
    groups: dict[str, _Group] = {}
    for name in sorted(stored, key=dot_natural_key):
        new_name, pattern = rename_source_key(name, renamings, converters, prefix, live)
        if new_name not in live and name in live:
            new_name, pattern = rename_source_key(name, [], [], prefix, live)
        if new_name in live:
            _collect(groups, new_name, name, pattern, by_pattern, skeleton)
    return [_describe(group, stored) for group in groups.values()]


def conversions_to_files(skeleton: PreTrainedModel, live: Mapping[str, Shape]) -> list[Conversion]:
    """Return the conversions from the model to a checkpoint's files, those that `save_pretrained` applies.

    If the rules of `transformers` could not read the result, the weights keep the names they have in the model.

    Args:
        skeleton: the plain model on meta.
        live: the shape of each weight of the model; tied weights once.

    Raises:
        CheckpointError: neither the converted nor the original names could be read.
    """
    # The prefix of a larger model, of which this one may be a part, is not restored: its config is not exported.
    rules = get_model_conversion_mapping(skeleton, add_legacy=False)
    rules = [rule for rule in rules if not isinstance(rule, PrefixChange)]
    renamings, converters = _split([rule.reverse_transform() for rule in reversed(rules)])
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    groups: dict[str, _Group] = {}
    for name in sorted(live, key=dot_natural_key):
        new_name, pattern = _rename(name, converters, only_first=True)
        if pattern is None:
            new_name, _ = _rename(name, renamings)
        _collect(groups, new_name, name, pattern, by_pattern, skeleton, renamings)
    unchanged = [_Group(name, {name: [name]}, None, (), skeleton) for name in live]
    for choice in (groups.values(), unchanged):
        conversions = [_describe(converter, live) for converter in choice]
        if _reads_back(skeleton, conversions, live):
            return conversions
    raise CheckpointError(
        f"The rules of transformers that rename the weights of a {skeleton.config.model_type} checkpoint cannot be "
        "reversed for this model; install another release of transformers."
    )


@dataclass
class _Group:
    """Sources by the pattern that matched them, the name of the first target, and the converter, if any."""

    first: str
    sources: dict[str, list[str]]
    converter: Any
    renamings: Sequence[Any]
    skeleton: PreTrainedModel

    def convert(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        if self.converter is None:
            return {self.first: tensors[next(iter(self.sources.values()))[0]]}
        converter = copy.deepcopy(self.converter)
        for pattern, names in self.sources.items():
            for name in names:
                converter.add_tensor(self.first, name, pattern, tensors[name])
        made = converter.convert(self.first, model=self.skeleton, config=self.skeleton.config)
        return {
            _rename(name, self.renamings)[0]: tensors[0] if isinstance(tensors, list) else tensors
            for name, tensors in made.items()
        }


def _collect(
    groups: dict[str, _Group],
    new_name: str,
    name: str,
    pattern: str | None,
    by_pattern: Mapping[str, Any],
    skeleton: PreTrainedModel,
    renamings: Sequence[Any] = (),
) -> None:
    """Add a weight to its group. If two weights would get the same name, the first one is used."""
    if pattern is None:
        groups.setdefault(new_name, _Group(new_name, {name: [name]}, None, (), skeleton))
        return
    group = groups.setdefault(new_name, _Group(new_name, {}, by_pattern[pattern], renamings, skeleton))
    if group.converter is not None:
        group.sources.setdefault(pattern, []).append(name)


def _describe(group: _Group, shapes: Mapping[str, Shape]) -> Conversion:
    """Return a group's conversion, with the shapes of its targets, which a conversion on meta shows."""
    sources = tuple(name for names in group.sources.values() for name in names)
    try:
        made = group.convert({name: torch.empty(shapes[name], device="meta") for name in sources})
    except Exception as error:  # operations raise errors of any type
        raise CheckpointError(
            f"{sources[0]} and {len(sources) - 1} other weights cannot be converted to {group.first} "
            f"({type(error).__name__}: {first_line(error)})"
        ) from error
    return Conversion(sources, {name: tuple(tensor.shape) for name, tensor in made.items()}, group)


def _reads_back(skeleton: PreTrainedModel, found: Iterable[Conversion], live: Mapping[str, Shape]) -> bool:
    """Whether the rules for loading convert these targets back to the model's names and shapes."""
    stored = {name: shape for conversion in found for name, shape in conversion.targets.items()}
    try:
        back = conversions_to_model(skeleton, stored)
    except CheckpointError:
        return False
    return {name: shape for conversion in back for name, shape in conversion.targets.items()} == dict(live)


def _split(rules: Iterable[Any]) -> tuple[list[Any], list[Any]]:
    """Return the rules that rename and the rules that convert."""
    rules = list(rules)
    return [rule for rule in rules if isinstance(rule, WeightRenaming)], [
        rule for rule in rules if isinstance(rule, WeightConverter)
    ]


def _rename(name: str, rules: Iterable[Any], only_first: bool = False) -> tuple[str, str | None]:
    """Return the name after these rules, or after the first that matches, and the last pattern that matched."""
    matched = None
    for rule in rules:
        name, pattern = rule.rename_source_key(name)
        matched = pattern or matched
        if only_first and matched is not None:
            break
    return name, matched


def _stacks_rows(converter: Any) -> bool:
    """Whether row i of the target is made from the i-th source of each pattern."""
    first, *others = converter.operations
    return (
        isinstance(first, MergeModulelist)
        and first.dim == 0
        and all(isinstance(other, Concatenate) and other.dim != 0 for other in others)
    )
