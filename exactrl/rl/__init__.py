"""The loops (RL, supervised), rollout of groups, evaluation, run folder."""
