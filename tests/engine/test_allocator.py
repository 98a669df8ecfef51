"""Block allocator: states of a block, exactness of the prefix cache, eviction, reset."""

from __future__ import annotations

import random

import pytest

from exactrl.engine.allocator import NO_NODE, BlockAllocator
from exactrl.errors import ConfigError

SIZE = 4


def fill(allocator: BlockAllocator, tokens: list[int], *, twin: bool = False) -> list[int]:
    """Does what a scheduler does for one sequence: takes what is cached, allocates the rest, publishes full blocks.

    A twin computes everything itself, like a sequence that ran beside the one which filled the cache.
    """
    blocks = [] if twin else allocator.match_prefix(tokens)
    allocator.acquire(blocks)
    node = allocator.node_of(blocks)
    while len(blocks) * SIZE < len(tokens):
        block = allocator.allocate()
        assert block is not None
        blocks.append(block)
        if len(blocks) * SIZE <= len(tokens):
            node = allocator.publish(tokens, len(blocks) - 1, block, node)
    return blocks


@pytest.mark.parametrize(("length", "expected"), [(3, 0), (4, 0), (5, 1), (8, 1), (9, 2), (12, 2), (13, 3), (20, 3)])
def test_match_takes_whole_blocks_and_leaves_a_token(length: int, expected: int) -> None:
    allocator = BlockAllocator(8, SIZE)
    table = fill(allocator, list(range(13)))
    assert allocator.match_prefix(list(range(length))) == table[:expected]
    allocator.release(table)
    assert allocator.match_prefix(list(range(length))) == table[:expected]


