"""Messages of recipes by their parts; differences between recipes, and which of them prevent a resume."""

from pathlib import Path

import pytest

from echelon.ground.errors import ConfigError, Fault
from echelon.recipe.difference import Difference, blocking_differences, diff_recipes
from echelon.recipe.messages import read_fault
from tests.unit.recipe_samples import SMALL, load_text

LINE = "recipe.yaml, line 9"
CHANGED = (
    "run.dir=runs/a contains a run with another recipe:\n  optim.learning_rate: 0.1 -> 0.5\nrestore these keys; or not."
)


@pytest.mark.parametrize(
    ("message", "parts"),
    [
        (f"{LINE}: train.steps=0 must be at least 1; use 1 or more.",
         Fault(LINE, "train.steps", "0", "must be at least 1", "use 1 or more")),
        ("command line: [ is not a recipe key", Fault("command line", None, None, "[ is not a recipe key")),
        ("parallel.tp=3 does not divide num_key_value_heads=8; use tp = 1, 2, 4 or 8.",
         Fault(None, "parallel.tp", "3", "does not divide num_key_value_heads=8", "use tp = 1, 2, 4 or 8")),
        ("parallel.ep=4: llama has no experts, so there is nothing to divide; remove parallel.ep.",
         Fault(None, "parallel.ep", "4", "llama has no experts, so there is nothing to divide", "remove parallel.ep")),
        ("parallel.stages=[1, 2] has 3 layers, but the model has 4; the numbers must add up to 4.",
         Fault(None, "parallel.stages", "[1, 2]", "has 3 layers, but the model has 4", "the numbers must add up to 4")),
        ("run.name='a b; c' must be a plain folder name; use letters.",
         Fault(None, "run.name", "'a b; c'", "must be a plain folder name", "use letters")),
        ("parallel: {dp_shard: 4} needs 4 processes, but 2; run 4 processes.",
         Fault(None, "parallel", None, "{dp_shard: 4} needs 4 processes, but 2", "run 4 processes")),
        ("one of train.steps, train.tokens and train.epochs must set it; add one.",
         Fault(None, "train.steps", None, "one of train.steps, train.tokens and train.epochs must set it", "add one")),
        ("--nproc 0 is neither a number of processes nor auto; use --nproc 2, for example.",
         Fault(None, "--nproc", None, "0 is neither a number of processes nor auto", "use --nproc 2, for example")),
        ("launch.kubernetes.resources.nvidia.com/gpu=1: set launch.kubernetes.gpus_per_node instead.",
         Fault(None, "launch.kubernetes.resources.nvidia.com/gpu", "1", None,
               "set launch.kubernetes.gpus_per_node instead")),
        ("recipe.yaml does not exist; name a recipe file, or make one with `echelon init`.",
         Fault(None, None, None, "recipe.yaml does not exist", "name a recipe file, or make one with `echelon init`")),
        (CHANGED, Fault(None, "run.dir", "runs/a",
                        "contains a run with another recipe:\n  optim.learning_rate: 0.1 -> 0.5\nrestore these keys",
                        "or not")),
        (CHANGED.replace("; or not", ""),
         Fault(None, "run.dir", "runs/a", "contains a run with another recipe:\n  optim.learning_rate: 0.1 -> 0.5",
               "restore these keys")),
        ("rank 3 (pid 7) was killed by SIGKILL", Fault(rule="rank 3 (pid 7) was killed by SIGKILL")),
        ("", Fault()),
    ],
)  # fmt: skip
def test_a_message_is_read_into_its_parts(message, parts):
    assert read_fault(message) == parts


def fault_of(folder, text, *overrides):
    with pytest.raises(ConfigError) as caught:
        load_text(folder, text, *overrides)
    assert all(part in str(caught.value) for fault in caught.value.faults for part in vars(fault).values() if part)
    return caught.value.faults


