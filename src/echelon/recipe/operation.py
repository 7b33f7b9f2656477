"""How the run is kept, watched and ended: checkpoints, evaluation, faults, budget."""

import re
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from echelon.recipe.section import Count, CountOrZero, Flag, Number, Positive, PositiveOrZero, Section

Tracker = Literal["tensorboard", "mlflow", "wandb"]


class CheckpointConfig(Section):
    """When the run is saved, and how many saves are kept."""

    saves_per_epoch: Positive | None = Field(
        None,
        description="Checkpoints in each pass over the training text, at equal distances; 0.5: one in two passes. "
        "Instead of `every_steps`.",
    )
    every_steps: Count | Literal["auto"] | None = Field(
        default_factory=lambda checkpoint: None if checkpoint.get("saves_per_epoch") else 100,
        description="Steps between two checkpoints. `auto`: as many as lose least, by the measured cost of a save and "
        "by `fault.mean_hours_between_failures`. Default: 100, or by `saves_per_epoch`.",
    )
    snapshot_every_steps: Count | None = Field(
        None,
        description="Steps between two snapshots in this machine's memory, from which processes that failed start "
        "again. Holds the state three times in memory.",
    )
    keep_last: Count = Field(3, description="How many of the newest checkpoints are kept.")
    keep_best: Flag = Field(False, description="Also keep the one with the lowest evaluation loss.")
    asynchronous: Flag = Field(True, alias="async", description="Write in the background while training goes on.")
    remote: str | None = Field(
        None,
        description="Where each checkpoint is copied to in the background: an address of the run's own, such as "
        "`s3://bucket/runs/NAME`, `gs://...` or `file:///...`. The same command on another machine resumes from there.",
    )

    @model_validator(mode="after")
    def _one_rhythm_of_saves(self) -> Self:
        if self.every_steps is not None and self.saves_per_epoch is not None:
            raise ValueError(
                f"checkpoint.every_steps={self.every_steps} and checkpoint.saves_per_epoch={self.saves_per_epoch:g} "
                "are both given, and only one of them says when to save; keep one."
            )
        if self.every_steps is None and self.saves_per_epoch is None:
            raise ValueError(
                "checkpoint.every_steps=null says nothing of when to save; give a number of steps, auto, or "
                "checkpoint.saves_per_epoch."
            )
        return self

    @field_validator("remote")
    @classmethod
    def _remote_is_an_address_without_secrets(cls, remote: str | None) -> str | None:
        if remote is None:
            return None
        if re.search(r"[@?]", remote):  # not shown: it may be what must stay secret
            raise ValueError(
                "checkpoint.remote must be an address without a name, password or query in it, for a recipe's text is "
                "kept; leave it to the environment (AWS_ACCESS_KEY_ID, GOOGLE_APPLICATION_CREDENTIALS, ...) or to "
                "fsspec's own configuration."
            )
        if not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^:]*[^:/][^:]*", remote):
            raise ValueError(
                f"checkpoint.remote={remote} must be one address with its protocol and a path; for example "
                "s3://bucket/runs/NAME, gs://bucket/runs/NAME or file:///mnt/backup/NAME."
            )
        return remote.rstrip("/")


class EvaluateConfig(Section):
    """What happens at each evaluation."""

    batches: Count | None = Field(
        None, description="Global batches of held-out text per evaluation. Default: all of it, up to 200."
    )
    prompts: tuple[str, ...] = Field((), description="Prompts to continue at each evaluation.")
    prompt_tokens: Count = Field(64, description="Tokens to sample for each prompt.")
    early_stopping: Count | None = Field(None, description="Stop after this many evaluations without a lower loss.")
    select_by: str | None = Field(
        None,
        description="The validation set whose loss `early_stopping` and `checkpoint.keep_best` go by. Default: all of "
        "them together.",
    )


class MlflowConfig(Section):
    """Where `track: [mlflow]` writes to."""

    tracking_uri: str | None = Field(
        None, description="A server or a store. Default: `MLFLOW_TRACKING_URI`, else SQLite beside the run folder."
    )
    experiment: str = Field("echelon", description="The experiment the run belongs to.")
    system_metrics: Flag = Field(True, description="Also record CPU, memory, disk, network and GPU use.")
    log_model: Flag = Field(False, description="Add the exported model to the run's artifacts when it is done.")
    register_model: str | None = Field(None, description="Register the exported model under this name.")


class WandbConfig(Section):
    """Where `track: [wandb]` writes to."""

    project: str = Field("echelon", description="The project the run belongs to.")
    entity: str | None = Field(None, description="The user or team. Default: that of the account.")
    mode: Literal["online", "offline"] | None = Field(
        None, description="`offline` keeps all of it in the run folder. Default: `WANDB_MODE`, else online."
    )


class FaultConfig(Section):
    """What happens when something goes wrong."""

    notice_seconds: PositiveOrZero = Field(
        60.0, description="Time a stopping run has to save before its processes are killed."
    )
    hang_seconds: Positive | None = Field(
        600.0,
        description="Time a step, or a forward pass of an evaluation, may take before the run counts as hanging and "
        "fails; null: any.",
    )
    on_bad_step: Literal["skip", "rollback", "stop"] = Field(
        "stop",
        description="On a loss or gradient norm that is not finite, or on a spike. None is ever applied; `rollback` "
        "also goes back to the newest checkpoint.",
    )
    max_bad_steps: Count = Field(
        3, description="Bad steps in a row with which the run stops, under `skip` and `rollback`."
    )
    spike_factor: Annotated[Number, Field(gt=1)] | None = Field(
        None,
        description="A gradient norm above this many times the median of the last `fault.spike_window` applied steps "
        "makes a step a bad one. Default: no norm that is finite does.",
    )
    spike_window: Count = Field(100, description="Applied steps in that median; until there are as many, none spikes.")
    max_restarts: CountOrZero = Field(
        3, description="How often failed processes are started again, from the newest checkpoint."
    )
    mean_hours_between_failures: Positive | None = Field(
        None,
        description="Hours between two failures of the whole job, for `checkpoint.every_steps: auto`. Default: 50,000 "
        "divided by the number of processes.",
    )
    verify_replicas_every: Count | None = Field(
        None, description="Steps between two checks that all replicas hold the same weights."
    )


class BudgetConfig(Section):
    """What the run may use, all of its starts together. It stops with a checkpoint before it uses more."""

    max_usd: Positive | None = Field(None, description="Dollars, of all machines; needs a known price.")
    max_hours: Positive | None = Field(None, description="Hours that the run is on its machines.")
    usd_per_hour: Positive | None = Field(
        None,
        description="Price of one machine. Default: that of the SageMaker instance type on demand, where the catalogue "
        "has one.",
    )
