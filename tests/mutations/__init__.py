"""Faults put into the real code on purpose, and proof that a named check catches each (docs/numerics.md)."""
