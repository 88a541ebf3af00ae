"""Block allocator of examples/serve_smollm2: reference counts under random use."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from examples.serve_smollm2.block_allocator import (
    BlockAllocator,
    OutOfBlocksError,
    chain_digest,
)


class AllocatorRules(RuleBasedStateMachine):
    """Random use of the allocator beside a plain count of references."""

    def __init__(self) -> None:
        super().__init__()
        self.allocator = BlockAllocator(5)
        self.held: list[int] = []  # one entry per reference
        self.names: dict[bytes, int] = {}

    @rule()
    def allocate(self) -> None:
        if len(set(self.held)) == 5:
            with pytest.raises(OutOfBlocksError, match="all 5 blocks"):
                self.allocator.allocate()
            return
        block = self.allocator.allocate()
        assert block not in self.held
        self.names = {name: b for name, b in self.names.items() if b != block}
        self.held.append(block)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), token=st.integers(0, 3))
    def publish(self, data: Any, token: int) -> None:
        block = data.draw(st.sampled_from(self.held))
        name = chain_digest(b"", [token])
        fresh = name not in self.names and block not in self.names.values()
        assert self.allocator.publish(block, name) == fresh
        if fresh:
            self.names[name] = block

    @rule(token=st.integers(0, 3))
    def share(self, token: int) -> None:
        name = chain_digest(b"", [token])
        found = self.allocator.find([name, b"unknown"])
        assert found == [block for known, block in self.names.items() if known == name]
        assert self.allocator.num_idle(found) == sum(b not in self.held for b in found)
        self.allocator.share(found)
        self.held += found

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: Any) -> None:
        block = data.draw(st.sampled_from(self.held))
        self.allocator.release([block])
        self.held.remove(block)

    @rule(block=st.integers(0, 4))
    def release_too_often(self, block: int) -> None:
        with pytest.raises(ValueError, match="more often than it was given out"):
            self.allocator.release([block] * (self.held.count(block) + 1))

    @precondition(lambda self: len(set(self.held)) < 5)
    @rule()
    def publish_unused(self) -> None:
        unused = next(b for b in range(5) if b not in self.held)
        with pytest.raises(ValueError, match="has no user"):
            self.allocator.publish(unused, b"name")

    @rule(block=st.integers(0, 4))
    def withdraw(self, block: int) -> None:
        self.allocator.withdraw([block])
        self.names = {name: b for name, b in self.names.items() if b != block}

    @invariant()
    def counts_agree(self) -> None:
        assert [self.allocator.users(b) for b in range(5)] == [self.held.count(b) for b in range(5)]
        assert self.allocator.num_free == 5 - len(set(self.held))


TestAllocator = AllocatorRules.TestCase


def test_digests_name_all_tokens_in_front() -> None:
    first, other = chain_digest(b"", [1, 2]), chain_digest(b"", [2, 1])
    assert first == chain_digest(b"", (1, 2)) != other
    assert chain_digest(first, [3, 4]) != chain_digest(other, [3, 4])


def test_the_least_recently_used_content_goes_first() -> None:
    allocator = BlockAllocator(3)
    blocks = [allocator.allocate() for _ in range(3)]
    for block in blocks:
        allocator.publish(block, bytes([block]))
    allocator.release(blocks[2:])
    allocator.release(blocks[:2])
    assert [allocator.allocate() for _ in range(3)] == [blocks[2], blocks[1], blocks[0]]
