"""Files of numbers that `jax-longctx calibrate` writes and methods read as settings.

A first line, "#" and JSON, says of which model they are. Other projects' files have none.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

from jax_longctx.errors import ConfigError
from jax_longctx.files import expanded, file_errors, first_line, read_bytes, write_whole
from jax_longctx.models.config import ModelConfig


def read_numbers(path: str | Path, setting: str) -> tuple[np.ndarray, dict[str, Any]]:
    """A file's lines of numbers apart by tabs, as many in each, float64; and of which model.

    Raises:
      ConfigError: it cannot be read, or holds something else; `setting` is where it is named.
    """
    with file_errors(f"{setting}: {path} cannot be read", "name a file of numbers", ConfigError):
        raw = read_bytes(expanded(path))
    try:
        head, *lines = raw.decode("utf-8").splitlines() or [""]
        of = json.loads(head[1:]) if head.startswith("#") else {}
        lines = lines if head.startswith("#") else [head, *lines]
        table = np.array([[float(x) for x in line.split("\t")] for line in lines if line.strip()])
    except ValueError as error:
        why = first_line(error)
        raise ConfigError(
            f"{setting}: {path} is no table of numbers apart by tabs: {why}"
        ) from error
    if table.ndim != 2 or not (np.abs(table) <= np.finfo(np.float32).max).all():
        raise ConfigError(f"{setting}: {path} holds no lines of finite float32 numbers")
    if not isinstance(of, dict) or not isinstance(of.get("weights", ""), str):
        raise ConfigError(f"{setting}: the first line of {path} does not say of which model it is")
    return table, of


def write_numbers(table: np.ndarray, path: Path, of: dict[str, Any] | None = None) -> None:
    """Writes what `read_numbers` reads; raises InputError as `write_whole`."""
    lines = ["\t".join(f"{x:.6g}" for x in line) for line in table]
    head = [] if of is None else [f"# {json.dumps(of)}"]
    write_whole("".join(f"{line}\n" for line in (*head, *lines)), path)


def shape_of(config: ModelConfig) -> dict[str, Any]:
    """What a file says of a model, beside `Engine.identity`."""
    sizes = {"kv_heads": config.num_kv_heads, "head_dim": config.head_dim}
    return {"family": config.family, "layers": config.num_layers, **sizes}
