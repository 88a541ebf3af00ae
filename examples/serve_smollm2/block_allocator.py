"""Blocks of the KV cache: reference counts, and reuse of blocks that hold the same tokens."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np

__all__ = ["BlockAllocator", "OutOfBlocksError", "chain_digest"]


def chain_digest(before: bytes, tokens: Sequence[int]) -> bytes:
    """Name of a full block: its tokens and, by the digest before it, all tokens in front of it."""
    return hashlib.sha256(before + np.asarray(tokens, np.int32).tobytes()).digest()


class OutOfBlocksError(Exception):
    """No block is free."""


class BlockAllocator:
    """Hands out block numbers and counts their users.

    A full block can be published under its `chain_digest`; a later request that begins with the
    same tokens gets the same block. A published block without users stays findable until its
    space is needed, least recently used first.

    Attributes
    ----------
    shared, revived : int
        How often a block was taken over instead of being computed again: while another request
        used it (memory saved), and while nobody did.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks={num_blocks} must be at least 1")
        self.num_blocks = num_blocks
        self.shared = self.revived = 0
        self._users = [0] * num_blocks
        self._idle: OrderedDict[int, None] = OrderedDict((b, None) for b in range(num_blocks))
        self._published: dict[bytes, int] = {}
        self._digests: dict[int, bytes] = {}

    @property
    def num_free(self) -> int:
        return len(self._idle)

    def users(self, block: int) -> int:
        return self._users[block]

    def allocate(self) -> int:
        """A block for new tokens.

        Raises
        ------
        OutOfBlocksError
            All blocks are in use.
        """
        if not self._idle:
            raise OutOfBlocksError(f"all {self.num_blocks} blocks of the KV cache are in use")
        block, _ = self._idle.popitem(last=False)
        self.withdraw([block])
        self._users[block] = 1
        return block

    def find(self, digests: Iterable[bytes]) -> list[int]:
        """Published blocks of the longest known beginning; changes nothing."""
        found: list[int] = []
        for digest in digests:
            if digest not in self._published:
                break
            found.append(self._published[digest])
        return found

    def num_idle(self, blocks: Iterable[int]) -> int:
        """How many of these have no user, so that taking them over costs a free block."""
        return sum(block in self._idle for block in blocks)

    def share(self, blocks: Sequence[int]) -> None:
        """The caller becomes a user of blocks that `find` named."""
        for block in blocks:
            if self._users[block]:
                self.shared += 1
            else:
                self.revived += 1
                del self._idle[block]
            self._users[block] += 1

    def publish(self, block: int, digest: bytes) -> bool:
        """Make a full block findable; False if an equal one already is."""
        if self._users[block] <= 0:
            raise ValueError(f"block {block} has no user; only a block in use can be published")
        if digest in self._published or block in self._digests:
            return False
        self._published[digest], self._digests[block] = block, digest
        return True

    def withdraw(self, blocks: Iterable[int]) -> None:
        """Forget what these blocks hold."""
        for block in blocks:
            digest = self._digests.pop(block, None)
            if digest is not None:
                del self._published[digest]

    def release(self, blocks: Sequence[int]) -> None:
        """The caller uses these blocks no longer; the last ones are the first to be reused.

        Raises
        ------
        ValueError
            A block is released more often than it was given out; nothing is released.
        """
        for block in set(blocks):
            if self._users[block] < blocks.count(block):
                raise ValueError(f"block {block} is released more often than it was given out")
        for block in reversed(blocks):
            self._users[block] -= 1
            if self._users[block] == 0:
                self._idle[block] = None
