"""Data sets and rewards: reader, tokenizer, reward functions, and the task that the loop sees. Imports no torch."""
