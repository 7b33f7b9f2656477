"""One causal language model of transformers after another, from its stored files through training to its stored files.

Each is made small, saved by transformers as its checkpoints on the hub are, loaded by echelon whole and sharded,
trained, resumed, exported, and loaded again by transformers and by echelon.
"""

import copy
import json
import math
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging

from echelon.ground.errors import EchelonError
from echelon.ground.stored import write_json
from echelon.learn.checkpoint.export import export_run
from echelon.learn.data.prepare import prepare_data
from echelon.learn.distributed.mesh import build_mesh
from echelon.learn.engines import EngineSpec
from echelon.learn.engines.native_build import build_native_engine
from echelon.learn.model.build import build_on_meta, load_config, materialize, persistent_buffers
from echelon.learn.model.weights import PretrainedWeights
from echelon.planner.choose import resolve_plan
from echelon.planner.hardware.accelerators import Cluster
from echelon.planner.plan import ParallelPlan
from echelon.recipe.load import load_recipe
from echelon.recipe.render import render_recipe
from echelon.run.folder.run_folder import RunFolder
from echelon.run.lifecycle.model_checks import check_model
from tests.families import load_run_model
from tests.parity.training import MACHINE, losses_of, read_rows, tensors_of, train_rank
from tests.workers import WorkerFailure, WorkerPool

RANKS = 2
STEPS = 2
# Fields by the name that most families give them; each is set where a config has it.
_SIZES: dict[str, int] = {
    "vocab_size": 256, "unpadded_vocab_size": 256,
    "hidden_size": 64, "n_embd": 64, "d_model": 64, "word_embed_proj_dim": 64, "embedding_size": 64,
    "num_hidden_layers": 2, "n_layer": 2, "n_layers": 2, "num_layers": 2, "decoder_layers": 2, "encoder_layers": 2,
    "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "num_heads": 4, "decoder_attention_heads": 4,
    "encoder_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "global_head_dim": 16, "rotary_dim": 8,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4, "num_experts_per_tok": 2,
    "moe_k": 2, "moe_topk": 2, "top_k_experts": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16,
    "chunk_size": 16, "mamba_chunk_size": 16,
    "index_n_heads": 2, "index_head_dim": 16, "index_topk": 8, "max_position_embeddings": 64, "n_positions": 64,
    "max_source_positions": 64, "max_target_positions": 64, "num_image_tokens": 8,
}  # fmt: skip
_FEED_FORWARD = ("intermediate", "ffn", "n_inner", "mlp_dim")
_WIDTH = 64
# What a family needs besides: its sizes must fit together.
_SPECIAL: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"num_experts_per_token": 2, "num_expert_group": 1, "linear_num_heads": 4, "linear_head_dim": 16},
    "blt": {"encoder_hash_byte_group_vocab": 1000},
    "blt_local_decoder": {"hidden_size_global": 64},
    "blt_local_encoder": {"hidden_size_global": 64},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v2": {"num_experts_per_tok": 2, "topk_group": 1, "n_group": 1},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "dots3_note_audio_encoder": {"adapter_out_dim": 64, "adapter_input_size": 64},
    "dots3_note_text": {
        "head_dim": 16, "num_key_value_heads": 4, "layer_types": ["indexed_attention"] * 2,
        "mlp_layer_types": ["dense", "sparse"],
    },
    "dots3_note_vision_encoder": {
        "adapter_in_dim": 64, "adapter_out_dim": 64, "num_local_experts": 4, "mlp_layer_types": ["dense", "sparse"],
    },
    "gemma3n_text": {
        "num_kv_shared_layers": 0, "intermediate_size": 64, "layer_types": ["sliding_attention", "full_attention"],
        "activation_sparsity_pattern": [0.0, 0.0], "hidden_size_per_layer_input": 16, "laurel_rank": 8,
        "vocab_size_per_layer_input": 256,
    },
    "gemma4_text": {"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 256},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16, "num_experts": 4, "moe_topk": 2},
    "kimi_linear": {"num_experts_per_token": 2, "linear_num_heads": 4, "linear_head_dim": 16},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "longcat_flash": {"head_dim": 8},
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 1},
    "ministral": {"head_dim": 16},
    "nemotron": {"num_key_value_heads": 2},
    "zamba": {"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2},
    "xmod": {"is_decoder": True, "default_language": "en_XX"},
    "zamba2": {"num_hidden_layers": 6, "layers_block_type": ["linear_attention", "hybrid"] * 3, "n_mamba_heads": 8},
}  # fmt: skip
_SPECIAL |= {
    encoder: {"is_decoder": True}
    for encoder in (
        "bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert",
        "reformer", "rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "xlm-roberta",
        "xlm-roberta-xl",
    )
}  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """What became of one model.

    result: works; refused, by echelon; unbuilt, as transformers cannot make, save or load it; or wrong.
    """

    model_type: str
    model_class: str
    result: str
    cause: str
    transformers: str

    def to_line(self) -> str:
        """A line of the file of results."""
        return json.dumps(asdict(self)) + "\n"


