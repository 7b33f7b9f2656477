"""Prices and machines beyond the catalogue: files in the folder `prices` of echelon's cache.

`echelon plan --prices refresh` writes one for AWS; others are written by hand. Each is a list of rows as under `prices`
in instances.yaml, which may also describe machines of other clouds:

    - region: us-south-1
      date: "2026-11-28"
      source: the provider's page
      usd_per_hour: {lambda.8x-h100: 24.0}
      spot_usd_per_hour: {lambda.8x-h100: 12.0}
      machines:
        lambda.8x-h100: {gpus: 8, accelerator: H100, vcpus: 208, memory_gib: 1800, network_gbits: 3200}
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from echelon.ground.errors import ConfigError
from echelon.ground.stored import read_text
from echelon.ground.variables import find_cache_dir
from echelon.recipe.section import Count, CountOrZero, Flag, Positive, Section
from echelon.recipe.yaml_text import parse_yaml


class PricedMachine(Section):
    """A machine of any cloud, or of an instance type of SageMaker that the catalogue lacks.

    accelerator: the name of its GPU; one that echelon does not know needs gpu_memory_gib. local_disks: by default, a
    machine with GPUs has some.
    """

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]*$")
    gpus: CountOrZero
    accelerator: str | None = None
    gpu_memory_gib: Positive | None = None
    vcpus: Count
    memory_gib: Count
    network_gbits: Positive
    efa_interfaces: CountOrZero = 0
    efa_rdma: Flag = False
    local_disks: Flag | None = None


class PriceRow(Section):
    """Prices of one machine of each type, in one region, at one date."""

    region: str = Field(min_length=1)
    date: str = Field(pattern=r"^\d{4}-\d{2}(-\d{2})?$")
    source: str = Field(min_length=1)
    usd_per_hour: dict[str, Positive] = Field(default_factory=dict)
    spot_usd_per_hour: dict[str, Positive] = Field(default_factory=dict)
    machines: dict[str, dict[str, Any]] = Field(default_factory=dict)

    def read_machines(self) -> list[PricedMachine]:
        """The machines of the row. Raises ValidationError."""
        return [PricedMachine.model_validate({"name": name, **fields}) for name, fields in self.machines.items()]


def find_price_folder() -> Path:
    """The folder of the files."""
    return find_cache_dir() / "prices"


def read_price_rows() -> Iterator[PriceRow]:
    """The rows of all files, in the order of their names. Raises ConfigError naming a file that is wrong."""
    folder = find_price_folder()
    for path in sorted(folder.glob("*.yaml")) if folder.is_dir() else ():
        try:
            rows, _ = parse_yaml(read_text(path), str(path))
            for row in rows if isinstance(rows, list) else [rows]:
                parsed = PriceRow.model_validate(row)
                parsed.read_machines()
                yield parsed
        except ValidationError as error:
            first = error.errors()[0]
            reason = f"{'.'.join(map(str, first['loc'])) or 'a row'}: {first['msg']}"
            raise ConfigError(f"{path} is not a list of prices ({reason}); correct it, or remove it.") from error
