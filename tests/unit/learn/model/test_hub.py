"""Hub downloads: files, commits, number of requests, and error messages, with a real HTTP server."""

import json
import re

import pytest
from transformers import AutoModelForCausalLM

from echelon.ground.errors import ConfigError, DataError, EchelonError, HubUnreachableError
from echelon.ground.sizes import render_bytes
from echelon.learn.model import hub
from echelon.learn.model.build import load_config
from echelon.planner.plan_fields import count_teacher, list_uncounted
from echelon.recipe.document import Recipe
from echelon.run.folder.run_folder import RunFolder
from echelon.run.lifecycle.model_checks import check_model
from tests.hub_server import HubServer, push_model

NAME = "team/tiny"
WANTED = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("model")


@pytest.fixture
def server(folder, tmp_path, monkeypatch):
    """A local hub with one model, and an empty cache, set for this process."""
    server = HubServer()
    server.first = push_model(server, NAME, folder)
    use(monkeypatch, server.url, tmp_path / "cache")
    yield server
    server.stop()


def use(monkeypatch, endpoint, cache, offline=False):
    """Set what HF_ENDPOINT, HF_HOME and HF_HUB_OFFLINE set when the library is imported."""
    from huggingface_hub import constants, hf_api

    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", endpoint + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(hf_api, "ENDPOINT", endpoint, raising=False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)


def recipe_of(checkpoint=NAME, **model):
    return Recipe.model_validate(
        {
            "run": {"name": "x"},
            "model": {"checkpoint": checkpoint, **model},
            "data": {"train": [{"path": "text.txt"}], "sequence_len": 32},
            "train": {"steps": 1, "global_batch_size": 1},
            "optim": {"learning_rate": 1e-3},
        }
    )


def weights_of(folder):
    return set(json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"].values())


def test_a_model_is_downloaded_once_completely_and_nothing_else(server, folder, capsys, caplog):
    recipe = recipe_of()
    commits = hub.find_commits(recipe, {})
    assert commits == {NAME: server.first}
    hub.fetch_models(recipe, commits, weights=False)
    assert set(server.downloads()) == WANTED | {"model.safetensors.index.json"}
    hub.fetch_models(recipe, commits)
    expected = WANTED | {"model.safetensors.index.json"} | weights_of(folder)
    assert len(weights_of(folder)) >= 3
    assert server.downloads() == dict.fromkeys(expected, 1)
    hub.fetch_models(recipe, commits)
    assert server.downloads() == dict.fromkeys(expected, 1)
    here = hub.with_copies(recipe, commits)
    for name in expected:
        assert (hub.Path(here.model.checkpoint) / name).read_bytes() == (folder / name).read_bytes()
    assert here.tokenizer is None and recipe.model.checkpoint == NAME
    # plain messages with name, size and destination; no progress bars of the library
    size = sum((folder / name).stat().st_size for name in weights_of(folder))
    what = f"{len(weights_of(folder))} files, {render_bytes(size)}"
    start = f"hub: fetching {NAME} at commit {server.first[:12]}: {what}, to "
    assert any(line.startswith(start) for line in caplog.messages), caplog.messages
    done = f"hub: {NAME}: {render_bytes(size)} of {render_bytes(size)}, "
    assert any(line.startswith(done) for line in caplog.messages), caplog.messages
    assert capsys.readouterr() == ("", "")


def test_progress_is_printed_in_bytes_during_the_download(server, folder, monkeypatch, caplog):
    server.slow = 4.0
    monkeypatch.setattr(hub, "_PROGRESS_SECONDS", 0.05)
    monkeypatch.setattr(hub, "_POLL_SECONDS", 0.05)
    recipe = recipe_of()
    hub.fetch_models(recipe, hub.find_commits(recipe, {}))
    told = [re.fullmatch(rf"hub: {NAME}: ([\d.]+) (\w+) of ([\d.]+) (\w+), .*s left", line) for line in caplog.messages]
    units = {"B": 1, "KiB": 2**10, "MiB": 2**20}
    done = [(float(match[1]) * units[match[2]], float(match[3]) * units[match[4]]) for match in told if match]
    assert done == sorted(done) and any(0 < part < whole for part, whole in done), caplog.messages


def test_a_part_of_a_model_is_not_enough(server, monkeypatch):
    """The hub's client returns what the cache has if the hub fails."""
    recipe = recipe_of()
    commits = hub.find_commits(recipe, {})
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: None)
    with pytest.raises(EchelonError, match=r"config\.json did not arrive.*; run the same command again"):
        hub.fetch_models(recipe, commits)


