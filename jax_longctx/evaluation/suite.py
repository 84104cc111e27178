"""Evaluations by name: the TOML files of `suites` beside this module, and of the papers' studies.

`paper:NAME` is the file `NAME.toml` of `jax_longctx/studies/suites`.
"""

import difflib
from pathlib import Path

from jax_longctx.errors import InputError
from jax_longctx.evaluation.config import EvalConfig, read_config

FOLDER = Path(__file__).parent / "suites"
PAPERS = Path(__file__).parents[1] / "studies" / "suites"


def _files() -> dict[str, Path]:
    own, papers = ({path.stem: path for path in f.glob("*.toml")} for f in (FOLDER, PAPERS))
    return dict(sorted((own | {f"paper:{name}": path for name, path in papers.items()}).items()))


def suites() -> list[str]:
    """All names."""
    return list(_files())


def read_suite(name: str) -> EvalConfig:
    """The evaluation of that name. Raises InputError where there is none."""
    known = _files()
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise InputError(f"unknown suite {name!r}; known: {', '.join(known)}{hint}")
    return read_config(known[name])
