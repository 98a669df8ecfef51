"""Trainer -> engine weights, one medium per file."""
