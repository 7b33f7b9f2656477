"""One rank of a peer in benchmarks/peers.py: trains given weights on given batches, and reports each step.

    torchrun --nproc-per-node 2 benchmarks/peer_sides.py WORK_JSON

Nothing of echelon is imported here. Every side gets the same rows of tokens in the same order: step s trains on the
rows from s x ranks x micro_batch on. Labels are shifted in advance (`shift_labels`, which the losses of transformers
accept), so that every row has as many targets as tokens, except the one in which the text ends. Appends to
`rank-N.jsonl` as it trains: the id of the process, then the seconds and the peak memory of each step, and its loss.
"""

import json
import os
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from measuring import resident_bytes

BETAS, EPSILON, WEIGHT_DECAY, MAX_NORM = (0.9, 0.95), 1e-8, 0.1, 1.0


class Rows(torch.utils.data.Dataset):
    """The rows of tokens, and of labels, as examples of a transformers model."""

    def __init__(self, path):
        self._rows = np.load(path, mmap_mode="r")

    def __len__(self):
        return len(self._rows)

    def __getitem__(self, index):
        tokens, labels = torch.from_numpy(self._rows[index].astype(np.int64))
        return {"input_ids": tokens, "labels": labels, "shift_labels": labels}


class Record:
    """The file of this rank: a line for the process, for each step and for each loss."""

    def __init__(self, work):
        self._steps, self._done, self._mark = work["steps"], 0, None
        self._file = (Path(work["folder"]) / f"rank-{os.environ['RANK']}.jsonl").open("w", buffering=1)
        self._write(pid=os.getpid())

    def start(self):
        """Start the clock of the first step."""
        self._mark = time.perf_counter()

    def end_step(self, loss=None):
        """Record a step that has ended; return whether it was the last."""
        now = time.perf_counter()
        if loss is not None:
            self.add_loss(loss)
        self._write(seconds=now - self._mark, peak=resident_bytes("VmHWM"))
        self._mark = now
        self._done += 1
        return self._done == self._steps

    def add_loss(self, loss):
        """Record the loss of the next step without one."""
        self._write(loss=loss)

    def _write(self, **values):
        self._file.write(json.dumps(values) + "\n")


def load_model(work):
    """The model in fp32 with the given weights and attention implementation."""
    from transformers import AutoModelForCausalLM

    attention = work["setting"]["attention"]
    return AutoModelForCausalLM.from_pretrained(
        work["base"], dtype=torch.float32, attn_implementation=attention, use_cache=False
    )


def compile_in_place(model, what):
    """Compile nothing, the model, or each layer alone (regional compilation)."""
    if what == "model":
        model.compile()
    elif what == "layers":
        for layer in model.model.layers:
            layer.compile()
    return model


