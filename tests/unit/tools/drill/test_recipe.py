"""The small recipe of a drill: of the same kind as the original, and it loads and plans."""

import json
from pathlib import Path

import pytest

from echelon.ground.errors import ConfigError
from echelon.learn.model.build import build_on_meta, load_config
from echelon.planner.choose import resolve_plan
from echelon.planner.hardware.accelerators import ACCELERATORS, Cluster
from echelon.planner.shape import build_shape
from echelon.recipe.load import load_recipe
from echelon.tools.drill.crew import MACHINE_FAULTS, Crew
from echelon.tools.drill.exercise import choose_likeness, estimate_seconds
from echelon.tools.drill.faults import FAULTS, shrink, shrink_model
from echelon.tools.drill.trial import Likeness
from tests.unit.recipe_samples import RECIPE

MODELS = {
    "llama": {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8},
    "gpt2": {"n_embd": 1024, "n_layer": 24, "n_head": 16, "resid_pdrop": 0.2},
    "gemma2": {"hidden_size": 2304, "num_hidden_layers": 26, "head_dim": 256, "sliding_window": 64},
    "gemma3_text": {"hidden_size": 1152, "num_hidden_layers": 26, "head_dim": 256},
    "qwen3": {"hidden_size": 1024, "num_hidden_layers": 28, "tie_word_embeddings": True},
    "mistral": {},
}


def write(folder: Path, **changes) -> Path:
    recipe = RECIPE | {
        "data": {"train": "text.txt", "sequence_len": 4096},
        "train": {"tokens": 2e9, "global_batch_tokens": 524288, "precision": "bf16"},
        "optim": {"learning_rate": 1e-3, "schedule": "wsd", "warmup": "1000000 tokens"},
    }
    recipe |= {"model": {"config": {"model_type": "llama"}}, "parallel": "fsdp"} | changes
    path = folder / "big.json"
    path.write_text(json.dumps(recipe))
    return path


@pytest.mark.parametrize("model_type", MODELS)
def test_a_small_model_of_the_same_family(tmp_path, model_type):
    given = {"model_type": model_type, "vocab_size": 512, **MODELS[model_type]}
    recipe, _ = load_recipe(write(tmp_path, model={"config": given}))
    small = load_config(shrink_model(recipe, 2))
    assert small.model_type == model_type
    assert sum(each.numel() for each in build_on_meta(small).parameters()) < 400_000
    for key in ("resid_pdrop", "sliding_window", "tie_word_embeddings", "vocab_size"):
        if key in given:
            assert getattr(small, key) == given[key]


def test_small_values_are_unchanged(tmp_path):
    given = {"model_type": "llama", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 8}
    recipe, _ = load_recipe(write(tmp_path, model={"config": given}))
    assert shrink_model(recipe, 2).items() >= given.items()


def test_the_shape_of_a_checkpoint(tmp_path):
    load_config({"model_type": "qwen3", "vocab_size": 600, "tie_word_embeddings": True}).save_pretrained(tmp_path / "m")
    recipe, _ = load_recipe(write(tmp_path, model={"checkpoint": str(tmp_path / "m")}, tokenizer=None))
    small = shrink_model(recipe, 2)
    assert small["model_type"] == "qwen3" and small["tie_word_embeddings"] and small["hidden_size"] == 64
    assert f"tokenizer={tmp_path / 'm'}" in shrink(recipe, tmp_path, 2, 24)


