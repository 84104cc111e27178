"""The methods by name. Adding one is a file in this folder and a line of `METHODS`.

A method's class is imported when it is asked for. So a name can be checked, listed or completed
without JAX, whose import takes seconds.
"""

import pkgutil
from collections import UserDict
from collections.abc import Mapping
from typing import Any

from jax_longctx.settings import check_name

__all__ = ["METHODS", "check_method", "describe", "make_method", "settings_of"]


class _Classes(UserDict[str, Any]):
    """Classes by name, each given as `module:Class` or as the class itself."""

    def __getitem__(self, name: str) -> type:
        home = self.data[name]
        return pkgutil.resolve_name(f"{__name__}.{home}") if isinstance(home, str) else home


METHODS: UserDict[str, Any] = _Classes(
    {
        "full": "full:Full",
        "dynamic-ntk": "dynamic_ntk:DynamicNTK",
        "reattention": "reattention:ReAttention",
        "infllm": "infllm:InfLLM",
        "streaming-llm": "streaming_llm:StreamingLLM",
        "h2o": "h2o:H2O",
        "tova": "tova:TOVA",
        "roco": "roco:RoCo",
        "snapkv": "snapkv:SnapKV",
        "refreshkv": "refreshkv:RefreshKV",
        "citrus": "citrus:Citrus",
        "citrus-individual": "citrus_individual:CitrusIndividual",
        "citrus-standard": "citrus:CitrusStandard",
        "h2o-shared": "h2o_shared:H2OShared",
        "quest": "quest:Quest",
        "arkvale": "arkvale:ArkVale",
        "ideal-topk": "ideal_topk:IdealTopK",
        "resa": "resa:Resa",
        "star": "star:Star",
        "ring": "ring:Ring",
    }
)


def __getattr__(name: str) -> Any:
    """The methods' classes by their own names: `from jax_longctx.methods import SnapKV`."""
    for home in METHODS.data.values():
        if isinstance(home, str) and home.endswith(f":{name}"):
            return pkgutil.resolve_name(f"{__name__}.{home}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def check_method(name: str) -> None:
    """Raises ConfigError when there is no method of that name. Imports none."""
    check_name(METHODS, name, "method")


def make_method(name: str, settings: Mapping[str, object] | None = None):
    """The method of that name with `--set key=value` settings, typed and validated.

    Raises:
      ConfigError: unknown method, unknown setting, or a value of the wrong type or range.
    """
    from jax_longctx.methods.settings import make_from

    return make_from(METHODS, name, settings or {})


def describe(name: str) -> dict[str, object]:
    """Metadata and settings of a method, JSON-able (`jax-longctx methods --json`)."""
    from jax_longctx.methods.settings import describe_method

    return describe_method(METHODS, name)


def settings_of(method: object) -> dict[str, object]:
    """A method instance as its name and settings, JSON-able; `make_method` takes it back."""
    from jax_longctx.methods.settings import method_settings

    return method_settings(METHODS, method)
