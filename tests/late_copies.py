"""A CPU's stand-in for the side stream of activation offloading, which makes a wrong order of copies fail."""

import torch
from torch.multiprocessing.reductions import StorageWeakRef


class LateCopies:
    """Copies as late as a stream may: when their event is waited for. What reads before that reads NaN.

    Like a stream it knows addresses and holds no tensor: a copy whose memory was freed meanwhile fails, and one whose
    source was overwritten copies the new values. With `early` it copies as soon as a stream may, at once.

    `diary`: what happened, in order; tests add their own words. `layer`: the layer that runs, set by tests. `moved`:
    (layer, address, bytes, reference to the storage) of every copy to the host (`saved`) and back (`loaded`).
    """

    device_type = "cpu"

    def __init__(self, early=False):
        self.early = early
        self.diary, self.layer = [], None
        self.moved = {"save": [], "load": []}
        self.buffers = []
        self._waiting, self._num_copies = [], 0

    def allocate(self, size):
        self.buffers.append(torch.zeros(size, dtype=torch.uint8))
        return self.buffers[-1]

    def copy(self, target, source):
        assert target.dtype == source.dtype == torch.uint8 and target.shape == source.shape
        is_save = any(target.data_ptr() == buffer.data_ptr() for buffer in self.buffers)
        word, device = ("save", source) if is_save else ("load", target)
        storage = device.untyped_storage()
        self.moved[word].append((self.layer, storage.data_ptr(), len(device), StorageWeakRef(storage)))
        self.diary.append(word)
        target.fill_(0xFF)  # NaN in every dtype
        self._num_copies += 1
        ends = [(StorageWeakRef(each.untyped_storage()), len(each)) for each in (target, source)]
        self._waiting.append((self._num_copies, ends))
        if self.early:
            self._run(self._num_copies)
        return self._num_copies

    def wait(self, event):
        self.diary.append("wait")
        self._run(event)

    def _run(self, event):
        while self._waiting and self._waiting[0][0] <= event:
            target, source = (self._find(*end) for end in self._waiting.pop(0)[1])
            target.copy_(source)

    def _find(self, reference, size):
        storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
        assert storage is not None, "memory was freed before the copy that uses it was waited for"
        return torch.empty(0, dtype=torch.uint8).set_(storage)[:size]

    def layers_on_device(self, word):
        """The layers of which a storage that was copied is still there."""
        return {layer for layer, _, _, reference in self.moved[word] if not reference.expired()}
