"""Answers of several turns: a model talks with the environments of its recipe, turn by turn, on all ranks together."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from echelon.ground.errors import DataError, first_line
from echelon.learn.answers.environments import EnvironmentProcess, Reply, Said
from echelon.learn.answers.rollouts import Played, Rollouts, draw_seed
from echelon.learn.answers.sampling import Sampling, row_seed
from echelon.learn.data.prepared import PromptRecord
from echelon.learn.data.templates import ChatTemplate
from echelon.learn.distributed.objects import gather_found, gather_objects

if TYPE_CHECKING:
    from echelon.learn.learner import Learner


@dataclass
class _Conversation:
    """A prompt, and what the model and the environment have said since."""

    record: Mapping[str, Any]
    prompt: tuple[int, ...]
    number: int
    """Of this answer among those to all prompts."""
    answer: list[int] = field(default_factory=list)
    written: list[bool] = field(default_factory=list)
    log_probabilities: list[Tensor] = field(default_factory=list)
    at_temperature: list[Tensor] = field(default_factory=list)
    last: Sequence[int] = ()
    """The model's last turn."""
    turns: int = 0
    earned: float = 0.0
    goes_on: bool = True
    is_done: bool = False
    problem: str | None = None

    def add(self, ids: Sequence[int], scores: "tuple[Tensor, Tensor] | None" = None) -> None:
        """Append tokens: of the model with their log-probabilities, or of the environment."""
        own, cooled = (torch.zeros(len(ids)),) * 2 if scores is None else scores
        self.answer += ids
        self.written += [scores is not None] * len(ids)
        self.log_probabilities.append(own)
        self.at_temperature.append(cooled)

    def fail(self, problem: str) -> None:
        """End without a reward. `problem`: why, a clause about the environment."""
        self.problem, self.earned, self.goes_on = problem, math.nan, False


class Conversations:
    """Lets a model answer prompts in turns with an environment each. Every method is collective."""

    def __init__(
        self,
        learner: "Learner",
        process: EnvironmentProcess | None,
        report: Callable[[str], None] = lambda activity: None,
    ) -> None:
        """`process`: on one of the ranks with the same prompts. `report` is called with each activity that begins."""
        config = learner.recipe.rollout.environment
        assert config is not None, "the recipe has an environment"
        self._learner, self._process, self._report, self._config = learner, process, report, config
        self._wording = ReplyWriter(learner.tokenizer)

    def hold(self, prompts: Sequence[PromptRecord], sampling: Sampling) -> Rollouts:
        """Return the answers, `sampling.num_samples` to each prompt.

        The tokens that the model drew stay as they are, and those of a reply follow them. A turn begins only if
        `sampling.max_tokens` fit in `data.sequence_len`; else the answer ends there. The draws of a turn depend on the
        seed, the text so far, the number of the answer and that of the turn.

        Raises:
            TrainingError: the process of the environments cannot be started again; on every rank.
        """
        talks = [
            _Conversation(prompt.record, prompt.ids, prompt.number * sampling.num_samples + number)
            for prompt in prompts
            for number in range(sampling.num_samples)
        ]
        self._begin(talks, sampling)
        for turn in range(self._config.max_turns):
            # The first turn of all: an answer has at least one token.
            active = {number: talk for number, talk in enumerate(talks) if talk.goes_on or not turn}
            if not any(gather_objects(bool(active), self._learner.meshes.everyone)):
                break
            self._speak(list(active.values()) or talks[:1], sampling, turn, is_filler=not active)
            self._listen(active, sampling, is_last=turn + 1 == self._config.max_turns)
        return self._as_rollouts(talks)

    def _begin(self, talks: Sequence[_Conversation], sampling: Sampling) -> None:
        """Build the environments, and append what they say first to the prompts."""
        records = [talk.record for talk in talks]
        seeds = [draw_seed(sampling.seed, talk.prompt, talk.number) for talk in talks]
        for talk, reply in zip(talks, self._ask(lambda process: process.reset(records, seeds)), strict=True):
            try:
                prompt = self._wording.open(talk.prompt, reply.said)
            except DataError as error:
                reply = replace(reply, problem=str(error))
            if reply.problem is not None:
                talk.fail(reply.problem)
            elif len(prompt) > self._room(sampling):
                talk.fail(f"leaves no room for rollout.max_new_tokens={sampling.max_tokens} in data.sequence_len")
            else:
                talk.prompt = tuple(prompt)

    def _speak(self, talks: Sequence[_Conversation], sampling: Sampling, turn: int, is_filler: bool) -> None:
        """Draw a turn of the model. `is_filler`: a rank without any takes part, as all must, and drops what it drew."""
        self._report("sampling answers")
        seed = row_seed(sampling.seed, "turn", turn) if turn else sampling.seed
        drawn = self._learner.generate(
            [(*talk.prompt, *talk.answer) if not is_filler else talk.prompt for talk in talks],
            replace(sampling, num_samples=1, seed=seed),
            numbers=[talk.number for talk in talks],
        )
        if is_filler:
            return
        for talk, ids, *scores in zip(talks, drawn.answers, drawn.log_probabilities, drawn.at_temperature, strict=True):
            talk.add(ids, (scores[0], scores[1]))
            talk.last = ids
            talk.turns += 1

    def _listen(self, active: Mapping[int, _Conversation], sampling: Sampling, is_last: bool) -> None:
        """Give the environments what the model has said, and append what they reply if another turn follows."""
        decode = self._learner.tokenizer.decode
        heard = {
            number: decode(list(talk.last), skip_special_tokens=True)
            for number, talk in active.items()
            if talk.problem is None
        }
        for number, reply in zip(heard, self._ask(lambda process: process.step(heard)), strict=True):
            talk = active[number]
            talk.earned += reply.reward
            talk.is_done, talk.goes_on = reply.is_done, not (reply.is_done or is_last)
            try:
                ids = self._wording.reply(talk.prompt, talk.last, reply.said) if talk.goes_on else []
            except DataError as error:
                reply = replace(reply, problem=str(error))
            if reply.problem is not None:
                talk.fail(reply.problem)
            elif len(talk.prompt) + len(talk.answer) + len(ids) > self._room(sampling):
                talk.goes_on = False
            elif talk.goes_on:
                talk.add(ids)

    def _room(self, sampling: Sampling) -> int:
        """The most tokens before a turn. The last token of a sequence is only a target."""
        return self._learner.recipe.data.sequence_len + 1 - sampling.max_tokens

    def _ask(self, ask: Callable[[EnvironmentProcess], list[Reply]]) -> list[Reply]:
        """Ask the environments, and return their replies on every rank with these prompts."""
        self._report("the environment")
        place, process = self._learner.meshes.data_rank, self._process
        gathered = gather_found(
            lambda: (place, None if process is None else ask(process)), self._learner.meshes.everyone
        )
        return next(found for other, found in gathered if other == place and found is not None)

    def _as_rollouts(self, talks: Sequence[_Conversation]) -> Rollouts:
        """Return the conversations as answers."""
        problems = [talk.problem for talk in talks if talk.problem is not None]
        failures = [
            f"{self._config.name} {problem} ({problems.count(problem)} of {len(talks)} answers)."
            for problem in dict.fromkeys(problems)
        ]
        return Rollouts(
            [talk.prompt for talk in talks],
            [tuple(talk.answer) for talk in talks],
            [torch.cat(talk.log_probabilities) for talk in talks],
            [torch.cat(talk.at_temperature) for talk in talks],
            [talk.is_done for talk in talks],
            self._learner.place,
            max(gather_objects(len(talks), self._learner.meshes.everyone)),
            Played(
                [talk.written for talk in talks],
                [talk.earned for talk in talks],
                [talk.turns for talk in talks],
                failures,
            ),
        )