def test_answers_are_few_and_short_and_rewards_are_soon_given_up(tmp_path):
    path = write(
        tmp_path,
        data={"train": "prompts.jsonl", "sequence_len": 2048},
        train={"steps": 100, "global_batch_size": 512},
        optim={"learning_rate": 1e-3},
        objective={"name": "grpo"},
        rollout={"group_size": 8, "max_new_tokens": 1024, "environment": {"name": "my:Game", "timeout_seconds": 30}},
        reward=[{"name": "exact", "timeout_seconds": 2}, {"name": "my:own", "weight": 0.5, "options": {"most": 2}}],
    )
    recipe, _ = load_recipe(path)
    small, _ = load_recipe(path, shrink(recipe, tmp_path / "drill", 2, 60))
    assert (small.rollout.group_size, small.rollout.max_new_tokens, small.global_batch_size) == (4, 8, 16)
    assert [reward.timeout_seconds for reward in small.reward] == [2, 3]
    assert small.rollout.environment.timeout_seconds == 3
    assert small.reward[1].model_dump(exclude={"timeout_seconds"}) == recipe.reward[1].model_dump(
        exclude={"timeout_seconds"}
    )


@pytest.mark.parametrize(
    "warmup", [{"warmup": "10%"}, {"warmup": "1K tokens"}, {"schedule_unit": "tokens", "warmup_tokens": 1000}]
)
def test_a_schedule_that_needs_a_warm_up_keeps_one(tmp_path, warmup):
    path = write(tmp_path, optim={"learning_rate": 1e-3, "schedule": "inverse_sqrt", **warmup})
    recipe, _ = load_recipe(path)
    small, _ = load_recipe(path, shrink(recipe, tmp_path / "drill", 2, 60))
    assert small.optim.warmup == 2


def test_the_small_recipe_loads(tmp_path):
    path = write(tmp_path)
    recipe, _ = load_recipe(path)
    small, _ = load_recipe(path, shrink(recipe, tmp_path / "drill" / "x", 2, 60))
    assert small.train.steps == 60 and small.train.tokens is None and small.global_batch_size == 4
    assert small.checkpoint.every == 10 and small.run.dir == tmp_path / "drill" / "x"
    assert small.optim.schedule == "wsd" and small.parallel == recipe.parallel
    assert small.prepared_dir == recipe.prepared_dir, "the data is not prepared once more"


LARGE = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "vocab_size": 512}
DENSE = {"model_type": "llama", "num_key_value_heads": 8, **LARGE}
MIXTURE = {"model_type": "mixtral", "num_key_value_heads": 8, "num_local_experts": 8, **LARGE}


@pytest.mark.parametrize(
    ("parallel", "num_processes", "model", "train"),
    [
        ({"tp": 8, "sequence_parallel": True}, 8, DENSE, {}),
        ({"tp": 3, "dp_shard": 2}, 6, DENSE | {"hidden_size": 3072, "num_attention_heads": 24, "num_key_value_heads": 6,
         "intermediate_size": 9216, "vocab_size": 513}, {}),
        ({"pp": 4, "schedule": "interleaved"}, 4, DENSE, {}),
        ({"pp": 2, "stages": [15, 17], "microbatches": 32}, 4, DENSE, {}),
        ({"pp": 4, "tp": 4, "schedule": "zero_bubble"}, 16, DENSE, {}),
        ({"cp": 8, "cp_method": "ulysses"}, 8, DENSE, {}),
        ({"dp_shard": 8, "ep": 4, "tp": 2}, 16, MIXTURE, {}),
        ({"pp": 8}, 8, DENSE, {"activation_checkpointing": {"every": 4}}),
        ("fsdp", 2, DENSE, {"activation_checkpointing": {"memory_budget": 0.5}}),
    ],
    ids=str,
)  # fmt: skip
def test_the_plan_of_the_recipe_divides_the_small_model(tmp_path, parallel, num_processes, model, train):
    train = {"steps": 100, "global_batch_size": 256, **train}
    path = write(tmp_path, model={"config": model}, parallel=parallel, train=train)
    cluster = Cluster(ACCELERATORS["cpu"], num_processes, num_processes, "cpu", bf16_supported=True, can_compile=True)
    recipe, _ = load_recipe(path)
    plan = resolve_plan(recipe, build_shape(model), cluster)
    small, _ = load_recipe(path, shrink(recipe, tmp_path / "drill", num_processes, 60))
    shape = build_shape(small.model.config)
    assert shape.num_parameters < 1_500_000
    assert resolve_plan(small, shape, cluster).strategy == plan.strategy


