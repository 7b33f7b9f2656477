"""Damaged recipes, for loading, all checks and the plan."""

import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from echelon.planner.choose import resolve_plan
from echelon.planner.hardware.accelerators import Cluster, parse_devices
from echelon.planner.memory import estimate_memory
from echelon.planner.plan import ParallelPlan
from echelon.recipe.document import Recipe
from echelon.recipe.keys import recipe_keys
from echelon.recipe.load import load_recipe
from echelon.recipe.render import render_recipe
from echelon.run.lifecycle.model_checks import check_model
from echelon.run.lifecycle.setup import describe_steps
from tests.fuzz.damage import HUGE, damage_bytes
from tests.unit.recipe_samples import SMALL

MIXTURE = """\
# Several texts in shares, a ramp, a schedule in tokens.
run: {name: mixture, dir: runs/mixture, seed: 7}
model:
  config:
    model_type: gpt2
    n_embd: 64
    n_layer: 2
    n_head: 4
    n_positions: 128
tokenizer: {train: {vocab_size: 512}}
data:
  train:
    - {name: code, path: code/*.py, format: text, weight: 0.7}
    - {name: prose, path: "prose.jsonl", fields: {text: body}, weight: 0.3}
  validation: [{path: held-out.txt}]
  sequence_len: 128
  prepare_workers: 2
train:
  tokens: 2e6
  global_batch_size: 32
  batch_ramp: {from: 8, over_tokens: 1e5, increment: 8}
  micro_batch_size: 2
  precision: bf16
  activation_checkpointing: full
optim:
  name: muon
  learning_rate: 0.02
  learning_rate_multipliers: {"*wte*": 0.5}
  betas: [0.9, 0.95]
  schedule: wsd
  warmup: 1e4 tokens
  decay_fraction: 0.3
  max_grad_norm: null
parallel: {dp_replicate: 1, dp_shard: auto, reshard_after_forward: true}
checkpoint: {every: 50, keep_last: 2, keep_best: true, async: false}
evaluate: {batches: 2, prompts: ["Once", "def "], early_stopping: 3}
fault: {notice_seconds: 30}
"""

PRETRAINED = """\
run: {name: tuned}
model: {checkpoint: CHECKPOINT, attn_implementation: sdpa}
data: {train: text.txt, validation_fraction: 0.05, sequence_len: 32}
train: {epochs: 2, global_batch_tokens: 256, deterministic: true, eval_every: null}
optim: {learning_rate: 1e-4, weight_decay: 0.0, name: lion}
parallel: zero1
"""

CLUSTERS = (
    Cluster(parse_devices("1xcpu").accelerator, 1, 1, "cpu"),
    Cluster(parse_devices("1xcpu").accelerator, 4, 4, "cpu"),
    parse_devices("16xH100"),
    parse_devices("1xT4"),
)  # fmt: skip

