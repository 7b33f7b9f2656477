"""Published measurements of training as cases for the planner: benchmarks/data/published-open.csv, see its sources.

A row becomes a `Case`, or a reason why it cannot be one. What a row does not say is filled in here, by source.
"""

import csv
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from echelon.planner.axes.pipeline import balance_layers, head_cost
from echelon.planner.hardware.accelerators import ACCELERATORS, Accelerator, Cluster
from echelon.planner.hardware.links import Link, Links, usual_links
from echelon.planner.model_shape import ModelShape
from echelon.planner.plan import AdapterPlan, ParallelPlan, Precision
from echelon.planner.rates import Software
from echelon.planner.shape import build_shape

PATH = Path(__file__).parent / "data" / "published-open.csv"
SOURCES = {
    "llmfoundry": "llm-foundry, FSDP on A100 and H100",
    "torchtitan": "torchtitan, FSDP2 and TP",
    "mbridge": "Megatron-Bridge, H100 to GB300",
    "nemo": "NeMo, H100",
    "megatron21": "Megatron-LM 2021, A100",
    "bsv100": "BigScience, V100",
    "tr11": "BigScience, A100",
    "megatron24": "Megatron-LM 2024, H100",
    "nanogpt": "nanoGPT, A100",
}
# The clock of a power-limited GPU falls as the cube root of its power: dynamic power is proportional to f * V^2.
_HBM2E = (500 / 700) ** (1 / 3)
_GB300 = (1400 / 1200) ** (1 / 3)  # of a GB200, which has the same peak
_DEVICES = {
    "V100-SXM2-16GB": "V100", "V100-SXM2-32GB": "V100-32", "A100-SXM-40GB": "A100-40", "A100-SXM-80GB": "A100-80",
    "A100-80GB": "A100-80", "H100-SXM-80GB": "H100", "H100-SXM-96GB-HBM2e-500W": "H100", "H200-SXM-141GB": "H200",
    "B200-SXM": "B200", "B300-SXM": "B300", "GB200": "GB200", "GB300": "GB200",
}  # fmt: skip
# Programs that send in tensor parallelism beside their products: Megatron-LM 2024 (its README: --tp-comm-overlap), NeMo
# and Megatron-Bridge (NeMo's page "Communication Overlap"), torchtitan's async TP. Half of it is assumed to be hidden.
_TP_OVERLAP = 0.5
_MEGATRON = Software(attention="flash3", fused=True, tp_overlap=_TP_OVERLAP, divides_borders=True, copies=False)
_SOFTWARE = {
    "llmfoundry": Software(attention="flash", fused=False),
    "torchtitan": Software(attention="flash", fused=True, recomputed_products=0.5),
    "mbridge": replace(_MEGATRON, ring_attention=True),
    "nemo": replace(_MEGATRON, ring_attention=True),
    "megatron24": _MEGATRON,
    "megatron21": Software(attention="unfused", fused=True, recomputes_ends=True, copies=False),
    "bsv100": Software(attention="unfused", fused=True, recomputes_ends=True, copies=False),
    "tr11": Software(attention="unfused", fused=True, recomputes_ends=True, copies=False),
    "nanogpt": Software(attention="flash", fused=True),
    "litgpt": Software(attention="flash", fused=False),
}
_WITHOUT_DROPOUT = ("llmfoundry", "nanogpt")
# The vocabulary of rows without one: Megatron's padded GPT-2 one; tr11 states "250k" in its notes.
_VOCABULARIES = {"bsv100": 50304, "nemo": 51200, "tr11": 250880}


@dataclass(frozen=True)
class Case:
    """A published run. seconds: of one step, None if only memory is known; memory_bytes: of the fullest rank.

    date: of its source, as YYYY-MM, which tells the generation of its software. gradients: how its program keeps them.
    cluster: its devices, with the clocks and links that its source states. listed: the same devices with the rates and
    links of echelon's tables. states_checkpointing: whether its source says which activations are recomputed.
    """

    row: str
    source: str
    shape: ModelShape
    plan: ParallelPlan
    cluster: Cluster
    software: Software
    seconds: float | None
    memory_bytes: float | None
    memory_kind: str = ""
    date: str = ""
    gradients: Literal["fp16", "fp32"] = "fp32"
    listed: Cluster | None = None
    states_checkpointing: bool = True

    @property
    def planned(self) -> ParallelPlan:
        """The plan of a recipe for this run: layers are compiled where its program has fused ones."""
        return replace(self.plan, compile=self.software.fused)


@dataclass(frozen=True)
class Excluded:
    """A row that is not scored, and why."""

    row: str
    source: str
    reason: str


def read_rows(path: Path = PATH) -> list[Case | Excluded]:
    """All rows of the file."""
    with path.open(newline="") as file:
        return [_read(row) for row in csv.DictReader(file)]