def test_the_duration_of_a_drill():
    """Computed by hand, for starts of 10 s and runs of 8 s."""
    by_name = {fault.name: fault for fault in FAULTS}
    assert estimate_seconds([], 10, 8) == 18
    assert estimate_seconds([by_name["SIGTERM"]], 10, 8) == pytest.approx(18 + 2 * 10 + 8 * 1.1)
    assert estimate_seconds([by_name["a rank hangs"]], 10, 8) == pytest.approx(18 + 2 * 10 + 8 * 1.1 + 10)
    assert estimate_seconds([by_name["NaN in the weights"]], 10, 8) == pytest.approx(18 + 3 * 10 + 8 * 1.2)


@pytest.mark.parametrize(
    ("words", "killed", "others"),
    [
        ("sync.name=every_step", Likeness.BITS, Likeness.BITS),
        ("sync.name=diloco", Likeness.BITS, Likeness.BITS),
        ("fault.on_lost_process=continue", Likeness.ROUNDING, Likeness.BITS),
        ("sync.name=parameter_server", Likeness.ROUNDING, Likeness.BITS),
        ("sync={name: parameter_server, servers: 2}", Likeness.BITS, Likeness.BITS),
        ("sync={name: parameter_server, max_staleness: 1}", Likeness.BATCHES, Likeness.BATCHES),
    ],
)
def test_what_can_equal_an_undisturbed_run_depends_on_how_replicas_agree(tmp_path, words, killed, others):
    """Two processes, of which the second is killed. Servers that are lost restart the job."""
    recipe, _ = load_recipe(write(tmp_path), [words])
    for fault in FAULTS:
        found = choose_likeness(recipe, fault, 2)
        expected = killed if fault.name == "a rank killed" else others
        assert found is (Likeness.STEPS if fault.needs_rewards else expected), fault


@pytest.mark.parametrize(
    ("nodes", "told", "training", "lost"),
    [
        (1, "3", 6, Likeness.BITS),  # the default: all hosts are needed
        (3, "3", 6, Likeness.BITS),
        ("2:3", "2:3", 6, Likeness.ROUNDING),
        ("2+1", "2+1", 4, Likeness.BITS),
    ],
)
def test_a_crew_trains_on_as_many_machines_as_the_recipe_says(tmp_path, nodes, told, training, lost):
    recipe, _ = load_recipe(write(tmp_path), [f"launch.nodes={nodes!r}", "launch.torchrun.hosts=[a,b,c]"])
    crew = Crew.of(recipe.launch, 2)
    assert (str(crew.launch.nodes), crew.num_training) == (told, training)
    words = crew.agent_words(("train", "big.json"), Path("runs/x.pid"))
    assert f"--nodes {told} --rendezvous a:29400" in words[-1] and "echo $$ > runs/x.pid" in words[-1]
    found = {fault.name: choose_likeness(recipe, fault, training, crew) for fault in MACHINE_FAULTS}
    assert found["a rank killed"] is Likeness.BITS and found["a machine lost"] is lost


def test_hosts_that_do_not_fit_the_number_of_machines_are_refused(tmp_path):
    for nodes, hosts in ((2, "[a,b,c]"), ("2:3", "[a,b,c,d]"), (1, "[a]")):
        recipe, _ = load_recipe(write(tmp_path), [f"launch.nodes={nodes!r}", f"launch.torchrun.hosts={hosts}"])
        with pytest.raises(ConfigError, match=r"does not fit the|is one machine"):
            Crew.of(recipe.launch, 1)


def test_the_small_run_keeps_what_the_recipe_does_about_a_lost_process(tmp_path):
    recipe, _ = load_recipe(write(tmp_path, fault={"on_lost_process": "replace"}))
    small, _ = load_recipe(write(tmp_path), shrink(recipe, tmp_path / "small", 2, 24))
    assert small.fault.on_lost_process == "replace"
