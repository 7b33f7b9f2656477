"""Parse the records of each instruction format.

`recipe/data_formats.py` lists the fields of each format. The formats are interpreted as their origins do: Alpaca,
ShareGPT as in LLaMA-Factory, OpenAI's chat API, and TRL for prompt-completion and preference records.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import takewhile
from typing import Any

import numpy as np

from echelon.learn.data.conversation import (
    Completion,
    Conversation,
    EncodedDocument,
    Judged,
    Labelled,
    Parsed,
    Preference,
    Prompt,
    Text,
)
from echelon.learn.data.readers.record import BrokenRecordError, Example, parse_ids
from echelon.recipe.data_formats import LABELLED_FORMAT, PROMPT_FORMAT, PROMPTS, recognise_format

IGNORED_LABEL = -100
"""The label of a token without loss, as in `transformers`."""

MAX_MARGIN = 1e30
"""A margin is stored in fp32."""

_NO_PROMPT = (
    f"no prompt in {', '.join(f'`{name}`' for name in PROMPTS)}, and `chosen` and `rejected` do not start with a shared"
)

_ROLES = {
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("assistant", "gpt", "bot", "chatbot", "model", "function_call"), "assistant"),
    **dict.fromkeys(("tool", "function", "observation", "function_response", "ipython"), "tool"),
}


def parse_example(record: Example, format: str | None = None) -> Parsed:
    """Parse an example of a format; None: of that which its fields tell. Raises BrokenRecordError."""
    format = format or recognise_format(record, is_named=True)
    if format is None:
        raise BrokenRecordError(f"does not have the fields of any format; its fields are {', '.join(record) or 'none'}")
    return _PARSERS[format](record)


def _parse_turns(name: str, record: Example) -> Conversation:
    return _converse(record, _read_turns(record[name], name))


def _parse_alpaca(record: Example) -> Conversation:
    """Turn the question and the answer into two turns."""
    answer = {"role": "assistant", "content": _text(record["output"], "output")}
    return _converse(record, [*_ask_alpaca(record), answer])


def _ask_alpaca(record: Example) -> list[dict[str, Any]]:
    """Return the history and the question as turns. Templates that use `instruction` and `input` find them there."""
    instruction, text = (_text(record.get(name, ""), name) for name in ("instruction", "input"))
    turns: list[dict[str, Any]] = []
    history = record.get("history", [])
    for pair in _list(history, "history"):
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise BrokenRecordError("has a `history` that is not a list of [question, answer]")
        turns.append({"role": "user", "content": _text(pair[0], "history")})
        turns.append({"role": "assistant", "content": _text(pair[1], "history")})
    question = {"role": "user", "content": f"{instruction}\n{text}" if text and instruction else instruction or text}
    turns.append(
        {**question, "instruction": instruction, "input": text} if text and "instruction" in record else question
    )
    return turns


def _parse_prompt_completion(record: Example) -> Text:
    return _parse_answer(record, record["prompt"], record["completion"], "completion")


def _parse_unpaired(record: Example) -> Judged:
    """Parse an answer and whether it is good, in TRL's unpaired preference format."""
    return Judged(_parse_answer(record, record["prompt"], record["completion"], "completion"), _read_label(record))


def _parse_unpaired_messages(record: Example) -> Judged:
    """Parse a conversation that ends with the judged answer."""
    turns = _list(record["messages"], "messages")
    if len(turns) < 2 or _role(turns[-1]) != "assistant":
        raise BrokenRecordError("has `messages` that do not end with a judged answer after a prompt")
    return Judged(_parse_answer(record, turns[:-1], turns[-1:], "messages"), _read_label(record))


def _read_label(record: Example) -> bool:
    """Read `label`: true or 1 for a good answer, false or 0 for a bad one; in tables it may be the word."""
    label = record["label"]
    label = {"true": True, "false": False}.get(label.lower(), label) if isinstance(label, str) else label
    if not isinstance(label, bool | int | float) or label not in (0, 1):
        raise BrokenRecordError(f"has label={label!r}; use true for a good answer, false for a bad one")
    return bool(label)


