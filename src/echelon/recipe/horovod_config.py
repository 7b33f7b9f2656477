"""The section `horovod`: how Horovod sums gradients."""

from typing import Literal

from pydantic import Field

from echelon.recipe.section import Section


class HorovodConfig(Section):
    """How Horovod sums gradients, with `engine: horovod`. Other settings are Horovod's variables, in `launch.env`."""

    compression: Literal["none", "fp16"] = Field(
        "none",
        description="`fp16` sends and sums gradients in fp16: half the bytes, and sums that are rounded to 11 bits. "
        "Values below 6e-8 become 0, and those above 65,504 infinite.",
    )