def test_an_error_has_a_fault_for_each_wrong_key_with_its_line(tmp_path):
    faults = fault_of(tmp_path, SMALL.replace("steps: 100", "steps: 0").replace("small", "7"))
    path = f"{tmp_path}/recipe.yaml"
    text = "must be text (quoted, if it looks like a number)"
    assert faults == (
        Fault(f"{path}, line 1", "run.name", "7", text, "write it in quotes"),
        Fault(f"{path}, line 9", "train.steps", "0", "must be at least 1", "use 1 or more"),
    )


@pytest.mark.parametrize(
    ("override", "key", "value", "fix"),
    [
        ("train.stepss=5", "train.stepss", None, "did you mean train.steps?"),
        ("optim.schedule=cosin", "optim.schedule", "cosin", "did you mean cosine?"),
        ("train.compile=no", "train.compile", "'no'", "use false"),
        ("train.steps='100'", "train.steps", "'100'", "use 100"),
        ("train.steps=2K", "train.steps", "2K", "use 2000"),
        ("optim.learning_rate='3e-4'", "optim.learning_rate", "'3e-4'", "use 3e-4"),
        ("optim.learning_rate=fast", "optim.learning_rate", "fast", "use a number such as 0.5"),
        ("adapter.r=-1", "adapter.r", "-1", "use 1 or more"),
        ("tokenizer.train={vocab_size: 8}", "tokenizer.train.vocab_size", "8", "use 257 or more"),
        ("optim.name=adam", "optim.name", "adam", "did you mean adamw?"),
        ("run.dir=" + "a" * 300, "run.dir", "a" * 77 + "...", "shorten it"),
        # Rules of sections: the value is that of the recipe, also if it has spaces.
        ("run.name=a b; c", "run.name", "a b; c",
         "use letters, digits, '.', '_' and '-', and a letter or digit first"),
        ("adapter.r=8", "adapter.r", "8", "set adapter.method: lora, qlora or dora, or remove r"),
        ("optim.warmup=3 epochs", "optim.warmup", "3 epochs", "use a number such as 100"),
        ("data.validation=[{path: x, weight: 3}]", "data.validation.0.weight", "3", "remove it"),
    ],
)  # fmt: skip
def test_a_fault_says_what_to_write_instead(tmp_path, override, key, value, fix):
    (fault,) = fault_of(tmp_path, SMALL, override)
    assert (fault.place, fault.key, fault.value, fault.fix) == ("command line", key, value, fix)
    assert fault.rule


def test_a_missing_key_is_a_fault(tmp_path):
    (fault,) = fault_of(tmp_path, SMALL.replace("  learning_rate: 3e-4\n", "  weight_decay: 0.1\n"))
    assert (fault.key, fault.value, fault.fix) == ("optim.learning_rate", None, "add it to the recipe")


@pytest.mark.parametrize(
    "override",
    ["train.steps=hf_AbCdEfGhIjKlMnOpQrStUvWx123456", "launch.env=HF_TOKEN=hf_AbCdEfGhIjKlMnOpQrStUvWx123456",
     "launch.hf_AbCdEfGhIjKlMnOpQrStUvWx123456=1", "launch.env.HF_TOKEN=[correct-horse-battery]",
     "objective.loss=hf_AbCdEfGhIjKlMnOpQrStUvWx123456"],
)  # fmt: skip
def test_a_secret_is_in_no_part(tmp_path, override):
    faults = fault_of(tmp_path, SMALL, override)
    assert faults and not any(word in str(faults) for word in ("AbCdEf", "correct-horse"))


def test_a_fault_reads_like_its_line():
    fault = Fault(LINE, "train.steps", "0", "must be at least 1", "use 1 or more")
    assert str(fault) == f"{LINE}: train.steps=0 must be at least 1; use 1 or more."
    assert str(Fault(key="run", rule="is missing")) == "run is missing."
    assert str(Fault(key="a.b", rule="is not a key", fix="did you mean a.c?")) == "a.b is not a key; did you mean a.c?"
    assert fault.within("must be at least 1") == Fault(rule="must be at least 1")


def blocked(folder: Path, before: list[str], after: list[str]) -> list[str]:
    old, new = load_text(folder, SMALL, *before)[0], load_text(folder, SMALL, *after)[0]
    return [difference.key for difference in blocking_differences(old, new)]


