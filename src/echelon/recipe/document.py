"""The complete recipe: all top-level keys, and the rules that concern several sections."""

import math
from collections.abc import Iterator
from fractions import Fraction
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any

from pydantic import Discriminator, Field, Tag
from typing_extensions import override

from echelon.ground.extensions import EXTENSION
from echelon.ground.redaction import redact
from echelon.recipe.batches import BatchSchedule, Rhythm, constant_batch, ramp_batch
from echelon.recipe.deepspeed import DeepspeedConfig
from echelon.recipe.engine_sections import HorovodConfig, TensorflowConfig
from echelon.recipe.engines import ENGINES, NATIVE, OWN
from echelon.recipe.inputs import AdapterConfig, DataConfig, ModelConfig, RunConfig, TrainedTokenizerConfig
from echelon.recipe.launch_sections import LaunchConfig
from echelon.recipe.names import REWARD_MODEL, TRACKERS, Tracker
from echelon.recipe.objective import ObjectiveConfig
from echelon.recipe.operation import (
    BudgetConfig,
    CheckpointConfig,
    EvaluateConfig,
    FaultConfig,
    MlflowConfig,
    ProfileConfig,
    PrometheusConfig,
)
from echelon.recipe.rollout import OF_DISTILLATION, Rewards, RolloutConfig
from echelon.recipe.schedule import find_fault
from echelon.recipe.section import OpenSection, PathOrName, Section, name_or_mapping, read_epochs, rule
from echelon.recipe.synchronization import KEPT, QUORUM, SyncConfig
from echelon.recipe.training import EngineName, OptimConfig, ParallelConfig, ParallelName, TrainConfig
from echelon.recipe.yaml_text import render_yaml, show_value

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


