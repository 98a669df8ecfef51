"""The task that the loop sees: prompts of each step, held-out prompts, and rewards."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from exactrl.errors import DataError
from exactrl.tasks.rewards import Reward, reward_many
from exactrl.tasks.store import longest_prompt
from exactrl.tasks.tokenizer import Tokenizer
from exactrl.types import Prompt, Sample, Scored

# Smaller data sets keep the order they always had.
BLAKE2_BELOW = 2**16


class DataTask:
    """Prompts from data sets, a reward function, and a tokenizer. Implements protocols.Task; holds no cursor."""

    def __init__(
        self,
        train: Sequence[Prompt],
        evals: Mapping[str, Sequence[Prompt]],
        tokenizer: Tokenizer,
        reward: Reward,
        *,
        seed: int = 0,
        shuffle: bool = True,
        stop_token_ids: Sequence[int] = (),
    ) -> None:
        """stop_token_ids: the run's; empty: the model's own."""
        if not train:
            raise DataError("the training data set holds no prompts")
        self._train = train
        self._evals = dict(evals)
        self._tokenizer = tokenizer
        self._reward = reward
        self._seed = seed
        self._shuffle = shuffle
        self._stop_token_ids = tuple(stop_token_ids)

    def train_prompts(self, start: int, count: int) -> list[Prompt]:
        """Prompts number start to start + count - 1 of an endless sequence of epochs.

        A prompt that comes twice in one call, which can happen where two epochs meet, has its epoch added to its id the
        second time: sampling noise depends on (step, id), and the two must not get the same.
        """
        drawn: dict[str, Prompt] = {}
        for position in range(start, start + count):
            prompt = self.prompt_at(position)
            while prompt.id in drawn:
                prompt = replace(prompt, id=f"{prompt.id}@epoch{position // len(self._train)}")
            drawn[prompt.id] = prompt
        return list(drawn.values())

    def prompt_at(self, position: int) -> Prompt:
        """Prompt number `position` of the endless sequence of epochs; any position is cheap.

        Each epoch is its own permutation of the data set (file order without shuffle), fixed by the seed.
        """
        epoch, offset = divmod(position, len(self._train))
        order = epoch_order(len(self._train), self._seed, epoch) if self._shuffle else range(len(self._train))
        return self._train[int(order[offset])]

    def eval_prompts(self) -> dict[str, list[Prompt]]:
        return {name: list(prompts) for name, prompts in self._evals.items()}

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of a response without its stop token; other special tokens stay visible."""
        return self._tokenizer.decode_response(token_ids, self._stop_token_ids)

    def longest_prompt(self) -> Prompt:
        """The longest prompt of all sets, in tokens."""
        sets = [self._train, *self._evals.values()]
        return max((longest_prompt(prompts) for prompts in sets if prompts), key=lambda p: len(p.token_ids))

    def rewards(self, pairs: Sequence[tuple[Prompt, Sample]]) -> list[Scored]:
        """All at once: a batch is much faster than single calls."""
        return reward_many(self._reward, pairs)


@lru_cache(maxsize=4)
def epoch_order(size: int, seed: int, epoch: int) -> Sequence[int] | NDArray[np.uint32]:
    """A permutation of range(size): sorted by a hash of (seed, epoch, index).

    A hash, not a library's shuffle, so that a resumed run sees the same order whatever the library versions. From
    BLAKE2_BELOW on, where one hash call per index takes seconds, the indices are sorted (stably) by the first `size`
    numbers of 64 bits of numpy's Philox generator under a hash of (seed, epoch) as key: numpy keeps that stream fixed.
    """
    if size < BLAKE2_BELOW:

        def key(index: int) -> bytes:
            return hashlib.blake2b(struct.pack("<qqq", seed, epoch, index), digest_size=16).digest()

        return tuple(sorted(range(size), key=key))
    philox_key = hashlib.blake2b(struct.pack("<qq", seed, epoch), digest_size=16).digest()
    stream = np.random.Philox(key=int.from_bytes(philox_key, "little")).random_raw(size)
    return np.argsort(stream, kind="stable").astype(np.uint32)
