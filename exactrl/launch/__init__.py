"""Assembles concrete engines, trainers and tasks from settings: what the command line and the Python API call."""

from exactrl.launch.checking import check, subject_of
from exactrl.launch.derive import plan
from exactrl.launch.evaluating import evaluate
from exactrl.launch.events import Events, Silent
from exactrl.launch.exporting import export
from exactrl.launch.rl_run import train
from exactrl.launch.serving import Engine, generate
from exactrl.launch.sft_run import sft

__all__ = [
    "Engine",
    "Events",
    "Silent",
    "check",
    "evaluate",
    "export",
    "generate",
    "plan",
    "sft",
    "subject_of",
    "train",
]
