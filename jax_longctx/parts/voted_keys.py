"""The keys that a layer votes for, and attention to them at positions 0, 1, 2, ...

ReAttention, section 2.2:

1. `best_keys`: every query head of every token names the keys of largest dot product;
2. `most_voted` (see `counted_votes`): each naming is one vote; the keys of most votes stay, ties to
   the lower slot;
3. `spans_around`: the union of the spans of slots around these keys, ascending;
4. `Scope`: these spans between the first slots and the newest tokens; each shard lists its part;
   `voted_scope` does steps 2 to 4; of a lone token a GPU lists the slots in one launch (`Listed`);
5. `attend_scope`: keys are cached before rotary embedding and rotated to their places in the scope.
   Every shard attends to its part of the scope, and the parts are merged by log-sum-exp.

All heads of a row share one selection; every row and layer has its own.

Ties. A key before rotary embedding does not depend on its position. In the first layer it depends
on its token alone, so equal tokens have equal keys. Their computed keys differ by rounding: a
matmul adds in another order for another chunk length, batch or shard. If the higher of two such
scores came first, rounding would decide what a query attends to. Therefore methods that rank keys
before rotary embedding take close scores for equal, and the lower slot comes first.

The tolerance is relative to the usual score of unrelated vectors, |q| |k| / sqrt(H), because the
rounding errors of a key's H numbers are independent. There are two kinds of errors:

- The key's float32 sums. On a CPU, scores of equal tokens differed by up to 2^-18.6 of a usual
  score for models of 2048 dimensions, and by 2^-17.4 where two numbers of the key dominate.
- Storing the key in 16 bits. A sum near the middle of two numbers is rounded to either of them.
  Where this happens to one of H numbers, the score changes by up to eps / sqrt(H).

The tolerance is several times larger. The 4 best of 100,000 random scores are that close by chance
for one of 100 queries in float32 and one of 7 in bfloat16; they tie, too. Rounding still decides in
two cases: an unrelated score differs by just the tolerance, or scores form a chain (see
`pallas_kernels.topk_scores.merge`). The 4 best of 100,000 random scores form one for less than one
of 1,000 queries in float32 and one of 100 in bfloat16.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jax_longctx.caches import Listed, Scope, Store, Turned
from jax_longctx.contract import QKV, Attended, LayerContext
from pallas_kernels.common import AnyCache, block_of, merge
from pallas_kernels.decode_attention import decode_attention
from pallas_kernels.prefill_attention import cache_attention, causal_attention
from pallas_kernels.topk_scores import merge_topk, topk_scores

# The text's first slots, by whose keys the size of a key is estimated.
_SAMPLE = 128


def tie_tolerance(dtype: jnp.dtype) -> float:
    """The largest difference that is a tie, for keys of that dtype, in usual scores."""
    return max(2.0**-12, float(jnp.finfo(dtype).eps) / 2)


class KeySpan(NamedTuple):
    """The slots start <= s < stop[b] whose keys tokens rank.

    Attributes:
      valid: tokens of each row; those beyond name none.
      page: slots of a page. Keys, `start`, `stop` and named entries are pages.
    """

    start: int
    stop: Int[Array, " B"]
    valid: Int[Array, " B"]
    page: int = 1


def best_keys(
    q: Float[Array, "B T N H"],
    k: AnyCache,
    span: KeySpan,
    ctx: LayerContext,
    *,
    count: int,
    sizes: Float[Array, "B K"] | None = None,
) -> Int[Array, "B T N C"]:
    """Global slots of each query's `count` best keys of the span; then -1.

    Scores that differ by at most `score_tolerance` tie.

    Args:
      sizes: what `key_sizes` gives, where the caller has it.
    """
    start, stop, valid, page = span
    own, alone = ctx.slots(k.shape[2], page), q.shape[1] == 1
    if sizes is None:
        sizes = key_sizes(k, stop, ctx, page)
    allowed = score_tolerance(q, sizes, k.dtype)
    if alone:
        # Nothing is masked behind the kernel, which would be a launch.
        stop = jnp.where(valid > 0, stop, 0)
    rank = functools.partial(topk_scores, tolerance=allowed, valid=None if alone else valid)
    first_B, end_B = jnp.broadcast_to(own.below(jnp.int32(start)), stop.shape), own.below(stop)
    values, slots = rank(q, k, (first_B, end_B), count=count)
    if ctx.seq_size == 1:
        return slots
    slots = jnp.where(slots < 0, -1, own.at(slots))
    values, slots = ctx.gather_seq(values, -1), ctx.gather_seq(slots, -1)
    return merge_topk(values, slots, count, allowed)[1]


def key_sizes(
    k: AnyCache, stop: Int[Array, " B"], ctx: LayerContext, page: int = 1
) -> Float[Array, "B K"]:
    """The root mean square of the text's first keys before `stop`: all would cost a second read."""
    slots = ctx.slots(k.shape[2], page).at(jnp.arange(min(_SAMPLE, k.shape[2])))
    number_B = jnp.clip(stop, 1, _SAMPLE)
    held_BS = slots < number_B[:, None]
    keys = jnp.where(held_BS[:, None, :, None], block_of(k, 0, len(slots)).astype(jnp.float32), 0.0)
    squares_BK = ctx.psum_seq(jnp.sum(keys**2, axis=(2, 3)))
    return jnp.sqrt(squares_BK / (number_B[:, None] * k.shape[3]))


def score_tolerance(
    q: Float[Array, "B T N H"], sizes: Float[Array, "B K"], dtype: jnp.dtype
) -> Float[Array, "B T N"]:
    """The largest difference of two scores that is a tie (see the module), for each query.

    Args:
      sizes: the size of a usual number of a key, as `key_sizes` has it.
      dtype: of the keys.
    """
    size_BN = tie_tolerance(dtype) * jnp.repeat(sizes, q.shape[2] // sizes.shape[1], axis=1)
    # Multiplied before the sum: XLA for GPUs makes a kernel of its own of what follows a sum.
    return jnp.linalg.norm(q.astype(jnp.float32) * size_BN[:, None, :, None], axis=-1)


def attend_scope(
    new: QKV,
    store: Store,
    valid: Int[Array, " B"],
    scope: Scope | Listed,
    ctx: LayerContext,
) -> Attended:
    """Attention of the store's newest `valid[b]` tokens, the scope's last, causal among them.

    Args:
      new: the newest tokens', before rotary embedding.
      store: it has fetched the scope.
    """
    q, k, v = new
    alone, own = q.shape[1] == 1, ctx.slots(store.sizes[2])
    # A chunk attends to itself separately; a lone token is read from the cache with the others.
    slots_BX, key_BX, read_B = scope.own(own) if alone else scope.own(own, valid)
    begin_B = scope.number - valid
    # A rotary base that follows the length must follow the scope's, which bounds positions.
    ctx = dataclasses.replace(ctx, total=jnp.minimum(ctx.total, scope.most))
    # Decode attention reads no further than the number; zeros there would take a launch.
    keys, values = store.read(slots_BX[:, None], Turned(key_BX, ctx), blank=not alone)
    at_BT = begin_B[:, None] + jnp.arange(q.shape[1])
    q = ctx.rotate_queries(q, at_BT)
    if alone:
        return ctx.seq_merge(*decode_attention(q, keys, values, read_B, scale=ctx.scale))
    earlier = ctx.seq_merge(*cache_attention(q, keys, values, read_B, scale=ctx.scale))
    within = causal_attention(q, ctx.rotate(k, at_BT), v, scale=ctx.scale)
    return merge([earlier, within])