class ReplyWriter:
    """Writes what an environment says as tokens: by the chat template if the prompt is messages, else as it is."""

    _MARK = "what-was-said-before"

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._tokenizer = tokenizer

    def open(self, prompt: Sequence[int], said: Said) -> list[int]:
        """Return a prompt with what is said before the model's first turn. Raises DataError if it cannot be written."""
        if not said:
            return list(prompt)
        if not self._is_chat(prompt):
            return [*prompt, *self._write(said)]
        begun = self._tokenizer.decode(list(prompt)).removesuffix(self._closing)
        return self._encode(begun + self._follow([], said))

    def reply(self, prompt: Sequence[int], last: Sequence[int], said: Said) -> list[int]:
        """Return what follows the model's turn `last`. Raises DataError if it cannot be written."""
        if not self._is_chat(prompt):
            return self._write(said)
        ids = self._encode(self._follow([{"role": "user", "content": "-"}], said))
        # The template ends the turn, which the model has done itself unless it was cut off.
        return ids[1:] if ids[:1] == list(last[-1:]) else ids

    def _is_chat(self, prompt: Sequence[int]) -> bool:
        """Whether the template has written the prompt: it then ends as a template ends before an answer."""
        return bool(self._closing) and self._tokenizer.decode(list(prompt)).endswith(self._closing)

    @cached_property
    def _closing(self) -> str:
        """What the template puts between a message of the user's and the answer; empty without a template."""
        return "" if self._tokenizer.chat_template is None else self._follow([], None)

    def _follow(self, before: list[dict[str, Any]], said: Said) -> str:
        """Return the text that follows a message, with what is said: the user's, or an answer to the message before."""
        marked = {"role": "assistant" if before else "user", "content": self._MARK}
        messages = [{"role": "user", "content": said}] if isinstance(said, str) else list(said or ())
        try:
            template = ChatTemplate.of(self._tokenizer, "the chat template")
            text = template.prompt([*before, marked, *messages], generate=True)
        except Exception as error:  # the template's, or of what was said
            raise DataError(f"said what the chat template cannot write: {first_line(error)}") from error
        return text.rpartition(self._MARK)[2]

    def _write(self, said: Said) -> list[int]:
        if said and not isinstance(said, str):
            raise DataError("said messages, but its prompt is a text")
        return self._encode(str(said or ""))

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids
