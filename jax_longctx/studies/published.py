"""Figures that the papers report on tasks of this library, from `published.toml`."""

import dataclasses
import tomllib
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class PublishedTable:
    """One table of a paper.

    Attributes:
      paper: as suites name it.
      title: paper, table, model, length.
      note: how the paper made it.
      tasks: our names of its columns.
      rows: the paper's name of a method -> `method`, ours with its settings as `Spec.parse` reads
        it, and `values`, one for each task.
    """

    paper: str
    title: str
    note: str
    tasks: list[str]
    rows: dict[str, dict]


PUBLISHED = tuple(
    PublishedTable(**table)
    for table in tomllib.loads(
        Path(__file__).with_name("published.toml").read_text(encoding="utf-8")
    )["table"]
)
