"""Rewards from models that score texts. They run in the training process, because they need its device.

The other rewards are functions in a process of their own: see `rewards.py`.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from echelon.ground.errors import ConfigError
from echelon.ground.extensions import check_options
from echelon.ground.run_files import RunFiles, is_model_folder, is_run
from echelon.learn.checkpoint.first_weights import load_frozen
from echelon.learn.data.conversation import Prompt
from echelon.learn.data.examples import parse_example
from echelon.learn.data.mixture import MixtureDataset
from echelon.learn.data.prepared import PreparedData, read_prompts
from echelon.learn.data.readers.record import BrokenRecordError
from echelon.learn.data.templates import ChatTemplate
from echelon.learn.data.tokenizer import load_tokenizer
from echelon.learn.model.build import load_config
from echelon.learn.model.hub import is_hub_name
from echelon.learn.model.model_folder import find_model_dir
from echelon.planner.model_shape import count_scores
from echelon.recipe.document import Recipe
from echelon.recipe.load import load_recipe
from echelon.recipe.names import REWARD_MODEL

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_TOKENS_AT_ONCE = {"cuda": 16384, "cpu": 2048}  # of a forward pass, with padding


@dataclass(frozen=True)
class RewardModelOptions:
    """The options of a reward `model`. `path`: a run, a folder or a hub id. `field`: of a record, with the prompt."""

    path: str
    field: str = "prompt"


class RewardTexts:
    """Makes the texts that a reward model reads: a prompt and an answer, in its own tokens."""

    def __init__(self, recipe: Recipe, index: int) -> None:
        """Read the config and the tokenizer of the model that a reward of the recipe names.

        Args:
            recipe: with hub ids replaced by local copies.
            index: the number of the reward.

        Raises:
            ConfigError: the options are others, the folder is not there, its run trained an adapter, or its model does
                not give a text one score.
            DataError: the folder has no tokenizer.
        """
        reward, trusted = recipe.reward[index], recipe.model.trust_remote_code
        check_options(f"reward.{index}.name", REWARD_MODEL, RewardModelOptions, 0, reward.options)
        self.options = RewardModelOptions(**(reward.options or {}))
        self.key = f"reward.{index}.options.path={self.options.path}"
        path = Path(self.options.path)
        if not is_run(path) and not is_model_folder(path):
            raise ConfigError(f"{self.key} is no run and no HF folder (config.json); give one of these, or a hub id.")
        if is_run(path) and load_recipe(RunFiles(path).recipe_path)[0].adapter.is_adapter:
            raise ConfigError(
                f"{self.key}: this run trained an adapter; write the whole model with `echelon export {path} OUT "
                "--merge` and give path: OUT."
            )
        self.config: PretrainedConfig = load_config(str(path), trusted)
        self._check_scores()
        self._tokenizer: Any = load_tokenizer(find_model_dir(str(path)), trusted, f"reward.{index}.options.path")

    def _check_scores(self) -> None:
        fix = "give a model that was trained with objective.name=reward, or another with one score per text"
        count = count_scores(self.config.to_dict())
        if count is None:
            kind = (self.config.architectures or ["a model without architectures"])[0]
            raise ConfigError(f"{self.key} is no reward model ({kind}); {fix}.")
        if count != 1:
            raise ConfigError(f"{self.key} gives a text {count} scores (num_labels={count}), not one; {fix}.")

    def check(self, record: Mapping[str, Any]) -> None:
        """Raise ConfigError if the model cannot read the prompt of a record."""
        field = f"{self.key.rpartition('.')[0]}.field={self.options.field}"
        try:
            prompt = self._prompt_of(record)
        except BrokenRecordError as error:
            raise ConfigError(f"{field}: the first record {error}; name the field with the prompt.") from error
        if not isinstance(prompt.content, str) and self._tokenizer.chat_template is None:
            raise ConfigError(
                f"{self.key}: its tokenizer has no chat template, and the prompts of data.train are messages; give a "
                "reward model that was trained on messages, or prompts that are texts."
            )

    def encode(self, answer: str, record: Mapping[str, Any]) -> list[int]:
        """Return the ids of the prompt of a record with an answer to it. Raises BrokenRecordError.

        A text has the special tokens that the tokenizer adds, and its end token, as in training; what the chat
        template makes of messages has none besides.
        """
        prompt, tokenizer = self._prompt_of(record), self._tokenizer
        if isinstance(prompt.content, str):
            ids: list[int] = tokenizer(prompt.content + answer)["input_ids"]
            end = tokenizer.eos_token_id
            ids = ids if end is None or ids[-1:] == [end] else [*ids, end]
        else:
            turns = [*prompt.content, {"role": "assistant", "content": answer}]
            template = ChatTemplate.of(tokenizer, f"{self.key}: its chat template", prompt.tools)
            text = template.prompt(turns, generate=False, tools=prompt.tools)
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        most = getattr(self.config.get_text_config(decoder=True), "max_position_embeddings", None)
        if most is not None and len(ids) > most:
            raise BrokenRecordError(f"has {len(ids)} tokens with its answer, and the reward model reads {most}")
        return ids

    def _prompt_of(self, record: Mapping[str, Any]) -> Prompt:
        if self.options.field not in record:
            raise BrokenRecordError(f"has no field `{self.options.field}`; its fields are {', '.join(record)}")
        others = {name: record[name] for name in ("system", "tools") if record.get(name) is not None}
        prompt = parse_example({"prompt": record[self.options.field], **others})
        assert isinstance(prompt, Prompt)
        return prompt


class RewardModel:
    """A frozen model that judges answers by its scores."""

    def __init__(self, recipe: Recipe, index: int, dtype: torch.dtype, device: torch.device) -> None:
        """Load the model. Raises as RewardTexts, and CheckpointError for damaged weights."""
        self._texts = RewardTexts(recipe, index)
        self._model: Any = load_frozen(recipe, self._texts.options.path, dtype, device)
        self._device = device

    @property
    def num_bytes(self) -> int:
        """Bytes of the model on its device."""
        return int(self._model.get_memory_footprint())

    def judge(self, answers: Sequence[str], records: Sequence[Mapping[str, Any]]) -> tuple[list[float], str | None]:
        """Return the score of each answer, NaN for one without, and what is wrong with those, as a clause."""
        known: dict[int, list[int]] = {}
        reason = "its score is not finite"
        for number, (answer, record) in enumerate(zip(answers, records, strict=True)):
            try:
                known[number] = self._texts.encode(answer, record)
            except BrokenRecordError as error:
                reason = f"its record {error}"
        scores = [math.nan] * len(answers)
        for number, score in zip(known, self.score(list(known.values())), strict=True):
            scores[number] = score if math.isfinite(score) else math.nan
        unjudged = sum(map(math.isnan, scores))
        return scores, f"gave no number for {unjudged} of {len(answers)} answers: {reason}" if unjudged else None

    @torch.no_grad()
    def score(self, texts: Sequence[Sequence[int]]) -> list[float]:
        """Return the scores of texts, which are token ids. Texts of about the same length are read together."""
        scores = [math.nan] * len(texts)
        for numbers in self._batches(texts):
            ids, mask = self._pad([texts[number] for number in numbers])
            found = self._model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, 0].tolist()
            for number, score in zip(numbers, found, strict=True):
                scores[number] = score
        return scores

    def _batches(self, texts: Sequence[Sequence[int]]) -> Iterator[list[int]]:
        """Yield the numbers of the texts of each forward pass; without a padding token one, as transformers asks."""
        limit = 0 if self._padding is None else _TOKENS_AT_ONCE[self._device.type]
        batch: list[int] = []
        for number in sorted(filter(texts.__getitem__, range(len(texts))), key=lambda number: len(texts[number])):
            if batch and (len(batch) + 1) * len(texts[number]) > limit:
                yield batch
                batch = []
            batch.append(number)
        if batch:
            yield batch

    @property
    def _padding(self) -> int | None:
        padding: int | None = self._model.config.get_text_config().pad_token_id
        return padding

    def _pad(self, texts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        """Return ids and attention mask, both [texts, tokens], with padding at the end."""
        width = max(map(len, texts))
        ids = [[*text, *[self._padding or 0] * (width - len(text))] for text in texts]
        mask = [[1] * len(text) + [0] * (width - len(text)) for text in texts]
        return torch.tensor(ids, device=self._device), torch.tensor(mask, device=self._device)


def find_reward_models(recipe: Recipe) -> list[int]:
    """Return the numbers of the rewards that are models."""
    return [index for index, reward in enumerate(recipe.reward) if reward.is_model]


def check_reward_models(recipe: Recipe, data: PreparedData | None = None) -> None:
    """Refuse reward models that are not there, or give no score, or cannot read the first prompts of the data.

    Without data, models of the hub are not there yet, and are left out. Raises as RewardTexts, and ConfigError.
    """
    for index in find_reward_models(recipe):
        path = recipe.reward[index].model_path
        if data is None and path is not None and is_hub_name(path):
            continue
        texts = RewardTexts(recipe, index)
        if data is not None:
            train = data.train
            for part in train.parts if isinstance(train, MixtureDataset) else (train,):
                [prompt] = read_prompts(part, [0])
                texts.check(prompt.record)
