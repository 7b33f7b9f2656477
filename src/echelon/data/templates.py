"""Named chat templates, and the choice of the template of a run.

Each named template ends an assistant turn with a token at which generation stops and starts it with the generation
prompt, so that the targets can be located exactly (see `rendering`).
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from echelon.errors import ConfigError
from echelon.recipe.inputs import is_template
from echelon.stored import read_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


@dataclass(frozen=True)
class NamedTemplate:
    """A template's text, and the tokens that must be single tokens of the tokenizer."""

    text: str
    tokens: tuple[str, ...] = ()


# With tools in the form of Qwen2.5 and Hermes.
_CHATML = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages and messages[0]['role'] == 'system' %}
        {{- messages[0]['content'] + '\\n\\n' }}
    {%- endif %}
    {{- '# Tools\\n\\nYou may call one or more functions to assist with the user query.\\n\\n' }}
    {{- 'You are provided with function signatures within <tools></tools> XML tags:\\n<tools>' }}
    {%- for tool in tools %}
        {{- '\\n' + (tool | tojson) }}
    {%- endfor %}
    {{- '\\n</tools>\\n\\nFor each function call, return a json object with function name and arguments ' }}
    {{- 'within <tool_call></tool_call> XML tags:\\n<tool_call>\\n' }}
    {{- '{"name": <function-name>, "arguments": <args-json-object>}\\n</tool_call><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message['role'] == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message['content'] + '\\n</tool_response><|im_end|>\\n' }}
    {%- elif not (tools and loop.first and message['role'] == 'system') %}
        {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] }}
        {%- for call in message['tool_calls'] or [] %}
            {{- '\\n' if message['content'] or not loop.first else '' }}
            {{- '<tool_call>\\n' + (call['function'] | tojson) + '\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

_LLAMA3 = """\
{{- bos_token }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

# For models without a system role: the system message precedes the first question.
_JOIN_SYSTEM = """\
{%- if messages and messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] + '\\n\\n' %}
    {%- set turns = messages[1:] %}
{%- else %}
    {%- set system = '' %}
    {%- set turns = messages %}
{%- endif %}
"""

_MISTRAL = (
    "{{- bos_token }}\n"
    + _JOIN_SYSTEM
    + """\
{%- for message in turns %}
    {%- if message['role'] == 'assistant' %}
        {{- ' ' + message['content'] | trim + eos_token }}
    {%- elif message['role'] == 'user' %}
        {{- '[INST] ' + (system if loop.first else '') + message['content'] + ' [/INST]' }}
    {%- else %}
        {{- raise_exception('the template mistral does not support the role ' + message['role']) }}
    {%- endif %}
{%- endfor %}
"""
)

_GEMMA = (
    "{{- bos_token }}\n"
    + _JOIN_SYSTEM
    + """\
{%- for message in turns %}
    {%- if message['role'] not in ('user', 'assistant') %}
        {{- raise_exception('the template gemma does not support the role ' + message['role']) }}
    {%- endif %}
    {{- '<start_of_turn>' + ('model' if message['role'] == 'assistant' else 'user') + '\\n' }}
    {{- (system if loop.first else '') + message['content'] | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<start_of_turn>model\\n' }}
{%- endif %}
"""
)

_ZEPHYR = """\
{%- for message in messages %}
    {{- '<|' + message['role'] + '|>\\n' + message['content'] + eos_token + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>\\n' }}
{%- endif %}
"""

# The texts of Stanford's train.py. A turn of an alpaca record also has the keys `instruction` and `input`.
_ALPACA = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message['role'] == 'system' %}
        {{- message['content'] + '\\n\\n' }}
    {%- elif message['role'] == 'user' %}
        {%- if loop.first and message['input'] %}
            {{- 'Below is an instruction that describes a task, paired with an input that provides further context. ' }}
            {{- 'Write a response that appropriately completes the request.\\n\\n' }}
        {%- elif loop.first %}
            {{- 'Below is an instruction that describes a task. ' }}
            {{- 'Write a response that appropriately completes the request.\\n\\n' }}
        {%- endif %}
        {%- if message['input'] %}
            {{- '### Instruction:\\n' + message['instruction'] + '\\n\\n### Input:\\n' + message['input'] }}
        {%- else %}
            {{- '### Instruction:\\n' + message['content'] }}
        {%- endif %}
        {{- '\\n\\n### Response:' }}
    {%- elif message['role'] == 'assistant' %}
        {{- message['content'] + eos_token }}
        {{- '' if loop.last else '\\n\\n' }}
    {%- else %}
        {{- raise_exception('the template alpaca does not support the role ' + message['role']) }}
    {%- endif %}
{%- endfor %}
"""

_PLAIN = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message['role'] == 'assistant' %}
        {{- message['content'] + eos_token }}
    {%- else %}
        {{- message['content'] }}
    {%- endif %}
{%- endfor %}
"""

NAMED_TEMPLATES: dict[str, NamedTemplate] = {
    "chatml": NamedTemplate(_CHATML, ("<|im_start|>", "<|im_end|>")),
    "llama3": NamedTemplate(_LLAMA3, ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")),
    "mistral": NamedTemplate(_MISTRAL),
    "gemma": NamedTemplate(_GEMMA, ("<start_of_turn>", "<end_of_turn>")),
    "zephyr": NamedTemplate(_ZEPHYR),
    "alpaca": NamedTemplate(_ALPACA),
    "plain": NamedTemplate(_PLAIN),
}
"""The names for `data.chat_template`. `plain` joins the turns unchanged and ends each answer with eos."""


def load_template(choice: str) -> str:
    """Return the template text for `data.chat_template`: a name, the path of a file, or the template itself.

    Raises ConfigError for a value that is none of them.
    """
    if choice in NAMED_TEMPLATES:
        return NAMED_TEMPLATES[choice].text
    if is_template(choice):
        return choice
    path = Path(choice).expanduser()
    try:
        return read_text(path)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(
            f"data.chat_template={choice} is neither a named template ({', '.join(NAMED_TEMPLATES)}) nor a readable "
            f"file ({reason}); use one of these names or the path of a Jinja file."
        ) from error


def own_template(tokenizer: "PreTrainedTokenizerFast") -> str | None:
    """Return a tokenizer's own template, or the default one if it has several; None if it has none."""
    found = tokenizer.chat_template
    if isinstance(found, dict):
        found = found.get("default")
    return found or None
