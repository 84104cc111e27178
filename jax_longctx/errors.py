"""Errors a person can act on: one line that says what was wrong, what was expected, what to do."""


class LongctxError(Exception):
    """Base of every error on bad input; the command line prints it and exits with 2."""


class ConfigError(LongctxError):
    """A configuration that is not implemented or contradicts itself."""


class InputError(LongctxError):
    """A prompt, a file or an option that cannot be used."""


class LengthError(InputError):
    """A number of tokens that a task's words do not fit in, or cannot fill."""


class CheckpointError(LongctxError):
    """A checkpoint that is incomplete, damaged, or not a checkpoint at all."""


class CapacityError(LongctxError):
    """A context that does not fit: bytes needed, bytes there are, and what would fit."""


class TrainedLengthWarning(UserWarning):
    """A text goes beyond what the model was trained to, and the method does not make up for it."""
