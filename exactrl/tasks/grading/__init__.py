"""Verdicts on math answers: extraction, comparison by exact values, a pool of processes for symbolic work.

Rules and their reasons: docs/rewards.md. Imports no torch; only worker processes import math-verify and sympy.
"""
