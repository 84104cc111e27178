"""Files of numbers that `jax-longctx calibrate` writes and methods read as settings."""

from pathlib import Path

import numpy as np

from jax_longctx.errors import ConfigError
from jax_longctx.files import expanded, file_errors, first_line, read_bytes, write_whole


def read_numbers(path: str | Path, setting: str) -> np.ndarray:
    """A file's lines of numbers apart by tabs, as many in each, float64.

    Raises:
      ConfigError: it cannot be read, or holds something else; `setting` is where it is named.
    """
    with file_errors(f"{setting}: {path} cannot be read", "name a file of numbers", ConfigError):
        raw = read_bytes(expanded(path))
    try:
        lines = raw.decode("utf-8").splitlines()
        table = np.array([[float(x) for x in line.split("\t")] for line in lines if line.strip()])
    except ValueError as error:
        why = first_line(error)
        raise ConfigError(
            f"{setting}: {path} is no table of numbers apart by tabs: {why}"
        ) from error
    if table.ndim != 2 or not (np.abs(table) <= np.finfo(np.float32).max).all():
        raise ConfigError(f"{setting}: {path} holds no lines of finite float32 numbers")
    return table


def write_numbers(table: np.ndarray, path: Path) -> None:
    """Writes what `read_numbers` reads; raises InputError as `write_whole`."""
    write_whole("".join("\t".join(f"{x:.6g}" for x in line) + "\n" for line in table), path)
