"""The command line: one thin file per command; heavy imports happen inside them, so help is instant."""

from exactrl.cli.app import main

__all__ = ["main"]
