"""torchtitan as a side of a comparison: the Trainer of its releases 0.2, on the model and rows of the other sides.

It takes every machine for one with a GPU. `--size tiny` runs it on a CPU: `Processor` answers what it asks of a GPU.
"""

import contextlib
import os
import socket
import time
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import patch

import torch

from measuring import NotHere, synchronize


class Processor:
    """What torchtitan asks of `torch.cuda`, answered for a CPU."""

    def __getattr__(self, name):
        answers = {
            "current_device": 0,
            "get_device_name": "CPU",
            "get_device_properties": SimpleNamespace(total_memory=2**30),
            "memory_stats": {},
        }
        return lambda *arguments: answers.get(name)


# torchtitan's modules copy these answers as they are imported.
CHOICE = {"_get_available_device_type": lambda: "cpu", "_get_device_module": lambda kind: Processor()}
with patch.multiple(torch._utils, **CHOICE) if not torch.cuda.is_available() else contextlib.nullcontext():
    from torchtitan.config import JobConfig
    from torchtitan.models.llama3 import TransformerModelArgs, get_train_spec
    from torchtitan.protocols.train_spec import register_train_spec
    from torchtitan.train import Trainer

NAME, FLAVOR = "benchmark", "row"


class Rows:
    """The loader: batches of torchtitan's form, from steps of microbatches."""

    def __init__(self, steps):
        self._steps = steps

    def __iter__(self):
        for microbatches in self._steps:
            for inputs, labels in microbatches:
                yield {"input": torch.from_numpy(inputs)}, torch.from_numpy(labels)


def find_multiple(hidden, inner):
    """The `multiple_of` with which torchtitan's rule for the inner width, two thirds of four, gives this one."""
    for multiple in (2**power for power in range(12)):
        if -(-int(8 * hidden / 3) // multiple) * multiple == inner:
            return multiple
    raise NotHere(f"torchtitan has no inner width of {inner} at a width of {hidden}")


def build_job(config, length, micro, accumulate, compiles, compute_bf16, folder):
    """torchtitan's settings: its defaults, without activation checkpointing, and compiled blocks if asked for."""
    job = JobConfig()
    job.job.dump_folder = folder
    job.model.name, job.model.flavor = NAME, FLAVOR
    job.training.seq_len, job.training.local_batch_size = length, micro
    job.training.global_batch_size = micro * accumulate
    job.training.mixed_precision_param = "bfloat16" if compute_bf16 else "float32"
    job.activation_checkpoint.mode = "none"
    job.compile.enable = compiles
    job.metrics.log_freq = 10**9  # it also logs the first step
    args = TransformerModelArgs(
        dim=config.hidden_size,
        n_layers=config.num_hidden_layers,
        n_heads=config.num_attention_heads,
        n_kv_heads=config.num_key_value_heads,
        vocab_size=config.vocab_size,
        multiple_of=find_multiple(config.hidden_size, config.intermediate_size),
    )
    return job, args


def train_in_blocks(
    gate, config, steps, batches, length, micro, accumulate, compiles, compute_bf16, folder, adjust=lambda job: None
):  # fmt: skip
    """Train until the parent asks for no more blocks. `batches`: endless steps of microbatches (inputs, labels).

    `adjust`: changes the settings of `build_job`.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ |= {
        "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    job, args = build_job(config, length, micro, accumulate, compiles, compute_bf16, folder)
    adjust(job)
    spec = replace(
        get_train_spec(),
        model_args={FLAVOR: args},
        build_dataloader_fn=lambda **options: Rows(batches),
        build_tokenizer_fn=None,
        state_dict_adapter=None,
    )
    register_train_spec(NAME, spec)
    trainer = Trainer(job)
    losses = []
    trainer.metrics_processor.log = lambda step, loss, *rest, **more: losses.append(float(loss))
    rows = trainer.batch_generator(trainer.dataloader)
    while gate.wait():
        seconds = []
        for number in range(steps):
            started = time.perf_counter()
            trainer.step += 1
            trainer.train_step(rows)
            if number + 1 == steps:
                synchronize()
            seconds.append(time.perf_counter() - started)
        gate.tell(seconds=seconds, targets=steps * micro * accumulate * length, first_loss=losses[0])
    trainer.close()