# Replacements for a value, as YAML text, since users write YAML.
VALUES = (
    "null", "~", "true", "no", "0", "-1", "1", "2", "3", "7", "64", "2.5", "-0.0", "1e-300", "1e308", "1e999", ".inf",
    "-.inf", ".nan", "1_000", "0x10", "0o17", "017", "1:30", "2026-01-01", "''", "' '", "x", "a b", "bytes", "auto",
    "all", "none", "fp8", "ddp", "hsdp", "adamw", "nan", "[]", "{}", "[1]", "[null]", "[[]]", "{x: 1}", "{1: 2}",
    "{'': ''}", "{null: null}", "{model_type: llama}", "[a, a]", "../../x", "/", "/dev/zero", "/proc/self/mem",
    "hf://x", "user/model", "a/b/c", "é\u202e\u0301", "'\\0'", '"\\0"', '"\\ud800"', "'%s{0}'",
    "!!python/object/apply:os.mkdir [MARKER]", "!!python/name:os.system", "!!binary aGk=", "!!binary %",
    "!!set {a, b}", "!!omap [a: 1]", "!!timestamp 2001-99-99", "!!int x", "!!float x", "!!bool maybe", "!!null x",
    "!!str 1", "!x y", "&a [*a]", "*nowhere", "<<", "{<<: 1}", "{<<: {x: 1}}", "{? [1] : 2}", "{? {a: 1} : 2}",
    "9" * 5000, "[" * 500 + "]" * 500, "[" * 20_000, "x" * 20_000, "&a [x,x,x,x,x,x,x,x,x]", "|", ">-", "- - -", "? ",
    "%YAML 9.9", "---", "...", "@x", "`x", "#", "\t", "$HOME", "{{ x }}", *map(str, HUGE), "-" + str(HUGE[-1]),
    "1e18", "1e15", "123456789012", "999999937",
)  # fmt: skip
PLAUSIBLE = (
    "1", "2", "4", "8", "16", "32", "64", "128", "100", "1000", "0.5", "0.1", "1e-3", "1e6", "true", "false", "null",
    "auto", "none", "full", "fp32", "bf16", "text.txt", "[text.txt, {path: other.txt, weight: 2}]", "zero1", "fsdp",
    "adamw", "lion", "cosine", "linear", "text", "[0.8, 0.9]", "{dp_shard: auto}", "[tensorboard]", "offline",
)  # fmt: skip
MODEL_TYPES = (
    "llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "gpt2", "gpt_neox", "opt", "phi3", "olmo2",
    "mixtral", "bloom", "falcon", "bert", "t5", "vit", "whisper", "clip", "mamba", "xlnet", "lama", "qwen3_moe",
    "deepseek_v3", "llama4_text", "cohere", "granite", "stablelm", "starcoder2", "nemotron", "gpt_bigcode", "rwkv",
    "encoder-decoder",
)  # fmt: skip
CONFIG_KEYS = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size",
    "max_position_embeddings", "rope_theta", "rope_scaling", "hidden_act", "model_type", "n_layer", "layer_types",
    "tie_word_embeddings", "attention_bias", "pad_token_id", "x",
)  # fmt: skip
BOMB = "a: &a [x,x,x,x,x,x,x,x]\n" + "".join(
    f"{after}: &{after} [{','.join([f'*{before}'] * 8)}]\n"
    for before, after in zip("abcdefghi", "bcdefghij", strict=True)
)
_SCALAR = re.compile(r"[^\s:,\[\]{}#&*!|>'\"%@`-][^\s:,\[\]{}#]*")


def base_texts(folder: Path, checkpoint: Path) -> dict[str, str]:
    """Valid recipes by name: small ones that use different keys, and the shipped ones."""
    shipped = {path.name: path.read_text() for path in sorted(folder.glob("*.yaml"))}
    return {
        "small": SMALL,
        "mixture": MIXTURE,
        "pretrained": PRETRAINED.replace("CHECKPOINT", str(checkpoint)),
    } | shipped


def plan_recipe(path: Path, overrides: list[str], cluster: Cluster) -> tuple[Recipe, ParallelPlan]:
    """Do what `echelon train` and `echelon plan` do before any text is read: load, check, plan, estimate, describe."""
    recipe, _ = load_recipe(path, overrides)
    shape = check_model(recipe).shape
    plan = resolve_plan(recipe, shape, cluster)
    estimate = estimate_memory(shape, plan, cluster.kind)
    describe_steps(recipe, None)
    assert estimate.total > 0
    return recipe, plan


def is_valid(loaded: tuple[Recipe, ParallelPlan], cluster: Cluster, folder: Path) -> bool:
    """Whether the recipe is unchanged after writing and reading, and its plan matches the cluster and the batch."""
    recipe, plan = loaded
    again = folder / "again.yaml"
    again.write_text(render_recipe(recipe, hide_secrets=False), encoding="utf-8")
    return (
        load_recipe(again)[0] == recipe
        and plan.world_size == cluster.num_devices
        and plan.global_batch_size == recipe.global_batch_size
    )


def damage_text(rng: random.Random, text: str, marker: Path) -> bytes:
    """The text of a recipe with a few errors, as bytes."""
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        if _SCALAR.search(text):
            text = rng.choice(TEXT_DAMAGES)(rng, text)
    data = text.replace("MARKER", str(marker)).encode("utf-8", "surrogatepass")
    if data and rng.random() < 0.1:
        data = damage_bytes(rng, data)
    if rng.random() < 0.02:
        data = rng.choice(
            (b"\xef\xbb\xbf" + data, data.decode("utf-8", "replace").encode("utf-16"), data + b"\0", b"\xff" + data)
        )
    return data


