"""The section of the recipe about what is minimised."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from echelon.recipe.names import OBJECTIVES, ObjectiveName, ObjectiveRow, Options, check_has_options, list_objectives
from echelon.recipe.section import Count, Flag, Number, PathOrName, Positive, PositiveOrZero, Section, distinct, rule

_OWN = ObjectiveRow("")
"""What the recipe knows of an objective from outside of echelon."""

SMOOTHED = ("sigmoid", "robust", "exo_pair")
"""The losses on pairs that take `label_smoothing`."""

MAX_LABELS = 2**16
"""Prepared data has 16 bits for the number of a label."""


class ObjectiveConfig(Section):
    """What is minimised."""

    name: ObjectiveName = Field(
        "causal_lm",
        description="`causal_lm` predicts the next token; `dpo`, `orpo`, `simpo` and `cpo` prefer chosen over rejected "
        "answers; `kto` prefers good over bad ones; `distill` brings the predictions close to those of "
        "`objective.teacher`; `grpo` raises the `reward` of the model's own answers to the prompts of the data; "
        "`reward` trains a reward model, which scores chosen above rejected answers; `classification` trains a model "
        "that gives each text one of `objective.labels`. Your own is a loss function of (logits, labels, extra), or an "
        "objective class.",
    )
    options: Options = Field(None, description="Arguments of your own loss or objective, by their names.")
    beta: Positive = Field(
        0.1,
        description="`dpo`, `kto`: how strongly the model is kept close to the reference. `simpo`, `cpo`: the factor "
        "of rewards. `orpo`: the weight of the odds ratio. `distill` with `loss: jsd`: the teacher's share of the "
        "mixture, between 0 and 1; default there: 0.5.",
    )
    loss: (
        Literal[
            "sigmoid", "sigmoid_norm", "hinge", "ipo", "robust", "exo_pair", "nca_pair", "sppo_hard", "apo_zero",
            "apo_down", "kto", "apo_zero_unpaired", "forward", "reverse", "jsd",
        ]
        | None
    ) = Field(None, description="`dpo`, `cpo`: the loss of a pair; `cpo` takes `sigmoid`, `hinge` and `ipo`; of an "
        "answer of `kto`: `kto` and `apo_zero_unpaired`; the divergence of `distill`: `forward`, KL(teacher || model), "
        "`reverse`, KL(model || teacher), and `jsd`, the generalised Jensen-Shannon divergence. Default: `sigmoid`, "
        "for `kto` `kto`, for `distill` `forward`.")  # fmt: skip
    label_smoothing: Number = Field(
        0.0,
        ge=0,
        lt=0.5,
        description="`dpo`, `simpo`, `cpo`: the probability that a preference label is wrong; with the losses "
        "`sigmoid`, `robust` and `exo_pair`.",
    )
    gamma: PositiveOrZero = Field(0.5, description="`simpo`: the reward margin that a pair should have.")
    sft_weight: PositiveOrZero | None = Field(
        None,
        description="`dpo`, `simpo`, `cpo`: the weight of the cross-entropy of the chosen answers, per token; "
        "`distill`: that of the labels. Default: 0, for `cpo` 1.",
    )
    desirable_weight: Positive = Field(1.0, description="`kto`: the weight of good answers.")
    undesirable_weight: Positive = Field(1.0, description="`kto`: the weight of bad answers.")
    center_weight: PositiveOrZero = Field(
        0.0,
        description="`reward`: the weight of the squared sum of a pair's scores, which keeps them around 0.",
    )
    labels: Annotated[tuple[str, ...], distinct("objective.labels")] = Field(
        (),
        description="`classification`: the names of the labels, in the order of the model's scores. The field `label` "
        "of a record is one of them, or its position in the list, from 0.",
    )
    advantage: Literal["normalized", "centered", "leave_one_out"] = Field(
        "normalized",
        description="`grpo`: what an answer's reward is compared with: the mean of its group, in standard deviations "
        "of the group (GRPO); the mean alone, `centered` (Dr. GRPO); the mean of the others, `leave_one_out` (RLOO).",
    )
    normalize: Literal["sequence", "token", "constant"] = Field(
        "sequence",
        description="`grpo`: the loss is a mean over the tokens of each answer, then over answers (`sequence`, GRPO); "
        "over all tokens (`token`, DAPO); or a sum divided by answers times `rollout.max_new_tokens` (`constant`, Dr. "
        "GRPO).",
    )
    ratio: Literal["token", "sequence"] = Field(
        "token",
        description="`grpo`: the importance ratio of each token, or the geometric mean of those of an answer "
        "(`sequence`, GSPO). It is 1 with `rollout.updates: 1`.",
    )
    clip: tuple[Annotated[Number, Field(ge=0, lt=1)], PositiveOrZero] = Field(
        (0.2, 0.2),
        description="`grpo`: the importance ratio is clipped at 1 - the first and 1 + the second; DAPO: [0.2, 0.28].",
    )
    kl_weight: PositiveOrZero = Field(
        0.0,
        description="`grpo`: the weight of the divergence from the reference, the weights that training started from. "
        "0 needs no reference.",
    )
    kl_unbiased: Flag = Field(
        False,
        description="`grpo`: multiply the divergence by the importance ratio, so that its gradient is that of the "
        "divergence itself (DeepSeek-V3.2). Without it, it is the gradient of the estimate (DeepSeekMath).",
    )
    teacher: PathOrName | None = Field(
        None,
        description="`distill`: the model whose predictions are learned: a run, an HF folder or a hub id, with the "
        "same tokenizer.",
    )
    top_k: Count | None = Field(
        None,
        description="`distill`: learn from this many most likely tokens of the teacher and the rest together, "
        "which `echelon data RECIPE --prepare` has written beside the data. Default: each process has the teacher in "
        "memory, "
        "and learns from all tokens.",
    )
    temperature: Positive = Field(
        1.0, description="`distill`: temperature by which the logits of teacher and model are divided before the loss."
    )
    on_policy_fraction: Number = Field(
        0.0,
        ge=0,
        le=1,
        description="`distill`: the share of steps that train on the model's own answers to the prompts of the data, "
        "drawn as `rollout` says, instead of on the answers of the data.",
    )
    router_loss: Flag = Field(
        True, description="Mixtures of experts: add the router loss that the model config enables."
    )

    @property
    def row(self) -> ObjectiveRow:
        """What the recipe knows of the objective."""
        return OBJECTIVES.get(self.name, _OWN)

    @property
    def scores_texts(self) -> bool:
        """Whether its model scores texts, and has no head for tokens."""
        return self.row.head == "score"

    @property
    def num_scores(self) -> int | None:
        """The scores that its model gives a text, one per label; None for a model with a head for tokens."""
        return max(1, len(self.labels)) if self.scores_texts else None

    @property
    def needs_reference(self) -> bool:
        """Whether it compares with the weights that training starts from."""
        return self.row.needs_reference or self.kl_weight > 0

    @property
    def loss_name(self) -> str:
        """The value of `loss`, or the default of the objective; empty if it has only one loss."""
        return self.loss or next(iter(self.row.losses), "")

    @property
    def teacher_in_memory(self) -> bool:
        """Whether each process keeps a teacher, or its part of one."""
        return self.teacher is not None and self.top_k is None

    @model_validator(mode="before")
    @classmethod
    def _beta_of_a_mixture(cls, given: Any) -> Any:
        if isinstance(given, dict) and (given.get("name"), given.get("loss")) == ("distill", "jsd"):
            return {"beta": 0.5, **given}
        return given

    @rule
    def _every_key_means_something(self) -> None:
        check_has_options("objective.name", self.name, self.options)
        for key in sorted({key for row in OBJECTIVES.values() for key in row.keys} - set(self.row.keys)):
            if getattr(self, key) != type(self).model_fields[key].default:
                raise ValueError(
                    f"objective.{key}={getattr(self, key)} has no effect with objective.name={self.name}; set "
                    f"objective.name={list_objectives(key=key)}, or remove it."
                )

    @rule
    def _loss_is_of_this_objective(self) -> None:
        losses = self.row.losses
        if self.loss is not None and self.loss not in losses:
            raise ValueError(
                f"objective.loss={self.loss} is no loss of objective.name={self.name}; use {', '.join(losses)}."
            )

    @rule
    def _smoothing_has_a_meaning(self) -> None:
        wrong, loss = self.label_smoothing, self.loss_name
        if wrong and loss and loss not in SMOOTHED:
            raise ValueError(
                f"objective.label_smoothing={wrong} has no effect with objective.loss={loss}; remove it, or set "
                f"objective.loss={' or '.join(name for name in SMOOTHED if name in self.row.losses)}."
            )
        if loss == "exo_pair" and not wrong:
            raise ValueError(
                "objective.loss=exo_pair compares with smoothed labels, and objective.label_smoothing=0 makes it "
                "infinite; set objective.label_smoothing, for example to 0.001, as in the paper of EXO."
            )

    @rule
    def _labels_are_a_choice(self) -> None:
        if self.row.answers == "labelled" and not 2 <= len(self.labels) <= MAX_LABELS:
            raise ValueError(
                f"objective.labels has {len(self.labels)} names, and objective.name={self.name} needs 2 to "
                f"{MAX_LABELS:,}; list the labels of the data, for example objective.labels: [negative, positive]. A "
                "number as the target (regression) and several labels of one text are not trained."
            )

    @rule
    def _a_teacher_is_named(self) -> None:
        if self.name != "distill":
            return
        if self.teacher is None:
            raise ValueError(
                "objective.name=distill needs a teacher; set objective.teacher to a run, an HF folder or a hub id."
            )
        default = type(self).model_fields["beta"].default
        if self.loss != "jsd" and self.beta != default:
            raise ValueError(
                f"objective.beta={self.beta:g} has no effect with objective.loss={self.loss_name}; set "
                "objective.loss=jsd, or remove it."
            )
        if self.loss == "jsd" and self.beta >= 1:
            raise ValueError(
                f"objective.beta={self.beta:g} is the teacher's share of a mixture; use a value between 0 and 1, or "
                "objective.loss=forward or reverse, the limits of the divergence at 0 and 1."
            )
        if self.on_policy_fraction and self.top_k is not None:
            raise ValueError(
                f"objective.top_k={self.top_k} needs answers that the teacher has scored in advance, but "
                f"objective.on_policy_fraction={self.on_policy_fraction:g} trains on new ones; remove one of them."
            )
