"""The complete recipe: all top-level keys, and the rules that concern several sections."""

import math
from collections.abc import Callable, Iterator
from fractions import Fraction
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any

from pydantic import Discriminator, Field, Tag
from typing_extensions import override

from echelon.ground.redaction import redact
from echelon.recipe.batches import BatchSchedule, Rhythm, constant_batch, ramp_batch
from echelon.recipe.inputs import AdapterConfig, DataConfig, ModelConfig, RunConfig, TrainedTokenizerConfig
from echelon.recipe.key_limits import Case, Limit, OnlyWith
from echelon.recipe.launch_sections import LaunchConfig
from echelon.recipe.names import ENGINES, NATIVE, OBJECTIVES, REWARD_MODEL, SAMPLERS, TRACKERS, ObjectiveRow, Tracker
from echelon.recipe.objective import ObjectiveConfig
from echelon.recipe.operation import (
    BudgetConfig,
    CheckpointConfig,
    DeepspeedConfig,
    EvaluateConfig,
    FaultConfig,
    HorovodConfig,
    MlflowConfig,
    ProfileConfig,
    PrometheusConfig,
    TensorflowConfig,
)
from echelon.recipe.refusals import find_limited
from echelon.recipe.rollout import Rewards, RolloutConfig
from echelon.recipe.schedule import find_fault
from echelon.recipe.section import OpenSection, PathOrName, name_or_mapping, read_epochs, rule
from echelon.recipe.synchronization import APART, CONTINUES, EVERY_STEP, PARAMETER_SERVER, SyncConfig
from echelon.recipe.training import EngineName, OptimConfig, ParallelConfig, ParallelName, TrainConfig
from echelon.recipe.yaml_text import render_yaml

MAX_RAMP_SIZES = 10_000


Tokenizer = Annotated[
    Annotated[PathOrName, Tag("name")] | Annotated[TrainedTokenizerConfig, Tag("mapping")],
    Discriminator(name_or_mapping),
]
Parallel = Annotated[
    Annotated[ParallelName, Tag("name")] | Annotated[ParallelConfig, Tag("mapping")], Discriminator(name_or_mapping)
]


MOST_KEPT_TOKENS = 2**21
"""The most tokens of the answers that are part of a checkpoint's state, which has 20 bytes for each."""


def _name_objectives(is_meant: Callable[[ObjectiveRow], bool]) -> tuple[str, ...]:
    return tuple(name for name, row in OBJECTIVES.items() if is_meant(row))


