"""Every method with settings that fit the tests' tiny models, those of other packages too."""

import dataclasses
from pathlib import Path
from typing import Any

from jax_longctx.methods import METHODS, make_method
from jax_longctx.parts.compressing import Compressing
from jax_longctx.settings import THEN, named_text

__all__ = ["APART", "EVERYTHING", "KINDS", "SMALL", "small_method"]

# One of each kind of method, for what methods of a kind do alike.
KINDS = (
    *("full", "star", "snapkv", "refreshkv", "h2o", "citrus", "r-kv"),
    *("quest", "infllm", "reattention", "free-pages"),
)

# Methods that most tests of all methods cannot tell from the one that they vary: the difference is
# within a layer. They have tests of their own.
_VARIANTS = ("citrus-individual", "h2o-shared", "dynamic-ntk", "keydiff", "lagkv", "random")
_VARIANTS += ("triattention", "q-filters")
APART = [name for name in METHODS if name not in _VARIANTS]

_Settings = dict[str, object]
FILTERS = Path(__file__).with_name("q_filters.tsv")
# Methods of no kind; a kind's settings serve all methods that have them.
_REATTENTION: _Settings = {
    "global_size": 4,
    "local_size": 32,
    "span": 4,
    "count": 2,
    "kept": 8,
    "chunk": 16,
}
_FREE: _Settings = {
    "sink": 4,
    "local": 32,
    "span": 12,
    "budget": 24,
    "page_size": 8,
    "count": 1,
    "chunk": 16,
    "lam": 0.5,
}
_INFLLM: _Settings = {
    "n_init": 4,
    "n_local": 32,
    "block_size": 8,
    "topk": 2,
    "repr_topk": 2,
    "chunk": 16,
}
_SMALL: dict[str, _Settings] = {
    "reattention": _REATTENTION,
    "free-pages": _FREE,
    "infllm": _INFLLM,
    "snapkv": {"budget": 48, "window": 8},
    "refreshkv": {"budget": 48, "stride": 3, "schedule": "fixed"},
    "star": {"block": 32},
    "r-kv": {"budget": 48, "interval": 4},
    "triattention": {"budget": 48, "interval": 4},
    "duo-attention": {"heads": "10", "sink": 4, "recent": 16},
}
_EVERYTHING: dict[str, _Settings] = {
    "reattention": _REATTENTION | {"local_size": 100, "kept": 4},
    "free-pages": _FREE | {"local": 80},
    "infllm": _INFLLM | {"n_local": 100},
    "star": {"block": 128},
    "duo-attention": {"heads": "1"},
}


def _rows(
    own: dict[str, _Settings], evicting: _Settings, selecting: _Settings, compressing: _Settings
) -> dict[str, _Settings]:
    """A method's own row, or what it has of its kind's settings: what evicts reads in chunks."""

    def row(kind: Any) -> _Settings:
        names = {field.name for field in dataclasses.fields(kind)}
        settings = evicting if "chunk" in names else selecting
        settings = compressing if issubclass(kind, Compressing) else settings
        return {name: value for name, value in settings.items() if name in names}

    return {name: own[name] if name in own else row(kind) for name, kind in METHODS.items()}


SMALL = _rows(
    _SMALL,
    {"budget": 48, "chunk": 16},
    {"budget": 16, "page_size": 8, "local": 16},
    {"budget": 24, "local": 8, "lag": 8, "chunk": 16, "filters": str(FILTERS)},
)
# Settings under which nothing leaves and everything is read, of texts below some 60 tokens.
EVERYTHING = _rows(
    _EVERYTHING,
    {"budget": 112, "chunk": 16},
    {"budget": 256},
    {"budget": 112, "chunk": 16, "filters": str(FILTERS)},
)


def small_method(name: str):
    """The method, or pair, with its small settings; KeyError names one that there is not."""
    parts = name.split(THEN)
    if len(parts) == 1:
        return make_method(name, SMALL[name])
    return make_method(THEN.join(named_text(part, SMALL[part]) for part in parts))
