"""What the tests of the engine `deepspeed` run in the ranks: it must be importable by name."""

from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import torch

from echelon.learn.objectives.causal_lm import CausalLM
from echelon.learn.parallel.step import SingleStage
from tests.parity.training import masked_trainer


def train_with_nan(rank, world_size, path, plan, bad_step):
    """Train a rank; in one step, counted from 1, the gradients of the last rank alone are not numbers."""
    run = SingleStage.__call__

    def poisoned(stage, step, microbatches, num_targets, objective):
        is_bad = step + 1 == bad_step and rank == world_size - 1
        return run(stage, step, microbatches, num_targets * torch.nan if is_bad else num_targets, objective)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(SingleStage, "__call__", poisoned))
        stack.enter_context(masked_trainer(rank, world_size, path, plan)).fit()


def train_in_fp16(rank, world_size, path, plan):
    """Train a rank in fp16 on a CPU, which computes in it slowly: DeepSpeed asks for one that does so fast."""
    from deepspeed.accelerator import get_accelerator

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(type(get_accelerator()), "is_fp16_supported", lambda accelerator: True))
        stack.enter_context(masked_trainer(rank, world_size, path, plan)).fit()


def measure_state(rank, world_size, path, plan):
    """The bytes of this rank's optimizer state and master weights, and those of the model's parameters."""
    with masked_trainer(rank, world_size, path, plan) as trainer:
        engine = trainer.train_step.learner.engine
        optimizer, partitions = engine.zero.optimizer, engine.partitions
        moments = sum(
            each.nbytes for flat in partitions.flats for each in optimizer.state[flat].values() if torch.is_tensor(each)
        )
        masters = sum(flat.nbytes for flat in partitions.flats)
        held = sum(parameter.numel() * 4 for parameter in engine.decoder.parameters())
        whole = sum(getattr(each, "ds_numel", each.numel()) for each in engine.decoder.parameters()) * 4
        return {"moments": moments, "masters": masters, "held": held, "whole": whole}


def logits_of(rank, world_size, path, plan, ids):
    """Train a rank; the logits of its live model after the last of some ids, on every rank."""
    with masked_trainer(rank, world_size, path, plan) as trainer:
        trainer.fit()
        with trainer.train_step.learner.engine.evaluation(CausalLM()) as evaluation:
            logits = evaluation.next_token_logits(torch.tensor([ids]), torch.tensor([len(ids) - 1]))
        assert Path(path).exists()
        return logits.tolist()
