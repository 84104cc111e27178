"""What the implementations share: types of arrays, checks, masks, groups of heads, merges.

Letters: B batch, T queries, S slots, N query heads, K kv heads, G = N / K, H head dim, R rows.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Float, Int, Shaped

from pallas_kernels.plane import Plane, each_array
from pallas_kernels.quantised import AnyStored, Quantised, dequantised

# Arrays of an attention: queries or outputs; a number for each query and head, as its log-sum-exp;
# a cache's keys or values, in 8 bits too (`Stored`), or of one layer of many (`AnyCache`); a number
# for each row of the batch; each row's first slot that counts and the one after the last; a chunk's
# own keys or values; and (output, log-sum-exp), which an attention returns.
Queries = Float[Array, "B T N H"]
PerQuery = Float[Array, "B T N"]
Cache = Float[Array, "B K S H"]
Stored = Cache | Quantised
AnyCache = Stored | Plane
PerRow = Int[Array, " B"]
Bounds = tuple[PerRow, PerRow]
Chunk = Float[Array, "B T K H"]
Attended = tuple[Queries, PerQuery]

# The score of a masked slot: exp(MASKED - m) is 0 for every real score m, and unlike -inf it never
# makes NaN.
MASKED = float(jnp.finfo(jnp.float32).min)
# Slots that become floats at once, for kernels that read floats alone; slots of a kernel's tile.
BLOCK, _TILE = 8192, 128


@dataclass(frozen=True)
class Capped:
    """A scale under which q.k becomes the score cap * tanh(factor * q.k / cap); both above 0."""

    factor: float
    cap: float


# The factor of scores, or that and their cap.
Scale = float | Capped


def factor_of(scale: Scale) -> float:
    """What q.k is multiplied with."""
    return scale.factor if isinstance(scale, Capped) else scale


def cap_of(scale: Scale) -> float | None:
    """The cap, if there is one."""
    return scale.cap if isinstance(scale, Capped) else None


def capped(scores: Array, scale: Scale) -> Array:
    """Products of q.k and `factor_of(scale)` as scores; -inf stays -inf."""
    if not isinstance(scale, Capped):
        return scores
    return jnp.where(scores > -jnp.inf, scale.cap * jnp.tanh(scores / scale.cap), -jnp.inf)


def cut(x: Any, start: Any, size: int) -> Any:
    """`size` slots from `start` on of every row and head, as they are stored."""

    def one(part: Any) -> Array:
        if isinstance(part, Plane):
            return part.cut(start, size)
        return jax.lax.dynamic_slice_in_dim(part, start, size, axis=2)

    return each_array(one, x)


def quotient(x: Any, size: int) -> Any:
    """`x // size` of numbers that are not negative.

    One operation: to round those below zero down as well takes ten, which are traced and compiled.
    """
    return jax.lax.div(x, np.asarray(size, x.dtype)) if isinstance(x, Array) else x // size


def block_of(x: Any, start: Any, size: int) -> Shaped[Array, "B K C H"]:
    """`cut`, as numbers."""
    return dequantised(cut(x, start, size))


def block_size(slots: int, most: int = BLOCK) -> int:
    """Slots of a block, at most `most`: a divisor of `slots`, of whole tiles where these are."""
    tile = math.gcd(slots, _TILE)
    tiles = max(min(most, slots) // tile, 1)
    return tile * next(n for n in range(tiles, 0, -1) if slots // tile % n == 0)


def check_heads(operation: str, q: Array, *caches: AnyStored, kv_axis: int = 1) -> None:
    """Raise ValueError unless q [B,...,N,H] fits the caches, whose kv heads are axis `kv_axis`."""
    fits = all(
        q.ndim in (3, 4)
        and x.ndim == 4
        and x.shape == caches[0].shape
        and x.dtype == q.dtype
        and (x.shape[0], x.shape[3]) == (q.shape[0], q.shape[-1])
        and min(q.shape + x.shape) > 0
        and q.shape[-2] % x.shape[kv_axis] == 0
        for x in caches
    )
    if not fits:
        shown = " and ".join(f"{x.dtype}{x.shape}" for x in caches)
        raise ValueError(
            f"{operation}: q {q.dtype}{q.shape} does not fit {shown} of the cache; expected one "
            "dtype, batch and head dim, no empty axis, and query heads a multiple of kv heads"
        )


def fold_rows(x: Shaped[Array, "B N *H"], kv_heads: int) -> Shaped[Array, "1 M *H"]:
    """Of B rows of N query heads one row of M = B N heads, in the order of their kv heads."""
    b, n, *rest = x.shape
    x_KBG = jnp.swapaxes(x.reshape(b, kv_heads, n // kv_heads, *rest), 0, 1)
    return x_KBG.reshape(1, b * n, *rest)


def unfold_rows(x: Shaped[Array, "1 M *H"], rows: int, kv_heads: int) -> Shaped[Array, "B N *H"]:
    """`fold_rows` undone."""
    _, m, *rest = x.shape
    x_KBG = x.reshape(kv_heads, rows, m // rows // kv_heads, *rest)
    return jnp.swapaxes(x_KBG, 0, 1).reshape(rows, m // rows, *rest)


def pack_rows(x: Shaped[Array, "B T N *H"], kv_heads: int) -> Shaped[Array, "B K R *H"]:
    """Queries, or numbers for them, as rows t * G + g of their kv head; no copy for one query."""
    b, t, n, *rest = x.shape
    x_BTKG = x.reshape(b, t, kv_heads, n // kv_heads, *rest)
    return jnp.swapaxes(x_BTKG, 1, 2).reshape(b, kv_heads, t * n // kv_heads, *rest)


def unpack_rows(x: Shaped[Array, "B K R *H"], queries: int) -> Shaped[Array, "B T N *H"]:
    """Undo `pack_rows`."""
    b, k, r, *rest = x.shape
    x_BTKG = jnp.swapaxes(x.reshape(b, k, queries, r // queries, *rest), 1, 2)
    return x_BTKG.reshape(b, queries, k * r // queries, *rest)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Window:
    """Only slots less than `size` before a query are seen.

    Slot s stands at position slot_start + s, query t of row b at query_start[b] + t.
    """

    size: int = field(metadata=dict(static=True))
    query_start: PerRow
    slot_start: Int[Array, ""] | int = 0

    def sees(self, slots: Int[Array, " C"], queries: Int[Array, " T"]) -> Bool[Array, "B T C"]:
        """Whether each of the queries sees each of the slots."""
        position_BT = self.query_start[:, None] + queries
        return position_BT[:, :, None] - (self.slot_start + slots) < self.size


def group_heads(q: Queries, kv_heads: int) -> Float[Array, "B K G T H"]:
    """Give every kv head its group of query heads; query head n reads kv head n // G."""
    b, t, n, h = q.shape
    q_BTKGH = q.reshape(b, t, kv_heads, n // kv_heads, h)
    return jnp.moveaxis(q_BTKGH, 1, 3)


def ungroup_heads(x: Float[Array, "B K G T *H"]) -> Float[Array, "B T N *H"]:
    """Undo `group_heads`, for outputs [B,K,G,T,H] and for log-sum-exps [B,K,G,T]."""
    x_BTKG = jnp.moveaxis(x, 3, 1)
    b, t, k, g, *rest = x_BTKG.shape
    return x_BTKG.reshape(b, t, k * g, *rest)


def blank_rows(out: Queries, lse: PerQuery, empty_B: Bool[Array, " B"]) -> tuple[Array, Array]:
    """Out 0 and log-sum-exp -inf for the batch rows that see nothing."""
    empty_B11 = empty_B[:, None, None]
    return jnp.where(empty_B11[..., None], 0, out), jnp.where(empty_B11, -jnp.inf, lse)


def merge(
    parts: Sequence[tuple[Float[Array, "*B H"], Float[Array, "*B"]]],
) -> tuple[Float[Array, "*B H"], Float[Array, "*B"]]:
    """The attention over all parts' keys; `out` in the first part's dtype, `lse` in float32.

    A part over some of the keys is (out, lse): the softmax-weighted mean of its values, and the
    natural log of its softmax's denominator, -inf where a query saw no key. Parts over disjoint
    keys merge exactly: m = max lse_i, w_i = exp(lse_i - m), out = sum w_i out_i / sum w_i, and
    lse = m + log sum w_i, in float32. XLA fuses it into one pass over the parts.

    A part whose lse is -inf has no weight, whatever its out holds; where every part is empty the
    result is out 0 and lse -inf.
    """
    if not parts:
        raise ValueError("merge: no parts to merge; expected at least one (out, lse)")
    lses = [lse.astype(jnp.float32) for _, lse in parts]
    top = lses[0]
    for lse in lses[1:]:
        top = jnp.maximum(top, lse)
    empty = jnp.isneginf(top)
    base = jnp.where(empty, 0.0, top)  # -inf - -inf would be NaN
    weights = [jnp.exp(lse - base) for lse in lses]
    total = sum(weights)
    out = sum(
        # An empty part may carry garbage, and 0 x NaN is NaN.
        jnp.where(weight[..., None] > 0, weight[..., None] * part.astype(jnp.float32), 0.0)
        for weight, (part, _) in zip(weights, parts, strict=True)
    )
    total = jnp.where(empty, 1.0, total)
    out = out / total[..., None]
    return out.astype(parts[0][0].dtype), jnp.where(empty, -jnp.inf, base + jnp.log(total))


def side_by_side(
    *parts: tuple[Float[Array, "B _ N H"], Float[Array, "B _ N"]],
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:
    """Concatenate the attentions of consecutive runs of queries."""
    outs, lses = zip(*parts, strict=True)
    return jnp.concatenate(outs, axis=1), jnp.concatenate(lses, axis=1)
