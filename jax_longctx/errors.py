"""Errors a person can act on: one line that says what was wrong, what was expected, what to do."""

__all__ = ["CapacityError", "CheckpointError", "ConfigError", "InputError", "LongctxError"]


class LongctxError(Exception):
    """Base of every error on bad input; the command line prints it and exits with 2."""


class ConfigError(LongctxError):
    """A configuration that is not implemented or contradicts itself."""


class InputError(LongctxError):
    """A prompt, a file or an option that cannot be used."""


class CheckpointError(LongctxError):
    """A checkpoint that is incomplete, damaged, or not a checkpoint at all."""


class CapacityError(LongctxError):
    """A context that does not fit: bytes needed, bytes there are, and what would fit."""