def _replace_scalar(rng: random.Random, text: str) -> str:
    chosen = rng.choice(list(_SCALAR.finditer(text)))
    value = rng.choice(VALUES if rng.random() < 0.9 else MODEL_TYPES)
    return text[: chosen.start()] + value + text[chosen.end() :]


def _change_character(rng: random.Random, text: str) -> str:
    place = rng.randrange(len(text))
    new = rng.choice((*"{}[]:,-#&*!|>'\"%@` \n\t?0a_.", "", "\0", "\x85", "\u2028", "\ufeff", "é"))
    return text[:place] + new + text[place + rng.randrange(2) :]


def _change_lines(rng: random.Random, text: str) -> str:
    lines = text.splitlines(keepends=True)
    place, other = rng.randrange(len(lines)), rng.randrange(len(lines))
    match rng.randrange(5):
        case 0:
            del lines[place]
        case 1:
            lines.insert(other, lines[place])
        case 2:
            lines[place], lines[other] = lines[other], lines[place]
        case 3:
            lines[place] = rng.choice((" ", "  ", "\t", "- ")) + lines[place]
        case _:
            lines[place] = lines[place].lstrip()
    return "".join(lines) or "\n"


def _misspell(rng: random.Random, text: str) -> str:
    words = list(re.finditer(r"[a-z_]{3,}(?=:)", text))
    if not words:
        return text + "x: 1\n"
    chosen = rng.choice(words)
    word = list(chosen.group())
    place = rng.randrange(len(word) - 1)
    word[place], word[place + 1] = word[place + 1], word[place]
    name = rng.choice(
        ("".join(word), chosen.group().upper(), chosen.group()[:-1], "lr", "deepspeed", "bf16", "__class__")
    )
    return text[: chosen.start()] + name + text[chosen.end() :]


def _hazard(rng: random.Random, text: str) -> str:
    return rng.choice(
        (
            BOMB + text,
            text + "launch: " + "{a: " * 300 + "1" + "}" * 300 + "\n",
            text + "launch: " + "[" * 50_000 + "\n",
            text.replace("run:", "run: !!python/object/apply:os.mkdir [MARKER]\nrun:", 1),
            text + "profile: !!python/object/new:os.mkdir [MARKER]\n",
            "&x\n" + text,
            text + "---\n" + text,
            text * 2,
            "- " + text.replace("\n", "\n  "),
            "profile: &l {x: 1}\nlaunch: {<<: *l}\n" + text,
            "",
            "\n\n# nothing\n",
            "just words\n",
            "[1, 2]\n",
        )
    )


TEXT_DAMAGES: tuple[Callable[[random.Random, str], str], ...] = (
    _replace_scalar, _replace_scalar, _replace_scalar, _change_character, _change_lines, _misspell, _hazard,
)  # fmt: skip


def random_overrides(rng: random.Random, marker: Path) -> list[str]:
    """One to three overrides: existing or misspelt keys, valid or invalid values."""
    keys = sorted(recipe_keys(Recipe))
    overrides = []
    for _ in range(rng.choice((1, 1, 2, 3))):
        key = rng.choice(keys).replace("[]", f".{rng.choice((0, 0, 1, 9, -1, 10**30))}")
        choice = rng.randrange(20)
        if choice < 5:
            key = f"model.config.{rng.choice(CONFIG_KEYS)}"
        elif choice == 5:
            key = rng.choice(
                (key[:-1], key + "x", key.upper(), key + ".x", key + ".0", "." + key, "", "x.y.z", "__init__", "é")
            )
        value = rng.choice(
            MODEL_TYPES if key.endswith("model_type") and choice % 2 else rng.choice((VALUES, PLAUSIBLE))
        )
        equals = "=" if rng.random() < 0.97 else rng.choice(("", ":", "==", " = "))
        overrides.append(f"{key}{equals}{value}".replace("MARKER", str(marker)))
    return overrides


def nothing_asked(*_: Any, **__: Any) -> None:
    """Disable the network: hub ids in a recipe do not resolve."""
    raise OSError("no network in this test")
