"""A prepared folder that a recipe names itself: used without the text, and refused for another recipe."""

import shutil

import pytest
import yaml

from echelon.ground.errors import ConfigError, DataError
from echelon.launch.job_checks import check_job
from echelon.launch.sagemaker.launcher import SageMakerLauncher
from echelon.launch.sagemaker.request import build_submission
from echelon.learn.data.prepare import prepare_data
from echelon.recipe.load import load_recipe
from echelon.run.lifecycle.model_checks import check_early
from tests.unit.launch.sagemaker.sagemaker_jobs import make_job
from tests.unit.recipe_samples import RECIPE

TEXT = "".join(f"{number} and {number} make {2 * number}.\n" for number in range(300))
GIVEN = RECIPE | {"data": {"train": "text.txt", "sequence_len": 32, "validation_fraction": 0.1}}


@pytest.fixture
def load(tmp_path, monkeypatch):
    """Load the recipe, in a folder with its text, with overrides."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text(TEXT)
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(GIVEN))
    return lambda *overrides: load_recipe(tmp_path / "recipe.yaml", overrides)[0]


@pytest.mark.parametrize("tokenizer", ["tokenizer=bytes", "tokenizer={train: {vocab_size: 300}}"])
def test_the_tokens_are_used_without_the_text(load, tmp_path, tokenizer):
    made = prepare_data(load(tokenizer))
    moved = tmp_path / "elsewhere" / "tokens"
    shutil.copytree(made.path, moved)
    (tmp_path / "text.txt").unlink()
    with pytest.raises(DataError):
        prepare_data(load(tokenizer, "data.prepared_dir=empty"))
    found = prepare_data(load(tokenizer, f"data.prepared_dir={moved}"))
    assert (found.path, found.content_digest) == (moved, made.content_digest)
    assert found.train.num_samples == made.train.num_samples > 0
    check_early(load(tokenizer, f"data.prepared_dir={moved}"), fresh=False)
    longer = prepare_data(load(tokenizer, f"data.prepared_dir={moved}", "data.sequence_len=64"))
    assert longer.train.num_samples < found.train.num_samples


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("data.validation_fraction=0.2", "with another data.validation_fraction; run `echelon data --prepare`"),
        ("tokenizer={train: {vocab_size: 300}}", "another tokenizer"),
        ("data.document_separator=null", "another data.document_separator"),
        ("data.train=other.txt", "another data.train and data.validation"),
        ("data.deduplicate=true", "another data.deduplicate"),
        ("data.packing=false", "was prepared with data.packing=true, but the recipe has false"),
    ],
)
def test_tokens_of_another_recipe_are_refused(load, override, said):
    made = prepare_data(load())
    with pytest.raises(ConfigError) as refused:
        prepare_data(load(f"data.prepared_dir={made.path}", override))
    assert said in str(refused.value) and str(made.path) in str(refused.value)


def test_an_address_is_refused_where_nothing_downloads_it(load):
    recipe = load("data.prepared_dir=s3://bucket/tokens")
    for check in (prepare_data, lambda recipe: check_early(recipe, fresh=False)):
        with pytest.raises(ConfigError, match=r"^data\.prepared_dir=s3://bucket/tokens: only jobs with launch\.to"):
            check(recipe)


def test_tokens_without_their_settings_are_refused(load):
    made = prepare_data(load())
    (made.path / "settings.json").unlink()
    with pytest.raises(ConfigError, match=r"settings.json cannot be read .* run `echelon data --prepare` again"):
        prepare_data(load(f"data.prepared_dir={made.path}"))


def test_a_job_brings_its_prepared_data_instead_of_the_text(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = prepare_data(make_job(tmp_path, "data.validation_fraction=0.1").recipe)
    given = f"data.prepared_dir={made.path}"
    job = make_job(tmp_path, given, "data.validation_fraction=0.1")
    for path in (tmp_path / "data" / "text").iterdir():
        path.unlink()
    assert any(line == f"{given}: the job brings its prepared data, and no text" for line in check_job(job).lines)
    staging = build_submission(job).staging
    assert str(staging.recipe.data.prepared_dir) == f"/opt/ml/input/data/prepared/{made.path.name}"
    assert [each.name for each in staging.channels] == ["echelon", "prepared"]
    sent = {each.address.rpartition("/")[2] for each in staging.uploads}
    assert {"manifest.json", "settings.json", "tokenizer.json"} <= sent and "a.txt" not in sent
    [source] = staging.recipe.data.train
    assert source.label == "text"

    remote = build_submission(make_job(tmp_path, "data.prepared_dir=s3://team/tokens/0a1b")).staging
    assert {each.name: each.source for each in remote.channels}["prepared"] == "s3://team/tokens/0a1b/"
    lines = SageMakerLauncher().check(make_job(tmp_path, "data.prepared_dir=cache"))
    assert any("is for this machine; the container prepares the data" in line for line in lines)
