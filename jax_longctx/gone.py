"""Commands, names and settings of methods that earlier versions had."""

from collections.abc import Mapping
from typing import Any

from jax_longctx.errors import ConfigError

# Commands of earlier versions, and what to type now.
COMMANDS = {
    "eval passkey": "jax-longctx eval run -t passkey --output DIR",
    "eval table": "jax-longctx eval report DIR [DIR ...]",
    **{
        f"eval {name}": f"python -m research eval {name}, in a checkout of the repository"
        for name in ("citrus-overlap", "resa-errors", "resa-spectrum")
    },
    "bench cold": "jax-longctx ask --json twice, and compare their seconds of compile",
    "train collect": "[data] sources = [...] in the run's file, with texts of your own",
    "train plot": "tensorboard --logdir DIR; each run draws its DIR/loss.png",
    "bench throughput": "jax-longctx bench decode --case CONTEXT, without a batch",
    "train bench": "jax-longctx train with few steps; metrics.jsonl has tokens a second and MFU",
    "bench e2e": "jax-longctx bench decode -m full, or bench prefill -m full",
}
# Methods that are in research/ of the repository now.
MOVED = ("star-released-mask",)
# Methods that only imitated released code; what does the same now.
GONE = {"arkvale-paged": "arkvale --offload host", "infllm-accounted": "infllm --offload host"}
_SELECTING = {"count_fixed": False, "alpha": 0.2}
_PAGES = {**_SELECTING, "whole_pages": False, "min_pages": 1}
# Settings that are gone, by method, with the value that the method has now.
SETTINGS: dict[str, dict[str, object]] = {
    "arkvale": _PAGES,
    "citrus": {"score": "probability", "evict_first": False},
    "citrus-individual": {"score": "probability"},
    "citrus-standard": {"score": "probability"},
    "h2o": {"normalize": False},
    "h2o-shared": {"alpha": 1.0, "acc_kind": "sum"},
    "ideal-topk": _SELECTING,
    "infllm": {
        "score": "mass",
        "granularity": "layer",
        "far_distance": None,
        "far_mask": "exact",
    },
    "quest": _PAGES,
    "reattention": {
        "align": 1,
        "selector": "exact",
        "decode_heads": "grouped",
        "position": "contiguous",
        "last_token_decode": True,
        "first_chunk": "paper",
    },
    "refreshkv": {
        "evict_on_push": True,
        "force_self": True,
        "indexed": False,
        "qc_space": "post_rope",
        "ablation": "none",
    },
    "resa": {
        **_SELECTING,
        "digest": "cuboid-mean",
        "lambda_mode": "normalized",
        "growth": "append",
        "rebuild_every": 32,
        "prior_group": "query_head",
    },
    "ring": {"hops": -1},
    "roco": {"scope": "std", "warm_start": True},
    "snapkv": {"decode_policy": "grow", "expand_kv": False},
    "star": {"content": "first", "positions": "first", "constant": 0, "seed": 0},
    "tova": {"protect_current": False},
}
# Methods in research/ that have settings which a method has no more.
APART = {
    ("star", "content"): "star-anchors",
    ("star", "positions"): "star-anchors",
    ("star", "constant"): "star-anchors",
    ("star", "seed"): "star-anchors",
    ("refreshkv", "ablation"): "refreshkv-ablated",
}
RUN = "in a checkout of the repository: python -m research ..."


def check_moved(name: str) -> None:
    """Raises ConfigError for a method that moved or is gone."""
    if name in GONE:
        raise ConfigError(f"method {name!r} is gone; type: -m {GONE[name]}")
    if name in MOVED:
        raise ConfigError(f"method {name!r} moved to research/; type, {RUN} -m {name}")


def without_gone(name: str, settings: Mapping[str, object]) -> dict[str, object]:
    """The settings without those that are gone, which must be as the method is now.

    Raises:
      ConfigError: one of them has another value.
    """
    kept = dict(settings)
    for key, now in SETTINGS.get(name, {}).items():
        given = kept.pop(key, now)
        if not _same(given, now):
            apart = APART.get((name, key))
            told = f"; type, {RUN} -m {apart}:{key}={given}" if apart else ""
            raise ConfigError(
                f"{name}: setting {key} is gone, and {name} is as with {key}={now}; what was "
                f"given or saved has {key}={given}{told}"
            )
    return kept


def _same(given: object, now: object) -> bool:
    """Whether a value, given as it is or as text, is the one that a method has now."""
    try:
        return float(str(given)) == float(str(now))
    except ValueError:
        return str(given).lower() == str(now).lower()


def current(described: Any) -> Any:
    """A JSON value whose methods, `{"name" or "method", "settings"}`, lack what is gone."""
    if isinstance(described, list):
        return [current(each) for each in described]
    if not isinstance(described, Mapping):
        return described
    found = {key: current(value) for key, value in described.items()}
    name, settings = found.get("name", found.get("method")), found.get("settings")
    if isinstance(name, str) and isinstance(settings, Mapping):
        gone = dict(SETTINGS.get(name, {}))
        for key, inner in settings.items():
            # A setting that is a method, whose own settings follow a dot.
            own = SETTINGS.get(inner, {}) if isinstance(inner, str) else {}
            gone |= {f"{key}.{each}": now for each, now in own.items()}
        same = {key for key, now in gone.items() if key in settings and settings[key] == now}
        found["settings"] = {key: value for key, value in settings.items() if key not in same}
    return found
