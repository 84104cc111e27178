"""A run's configuration: one TOML file, every key of it known, typed and in its range.

    [run]                              [data]
    checkpoint = "llama3"              directory = "data-8k"
    output = "runs/first"              sources = ["docs", "more.jsonl"]
    mesh = "data=2,tensor=2"           length = 8192

and `[pattern]`, `[optimizer]`, `[loop]` with the fields of `Pattern`, `OptimizerConfig` and
`LoopConfig`. Paths are relative to where the command runs.
"""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jax_longctx.settings import from_toml, read_toml
from train_cpt.attention import Pattern
from train_cpt.loop import LoopConfig
from train_cpt.step import Float32OrHalf, OptimizerConfig, Remat


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunOptions:
    """What is trained, where it goes, and how it is computed (see `train_cpt.step.Setup`)."""

    checkpoint: Path
    output: Path
    mesh: str = ""
    dtype: Float32OrHalf = "bfloat16"
    remat: Remat = "full"
    loss_chunk: int = 512


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    """A prepared data set, and what to make it of where it is not there (`train_cpt.data`).

    Attributes:
      length: tokens of a text, L + S.
      sources: files or folders of text, JSON lines, Parquet, or saved `datasets`.
      field: where JSON lines and tables have their text.
      shares: of the documents that go to train, dev and test.
    """

    directory: Path
    length: int
    sources: tuple[Path, ...] = ()
    field: str = "text"
    shares: tuple[float, float, float] = (0.8, 0.1, 0.1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The five sections."""

    run: RunOptions
    data: DataConfig
    optimizer: OptimizerConfig
    pattern: Pattern
    loop: LoopConfig

    def to_dict(self) -> dict[str, Any]:
        """As JSON, paths as text."""
        return json.loads(json.dumps(dataclasses.asdict(self), default=str))


def read_config(path: Path) -> RunConfig:
    """Reads a TOML file.

    Raises:
      InputError: it cannot be read or is no TOML.
      ConfigError: a section or key is missing, unknown, of the wrong type or out of range.
    """
    return parse_config(read_toml(path))


def parse_config(fields: Mapping[str, Any]) -> RunConfig:
    """The configuration of a parsed file; raises ConfigError as `read_config` does."""
    return from_toml(RunConfig, fields)
