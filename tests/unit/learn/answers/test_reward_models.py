"""Rewards of a reward model: the texts that it reads, its scores beside those of `transformers`, what is refused."""

import math
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from echelon.ground.errors import ConfigError
from echelon.learn.answers.reward_models import RewardModel, RewardTexts
from echelon.learn.answers.rewards import RewardProcess
from echelon.learn.data.instruction import ScoreRule
from echelon.learn.data.tokenizer import train_tokenizer
from echelon.recipe.document import Recipe
from echelon.recipe.inputs import AdapterConfig
from echelon.recipe.render import render_recipe
from tests.families import small_model, small_scorer
from tests.unit.learn.data.test_chat_templates import build
from tests.unit.recipe_samples import RECIPE

CPU = torch.device("cpu")
TALK = [{"role": "user", "content": "3 plus 4?"}]
RECORDS = [{"prompt": "3 plus 4 is "}, {"prompt": TALK}, {"prompt": "3 plus 4 is "}, {"prompt": TALK}]
ANSWERS = ["7", "7.", "8 or so, but I am not sure at all", ""]
TEMPLATE = """\
{%- for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor -%}
{% if add_generation_prompt %}assistant: {% endif %}"""


def write_scorer(folder, family="llama", labels=(), template=TEMPLATE):
    """A small random reward model whose end token is not its padding."""
    tokenizer = train_tokenizer(["".join(f"{number} plus {number} is {2 * number}.\n" for number in range(500))], 300)
    tokenizer.add_special_tokens({"pad_token": "<pad>"})
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    model = small_scorer(family, labels, vocab_size=len(tokenizer), max_position_embeddings=64)
    model.config.pad_token_id = tokenizer.pad_token_id
    with torch.no_grad():
        model.score.weight.normal_(std=1.0)
    model.save_pretrained(folder)
    return tokenizer


def recipe_with(*rewards):
    data, train = {"train": "prompts.jsonl", "sequence_len": 64}, {"steps": 1, "global_batch_size": 8}
    sections = {"objective": {"name": "grpo"}, "rollout": {"max_new_tokens": 8}, "reward": list(rewards)}
    return Recipe.model_validate(RECIPE | {"data": data, "train": train, **sections})


def reward_at(folder, **options):
    return {"name": "model", "options": {"path": str(folder), **options}}


def scores_by_transformers(folder, records, answers):
    """One text after another, without padding."""
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    found = []
    for record, answer in zip(records, answers, strict=True):
        if isinstance(record["prompt"], str):
            text = record["prompt"] + answer + tokenizer.eos_token
        else:
            text = tokenizer.apply_chat_template(
                [*record["prompt"], {"role": "assistant", "content": answer}], tokenize=False
            )
        with torch.no_grad():
            found.append(model(**tokenizer(text, return_tensors="pt", add_special_tokens=False)).logits.item())
    return found


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
def test_rewards_equal_the_scores_of_transformers(tmp_path, family):
    write_scorer(tmp_path, family)
    found, problem = RewardModel(recipe_with(reward_at(tmp_path)), 0, torch.float32, CPU).judge(ANSWERS, RECORDS)
    expected = scores_by_transformers(tmp_path, RECORDS, ANSWERS)
    assert problem is None and found == pytest.approx(expected, abs=1e-5)
    assert max(expected) - min(expected) > 0.1, "the texts tell apart"


def test_texts_are_those_of_training(tmp_path):
    """As a pair of this prompt and answer is encoded for `objective.name: reward`."""
    tokenizer = write_scorer(tmp_path)
    encoding = replace(build(tokenizer, "preference", answers="pairs"), scores=ScoreRule(tokenizer.pad_token_id))
    texts = RewardTexts(recipe_with(reward_at(tmp_path)), 0)
    for record in RECORDS[:2]:
        chosen, _ = encoding.encode({**record, "chosen": "7.", "rejected": "8"})
        assert texts.encode("7.", record) == chosen.ids.tolist()


def test_a_text_that_is_too_long_has_no_reward(tmp_path):
    write_scorer(tmp_path)
    model = RewardModel(recipe_with(reward_at(tmp_path, field="question")), 0, torch.float32, CPU)
    found, problem = model.judge(["7", "7" * 80], [{"question": "a"}] * 2)
    assert math.isfinite(found[0]) and math.isnan(found[1])
    assert problem is not None and "gave no number for 1 of 2 answers" in problem and "reads 64" in problem


def test_scores_join_the_rewards_of_functions(tmp_path):
    write_scorer(tmp_path)
    recipe = recipe_with({"name": "exact"}, {**reward_at(tmp_path), "weight": 0.5}, {"name": "number"})
    model = RewardModel(recipe, 1, torch.float32, CPU)
    records = [{"prompt": "3 plus 4 is ", "answer": "7"}] * 2
    with RewardProcess(recipe.reward, {1: model.judge}) as process:
        scores = process.score(["7", "so 7"], records)
    expected = scores_by_transformers(tmp_path, records, ["7", "so 7"])
    assert [list(scores.parts[index]) for index in (0, 2)] == [[1.0, 0.0], [1.0, 1.0]]
    assert scores.parts[1] == pytest.approx(expected, abs=1e-5)
    assert list(scores.total) == pytest.approx([2 + expected[0] / 2, 1 + expected[1] / 2], abs=1e-5)
    assert not scores.failures


def test_what_gives_no_score_is_refused(tmp_path):
    def refused(reward):
        with pytest.raises(ConfigError) as caught:
            RewardTexts(recipe_with(reward), 0)
        return str(caught.value)

    absent = refused(reward_at(tmp_path / "absent"))
    assert absent.startswith(f"reward.0.options.path={tmp_path / 'absent'} is no run and no HF folder")
    assert "reward.0.options={} does not fit model" in refused({"name": "model"})
    small_model("llama").save_pretrained(tmp_path / "language")
    assert "is no reward model (LlamaForCausalLM)" in refused(reward_at(tmp_path / "language"))
    write_scorer(tmp_path / "classes", labels=("bad", "good", "great"))
    assert "gives a text 3 scores (num_labels=3), not one" in refused(reward_at(tmp_path / "classes"))


def test_a_run_with_an_adapter_is_refused(tmp_path):
    """Its weights are those of two models; before, it was refused when training began."""
    adapted = recipe_with({"name": "exact"}).model_copy(update={"adapter": AdapterConfig(method="lora")})
    (tmp_path / "recipe.yaml").write_text(render_recipe(adapted))
    with pytest.raises(ConfigError, match=r"this run trained an adapter; write the whole model with `echelon export"):
        RewardTexts(recipe_with(reward_at(tmp_path)), 0)


def test_prompts_that_the_model_cannot_read_are_refused(tmp_path):
    write_scorer(tmp_path, template=None)
    texts = RewardTexts(recipe_with(reward_at(tmp_path)), 0)
    texts.check({"prompt": "3 plus 4 is "})
    with pytest.raises(ConfigError, match="its tokenizer has no chat template, and the prompts"):
        texts.check({"prompt": TALK})
    with pytest.raises(ConfigError, match=r"reward\.0\.options\.field=prompt: the first record has no field `prompt`"):
        texts.check({"question": "3 plus 4 is "})


def test_a_conversation_with_an_environment_is_no_answer(tmp_path):
    fields = recipe_with(reward_at(tmp_path)).model_dump()
    with pytest.raises(ValueError, match=r"reward\.0\.name=model reads a prompt and one answer"):
        Recipe.model_validate(fields | {"rollout": {"max_new_tokens": 8, "environment": "guess:Guess"}})
