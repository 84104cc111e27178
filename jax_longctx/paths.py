"""Paths as users write them, and as Orbax and TensorStore take them."""

import os
from pathlib import Path

from jax_longctx.errors import InputError

# TensorStore keeps names with this end for itself.
LOCKS = ".__lock"


def expanded(path: str | Path) -> Path:
    """The path, a leading `~` or `~USER` replaced, which shells leave in `--option=~/x`."""
    return Path(os.path.expanduser(path))


def whole_path(path: str | Path) -> Path:
    """The only form in which a path reaches Orbax or TensorStore: absolute, without `~` and links.

    TensorStore refuses `.`, `..` and doubled slashes. `..` after a link is its target's parent.

    Raises:
      InputError: there is no working directory, or TensorStore cannot name the path.
    """
    shown = ascii(str(path))
    try:
        found = Path(os.path.realpath(expanded(path)))
        str(found).encode()
    except OSError as error:
        said = f"{shown}: no working directory: {error.strerror}; change to another"
        raise InputError(said) from error
    except ValueError as error:  # a null byte, or no UTF-8
        raise InputError(f"{shown} cannot be used: {error}; choose another name") from error
    for part in found.parts:
        if "\\" in part or part.endswith(LOCKS):
            raise InputError(
                f"{found} cannot be used: the storage library takes no {part!r} in a path (no "
                f"backslash, no end {LOCKS}); rename it"
            )
    return found
