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

from jax_longctx.errors import ConfigError, InputError
from jax_longctx.gone import check_moved, without_gone
from jax_longctx.settings import (
    PAIR,
    THEN,
    check_name,
    parse_named,
    parse_settings,
    settings_within,
    type_name,
)

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
    """Raises ConfigError when there is no method of that name, or pair. Imports none."""
    for each in parse_named(name)[0].split(THEN):
        if each not in METHODS:
            check_moved(each)
        check_name(METHODS, each, "method")


def make_method(name: str, settings: Mapping[str, object] | None = None) -> Any:
    """The method of that name with `--set key=value` settings, typed and validated.

    Settings are text, or values that print as such text. A setting that is a method takes a name,
    and that method's settings follow a dot: `decode=quest`, `decode.budget=512`. A name may have
    settings after a colon, and name two methods, of which the second follows the first:
    `"snapkv:budget=8192 > quest:budget=1024"`.

    Raises:
      ConfigError: unknown method, unknown setting, or a value of the wrong type or range, or two
        methods that cannot follow one another.
      InputError: a name that is not understood.
    """
    from jax_longctx.contract import Method

    check_method(name)
    (name, own), settings = parse_named(name), dict(settings or {})
    for key, value in own:
        if settings.setdefault(key, value) is not value:
            raise InputError(f"setting {key} of {name} is given twice; give it once")
    if THEN in name:
        return _pair(name, settings)
    kind, settings = METHODS[name], without_gone(name, settings)
    hints, values = typing.get_type_hints(kind), {}
    for field in dataclasses.fields(kind):
        if hints[field.name] is Method:
            chosen = str(settings.get(field.name, settings_of(field.default)["name"]))
            values[field.name] = make_method(chosen, settings_within(field.name, settings))
            others = [key for key in settings if key.partition(".")[0] != field.name]
            settings = {key: settings[key] for key in others}
    names = [field.name for field in dataclasses.fields(kind)]
    return kind(**values, **parse_settings(kind, settings, noun="method", name=name, names=names))


def _pair(name: str, settings: Mapping[str, object]) -> Any:
    """`make_method` of two methods."""
    from jax_longctx.parts.following import Following

    for key in settings:
        if not key.startswith(tuple(f"{which}." for which in PAIR)):
            raise ConfigError(
                f"method {name!r} has no setting {key!r}; those of its two methods are first.KEY "
                f"and second.KEY"
            )
    parts = zip(PAIR, name.split(THEN), strict=True)
    made = {which: make_method(part, settings_within(which, settings)) for which, part in parts}
    return Following(**made)


def _parts(method: object) -> dict[str, Any]:
    """The two methods of a pair by `PAIR`; none of any other method."""
    from jax_longctx.parts.following import Following

    return {which: getattr(method, which) for which in PAIR} if type(method) is Following else {}


def describe(name: str) -> dict[str, object]:
    """Metadata and settings (type and default) of a method, JSON-able (`methods --json`)."""
    made = make_method(name)
    info, parts = dataclasses.asdict(made.info), _parts(made)
    kinds = {f"{which}.": type(part) for which, part in parts.items()} or {"": type(made)}
    settings = {
        before + field.name: {
            "type": type_name(typing.get_type_hints(kind)[field.name]),
            "default": _name_of(field.default),
        }
        for before, kind in kinds.items()
        for field in dataclasses.fields(kind)
    }
    return {"name": made.name, **info, "settings": settings}


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

    settings: dict[str, object] = {}
    if parts := {which: settings_of(part) for which, part in _parts(method).items()}:
        for which, part in parts.items():
            settings |= {f"{which}.{key}": value for key, value in part["settings"].items()}
        return {"name": THEN.join(part["name"] for part in parts.values()), "settings": settings}
    name = getattr(method, "name", "")
    if type(method) is not METHODS.get(name):
        known = ", ".join(METHODS)
        raise ConfigError(f"{type(method).__name__} is not one of the methods {known}")
    for field in dataclasses.fields(typing.cast(Any, method)):
        value = getattr(method, field.name)
        settings[field.name] = _name_of(value)
        if isinstance(value, Method):
            own = settings_of(value)["settings"].items()
            settings |= {f"{field.name}.{key}": inner for key, inner in own}
    return {"name": name, "settings": settings}