_OTHER_LOOP = (
    Limit("engine", (NATIVE,), "replaces echelon's usual loop, and other engines run only that one"),
    Limit("sync.name", ("every_step",), "replaces echelon's usual loop, and only that one synchronizes otherwise"),
    Limit("fault.on_lost_process", ("restart", "replace"), "replaces echelon's usual loop, and only that one goes on"),
    Limit("fault.on_bad_step", ("stop", "skip"), "replaces echelon's usual loop by one that echelon cannot rewind"),
    Limit("fault.spike_factor", (None,), "replaces echelon's usual loop by one that applies a step before its record"),
)
_REFERENCE = (
    Limit("adapter.init", ("default",), "compares with the frozen weights as they were, which this start changes"),
    Limit("adapter.modules_to_save", ((),), "needs the original weights, which this trains in place (rows of "
          "model.new_tokens are trained anyway)"),
)  # fmt: skip
_COPY = "use adapter.method=full, which keeps a copy"
_NO_TEXT = "trains a model that only scores texts, and writes none"
LIMITS = (
    Case("train.loop", (), _OTHER_LOOP, "remove train.loop"),
    Case("objective.name", ("grpo",), _OTHER_LOOP),
    Case("objective.on_policy_fraction", (), (
        *_OTHER_LOOP,
        Limit("data.packing", ("auto", False), "needs the prompt of each answer, and so one answer in a sequence"),
    ), "remove objective.on_policy_fraction"),
    Case("objective.name", _name_objectives(lambda row: row.needs_reference), _REFERENCE, _COPY),
    Case("objective.kl_weight", (), _REFERENCE, _COPY),
    Case("objective.name", _name_objectives(lambda row: row.answers == "pairs"), (
        Limit("data.document_mask", ("auto", True), "has both answers of a pair in one sequence, where they must not "
              "attend to each other"),
    )),
    Case("objective.name", _name_objectives(lambda row: row.head == "score"), (
        Limit("evaluate.prompts", ((),), _NO_TEXT),
        Limit("evaluate.tasks", ((),), _NO_TEXT),
        Limit("fault.verify_passes_every", (None,), _NO_TEXT),
    )),
    Case("objective.name", _name_objectives(lambda row: row.answers == "judged"), (
        Limit("data.packing", ("auto", False), "needs one answer in a sequence, to compare it with the next prompt"),
    )),
    Case("objective.name", _name_objectives(lambda row: row.answers == "prompts"), (
        Limit("train.batch_ramp", (None,), "makes its batches of answers"),
        Limit("data.source", (None,), "makes its batches of answers"),
    )),
    Case("fault.on_lost_process", ("restart",), (
        Limit("checkpoint.snapshot_every_steps", (None,), "ends the processes, in whose memory snapshots are"),
    ), "set fault.on_lost_process: replace"),
    Case("fault.on_lost_process", ("continue",), (
        Limit("checkpoint.snapshot_every_steps", (None,), "has what a snapshot would hold in the other replicas"),
        Limit("sync.name", (EVERY_STEP,), "is for replicas that agree in every step; parameter servers go on anyway"),
        Limit("sync.compress.method", ("none",), "sends whole gradients"),
    )),
    Case("sync.name", (PARAMETER_SERVER,), (
        Limit("fault.on_lost_process", ("restart",), "goes on anyway"),
        Limit("train.precision", ("auto", "fp32", "bf16"), "would change a loss scale in each process alone"),
    )),
    Case("sync.name", APART, (Limit("parallel.cpu_offload", (False,), "keeps the agreed weights on the device"),)),
    Case("data.stream", (), (
        Limit("objective.top_k", (None,), "reads text as it trains, and a teacher's predictions are prepared before"),
        Limit("tokenizer.train", (None,), "reads text as it trains, and a tokenizer is trained before: name one, for "
              "example one that `echelon data --prepare` has trained on a part of the text"),
    ), "remove data.stream"),
)  # fmt: skip
"""Which values of keys do not go together, across sections; `Section.limits` has those within one."""


