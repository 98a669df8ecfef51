"""The task that the loop sees: prompts of each step, held-out prompts, and rewards."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

from exactrl.errors import DataError
from exactrl.tasks.rewards import Reward, Scored, reward_many
from exactrl.tasks.tokenizer import Tokenizer
from exactrl.types import Prompt, Sample


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
        self._train = list(train)
        self._evals = {name: list(prompts) for name, prompts in evals.items()}
        self._tokenizer = tokenizer
        self._reward = reward
        self._seed = seed
        self._shuffle = shuffle
        self._stop_token_ids = tuple(stop_token_ids)

    def train_prompts(self, step: int, count: int) -> list[Prompt]:
        """Prompts number step·count to step·count + count - 1 of an endless sequence of epochs.

        Each epoch is its own permutation of the data set (file order without shuffle), fixed by the seed. A prompt that
        comes twice in one step, which can happen where two epochs meet, has its epoch added to its id the second time:
        sampling noise depends on (step, id), and the two must not get the same.
        """
        drawn: dict[str, Prompt] = {}
        for position in range(step * count, (step + 1) * count):
            epoch, offset = divmod(position, len(self._train))
            prompt = self._train[self._order(epoch)[offset]]
            while prompt.id in drawn:
                prompt = replace(prompt, id=f"{prompt.id}@epoch{epoch}")
            drawn[prompt.id] = prompt
        return list(drawn.values())

    def eval_prompts(self) -> dict[str, list[Prompt]]:
        return {name: list(prompts) for name, prompts in self._evals.items()}

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of a response without its stop token; other special tokens stay visible."""
        return self._tokenizer.decode_response(token_ids, self._stop_token_ids)

    def all_train_prompts(self) -> list[Prompt]:
        return self._train

    def reward(self, prompt: Prompt, sample: Sample) -> float:
        return self._reward(prompt, sample)

    def rewards(self, pairs: Sequence[tuple[Prompt, Sample]]) -> list[Scored]:
        """The rewards of many samples at once, with reasons and errors; one batch is much faster than single calls."""
        return reward_many(self._reward, pairs)

    def _order(self, epoch: int) -> Sequence[int]:
        return epoch_order(len(self._train), self._seed, epoch) if self._shuffle else range(len(self._train))


@lru_cache(maxsize=4)
def epoch_order(size: int, seed: int, epoch: int) -> tuple[int, ...]:
    """A permutation of range(size): sorted by a hash of (seed, epoch, index).

    A hash, not a library's shuffle, so that a resumed run sees the same order whatever the library versions.
    """

    def key(index: int) -> bytes:
        return hashlib.blake2b(struct.pack("<qqq", seed, epoch, index), digest_size=16).digest()

    return tuple(sorted(range(size), key=key))
