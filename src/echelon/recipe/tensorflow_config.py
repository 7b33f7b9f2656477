"""The section `tensorflow`: the distribution strategy of TensorFlow."""

from typing import Literal

from pydantic import Field

from echelon.recipe.section import Count, Section, rule

TensorflowStrategy = Literal["single", "mirrored", "multi_worker", "parameter_server", "tpu", "horovod"]

_REFUSED = {
    "horovod": "Horovod 0.28.1 does not compile against TensorFlow 2.21 (xla/printer.h:29:10: fatal error: "
    "highwayhash/arch_specific.h: No such file or directory); use engine=horovod, which trains with PyTorch",
}


class TensorflowConfig(Section):
    """How TensorFlow distributes a step, with `engine: tensorflow`."""

    strategy: TensorflowStrategy = Field(
        "multi_worker",
        description="`multi_worker`: MultiWorkerMirroredStrategy, one worker in each process; a single process needs "
        "no strategy. `parameter_server`: ParameterServerStrategy, one worker in each process and `tensorflow.servers` "
        "that have the weights. `mirrored`: MirroredStrategy, `tensorflow.replicas` copies of the model in one "
        "process. `single`: one process. `tpu`: TPUStrategy, never run on a TPU yet. `horovod` is refused.",
    )
    replicas: Count = Field(2, description="With `mirrored`: copies of the model, on as many logical CPU devices.")
    servers: Count = Field(
        1, description="With `parameter_server`: processes, from the first on, that also have a parameter server."
    )
    tpu: str | None = Field(
        None,
        description="With `tpu`: its name, its grpc:// address, or `local` on its own machine, as TPUClusterResolver "
        "takes it; null: what TPU_NAME says.",
    )

    @rule
    def _can_work(self) -> None:
        if self.strategy in _REFUSED:
            raise ValueError(f"tensorflow.strategy={self.strategy}: {_REFUSED[self.strategy]}.")

    @rule
    def _has_its_strategy(self) -> None:
        for key, strategy in (("servers", "parameter_server"), ("tpu", "tpu")):
            value = getattr(self, key)
            if value != type(self).model_fields[key].default and self.strategy != strategy:
                raise ValueError(
                    f"tensorflow.{key}={value} is for tensorflow.strategy={strategy}, and the recipe has "
                    f"tensorflow.strategy={self.strategy}; change the strategy, or remove tensorflow.{key}."
                )
