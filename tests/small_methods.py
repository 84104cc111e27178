"""Every method of the library with settings that fit the tests' tiny models."""

from jax_longctx.methods import make_method

__all__ = ["SMALL", "small_method"]

_BUDGET = {"budget": 48, "chunk": 16}
_SELECTION = {"budget": 16, "page_size": 8, "local": 16}
SMALL: dict[str, dict[str, object]] = {
    "full": {},
    "dynamic-ntk": {},
    "streaming-llm": _BUDGET,
    "h2o": _BUDGET,
    "tova": _BUDGET,
    "roco": _BUDGET,
    "reattention": {
        "global_size": 4,
        "local_size": 32,
        "span": 4,
        "count": 2,
        "kept": 8,
        "chunk": 16,
    },
    "infllm": {
        "n_init": 4,
        "n_local": 32,
        "block_size": 8,
        "topk": 2,
        "repr_topk": 2,
        "chunk": 16,
    },
    "snapkv": {"budget": 48, "window": 8},
    "refreshkv": {"budget": 48, "stride": 3, "schedule": "fixed"},
    "citrus": _BUDGET,
    "citrus-individual": _BUDGET,
    "citrus-standard": _BUDGET,
    "h2o-shared": _BUDGET,
    "quest": _SELECTION,
    "arkvale": _SELECTION,
    "ideal-topk": {"budget": 16, "local": 16},
    "resa": _SELECTION,
    "star": {"block": 32},
    "arkvale-paged": {**_SELECTION, "resident": 32},
    "star-released-mask": {"block": 32},
    "ring": {},
}


def small_method(name: str):
    """The method with its small settings; KeyError names one that has none here."""
    return make_method(name, SMALL[name])


_ALL = {"budget": 112, "chunk": 16}
# Settings under which nothing leaves and everything is read, of texts below some 60 tokens.
EVERYTHING: dict[str, dict[str, object]] = {
    "full": {},
    "dynamic-ntk": {},
    "streaming-llm": _ALL,
    "h2o": _ALL,
    "tova": _ALL,
    "roco": _ALL,
    "reattention": {
        "global_size": 4,
        "local_size": 100,
        "span": 4,
        "count": 2,
        "kept": 4,
        "chunk": 16,
    },
    "infllm": {
        "n_init": 4,
        "n_local": 100,
        "block_size": 8,
        "topk": 2,
        "repr_topk": 2,
        "chunk": 16,
    },
    "snapkv": {"budget": 256},
    "refreshkv": {"budget": 256},
    "citrus": _ALL,
    "citrus-individual": _ALL,
    "citrus-standard": _ALL,
    "h2o-shared": _ALL,
    "quest": {"budget": 256},
    "arkvale": {"budget": 256},
    "ideal-topk": {"budget": 256},
    "resa": {"budget": 256},
    "star": {"block": 128},
    "arkvale-paged": {"budget": 256},
    "star-released-mask": {"block": 128},
    "ring": {},
}