def _parse_preference(record: Example) -> Preference:
    """Parse two answers, each a text, a turn or a list of turns. The prompt is a separate field or starts both answers.

    The result is plain text if the answers and the prompt are texts and there is no `system` or `tools`, else turns.
    """
    chosen, rejected = (_as_turns(record[name]) for name in ("chosen", "rejected"))
    if type(chosen) is not type(rejected):
        raise BrokenRecordError(
            "has `chosen` and `rejected` of different types; give two texts, two messages, or two lists of messages"
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
    """Wrap a single turn in a list; return anything else unchanged."""
    return [value] if isinstance(value, Mapping) else value


def _parse_rejected_response(record: Example) -> Preference:
    """Parse a conversation that ends with the chosen answer, and the rejected answer, in the format of ms-swift."""
    turns, rejected = _list(record["messages"], "messages"), record["rejected_response"]
    if not turns or _role(turns[-1]) != "assistant":
        raise BrokenRecordError("has `messages` that do not end with an assistant turn, the chosen answer")
    other = {"role": "assistant", "content": rejected} if isinstance(rejected, str) else rejected
    return _pair(record, turns[:-1], turns[-1:], [other])


def _pair(record: Example, prompt: Any, chosen: Any, rejected: Any) -> Preference:
    if chosen == rejected:
        raise BrokenRecordError("has the same chosen and rejected answer")
    margin = record.get("margin", 0.0)
    if isinstance(margin, bool) or not isinstance(margin, int | float) or not abs(margin) < MAX_MARGIN:
        raise BrokenRecordError(
            f"has margin={margin!r:.80}; use a number, by which the chosen answer should score more"
        )
    return Preference(
        _parse_answer(record, prompt, chosen, "chosen"),
        _parse_answer(record, prompt, rejected, "rejected"),
        float(margin),
    )


def _find_prompt(record: Example, chosen: Any) -> str | list[Any] | None:
    """Find the prompt of two answers: text only if `prompt` is text, else turns; None if the answers contain it."""
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
        raise BrokenRecordError(f"has an assistant turn at the end of the prompt `{name}`")
    return turns


def _role(turn: Any) -> str | None:
    """Return the role of a turn as templates name it; None if the value is not a turn."""
    role = turn.get("role", turn.get("from")) if isinstance(turn, Mapping) else None
    return _ROLES.get(role) if isinstance(role, str) else None


def _shared_text(chosen: str, rejected: str) -> int:
    """Return the length of the prompt that two texts start with: up to the last white space before they differ."""
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
    """Split into the turns of the prompt and of each answer. The prompt is a separate field or part of the answers."""
    shared = 0
    while shared < min(len(chosen), len(rejected)) - 1 and chosen[shared] == rejected[shared]:
        shared += 1
    turns = chosen[:shared]
    prompt_turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt or []
    said = [_content(turn) for turn in turns]
    if not all(_content(turn) in said for turn in prompt_turns):
        turns = [*prompt_turns, *turns]
    if not turns:
        raise BrokenRecordError(f"has {_NO_PROMPT} turn")
    return turns, chosen[shared:], rejected[shared:]


def _content(turn: Any) -> Any:
    return turn.get("content", turn.get("value")) if isinstance(turn, Mapping) else None


def _parse_answer(record: Example, prompt: Any, answer: Any, name: str) -> Text:
    """Parse a prompt and an answer: two plain texts, or two lists of turns. Only the answer can have targets."""
    if isinstance(prompt, str) and isinstance(answer, str):
        for field in ("system", "tools"):
            if field in record:
                raise BrokenRecordError(f"has `{field}`, which plain text cannot contain; give lists of messages")
        return Completion(_text(prompt, "prompt"), _text(answer, name))
    if not isinstance(prompt, list) or not isinstance(answer, list):
        raise BrokenRecordError(f"has `prompt` and `{name}` that are neither two texts nor two lists of messages")
    prompt_turns, turns = _read_turns(prompt, "prompt"), _read_turns(answer, name)
    return _converse(record, [*prompt_turns, *turns], answers=len(prompt_turns))


def _parse_tokens(record: Example) -> EncodedDocument:
    """Parse token ids and labels. A token is a target if its label is the id at the same position."""
    ids, labels = (parse_ids(record[name], name).astype(np.int64) for name in ("input_ids", "labels"))
    if len(ids) != len(labels):
        raise BrokenRecordError(f"has {len(ids)} `input_ids` and {len(labels)} `labels`")
    targets = labels != IGNORED_LABEL
    wrong = np.flatnonzero(targets & (labels != ids))
    if len(wrong):
        index = int(wrong[0])
        raise BrokenRecordError(
            f"has the label {labels[index]} at position {index}, where the id is {ids[index]}; a label must be the id "
            f"at the same position (not shifted) or {IGNORED_LABEL}"
        )
    return EncodedDocument(ids, targets)


def _parse_prompt(record: Example) -> Prompt:
    """Parse a prompt: a text, which no template renders, or turns, of which the last one is not the assistant's."""
    prompt = _as_turns(record["prompt"])
    if isinstance(prompt, str) and not ("system" in record or "tools" in record):
        return Prompt(_text(prompt, "prompt"))
    turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else _read_turns(prompt, "prompt")
    if turns[-1]["role"] == "assistant":
        raise BrokenRecordError("has an assistant turn at the end of `prompt`")
    return Prompt(tuple(_with_system(record, turns)), _read_tools(record.get("tools")))


def _parse_labelled(record: Example) -> Labelled:
    """Parse what a classifier reads: `text`, perhaps with `text_pair`, or `messages`, which a template renders."""
    label, keys = record["label"], [name for name in ("text", "messages") if name in record]
    if len(keys) != 1:
        raise BrokenRecordError(f"has {' and '.join(f'`{name}`' for name in keys) or 'neither `text` nor `messages`'}")
    for name in ("text_pair",) if keys == ["messages"] else ("system", "tools"):
        if name in record:
            raise BrokenRecordError(f"has `{name}`, which does not go with `{keys[0]}`")
    if keys == ["messages"]:
        turns = _with_system(record, _read_turns(record["messages"], "messages"))
        return Labelled(tuple(turns), label, tools=_read_tools(record.get("tools")))
    pair = record.get("text_pair")
    return Labelled(_text(record["text"], "text"), label, None if pair is None else _text(pair, "text_pair"))


_PARSERS: dict[str, Callable[[Example], Parsed]] = {
    "unpaired_messages": _parse_unpaired_messages,
    "unpaired_preference": _parse_unpaired,
    "messages": partial(_parse_turns, "messages"),
    "sharegpt": partial(_parse_turns, "conversations"),
    "alpaca": _parse_alpaca,
    "prompt_completion": _parse_prompt_completion,
    "preference": _parse_preference,
    "rejected_response": _parse_rejected_response,
    "tokens": _parse_tokens,
    PROMPT_FORMAT: _parse_prompt,
    LABELLED_FORMAT: _parse_labelled,
}


def _converse(record: Example, turns: Sequence[dict[str, Any]], answers: int = 0) -> Conversation:
    """Build a conversation from turns, with the record's own system message and tools."""
    count = len(turns)
    turns = _with_system(record, turns)
    answers += (answers > 0) * (len(turns) - count)
    if not any(turn["role"] == "assistant" for turn in turns[answers:]):
        raise BrokenRecordError("has no assistant turn, so there is nothing to train on")
    learned = tuple(_read_flag(turn) for turn in turns)
    messages = tuple({key: turn[key] for key in turn if key not in ("train", "weight")} for turn in turns)
    return Conversation(messages, learned, _read_tools(record.get("tools")), answers)


def _with_system(record: Example, turns: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the turns after the record's own system message, if it has one and they have none."""
    system = _text(record.get("system", ""), "system")
    if not system or any(turn["role"] == "system" for turn in turns):
        return list(turns)
    return [{"role": "system", "content": system}, *turns]


def _read_flag(turn: Mapping[str, Any]) -> bool | None:
    """Read a turn's `train` or `weight` (0 or 1): whether it is a target. None if it has neither."""
    flags = {name: turn[name] for name in ("train", "weight") if name in turn}
    for name, flag in flags.items():
        if not isinstance(flag, bool | int | float) or flag not in (0, 1):
            raise BrokenRecordError(
                f"has a turn with {name}={flag!r}; use true or 1 to train on a turn, else false or 0"
            )
    return all(flags.values()) if flags else None


def _read_turns(value: Any, name: str) -> list[dict[str, Any]]:
    turns = [_read_turn(turn, name) for turn in _list(value, name)]
    if not turns:
        raise BrokenRecordError(f"has no turn in `{name}`")
    return turns


def _read_turn(turn: Any, name: str) -> dict[str, Any]:
    """Read a turn for templates, from `role` and `content` or from `from` and `value`. Null fields are dropped."""
    if not isinstance(turn, Mapping):
        raise BrokenRecordError(f"has a turn in `{name}` that is not an object with a role and a text")
    turn = {key: value for key, value in turn.items() if value is not None}
    role, content = turn.pop("role", turn.pop("from", None)), turn.pop("content", turn.pop("value", None))
    if not isinstance(role, str) or role not in _ROLES:
        raise BrokenRecordError(f"has a turn with role {role!r} in `{name}`; the roles are {', '.join(_ROLES)}")
    calls = turn.pop("tool_calls", [])
    if role == "function_call":
        calls, content = _read_json(_text(content, role), role), ""  # of one call or several
        calls = calls if isinstance(calls, list) else [calls]
    if content is None and not calls:
        raise BrokenRecordError(f"has a turn without text in `{name}`")
    read = {"role": _ROLES[role], "content": _read_content(content or "", name), **turn}
    if calls:
        read["tool_calls"] = [_read_call(call) for call in _list(calls, "tool_calls")]
    return read


def _read_content(content: Any, name: str) -> str:
    """Return the text of a turn; for a list of parts, their texts joined."""
    if not isinstance(content, list):
        return _text(content, name)
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if not isinstance(part, Mapping) or kind != "text":
            raise BrokenRecordError(f"has a part of type {kind!r} in `{name}`; only text is supported")
        texts.append(_text(part.get("text"), name))
    return "".join(texts)


def _read_call(call: Any) -> dict[str, Any]:
    """Read a tool call for templates: the arguments, JSON text in OpenAI's format, become an object."""
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise BrokenRecordError("has a tool call without a name")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        arguments = _read_json(arguments or "{}", "arguments")
    if not isinstance(arguments, Mapping):
        raise BrokenRecordError(f"has a call of {function['name']} whose arguments are not a JSON object")
    outer = call if "function" in call else {}
    return {**outer, "type": "function", "function": {"name": function["name"], "arguments": dict(arguments)}}


def _read_tools(value: Any) -> tuple[dict[str, Any], ...]:
    """Read tools in OpenAI's format, from a list or from the JSON text of a list."""
    if isinstance(value, str):
        value = _read_json(value, "tools") if value.strip() else []
    tools = _list([] if value is None else value, "tools")
    if not all(isinstance(tool, Mapping) for tool in tools):
        raise BrokenRecordError("has `tools` that are not a list of objects")
    return tuple(dict(tool) if "function" in tool else {"type": "function", "function": dict(tool)} for tool in tools)


def _read_json(text: str, name: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BrokenRecordError(f"has invalid JSON in `{name}` ({error})") from error


def _list(value: Any, name: str) -> list[Any]:
    if not isinstance(value, list):
        raise BrokenRecordError(f"has no list in `{name}`")
    return value


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise BrokenRecordError(f"has no text in `{name}`")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise BrokenRecordError(f"has text that is not UTF-8 in `{name}` ({error.reason})") from error
    return value
