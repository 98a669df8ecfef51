"""Trainer: packing, optimizer, checkpoint, trainer."""
