"""Errors that a user can cause or repair.

The message is a sentence: what happened and what to do about it. The command line prints it and exits with status 1;
a traceback is for bugs only.
"""

from __future__ import annotations

# What code that reads a configuration raises where a value is missing, of another type or out of all bounds.
MISREAD = (TypeError, ValueError, AttributeError, LookupError, ArithmeticError)


class OutriderError(Exception):
    """Something a user can repair; `str(error)` is a whole sentence."""


class ConfigError(OutriderError, ValueError):
    """A parameter or a combination of parameters that cannot work."""


class ModelError(OutriderError):
    """A model, a tokenizer or a weight file that cannot be found, read or run."""


def first_line(error: Exception) -> str:
    """A foreign error's message without what follows its first line; its class where it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
