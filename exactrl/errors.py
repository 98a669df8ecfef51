"""Every exception that ExactRL raises on purpose.

    ExactRLError                    exit code
      UsageError                    2   the user's settings or input are wrong
        ConfigError                 2   a recipe or command-line value
        DataError                   2   a data file; names file, row and key
        ModelError                  2   a model folder: config, tensors, tokenizer
        RequestError                2   a generation request that can never be served
        CheckpointError             2   a checkpoint that is incomplete, changed, or of another run
      ParityError                   3   two sides that must agree bit for bit do not
      CertificationError            3   a kernel that no valid certificate of this machine covers
      NonFiniteError                3   a logprob, loss or gradient is NaN or infinite
      EnvironmentProblem            4   missing device, package, memory, or an unusable folder
      Interrupted                   130 the user stopped the run

A message names the value, the limit it broke and the way out.
"""

from __future__ import annotations


class ExactRLError(Exception):
    """Base of all errors raised on purpose; `exit_code` is what the command line returns."""

    exit_code = 1


class UsageError(ExactRLError):
    exit_code = 2


class ConfigError(UsageError):
    pass


class DataError(UsageError):
    pass


class ModelError(UsageError):
    pass


class RequestError(UsageError):
    pass


class CheckpointError(UsageError):
    pass


class ParityError(ExactRLError):
    exit_code = 3


class CertificationError(ExactRLError):
    exit_code = 3


class NonFiniteError(ExactRLError):
    exit_code = 3


class EnvironmentProblem(ExactRLError):
    exit_code = 4


class Interrupted(ExactRLError):
    exit_code = 130