class Recipe(OpenSection):
    """A training run: model, data, and settings. Frozen, hashable, complete with defaults."""

    plugins = (ENGINES, TRACKERS)
    limits = LIMITS

    run: RunConfig
    model: ModelConfig
    tokenizer: Tokenizer | None = Field(
        None,
        description="A folder or hub id, `bytes` (256 tokens, one per byte), or `{train: {vocab_size: 4096}}` to train "
        "one on the training text. Default: the checkpoint's.",
    )
    adapter: AdapterConfig = AdapterConfig()
    data: DataConfig
    objective: ObjectiveConfig = ObjectiveConfig()
    rollout: RolloutConfig = RolloutConfig()
    reward: Annotated[Rewards, OnlyWith("objective.name", ("grpo",))] = Field(
        (), description="the rewards of the model's answers. `reward: exact` is a shorthand for one."
    )
    train: TrainConfig
    optim: OptimConfig
    parallel: Parallel = Field(
        "auto",
        description="The strategy: `ddp` replicates the model on every process, `zero1` shards optimizer state, "
        "`zero2` also gradients, `fsdp` also parameters, `hsdp` shards within a machine and replicates across; or a "
        "mapping of degrees. `auto` takes the fastest that fits by the predicted time, on devices of unknown speed the "
        "first that fits, and prints the reason.",
    )
    checkpoint: CheckpointConfig = CheckpointConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    fault: FaultConfig = FaultConfig()
    sync: SyncConfig = SyncConfig()
    engine: EngineName = Field("native", description="The engine that runs the training steps.")
    deepspeed: DeepspeedConfig = DeepspeedConfig()
    smp: dict[str, Any] = Field(
        default_factory=dict,
        description="With `engine: smp`: parameters of SageMaker's model-parallel library, in its own spelling; they "
        "are replaced by the keys that they stand for when the recipe is read.",
    )
    horovod: HorovodConfig = HorovodConfig()
    tensorflow: TensorflowConfig = TensorflowConfig()
    track: tuple[Tracker, ...] = Field(
        (), description="Trackers that receive the metrics; `metrics.jsonl` is always written."
    )
    mlflow: MlflowConfig = MlflowConfig()
    prometheus: PrometheusConfig = PrometheusConfig()
    launch: LaunchConfig = LaunchConfig()
    profile: ProfileConfig = ProfileConfig()
    budget: BudgetConfig = BudgetConfig()

    @override
    def __repr__(self) -> str:
        """The keys that were set, as YAML without secrets: what the end of a notebook's cell shows."""
        return render_yaml(redact(self.model_dump(mode="json", by_alias=True, exclude_unset=True))).rstrip()

    __str__ = __repr__

    @property
    def goes_on(self) -> str | None:
        """The key with its value because of which a process may be lost while others train on; None if it may not."""
        if self.sync.name == PARAMETER_SERVER:
            return f"sync.name={PARAMETER_SERVER}"
        return CONTINUES if self.fault.on_lost_process == "continue" else None

    @property
    def num_replicas(self) -> int:
        """The replicas of a plan."""
        return max(2, self.sync.replicas) if self.goes_on == CONTINUES else self.sync.replicas

    @rule
    def _engine_can_run_it(self) -> None:
        if (message := next(find_refused(self), None)) is not None:
            raise ValueError(message)

    @rule
    def _tokenizer_of_a_new_model(self) -> None:
        if self.tokenizer is None and self.model.checkpoint is None:
            raise ValueError(
                "tokenizer is missing: a model made from model.config has none of its own; use tokenizer: bytes, "
                "tokenizer: {train: {vocab_size: 4096}}, or the folder or hub id of one."
            )

    @rule
    def _passes_have_a_length(self) -> None:
        epochs = {} if self.train.epochs is None else {"train.epochs": f"{self.train.epochs:g}"}
        keys = ("checkpoint.every", "train.eval_every", "evaluate.tasks_every")
        rhythms = {key: repr(every) for key in keys if read_epochs(every := attrgetter(key)(self)) is not None}
        for key, value in {**epochs, **rhythms}.items():
            units = "use train.steps or train.tokens" if key == "train.epochs" else "use a number of steps"
            if self.data.stream is not None:
                raise ValueError(
                    f"{key}={value} does not go with data.stream: how many sequences an epoch has is known only at its "
                    f"end; {units}."
                )
            if self.data.is_mixture:
                raise ValueError(
                    f"{key}={value} is not defined for sources with a weight, which have epochs of different lengths; "
                    f"{units}."
                )

    @rule
    def _windows_of_a_stream_fit(self) -> None:
        if self.data.stream is None:
            return
        least, cache_gb = 3 * self.data.stream.window * self.sample_len * 4 / 1e9, self.data.stream.cache_gb
        if cache_gb < least:
            raise ValueError(
                f"data.stream.cache_gb={cache_gb:g} may not hold three windows of data.stream.window="
                f"{self.data.stream.window:,} sequences; set it to {least:.3g} or more, or use a smaller window."
            )

    @rule
    def _labelled_texts_are_apart(self) -> None:
        data = self.data
        if self.objective.row.answers == "labelled" and data.document_mask is False and data.packing is not False:
            raise ValueError(
                "data.document_mask=false lets documents of a sequence attend to each other, and "
                f"objective.name={self.objective.name} gives each a label of its own; use data.document_mask=auto, or "
                "data.packing=false."
            )

    @rule
    def _a_judged_answer_is_not_alone(self) -> None:
        if self.objective.loss_name == "kto" and self.global_batch_size < 2:
            key = self.train.batch_key
            raise ValueError(
                f"train.{key}={getattr(self.train, key)} is one sequence, and objective.name={self.objective.name} "
                "needs another answer to compare with; use a larger batch, or objective.loss=apo_zero_unpaired."
            )

    @rule
    def _answers_are_judged(self) -> None:
        is_judged = self.reward or self.rollout.environment is not None or self.train.loop is not None
        if self.draws_answers and not is_judged:
            raise ValueError(
                "objective.name=grpo needs a reward; set for example reward: exact, which compares an answer with the "
                "field `answer` of its prompt's record."
            )

    @rule
    def _a_reward_model_reads_one_answer(self) -> None:
        for index, reward in enumerate(self.reward):
            if reward.is_model and self.rollout.environment is not None:
                raise ValueError(
                    f"reward.{index}.name={REWARD_MODEL} reads a prompt and one answer, and rollout.environment makes "
                    "answers of several turns; remove one of them."
                )

    @rule
    def _answers_fit_the_sequence(self) -> None:
        room, length = self.rollout.max_new_tokens, self.data.sequence_len
        if self.samples_answers and room > length - 2:
            raise ValueError(
                f"rollout.max_new_tokens={room} leaves no room for a prompt in data.sequence_len={length}; increase "
                "data.sequence_len, or lower rollout.max_new_tokens."
            )

    @rule
    def _answers_fit_the_batch(self) -> None:
        group, most, problem = self.rollout.group_size, self.global_batch_size * self.data.sequence_len, ""
        if group < 2 and self.objective.advantage != "centered":
            problem = f"rollout.group_size={group}: answers are compared with others to the same prompt; use 2 or more."
        elif self.global_batch_size % group:
            problem = (
                f"train.{self.train.batch_key}={getattr(self.train, self.train.batch_key)} is {self.global_batch_size} "
                f"answers in each step, which rollout.group_size={group} does not divide; use a multiple of it."
            )
        elif self.rollout.lag and most > MOST_KEPT_TOKENS:
            problem = (
                f"rollout.lag={self.rollout.lag}: the answers of a step, which every checkpoint keeps, have up to "
                f"{most} tokens, and may have {MOST_KEPT_TOKENS}; use fewer answers or a "
                "smaller data.sequence_len, or set rollout.lag=0."
            )
        if problem and self.draws_answers:
            raise ValueError(problem)

    @rule
    def _batch_is_whole_sequences(self) -> None:
        tokens, length = self.train.global_batch_tokens, self.data.sequence_len
        if tokens is not None and tokens % length:
            below = tokens - tokens % length
            nearest = [str(value) for value in (below, below + length) if value]
            raise ValueError(
                f"train.global_batch_tokens={tokens} is not a whole number of sequences of "
                f"data.sequence_len={length}; use {' or '.join(nearest)}."
            )

    @rule
    def _ramp_ends_at_the_batch(self) -> None:
        ramp, key = self.train.batch_ramp, self.train.batch_key
        if ramp is None:
            return
        size, length = getattr(self.train, key), self.data.sequence_len
        if ramp.to is not None and ramp.to != size:
            raise ValueError(
                f"train.batch_ramp.to={ramp.to} is not train.{key}={size}, where the ramp ends; make them equal, or "
                "omit train.batch_ramp.to."
            )
        if ramp.start >= size:
            raise ValueError(f"train.batch_ramp.from={ramp.start} must be less than train.{key}={size}.")
        for name, value in (("from", ramp.start), ("increment", ramp.increment)):
            if key == "global_batch_tokens" and value % length:
                raise ValueError(
                    f"train.batch_ramp.{name}={value} tokens is not a whole number of sequences of "
                    f"data.sequence_len={length}; use {-(-value // length) * length}."
                )
        if (size - ramp.start) % ramp.increment:
            raise ValueError(
                f"train.batch_ramp.increment={ramp.increment} does not divide the {size - ramp.start} from "
                f"train.batch_ramp.from={ramp.start} to train.{key}={size}; use a divisor of it."
            )
        if (count := (size - ramp.start) // ramp.increment) > MAX_RAMP_SIZES:
            raise ValueError(
                f"train.batch_ramp.increment={ramp.increment} makes {count} sizes of the batch; use an increment that "
                f"makes {MAX_RAMP_SIZES} or fewer."
            )

    @rule
    def _schedule_fits(self) -> None:
        if self.train.epochs is None and (fault := find_fault(self.optim, self.num_steps(0), self.batches)):
            raise ValueError(fault)

    @property
    def loop(self) -> str | None:
        """The training loop instead of echelon's usual one: that of `train.loop`, or of the objective."""
        return self.train.loop or (self.objective.name if self.samples_answers else None)

    @property
    def draws_answers(self) -> bool:
        """Whether the data is prompts, which the model answers during training."""
        return self.objective.row.answers == "prompts"

    @property
    def samples_answers(self) -> bool:
        """Whether the model answers prompts during training, and is trained on its answers."""
        return self.draws_answers or self.objective.on_policy_fraction > 0

    @property
    def sample_len(self) -> int:
        """The positions of a prepared sample: a sequence, less the room for the answer of a prompt."""
        return self.data.sequence_len - (self.rollout.max_new_tokens if self.draws_answers else 0)

    @property
    def global_batch_size(self) -> int:
        """Sequences per optimizer step, over all processes; with a batch ramp, at its end."""
        if self.train.global_batch_size is not None:
            return self.train.global_batch_size
        assert self.train.global_batch_tokens is not None
        return self.train.global_batch_tokens // self.data.sequence_len

    @property
    def batches(self) -> BatchSchedule:
        """The batch size of every step."""
        ramp, size, length = self.train.batch_ramp, self.global_batch_size, self.data.sequence_len
        if ramp is None:
            return constant_batch(size, length)
        unit = length if self.train.global_batch_tokens is not None else 1
        return ramp_batch(ramp.start // unit, size, ramp.increment // unit, ramp.over_tokens, length)

    @property
    def prepared_dir(self) -> Path:
        """The folder of prepared data: by default `prepared` next to the run folder."""
        return self.data.prepared_dir or self.run.dir.parent / "prepared"

    def save_rhythm(self, num_samples: int) -> Rhythm:
        """Return the steps after which to save, except for `auto`. `num_samples`: sequences of one epoch."""
        return self._rhythm(self.checkpoint.every, num_samples)

    def evaluation_rhythm(self, num_samples: int) -> Rhythm:
        """Return the steps after which to evaluate during training. `num_samples`: sequences of one epoch."""
        return self._rhythm(self.train.eval_every, num_samples)

    @property
    def compared_task(self) -> str | None:
        """The TASK/METRIC by which `evaluate.select_by` chooses the best checkpoint; None if by held-out text."""
        chosen, named = self.evaluate.select_by, {source.label for source in self.data.validation} or {"validation"}
        return chosen if chosen is not None and chosen not in named and self.evaluate.tasks else None

    def task_rhythm(self, num_samples: int) -> Rhythm:
        """Return the steps after which `evaluate.tasks` run during training. `num_samples`: sequences of one epoch."""
        every = self.evaluate.tasks_every
        return self.evaluation_rhythm(num_samples) if every is None else self._rhythm(every, num_samples)

    def _rhythm(self, every: int | str | None, num_samples: int) -> Rhythm:
        epochs = read_epochs(every)
        steps = every if isinstance(every, int) else None
        return Rhythm(self.batches, steps, None if epochs is None else num_samples * epochs)

    def num_steps(self, num_samples: int) -> int:
        """Return the optimizer steps of the run. `num_samples`, the sequences of one epoch, is used only for epochs."""
        if self.train.steps is not None:
            return self.train.steps
        if self.train.tokens is not None:
            return self.batches.num_steps(-(-self.train.tokens // self.data.sequence_len))
        assert self.train.epochs is not None
        num_samples *= self.rollout.group_size if self.draws_answers else 1
        # In decimal arithmetic: in binary, 0.1 of 30 samples is slightly more than 3, which would add a step.
        return self.batches.num_steps(math.ceil(Fraction(str(self.train.epochs)) * num_samples))


def find_refused(recipe: Recipe) -> Iterator[str]:
    """Yield a message for what the engine or the sampler of a recipe cannot do, and for settings of another one."""
    engine, sampler = recipe.engine, recipe.rollout.sampler
    useless = (name for name in recipe.rollout.model_extra or () if name != sampler)
    yield from (f"rollout.{name} is for rollout.sampler={name}; set that, or remove {name}." for name in useless)
    if sampler in SAMPLERS:
        limits = getattr(SAMPLERS[sampler], "limits", ())
        yield from find_limited(recipe, [Case("rollout.sampler", (sampler,), limits, f"use rollout.sampler={NATIVE}")])
    for name in (*ENGINES.own, *(recipe.model_extra or ())):
        section = getattr(recipe, name, None) if name in ENGINES else None
        if section and name != engine and section != type(section)():
            reason = f"{name} has settings of engine={name}, and the recipe has engine={engine}"
            yield f"{reason}; set engine: {name}, or remove {name}."
    if engine in ENGINES:
        yield from find_limited(recipe, [Case("engine", (engine,), ENGINES[engine].limits, f"use engine={NATIVE}")])
