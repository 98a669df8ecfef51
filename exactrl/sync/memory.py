"""Trainer and engine in one process: weights are handed over as tensors."""

from __future__ import annotations

from exactrl.errors import ParityError
from exactrl.protocols import RolloutEngine, Trainer


def sync(trainer: Trainer, engine: RolloutEngine) -> str:
    """Loads the trainer's compute weights into the engine; returns the digest of what both sides' kernels now read.

    Raises ParityError when the two digests differ: a half-done update must never be rolled out.
    """
    loaded = engine.load_weights(trainer.named_weights(), trainer.version)
    expected = trainer.compute_digest()
    if loaded != expected:
        raise ParityError(
            f"weight version {trainer.version}: the engine's kernels read {loaded}, the trainer's {expected}; "
            "the weights did not arrive as they were sent"
        )
    return loaded