def test_match_needs_equal_parents_and_equal_tokens() -> None:
    allocator = BlockAllocator(16, SIZE)
    fill(allocator, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert len(allocator.match_prefix([1, 2, 3, 4, 5, 6, 7, 8, 0])) == 2
    assert len(allocator.match_prefix([1, 2, 3, 4, 5, 6, 7, 0, 0])) == 1
    assert allocator.match_prefix([1, 2, 3, 0, 5, 6, 7, 8, 9]) == []
    assert allocator.match_prefix([5, 6, 7, 8, 9]) == [], "a second block is not a first block"


def test_keys_with_equal_hashes_are_different_content() -> None:
    """hash(-1) == hash(-2) in CPython, and so are the hashes of tuples of them."""
    one, two = [-1] * SIZE + [0], [-2] * SIZE + [0]
    assert hash(tuple(one)) == hash(tuple(two))
    allocator = BlockAllocator(8, SIZE)
    fill(allocator, one)
    assert allocator.match_prefix(two) == []
    assert len(allocator.match_prefix(one)) == 1


def test_twins_keep_their_own_blocks_and_share_the_node() -> None:
    allocator = BlockAllocator(8, SIZE)
    root = allocator.node_of([])
    tokens = list(range(9))
    first, second = allocator.allocate(), allocator.allocate()
    assert first is not None
    assert second is not None
    node = allocator.publish(tokens, 0, first, root)
    assert allocator.publish(tokens, 0, second, root) == node
    child = allocator.allocate()
    assert child is not None
    assert allocator.publish(tokens, 1, child, node) not in (NO_NODE, node)
    assert allocator.match_prefix(tokens) == [first, child]
    allocator.check_invariants([[first], [second, child]])
    allocator.release([second, child])
    assert allocator.num_free == 7
    assert allocator.match_prefix(tokens) == [first, child]
    allocator.check_invariants([[first]])


def test_shared_blocks_are_free_after_the_last_owner() -> None:
    allocator = BlockAllocator(4, SIZE)
    table = fill(allocator, list(range(8)))
    allocator.acquire(table)
    allocator.release(table)
    assert allocator.num_free == 2
    allocator.check_invariants([table])
    allocator.release(table)
    assert allocator.num_free == 4
    assert allocator.num_free_after(table[:1]) == 3
    assert allocator.hits == 2


def test_eviction_takes_the_least_recently_used_and_leaves_first() -> None:
    allocator = BlockAllocator(6, SIZE)
    old = fill(allocator, list(range(12)))
    allocator.release(old)
    new = fill(allocator, list(range(100, 108)))
    allocator.release(new)
    assert allocator.num_free == 6
    taken = [allocator.allocate() for _ in range(4)]
    assert taken[1:] == old[::-1], "one free block, then the oldest chain from its end"
    assert allocator.evictions == 3
    assert allocator.match_prefix(list(range(13))) == []
    assert allocator.match_prefix([*range(100, 108), 0]) == new


def test_a_touched_chain_outlives_an_untouched_one() -> None:
    allocator = BlockAllocator(4, SIZE)
    one, two = fill(allocator, list(range(8))), fill(allocator, list(range(50, 58)))
    allocator.release(one)
    allocator.release(two)
    allocator.acquire(one)
    allocator.release(one)
    assert [allocator.allocate(), allocator.allocate()] == two[::-1]


def test_children_of_an_evicted_parent_are_unreachable_and_do_not_leak() -> None:
    allocator = BlockAllocator(3, SIZE)
    tokens = list(range(9))
    parent, child = allocator.allocate(), allocator.allocate()
    assert parent is not None
    assert child is not None
    node = allocator.publish(tokens, 0, parent, allocator.node_of([]))
    assert allocator.publish(tokens, 1, child, node) != NO_NODE
    allocator.release([parent])  # the owner of the child holds a twin of the parent, say
    grabbed = [allocator.allocate(), allocator.allocate()]
    assert allocator.evictions == 1
    assert allocator.match_prefix(tokens) == []
    # Other content in the parent's block is another node: the old child must not come back below it.
    assert grabbed[1] == parent
    other = [9, 9, 9, 9, *tokens[4:]]
    assert allocator.publish(other, 0, parent, allocator.node_of([])) not in (node, NO_NODE)
    assert allocator.match_prefix(other) == [parent]
    assert allocator.match_prefix(tokens) == []
    allocator.release([child])
    assert allocator.num_free == 1
    assert allocator.allocate() == child
    assert allocator.allocate() is None
    allocator.check_invariants([[b for b in (*grabbed, child) if b is not None]])


def test_nothing_is_published_below_a_dead_parent() -> None:
    allocator = BlockAllocator(2, SIZE)
    tokens = list(range(8))
    parent = allocator.allocate()
    assert parent is not None
    node = allocator.publish(tokens, 0, parent, allocator.node_of([]))
    allocator.release([parent])
    table = [allocator.allocate(), allocator.allocate()]
    assert allocator.publish(tokens, 1, table[0] or 0, node) == NO_NODE
    assert allocator.publish(tokens, 1, table[0] or 0, NO_NODE) == NO_NODE
    allocator.check_invariants([[b for b in table if b is not None]])


@pytest.mark.parametrize("new_key", [(1, "digest"), (2, "digest"), (1, "other")])
def test_reset_forgets_everything_even_under_the_same_key(new_key: tuple[int, str]) -> None:
    allocator = BlockAllocator(8, SIZE, root_key=(1, "digest"))
    tokens = list(range(13))
    held, gone = fill(allocator, tokens), fill(allocator, list(range(50, 59)))
    stale = allocator.node_of(held[:3])
    allocator.release(gone)
    allocator.reset(new_key)
    assert allocator.root_key == new_key
    assert allocator.match_prefix(tokens) == allocator.match_prefix(list(range(50, 59))) == []
    allocator.check_invariants([held])
    assert allocator.publish([*tokens, 0, 0, 0], 3, held[3], stale) == NO_NODE, "content of the old weights"
    allocator.release(held)
    assert allocator.num_free == 8
    assert allocator.match_prefix(tokens) == []
    allocator.reset((1, "digest"))
    assert allocator.match_prefix(tokens) == [], "going back to an old key brings nothing back"
    allocator.check_invariants([])


def test_without_prefix_cache_nothing_is_found() -> None:
    allocator = BlockAllocator(4, SIZE, enable_prefix_cache=False)
    tokens = list(range(9))
    table = fill(allocator, tokens)
    assert allocator.match_prefix(tokens) == []
    allocator.release(table)
    assert allocator.num_free == 4
    allocator.release(fill(allocator, tokens) + fill(allocator, tokens[:3]))
    assert allocator.hits == allocator.evictions == 0
    allocator.check_invariants([])


def test_free_orders() -> None:
    def drain(allocator: BlockAllocator) -> list[int | None]:
        return [allocator.allocate() for _ in range(allocator.num_blocks)]

    assert drain(BlockAllocator(5, SIZE, order="fifo")) == [0, 1, 2, 3, 4]
    assert drain(BlockAllocator(5, SIZE, order="lifo")) == [4, 3, 2, 1, 0]
    shuffles = [drain(BlockAllocator(50, SIZE, order="shuffled", seed=seed)) for seed in (1, 1, 2)]
    assert shuffles[0] == shuffles[1] != shuffles[2]
    assert set(shuffles[0]) == set(range(50))
    allocator = BlockAllocator(1, SIZE)
    assert [allocator.allocate(), allocator.allocate()] == [0, None]


def test_a_cache_without_blocks_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"0 blocks of 16 tokens.*kv_tokens"):
        BlockAllocator(0)
    with pytest.raises(AssertionError, match="power of two"):
        BlockAllocator(4, 12)


def test_random_operations_keep_books_and_contents() -> None:
    evictions = hits = 0
    for seed in range(400):
        rng = random.Random(seed)
        order = rng.choice(["fifo", "lifo", "shuffled"])
        allocator = BlockAllocator(rng.randint(4, 12), SIZE, order=order, seed=seed)
        content: dict[int, tuple[int, ...]] = {}  # block -> (weights, all tokens up to its end)
        weights = 0
        tables: list[list[int]] = []
        for _ in range(60):
            action = rng.random()
            if action < 0.5 and allocator.num_free >= 3:
                tokens = [rng.randrange(2) for _ in range(rng.randint(1, 3)) for _ in range(SIZE)]
                tokens = tokens[: len(tokens) - rng.choice([0, 1])]
                for i, block in enumerate(allocator.match_prefix(tokens)):
                    assert content[block] == (weights, *tokens[: (i + 1) * SIZE])
                tables.append(fill(allocator, tokens, twin=rng.random() < 0.3))
                content |= {b: (weights, *tokens[: (i + 1) * SIZE]) for i, b in enumerate(tables[-1])}
            elif action < 0.97 and tables:
                allocator.release(tables.pop(rng.randrange(len(tables))))
            elif action >= 0.97:
                weights += 1
                allocator.reset((rng.randrange(3), "digest"))
            allocator.check_invariants(tables)
        evictions += allocator.evictions
        hits += allocator.hits
    assert min(evictions, hits) > 500, "the operations no longer reach the interesting cases"