def test_the_commit_is_kept_when_the_repository_changes(server, folder, tmp_path, monkeypatch):
    recipe = recipe_of()
    commits = hub.find_commits(recipe, {})
    second = push_model(server, NAME, tmp_path / "other", seed=10)
    hub.fetch_models(recipe, commits)
    assert hub.Path(hub.with_copies(recipe, commits).model.checkpoint).name == server.first
    assert hub.find_commits(recipe, commits) == commits
    assert hub.find_commits(recipe, {}) == {NAME: second}


def test_a_dataset_is_pinned_too(server, folder):
    digest = server.push("datasets/team/text", folder)
    sources = [{"path": "team/text/part", "format": "hub"}, {"path": f"team/text@{'a' * 40}", "format": "hub"}]
    recipe = Recipe.model_validate(recipe_of().model_dump() | {"data": {"train": sources, "sequence_len": 32}})
    commits = hub.find_commits(recipe, {NAME: server.first})
    assert commits == {NAME: server.first, "datasets/team/text": digest}
    hub.fetch_models(recipe, commits)
    here = hub.with_copies(recipe, commits)
    assert [source.path for source in here.data.train] == [f"team/text/part@{digest}", f"team/text@{'a' * 40}"]
    assert here.data.train[0].label == recipe.data.train[0].label
    server.repositories.clear()
    with pytest.raises(ConfigError, match=r"data\.train\.0\.path=team/text/part: .* the hub has no such dataset"):
        hub.find_commits(recipe, {NAME: server.first})


def test_commits_are_stored_in_the_run_folder(tmp_path):
    run = RunFolder(tmp_path)
    assert hub.read_commits(run.hub_path) == {}
    hub.write_commits(run.hub_path, {NAME: "a" * 40})
    assert hub.read_commits(run.hub_path) == {NAME: "a" * 40}
    for damage in ('{"team/tiny": "../../../etc"}', "[]", "null", "{", '{"team/tiny": 3}'):
        run.hub_path.write_text(damage)
        with pytest.raises(DataError, match=r"hub\.json: cannot read the hub commits"):
            hub.read_commits(run.hub_path)
    hub.write_commits(run.hub_path, {})
    assert not run.hub_path.exists()


def test_code_is_downloaded_only_if_trusted(server):
    recipe = recipe_of(trust_remote_code=True)
    hub.fetch_models(recipe, hub.find_commits(recipe, {}), weights=False)
    assert server.downloads()["modeling.py"] == 1 and "pytorch_model.bin" not in server.downloads()


def test_offline_reads_the_cache(server, tmp_path, monkeypatch):
    recipe = recipe_of()
    hub.fetch_models(recipe, hub.find_commits(recipe, {}))
    asked = len(server.requests)
    use(monkeypatch, server.url, tmp_path / "cache", offline=True)
    commits = hub.find_commits(recipe, {})
    hub.fetch_models(recipe, commits)
    assert hub.Path(hub.with_copies(recipe, commits).model.checkpoint).name == server.first
    assert len(server.requests) == asked


def test_a_copy_without_all_weights_is_not_used(server, folder, tmp_path, monkeypatch):
    recipe = recipe_of()
    commits = hub.find_commits(recipe, {})
    hub.fetch_models(recipe, commits)
    (hub.Path(hub.with_copies(recipe, commits).model.checkpoint) / sorted(weights_of(folder))[1]).unlink()
    with pytest.raises(HubUnreachableError, match="has no complete copy of it at commit"):
        hub.with_copies(recipe, commits)
    assert hub.with_copies(recipe, commits, weights=False).model.checkpoint != NAME


