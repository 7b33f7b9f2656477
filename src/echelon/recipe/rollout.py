"""Sections of the recipe for training from rewards: how answers are drawn, and what judges them."""

from functools import partial
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from echelon.recipe.key_limits import OnlyWith
from echelon.recipe.names import REWARD_MODEL, SAMPLERS, EnvironmentName, Options, RewardName, SamplerName
from echelon.recipe.section import Count, CountOrZero, Number, OpenSection, Positive, Section, expand_list, expand_name


class EnvironmentConfig(Section):
    """What the model talks with, over several turns."""

    name: EnvironmentName = Field(
        description="A class of your own, `package.module:Name`, with the methods `reset` and `step`. One is built for "
        "each answer."
    )
    options: Options = Field(None, description="Arguments of the class, by name.")
    max_turns: Count = Field(8, description="Maximum number of turns of the model.")
    timeout_seconds: Positive = Field(
        60.0,
        description="Maximum seconds for the replies to one turn of all answers. An answer without a reply has no "
        "reward, and is not trained on.",
    )


_Environment = Annotated[
    EnvironmentConfig,
    BeforeValidator(partial(expand_name, key="name"), json_schema_input_type=EnvironmentConfig | EnvironmentName),
]
_JUDGED = OnlyWith("objective.name", ("grpo",))
_DRAWN = OnlyWith("objective.name", ("grpo",), also="objective.on_policy_fraction")
"""On-policy distillation reads these too: each prompt has one answer, and nothing judges it."""


class RolloutConfig(OpenSection):
    """The answers that the model gives in each step, on which it is then trained."""

    around = "rollout."
    plugins = (SAMPLERS,)

    group_size: Annotated[Count, _JUDGED] = Field(
        8, description="answers to each prompt, which are compared with each other."
    )
    max_new_tokens: Annotated[Count, _DRAWN] = Field(
        256, description="maximum tokens of an answer. A prompt may use the rest of `data.sequence_len`."
    )
    temperature: Annotated[Positive, _DRAWN] = Field(
        1.0, description="temperature of sampling. The loss is that of the same temperature."
    )
    top_p: Annotated[Number, Field(gt=0, le=1), _DRAWN] = Field(
        1.0, description="sample from the likeliest tokens with this total probability."
    )
    top_k: Annotated[CountOrZero, _DRAWN] = Field(0, description="sample from the k most likely tokens; 0: from all.")
    environment: Annotated[_Environment | None, _JUDGED] = Field(
        None,
        description="the class that replies to the model, for answers of several turns. A turn has at most "
        "`max_new_tokens` tokens, a whole answer at most `data.sequence_len`. `environment: package.module:Name` is a "
        "shorthand.",
    )
    sampler: Annotated[SamplerName, _JUDGED] = Field(
        "native",
        description="what samples the answers of one turn: echelon, whose draws do not depend on the other answers, "
        "servers of vLLM, or the sampler of another package.",
    )
    lag: Annotated[CountOrZero, Field(le=1), _JUDGED] = Field(
        0,
        description="1: sample the answers of the next step before the updates of this one, so that their rewards "
        "are computed meanwhile. The importance ratio corrects for the older weights.",
    )
    updates: Annotated[Count, _JUDGED] = Field(
        1,
        description="optimizer updates on the answers of a step. After the first, answers are weighted by how much "
        "more likely they have become (the importance ratio), within `objective.clip`.",
    )
    max_num_seqs: Annotated[Count | Literal["auto"], _DRAWN] = Field(
        "auto",
        description="maximum number of answers that a process samples at once; fewer if its memory is too small for "
        "them beside the weights and the optimizer.",
    )
    skip: Annotated[tuple[Literal["uniform", "truncated"], ...], _JUDGED] = Field(
        (),
        description="answers that are not trained on: `uniform`, groups in which all have the same reward, which have "
        "no gradient; `truncated`, those that `max_new_tokens` has cut off, whose rewards still count in the mean of "
        "their group.",
    )
    max_mismatch: Annotated[Positive | None, _JUDGED] = Field(
        None,
        description="stop the run when the log-probability of a token differs by more than this between the sampler "
        "and the training pass. The largest and the mean difference are in every row.",
    )
    importance_cap: Annotated[Positive | None, _JUDGED] = Field(
        None,
        description="weight each token by its probability in the training pass over that of the sampler, at most this "
        "(truncated importance sampling).",
    )


class RewardConfig(Section):
    """One reward of an answer. The weighted rewards are added up."""

    name: RewardName = Field(
        description="`exact` (the answer is the text of a field), `number` (its last number is that of a field), "
        "`regex` (a pattern matches), `math` (it equals a field as mathematics), `model` (the score of a reward model, "
        "in the option `path`: a run, an HF folder or a hub id), or a function of your own, `package.module:function`, "
        "of (answers, records)."
    )
    weight: Number = Field(1.0, description="Factor on the reward.")
    options: Options = Field(None, description="Further arguments of the function or of `model`, by name.")
    timeout_seconds: Positive = Field(
        60.0,
        description="Maximum seconds to judge the answers of a step; others have no reward and are not trained on. Not "
        "for `model`.",
    )

    @property
    def is_model(self) -> bool:
        """Whether it is the score of a reward model, and not a function."""
        return self.name == REWARD_MODEL

    @property
    def model_path(self) -> str | None:
        """The run, HF folder or hub id of a reward model; None for a function, and if the options name none."""
        path = (self.options or {}).get("path") if self.is_model else None
        return path if isinstance(path, str) else None


_RewardOrName = RewardConfig | RewardName
Rewards = Annotated[
    tuple[RewardConfig, ...],
    BeforeValidator(partial(expand_list, key="name"), json_schema_input_type=_RewardOrName | list[_RewardOrName]),
]
