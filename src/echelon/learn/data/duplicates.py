"""A compact set of the documents seen so far: a hash table with 16 bytes per slot."""

from echelon.learn.data.readers.record import DIGEST_BYTES

_EMPTY = bytes(DIGEST_BYTES)
_FIRST_SLOTS = 2**12


class DigestSet:
    """A growing set of 128-bit digests: open addressing with linear probing in one bytearray, at most 3/4 full.

    It uses 21 to 43 bytes per digest, and 64 while it grows; a Python set uses about 120. Digests are evenly
    distributed, so their first bytes give the slot. The all-zero digest is never found.
    """

    def __init__(self) -> None:
        self._slots = _FIRST_SLOTS
        self._table = bytearray(_FIRST_SLOTS * DIGEST_BYTES)
        self._count = 0

    @property
    def num_bytes(self) -> int:
        """The size of the table."""
        return len(self._table)

    def __len__(self) -> int:
        """The number of digests."""
        return self._count

    def add(self, digest: bytes) -> bool:
        """Add a digest. Returns whether it was new."""
        offset = self._find(digest)
        if self._table[offset : offset + DIGEST_BYTES] == digest:
            return False
        self._table[offset : offset + DIGEST_BYTES] = digest
        self._count += 1
        if self._count * 4 > self._slots * 3:
            self._grow()
        return True

    def _find(self, digest: bytes) -> int:
        """Return the offset of a digest, or of the empty slot where it belongs."""
        slot = int.from_bytes(digest[:8], "little") & (self._slots - 1)
        while True:
            offset = slot * DIGEST_BYTES
            found = self._table[offset : offset + DIGEST_BYTES]
            if found in (digest, _EMPTY):
                return offset
            slot = (slot + 1) & (self._slots - 1)

    def _grow(self) -> None:
        old = self._table
        self._slots *= 2
        self._table = bytearray(self._slots * DIGEST_BYTES)
        for offset in range(0, len(old), DIGEST_BYTES):
            digest = bytes(old[offset : offset + DIGEST_BYTES])
            if digest != _EMPTY:
                place = self._find(digest)
                self._table[place : place + DIGEST_BYTES] = digest
