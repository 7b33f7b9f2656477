"""Runs the documents of a sequence as rows of their own, for a model that no mask keeps from mixing them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from echelon.learn.data.loader import Microbatch


@dataclass(frozen=True)
class DocumentRows:
    """A microbatch [batch, seq] with each document in a row of its own, padded at the end: [batch * count, width].

    sources: the position of each place of a row in the flattened microbatch; 0 for padding. filled: whether a place is
    not padding. places: [batch, seq], the place of each position in the flattened rows; any place for padding.
    """

    sources: Tensor
    filled: Tensor
    places: Tensor

    def spread(self, values: Tensor) -> Tensor:
        """Return values [batch, seq, ...] in rows, [batch * count, width, ...].

        Padding has the value of the first position.
        """
        return values.flatten(0, 1)[self.sources]

    def collect(self, values: Tensor) -> Tensor:
        """Return the values [batch * count, width, dim] of each position, [batch, seq, dim]; any for padding."""
        flat = values.flatten(0, 1).index_select(0, self.places.flatten())
        return flat.view(*self.places.shape, -1)


def lay_out_rows(batch: Microbatch) -> DocumentRows:
    """Lay out the documents of a microbatch. Its shape is known on the host, so that nothing waits for the device."""
    documents, positions = batch.documents, batch.position_ids
    assert documents is not None and positions is not None and batch.document_shape is not None, "it has documents"
    (num_rows, length), (count, width), device = documents.shape, batch.document_shape, documents.device
    numbers, columns = torch.arange(count, device=device), torch.arange(width, device=device)
    rows = torch.arange(num_rows, device=device)[:, None]
    lengths = (documents[:, :, None] == numbers).sum(1)
    starts = lengths.cumsum(1) - lengths + rows * length
    filled = (columns < lengths[:, :, None]).flatten(0, 1)
    sources = (starts[:, :, None] + columns).flatten(0, 1) * filled
    places = (rows * count + documents.clamp(min=0)) * width + positions.clamp(max=width - 1)
    return DocumentRows(sources, filled, places)
