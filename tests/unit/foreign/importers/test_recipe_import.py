"""Complete files of other tools become recipes that load, and no key is dropped silently."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from echelon.cli.main import app
from echelon.foreign.importers import Amounts, Imported, import_recipe
from echelon.ground.errors import ConfigError
from echelon.recipe.document import Recipe
from echelon.recipe.load import parse_recipe

AXOLOTL = """\
base_model: NousResearch/Meta-Llama-3-8B
model_type: LlamaForCausalLM
tokenizer_type: AutoTokenizer
load_in_8bit: false
load_in_4bit: true
strict: false
datasets:
  - path: fozziethebeat/alpaca_messages_2k_test
    type: chat_template
    split: train
  - path: json
    data_files: [chats.jsonl, more.jsonl]
    ds_type: json
    type: chat_template
    field_messages: dialogue
    message_property_mappings: {role: speaker, content: text}
    roles: {user: [human], assistant: [gpt]}
    roles_to_train: [assistant]
    train_on_eos: turn
chat_template: tokenizer_default
eot_tokens: [<|eot_id|>]
dataset_prepared_path: last_run_prepared
val_set_size: 0.05
output_dir: ./outputs/qlora out
sequence_len: 4096
sample_packing: true
eval_sample_packing: false
pad_to_sequence_len: true
adapter: qlora
lora_model_dir:
lora_r: 32
lora_alpha: 16
lora_dropout: 0.05
lora_target_linear: true
lora_modules_to_save: [embed_tokens, lm_head]
wandb_project: chats
wandb_entity:
wandb_watch: gradients
wandb_name:
gradient_accumulation_steps: 4
micro_batch_size: 2
num_epochs: 4
optimizer: paged_adamw_32bit
lr_scheduler: cosine
learning_rate: 0.0002
cosine_min_lr_ratio: 0.2
bf16: auto
tf32: false
gradient_checkpointing: true
gradient_checkpointing_kwargs: {use_reentrant: true}
resume_from_checkpoint:
logging_steps: 1
sdp_attention: true
warmup_ratio: 0.1
evals_per_epoch: 4
saves_per_epoch: 1
weight_decay: 0.0
loss_watchdog_threshold: 5.0
plugins: [axolotl.integrations.liger.LigerPlugin]
fsdp: [full_shard, auto_wrap]
fsdp_config:
  fsdp_limit_all_gathers: true
  fsdp_sharding_strategy: FULL_SHARD
  fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer
special_tokens: {pad_token: <|end_of_text|>}
tokens: [<|think|>]
"""

FACTORY = """\
### model
model_name_or_path: meta-llama/Meta-Llama-3-8B-Instruct
trust_remote_code: true
flash_attn: fa2

### method
stage: sft
do_train: true
finetuning_type: lora
quantization_bit: 4
double_quantization: false
lora_rank: 8
lora_target: q_proj,v_proj
deepspeed: examples/deepspeed/ds_z2_config.json

### dataset
dataset: faq,unknown_name
dataset_dir: data
template: llama3
cutoff_len: 2048
max_samples: 1000
overwrite_cache: true
preprocessing_num_workers: 16
dataloader_num_workers: 4
packing: true
mask_history: true

### output
output_dir: saves/llama3-8b/lora/sft
logging_steps: 10
save_steps: 500
plot_loss: true
overwrite_output_dir: true
save_only_model: false
report_to: none

### train
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
num_train_epochs: 3.0
lr_scheduler_type: cosine
warmup_ratio: 0.1
bf16: true
ddp_timeout: 180000000
resume_from_checkpoint: null
loraplus_lr_ratio: 16.0

