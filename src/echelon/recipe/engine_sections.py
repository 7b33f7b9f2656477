"""The sections `deepspeed`, `horovod` and `tensorflow`, of the engines of these names."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema

from echelon.recipe.key_limits import Case, Limit, OnlyWith
from echelon.recipe.section import Count, Section

_REFUSED = {
    "parameter_server": "use sync.name=parameter_server with engine=native",
    "horovod": "Horovod 0.28.1 does not compile against TensorFlow 2.21; use engine=horovod, which trains with PyTorch",
}


def _refuse(strategy: Any) -> Any:
    if isinstance(strategy, str) and strategy in _REFUSED:
        raise ValueError(f"tensorflow.strategy={strategy} is not a strategy of echelon: {_REFUSED[strategy]}.")
    return strategy


DsConfig = Annotated[
    dict[str, Any], WithJsonSchema({"anyOf": [{"type": "object"}, {"type": "string"}], "type": "object"})
]


class DeepspeedConfig(Section):
    """With `engine: deepspeed`: what DeepSpeed keeps in host memory, and a DeepSpeed config of your own."""

    around = "deepspeed."
    limits = (
        Case("deepspeed.offload_optimizer", (False,), (
            Limit("deepspeed.offload_parameters", (False,), "lets the device step what the host would keep"),
        ), "use deepspeed.offload_optimizer=true"),
    )  # fmt: skip

    offload_optimizer: bool = Field(
        False,
        description="Keep the master weights and the optimizer state in host memory, where the host steps them.",
    )
    offload_parameters: bool = Field(
        False,
        description="Also keep the parameters in host memory. Needs `offload_optimizer` and `parallel: fsdp`.",
    )
    config: DsConfig = Field(
        default_factory=dict,
        description="A DeepSpeed config: the path of its JSON file, whose content replaces the path when the recipe is "
        "read, or the content. Keys that the recipe sets must agree with it or be `auto`; see docs/engines.md.",
    )


class HorovodConfig(Section):
    """How Horovod sums gradients, with `engine: horovod`. Other settings are Horovod's variables, in `launch.env`."""

    compression: Literal["none", "fp16"] = Field(
        "none",
        description="`fp16` sends and sums gradients in fp16: half the bytes, and sums that are rounded to 11 bits. "
        "Values below 6e-8 become 0, and those above 65,504 infinite.",
    )


class TensorflowConfig(Section):
    """How TensorFlow distributes a step, with `engine: tensorflow`."""

    around = "tensorflow."

    strategy: Annotated[Literal["mirrored", "multi_worker", "tpu"], BeforeValidator(_refuse)] = Field(
        "multi_worker",
        description="`multi_worker`: MultiWorkerMirroredStrategy, one worker in each process; a single process needs "
        "no strategy. `mirrored`: MirroredStrategy, `tensorflow.replicas` copies of the model in one process. `tpu`: "
        "TPUStrategy, never run on a TPU yet.",
    )
    replicas: Annotated[Count, OnlyWith("tensorflow.strategy", ("mirrored",))] = Field(
        2, description="copies of the model, on as many logical CPU devices."
    )
    tpu: Annotated[str | None, OnlyWith("tensorflow.strategy", ("tpu",))] = Field(
        None,
        description="its name, its grpc:// address, or `local` on its own machine, as TPUClusterResolver takes it; "
        "null: what TPU_NAME says.",
    )
