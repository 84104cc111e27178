"""Streaming attention of up to 64 query rows on Hopper: the step, its end, and the merge.

The rows of one kv head's group stand together in one wgmma, so that keys and values are read once
for the whole group; a wgmma takes 64 rows, of which one query of a group uses G.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Float

from pallas_kernels import hopper
from pallas_kernels.common import MASKED
from pallas_kernels.lse import merge

# Columns of the result that leave together, and the rows of the buffer through which they do.
COLUMNS = 32
_OUT_ROWS = 80
# Parts that are merged without a reduction.
_FEW_PARTS = 8

# Weighted values [64,H], largest logit (in units of log 2) and sum of weights [64], in registers.
Carry = tuple[Array, Array, Array]


def start(head_dim: int) -> Carry:
    """Nothing attended yet."""
    rows = hopper.ROWS, plgpu.Layout.WGMMA.reduce(1)
    return (
        hopper.full((hopper.ROWS, head_dim), 0.0),
        hopper.full(rows[:1], MASKED, layout=rows[1]),
        hopper.full(rows[:1], 0.0, layout=rows[1]),
    )


def step(
    carry: Carry,
    q: Any,
    keys: Any,
    values: Any,
    *,
    scale: float,
    mask: Callable[[Array], Array],
    scored: Callable[[], None],
    interpreted: bool,
) -> Carry:
    """Attend to a block.

    Args:
      q, keys, values: [64,H] and [block,H] in shared memory; rows of q that are not wanted may
        hold anything.
      mask: what makes logits that are not seen -inf.
      scored: called when the keys are read, to return only when the values are there.
    """
    acc, top, total = carry
    s = hopper.product(q, keys.transpose((1, 0)))
    scored_keys = mask(s * (scale * hopper.LOG2_E))
    new_top = jnp.maximum(top, scored_keys.max(axis=1))
    shrink = jnp.exp2(top - new_top)
    p = jnp.exp2(scored_keys - lax.broadcast_in_dim(new_top, s.shape, [0]))
    total = total * shrink + p.sum(axis=1)
    acc = acc * lax.broadcast_in_dim(shrink, acc.shape, [0])
    p = p.astype(q.dtype)
    scored()
    return _add_product(acc, p, values, interpreted), new_top, total


def finish(carry: Carry) -> tuple[Float[Array, "R H"], Float[Array, " R"]]:
    """The mean of the values and the natural log-sum-exp; 0 and -inf where nothing was seen."""
    acc, top, total = carry
    some = total > 0
    total = jnp.where(some, total, 1.0)
    out = acc / lax.broadcast_in_dim(total, acc.shape, [0])
    return out, jnp.where(some, top / hopper.LOG2_E + jnp.log(total), -jnp.inf)


def pad_rows(q: Float[Array, "*B R H"]) -> Float[Array, "X R8 H"]:
    """Query rows in whole tiles, leading axes as one. Copies of fewer rows come out wrong.

    Without a tiling of ours JAX 0.11.2 infers tiles of as many rows as are copied, under a swizzle
    that needs 8.
    """
    q = q.reshape(-1, *q.shape[-2:])
    return jnp.pad(q, ((0, 0), (0, -q.shape[1] % hopper.TILE_ROWS), (0, 0)))


def out_scratch(rows: int, most: int = _OUT_ROWS) -> dict[str, Any]:
    """The shared memory that `write` needs for results of which the first `rows` count.

    In `most` rows as many pieces of 64 find place that overlap but for the first rows of each.
    """
    windows = max(w for w in (4, 2, 1) if w == 1 or hopper.ROWS + (w - 1) * rows <= most)
    return dict(
        out_tile=hopper.tiled(hopper.ROWS + (windows - 1) * rows, COLUMNS, dtype=jnp.float32),
        lse_tile=plgpu.SMEM((hopper.ROWS,), jnp.float32),
    )


def write(out: Array, lse: Array, out_ref: Any, lse_ref: Any, *, out_tile, lse_tile) -> None:
    """Begin to write the first rows of `out` [64,H], as many as `out_ref` has, and all of `lse`.

    `written` waits for it; the next call, as long as it must.
    """
    write_rows(out, out_ref, out_tile)
    # The copies before this piece's have left, and with them that of its last log-sum-exps.
    lse_tile[...] = lse
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(lse_tile, lse_ref)


def write_rows(x: Array, ref: Any, tile: Any) -> None:
    """Begin to write the first rows of x [64,M], as many as `ref` [R,M] has.

    Registers go to shared memory by 64 rows. Where few of them count, pieces of columns stand so
    close that each leaves the rows that count of those before it, and none has to wait until
    another has left.
    """
    rows, all_columns = ref.shape
    windows = (tile.shape[0] - hopper.ROWS) // rows + 1
    for first in range(0, all_columns, windows * COLUMNS):
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        columns = range(first, min(first + windows * COLUMNS, all_columns), COLUMNS)
        for i, column in enumerate(columns):
            place = tile.at[pl.ds(i * rows, hopper.ROWS)]
            place[...] = x[:, column : column + COLUMNS]
            # All warps: what one leaves here must not come after the next piece's rows that count.
            plgpu.commit_smem()
        for i, column in enumerate(columns):
            plgpu.copy_smem_to_gmem(
                tile.at[pl.ds(i * rows, rows)], ref.at[:, pl.ds(column, COLUMNS)]
            )


def written() -> None:
    """Wait until all that was written is there: before the kernel ends."""
    plgpu.wait_smem_to_gmem(0)


def _add_product(acc: Array, x: Array, y: Any, interpreted: bool) -> Array:
    """acc + x @ y, with x in registers and y in shared memory."""
    if interpreted:  # JAX's interpreter knows wgmma of shared memory alone
        return acc + jnp.dot(x, y[...], preferred_element_type=jnp.float32)
    return hopper.add_product(acc, x, y)


def merge_parts(
    out: Float[Array, "*B R H"], lse: Float[Array, "*B R"], axis: int
) -> tuple[Float[Array, "*C R H"], Float[Array, "*C R"]]:
    """Merge the attentions that lie along `axis`; -inf marks those without a part.

    Outputs without a part must be finite. Few are merged one after another, elementwise, which XLA
    fuses with what follows; many in one reduction.
    """
    parts = out.shape[axis]
    if parts <= _FEW_PARTS:
        each = [[lax.index_in_dim(x, i, axis, False) for x in (out, lse)] for i in range(parts)]
        return merge([(one, its_lse) for one, its_lse in each])
    out, top, total = lax.reduce(
        (out, jnp.broadcast_to(lse[..., None], out.shape), jnp.ones_like(out)),
        (jnp.float32(0), jnp.float32(MASKED), jnp.float32(0)),
        _merge_two,
        (axis,),
    )
    lse = jnp.where(top > MASKED, top + jnp.log(total), -jnp.inf)
    return out, lse[..., 0]


def _merge_two(one: tuple[Array, ...], other: tuple[Array, ...]) -> tuple[Array, ...]:
    """Two attentions as one: mean, largest log-sum-exp and sum in units of it."""
    out, top, total = zip(one, other, strict=True)
    new_top = jnp.maximum(*top)
    weights = [n * jnp.exp(x - new_top) for n, x in zip(total, top, strict=True)]
    new_total = weights[0] + weights[1]
    mean = (out[0] * weights[0] + out[1] * weights[1]) / jnp.maximum(new_total, 1.0)
    return mean, new_top, new_total
