"""Parity: the oracle that every step passes, and the check ladder."""
