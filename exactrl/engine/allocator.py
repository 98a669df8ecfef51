"""KV cache blocks: free list, reference counts and an exact prefix cache.

A block is in exactly one of three states: owned (reference count > 0), evictable (count 0, its content is cached) or
free (count 0, content meaningless). A cached block is a node of a tree: its key is (node id of the parent, the tuple of
its own token ids), compared in full. A hash alone would, on a collision, silently give a sequence another one's keys
and values. Node ids are never reused, so a child of an evicted parent can no longer be found (it still ages and is
evicted like any other block), and a new root makes everything below the old one unreachable.
"""

from __future__ import annotations

import random
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Sequence
from typing import Literal

from exactrl.errors import ConfigError

NO_NODE = 0  # not in the cache, and nothing can be published below it

FreeOrder = Literal["fifo", "lifo", "shuffled"]


class BlockAllocator:
    """Hands out `num_blocks` blocks of `block_tokens` tokens (a power of two). Every operation is O(1) per block.

    order, seed      which free block comes next. It never changes a bit of the output; the parity check shows so.
    root_key         (weight version, contract digest) whose keys and values are cached; set by `reset`
    hits, evictions  blocks taken from the cache; cached blocks given to other content
    """

    def __init__(
        self,
        num_blocks: int,
        block_tokens: int = 16,
        *,
        root_key: tuple[int, str] = (0, ""),
        enable_prefix_cache: bool = True,
        order: FreeOrder = "fifo",
        seed: int = 0,
    ) -> None:
        """Raises ConfigError when there is not even one block."""
        assert block_tokens.bit_count() == 1, f"{block_tokens=} is not a power of two"
        assert order in ("fifo", "lifo", "shuffled"), order
        if num_blocks < 1:
            raise ConfigError(
                f"the KV cache has {num_blocks} blocks of {block_tokens} tokens; it needs at least one: "
                f"raise rollout.kv_tokens (--kv-tokens) to {block_tokens} or more"
            )
        self.num_blocks = num_blocks
        self.block_tokens = block_tokens
        self.enable_prefix_cache = enable_prefix_cache
        self.hits = 0
        self.evictions = 0
        self._fifo = order == "fifo"
        self._rng = random.Random(seed) if order == "shuffled" else None
        self._last_node = NO_NODE
        self.root_key = root_key
        self.clear()

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can still return: free and evictable ones."""
        return len(self._free) + len(self._evictable)

    def clear(self) -> None:
        """Forgets owners and cached content, whatever an operation that was interrupted left half done: all is free."""
        self._free = deque(range(self.num_blocks))
        self._evictable: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._refs = [0] * self.num_blocks
        self._node = [NO_NODE] * self.num_blocks
        self._key: list[tuple[int, tuple[int, ...]] | None] = [None] * self.num_blocks
        self._cached: dict[tuple[int, tuple[int, ...]], int] = {}  # key -> block
        self._live: set[int] = set()  # the root and the nodes of cached blocks
        self._root = self._new_node()

    def reset(self, root_key: tuple[int, str]) -> None:
        """Forgets all cached content, also when the key is the old one: its caller has touched the weights.

        Blocks in use stay with their owners and become free, not cached, when released; what their owners publish
        later hangs below a dead node and is ignored.
        """
        self.root_key = root_key
        for block in self._cached.values():
            self._node[block] = NO_NODE
            self._key[block] = None
        self._cached.clear()
        self._live.clear()
        self._free.extend(self._evictable)
        self._evictable.clear()
        self._root = self._new_node()

    def match_prefix(self, token_ids: Sequence[int]) -> list[int]:
        """Cached blocks that hold the longest known prefix; whole blocks only, and never the last token.

        At least one token is left to compute, so that logits exist. Nothing changes: `acquire` the blocks to keep them.
        """
        blocks: list[int] = []
        if not self.enable_prefix_cache:
            return blocks
        size = self.block_tokens
        node = self._root
        for start in range(0, (len(token_ids) - 1) // size * size, size):
            block = self._cached.get((node, tuple(token_ids[start : start + size])))
            if block is None:
                break
            blocks.append(block)
            node = self._node[block]
        return blocks

    def node_of(self, matched: Sequence[int]) -> int:
        """The node that the block after `matched` (a result of match_prefix) is published below."""
        return self._node[matched[-1]] if matched else self._root

    def num_free_after(self, matched: Iterable[int]) -> int:
        """What `num_free` will be once `matched` is acquired."""
        return self.num_free - sum(not self._refs[block] for block in matched)

    def acquire(self, block_ids: Sequence[int]) -> None:
        """Adds an owner to each of these cached blocks."""
        for block in block_ids:
            if not self._refs[block]:
                del self._evictable[block]
            self._refs[block] += 1
        self.hits += len(block_ids)

    def allocate(self) -> int | None:
        """A block with one owner and meaningless content: a free one, else the least recently used evictable one."""
        if self._free:
            block = self._take_free()
        elif self._evictable:
            block, _ = self._evictable.popitem(last=False)
            self._forget(block)
            self.evictions += 1
        else:
            return None
        self._refs[block] = 1
        return block

    def publish(self, token_ids: Sequence[int], block_index: int, block_id: int, parent: int) -> int:
        """Caches an owned block that is now full: block `block_index` of a sequence whose tokens are `token_ids`.

        Returns the node that the sequence's next block goes below. If the same content is cached already (two sequences
        computed it at the same time), that node is returned and this block stays private to its owner. If the parent
        has been evicted or the cache was reset, nothing is cached and NO_NODE comes back.
        """
        if parent not in self._live or not self.enable_prefix_cache:
            return NO_NODE
        start = block_index * self.block_tokens
        key = (parent, tuple(token_ids[start : start + self.block_tokens]))
        assert len(key[1]) == self.block_tokens, f"block {block_index} of {len(token_ids)} tokens is not full"
        assert self._refs[block_id], f"block {block_id} has no owner"
        twin = self._cached.setdefault(key, block_id)  # once: a tuple's hash is computed anew each time
        if twin != block_id:
            return self._node[twin]
        assert self._key[block_id] is None, f"block {block_id} is published twice"
        self._key[block_id] = key
        self._node[block_id] = node = self._new_node()
        return node

    def release(self, block_ids: Sequence[int]) -> None:
        """Removes one owner from each block of a table; its last blocks age first, so parents outlive children."""
        for block in reversed(block_ids):
            self._refs[block] -= 1
            if not self._refs[block]:
                if self._node[block]:
                    self._evictable[block] = None
                else:
                    self._free.append(block)

    def check_invariants(self, tables: Iterable[Sequence[int]]) -> None:
        """Asserts that the books balance, given the block tables of all owners. O(num_blocks): for tests."""
        owners = Counter(block for table in tables for block in table)
        for block, refs in enumerate(self._refs):
            assert refs == owners[block], f"block {block}: {refs} references, {owners[block]} owners"
        free, evictable = set(self._free), set(self._evictable)
        assert len(free) == len(self._free), "a block is free twice"
        states = [free, evictable, set(owners)]
        assert sum(map(len, states)) == self.num_blocks, f"{list(map(len, states))} of {self.num_blocks} blocks"
        assert set().union(*states) == set(range(self.num_blocks)), "a block is in two states"
        published = {block for block in range(self.num_blocks) if self._key[block] is not None}
        assert published == set(self._cached.values())
        assert len(published) == len(self._cached), "a block is cached twice"
        assert all(self._key[block] == key for key, block in self._cached.items())
        assert evictable <= published, "evictable without content"
        assert not free & published, "free with content"
        nodes = {node for node in self._node if node}
        assert self._live == nodes | {self._root}
        assert len(nodes) == len(published), "two blocks are the same node"

    def _new_node(self) -> int:
        self._last_node += 1
        self._live.add(self._last_node)
        return self._last_node

    def _forget(self, block: int) -> None:
        key = self._key[block]
        assert key is not None, f"evictable block {block} has no content"
        del self._cached[key]
        self._live.remove(self._node[block])
        self._key[block] = None
        self._node[block] = NO_NODE

    def _take_free(self) -> int:
        free = self._free
        if self._rng is not None:
            i = self._rng.randrange(len(free))
            free[i], free[-1] = free[-1], free[i]
        return free.popleft() if self._fifo else free.pop()
