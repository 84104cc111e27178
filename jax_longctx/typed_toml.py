"""TOML files as frozen dataclasses: every key known, typed, and named where it is wrong."""

import dataclasses
import difflib
import tomllib
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from jax_longctx.errors import ConfigError, InputError

__all__ = ["check_names", "read_toml", "section"]


def read_toml(path: Path) -> dict[str, Any]:
    """The parsed file. Raises InputError when it cannot be read or is no TOML."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:  # TOML and UTF-8
        raise InputError(f"{path} is not TOML: {error}") from error


def section(name: str, kind: Any, given: Mapping[str, Any]) -> Any:
    """The dataclass `kind` with the keys of the section `name`.

    Raises:
      ConfigError: a key is missing, unknown or of the wrong type.
    """
    fields = {field.name: field for field in dataclasses.fields(kind)}
    check_names(given, fields, f"key in [{name}]")
    for key, field in fields.items():
        optional = (field.default, field.default_factory) != (dataclasses.MISSING,) * 2
        if key not in given and not optional:
            raise ConfigError(f"config: [{name}] needs {key}")
    hints = typing.get_type_hints(kind)
    return kind(**{key: _value(f"[{name}] {key}", hints[key], item) for key, item in given.items()})


def check_names(given: Mapping[str, Any], known: Mapping[str, Any], what: str) -> None:
    """Raises ConfigError at the first name that is not known, with the nearest that is."""
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
    elif type(None) in args:
        # TOML has no null: a value that is given is of the other type.
        (inner,) = (part for part in args if part is not type(None))
        return _value(where, inner, value)
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
