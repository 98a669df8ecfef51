"""The RL loop, rollout of groups, evaluation, run folder."""
