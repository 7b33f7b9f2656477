"""PowerSGD: the sum of matrices as a product of two thin ones."""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from echelon.learn.model.seeds import derive_seed
from echelon.learn.reduction.reducer import Feedback, flatten, write_back


class PowerSGD(Feedback):
    """Vogels, Karimireddy & Jaggi, "PowerSGD" (arXiv:1905.13727), algorithms 1 and 2, with a warm start.

    A matrix [n, m] is sent as [n, r] and [m, r]; vectors, and matrices that this would not make smaller, as they are.
    Sums in place of the paper's means: the method is linear in the residuals.
    """

    def __init__(self, trained: Mapping[str, Tensor], rank: int, group: dist.ProcessGroup, seed: int) -> None:
        matrices = {name: tensor for name, tensor in trained.items() if _is_thinner(tensor, rank)}
        super().__init__(matrices, group)
        self._group = group
        self._right = {name: _random_matrix(tensor, rank, seed, name) for name, tensor in matrices.items()}

    @override
    def reduce(self, step: int, tensors: Mapping[str, Tensor]) -> None:
        whole = {name: tensor for name, tensor in tensors.items() if name not in self._right}
        matrices = {name: _as_matrix(self.correct(name, tensors[name])) for name in tensors if name in self._right}
        left = {name: matrix @ self._right[name] for name, matrix in matrices.items()}
        self._sum(left | whole)
        left = {name: torch.linalg.qr(matrix).Q for name, matrix in left.items()}
        right = {name: matrix.T @ left[name] for name, matrix in matrices.items()}
        for name, matrix in matrices.items():
            self.keep(name, matrix - left[name] @ right[name].T)
        self._sum(right)
        for name, product in right.items():
            self.update(self._right[name], product)
            tensors[name].copy_((left[name] @ product.T).view_as(tensors[name]))

    def _sum(self, tensors: Mapping[str, Tensor]) -> None:
        if tensors:
            flat = flatten(tensors)
            dist.all_reduce(flat, group=self._group)
            write_back(flat, tensors)

    @override
    def tensors(self) -> dict[str, Tensor]:
        """The thin matrices are the same on every rank."""
        return super().tensors() | {f"powersgd.{name}": tensor for name, tensor in self._right.items()}


def _as_matrix(tensor: Tensor) -> Tensor:
    return tensor.reshape(len(tensor), -1)


def _is_thinner(tensor: Tensor, rank: int) -> bool:
    return tensor.dim() > 1 and rank * sum(_as_matrix(tensor).shape) < tensor.numel()


def _random_matrix(tensor: Tensor, rank: int, seed: int, name: str) -> Tensor:
    generator = torch.Generator().manual_seed(derive_seed(seed, name))
    return torch.randn(_as_matrix(tensor).shape[1], rank, generator=generator).to(tensor.device)