def _read(row: dict[str, str]) -> Case | Excluded:
    source = row["id"].rsplit("-", 1)[0]
    reason = _find_reason(row, source)
    if reason is not None:
        return Excluded(row["id"], source, reason)
    shape, cluster = _shape(row, source), _cluster(row, source)
    plan = _plan(row, source, shape, cluster)
    if isinstance(plan, str):
        return Excluded(row["id"], source, plan)
    tokens = _number(row["tokens_per_s_per_gpu"]) or _derived(row, "tokens_per_s_per_gpu")
    seconds = _number(row["step_time_s"])
    if seconds is None and tokens:
        seconds = plan.global_batch_size * plan.sequence_len / (tokens * cluster.num_devices)
    software = _SOFTWARE[source]
    if row["compile"] == "no":
        software = replace(software, fused=False)
    if "async TP" in row["notes"]:
        software = replace(software, tp_overlap=_TP_OVERLAP)
    memory, kind = _memory(row, source)
    gradients: Literal["fp16", "fp32"] = "fp32" if "fp32 grad" in row["precision"] else "fp16"
    devices = (cluster.num_devices, cluster.devices_per_node)
    return Case(
        row["id"],
        source,
        shape,
        plan,
        cluster,
        software,
        seconds,
        memory,
        kind,
        row["date"],
        gradients,
        listed=Cluster(ACCELERATORS[_DEVICES[row["gpu"]]], *devices, "cuda", True),
        states_checkpointing=bool(row["activation_ckpt"]) or plan.activation_checkpointing != "none",
    )


def _find_reason(row: dict[str, str], source: str) -> str | None:
    """Why a row is left out."""
    notes, precision = row["notes"], row["precision"]
    measured = any(row[key] for key in ("tokens_per_s_per_gpu", "step_time_s", "peak_mem_gib"))
    checks = (
        (notes.startswith("OOM"), "it ran out of memory: there is nothing to compare"),
        ("NVFP4" in precision, "products in 4 bits are not modelled"),
        ("qlora" in precision, "no widths, batch or degrees are given"),
        (not measured and "derived:tokens" not in notes, "tokens/s, step time and memory are not given"),
        (not (row["hidden"] and row["n_gpus"]), "the widths of the model are not given"),
        (not row["heads"], "the number of heads is not given, which changes the speed by up to 30 % in this source"),
        (not row["layers"], "the number of layers is not given"),
        (not row["seq_len"] and source != "torchtitan", "the sequence length is not given"),
        (not row["seq_len"] and "8192" not in notes, "the sequence length is not given"),
        (row["gpu"].startswith("Blackwell"), "the GPU is not named"),
        (source == "litgpt", "adapters on samples of unknown lengths"),
        ("mlp" in row["activation_ckpt"] or "core_attn" in row["activation_ckpt"],
         "recomputes modules of a layer that echelon cannot choose"),
    )  # fmt: skip
    return next((reason for applies, reason in checks if applies), None)


def _number(text: str) -> float | None:
    return float(text) if text else None


def _derived(row: dict[str, str], key: str) -> float | None:
    found = re.search(rf"derived:{key}=([0-9.e+]+)", row["notes"])
    return None if found is None else float(found[1])


def _memory(row: dict[str, str], source: str) -> tuple[float | None, str]:
    """Bytes of tensors on the fullest rank, and how they were measured (published.md, trap 5)."""
    size = _number(row["peak_mem_gib"])
    if size is None:
        return None, ""
    if source == "torchtitan":
        return size * 2**30, "reserved"
    if source in ("bsv100", "tr11"):
        return (size - 1.1) * 1e9, "nvidia-smi less 1.1 GB of the CUDA context"
    return size * 1e9, "allocated"


def _shape(row: dict[str, str], source: str) -> ModelShape:
    def count(key: str, otherwise: int) -> int:
        return int(float(row[key])) if row[key] else otherwise

    hidden, heads = count("hidden", 0), count("heads", 1)
    common = {
        "hidden_size": hidden,
        "num_hidden_layers": count("layers", 1),
        "num_attention_heads": heads,
        "vocab_size": count("vocab", _VOCABULARIES.get(source, 51200)),
        "max_position_embeddings": count("seq_len", 8192),
    }
    if "Llama" in row["model_name"]:
        return build_shape(
            {
                **common,
                "model_type": "llama",
                "intermediate_size": count("ffn", 4 * hidden),
                "num_key_value_heads": count("kv_heads", heads),
                "tie_word_embeddings": False,
            }
        )
    gpt = {**common, "model_type": "gpt2", "n_inner": count("ffn", 4 * hidden), "activation_function": "gelu"}
    if source in _WITHOUT_DROPOUT:
        gpt |= {"attn_pdrop": 0.0, "resid_pdrop": 0.0}
    return build_shape(gpt)


