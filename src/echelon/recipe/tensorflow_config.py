"""The section `tensorflow`: the distribution strategy of TensorFlow."""

from typing import Literal, Self

from pydantic import Field, model_validator

from echelon.recipe.section import Count, Section

TensorflowStrategy = Literal["single", "mirrored", "multi_worker", "parameter_server", "tpu", "horovod"]

_REFUSED = {
    "tpu": "there is no TPU on which TPUStrategy could have been tested; use tensorflow.strategy=multi_worker",
    "horovod": "Horovod 0.28.1 does not compile against TensorFlow 2.21 (xla/printer.h:29:10: fatal error: "
    "highwayhash/arch_specific.h: No such file or directory); use engine=horovod, which trains with PyTorch",
}


class TensorflowConfig(Section):
    """How TensorFlow distributes a step, with `engine: tensorflow`."""

    strategy: TensorflowStrategy = Field(
        "multi_worker",
        description="`multi_worker`: MultiWorkerMirroredStrategy, one worker in each process; a single process needs "
        "no strategy. `mirrored`: MirroredStrategy, `tensorflow.replicas` copies of the model in one process. "
        "`single`: one process. The others are refused.",
    )
    replicas: Count = Field(2, description="With `mirrored`: copies of the model, on as many logical CPU devices.")

    @model_validator(mode="after")
    def _is_built(self) -> Self:
        if self.strategy in _REFUSED:
            raise ValueError(f"tensorflow.strategy={self.strategy}: {_REFUSED[self.strategy]}.")
        return self
