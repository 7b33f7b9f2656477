"""Local SGD as a user would write it: replicas train apart, and take the mean of their weights every so many steps.

Stich, "Local SGD Converges Fast and Communicates Little" (arXiv:1805.09767).
"""

from contextlib import contextmanager

import torch
import torch.distributed as dist

from echelon.learn.distributed.replica_names import replica_name
from echelon.learn.sync import DataShare

EVERY = 3


class LocalSGD:
    """The mean as of the last agreement is saved as the model; each replica's own tensors under its index."""

    lag = 1

    def __init__(self, config, replica, meshes):
        self._replica, self._outer, self._index = replica, meshes.outer, meshes.place["replica"]
        self._share = DataShare(meshes.data_rank, meshes.data_size)
        self._agreed = {name: weight.clone() for name, weight in replica.weights().items()}

    def shares(self, step):
        return (self._share,)

    def clip(self, step, num_targets, max_norm):
        return self._replica.clip(max_norm)

    def should_commit(self, grad_norm):
        is_finite = torch.isfinite(grad_norm).int()
        dist.all_reduce(is_finite, dist.ReduceOp.MIN, group=self._outer)
        return is_finite.bool()

    def apply(self, step, learning_rate, commit):
        self._replica.step(learning_rate, commit)

    def end_step(self, step, is_last):
        if (step + 1) % EVERY == 0:
            for name, weight in self._replica.weights().items():
                dist.all_reduce(weight, group=self._outer)
                self._agreed[name].copy_(weight.div_(dist.get_world_size(self._outer)))
        return True

    @contextmanager
    def agreed(self):
        self._exchange()
        yield
        self._exchange()

    def _exchange(self):
        for name, weight in self._replica.weights().items():
            own = weight.clone()
            weight.copy_(self._agreed[name])
            self._agreed[name].copy_(own)

    def tensors(self, engine_state):
        own = {replica_name(self._index, name): tensor for name, tensor in engine_state.items()}
        return own | {f"model.{name}": weight for name, weight in self._agreed.items()}

    def load(self, engine_state, fill):
        fill(self.tensors(engine_state))

    def state_dict(self):
        return {"every": EVERY}

    def load_state_dict(self, state):
        assert state == {"every": EVERY}
