"""Sections of the recipe: checkpoints, evaluation, trackers, faults, budget, engines."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema

from echelon.recipe.key_limits import Case, Limit, OnlyWith
from echelon.recipe.section import (
    Count,
    CountOrZero,
    Every,
    Flag,
    Number,
    PathOrName,
    Positive,
    PositiveOrZero,
    Section,
    address,
    distinct,
    rule,
)

_REFUSED = {
    "parameter_server": "use sync.name=parameter_server with engine=native",
    "horovod": "Horovod 0.28.1 does not compile against TensorFlow 2.21; use engine=horovod, which trains with PyTorch",
}


class CheckpointConfig(Section):
    """When checkpoints are saved, and how many are kept."""

    every: Every | Literal["auto"] = Field(
        100,
        description="Steps between checkpoints, or passes over the data: `0.5 epochs`. `auto`: the interval with the "
        "least expected lost time, by the measured cost of a save and `fault.mean_hours_between_failures`.",
    )
    snapshot_every_steps: Count | None = Field(
        None,
        description="With `fault.on_lost_process: replace`: steps between snapshots in the memory of the processes, "
        "each part in that of two, from which all go on after a loss.",
    )
    keep_last: Count = Field(3, description="Number of newest checkpoints to keep.")
    keep_best: Flag = Field(False, description="Also keep the one with the lowest evaluation loss.")
    asynchronous: Flag = Field(True, alias="async", description="Write in the background while training continues.")
    remote: Annotated[str, address("checkpoint.remote", "runs/NAME")] | None = Field(
        None,
        description="Object-store address to which each checkpoint is copied in the background, one per run, such as "
        "`s3://bucket/runs/NAME`, `gs://...` or `file:///...`. The same command on another machine resumes from there.",
    )


class EvaluateConfig(Section):
    """What happens at each evaluation."""

    around = "evaluate."

    batches: Count | None = Field(
        None, description="Global batches per evaluation and validation set. Default: the whole set, up to 200."
    )
    prompts: tuple[str, ...] = Field((), description="Prompts to continue at each evaluation.")
    prompt_tokens: Count = Field(64, description="Tokens to generate for each prompt.")
    tasks: Annotated[tuple[PathOrName, ...], distinct("evaluate.tasks")] = Field(
        (),
        description="Benchmarks to run during training, by lm-eval: names of its tasks, task files of lm-eval "
        "(`mine.yaml`), or files of questions (`mine.jsonl`).",
    )
    tasks_every: Annotated[Every | None, OnlyWith("evaluate.tasks")] = Field(
        None, description="steps (or `2 epochs`) between runs of them, also after the last. Default: at evaluations."
    )
    tasks_limit: Annotated[Count | None, OnlyWith("evaluate.tasks")] = Field(
        None, description="maximum number of examples of each task. Default: all."
    )
    early_stopping: Count | None = Field(
        None, description="Stop after this many consecutive evaluations without a better value."
    )
    select_by: str | None = Field(
        None,
        description="What `early_stopping` and `checkpoint.keep_best` compare: the validation set whose loss is used, "
        "or a metric of a task, as `TASK/METRIC` (`arc_easy/acc_norm`). Default: the loss of all sets together.",
    )


class MlflowConfig(Section):
    """Settings of `track: [mlflow]`."""

    tracking_uri: str | None = Field(
        None,
        description="Address of a server or store. Default: `MLFLOW_TRACKING_URI`, otherwise SQLite next to the run "
        "folder.",
    )
    experiment: str = Field("echelon", description="The MLflow experiment of the run.")
    log_model: Flag | str = Field(
        False, description="Add the exported model to the run's artifacts at its end. A text: register it by this name."
    )


class PrometheusConfig(Section):
    """Settings of `track: [prometheus]`."""

    address: str = Field(
        "127.0.0.1:auto",
        description="`HOST:PORT` of rank 0's machine to listen at. Host `0.0.0.0`: all its addresses; anyone who can "
        "reach it can read the metrics without a password. Port `auto`: one that is free at each start, named in a "
        "file next to the run folder.",
    )

    @rule
    def _is_host_and_port(self) -> None:
        host, _, port = self.address.rpartition(":")
        if not host or not (port == "auto" or (port.isdecimal() and 1 <= int(port) <= 65535)):
            raise ValueError(
                f"prometheus.address={self.address} is not HOST:PORT; use for example 0.0.0.0:9400 or 127.0.0.1:auto."
            )


class FaultConfig(Section):
    """Reactions to failures."""

    notice_seconds: PositiveOrZero = Field(
        60.0, description="Time that a stopping run has to save before its processes are killed."
    )
    hang_seconds: Positive | Literal["auto"] | None = Field(
        "auto",
        description="Maximum time of a step, or of a forward pass of an evaluation; after it the run counts as "
        "hanging and fails. `auto`: derived from the durations so far; null: no limit.",
    )
    on_bad_step: Literal["skip", "rollback", "stop"] = Field(
        "stop",
        description="Reaction to a loss or gradient norm that is not finite, or a spike. The update is never "
        "applied; `rollback` also returns to the newest checkpoint.",
    )
    max_bad_steps: Count = Field(
        3, description="Number of consecutive bad steps that stops the run, under `skip` and `rollback`."
    )
    spike_factor: Annotated[Number, Field(gt=1)] | None = Field(
        None,
        description="A step is bad if its gradient norm is above this factor times the median of the last "
        "`fault.spike_window` applied steps. Default: spikes are not detected.",
    )
    spike_window: Count = Field(
        100, description="Number of applied steps in that median; no spike is detected before that many steps."
    )
    on_bad_machine: Literal["leave_out", "warn"] = Field(
        "leave_out",
        description="Reaction to a machine that fails a check before training; `leave_out` needs enough others.",
    )
    on_straggler: Literal["warn", "stop", "replace"] = Field(
        "warn",
        description="Reaction to a process that is persistently slower than the others. `stop` also ends the run with "
        "a checkpoint. `replace`: a spare machine of `--nodes N+SPARES` takes the place of its machine.",
    )
    on_lost_process: Literal["restart", "replace", "continue"] = Field(
        "restart",
        description="Reaction to the loss of a process: all start again; a new one takes its place while the others "
        "keep their memory (`replace`); or the other replicas (`sync.replicas`) train on (`continue`).",
    )
    max_restarts: CountOrZero = Field(
        3, description="Maximum number of restarts of failed processes, each from the newest checkpoint."
    )
    mean_hours_between_failures: Positive | None = Field(
        None,
        description="Mean hours between failures of the whole job, for `checkpoint.every: auto`. Default: 50,000 "
        "divided by the number of processes.",
    )
    verify_replicas_every: Count | None = Field(
        None, description="Steps between checks that all replicas have the same weights."
    )
    verify_passes_every: Count | None = Field(
        None, description="Steps between checks that all processes compute the same from the same tokens."
    )


class ProfileConfig(Section):
    """Which steps torch's profiler records."""

    steps: tuple[Count, Count] | None = Field(
        None,
        description="The first step to record, and how many: [20, 5] records steps 20 to 24. `echelon train --profile` "
        "sets this. Default: none.",
    )
    ranks: tuple[CountOrZero, ...] = Field((0,), description="The ranks that record; each writes a trace of its own.")
    memory: Flag = Field(False, description="Also record every allocation of memory.")

    @rule
    def _has_ranks(self) -> None:
        if not self.ranks or len(set(self.ranks)) < len(self.ranks):
            raise ValueError(f"profile.ranks={list(self.ranks)} must name ranks, each once, for example [0].")


class BudgetConfig(Section):
    """Limits over all starts of the run together. The run stops with a checkpoint before it exceeds one."""

    max_usd: Positive | None = Field(None, description="Dollars for all machines; needs a known price.")
    max_hours: Positive | None = Field(None, description="Hours that the run uses its machines.")
    usd_per_hour: Positive | None = Field(
        None,
        description="Dollars per hour for one machine. Default: the on-demand price of the SageMaker instance type, "
        "if the catalogue has one.",
    )
    spot_usd_per_hour: Positive | None = Field(
        None,
        description="Dollars per hour for one spot machine: `echelon plan` shows the cost at both prices, and a job "
        "with launch.sagemaker.spot is counted at this one.",
    )


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
        False, description="Keep the master weights and the optimizer state in host memory, where the host steps them."
    )
    offload_parameters: bool = Field(
        False, description="Also keep the parameters in host memory. Needs `offload_optimizer` and `parallel: fsdp`."
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
