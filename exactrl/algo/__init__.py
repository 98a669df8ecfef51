"""Advantages and losses: pure functions on tensors, denominators explicit, every formula with its source.

Losses return (sum, metrics). The sum is already weighted with denominators of the whole minibatch, so micro-batches and
ranks are added, never averaged.
"""
