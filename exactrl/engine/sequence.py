"""One request while it is being generated. No tensors: tokens, block table and counters only."""

from __future__ import annotations

from exactrl.types import Request


class Sequence:
    """State of one request; written by the scheduler only (the engine reads it to build batches and completions).
    What every step changes while it runs is in Counters.

    index             arrival order, unique in its scheduler
    token_ids         prompt + generated tokens
    num_prompt        tokens of the prompt
    admission         number of its admission among all of its scheduler; -1 while it waits
    num_ahead         while it waits: tokens once those that are still being sampled are known
    block_ids         block table: token t lives in block_ids[t // block_tokens], slot t % block_tokens
    node              prefix-cache node of the last full block (BlockAllocator.publish)
    num_cached        prompt tokens taken from the prefix cache at the first admission
    num_seen          leading tokens that were in the cache before the last preemption (they count as recomputed)
    logprobs          one per generated token, never lost by a preemption
    finish_reason     None while running, then "stop" or "length"
    """

    __slots__ = (
        "admission",
        "block_ids",
        "finish_reason",
        "index",
        "logprobs",
        "max_tokens",
        "node",
        "num_ahead",
        "num_cached",
        "num_preemptions",
        "num_prompt",
        "num_seen",
        "request",
        "stop_token_ids",
        "token_ids",
    )

    def __init__(self, index: int, request: Request) -> None:
        self.index = index
        self.request = request
        self.token_ids = list(request.token_ids)
        self.num_prompt = len(self.token_ids)
        self.max_tokens = self.num_prompt + request.params.max_new_tokens
        self.stop_token_ids = frozenset(request.params.stop_token_ids)
        self.admission = -1
        self.num_ahead = self.num_prompt
        self.block_ids: list[int] = []
        self.node = 0
        self.num_cached = 0
        self.num_seen = 0
        self.logprobs: list[float] = []
        self.finish_reason: str | None = None
        self.num_preemptions = 0

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - self.num_prompt

    @property
    def generated_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt :]

    def __repr__(self) -> str:
        return (
            f"Sequence({self.request.id!r}, index={self.index}, tokens={self.num_prompt}+{self.num_generated}, "
            f"blocks={len(self.block_ids)}, finish={self.finish_reason})"
        )
