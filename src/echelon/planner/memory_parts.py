"""Bytes of memory by part, planned or measured."""

from dataclasses import dataclass


@dataclass(frozen=True)
class MemoryParts:
    """Bytes on the device of one rank, by part: planned, or measured with each part at its largest.

    Attributes:
        weights: parameters and buffers of the model that trains, as they are stored between steps.
        gradients: as they are stored before the update.
        optimizer: the state of the optimizer.
        activations: what the forward pass of a microbatch keeps, including weights that autocast casts.
        loss: what the head and the loss need in addition.
        other: what the peak of a step needs in addition: gathered weights, gradients before their reduction, buffers
            of communication, recomputed layers, workspace.
        frozen_models: weights of models beside it: reference, teacher and reward models.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    loss: int
    other: int
    frozen_models: int = 0


@dataclass(frozen=True)
class StoredBytes:
    """Bytes that one rank stores between steps, and its gradients before the update; in host memory if offloaded."""

    parameters: int
    gradients: int
    optimizer: int