def explain(recipe, words):
    with pytest.raises(EchelonError) as caught:
        hub.fetch_models(recipe, hub.find_commits(recipe, {}))
    said = str(caught.value)
    assert "\n" not in said
    for each in words:
        assert each in said, said
    return caught.value


def test_an_unavailable_model_is_one_message(server, folder, tmp_path, monkeypatch):
    error = explain(recipe_of("team/none"), ["model.checkpoint=team/none: ", "no such model", "no token is set"])
    assert isinstance(error, ConfigError) and not isinstance(error, HubUnreachableError)
    server.push("team/gated", folder, gated=True)
    explain(recipe_of("team/gated"), ["this model is gated", "no token is set", "huggingface.co/team/gated"])
    monkeypatch.setenv("HF_TOKEN", "a-bad-one")
    explain(recipe_of(), ["the hub rejects the token", "set HF_TOKEN"])
    monkeypatch.setenv("HF_TOKEN", "let-me-in")
    gated = recipe_of("team/gated")
    hub.fetch_models(gated, hub.find_commits(gated, {}))
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_text("{}")
    (bare / "pytorch_model.bin").write_text("")
    server.push("team/pickled", bare)
    explain(recipe_of("team/pickled"), ["has no model.safetensors", "never pickled"])
    (bare / "config.json").unlink()
    server.push("team/empty", bare)
    explain(recipe_of("team/empty"), ["no config.json"])


def test_a_hub_that_does_not_answer_is_named_immediately(server, tmp_path, monkeypatch):
    server.stop()
    error = explain(recipe_of(), [f"model.checkpoint={NAME}: ", f"({server.url}) cannot be reached", "cache in "])
    assert isinstance(error, HubUnreachableError)
    use(monkeypatch, server.url, tmp_path / "cache", offline=True)
    explain(recipe_of(), ["HF_HUB_OFFLINE is set"])


@pytest.mark.parametrize(
    "name", ["méta/tiny", "team/tiny-", "team--x/tiny", "a..b", "team/tiny.git", "t" * 97, "a/b/c"]
)
def test_a_name_that_the_hub_does_not_allow_is_a_missing_folder(server, name):
    with pytest.raises(ConfigError, match=f"model.checkpoint={re.escape(name)}: there is no such folder"):
        load_config(name)
    assert not server.requests


def test_a_teacher_of_the_hub_counts_in_a_plan_before_its_weights_are_here(server, folder, tmp_path):
    changed = {"model": {"config": {"model_type": "llama"}}, "tokenizer": "bytes"}
    distill = {"objective": {"name": "distill", "teacher": NAME}}
    recipe = Recipe.model_validate({**recipe_of().model_dump(exclude_unset=True), **changed, **distill})
    assert count_teacher(recipe) == (0, 0)
    assert list_uncounted(recipe) == [
        f"memory: objective.teacher={NAME} is not counted, because its config.json is not on this machine"
    ]
    hub.fetch_other_configs(recipe)
    assert set(server.downloads()) == {"config.json"}
    model = AutoModelForCausalLM.from_pretrained(folder)
    numel = sum(parameter.numel() for parameter in model.parameters())
    assert count_teacher(recipe) == (numel, model.config.hidden_size)
    assert list_uncounted(recipe) == []


def test_a_plan_without_the_hub_says_what_it_does_not_count(tmp_path, monkeypatch):
    use(monkeypatch, "http://127.0.0.1:9", tmp_path / "cache", offline=True)
    changed = {"model": {"config": {"model_type": "llama"}}, "tokenizer": "bytes"}
    reward = {"name": "model", "options": {"path": "org/scorer"}}
    rewarded = {"objective": {"name": "grpo"}, "reward": [reward], "rollout": {"max_new_tokens": 8, "group_size": 2}}
    rewarded["train"] = {"steps": 1, "global_batch_size": 2}
    recipe = Recipe.model_validate({**recipe_of().model_dump(exclude_unset=True), **changed, **rewarded})
    left = check_model(recipe, elsewhere=True).left
    assert [line for line in left if line.startswith("memory: ")] == [
        "memory: reward.0.options.path=org/scorer is not counted, because its config.json is not on this machine"
    ]
