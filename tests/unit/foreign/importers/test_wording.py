"""An imported recipe renders the same prompts as Axolotl and LLaMA-Factory, with the same targets.

The expected texts are derived by hand from the tools' code: Axolotl's `prompters.py`, `prompt_tokenizers.py` (the
prompt, then the answer and eos, which alone are learned unless train_on_inputs says otherwise) and `user_defined.py`;
LLaMA-Factory's `data/template.py`.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from echelon.foreign.importers import import_recipe
from echelon.ground.errors import ConfigError
from echelon.learn.data.preflight import InstructionOptions, build_instruction_encoding
from echelon.learn.data.readers.record import Fields, SourceFile
from echelon.learn.data.source import Source, list_files
from echelon.learn.data.templates import NAMED_TEMPLATES
from echelon.learn.data.tokenizer import add_new_tokens, build_bytes_tokenizer
from echelon.recipe.document import Recipe
from echelon.recipe.load import parse_recipe

CONTROL = [token for row in NAMED_TEMPLATES.values() for token in row.tokens]
BOTH = {"instruction": "Add them.", "input": "2 and 3", "output": "5"}
ALONE = {"instruction": "Say hello.", "output": "Hello!"}
WITH = (
    "Below is an instruction that describes a task, paired with an input that provides further context. Write a "
    "response that appropriately completes the request."
)
WITHOUT = "Below is an instruction that describes a task. Write a response that appropriately completes the request."


def imported(tmp_path: Path, given: dict[str, Any]) -> Recipe:
    (tmp_path / "file.json").write_text(json.dumps(given))
    return parse_recipe(import_recipe(tmp_path / "file.json").text, "imported")[0]


def axolotl(tmp_path: Path, dataset: dict[str, Any], **more: Any) -> Recipe:
    given = {"base_model": "m", "micro_batch_size": 1, "learning_rate": 1e-4, "datasets": [dataset], **more}
    return imported(tmp_path, given)


def rendered(recipe: Recipe, record: dict[str, Any]) -> tuple[str, str]:
    """The decoded text of a record, and its targets."""
    tokenizer = build_bytes_tokenizer()
    tokenizer.add_special_tokens({"eos_token": "</s>", "bos_token": "<s>"})
    tokenizer = add_new_tokens(tokenizer, [*CONTROL, "<|done|>"])
    data = recipe.data
    options = InstructionOptions(
        data.chat_template, data.train_on, data.system_prompt, data.document_separator or "eos"
    )
    file = SourceFile(Path("x.jsonl"), "x.jsonl", "jsonl", 1, 0, True, Fields("alpaca"))
    encoding = build_instruction_encoding(options, tokenizer, [file])
    assert encoding is not None
    (document,) = encoding.encode(record)
    whole, learned = (
        encoding.tokenizer.decode(ids.tolist(), skip_special_tokens=False)
        for ids in (document.ids, document.ids[document.targets])
    )
    return whole, learned


@pytest.mark.parametrize(
    ("kind", "both", "alone"),
    [
        (
            "alpaca",
            f"<s>{WITH}\n\n### Instruction:\nAdd them.\n\n### Input:\n2 and 3\n\n### Response:\n",
            f"<s>{WITHOUT}\n\n### Instruction:\nSay hello.\n\n### Response:\n",
        ),
        (
            "alpaca:chat",
            f"<s>SYSTEM: {WITH}\nUSER: Add them.\n2 and 3\nASSISTANT:",
            f"<s>SYSTEM: {WITHOUT}\nUSER: Say hello.\nASSISTANT:",
        ),
        (
            "alpaca:chatml",
            f"<s><|im_start|>system\n{WITH}<|im_end|>\n<|im_start|>user\nAdd them.\n2 and 3<|im_end|>\n"
            "<|im_start|>assistant\n",
            f"<s><|im_start|>system\n{WITHOUT}<|im_end|>\n<|im_start|>user\nSay hello.<|im_end|>\n"
            "<|im_start|>assistant\n",
        ),
        (
            "alpaca:phi",
            f"<s><|system|>\n{WITH}<|end|>\n<|user|>\nAdd them.<|end|>2 and 3<|assistant|>",
            f"<s><|system|>\n{WITHOUT}<|end|>\n<|user|>\nSay hello.<|end|>\n<|assistant|>\n",
        ),
    ],
)
def test_axolotls_alpaca_prompt_and_targets(tmp_path: Path, kind: str, both: str, alone: str) -> None:
    """They do not depend on the model's own chat template."""
    recipe = axolotl(tmp_path, {"path": "a.jsonl", "type": kind}, chat_template="llama3")
    assert rendered(recipe, BOTH) == (f"{both}5</s>", "5</s>")
    assert rendered(recipe, ALONE) == (f"{alone}Hello!</s>", "Hello!</s>")


