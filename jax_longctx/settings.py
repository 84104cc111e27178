"""Settings of a frozen dataclass from text: what `--set key=value` means."""

import difflib
import types
import typing
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Literal

from jax_longctx.errors import ConfigError

__all__ = ["check_name", "look_up", "parse_settings", "parse_value", "type_name"]


def look_up[T](table: Mapping[str, T], name: str, noun: str) -> T:
    """`table[name]`; ConfigError as of `check_name`."""
    check_name(table, name, noun)
    return table[name]


def check_name(table: Collection[str], name: str, noun: str) -> None:
    """ConfigError unless the name is known: lists the known ones, and the nearest of them."""
    if name in table:
        return
    near = difflib.get_close_matches(name, table, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ConfigError(f"unknown {noun} {name!r}; known: {', '.join(table)}{hint}")


def parse_settings(
    kind: type,
    settings: Mapping[str, object],
    *,
    noun: str,
    name: str,
    names: Iterable[str],
) -> dict[str, Any]:
    """Values of the fields `names` of `kind`, from text or from values that print as such.

    Args:
      noun, name: what the dataclass is, in errors: the method 'citrus'.

    Raises:
      ConfigError: a setting that is none of `names`, or text that is no value of its type.
    """
    names, hints, values = list(names), typing.get_type_hints(kind), {}
    for key, text in settings.items():
        if key not in names:
            known = ", ".join(names) or "none"
            raise ConfigError(f"{noun} {name!r} has no setting {key!r}; it has: {known}")
        try:
            values[key] = parse_value(str(text), hints[key])
        except ValueError as error:
            raise ConfigError(f"{name}: setting {key}={text}: {error}") from None
    return values


def parse_value(text: str, hint: Any) -> Any:
    """`text` as a value of the annotated type; ValueError says what was expected."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union) and type(None) in args:
        if text.lower() == "none":
            return None
        (inner,) = (arg for arg in args if arg is not type(None))
        return parse_value(text, inner)
    if origin is Literal:
        for choice in args:
            if text == str(choice):
                return choice
        raise ValueError(f"expected one of {', '.join(map(str, args))}")
    if hint is bool:
        if text.lower() in ("true", "false"):
            return text.lower() == "true"
        raise ValueError("expected true or false")
    if hint in (int, float):
        try:
            return hint(text)
        except ValueError:
            noun = "a whole number" if hint is int else "a number"
            raise ValueError(f"expected {noun}") from None
    if hint is str:
        return text
    raise TypeError(f"settings of type {hint} cannot be given as text")


def type_name(hint: Any) -> str:
    """`int`, `float | None`, `Literal['max', 'mean']`."""
    return hint.__name__ if isinstance(hint, type) else str(hint).replace("typing.", "")
