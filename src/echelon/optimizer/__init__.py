"""Optimizers: which parameters each rule moves, by how much, and what it keeps for them."""

from echelon.optimizer.groups import check_groups
from echelon.optimizer.loss_scale import LossScale
from echelon.optimizer.norm import clip_gradients, global_norm
from echelon.optimizer.served import Served, build_served, divide_names
from echelon.optimizer.stepper import Optimizer, build_optimizer

__all__ = [
    "LossScale",
    "Optimizer",
    "Served",
    "build_optimizer",
    "build_served",
    "check_groups",
    "clip_gradients",
    "divide_names",
    "global_norm",
]