class Recipe(OpenSection):
    """A training run: model, data, and settings. Frozen, hashable, complete with defaults."""

    plugins = (ENGINES, TRACKERS)

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
    reward: Rewards = Field(
        (),
        description="With `objective.name: grpo`: the rewards of the model's answers. `reward: exact` is a shorthand "
        "for one.",
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

    @rule
    def _engine_can_run_it(self) -> None:
        if (message := next(find_refused(self, self.engine), None)) is not None:
            raise ValueError(message)

    @rule
    def _tokenizer_of_a_new_model(self) -> None:
        if self.tokenizer is None and self.model.checkpoint is None:
            raise ValueError(
                "tokenizer is missing: a model made from model.config has none of its own; use tokenizer: bytes, "
                "tokenizer: {train: {vocab_size: 4096}}, or the folder or hub id of one."
            )

    @rule
    def _the_length_of_a_stream_is_unknown(self) -> None:
        if self.data.stream is None:
            return
        epochs = {} if self.train.epochs is None else {"train.epochs": f"{self.train.epochs:g}"}
        for key, value in {**epochs, **self._rhythms_in_epochs}.items():
            raise ValueError(
                f"{key}={value} does not go with data.stream: how many sequences an epoch has is known only at its "
                "end; count in steps or tokens."
            )
        if self.objective.top_k is not None:
            raise ValueError(
                f"objective.top_k={self.objective.top_k} does not go with data.stream: a teacher's predictions are "
                "prepared for all of the text; remove one of the two."
            )
        if isinstance(self.tokenizer, TrainedTokenizerConfig):
            raise ValueError(
                "tokenizer.train does not go with data.stream: its text is taken from all of the data; name a "
                "tokenizer, for example one that `echelon data --prepare` has trained on a part of it."
            )
        least, given = 3 * self.data.stream.window * self.sample_len * 4 / 1e9, self.data.stream.cache_gb
        if given < least:
            raise ValueError(
                f"data.stream.cache_gb={given:g} may not hold three windows of data.stream.window="
                f"{self.data.stream.window:,} sequences; set it to {least:.3g} or more, or use a smaller window."
            )

    @rule
    def _a_reference_is_what_was_there(self) -> None:
        if not self.objective.needs_reference:
            return
        named = f"objective.name={self.objective.name}"
        if self.adapter.init == "pissa":
            raise ValueError(
                f"adapter.init=pissa changes the frozen weights, and {named} compares with them as they were; use "
                "adapter.init=default."
            )
        if self.adapter.modules_to_save:
            raise ValueError(
                f"adapter.modules_to_save={list(self.adapter.modules_to_save)} trains weights in place, and "
                f"{named} needs the original weights; remove it (rows of model.new_tokens are trained "
                "anyway), or use adapter.method=full, which keeps a copy."
            )

    @rule
    def _answers_of_a_pair_are_apart(self) -> None:
        if self.objective.row.answers == "pairs" and self.data.document_mask is False:
            raise ValueError(
                "data.document_mask=false lets documents of a sequence attend to each other, and "
                f"objective.name={self.objective.name} has both answers of a pair in one sequence; use "
                "data.document_mask=auto."
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
    def _scores_are_no_text(self) -> None:
        for needs, value in (
            (f"evaluate.prompts={list(self.evaluate.prompts)} need", self.evaluate.prompts),
            (f"evaluate.tasks={list(self.evaluate.tasks)} need", self.evaluate.tasks),
            (f"fault.verify_passes_every={self.fault.verify_passes_every} needs", self.fault.verify_passes_every),
        ):
            if self.objective.scores_texts and value:
                raise ValueError(
                    f"{needs} a model that writes text, but objective.name={self.objective.name} trains one that only "
                    "scores texts; remove it."
                )

    @rule
    def _a_judged_answer_has_a_sequence(self) -> None:
        if self.objective.row.answers != "judged":
            return
        named = f"objective.name={self.objective.name}"
        if self.data.packing is True:
            raise ValueError(
                f"data.packing=true puts several answers into a sequence, and {named} compares each with the prompt of "
                "the next sequence; use data.packing=auto."
            )
        if self.objective.loss_name == "kto" and self.global_batch_size < 2:
            key = self.train.batch_key
            raise ValueError(
                f"train.{key}={getattr(self.train, key)} is one sequence, and {named} needs another answer to compare "
                "with; use a larger batch, or objective.loss=apo_zero_unpaired."
            )

    @rule
    def _own_loop_calls_the_learner(self) -> None:
        if self.loop is None:
            return
        own = f"train.loop={self.loop}" if self.train.loop else f"objective.name={self.objective.name}"
        for key, value, allowed, reason in (
            ("engine", self.engine, ("native",), "other engines run only echelon's loop"),
            ("sync.name", self.sync.name, ("every_step",), "only echelon's loop has the steps in which replicas agree"),
            ("fault.on_bad_step", self.fault.on_bad_step, ("stop", "skip"), "echelon cannot rewind your loop"),
            ("fault.spike_factor", self.fault.spike_factor, (None,), "your loop applies a step before it is recorded"),
        ):
            if value not in allowed:
                fix = " or ".join("null" if choice is None else choice for choice in allowed)
                raise ValueError(f"{key}={value} does not go with {own}: {reason}; set {key}={fix}, or remove {own}.")

    @rule
    def _rewards_have_a_loop(self) -> None:
        if not self.draws_answers:
            used = OF_DISTILLATION if self.samples_answers else frozenset[str]()
            keys = [
                f"rollout.{key}" if used else "rollout"
                for key in RolloutConfig.model_fields
                if key not in used and getattr(self.rollout, key) != getattr(RolloutConfig(), key)
            ]
            for key in [*keys, *(["reward"] if self.reward else [])]:
                needed = "grpo" if used or self.objective.name != "distill" else "grpo, or objective.on_policy_fraction"
                raise ValueError(
                    f"{key} has no effect with objective.name={self.objective.name}; set objective.name={needed}, or "
                    f"remove {key}."
                )
        elif not self.reward and self.rollout.environment is None and self.train.loop is None:
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
    def _a_foreign_sampler_draws_plainly(self) -> None:
        sampler = self.rollout.sampler
        if sampler == "native":
            return
        for key, value, unset, why in (
            ("rollout.environment", self.rollout.environment, None, "it gives answers of one turn"),
            ("rollout.top_p", self.rollout.top_p, 1.0, "it draws from all tokens"),
            ("rollout.top_k", self.rollout.top_k, 0, "it draws from all tokens"),
            ("adapter.method", self.adapter.method, "full", "it has no adapter"),
            ("engine", self.engine, "native", "it takes the weights of the native engine"),
        ):
            if value != unset:
                shown = f"{key}={value}" if isinstance(value, str | float | int) else key
                raise ValueError(
                    f"{shown} does not go with rollout.sampler={sampler}: {why}; remove it, or set "
                    "rollout.sampler=native."
                )

    @rule
    def _answers_fit_the_sequence(self) -> None:
        room, length = self.rollout.max_new_tokens, self.data.sequence_len
        if self.samples_answers and room > length - 2:
            raise ValueError(
                f"rollout.max_new_tokens={room} leaves no room for a prompt in data.sequence_len={length}; increase "
                "data.sequence_len, or lower rollout.max_new_tokens."
            )
        if self.objective.on_policy_fraction and self.data.packing is True:
            raise ValueError(
                "data.packing=true puts several answers into a sequence, and objective.on_policy_fraction="
                f"{self.objective.on_policy_fraction:g} needs the prompt of each; use data.packing=auto."
            )

    @rule
    def _answers_fit_the_batch(self) -> None:
        if not self.draws_answers:
            return
        group = self.rollout.group_size
        if group < 2 and self.objective.advantage != "centered":
            raise ValueError(
                f"rollout.group_size={group}: answers are compared with others to the same prompt; use 2 or more."
            )
        if self.global_batch_size % group:
            raise ValueError(
                f"train.{self.train.batch_key}={getattr(self.train, self.train.batch_key)} is {self.global_batch_size} "
                f"answers in each step, which rollout.group_size={group} does not divide; use a multiple of it."
            )
        most = self.global_batch_size * self.data.sequence_len
        if self.rollout.lag and most > MOST_KEPT_TOKENS:
            raise ValueError(
                f"rollout.lag={self.rollout.lag}: the answers of a step, which every checkpoint keeps, have up to "
                f"{most} tokens, and may have {MOST_KEPT_TOKENS}; use fewer answers or a "
                "smaller data.sequence_len, or set rollout.lag=0."
            )
        for key, value, unset in (
            ("train.batch_ramp", self.train.batch_ramp, None),
            ("data.source", self.data.source, None),
        ):
            if value != unset:
                raise ValueError(f"{key} does not go with objective.name=grpo, whose batches are answers; remove it.")

    @rule
    def _a_loss_has_one_answer(self) -> None:
        every_steps = self.checkpoint.snapshot_every_steps
        if self.sync.name == QUORUM and every_steps is not None:
            raise ValueError(
                f"checkpoint.snapshot_every_steps={every_steps}: with sync.name={QUORUM} the other replicas hold what "
                "a snapshot would; remove this key."
            )
        if self.sync.name in KEPT and self.fault.on_lost_process == "replace":
            raise ValueError(
                f"fault.on_lost_process=replace: with sync.name={self.sync.name} the others go on without a lost "
                "process; remove this key."
            )

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
    def _a_mixture_has_no_epoch(self) -> None:
        if self.data.is_mixture and self.train.epochs is not None:
            raise ValueError(
                f"train.epochs={self.train.epochs:g} is not defined for sources with a weight, which have epochs of "
                "different lengths; use train.steps or train.tokens."
            )
        for key, every in self._rhythms_in_epochs.items() if self.data.is_mixture else ():
            raise ValueError(
                f"{key}={every} is not defined for sources with a weight, which have no epoch in common; use a number "
                "of steps."
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

    @property
    def _rhythms_in_epochs(self) -> dict[str, str]:
        """The keys of rhythms that are counted in passes over the data, and their values in quotes."""
        keys = ("checkpoint.every", "train.eval_every", "evaluate.tasks_every")
        values = {key: attrgetter(key)(self) for key in keys}
        return {key: repr(every) for key, every in values.items() if read_epochs(every) is not None}

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


def find_refused(recipe: Section, engine: str) -> Iterator[str]:
    """Yield a message for each key of a recipe that its engine cannot run, and for settings of another engine."""
    for name in (*ENGINES.own, *(recipe.model_extra or ())):
        section = getattr(recipe, name, None) if name in ENGINES else None
        if section and name != engine and section != type(section)():
            yield (
                f"{name} has settings of engine={name}, and the recipe has engine={engine}; set engine: {name}, or "
                f"remove {name}."
            )
    for limit in ENGINES[engine].limits if engine in ENGINES else ():
        try:
            value = attrgetter(limit.key)(recipe)
        except AttributeError:  # `parallel` is a name
            continue
        if (OWN if isinstance(value, str) and EXTENSION.fullmatch(value) else value) not in limit.values:
            possible = " or ".join(show_value(one) for one in limit.values)
            yield (
                f"{limit.key}={show_value(value)}: engine={engine} {limit.why}; use {limit.key}={possible}, or "
                f"engine={NATIVE}."
            )
