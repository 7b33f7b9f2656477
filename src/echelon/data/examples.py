"""What the records of each instruction format mean: one function a format.

A format's fields stand in `recipe/data_formats.py`. The meanings are those of the formats' origins: Alpaca's,
ShareGPT's as LLaMA-Factory reads it, OpenAI's chat API, and TRL's for prompts with completions and preferences.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from typing import Any

import numpy as np

from echelon.data.conversation import Completion, Conversation, EncodedDocument, Preference, Text
from echelon.data.readers.record import BrokenRecordError, Example, parse_ids
from echelon.recipe.data_formats import PROMPTS, recognise_format

IGNORED_LABEL = -100
"""The label of a token that is not learned, as `transformers` has it."""

_NO_PROMPT = (
    f"no prompt in one of {', '.join(f'`{name}`' for name in PROMPTS)}, and `chosen` and `rejected` do not begin with "
    "a shared"
)

_ROLES = {
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("assistant", "gpt", "bot", "chatbot", "model", "function_call"), "assistant"),
    **dict.fromkeys(("tool", "function", "observation", "function_response", "ipython"), "tool"),
}


def parse_example(record: Example) -> Text | Preference | EncodedDocument:
    """What an example says. Raises BrokenRecordError."""
    format = recognise_format(record)
    if format is None:
        raise BrokenRecordError(f"has not the fields of any format, only {', '.join(record) or 'none'}")
    return _PARSERS[format](record)


def _parse_messages(record: Example) -> Conversation:
    return _converse(record, _read_turns(record["messages"], "messages"))


def _parse_sharegpt(record: Example) -> Conversation:
    return _converse(record, _read_turns(record["conversations"], "conversations"))


def _parse_alpaca(record: Example) -> Conversation:
    """Question and answer as two turns."""
    answer = {"role": "assistant", "content": _text(record["output"], "output")}
    return _converse(record, [*_ask_alpaca(record), answer])


def _ask_alpaca(record: Example) -> list[dict[str, Any]]:
    """Alpaca's question, behind its history. Templates that know instruction and input as such find them in it."""
    instruction, given = (_text(record.get(name, ""), name) for name in ("instruction", "input"))
    turns: list[dict[str, Any]] = []
    history = record.get("history", [])
    for pair in _list(history, "history"):
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise BrokenRecordError("holds a `history` that is not a list of [question, answer]")
        turns.append({"role": "user", "content": _text(pair[0], "history")})
        turns.append({"role": "assistant", "content": _text(pair[1], "history")})
    question = {"role": "user", "content": f"{instruction}\n{given}" if given and instruction else instruction or given}
    turns.append(
        {**question, "instruction": instruction, "input": given} if given and "instruction" in record else question
    )
    return turns


def _parse_prompt_completion(record: Example) -> Text:
    return _parse_answer(record, record["prompt"], record["completion"], "completion")


def _parse_preference(record: Example) -> Preference:
    """Two answers, each a text, a turn or a list of turns, with the prompt beside them or in both of them.

    They are plain texts where both the answers and `prompt` are and nothing else asks for turns, else turns.
    """
    chosen, rejected = (_as_turns(record[name]) for name in ("chosen", "rejected"))
    if type(chosen) is not type(rejected):
        raise BrokenRecordError(
            "holds `chosen` and `rejected` of two kinds; give two texts, two messages, or two lists of messages"
        )
    prompt = _find_prompt(record, chosen)
    if isinstance(chosen, str) and (isinstance(prompt, list) or "system" in record or "tools" in record):
        chosen, rejected = [{"role": "assistant", "content": chosen}], [{"role": "assistant", "content": rejected}]
    if prompt is None and isinstance(chosen, str):
        shared = _shared_text(chosen, rejected)
        prompt, chosen, rejected = chosen[:shared], chosen[shared:], rejected[shared:]
    elif isinstance(chosen, list):
        prompt, chosen, rejected = _split_turns(prompt, chosen, rejected)
    return _pair(record, prompt, chosen, rejected)


def _as_turns(value: Any) -> Any:
    """One turn as a list of it; anything else as it is."""
    return [value] if isinstance(value, Mapping) else value


def _parse_rejected_response(record: Example) -> Preference:
    """A conversation that ends in the chosen answer, and another answer in its place, as ms-swift has them."""
    turns, rejected = _list(record["messages"], "messages"), record["rejected_response"]
    if not turns or _role(turns[-1]) != "assistant":
        raise BrokenRecordError("holds `messages` that do not end with a turn of the assistant, the chosen answer")
    other = {"role": "assistant", "content": rejected} if isinstance(rejected, str) else rejected
    return _pair(record, turns[:-1], turns[-1:], [other])


