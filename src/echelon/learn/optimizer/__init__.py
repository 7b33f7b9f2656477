"""Optimizers: which parameters each rule moves, by how much, and what it keeps for them."""

from echelon.learn.optimizer.norm import LossScale, clip_gradients, global_norm
from echelon.learn.optimizer.stepper import Optimizer, Served, build_optimizer, build_served, check_groups, divide_names

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