### eval
val_size: 0.1
per_device_eval_batch_size: 1
eval_strategy: steps
eval_steps: 500
"""

TRL = """\
# Model arguments
model_name_or_path: Qwen/Qwen2.5-1.5B
model_revision: main
torch_dtype: bfloat16
attn_implementation: flash_attention_2
use_peft: true
load_in_4bit: true
bnb_4bit_quant_type: nf4
lora_r: 64
lora_alpha: 128
lora_target_modules: all-linear
# Data
dataset_name: HuggingFaceH4/ultrachat_200k
dataset_train_split: train_sft
dataset_test_split: test_sft
dataset_num_proc: 8
# SFTConfig
bf16: true
assistant_only_loss: true
eval_strategy: "no"
gradient_accumulation_steps: 4
gradient_checkpointing: true
gradient_checkpointing_kwargs: {use_reentrant: false}
learning_rate: 2.0e-05
log_level: info
logging_steps: 5
lr_scheduler_type: cosine_with_min_lr
lr_scheduler_kwargs: {min_lr_rate: 0.1}
packing: true
max_length: 2048
max_steps: 1000
num_train_epochs: 1
output_dir: data/Qwen-SFT
per_device_train_batch_size: 8
push_to_hub: true
hub_token: hf_verysecret
report_to: [wandb, comet_ml]
save_strategy: steps
save_steps: 0.1
save_total_limit: 1
seed: 7
warmup_ratio: 0.03
adam_beta2: 0.95
optim: adamw_bnb_8bit
"""

DPO = """\
model_name_or_path: some/sft
stage: dpo
pref_beta: 0.3
pref_loss: ipo
finetuning_type: full
dataset: pairs
template: chatml
cutoff_len: 512
per_device_train_batch_size: 1
max_steps: 100
fp16: true
"""

FILES = {"axolotl": AXOLOTL, "llamafactory": FACTORY, "hf": TRL, "dpo": DPO}


def imported(
    tmp_path: Path, text: str, name: str = "file.yaml", amounts: Amounts | None = None, tool: str | None = None
) -> Imported:
    (tmp_path / name).write_text(text, encoding="utf-8")
    return import_recipe(tmp_path / name, tool, amounts)


def recipe_of(result: Imported) -> Recipe:
    return parse_recipe(result.text, "imported")[0]


def leaves(value: Any, path: str = "") -> list[str]:
    """The dotted names of all values in a file that are not mappings; lists of mappings are traversed."""
    if isinstance(value, dict) and value:
        return [leaf for key, item in value.items() for leaf in leaves(item, f"{path}.{key}" if path else str(key))]
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return [leaf for index, item in enumerate(value) for leaf in leaves(item, f"{path}.{index}")]
    return [path]


@pytest.mark.parametrize("name", FILES)
def test_no_key_vanishes(tmp_path: Path, name: str) -> None:
    result = imported(tmp_path, FILES[name])
    accounted = {entry.name for entry in result.entries}
    for leaf in leaves(yaml.safe_load(FILES[name])):
        assert any(leaf == entry or leaf.startswith(f"{entry}.") for entry in accounted), leaf
    said = "\n".join(result.notes)
    for entry in result.entries:
        assert entry.fate == "carried" or entry.name in said
        assert entry.text or entry.fate in ("carried", "off"), entry


@pytest.mark.parametrize("name", FILES)
def test_a_key_nobody_knows_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(
        ConfigError, match="brand_new_key: 3: this key is unknown to echelon; if it does not change the training"
    ):
        imported(tmp_path, FILES[name] + "brand_new_key: 3\n")


def test_axolotl(tmp_path: Path) -> None:
    result = imported(tmp_path, AXOLOTL, amounts=Amounts(devices=8, samples=1600))
    recipe = recipe_of(result)
    assert result.tool == "axolotl"
    assert (recipe.run.name, recipe.run.dir, recipe.run.seed) == ("qlora-out", Path("outputs/qlora out"), 42)
    assert (recipe.model.checkpoint, recipe.model.attn_implementation) == ("NousResearch/Meta-Llama-3-8B", "sdpa")
    assert recipe.model.new_tokens == ("<|think|>",)
    adapter = recipe.adapter
    assert (adapter.method, adapter.r, adapter.alpha, adapter.dropout) == ("qlora", 32, 16, 0.05)
    assert (adapter.target_modules, adapter.double_quant) == ("all-linear", True)
    hub, chats, more = recipe.data.train
    assert (hub.path, hub.format, hub.split) == ("fozziethebeat/alpaca_messages_2k_test", "hub", "train")
    assert hub.fields == {"messages": "messages"}
    assert [source.path for source in (chats, more)] == ["chats.jsonl", "more.jsonl"]
    assert chats.format == more.format == "messages"
    assert chats.fields == {"messages": "dialogue", "role": "speaker", "content": "text"}
    assert (recipe.data.chat_template, recipe.data.eot_tokens) == (None, ("<|eot_id|>",))
    assert (recipe.data.validation_fraction, recipe.data.sequence_len, recipe.data.packing) == (0.05, 4096, True)
    assert recipe.data.on_overlong == "drop"
    # 2 per device x 4 x 8 devices; 4 epochs of 1600 sequences are 100 steps, 25 per epoch
    assert (recipe.global_batch_size, recipe.train.micro_batch_size, recipe.train.epochs) == (64, 2, 4)
    assert (recipe.optim.warmup, recipe.train.eval_every, recipe.checkpoint.every) == ("10%", "0.25 epochs", "1 epochs")
    assert (recipe.optim.name, recipe.optim.betas, recipe.optim.weight_decay) == ("adamw", (0.9, 0.999), 0.0)
    assert (recipe.optim.schedule, recipe.optim.min_learning_rate_fraction) == ("cosine", 0.2)
    assert (recipe.train.precision, recipe.train.activation_checkpointing) == ("auto", "full")
    assert (recipe.parallel, recipe.track, recipe.launch.env) == ("fsdp", ("wandb",), {"WANDB_PROJECT": "chats"})
    lost = {entry.name for entry in result.entries if entry.fate == "lost"}
    assert lost == {"wandb_watch", "loss_watchdog_threshold"}


def test_llamafactory(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    table = {"faq": {"file_name": "faq.json", "columns": {"prompt": "question", "response": "answer"}}}
    (tmp_path / "data" / "dataset_info.json").write_text(json.dumps(table))
    result = imported(tmp_path, FACTORY)
    recipe = recipe_of(result)
    assert result.tool == "llamafactory"
    assert (recipe.model.trust_remote_code, recipe.model.attn_implementation) == (True, "flash_attention_2")
    adapter = recipe.adapter
    # LLaMA-Factory's lora_alpha is twice the rank by default
    assert (adapter.method, adapter.r, adapter.alpha, adapter.dropout) == ("qlora", 8, 16, 0)
    assert (adapter.target_modules, adapter.double_quant) == (("q_proj", "v_proj"), False)
    first, second = recipe.data.train
    assert (first.path, first.format) == ("data/faq.json", "alpaca")
    assert first.fields == {"instruction": "question", "output": "answer"}
    assert second.path == "data/unknown_name.json"
    assert (recipe.data.packing, recipe.data.document_mask, recipe.data.train_on) == (True, False, "last")
    assert (recipe.data.validation_fraction, recipe.data.prepare_workers) == (0.1, 16)
    assert (recipe.global_batch_size, recipe.train.epochs, recipe.train.precision) == (8, 3, "bf16")
    assert (recipe.train.activation_checkpointing, recipe.data.chat_template) == ("full", "llama3")
    assert (recipe.train.log_every, recipe.train.eval_every, recipe.checkpoint.every) == (10, 500, 500)
    assert recipe_of(imported(tmp_path, FACTORY.replace("bf16: true", "fp8: true"))).train.precision == "fp8"
    assert recipe.optim.learning_rate_multipliers == {"*lora_B*": 16.0}
    assert (recipe.parallel, recipe.track) == ("zero2", ())
    assert recipe.optim.warmup == "10%"
    assert {source.max_samples for source in recipe.data.train} == {1000}
    assert not [entry.name for entry in result.entries if entry.fate == "lost"]
    assert any("1 GPU was assumed" in note for note in result.notes)


def test_trl(tmp_path: Path) -> None:
    result = imported(tmp_path, TRL, amounts=Amounts(devices=4))
    recipe = recipe_of(result)
    assert result.tool == "hf"
    assert (recipe.adapter.method, recipe.adapter.r, recipe.adapter.alpha) == ("qlora", 64, 128)
    # ModelConfig's own defaults
    assert (recipe.adapter.dropout, recipe.adapter.double_quant) == (0.05, False)
    (source,) = recipe.data.train
    assert (source.path, source.format, source.split) == ("HuggingFaceH4/ultrachat_200k", "hub", "train_sft")
    assert (recipe.data.validation, recipe.data.validation_fraction, recipe.train.eval_every) == ((), 0, None)
    assert (recipe.data.packing, recipe.data.sequence_len, recipe.data.train_on) == (True, 2048, "assistant")
    assert (recipe.train.steps, recipe.train.epochs, recipe.global_batch_size) == (1000, None, 128)
    # fractions of 1000 steps
    assert (recipe.checkpoint.every, recipe.checkpoint.keep_last) == (100, 1)
    assert recipe.optim.warmup == "3%"
    assert (recipe.optim.name, recipe.optim.betas) == ("adamw_8bit", (0.9, 0.95))
    assert (recipe.optim.schedule, recipe.optim.min_learning_rate_fraction) == ("cosine", 0.1)
    assert (recipe.run.seed, recipe.track) == (7, ("wandb",))
    assert "verysecret" not in result.text + "".join(result.notes)


def test_dpo(tmp_path: Path) -> None:
    recipe = recipe_of(imported(tmp_path, DPO))
    assert (recipe.objective.name, recipe.objective.beta, recipe.objective.loss) == ("dpo", 0.3, "ipo")
    assert (recipe.adapter.method, recipe.train.precision, recipe.data.chat_template) == ("full", "fp16", "chatml")
    assert (recipe.train.steps, recipe.data.packing) == (100, False)
    # a missing value gets the tool's default, not echelon's
    assert (recipe.optim.learning_rate, recipe.optim.schedule, recipe.optim.weight_decay) == (5e-5, "linear", 0.0)


GKD = """\
model_name_or_path: some/small
teacher_model_name_or_path: some/large
dataset_name: org/chats
max_length: 1024
lmbda: 0.8
beta: 0.1
temperature: 0.7
max_new_tokens: 64
per_device_train_batch_size: 4
max_steps: 100
"""


def test_distillation(tmp_path: Path) -> None:
    recipe = recipe_of(imported(tmp_path, GKD))
    objective, rollout = recipe.objective, recipe.rollout
    assert (objective.name, objective.teacher, objective.loss, objective.beta) == ("distill", "some/large", "jsd", 0.1)
    assert (objective.on_policy_fraction, objective.temperature) == (0.8, 1.0)
    assert (rollout.max_new_tokens, rollout.temperature, recipe.optim.learning_rate) == (64, 0.7, 2e-5)
    # A limit of the divergence has a name of its own; without steps on answers of the model nothing is sampled.
    plain = GKD.replace("lmbda: 0.8", "lmbda: 0.0").replace("beta: 0.1", "beta: 1.0")
    assert recipe_of(imported(tmp_path, plain)).objective.loss_name == "reverse"
    with pytest.raises(ConfigError, match="seq_kd: true: answers of the teacher are not sampled during training"):
        imported(tmp_path, GKD + "seq_kd: true\n")


def test_the_output_of_training_arguments(tmp_path: Path) -> None:
    from transformers import TrainingArguments

    written = TrainingArguments(
        str(tmp_path / "out"), learning_rate=1e-4, warmup_steps=5, max_steps=50, use_cpu=True, report_to="none",
    ).to_json_string()  # fmt: skip
    result = imported(tmp_path, written, "training_args.json")
    accounted = {entry.name for entry in result.entries}
    assert {leaf for leaf in leaves(json.loads(written)) if leaf not in accounted} <= {"fsdp_config"}
    assert {entry.fate for entry in result.entries} <= {"carried", "needless", "off"}
    recipe = recipe_of(result)
    assert (recipe.optim.learning_rate, recipe.optim.warmup, recipe.train.steps) == (1e-4, 5, 50)
    assert (recipe.global_batch_size, recipe.train.precision, recipe.adapter.method) == (8, "fp32", "full")
    assert any("has no model" in note for note in result.notes)
    assert any("has no data" in note for note in result.notes)


def test_groups_of_arguments_are_separated(tmp_path: Path) -> None:
    text = """\