def _cluster(row: dict[str, str], source: str) -> Cluster:
    gpu, count = row["gpu"], int(row["n_gpus"])
    name = _DEVICES[gpu]
    device: Accelerator = ACCELERATORS[name]
    links = usual_links(name)
    if "HBM2e" in gpu:
        assert device.bf16_flops is not None
        device = replace(
            device, bf16_flops=device.bf16_flops * _HBM2E, memory_bandwidth=2.4e12, memory_bytes=96 * 10**9
        )
    if gpu == "GB300":
        assert device.bf16_flops is not None
        device = replace(device, bf16_flops=device.bf16_flops * _GB300, memory_bytes=288 * 10**9)
    per_machine = int(row["gpus_per_node"] or 8)
    if gpu.startswith("GB"):
        per_machine = 64  # of the 72 of an NVLink domain
    if source == "bsv100":  # its note: 50 GB/s inside, 400 Gbit/s Omni-Path between machines of 4
        links = Links(Link("nvlink", 40e9, 15e-6, "source"), Link("opa", 400e9 / 8 / 4 * 0.9, 30e-6, "source"))
    if source == "tr11":  # 4 x 100 Gbit/s Omni-Path per machine of 8
        links = Links(links.inside, Link("opa", 400e9 / 8 / 8 * 0.9, 30e-6, "source"))
    per_machine = min(per_machine, count)
    if count % per_machine:
        per_machine = 8
    return Cluster(device, count, per_machine, "cuda", True, links=links)


def _checkpointing(row: dict[str, str]) -> tuple[str, int]:
    kept = row["activation_ckpt"]
    if not kept and "selective)" in row["notes"]:  # torchtitan's default
        kept = "selective"
    if kept == "selective layer":
        return "full", 2
    return ("full", 1) if kept == "full" else ("selective", 1) if kept.startswith("selective") else ("none", 1)


def _plan(row: dict[str, str], source: str, shape: ModelShape, cluster: Cluster) -> "ParallelPlan | str":
    def count(key: str) -> int:
        return int(float(row[key])) if row[key] else 1

    tp, pp, cp, vpp = (count(key) for key in ("tp", "pp", "cp", "vpp"))
    dp, left = divmod(cluster.num_devices, tp * pp * cp)
    if left:
        return "its degrees do not divide its GPUs"
    micro = count("micro_batch")
    batch = int(row["global_batch_seqs"]) if row["global_batch_seqs"] else dp * micro
    if source == "megatron24" and pp == 1:  # not stated: one microbatch without a pipeline, else microbatches of one
        micro = batch // dp
    if not row["micro_batch"] and source != "megatron24":
        return "the micro batch is not given"
    if batch % (dp * micro):
        return "its batch is not a multiple of its micro batches"
    strategy, memory = row["fsdp_strategy"], _checkpointing(row)
    shards = not strategy.startswith("DDP (") and strategy != "DDP" and strategy != ""
    full = ("FSDP" in strategy and "SHARD_GRAD" not in strategy) or "ZeRO-3" in strategy
    if source in ("mbridge", "nemo", "megatron24"):
        shards = True  # Megatron's distributed optimizer
    per_rank = vpp if pp > 1 else 1
    if source == "megatron24" and pp > 1:
        per_rank = 2
    length = int(row["seq_len"] or 8192)
    stages: tuple[int, ...] = ()
    if pp > 1:
        if pp * per_rank > shape.num_layers:
            per_rank = 1
        stages = balance_layers(shape.num_layers, pp * per_rank, head_cost(shape, length))
    low = "float16" if row["precision"].startswith("fp16") else "bfloat16"
    eights = any(word in row["precision"].lower() for word in ("fp8", "float8"))
    reduce = "bfloat16" if source in ("llmfoundry",) else "float32"
    adapter = None
    if "LoRA" in row["source"] + row["notes"]:
        inside = sum(each.count * (each.in_features + each.out_features) * 16 for each in shape.linears)
        adapter = AdapterPlan("lora", 16, 0.0, (), inside, shape.num_parameters)
    return ParallelPlan(
        "published",
        sequence_len=length,
        dp_replicate=1 if shards else dp,
        dp_shard=dp if shards else 1,
        cp=cp,
        tp=tp,
        pp=pp,
        sequence_parallel=tp > 1 and source in ("torchtitan", "mbridge", "nemo", "megatron24"),
        schedule=None if pp == 1 else "interleaved" if per_rank > 1 else "1f1b",
        stages=stages,
        micro_batch_size=micro,
        num_microbatches=batch // (dp * micro),
        reshard_after_forward=full and pp == 1,
        reduce_gradients="each" if "FSDP" in strategy and pp == 1 else "last",
        activation_checkpointing=memory[0],  # type: ignore[arg-type]
        checkpoint_every=memory[1],
        compile=row["compile"] == "yes",
        precision=Precision(
            param="float32",
            compute=low,  # type: ignore[arg-type]
            reduce=reduce,  # type: ignore[arg-type]
            float8=eights,
            # Of these programs, torchtitan alone gathers weights in float8, as tensorwise scales allow.
            float8_scaling="tensorwise" if source == "torchtitan" else "rowwise",
        ),
        adapter=adapter,
    )