class Unbuilt(Exception):
    """transformers itself cannot make, save or load this model."""


def examine(model_type: str, workers: WorkerPool, folder: Path) -> Outcome:
    """Take one model all the way, in a folder that this makes and removes."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]
    model_class = name if isinstance(name, str) else name[0]
    result, cause = _judge(model_type, workers, folder)
    shutil.rmtree(folder, ignore_errors=True)
    return Outcome(model_type, model_class, result, cause.replace(str(folder), "..."), transformers.__version__)


def _judge(model_type: str, workers: WorkerPool, folder: Path) -> tuple[str, str]:
    try:
        _take_all_the_way(model_type, workers, folder)
    except EchelonError as error:
        return "refused", _one_line(error)
    except Unbuilt as error:
        return "unbuilt", _one_line(error)
    except WorkerFailure as error:
        last = str(error).strip().splitlines()[-1]
        refused = last.startswith("echelon.ground.errors.")
        return "refused" if refused else "wrong", last.partition(": ")[2] if refused else last
    except Exception as error:  # anything else that a family raises is its outcome
        return "wrong", f"{type(error).__name__}: {_one_line(error)}"
    return "works", "`is_decoder: true`" if _SPECIAL.get(model_type) == {"is_decoder": True} else ""


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


def read_outcomes(path: Path) -> dict[str, Outcome]:
    """The newest outcome of each model type in a file of results; none if there is no file."""
    lines = path.read_text().splitlines() if path.is_file() else []
    return {row["model_type"]: Outcome(**row) for row in map(json.loads, lines)}


def _take_all_the_way(model_type: str, workers: WorkerPool, folder: Path) -> None:
    expected = _save(model_type, folder / "stored")
    recipe_path, plan = _prepare(folder, "run")
    _check_loaded(folder / "stored", expected)
    for weights in workers.run(load_sharded, RANKS, str(recipe_path), plan):
        _check_equal("loaded by each rank", weights, expected)
    workers.run(train_rank, RANKS, str(recipe_path), plan, 1, "")
    workers.run(train_rank, RANKS, str(recipe_path), plan, None, "")
    whole_path, _ = _prepare(folder, "whole")
    workers.run(train_rank, RANKS, str(whole_path), plan, None, "")
    reached = _find_reached(folder / "stored")
    _check_resumed(folder / "run", folder / "whole", {name: expected[name] for name in reached})
    export_run(folder / "run", folder / "exported")
    trained = load_run_model(folder / "run", torch.device("cpu"))
    _check_loaded(folder / "exported", _tensors(trained))
    _check_logits(trained, _load_theirs(folder / "exported"))


def tiny_fields(model_type: str) -> dict[str, Any]:
    """A small `model.config` of a family."""
    return {"model_type": model_type, **_shrink(AutoConfig.for_model(model_type)), **_SPECIAL.get(model_type, {})}


def _shrink(config: Any) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for name, value in vars(config).items():
        if name.endswith("token_id") and isinstance(value, int) and value > 3:
            fields[name] = 0
        elif isinstance(value, bool) or not isinstance(value, int):
            continue
        elif name in _SIZES:
            fields[name] = min(value, _SIZES[name]) if name != "vocab_size" else _SIZES[name]
        elif any(part in name for part in _FEED_FORWARD):
            fields[name] = min(value, _WIDTH)
    heads = fields.get("num_attention_heads")
    given = vars(config)  # as attributes, values that differ between layers cannot be read
    if heads and given.get("num_key_value_heads") == given.get("num_attention_heads"):
        fields["num_key_value_heads"] = heads
    if "qk_rope_head_dim" in fields:
        fields.pop("head_dim", None)  # it is derived
    for name in type(config).sub_configs:
        part = getattr(config, name, None)
        if part is not None:
            fields[name] = {"model_type": part.model_type, **_shrink(part), **_SPECIAL.get(part.model_type, {})}
    known = set(vars(config))
    return {name: value for name, value in fields.items() if name in known}


@torch.no_grad()
def _save(model_type: str, folder: Path) -> dict[str, torch.Tensor]:
    """A model with weights of its own in every place, as transformers saves it, and as it reads it back."""
    try:
        config = load_config(tiny_fields(model_type))
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=torch.float32)
    except Exception as error:
        raise Unbuilt(f"its default config makes no small model: {_one_line(error)}") from error
    for tensor in [*model.parameters(), *persistent_buffers(model).values()]:
        if tensor.is_floating_point():
            tensor.mul_(1 + 0.02 * torch.rand_like(tensor)).add_(0.02 * torch.rand_like(tensor))
    saved = {name: tensor.clone() for name, tensor in _tensors(model).items()}
    try:
        model.save_pretrained(folder)
        theirs = _load_theirs(folder)
    except Exception as error:
        raise Unbuilt(f"transformers cannot save and load it: {_one_line(error)}") from error
    try:
        theirs(input_ids=torch.arange(32).reshape(2, 16) + 64, use_cache=False)
    except Exception as error:
        raise Unbuilt(f"its forward pass on text fails in transformers: {_one_line(error)}") from error
    lost = [name for name, tensor in _tensors(theirs).items() if not torch.equal(tensor, saved[name])]
    if lost:
        raise Unbuilt(f"transformers loads another {lost[0]} than it saved")
    return saved


def _load_theirs(folder: Path) -> Any:
    model, report = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    missing = {kind: sorted(names)[:2] for kind, names in report.items() if names}
    if missing:
        raise ValueError(f"loading {folder.name} with transformers reports {missing}")
    return model.eval()


def _tensors(model: Any) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **persistent_buffers(model)}


def _prepare(folder: Path, run_name: str) -> tuple[Path, ParallelPlan]:
    """A run that fine-tunes the stored model, which `train` would start: all its checks passed, its data prepared."""
    text = folder.parent / "text" / "text.txt"
    if not text.is_file():
        text.parent.mkdir(parents=True, exist_ok=True)
        text.write_text("".join(f"{number} is followed by {number + 1}.\n" for number in range(400)))
    fields = {
        "run": {"name": run_name, "dir": str(folder / run_name), "seed": 3},
        "model": {"checkpoint": str(folder / "stored")},
        "tokenizer": "bytes",
        "data": {
            "train": [{"path": str(text)}], "validation_fraction": 0.05, "sequence_len": 32,
            "prepared_dir": str(text.parent / "prepared"), "prepare_workers": 1,
        },
        "train": {"steps": STEPS, "global_batch_size": 8, "micro_batch_size": 4, "precision": "fp32", "compile": False},
        "optim": {"learning_rate": 1e-3, "schedule": "constant", "warmup": 0},
        "parallel": "fsdp",
        "checkpoint": {"every": 1},
    }  # fmt: skip
    path = folder / f"{run_name}.json"
    path.write_text(json.dumps(fields))
    recipe, _ = load_recipe(path)
    shape = check_model(recipe).shape
    data = prepare_data(recipe)
    run = RunFolder(folder / run_name)
    run.create()
    run.text.write_prepared_path(data.path)
    run.recipe_path.write_text(render_recipe(recipe))
    cluster = Cluster(MACHINE, num_devices=RANKS, devices_per_node=RANKS, kind="cpu")
    plan = resolve_plan(recipe, shape, cluster, num_samples=data.train.num_samples, fill=True)
    write_json(run.plan_path, plan.to_dict())
    return path, plan


def load_sharded(rank: int, world_size: int, path: str, plan: ParallelPlan) -> dict[str, np.ndarray]:
    """On one rank: the model of a run before its first step, made whole."""
    recipe, _ = load_recipe(Path(path))
    assert recipe.model.checkpoint is not None
    config = load_config(recipe.model.checkpoint)
    engine = build_native_engine(
        EngineSpec(recipe, config, plan, build_mesh(plan, "cpu"), torch.device("cpu"), compile_backend="eager")
    )
    tensors = {**dict(engine.decoder.named_parameters()), **persistent_buffers(engine.decoder)}
    return {
        name: np.array((each.full_tensor() if hasattr(each, "full_tensor") else each).detach())
        for name, each in tensors.items()
    }


@torch.no_grad()
def _check_loaded(folder: Path, expected: dict[str, torch.Tensor]) -> None:
    """Both transformers and echelon load these weights of a folder, and compute the same with them."""
    theirs = _load_theirs(folder)
    config = load_config(str(folder))
    skeleton, ours = build_on_meta(config), build_on_meta(config)
    materialize(ours, "cpu")
    PretrainedWeights(skeleton, folder).fill(ours)
    for who, model in (("transformers", theirs), ("echelon", ours)):
        _check_equal(f"{folder.name}, loaded by {who}", _tensors(model), expected)
    _check_logits(ours, theirs)


def _check_equal(what: str, found: Any, expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys(), f"{what}: other names, {sorted(found.keys() ^ expected.keys())[0]}"
    for name, tensor in found.items():
        assert torch.equal(torch.as_tensor(tensor), expected[name]), f"{what}: another {name}"


@torch.no_grad()
def _check_logits(ours: Any, theirs: Any) -> None:
    ids = torch.arange(32).reshape(2, 16) + 64
    first, second = (model.eval()(input_ids=ids, use_cache=False).logits for model in (ours, theirs))
    share = float((first - second).abs().max() / second.abs().max())
    assert math.isfinite(share) and share < 1e-5, f"logits differ by {share:.1e} of the largest"


def _find_reached(folder: Path) -> list[str]:
    """The weights that a loss of text has a gradient for: of a model that also sees or hears, those of the decoder."""
    theirs = _load_theirs(folder)
    theirs(input_ids=torch.arange(32).reshape(2, 16) + 64, use_cache=False).logits.sum().backward()
    return [name for name, each in theirs.named_parameters() if each.grad is not None]


def _check_resumed(run: Path, whole: Path, first: dict[str, torch.Tensor]) -> None:
    """A run that was stopped after a step ends as the one that was not, and both have learned something."""
    ours, theirs = tensors_of(run, STEPS), tensors_of(whole, STEPS)
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor), f"another {name} after a stop and a resume"
    losses = losses_of(read_rows(run))
    assert losses == losses_of(read_rows(whole)) and all(math.isfinite(loss) for loss in losses), f"losses {losses}"
    moved = sum(not torch.equal(theirs[f"model.{name}"], tensor) for name, tensor in first.items())
    assert moved > len(first) / 2, f"only {moved} of {len(first)} weights moved"