def _pair(record: Example, prompt: Any, chosen: Any, rejected: Any) -> Preference:
    if chosen == rejected:
        raise BrokenRecordError("prefers an answer to itself: the chosen and the rejected one are the same")
    return Preference(
        _parse_answer(record, prompt, chosen, "chosen"), _parse_answer(record, prompt, rejected, "rejected")
    )


def _find_prompt(record: Example, chosen: Any) -> str | list[Any] | None:
    """The prompt beside two answers: a text only from `prompt`, else turns; None where the answers begin with it."""
    name = next((name for name in PROMPTS if name in record and record[name] != chosen), None)
    if name is None:
        return None
    if name == "question":
        return [{"role": "user", "content": _text(record[name], name)}]
    if name in ("instruction", "input"):
        return _ask_alpaca(record)
    if name == "prompt" and not isinstance(record[name], Mapping):
        return _text(record[name], name) if isinstance(record[name], str) else _list(record[name], name)
    turns = _list(_as_turns(record[name]), name)
    if turns and _role(turns[-1]) == "assistant":
        raise BrokenRecordError(f"holds a turn of the assistant at the end of `{name}`, which is the answers' prompt")
    return turns


def _role(turn: Any) -> str | None:
    """Whose turn it is, in the roles that templates know; None for what is no turn."""
    role = turn.get("role", turn.get("from")) if isinstance(turn, Mapping) else None
    return _ROLES.get(role) if isinstance(role, str) else None


def _shared_text(chosen: str, rejected: str) -> int:
    """How long the prompt is that two texts begin with: up to the last white space before they part."""
    same = takewhile(lambda pair: pair[0] == pair[1], zip(chosen, rejected, strict=False))
    shared = "".join(character for character, _ in same)
    if len(shared) in (len(chosen), len(rejected)) or not shared.split():
        raise BrokenRecordError(f"has {_NO_PROMPT} one")
    while shared and not shared[-1].isspace():
        shared = shared[:-1]
    return len(shared.rstrip())


def _split_turns(
    prompt: str | list[Any] | None, chosen: list[Any], rejected: list[Any]
) -> tuple[list[Any], list[Any], list[Any]]:
    """The prompt's turns and those of each answer, wherever the record has the prompt: by itself, or in the answers."""
    shared = 0
    while shared < min(len(chosen), len(rejected)) - 1 and chosen[shared] == rejected[shared]:
        shared += 1
    turns = chosen[:shared]
    given = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt or []
    said = [_content(turn) for turn in turns]
    if not all(_content(turn) in said for turn in given):
        turns = [*given, *turns]
    if not turns:
        raise BrokenRecordError(f"has {_NO_PROMPT} turn")
    return turns, chosen[shared:], rejected[shared:]


def _content(turn: Any) -> Any:
    return turn.get("content", turn.get("value")) if isinstance(turn, Mapping) else None


def _parse_answer(record: Example, prompt: Any, answer: Any, name: str) -> Text:
    """Two plain texts, or two lists of turns of which only the second can be learned."""
    if isinstance(prompt, str) and isinstance(answer, str):
        for field in ("system", "tools"):
            if field in record:
                raise BrokenRecordError(f"has `{field}`, for which plain text has no place; give lists of messages")
        return Completion(_text(prompt, "prompt"), _text(answer, name))
    if not isinstance(prompt, list) or not isinstance(answer, list):
        raise BrokenRecordError(f"holds `prompt` and `{name}` that are neither two texts nor two lists of messages")
    given, turns = _read_turns(prompt, "prompt"), _read_turns(answer, name)
    return _converse(record, [*given, *turns], answers=len(given))


def _parse_tokens(record: Example) -> EncodedDocument:
    """Ids as they are, learned where the label is the id at the same place."""
    ids, labels = (parse_ids(record[name], name).astype(np.int64) for name in ("input_ids", "labels"))
    if len(ids) != len(labels):
        raise BrokenRecordError(f"holds {len(ids)} `input_ids` and {len(labels)} `labels`")
    targets = labels != IGNORED_LABEL
    wrong = np.flatnonzero(targets & (labels != ids))
    if len(wrong):
        place = int(wrong[0])
        raise BrokenRecordError(
            f"holds the label {labels[place]} at place {place}, where the id is {ids[place]}; a label is the id at the "
            f"same place, unshifted, or {IGNORED_LABEL}"
        )
    return EncodedDocument(ids, targets)


_PARSERS: dict[str, Callable[[Example], Text | Preference | EncodedDocument]] = {
    "messages": _parse_messages,
    "sharegpt": _parse_sharegpt,
    "alpaca": _parse_alpaca,
    "prompt_completion": _parse_prompt_completion,
    "preference": _parse_preference,
    "rejected_response": _parse_rejected_response,
    "tokens": _parse_tokens,
}


