"""Hyper-parameters of a method from and to text: what `--set key=value` means."""

import dataclasses
import typing
from collections.abc import Mapping
from typing import Any

from jax_longctx.contract import Method
from jax_longctx.errors import ConfigError
from jax_longctx.settings import look_up, parse_settings, type_name

__all__ = ["describe_method", "make_from", "method_settings"]


def make_from(table: Mapping[str, type], name: str, settings: Mapping[str, object]) -> Any:
    """The method `name` of `table` with settings given as text, or as values that print as such.

    A setting that is a method is given by name, its own settings behind a dot:
    `decode=quest`, `decode.budget=512`.
    """
    method = look_up(table, name, "method")
    hints = typing.get_type_hints(method)
    values = {}
    for field in dataclasses.fields(method):
        if hints[field.name] is Method:
            within = field.name + "."
            chosen = str(settings.get(field.name, method_settings(table, field.default)["name"]))
            own = {key: text for key, text in settings.items() if key.startswith(within)}
            settings = {k: t for k, t in settings.items() if k not in own and k != field.name}
            own = {key.removeprefix(within): text for key, text in own.items()}
            values[field.name] = make_from(table, chosen, own)
    names = [field.name for field in dataclasses.fields(method)]
    return method(
        **values, **parse_settings(method, settings, noun="method", name=name, names=names)
    )


def describe_method(table: Mapping[str, type], name: str) -> dict[str, object]:
    """Metadata and settings (type and default) of a method of `table`."""
    method = look_up(table, name, "method")
    hints = typing.get_type_hints(method)
    settings = {
        field.name: {
            "type": type_name(hints[field.name]),
            "default": _default(table, field.default),
        }
        for field in dataclasses.fields(method)
    }
    return {"name": name, **dataclasses.asdict(method.info), "settings": settings}


def _default(table: Mapping[str, type], value: Any) -> Any:
    return method_settings(table, value)["name"] if isinstance(value, Method) else value


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
