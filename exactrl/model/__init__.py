"""Model families: one definition each, used by engine and trainer alike."""
