"""A plain numpy decoder that materialises everything; computes nothing with the library's code.

`forward` runs one row of tokens through all layers and hands each layer's raw queries, keys and
values (before rotary embedding) to `attend`, which returns the attention output.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from jax_longctx.models.params import layer_params

__all__ = ["causal_attend", "forward", "probabilities", "rope", "to_numpy"]


def to_numpy(tree: Any) -> Any:
    """A nested dict of arrays as float64 numpy; of parameters, each layer apart."""
    if isinstance(tree, dict):
        if "layers" in tree and "0" not in tree["layers"]:
            count = len(tree["layers"]["attn_norm"]["scale"])
            layers = {str(index): layer_params(tree, index) for index in range(count)}
            tree = {**tree, "layers": layers}
        return {key: to_numpy(value) for key, value in tree.items()}
    return np.asarray(tree, np.float64)


def rms_norm(x: np.ndarray, scale: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * scale


def rope(x: np.ndarray, positions: np.ndarray, theta: float) -> np.ndarray:
    """`[T, heads, H]` rotated at `positions`, rotate-half convention."""
    half = x.shape[-1] // 2
    angles = positions[:, None] * theta ** (-np.arange(half) / half)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    first, second = x[..., :half], x[..., half:]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


def probabilities(
    q: np.ndarray, k: np.ndarray, visible: np.ndarray, sinks: Any = None
) -> np.ndarray:
    """Softmax rows `[N, T, S]` of rotated q `[T, N, H]`, k `[S, K, H]` under a mask `[T, S]`.

    The mask may be each head's own, `[N, T, S]`. Logits `sinks` `[N]` are one more column, which is
    left out.
    """
    group = q.shape[1] // k.shape[1]
    keys = np.repeat(k, group, axis=1)
    logits = np.einsum("tnh,snh->nts", q, keys) * q.shape[-1] ** -0.5
    logits = np.where(visible, logits, -np.inf)
    top = logits.max(-1, keepdims=True)
    weights = np.exp(logits - top)
    more = 0.0 if sinks is None else np.exp(sinks[:, None, None] - top)
    return weights / (weights.sum(-1, keepdims=True) + more)


def weighted_values(p: np.ndarray, v: np.ndarray) -> np.ndarray:
    """`[T, N, H]` from probabilities `[N, T, S]` and values `[S, K, H]`."""
    group = p.shape[0] // v.shape[1]
    return np.einsum("nts,snh->tnh", p, np.repeat(v, group, axis=1))


def causal_attend(theta: float) -> Callable[..., np.ndarray]:
    """Full causal attention at true positions, for `forward`."""

    def attend(layer: int, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        at = np.arange(len(q))
        p = probabilities(rope(q, at, theta), rope(k, at, theta), at[:, None] >= at[None, :])
        return weighted_values(p, v)

    return attend


def forward(config: Any, params: Any, tokens: list[int], attend: Callable[..., np.ndarray]) -> Any:
    """Logits `[T, V]` of one row; `params` from `to_numpy`. Llama without biases or q/k norm."""
    x = params["embed"]["table"][tokens]
    for index in range(config.num_layers):
        layer = params["layers"][str(index)]
        h = rms_norm(x, layer["attn_norm"]["scale"], config.norm_eps)
        q, k, v = (np.einsum("td,dnh->tnh", h, layer["attn"][name]) for name in "qkv")
        x = x + np.einsum("tnh,nhd->td", attend(index, q, k, v), layer["attn"]["o"])
        h = rms_norm(x, layer["mlp_norm"]["scale"], config.norm_eps)
        gate = h @ layer["mlp"]["gate"]
        x = x + (gate / (1 + np.exp(-gate)) * (h @ layer["mlp"]["up"])) @ layer["mlp"]["down"]
    x = rms_norm(x, params["final_norm"]["scale"], config.norm_eps)
    return x @ params[("head" if "head" in params else "embed")]["table"].T
