"""AGENTS.md, the schema and errors as JSON are enough for an assistant: it writes valid recipes at the first try."""

import json
import re
from pathlib import Path

import jsonschema
import pytest
import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM

from echelon.learn.data.tokenizer import train_tokenizer

ROOT = Path(__file__).parents[2]
TEXT = "".join(f"{number} plus {number} is {2 * number}, and so on.\n" for number in range(500))
ANSWER = "{% generation %}{{ m['content'] }}{{ eos_token }}{% endgeneration %}"
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: " + ANSWER + "\n{% endfor %}"


class Assistant:
    """Knows what AGENTS.md, the pages that llms.txt names, and `echelon init --schema` say, and nothing else."""

    def __init__(self, echelon):
        self._echelon = echelon
        self.schema = json.loads(echelon("init", "--schema").out)
        named = re.findall(r"\]\((\S+?)\)", (ROOT / "llms.txt").read_text())
        assert named[0] == "AGENTS.md" and all((ROOT / name).exists() for name in named)
        self._page = (ROOT / named[0]).read_text()

    def find_recipe(self, purpose):
        """The recipe of the page whose introduction has this word, and the record that the introduction shows."""
        (found,) = re.findall(
            rf"^This recipe [^`]*{purpose}.*?\n```yaml\n(.*?)^```", self._page, re.DOTALL | re.MULTILINE
        )
        return yaml.safe_load(found)

    def find_record(self, purpose):
        """The record that the introduction of the recipe shows, an object of JSON."""
        (found,) = re.findall(rf"^This recipe [^`]*{purpose}[^`]*`(\{{.*?\}})`\.$", self._page, re.MULTILINE)
        return json.loads(found)

    def find_key(self, *words):
        """The one key of the schema whose description has these words."""
        found = [key for key, text in describe(self.schema, self.schema) if all(word in text for word in words)]
        assert len(found) == 1, (words, found)
        return found[0]

    def check(self, recipe):
        """Write the recipe, and check it by the schema; return the error of `echelon plan`, None for a valid one."""
        Path("recipe.yaml").write_text(yaml.safe_dump(recipe))
        done = self._echelon("plan", "recipe.yaml", "--json")
        if done.code == 0:
            assert json.loads(done.out)["candidates"][0]["fits"]
            return None
        return json.loads(done.err.splitlines()[-1])["error"]

    def mend(self, recipe, error):
        """Change what the error names as its fix says."""
        assert error["code"] == 2
        for fault in [error, *error["more"]]:
            key, fix = fault["key"], fault["fix"]
            if near := re.fullmatch(r"did you mean (\S+)\?", fix):
                if fault["rule"] == "is not a recipe key":
                    set_key(recipe, near[1], take_key(recipe, key))
                else:
                    set_key(recipe, key, near[1])
            elif fix.endswith(("remove it", f", or remove {str(key).rpartition('.')[2]}")):
                take_key(recipe, key)
            elif value := re.fullmatch(r"use (\S+)(?: or .*)?", fix):
                set_key(recipe, key, yaml.safe_load(value[1]))
            else:
                pytest.fail(f"no change follows from {fault}")


def describe(section, root, prefix=""):
    """The dotted keys of a schema with their descriptions; entries of lists have the number 0."""
    for name, field in section["properties"].items():
        yield prefix + name, field.get("description", "")
        for reference in re.findall(r"'#/\$defs/(\w+)'", str(field)):
            index = "0." if "items" in field else ""
            yield from describe(root["$defs"][reference], root, f"{prefix}{name}.{index}")


def set_key(recipe, key, value):
    *sections, last = key.split(".")
    for section in sections:
        recipe = recipe.setdefault(section, {})
    recipe[last] = value


def take_key(recipe, key):
    *sections, last = key.split(".")
    for section in sections:
        recipe = recipe[section]
    return recipe.pop(last)


@pytest.fixture
def assistant(echelon):
    return Assistant(echelon)


@pytest.fixture
def files(tmp_path, assistant):
    """A user's files: a text, a small model with a chat template, and records in the form that AGENTS.md shows."""
    (tmp_path / "my.txt").write_text(TEXT)
    tokenizer = train_tokenizer([TEXT], 300)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(tmp_path / "base")
    torch.manual_seed(1)
    config = AutoConfig.for_model(
        "llama", hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, vocab_size=300,
        max_position_embeddings=2048, pad_token_id=0, eos_token_id=0, bos_token_id=None,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "base")
    for name, purpose in (("chats.jsonl", "LoRA"), ("pairs.jsonl", "DPO")):
        (tmp_path / name).write_text(f"{json.dumps(assistant.find_record(purpose))}\n" * 64)


def write(assistant, purpose, **wishes):
    """The recipe for a purpose with a user's wishes, each at the key that the schema describes in these words."""
    recipe = assistant.find_recipe(purpose)
    for words, value in wishes.items():
        set_key(recipe, assistant.find_key(*words.split("__")), value)
    return recipe


PURPOSES = {
    "pretrains": {"Training data": "my.txt", "Name of the run": "mine", "Optimizer steps. Exactly one": 4},
    "LoRA": {"Training data": "chats.jsonl", "Initial weights": "base", "rank of the adapter": 4},
    "DPO": {"Training data": "pairs.jsonl", "Initial weights": "base", "close to the reference": 0.2},
}


@pytest.mark.parametrize("purpose", PURPOSES)
def test_recipes_are_valid_at_the_first_try(assistant, files, echelon, purpose):
    recipe = write(assistant, purpose, **PURPOSES[purpose])
    jsonschema.validate(recipe, assistant.schema)
    assert assistant.check(recipe) is None
    shown = echelon("data", "recipe.yaml", "--json")
    assert shown.code == 0 and "--- sequence" in shown.out


@pytest.mark.slow
@pytest.mark.parametrize("purpose", PURPOSES)
def test_the_recipes_train(assistant, files, echelon, purpose):
    assert assistant.check(write(assistant, purpose, **PURPOSES[purpose])) is None
    done = echelon("train", "recipe.yaml", "--nproc", "1", "data.sequence_len=64", "--json")
    assert done.code == 0 and json.loads(done.out)["status"] == "done", done.err


@pytest.mark.parametrize(
    ("purpose", "mistakes"),
    [
        ("pretrains", {"optim.learningrate": 1e-3, "train.steps": "100"}),
        ("pretrains", {"train.global_batch_size": 0, "optim.schedule": "cosin", "train.compile": "no"}),
        ("pretrains", {"adapter.r": 8, "train.stepss": 5}),
        ("LoRA", {"adapter.method": "LoRA", "adapter.rankk": 4, "data.sequence_length": 512}),
        ("DPO", {"objective.name": "DPO", "objectiv.beta": 0.2}),
    ],
    ids=str,
)
def test_mistakes_are_mended_by_what_the_errors_say(assistant, files, purpose, mistakes):
    recipe = write(assistant, purpose, **PURPOSES[purpose])
    for key, value in mistakes.items():
        set_key(recipe, key, value)
    assert not jsonschema.Draft202012Validator(assistant.schema).is_valid(recipe)
    errors = []
    while (error := assistant.check(recipe)) is not None:
        errors.append(error)
        assert len(errors) <= len(mistakes), errors
        assistant.mend(recipe, error)
    assert errors