def test_axolotls_train_on_inputs_makes_the_whole_text_a_target(tmp_path: Path) -> None:
    recipe = axolotl(tmp_path, {"path": "a.jsonl", "type": "alpaca"}, train_on_inputs=True)
    text, learned = rendered(recipe, ALONE)
    assert text == f"<s>{learned}"  # nothing predicts the first token


def test_an_eos_in_the_file_ends_the_answer(tmp_path: Path) -> None:
    recipe = axolotl(tmp_path, {"path": "a.jsonl", "type": "alpaca"}, special_tokens={"eos_token": "<|done|>"})
    assert rendered(recipe, ALONE)[1] == "Hello!<|done|>"
    assert recipe.data.document_separator == "<|done|>"


def test_the_users_own_prompt(tmp_path: Path) -> None:
    kind = {"field_instruction": "question", "format": "Q: {instruction} [{input}]\nA: ",
            "no_input_format": "Q: {instruction}\nA: ", "system_prompt": "Be brief.",
            "system_format": "{system}\n"}  # fmt: skip
    recipe = axolotl(tmp_path, {"path": "a.jsonl", "type": kind})
    assert recipe.data.train[0].fields == {"instruction": "question"}
    assert rendered(recipe, BOTH) == ("<s>Be brief.\nQ: Add them. [2 and 3]\nA: 5</s>", "5</s>")
    assert rendered(recipe, ALONE) == ("<s>Be brief.\nQ: Say hello.\nA: Hello!</s>", "Hello!</s>")


def test_the_users_own_prompt_has_axolotls_defaults(tmp_path: Path) -> None:
    recipe = axolotl(tmp_path, {"path": "a.jsonl", "type": {"field_output": "output"}})
    assert rendered(recipe, BOTH)[0] == "<s>Add them. 2 and 3 5</s>"
    assert rendered(recipe, ALONE)[0] == "<s>Say hello. Hello!</s>"


def test_a_jinja_template_of_the_file_is_the_recipes(tmp_path: Path) -> None:
    jinja = "{% for message in messages %}\n<{{ message['role'] }}> {{ message['content'] + eos_token }}\n{% endfor %}"
    recipe = axolotl(
        tmp_path, {"path": "a.jsonl", "type": "chat_template"}, chat_template="jinja", chat_template_jinja=jinja
    )
    assert recipe.data.chat_template == jinja


def test_data_with_two_prompt_formats_is_refused(tmp_path: Path) -> None:
    two = [{"path": "a.jsonl", "type": "alpaca"}, {"path": "b.jsonl", "type": "chat_template"}]
    with pytest.raises(ConfigError, match="a recipe has one chat template, but this file uses several"):
        imported(tmp_path, {"base_model": "m", "micro_batch_size": 1, "learning_rate": 1e-4, "datasets": two})


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("chatml", "<|im_start|>user\nSay hello.<|im_end|>\n<|im_start|>assistant\nHello!<|im_end|>\n"),
        (
            "qwen",
            "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n"
            "<|im_start|>user\nSay hello.<|im_end|>\n<|im_start|>assistant\nHello!<|im_end|>\n",
        ),
        ("alpaca", f"{WITHOUT}\n\n### Instruction:\nSay hello.\n\n### Response:\nHello!</s>\n\n"),
        (
            "llama3",
            "<s><|start_header_id|>user<|end_header_id|>\n\nSay hello.<|eot_id|><|start_header_id|>assistant"
            "<|end_header_id|>\n\nHello!<|eot_id|>",
        ),
        ("gemma", "<s><start_of_turn>user\nSay hello.<end_of_turn>\n<start_of_turn>model\nHello!<end_of_turn>\n"),
    ],
)
def test_llamafactorys_templates(tmp_path: Path, template: str, text: str) -> None:
    given = {"stage": "sft", "model_name_or_path": "m", "dataset": "d", "template": template}
    assert rendered(imported(tmp_path, given), ALONE)[0] == text


def test_a_hub_dataset_is_read_as_the_file_says_even_with_a_text_column(tmp_path: Path) -> None:
    """`tatsu-lab/alpaca` also has a column `text`, in which every token would be a target."""
    (source,) = axolotl(tmp_path, {"path": "tatsu-lab/alpaca", "type": "alpaca"}).data.train
    assert (source.format, source.split) == ("hub", "train")
    path = tmp_path / "records.jsonl"
    path.write_text(json.dumps({**BOTH, "text": "all of it"}) + "\n")
    (file,) = list_files(Source("data.train.0", str(path), fields=dict(source.fields)))
    assert file.fields.format == "alpaca"
    (file,) = list_files(Source("data.train.0", str(path)))
    assert file.fields.format is None  # without field names, `text` takes precedence
