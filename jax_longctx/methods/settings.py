"""Hyper-parameters of a method from and to text: what `--set key=value` means."""

import dataclasses
import difflib
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal

from jax_longctx.contract import Method
from jax_longctx.errors import ConfigError

__all__ = ["describe_method", "make_from", "method_settings", "parse_value"]


def _known(table: Mapping[str, type], name: str) -> type:
    if name in table:
        return table[name]
    near = difflib.get_close_matches(name, table, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ConfigError(f"unknown method {name!r}; known: {', '.join(table)}{hint}")


def make_from(table: Mapping[str, type], name: str, settings: Mapping[str, object]) -> Any:
    """The method `name` of `table` with settings given as text, or as values that print as such.

    A setting that is a method is given by name, its own settings behind a dot:
    `decode=quest`, `decode.budget=512`.
    """
    method = _known(table, name)
    hints = typing.get_type_hints(method)
    names = [field.name for field in dataclasses.fields(method)]
    values = {}
    for field in dataclasses.fields(method):
        if hints[field.name] is Method:
            within = field.name + "."
            chosen = str(settings.get(field.name, method_settings(table, field.default)["name"]))
            own = {key: text for key, text in settings.items() if key.startswith(within)}
            settings = {k: t for k, t in settings.items() if k not in own and k != field.name}
            own = {key.removeprefix(within): text for key, text in own.items()}
            values[field.name] = make_from(table, chosen, own)
    for key, text in settings.items():
        if key not in names:
            known = ", ".join(names) or "none"
            raise ConfigError(f"method {name!r} has no setting {key!r}; it has: {known}")
        try:
            values[key] = parse_value(str(text), hints[key])
        except ValueError as error:
            raise ConfigError(f"{name}: setting {key}={text}: {error}") from None
    return method(**values)


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


def describe_method(table: Mapping[str, type], name: str) -> dict[str, object]:
    """Metadata and settings (type and default) of a method of `table`."""
    method = _known(table, name)
    hints = typing.get_type_hints(method)
    settings = {
        field.name: {
            "type": _type_name(hints[field.name]),
            "default": _default(table, field.default),
        }
        for field in dataclasses.fields(method)
    }
    return {"name": name, **dataclasses.asdict(method.info), "settings": settings}


def _default(table: Mapping[str, type], value: Any) -> Any:
    return method_settings(table, value)["name"] if isinstance(value, Method) else value


def _type_name(hint: Any) -> str:
    """`int`, `float | None`, `Literal['max', 'mean']`."""
    return hint.__name__ if isinstance(hint, type) else str(hint).replace("typing.", "")


def method_settings(table: Mapping[str, type], method: Any) -> dict[str, object]:
    """`{"name": ..., "settings": {...}}` of a method instance."""
    for name, kind in table.items():
        if type(method) is kind:
            settings: dict[str, object] = {}
            for field in dataclasses.fields(method):
                value = getattr(method, field.name)
                if not isinstance(value, Method):
                    settings[field.name] = value
                    continue
                inner: Any = method_settings(table, value)
                settings[field.name] = inner["name"]
                for key, own in inner["settings"].items():
                    settings[f"{field.name}.{key}"] = own
            return {"name": name, "settings": settings}
    raise ConfigError(f"{type(method).__name__} is not one of the methods {', '.join(table)}")