def test_differences_are_dotted_keys_in_recipe_order(tmp_path: Path) -> None:
    old, _ = load_text(tmp_path)
    overrides = ("optim.betas=[0.9, 0.99]", "train.tokens=640", "data.train.0.fields={text: body}")
    new, _ = load_text(tmp_path, SMALL, *overrides, "model.config.num_hidden_layers=2")
    assert diff_recipes(old, new) == [
        Difference("train.steps", 100, None),
        Difference("optim.betas", [0.9, 0.95], [0.9, 0.99]),
        Difference("model.config.num_hidden_layers", None, 2),
        Difference("data.train.0.fields.text", None, "body"),
        Difference("train.tokens", None, 640),
    ]
    assert diff_recipes(old, old) == []
    assert str(Difference("train.steps", 100, 200)) == "train.steps: 100 -> 200"
    assert str(Difference("parallel", "ddp", {"dp_shard": 2})) == "parallel: ddp -> {dp_shard: 2}"
    assert str(Difference("train.compile", None, True)) == "train.compile: null -> true"


@pytest.mark.parametrize(
    "override",
    [
        "run.name=other", "run.dir=elsewhere", "train.steps=101", "train.log_every=10", "train.eval_every=null",
        "evaluate.batches=3", "checkpoint.every=7", "checkpoint.async=false", "track=[tensorboard]",
        "parallel=fsdp", "parallel.dp_shard=2", "train.micro_batch_size=2", "data.prepare_workers=1",
    ],
)  # fmt: skip
def test_what_a_resumed_run_may_change(tmp_path: Path, override: str) -> None:
    assert blocked(tmp_path, [], [override]) == []
    old, new = load_text(tmp_path)[0], load_text(tmp_path, SMALL, override)[0]
    assert diff_recipes(old, new)


@pytest.mark.parametrize(
    "override",
    ["train.steps=99", "optim.learning_rate=1e-3", "data.sequence_len=32", "train.global_batch_size=16",
     "tokenizer=other", "model.config.hidden_size=128", "data.train.0.path=other.txt", "train.precision=bf16",
     "train.activation_checkpointing=full", "train.compile=false", "data.validation_fraction=0.1",
     "data.train.0.weight=2", "optim.schedule=linear"],
)  # fmt: skip
def test_what_a_resumed_run_may_not_change(tmp_path: Path, override: str) -> None:
    assert blocked(tmp_path, [], [override]) == [override.partition("=")[0]]


@pytest.mark.parametrize(
    ("before", "after", "is_blocked"),
    [
        ("train.tokens=64000", "train.tokens=128000", False),
        ("train.tokens=64000", "train.tokens=32000", True),
        ("train.epochs=1", "train.epochs=2", False),
        ("train.epochs=2", "train.epochs=1", True),
        ("train.steps=10", "train.tokens=5120", False),  # 10 steps of 8 sequences of 64
        ("train.steps=10", "train.tokens=4608", True),  # 9 steps
        ("train.steps=10", "train.epochs=50", True),  # not known from the recipe
    ],
)
def test_a_run_may_become_longer_but_not_shorter(tmp_path: Path, before: str, after: str, is_blocked: bool) -> None:
    assert bool(blocked(tmp_path, [before], [after])) is is_blocked


def test_a_longer_run_does_not_excuse_another_difference(tmp_path: Path) -> None:
    assert blocked(tmp_path, [], ["train.steps=200", "optim.eps=1e-6"]) == ["optim.eps"]


def test_a_mixture_and_a_ramp_may_not_change(tmp_path: Path) -> None:
    before = [
        "data.train=[{path: a, weight: 1}, {path: b}]",
        "train.batch_ramp={from: 4, over_tokens: 1e6, increment: 2}",
    ]
    for change in ("data.train.0.weight=2", "data.train.1.weight=3", "train.batch_ramp.over_tokens=2e6"):
        assert blocked(tmp_path, before, [*before, change]) == [change.partition("=")[0]]
    assert blocked(tmp_path, before, [*before, "train.steps=200"]) == []
