"""The JSON schema, the generated reference, the starter recipe and the shipped recipes."""

import re
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import yaml

from echelon.recipe.document import Recipe
from echelon.recipe.keys import recipe_keys
from echelon.recipe.load import load_recipe
from echelon.recipe.render import recipe_json_schema, render_recipe, render_starter
from echelon.recipe.yaml_text import parse_yaml
from tests.docs.reference import render_recipe_reference
from tests.unit.recipe_samples import load_text

ROOT = Path(__file__).parents[3]

# The top-level keys of the public contract.
CONTRACT = ["run", "model", "tokenizer", "adapter", "data", "objective", "train", "optim", "parallel", "checkpoint",
            "evaluate", "fault", "sync", "engine", "track", "launch", "profile", "budget"]  # fmt: skip
# Settings of trackers and engines, and of training from rewards.
ADDED = ["mlflow", "wandb", "prometheus", "smp", "deepspeed", "horovod", "tensorflow", "rollout", "reward"]


def test_the_schema_has_every_key_with_a_description() -> None:
    schema = recipe_json_schema()
    assert [key for key in schema["properties"] if key not in ADDED] == CONTRACT
    assert schema["required"] == ["run", "model", "data", "train", "optim"]
    assert schema["additionalProperties"] is False
    for name, definition in schema["$defs"].items():
        assert definition["additionalProperties"] is False
        assert definition["description"], name
        for key, field in definition["properties"].items():
            assert field.get("description"), f"{name}.{key}"
    assert "async" in schema["$defs"]["CheckpointConfig"]["properties"]
    assert schema["$defs"]["CheckpointConfig"]["properties"]["keep_last"]["minimum"] == 1


def test_the_reference_is_up_to_date() -> None:
    committed = (ROOT / "docs" / "recipe.md").read_text(encoding="utf-8")
    assert committed == render_recipe_reference(), "run python -m tests.docs.reference"


def test_the_reference_lists_every_key() -> None:
    listed = set(re.findall(r"^\| `([^`]+)` \|", render_recipe_reference(), re.MULTILINE))
    sections = {name for name, field in Recipe.model_fields.items() if name not in listed}
    assert sections | listed >= set(recipe_keys(Recipe))


def test_the_example_of_the_reference_loads(tmp_path: Path) -> None:
    example = re.search(r"```yaml\n(.*?)```", render_recipe_reference(), re.DOTALL)
    assert example is not None
    recipe, notes = load_text(tmp_path, example.group(1))
    assert notes == []
    assert recipe.num_steps(0) == 200


@pytest.mark.parametrize(("name", "path"), [("my-run", "text.txt"), ("2e9", "C:\\a b: c.txt"), ("true", "'é'")])
def test_the_starter_loads(tmp_path: Path, name: str, path: str) -> None:
    recipe, notes = load_text(tmp_path, render_starter(name, path))
    assert notes == []
    assert recipe.run.name == name
    assert recipe.data.train[0].path == path
    assert recipe.model.config is not None and recipe.model.config["model_type"] == "llama"


def test_the_starter_names_its_file_and_its_comments_stand_in_one_column() -> None:
    lines = render_starter("my-model", file="a b/my-model.yaml").splitlines()
    assert next(line for line in lines if "echelon train" in line).startswith("#   echelon train 'a b/my-model.yaml' ")
    assert not any("recipe.yaml" in line for line in lines)
    columns = [line.index("# ") for line in lines if "# " in line[1:] and not line.startswith("tokenizer:")]
    assert len(columns) >= 10 and len(set(columns)) == 1


def test_every_recipe_of_the_documentation_is_valid_by_the_schema() -> None:
    """An editor underlines nothing in them, shorthands included."""
    valid = jsonschema.Draft202012Validator(recipe_json_schema())
    texts = [path.read_text() for path in (ROOT / "recipes").glob("*.yaml")]
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]:
        blocks = re.findall(r"^```yaml\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
        texts += [block for block in blocks if re.search("^run:", block, re.MULTILINE)]
    assert len(texts) > 50
    for text in texts:
        assert [error.message for error in valid.iter_errors(parse_yaml(text, "text")[0])] == [], text
    assert not valid.is_valid(parse_yaml(texts[0].replace("train:", "trian:"), "text")[0])


@pytest.mark.parametrize("path", sorted((ROOT / "recipes").glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_recipes_load_without_messages(path: Path) -> None:
    assert load_recipe(path)[1] == []


def test_the_pretraining_recipe_is_1_3_billion_parameters_on_50_billion_tokens() -> None:
    recipe, _ = load_recipe(ROOT / "recipes" / "pretrain-1.3b.yaml")
    config = recipe.model.config
    assert config is not None
    hidden, ffn, layers = config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"]
    layer = 4 * hidden**2 + 3 * hidden * ffn + 2 * hidden
    total = 2 * 32000 * hidden + layers * layer + hidden
    assert total == 1_345_423_360
    assert recipe.num_steps(0) == 47684
    assert recipe.global_batch_size % 8 == 0


def test_the_recipe_package_imports_fast_and_without_torch() -> None:
    script = "import sys, echelon.recipe; print(any(m in sys.modules for m in ('torch', 'transformers', 'numpy')))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_a_rendered_recipe_redacts_secrets_by_default() -> None:
    recipe = Recipe.model_validate({
        "run": {"name": "a"}, "model": {"checkpoint": "gpt2"}, "data": {"train": "x"}, "optim": {"learning_rate": 1},
        "train": {"steps": 1, "global_batch_size": 1}, "launch": {"env": {"HF_TOKEN": "hf_abc"}},
    })  # fmt: skip
    assert "hf_abc" not in render_recipe(recipe)
    assert yaml.safe_load(render_recipe(recipe, hide_secrets=False))["launch"]["env"] == {"HF_TOKEN": "hf_abc"}
