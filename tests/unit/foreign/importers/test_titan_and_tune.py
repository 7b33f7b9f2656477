"""Recipes of torchtune and torchtitan: the recipe, the text of prompts, the sizes of models, and what is refused."""

import math
import textwrap

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from echelon.foreign.importers import Amounts, import_recipe
from echelon.ground.errors import ConfigError
from echelon.planner.shape import build_shape
from echelon.recipe.batches import BatchSchedule
from echelon.recipe.load import parse_recipe
from echelon.recipe.schedule import build_schedule

TUNE = """\
output_dir: /tmp/tuned
tokenizer:
  _component_: torchtune.models.llama3.llama3_tokenizer
  path: /models/llama/original/tokenizer.model
  max_seq_len: 2048
model:
  _component_: torchtune.models.llama3_1.lora_llama3_1_8b
  lora_attn_modules: [q_proj, output_proj]
  apply_lora_to_mlp: True
  apply_lora_to_output: False
  lora_rank: 4
  lora_alpha: 8
checkpointer:
  _component_: torchtune.training.FullModelHFCheckpointer
  checkpoint_dir: /models/llama
  checkpoint_files: [model.safetensors]
  recipe_checkpoint: null
  output_dir: ${output_dir}
  model_type: LLAMA3
resume_from_checkpoint: False
dataset:
  _component_: torchtune.datasets.alpaca_cleaned_dataset
  packed: True
  split: train[:95%]
dataset_val:
  _component_: torchtune.datasets.alpaca_cleaned_dataset
  split: train[95%:]
run_val_every_n_steps: 50
batch_size_val: ${batch_size}
seed: 7
shuffle: True
epochs: 2
batch_size: 4
gradient_accumulation_steps: 8
max_steps_per_epoch: null
optimizer:
  _component_: torch.optim.AdamW
  fused: True
  lr: 3e-4
lr_scheduler:
  _component_: torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup
  num_warmup_steps: 100
loss:
  _component_: torchtune.modules.loss.LinearCrossEntropyLoss
clip_grad_norm: 1.0
compile: False
device: cuda
dtype: bf16
enable_activation_checkpointing: True
enable_activation_offloading: False
metric_logger:
  _component_: torchtune.training.metric_logging.WandBLogger
  project: lamas
  log_dir: ${output_dir}/logs
log_every_n_steps: 5
profiler:
  _component_: torchtune.training.setup_torch_profiler
  enabled: False
  wait_steps: 5
"""
PAIRS = {
    "torchtune.datasets.alpaca_cleaned_dataset": "torchtune.datasets.hh_rlhf_helpful_dataset",
    "torchtune.modules.loss.LinearCrossEntropyLoss": "torchtune.rlhf.loss.DPOLoss\n  beta: 0.2",
    "  packed: True\n": "",
}
TITAN = """\
[job]
dump_folder = "./outputs"
description = "a text"

[profiling]
enable_profiling = true

[metrics]
log_freq = 10
enable_tensorboard = true

[model]
name = "llama3"
flavor = "8B"
hf_assets_path = "./assets/hf/Llama-3.1-8B"

[optimizer]
name = "AdamW"
lr = 3e-4

[lr_scheduler]
warmup_steps = 20

[training]
local_batch_size = 2
seq_len = 8192
steps = 100
dataset = "c4"

[parallelism]
data_parallel_shard_degree = -1
tensor_parallel_degree = 4
pipeline_parallel_schedule = "1F1B"

[checkpoint]
enable = true
interval = 50
async_mode = "async"

[activation_checkpoint]
mode = "full"

[compile]
enable = true

[validation]
enable = true
dataset = "c4_validation"
freq = 25
"""


def bring_in(folder, name, text, *changes, devices=None):
    """Import a file with some texts replaced; returns the recipe and the import."""
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new)
    (folder / name).write_text(text)
    found = import_recipe(folder / name, amounts=Amounts(devices))
    return parse_recipe(found.text, "imported")[0], found


