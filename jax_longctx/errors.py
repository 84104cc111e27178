"""Errors that the user can act on: one line with what was wrong, what was expected, what to do."""


class LongctxError(Exception):
    """Base of every error on bad input; the command line prints it and exits with 2."""


class ConfigError(LongctxError):
    """A configuration that is not implemented or contradicts itself."""


class InputError(LongctxError):
    """A prompt, a file or an option that cannot be used."""


class NoTextError(InputError):
    """A file that holds no text: it is empty, or of an unknown kind."""


class OriginError(InputError):
    """An output that was made from something else, or was changed since."""


class LengthError(InputError):
    """A length in tokens that a task cannot fit into, or cannot fill."""


class CheckpointError(LongctxError):
    """A checkpoint that is incomplete, damaged, or not a checkpoint at all."""


class DamagedError(CheckpointError):
    """Files that a digest proves changed. Only these may be deleted."""


class CapacityError(LongctxError):
    """A context that does not fit: bytes needed, bytes available, and what would fit."""


class TrainedLengthWarning(UserWarning):
    """A text is longer than the model was trained for, and the method does not compensate."""
