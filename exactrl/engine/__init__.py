"""Rollout: sequences, block allocator, scheduler (no torch in these three), batch, engine."""