def test_a_recipe_of_torchtune(tmp_path):
    recipe, found = bring_in(tmp_path, "8B_lora.yaml", TUNE, devices=2)
    assert found.tool == "torchtune" and recipe.run.name == "8B_lora"
    assert recipe.model.checkpoint == "/models/llama" and recipe.run.seed == 7
    adapter = recipe.adapter
    assert (adapter.method, adapter.r, adapter.alpha, adapter.dropout) == ("lora", 4, 8, 0.0)
    assert list(adapter.target_modules) == ["q_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    [train], [held_out] = recipe.data.train, recipe.data.validation
    assert (train.path, train.split, held_out.split) == ("yahma/alpaca-cleaned", "train[:95%]", "train[95%:]")
    assert (recipe.data.sequence_len, recipe.data.on_overlong, recipe.data.train_on) == (2048, "cut", "all")
    assert recipe.data.packing is True and recipe.data.document_mask is True
    assert (recipe.global_batch_size, recipe.train.epochs, recipe.train.eval_every) == (64, 2, 50)
    assert (recipe.train.precision, recipe.train.activation_checkpointing) == ("bf16", "full")
    optim = recipe.optim
    assert (optim.name, optim.learning_rate, optim.weight_decay, optim.betas) == ("adamw", 3e-4, 0.01, (0.9, 0.999))
    assert (optim.schedule, optim.warmup_steps, optim.max_grad_norm, optim.no_decay) == ("cosine", 100, 1.0, ())
    assert recipe.track == ("wandb",) and recipe.wandb.project == "lamas"


def test_prompts_are_those_of_torchtune(tmp_path):
    """Its AlpacaToMessages makes the user's turn, and its Llama3Tokenizer strips the turns and writes them."""
    recipe, _ = bring_in(tmp_path, "a.yaml", TUNE)
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    turns = [
        {"role": "user", "content": "Add.\n3 4", "instruction": "Add.", "input": "3 4"},
        {"role": "assistant", "content": " 7\n"},
        {"role": "user", "content": "Why?"},
    ]
    text = environment.from_string(recipe.data.chat_template).render(messages=turns, bos_token="<s>")
    assert text == (
        "<s><|start_header_id|>user<|end_header_id|>\n\n"
        "Below is an instruction that describes a task, paired with an input that provides further context. Write a "
        "response that appropriately completes the request.\n\n### Instruction:\nAdd.\n\n### Input:\n3 4\n\n"
        "### Response:<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n7<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\n"
        "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
        "### Instruction:\nWhy?\n\n### Response:<|eot_id|>"
    )


def test_preferences_of_torchtune(tmp_path):
    recipe, _ = bring_in(tmp_path, "a.yaml", TUNE, *PAIRS.items(), ("lora_llama3_1_8b", "qlora_llama3_1_8b"))
    assert (recipe.objective.name, recipe.objective.loss, recipe.objective.beta) == ("dpo", "sigmoid", 0.2)
    assert recipe.data.train[0].path == "RLHFlow/HH-RLHF-Helpful-standard" and recipe.adapter.method == "qlora"
    assert recipe.data.chat_template == "llama3"


@pytest.mark.parametrize(
    ("given", "format", "fields", "train_on"),
    [
        ("chat_dataset\n  source: json\n  data_files: a.jsonl\n  conversation_column: talk\n"
         "  conversation_style: openai",
         "messages", {"messages": "talk"}, "assistant"),
        ("chat_dataset\n  source: o/n\n  conversation_column: talk\n  conversation_style: sharegpt\n"
         "  train_on_input: True", "hub", {"conversations": "talk"}, "all"),
        ("alpaca_dataset\n  source: json\n  data_files: a.jsonl\n  train_on_input: False\n"
         "  column_map: {instruction: q, input: more, output: a}",
         "alpaca", {"instruction": "q", "input": "more", "output": "a"}, "assistant"),
        ("text_completion_dataset\n  source: json\n  data_files: a.jsonl\n  column: body",
         "auto", {"text": "body"}, "assistant"),
    ],
)  # fmt: skip
def test_datasets_of_torchtune(tmp_path, given, format, fields, train_on):
    usual = "alpaca_cleaned_dataset\n  packed: True\n  split: train[:95%]"
    recipe, _ = bring_in(
        tmp_path, "a.yaml", TUNE, (usual, given), ("run_val_every_n_steps: 50", "run_val_every_n_steps: null")
    )
    [source] = recipe.data.train
    assert (source.format, source.fields, recipe.data.train_on) == (format, fields, train_on)
    assert source.path == ("o/n" if format == "hub" else "a.jsonl")
    assert recipe.data.packing is False


def test_a_recipe_of_torchtitan(tmp_path):
    recipe, found = bring_in(tmp_path, "llama.toml", TITAN, devices=64)
    assert found.tool == "torchtitan" and recipe.tokenizer == "./assets/hf/Llama-3.1-8B"
    assert (recipe.data.train[0].path, recipe.data.validation[0].split) == ("allenai/c4/en", "validation")
    assert (recipe.data.sequence_len, recipe.data.document_mask, recipe.train.eval_every) == (8192, False, 25)
    assert (recipe.global_batch_size, recipe.train.micro_batch_size, recipe.train.steps) == (32, 2, 100)
    assert recipe.parallel.tp == 4 and recipe.parallel.dp_shard == "auto"
    assert (recipe.train.precision, recipe.train.compile, recipe.train.activation_checkpointing) == (
        "bf16",
        True,
        "full",
    )
    optim = recipe.optim
    assert (optim.betas, optim.weight_decay, optim.no_decay, optim.max_grad_norm) == ((0.9, 0.95), 0.1, (), 1.0)
    assert recipe.checkpoint.every_steps == 50 and recipe.track == ("tensorboard",)


@pytest.mark.parametrize(
    ("name", "flavor", "millions"),
    [
        ("llama3", "8B", 8030.3), ("llama3", "70B", 70553.7), ("llama3", "405B", 405853.4),
        ("llama3", "8B_flex", 8030.3),
        ("qwen3", "0.6B", 596.0), ("qwen3", "4B", 4022.5), ("qwen3", "32B", 32762.1),
    ],
)  # fmt: skip
def test_models_have_the_published_sizes(tmp_path, name, flavor, millions):
    """The parameters of the models on the hub."""
    changes = [('"llama3"', f'"{name}"'), ('"8B"', f'"{flavor}"')]
    recipe, _ = bring_in(tmp_path, "a.toml", TITAN, *changes)
    assert build_shape(recipe.model.config).num_parameters / 1e6 == pytest.approx(millions, abs=0.1)
    assert recipe.data.document_mask is flavor.endswith("_flex")


@pytest.mark.parametrize(
    ("lines", "decay", "fall"),
    [
        ("", 80, lambda progress: 1 - progress),
        ('decay_type = "cosine"\nmin_lr_factor = 0.1', 80,
         lambda progress: 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * progress))),
        ('decay_type = "sqrt"\ndecay_ratio = 0.4', 40, lambda progress: 1 - math.sqrt(progress)),
    ],
    ids=["linear", "cosine", "sqrt"],
)  # fmt: skip
def test_the_learning_rate_is_that_of_torchtitan(tmp_path, lines, decay, fall):
    """Its decay ends with the first step after the run, echelon's one step earlier, with the last step of the run."""
    recipe, _ = bring_in(tmp_path, "a.toml", TITAN, ("warmup_steps = 20", f"warmup_steps = 20\n{lines}"))
    rate = build_schedule(recipe.optim, 100, BatchSchedule(recipe.global_batch_size, recipe.data.sequence_len))
    for step in (0, 9, 19, 20, 60, 61, 70, 99):
        factor = (step + 1) / 20 if step < 20 else fall(max(0, step + 1 - (100 - decay)) / decay)
        assert rate(step) == pytest.approx(3e-4 * factor, abs=3.03e-4 / decay), step


