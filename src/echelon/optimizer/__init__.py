"""Optimizers: which parameters each rule moves, by how much, and what it keeps for them."""

from echelon.optimizer.groups import check_groups
from echelon.optimizer.loss_scale import LossScale
from echelon.optimizer.norm import clip_gradients, global_norm
from echelon.optimizer.stepper import Optimizer, build_optimizer

__all__ = ["LossScale", "Optimizer", "build_optimizer", "check_groups", "clip_gradients", "global_norm"]
