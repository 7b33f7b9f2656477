"""The section of the recipe about what is minimised."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from echelon.ground.sizes import join_words
from echelon.recipe.key_limits import OWN, Case, Limit, OnlyWith
from echelon.recipe.names import OBJECTIVES, ObjectiveName, ObjectiveRow, Options
from echelon.recipe.section import Count, Flag, Number, PathOrName, Positive, PositiveOrZero, Section, distinct, rule

_OWN = ObjectiveRow("")
"""What the recipe knows of an objective from outside of echelon."""

SMOOTHED = ("sigmoid", "robust", "exo_pair")
"""The losses on pairs that take `label_smoothing`."""

MAX_LABELS = 2**16
"""Prepared data has 16 bits for the number of a label."""


def _only(*names: str) -> OnlyWith:
    """Marks a key of these objectives."""
    return OnlyWith("objective.name", names)


class ObjectiveConfig(Section):
    """What is minimised."""

    around = "objective."
    limits = (
        *(
            Case("objective.name", (name,), (Limit("objective.loss", (None, *row.losses), "has other losses"),))
            for name, row in OBJECTIVES.items()
            if row.losses
        ),
        Case("objective.on_policy_fraction", (), (
            Limit("objective.top_k", (None,), "trains on new answers, which no teacher has scored in advance"),
        ), "remove objective.on_policy_fraction"),
    )  # fmt: skip

    name: ObjectiveName = Field(
        "causal_lm",
        description="`causal_lm` predicts the next token; `dpo`, `orpo`, `simpo` and `cpo` prefer chosen over rejected "
        "answers; `kto` prefers good over bad ones; `distill` brings the predictions close to those of "
        "`objective.teacher`; `grpo` raises the `reward` of the model's own answers to the prompts of the data; "
        "`reward` trains a reward model, which scores chosen above rejected answers; `classification` trains a model "
        "that gives each text one of `objective.labels`. Your own is a loss function of (logits, labels, extra), or an "
        "objective class.",
    )
    options: Annotated[Options, _only(OWN)] = Field(
        None, description="Arguments of your own loss or objective, by their names."
    )
    beta: Annotated[Positive, _only("dpo", "orpo", "simpo", "cpo", "kto", "distill")] = Field(
        0.1,
        description="how strongly the model is kept close to the reference (`dpo`, `kto`); the factor of rewards "
        "(`simpo`, `cpo`); the weight of the odds ratio (`orpo`); the teacher's share of the mixture, between 0 and 1 "
        "(`distill` with `loss: jsd`; default there: 0.5).",
    )
    loss: Annotated[
        Literal[
            "sigmoid", "sigmoid_norm", "hinge", "ipo", "robust", "exo_pair", "nca_pair", "sppo_hard", "apo_zero",
            "apo_down", "kto", "apo_zero_unpaired", "forward", "reverse", "jsd",
        ]
        | None, _only("dpo", "cpo", "kto", "distill")
    ] = Field(None, description="the loss of a pair; `cpo` takes `sigmoid`, `hinge` and `ipo`; of an answer of `kto`: "
        "`kto` and `apo_zero_unpaired`; the divergence of `distill`: `forward`, KL(teacher || model), `reverse`, "
        "KL(model || teacher), and `jsd`, the generalised Jensen-Shannon divergence. Default: `sigmoid`, for `kto` "
        "`kto`, for `distill` `forward`.")  # fmt: skip
    label_smoothing: Annotated[Number, Field(ge=0, lt=0.5), _only("dpo", "simpo", "cpo")] = Field(
        0.0,
        description="the probability that a preference label is wrong; with the losses `sigmoid`, `robust` and "
        "`exo_pair`.",
    )
    gamma: Annotated[PositiveOrZero, _only("simpo")] = Field(
        0.5, description="the reward margin that a pair should have."
    )
    sft_weight: Annotated[PositiveOrZero | None, _only("dpo", "simpo", "cpo", "distill")] = Field(
        None,
        description="the weight of the cross-entropy of the chosen answers, per token; of `distill`: that of the "
        "labels. Default: 0, for `cpo` 1.",
    )
    desirable_weight: Annotated[Positive, _only("kto")] = Field(1.0, description="the weight of good answers.")
    undesirable_weight: Annotated[Positive, _only("kto")] = Field(1.0, description="the weight of bad answers.")
    center_weight: Annotated[PositiveOrZero, _only("reward")] = Field(
        0.0, description="the weight of the squared sum of a pair's scores, which keeps them around 0."
    )
    labels: Annotated[tuple[str, ...], distinct("objective.labels"), _only("classification")] = Field(
        (),
        description="the names of the labels, in the order of the model's scores. The field `label` of a record is one "
        "of them, or its position in the list, from 0.",
    )
    advantage: Annotated[Literal["normalized", "centered", "leave_one_out"], _only("grpo")] = Field(
        "normalized",
        description="what an answer's reward is compared with: the mean of its group, in standard deviations of the "
        "group (GRPO); the mean alone, `centered` (Dr. GRPO); the mean of the others, `leave_one_out` (RLOO).",
    )
    normalize: Annotated[Literal["sequence", "token", "constant"], _only("grpo")] = Field(
        "sequence",
        description="the loss is a mean over the tokens of each answer, then over answers (`sequence`, GRPO); over all "
        "tokens (`token`, DAPO); or a sum divided by answers times `rollout.max_new_tokens` (`constant`, Dr. GRPO).",
    )
    ratio: Annotated[Literal["token", "sequence"], _only("grpo")] = Field(
        "token",
        description="the importance ratio of each token, or the geometric mean of those of an answer (`sequence`, "
        "GSPO). It is 1 with `rollout.updates: 1`.",
    )
    clip: Annotated[tuple[Annotated[Number, Field(ge=0, lt=1)], PositiveOrZero], _only("grpo")] = Field(
        (0.2, 0.2),
        description="the importance ratio is clipped at 1 - the first and 1 + the second; DAPO: [0.2, 0.28].",
    )
    kl_weight: Annotated[PositiveOrZero, _only("grpo")] = Field(
        0.0,
        description="the weight of the divergence from the reference, the weights that training started from. 0 needs "
        "no reference.",
    )
    kl_unbiased: Annotated[Flag, _only("grpo")] = Field(
        False,
        description="multiply the divergence by the importance ratio, so that its gradient is that of the divergence "
        "itself (DeepSeek-V3.2). Without it, it is the gradient of the estimate (DeepSeekMath).",
    )
    teacher: Annotated[PathOrName | None, _only("distill")] = Field(
        None,
        description="the model whose predictions are learned: a run, an HF folder or a hub id, with the same "
        "tokenizer.",
    )
    top_k: Annotated[Count | None, _only("distill")] = Field(
        None,
        description="learn from this many most likely tokens of the teacher and the rest together, which `echelon data "
        "RECIPE --prepare` has written beside the data. Default: each process has the teacher in memory, and learns "
        "from all tokens.",
    )
    temperature: Annotated[Positive, _only("distill")] = Field(
        1.0, description="temperature by which the logits of teacher and model are divided before the loss."
    )
    on_policy_fraction: Annotated[Number, Field(ge=0, le=1), _only("distill")] = Field(
        0.0,
        description="the share of steps that train on the model's own answers to the prompts of the data, drawn as "
        "`rollout` says, instead of on the answers of the data.",
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
    def _smoothing_has_a_meaning(self) -> None:
        wrong, loss = self.label_smoothing, self.loss_name
        if wrong and loss and loss not in SMOOTHED:
            raise ValueError(
                f"objective.label_smoothing={wrong} has no effect with objective.loss={loss}; remove it, or set "
                f"objective.loss={join_words([name for name in SMOOTHED if name in self.row.losses])}."
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
