"""Blocks of the KV cache: reference counts, and reuse of blocks that hold the same tokens."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

__all__ = ["BlockAllocator", "OutOfBlocksError"]

Key = tuple[int, tuple[int, ...]]  # the block before it (-1 = none) and its own tokens


class OutOfBlocksError(Exception):
    """No block is free."""


class BlockAllocator:
    """Hands out block numbers.

    A full block can be published under its content: the tokens in it and, through the number of
    the block before it, all tokens in front of them. A later request with the same beginning gets
    the same block. A published block that nobody uses any more stays findable until its space is
    needed, least recently used first.

    Attributes
    ----------
    reused : int
        How many times a block was shared instead of computed again.
    """

    def __init__(self, num_blocks: int, block_size: int, sharing: bool = True) -> None:
        self.block_size, self.sharing, self.reused = block_size, sharing, 0
        self._users = [0] * num_blocks
        self._idle: OrderedDict[int, None] = OrderedDict((b, None) for b in range(num_blocks))
        self._published: dict[Key, int] = {}
        self._keys: dict[int, Key] = {}

    @property
    def num_free(self) -> int:
        return len(self._idle)

    def allocate(self) -> int:
        """A block for new tokens.

        Raises
        ------
        OutOfBlocksError
            All blocks are in use.
        """
        if not self._idle:
            raise OutOfBlocksError(f"all {len(self._users)} blocks of the KV cache are in use")
        block, _ = self._idle.popitem(last=False)
        self._withdraw(block)
        self._users[block] = 1
        return block

    def share_prefix(self, tokens: Sequence[int]) -> list[int]:
        """Published blocks that hold the beginning of ``tokens``; the caller is now their user.

        One token at least is left over: its logits are still to be computed.
        """
        found: list[int] = []
        while self.sharing and (len(found) + 1) * self.block_size < len(tokens):
            block = self._published.get(self._key(found, tokens, len(found)))
            if block is None:
                break
            self._idle.pop(block, None)
            self._users[block] += 1
            found.append(block)
        self.reused += len(found)
        return found

    def publish(self, blocks: Sequence[int], tokens: Sequence[int], first: int, last: int) -> None:
        """Make the full blocks ``first`` up to ``last`` of a request findable.

        Their keys must be in the cache, or be written by the step that is being put together.
        """
        if not self.sharing:
            return
        for index in range(first, last):
            key = self._key(blocks, tokens, index)
            if key not in self._published:
                self._published[key] = blocks[index]
                self._keys[blocks[index]] = key

    def release(self, blocks: Sequence[int]) -> None:
        """The caller uses these blocks no longer. The last ones are the first to be reused."""
        for block in reversed(blocks):
            if self._users[block] <= 0:
                raise ValueError(f"block {block} is released more often than it was given out")
            self._users[block] -= 1
            if self._users[block] == 0:
                self._idle[block] = None

    def _key(self, blocks: Sequence[int], tokens: Sequence[int], index: int) -> Key:
        before = blocks[index - 1] if index else -1
        return before, tuple(tokens[index * self.block_size : (index + 1) * self.block_size])

    def _withdraw(self, block: int) -> None:
        """Forget a block's content, and that of every block that was found through it."""
        key = self._keys.pop(block, None)
        if key is None:
            return
        del self._published[key]
        for other in [b for b, (before, _) in self._keys.items() if before == block]:
            self._withdraw(other)
