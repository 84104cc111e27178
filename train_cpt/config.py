"""A run's configuration: one TOML file, every key of it known, typed and in its range.

    [run]                              [data]
    checkpoint = "llama3"              directory = "data-8k"
    output = "runs/first"              sources = ["docs", "more.jsonl"]
    mesh = "data=2,tensor=2"           length = 8192

and `[pattern]`, `[optimizer]`, `[loop]` with the fields of `Pattern`, `OptimizerConfig` and
`LoopConfig`. Paths are relative to where the command runs.
"""

import dataclasses
import difflib
import tomllib
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from jax_longctx.errors import ConfigError, InputError
from train_cpt.attention import Pattern
from train_cpt.forward import Remat
from train_cpt.loop import LoopConfig
from train_cpt.step import Float32OrHalf, OptimizerConfig

__all__ = ["DataConfig", "RunConfig", "RunOptions", "parse_config", "read_config"]


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
        return {
            section.name: {
                name: _as_json(value)
                for name, value in dataclasses.asdict(getattr(self, section.name)).items()
            }
            for section in dataclasses.fields(self)
        }


def read_config(path: Path) -> RunConfig:
    """Reads a TOML file.

    Raises:
      InputError: it cannot be read or is no TOML.
      ConfigError: a section or key is missing, unknown, of the wrong type or out of range.
    """
    try:
        fields = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:  # TOML and UTF-8
        raise InputError(f"{path} is not TOML: {error}") from error
    return parse_config(fields)


def parse_config(fields: Mapping[str, Any]) -> RunConfig:
    """The configuration of a parsed file; raises ConfigError as `read_config` does."""
    sections = {field.name: field.type for field in dataclasses.fields(RunConfig)}
    _check_names(fields, sections, "section")
    parsed = {}
    for name, kind in typing.get_type_hints(RunConfig).items():
        given = fields.get(name, {})
        if not isinstance(given, Mapping):
            raise ConfigError(f"config: {name} must be a section [{name}], got {given!r}")
        parsed[name] = _section(name, kind, given)
    return RunConfig(**parsed)


def _section(section: str, kind: Any, given: Mapping[str, Any]) -> Any:
    fields = {field.name: field for field in dataclasses.fields(kind)}
    _check_names(given, fields, f"key in [{section}]")
    for name, field in fields.items():
        if name not in given and field.default is dataclasses.MISSING:
            raise ConfigError(f"config: [{section}] needs {name}")
    hints = typing.get_type_hints(kind)
    return kind(
        **{name: _value(f"[{section}] {name}", hints[name], value) for name, value in given.items()}
    )


def _check_names(given: Mapping[str, Any], known: Mapping[str, Any], what: str) -> None:
    for name in given:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]}?" if close else f"known: {', '.join(known)}"
            raise ConfigError(f"config: unknown {what}: {name}; {hint}")


def _value(where: str, kind: Any, value: Any) -> Any:
    """The value as a field's type; a whole number is taken for a float, nothing else changes."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        if value in args and isinstance(value, str):
            return value
        expected = f"one of {', '.join(args)}"
    elif origin is tuple:
        kinds = args[:1] * len(value) if args[-1] is ... and isinstance(value, list) else args
        if isinstance(value, list) and len(value) == len(kinds):
            return tuple(_value(where, part, item) for part, item in zip(kinds, value, strict=True))
        expected = "a list" if args[-1] is ... else f"a list of {len(args)}"
    elif kind is Path and isinstance(value, str):
        return Path(value)
    elif kind is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    elif isinstance(value, kind) and (kind is bool or not isinstance(value, bool)):
        return value
    else:
        names = {Path: "a path", float: "a number", int: "a whole number", str: "a text"}
        expected = names.get(kind, "true or false")
    raise ConfigError(f"config: {where} must be {expected}, got {value!r}")


def _as_json(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_as_json(item) for item in value]
    return str(value) if isinstance(value, Path) else value