def _converse(record: Example, turns: Sequence[dict[str, Any]], answers: int = 0) -> Conversation:
    """A conversation of turns that were read, with the record's own system message and tools."""
    turns = list(turns)
    system = _text(record.get("system", ""), "system")
    if system and not any(turn["role"] == "system" for turn in turns):
        turns.insert(0, {"role": "system", "content": system})
        answers += answers > 0
    if not any(turn["role"] == "assistant" for turn in turns[answers:]):
        raise BrokenRecordError("has no turn of the assistant, so nothing to learn")
    learned = tuple(_read_flag(turn) for turn in turns)
    messages = tuple({key: turn[key] for key in turn if key not in ("train", "weight")} for turn in turns)
    return Conversation(messages, learned, _read_tools(record.get("tools")), answers)


def _read_flag(turn: Mapping[str, Any]) -> bool | None:
    """Whether the turn says that it is learned: `train`, or `weight`, which has only 0 and 1. None: it says nothing."""
    flags = {name: turn[name] for name in ("train", "weight") if name in turn}
    for name, flag in flags.items():
        if not isinstance(flag, bool | int | float) or flag not in (0, 1):
            raise BrokenRecordError(f"holds a turn with {name}={flag!r}; a turn is learned (true, 1) or not (false, 0)")
    return all(flags.values()) if flags else None


def _read_turns(value: Any, name: str) -> list[dict[str, Any]]:
    turns = [_read_turn(turn, name) for turn in _list(value, name)]
    if not turns:
        raise BrokenRecordError(f"holds no turn in `{name}`")
    return turns


def _read_turn(turn: Any, name: str) -> dict[str, Any]:
    """A turn as templates take it, from `role` and `content` or from `from` and `value`; what is null is not there."""
    if not isinstance(turn, Mapping):
        raise BrokenRecordError(f"holds a turn in `{name}` that is no object with a role and a text")
    turn = {key: value for key, value in turn.items() if value is not None}
    role, content = turn.pop("role", turn.pop("from", None)), turn.pop("content", turn.pop("value", None))
    if not isinstance(role, str) or role not in _ROLES:
        raise BrokenRecordError(f"holds a turn of the role {role!r} in `{name}`; roles are {', '.join(_ROLES)}")
    calls = turn.pop("tool_calls", [])
    if role == "function_call":
        calls, content = _read_calls_of_text(content), ""
    if content is None and not calls:
        raise BrokenRecordError(f"holds a turn without text in `{name}`")
    read = {"role": _ROLES[role], "content": _read_content(content or "", name), **turn}
    if calls:
        read["tool_calls"] = [_read_call(call) for call in _list(calls, "tool_calls")]
    return read


def _read_content(content: Any, name: str) -> str:
    """The text of a turn; of a list of parts, their texts one behind the other."""
    if not isinstance(content, list):
        return _text(content, name)
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if not isinstance(part, Mapping) or kind != "text":
            raise BrokenRecordError(f"holds a part of the type {kind!r} in `{name}`; only text can be learned")
        texts.append(_text(part.get("text"), name))
    return "".join(texts)


def _read_calls_of_text(content: Any) -> list[Any]:
    """ShareGPT's `function_call`: the JSON of one call, or of several."""
    calls = _read_json(_text(content, "function_call"), "function_call")
    return calls if isinstance(calls, list) else [calls]


def _read_call(call: Any) -> dict[str, Any]:
    """A call as templates take it: arguments as an object, which OpenAI's format has as JSON text."""
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise BrokenRecordError("holds a call of a tool without a name")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        arguments = _read_json(arguments or "{}", "arguments")
    if not isinstance(arguments, Mapping):
        raise BrokenRecordError(f"holds a call of {function['name']} whose arguments are no JSON object")
    outer = call if "function" in call else {}
    return {**outer, "type": "function", "function": {"name": function["name"], "arguments": dict(arguments)}}


def _read_tools(value: Any) -> tuple[dict[str, Any], ...]:
    """Tools as OpenAI's format has them, from a list or the JSON text of one."""
    if isinstance(value, str):
        value = _read_json(value, "tools") if value.strip() else []
    tools = _list([] if value is None else value, "tools")
    if not all(isinstance(tool, Mapping) for tool in tools):
        raise BrokenRecordError("holds `tools` that are no list of objects")
    return tuple(dict(tool) if "function" in tool else {"type": "function", "function": dict(tool)} for tool in tools)


def _read_json(text: str, name: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BrokenRecordError(f"holds no JSON in `{name}` ({error})") from error


def _list(value: Any, name: str) -> list[Any]:
    if not isinstance(value, list):
        raise BrokenRecordError(f"holds no list in `{name}`")
    return value


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise BrokenRecordError(f"holds no text in `{name}`")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise BrokenRecordError(f"holds text that is not UTF-8 in `{name}` ({error.reason})") from error
    return value
