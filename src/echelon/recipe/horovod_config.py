"""The section `horovod`: how Horovod sums gradients."""

from typing import Literal

from pydantic import Field

from echelon.recipe.section import Section


class HorovodConfig(Section):
    """How Horovod sums gradients, with `engine: horovod`."""

    compression: Literal["none", "fp16"] = Field(
        "none",
        description="`fp16` sends and sums gradients in fp16: half the bytes, and sums that are rounded to 11 bits. "
        "Values below 6e-8 become 0, and those above 65,504 infinite.",
    )
    fusion_threshold_mb: int | None = Field(
        None,
        ge=1,
        le=4096,
        description="MiB of gradients that are summed at once. Default: HOROVOD_FUSION_THRESHOLD, or 128.",
    )
    cycle_time_ms: float | None = Field(
        None,
        gt=0,
        le=1000,
        description="Milliseconds between two checks for gradients that are ready. Default: HOROVOD_CYCLE_TIME, or 1.",
    )