def build_optimizer(model, work):
    """AdamW with weight decay on the matrices only, as HF Trainer groups them."""
    groups = [
        {"params": [each for each in model.parameters() if each.ndim >= 2], "weight_decay": WEIGHT_DECAY},
        {"params": [each for each in model.parameters() if each.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=work["rate"], betas=BETAS, eps=EPSILON, fused=True)


def batches(work):
    """The batches of this rank, without a loader."""
    rows, size = Rows(work["rows"]), work["micro_batch"]
    rank, world = dist.get_rank(), dist.get_world_size()
    for step in range(work["steps"]):
        first = (step * world + rank) * size
        examples = [rows[number] for number in range(first, first + size)]
        yield {key: torch.stack([each[key] for each in examples]) for key in examples[0]}


def train_expert(work, record):
    """A loop of plain PyTorch: DDP with gradients as views of its buckets, or fully_shard layer by layer."""
    dist.init_process_group("gloo")
    model = compile_in_place(load_model(work).train(), work["setting"]["compiles"])
    half = work["precision"] == "bf16"
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=half)
    if work["mode"] == "fsdp":
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        policy = MixedPrecisionPolicy(torch.bfloat16 if half else torch.float32, torch.float32)
        for layer in model.model.layers:
            fully_shard(layer, mp_policy=policy)
        wrapped = fully_shard(model, mp_policy=policy)
        autocast = torch.autocast("cpu", enabled=False)
    else:
        wrapped = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = build_optimizer(model, work)
    record.start()
    for batch in batches(work):
        with autocast:
            loss = wrapped(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
        record.end_step(loss.item())
    dist.destroy_process_group()


def train_hf_trainer(work, record):
    """transformers.Trainer; under fsdp its FSDP2, which wraps the classes of layers that the model names."""
    from transformers import Trainer, TrainerCallback, TrainingArguments, default_data_collator

    class Steps(TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            record.start()

        def on_step_end(self, args, state, control, **kwargs):
            record.end_step()

        def on_log(self, args, state, control, logs=None, **kwargs):
            if "loss" in logs:
                record.add_loss(logs["loss"])

    compiles = work["setting"]["compiles"]
    os.environ["ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION"] = str(compiles == "layers").lower()
    sharded = {"fsdp": True, "fsdp_config": {"version": 2, "reshard_after_forward": True}}
    arguments = TrainingArguments(
        output_dir=str(Path(work["folder"]) / "hf-trainer"),
        max_steps=work["steps"],
        per_device_train_batch_size=work["micro_batch"],
        learning_rate=work["rate"],
        lr_scheduler_type="constant",
        weight_decay=WEIGHT_DECAY,
        adam_beta1=BETAS[0],
        adam_beta2=BETAS[1],
        adam_epsilon=EPSILON,
        max_grad_norm=MAX_NORM,
        bf16=work["precision"] == "bf16",
        torch_compile=compiles != "no",
        train_sampling_strategy="sequential",
        remove_unused_columns=False,  # it would remove shift_labels
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        **(sharded if work["mode"] == "fsdp" else {}),
    )
    trainer = Trainer(
        model=load_model(work),
        args=arguments,
        train_dataset=Rows(work["rows"]),
        data_collator=default_data_collator,
        callbacks=[Steps()],
    )
    trainer.train()


def train_accelerate(work, record):
    """Accelerate, as in its quick tour: prepare, accumulate nothing, clip through the accelerator."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.utils import TorchDynamoPlugin

    compiles = work["setting"]["compiles"]
    plugins = {}
    if compiles != "no":
        regional = compiles == "layers"
        plugins["dynamo_plugin"] = TorchDynamoPlugin(backend="inductor", use_regional_compilation=regional)
    if work["mode"] == "fsdp":
        plugins["fsdp_plugin"] = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            reshard_after_forward=True,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        )
    accelerator = Accelerator(mixed_precision="bf16" if work["precision"] == "bf16" else "no", cpu=True, **plugins)
    model = load_model(work).train()
    optimizer = build_optimizer(model, work)
    loader = torch.utils.data.DataLoader(Rows(work["rows"]), batch_size=work["micro_batch"], shuffle=False)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    record.start()
    for batch in loader:
        loss = model(**batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        if record.end_step(loss.item()):
            break


def train_fabric(work, record):
    """Lightning Fabric under DDP; its FSDPStrategy refuses a CPU."""
    from lightning.fabric import Fabric

    ranks = int(os.environ["WORLD_SIZE"])
    precision = "bf16-mixed" if work["precision"] == "bf16" else "32-true"
    fabric = Fabric(accelerator="cpu", devices=ranks, strategy="ddp", precision=precision)
    fabric.launch()
    model = compile_in_place(load_model(work).train(), work["setting"]["compiles"])
    optimizer = build_optimizer(model, work)
    model, optimizer = fabric.setup(model, optimizer)
    rows = torch.utils.data.DataLoader(Rows(work["rows"]), batch_size=work["micro_batch"], shuffle=False)
    loader = fabric.setup_dataloaders(rows)
    record.start()
    for batch in loader:
        loss = model(**batch).loss
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        if record.end_step(loss.item()):
            break


def train_deepspeed(work, record):
    """DeepSpeed with torch's AdamW: ZeRO 1, or ZeRO 3 under fsdp; in bf16 its master weights are fp32."""
    import deepspeed

    deepspeed.init_distributed("gloo")
    compiles = work["setting"]["compiles"]
    model = load_model(work).train()
    if compiles == "layers":
        compile_in_place(model, "layers")
    config = {
        "train_micro_batch_size_per_gpu": work["micro_batch"],
        "gradient_clipping": MAX_NORM,
        "zero_optimization": {"stage": 3 if work["mode"] == "fsdp" else 1},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": work["precision"] == "bf16"},
    }
    optimizer = build_optimizer(model, work)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    if compiles == "model":
        engine.compile()
    record.start()
    for batch in batches(work):
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        record.end_step(loss.item())
    dist.destroy_process_group()


ENGINES = {
    "hf-trainer": train_hf_trainer,
    "accelerate": train_accelerate,
    "fabric": train_fabric,
    "deepspeed": train_deepspeed,
    "expert": train_expert,
}


def main():
    work = json.loads(Path(sys.argv[1]).read_text())
    ENGINES[work["engine"]](work, Record(work))


if __name__ == "__main__":
    main()
