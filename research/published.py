"""Figures that the papers report on tasks of this library, from `published.toml`."""

import tomllib
from pathlib import Path

from jax_longctx.evaluation.config import PublishedTable

PUBLISHED = tuple(
    PublishedTable(**table)
    for table in tomllib.loads(
        Path(__file__).with_name("published.toml").read_text(encoding="utf-8")
    )["table"]
)
