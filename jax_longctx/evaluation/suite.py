"""Evaluations by name: the TOML files of the folder `suites` beside this module.

`paper:NAME` is the file `paper_NAME.toml`.
"""

import difflib
from pathlib import Path

from jax_longctx.errors import InputError
from jax_longctx.evaluation.config import EvalConfig, read_config

__all__ = ["read_suite", "suites"]

FOLDER = Path(__file__).parent / "suites"


def suites() -> list[str]:
    """All names."""
    return sorted(path.stem.replace("_", ":", 1) for path in FOLDER.glob("*.toml"))


def read_suite(name: str) -> EvalConfig:
    """The evaluation of that name. Raises InputError where there is none."""
    known = suites()
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise InputError(f"unknown suite {name!r}; known: {', '.join(known)}{hint}")
    return read_config(FOLDER / f"{name.replace(':', '_', 1)}.toml")