model_args: {model_name_or_path: some/model}
training_args: {learning_rate: 1.0e-4, max_steps: 10, per_device_train_batch_size: 4}
lora_config: {r: 4, lora_alpha: 8, target_modules: [q_proj, v_proj], use_dora: true}
"""
    adapter = recipe_of(imported(tmp_path, text)).adapter
    assert (adapter.method, adapter.r, adapter.alpha, adapter.target_modules) == ("dora", 4, 8, ("q_proj", "v_proj"))


def test_parameters_with_an_adapter_are_named_as_in_peft(tmp_path: Path) -> None:
    names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    file = f"{BASE}adapter: lora\nlora_r: 8\nlora_target_parameters: {names}\n"
    alone = recipe_of(imported(tmp_path, file)).adapter
    assert (alone.target_modules, alone.target_parameters) == ((), tuple(names)), "PEFT then adapts no layer"
    both = recipe_of(imported(tmp_path, f"{file}lora_target_linear: true\n")).adapter
    assert (both.target_modules, both.target_parameters) == ("all-linear", tuple(names))
    packed = imported(tmp_path, f"{BASE}adapter: qlora\nlora_target_linear: true\nquantize_moe_experts: true\n")
    assert recipe_of(packed).adapter.quantize_experts


BASE = "base_model: m\ndatasets: [{path: a.jsonl, type: chat_template}]\nmicro_batch_size: 1\nlearning_rate: 1e-4\n"


@pytest.mark.parametrize(
    ("extra", "key", "value"),
    [
        ("deepspeed: configs/zero1.json", "parallel", "zero1"),
        ("deepspeed: {zero_optimization: {stage: 3}}", "parallel", "fsdp"),
        ("fsdp: shard_grad_op auto_wrap", "parallel", "zero2"),
        ("fsdp: true\nfsdp_config: {reshard_after_forward: false, fsdp_version: 2}", "parallel", "zero2"),
        ("fsdp: true\nfsdp_config: {sharding_strategy: HYBRID_SHARD}", "parallel", "hsdp"),
        ("adapter: lora\npeft_use_rslora: true", "adapter.rslora", True),
        ("adapter: lora\npeft_init_lora_weights: pissa", "adapter.init", "pissa"),
        ("adapter: lora\nload_in_4bit: true", "adapter.method", "qlora"),
        ("adapter: lora\nload_in_8bit: true", "adapter.method", "lora"),
        ("lr_scheduler: constant_with_warmup\nwarmup_steps: 7", "optim.warmup", 7),
        ("lr_scheduler: warmup_stable_decay\nmax_steps: 100\n"
         "lr_scheduler_kwargs: {num_decay_steps: 30, decay_type: 1-sqrt}", "optim.decay_fraction", 0.3),
        ("warmup_ratio: 0.1", "optim.warmup", "10%"),
        ("warmup_steps: 0.1", "optim.warmup", "10%"),
        ("saves_per_epoch: 4", "checkpoint.every", "0.25 epochs"),
        ("save_strategy: epoch", "checkpoint.every", "1 epochs"),
        ("num_epochs: 2\nsave_steps: 0.25", "checkpoint.every", "0.5 epochs"),
        ("val_set_size: 0.1\nevals_per_epoch: 4", "train.eval_every", "0.25 epochs"),
        ("val_set_size: 0.1\neval_strategy: epoch", "train.eval_every", "1 epochs"),
        ("num_epochs: 2\nval_set_size: 0.1\neval_steps: 0.1", "train.eval_every", "0.2 epochs"),
        ("dataset_exact_deduplication: true", "data.deduplicate", True),
        ("eot_tokens: [<|im_end|>]", "data.eot_tokens", ("<|im_end|>",)),
        ("lr_scheduler: polynomial\nlr_scheduler_kwargs: {power: 3.0}", "optim.polynomial_power", 3.0),
        ("optimizer: lion_8bit", "optim.name", "lion"),
        ("max_grad_norm: 0", "optim.max_grad_norm", None),
        ("load_best_model_at_end: true", "checkpoint.keep_best", True),
        ("early_stopping_patience: 3", "evaluate.early_stopping", 3),
        ("chat_template: chatml", "data.chat_template", "chatml"),
        ("mlflow_tracking_uri: http://host", "mlflow.tracking_uri", "http://host"),
        ("use_tensorboard: true", "track", ("tensorboard",)),
        ("adapter: lora\nload_in_4bit: no", "adapter.method", "lora"),
        ("max_steps: 200\nlogging_steps: 0.05", "train.log_every", 10),
        ("gradient_checkpointing: false\nfsdp: true\nfsdp_config: {activation_checkpointing: true}",
         "train.activation_checkpointing", "full"),
        ("gradient_checkpointing: offload", "train.activation_checkpointing", "full"),
        ("num_epochs: 2", "objective.router_loss", False),
        ("model_config: {output_router_logits: false}", "objective.router_loss", False),
        ("model_config: {output_router_logits: true}", "objective.router_loss", True),
        ("adapter: lora", "objective.router_loss", True),
    ],
)  # fmt: skip
def test_a_key_of_axolotl(tmp_path: Path, extra: str, key: str, value: object) -> None:
    found: Any = recipe_of(imported(tmp_path, BASE + extra + "\n"))
    for part in key.split("."):
        found = getattr(found, part)
    assert found == value


def test_empty_values_are_reported(tmp_path: Path) -> None:
    text = BASE + "special_tokens: {}\nlr_scheduler_kwargs: {}\nfsdp_config: {}\ntest_datasets: []\ntokens: []\n"
    (line,) = (note for note in imported(tmp_path, text).notes if note.startswith("off or default"))
    for name in ("special_tokens", "lr_scheduler_kwargs", "fsdp_config", "test_datasets", "tokens"):
        assert name in line


def test_a_fraction_of_an_unknown_run_is_reported(tmp_path: Path) -> None:
    result = imported(tmp_path, BASE + "logging_steps: 0.1\n")
    assert [entry.name for entry in result.entries if entry.fate == "lost"] == ["logging_steps"]
    assert any("is limited to 100 steps" in note for note in result.notes)


def test_plain_text_of_llamafactory(tmp_path: Path) -> None:
    table = {"books": {"file_name": "books.jsonl", "columns": {"prompt": "body"}}}
    (tmp_path / "dataset_info.json").write_text(json.dumps(table))
    text = "stage: pt\nmodel_name_or_path: m\ndataset: books\ndataset_dir: .\nfinetuning_type: full\nmax_steps: 9\n"
    data = recipe_of(imported(tmp_path, text)).data
    (source,) = data.train
    assert (source.path, source.format, source.fields) == ("books.jsonl", "auto", {"text": "body"})
    assert (data.packing, data.document_mask) == (True, "auto")  # joined texts in both tools
    assert recipe_of(imported(tmp_path, text + "packing: false\n")).data.packing is False


def test_degrees_determine_the_number_of_devices(tmp_path: Path) -> None:
    recipe = recipe_of(imported(tmp_path, BASE + "dp_shard_size: 4\ndp_replicate_size: 2\n"))
    assert recipe.global_batch_size == 8
    assert (recipe.parallel.dp_shard, recipe.parallel.dp_replicate) == (4, 2)


@pytest.mark.parametrize("name", ["axolotl", "llamafactory"])
def test_a_value_of_any_type_is_converted_reported_or_refused(tmp_path: Path, name: str) -> None:
    """A value that no tool accepts gives a ConfigError, never a traceback."""
    given = yaml.safe_load(FILES[name])
    for key in given:
        for odd in ("x", [1]):
            try:
                imported(tmp_path, json.dumps({**given, key: odd}), "file.json")
            except ConfigError as error:
                assert "file.json" in str(error) or key in str(error)


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        ("training_args.bin", "x", "is a Python pickle, which runs code when it is loaded"),
        ("args.yaml", "PK\x03\x04", "is a Python pickle"),
        ("a.yaml", "colour: red\n", "--from axolotl"),
        ("a.json", "{", "is not valid JSON"),
        ("a.yaml", "[1, 2]", "is not a mapping"),
        ("a.yaml", "run: {}\nmodel: {}\ndata: {}\ntrain: {}\n", "is already an echelon recipe"),
        ("a.yaml", BASE + "lora_r: 0\nadapter: lora\n", "does not give a valid recipe"),
    ],
)
def test_refusals(tmp_path: Path, name: str, text: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        imported(tmp_path, text, name)


def test_the_command_writes_the_recipe_and_reports_the_rest(tmp_path: Path) -> None:
    (tmp_path / "file.yaml").write_text(AXOLOTL)
    out = tmp_path / "recipe.yaml"
    done = CliRunner().invoke(app, ["import", str(tmp_path / "file.yaml"), str(out), "--devices", "8"])
    assert done.exit_code == 0
    assert "is read as a file for axolotl" in done.stderr and "wandb_watch: gradients" in done.stderr
    assert parse_recipe(out.read_text(), str(out))[0].global_batch_size == 64
    again = CliRunner().invoke(app, ["import", str(tmp_path / "file.yaml"), str(out)])
    assert isinstance(again.exception, ConfigError) and "already exists" in str(again.exception)
    shown = CliRunner().invoke(app, ["import", str(tmp_path / "file.yaml")])
    assert parse_recipe(shown.stdout, "stdout")[0].adapter.r == 32
