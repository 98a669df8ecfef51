"""ExactRL: RL post-training whose rollout and trainer agree to the last bit."""

__version__ = "0.1.0"
