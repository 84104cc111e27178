"""The methods by name: one file each in this folder, and those that other packages offer.

A file here that holds a class under `@method` is a method; its name is the file's, with hyphens. A
package elsewhere names its methods in the entry-point group `jax_longctx.methods`, each with its
module. A method is imported at its first use, so names can be checked, listed or completed without
importing JAX, which takes seconds.
"""

import dataclasses
import importlib
import pkgutil
import typing
from collections import UserDict
from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Any

from jax_longctx.errors import ConfigError
from jax_longctx.gone import check_moved, without_gone
from jax_longctx.settings import check_name, look_up, parse_settings, type_name

__all__ = ["METHODS", "check_method", "describe", "make_method", "settings_of"]


class _Classes(UserDict[str, Any]):
    """Classes by name, each given as the module that registers it or as the class itself."""

    def __getitem__(self, name: str) -> Any:
        home = self.data[name]
        if not isinstance(home, str):
            return home
        from jax_longctx.contract import REGISTERED

        try:
            importlib.import_module(home)
        except Exception as error:  # another package's module may raise anything
            said = f"{type(error).__name__}: {error}"
            raise ConfigError(f"method {name!r}: {home} cannot be imported: {said}") from error
        if name not in REGISTERED:
            raise ConfigError(
                f"method {name!r}: {home} registers no method of that name; decorate its class "
                f"with jax_longctx.contract.method and name the file after it"
            )
        return REGISTERED[name]


def _found() -> dict[str, str]:
    """The module of each method; names of this folder win over names of other packages."""
    files = (module.name for module in pkgutil.iter_modules(__path__))
    own = {name.replace("_", "-"): f"{__name__}.{name}" for name in files}
    others = {entry.name: entry.module for entry in entry_points(group="jax_longctx.methods")}
    return {"full": own["full"], **others, **own}


METHODS: UserDict[str, Any] = _Classes(_found())


def __getattr__(name: str) -> Any:
    """The methods' classes by their own names: `from jax_longctx.methods import SnapKV`."""
    for known in METHODS.data:
        if known.replace("-", "") == name.lower():
            return METHODS[known]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def check_method(name: str) -> None:
    """Raises ConfigError when there is no method of that name. Imports none."""
    if name not in METHODS:
        check_moved(name)
    check_name(METHODS, name, "method")


def make_method(name: str, settings: Mapping[str, object] | None = None) -> Any:
    """The method of that name with `--set key=value` settings, typed and validated.

    Settings are text, or values that print as such text. A setting that is a method takes a name,
    and that method's settings follow a dot: `decode=quest`, `decode.budget=512`.

    Raises:
      ConfigError: unknown method, unknown setting, or a value of the wrong type or range.
    """
    from jax_longctx.contract import Method

    check_method(name)
    kind, settings = METHODS[name], without_gone(name, settings or {})
    hints, values = typing.get_type_hints(kind), {}
    for field in dataclasses.fields(kind):
        if hints[field.name] is Method:
            within = field.name + "."
            chosen = str(settings.pop(field.name, settings_of(field.default)["name"]))
            own = {key: settings.pop(key) for key in list(settings) if key.startswith(within)}
            own = {key.removeprefix(within): text for key, text in own.items()}
            values[field.name] = make_method(chosen, own)
    names = [field.name for field in dataclasses.fields(kind)]
    return kind(**values, **parse_settings(kind, settings, noun="method", name=name, names=names))


def describe(name: str) -> dict[str, object]:
    """Metadata and settings (type and default) of a method, JSON-able (`methods --json`)."""
    kind = look_up(METHODS, name, "method")
    hints, info = typing.get_type_hints(kind), dataclasses.asdict(kind().info)
    fields = {field.name: field for field in dataclasses.fields(kind)}
    settings = {
        key: {"type": type_name(hints[key]), "default": _name_of(field.default)}
        for key, field in fields.items()
    }
    return {"name": name, **info, "settings": settings}


def _name_of(value: Any) -> Any:
    """A method's name; any other setting as it is."""
    from jax_longctx.contract import Method

    return settings_of(value)["name"] if isinstance(value, Method) else value


def settings_of(method: object) -> dict[str, Any]:
    """`{"name": ..., "settings": {...}}` of a method, JSON-able; `make_method` takes it back.

    Raises:
      ConfigError: it is none of the methods by name.
    """
    from jax_longctx.contract import Method

    name = getattr(method, "name", "")
    if type(method) is not METHODS.get(name):
        known = ", ".join(METHODS)
        raise ConfigError(f"{type(method).__name__} is not one of the methods {known}")
    settings: dict[str, object] = {}
    for field in dataclasses.fields(typing.cast(Any, method)):
        value = getattr(method, field.name)
        settings[field.name] = _name_of(value)
        if isinstance(value, Method):
            own = settings_of(value)["settings"].items()
            settings |= {f"{field.name}.{key}": inner for key, inner in own}
    return {"name": name, "settings": settings}
