"""Optimizers: which parameters each rule moves, by how much, and what it keeps for them."""

from echelon.learn.optimizer.groups import check_groups
from echelon.learn.optimizer.loss_scale import LossScale
from echelon.learn.optimizer.norm import clip_gradients, global_norm
from echelon.learn.optimizer.served import Served, build_served, divide_names
from echelon.learn.optimizer.stepper import Optimizer, build_optimizer

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