@pytest.mark.parametrize(
    ("text", "changes", "words"),
    [
        (TUNE, [("llama3_tokenizer", "gemma_tokenizer")], "tokenizer._component_: .*gemma_tokenizer: import knows how"),
        (TUNE, [("alpaca_cleaned_dataset", "samsum_dataset")], "import knows the texts of datasets of alpaca_dataset"),
        (TUNE, [("alpaca_cleaned_dataset", "stack_exchange_paired_dataset"), *list(PAIRS.items())[1:]],
         "import knows the texts of pairs with a conversation"),
        (TUNE, [("  packed: True", "  filter_fn: mine")], "dataset.filter_fn: mine: records are read"),
        (TUNE, [("  packed: True", "  data_files: [a.jsonl, b.jsonl]")], "dataset.data_files: .*: give one file"),
        (TUNE, [("torch.optim.AdamW", "torch.optim.Adagrad")], "optimizer._component_: torch.optim.Adagrad: the"),
        (TUNE, [("apply_lora_to_output: False", "apply_lora_to_output: True")], "model.apply_lora_to_output: true"),
        (TUNE, [("FullModelHFCheckpointer", "FullModelMetaCheckpointer")], "checkpointer._component_: .*of the hub"),
        (TUNE, [("shuffle: True", "shuffle: False")], "shuffle: false: samples are always shuffled"),
        (TUNE, [("clip_grad_norm: 1.0", "kd_ratio: 0.5")], "kd_ratio: 0.5: distillation is not imported"),
        (TUNE, [("clip_grad_norm: 1.0", "quantizer: {_component_: q}")], "quantizer._component_: q: training with"),
        (TUNE, [("clip_grad_norm: 1.0", "colour: red")], "colour: red: this key is unknown to echelon"),
        (TUNE, [("dtype: bf16", "dtype: fp16")], "dtype: fp16: weights are trained in fp32 or bf16"),
        (TITAN, [('"8B"', '"13B"')], "model.flavor: 13B: import knows the sizes of llama3 8B"),
        (TITAN, [('"llama3"', '"deepseek_v3"')], "model.flavor: 8B: .*not those of deepseek_v3"),
        (TITAN, [('"c4"', '"mine"')], "training.dataset: mine: import knows c4, c4_validation, c4_test"),
        (TITAN, [("warmup_steps = 20", "warmup_steps = 20\ndecay_ratio = 0.5")], "lr_scheduler.decay_ratio: 0.5"),
        (TITAN, [("steps = 100", "steps = 100\ncolour = 1")], "training.colour: 1: this key is unknown"),
        (TITAN, [('flavor = "8B"', 'flavor = "8B"\nconverters = ["mx"]')], r"model.converters: \[mx\]: the"),
        (TITAN, [("interval = 50", 'initial_load_path = "x"')], "checkpoint.initial_load_path: x"),
        (TITAN, [("[compile]", "[fault_tolerance]\nenable = true\n[compile]")], "fault_tolerance.enable: true"),
    ],
)  # fmt: skip
def test_other_training_is_refused(tmp_path, text, changes, words):
    with pytest.raises(ConfigError, match=words):
        bring_in(tmp_path, "a.toml" if text is TITAN else "a.yaml", text, *changes)


def test_a_file_that_does_not_train_is_refused(tmp_path):
    text = textwrap.dedent("""\
        model: {_component_: torchtune.models.llama2.llama2_7b}
        tokenizer: {_component_: torchtune.models.llama2.llama2_tokenizer, path: t}
        prompt: {user: Hi}
        """)
    with pytest.raises(ConfigError, match="has no single `dataset` with a `_component_`: it does not train"):
        bring_in(tmp_path, "generation.yaml", text)
