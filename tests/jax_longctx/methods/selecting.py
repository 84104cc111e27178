"""One sparse decode step on arrays given as they are after rotary embedding, on any mesh."""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jax_longctx.caches import AppendCache, with_store
from jax_longctx.contract import CacheShape, LayerContext
from jax_longctx.methods.resa import Resa
from jax_longctx.models.rope import RopeConfig
from jax_longctx.parts import residual
from jax_longctx.sharding import make_mesh

SLOTS = 64
LAMS = (0.0, 0.25, 0.5, 0.75, 1.0)
# The compiler's time is the tests' time.
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
HEADS, KV_HEADS, WIDTH = 4, 2, 8


class Case(NamedTuple):
    """Rows of keys and values `[B, S, K, H]`, of which lengths[b] count; garbage beyond.

    `mean_q` `[B, N, H]` is the prompt's mean query; the prompt is the first prompts[b] tokens.
    """

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    lengths: np.ndarray
    prompts: np.ndarray
    mean_q: np.ndarray


class Step(NamedTuple):
    """Output `[B, N, H]` and its log-sum-exp, kept tokens `[B, N]`, scores `[B, N, P]`.

    Of RESA also outputs for LAMS `[B, N, 5, H]`, and the prior's query `[B, N, H]`, bias and
    log-sum-exp `[B, N]`.
    """

    out: np.ndarray
    lse: np.ndarray
    kept: np.ndarray
    scores: np.ndarray
    swept: np.ndarray
    mean_q: np.ndarray
    bias: np.ndarray
    prior_lse: np.ndarray


def case(lengths=(50, 33, 9), answered=2, seed=0):
    rng = np.random.default_rng(seed)
    batch = len(lengths)

    def normal(*shape):
        return rng.normal(size=shape).astype(np.float32)

    k, v = (normal(batch, SLOTS, KV_HEADS, WIDTH) for _ in "kv")
    for b, length in enumerate(lengths):
        k[b, length:] = 100.0
        v[b, length:] = 100.0
    q, mean_q = 2 * normal(batch, HEADS, WIDTH), normal(batch, HEADS, WIDTH)
    n = np.array(lengths, np.int32)
    return Case(q, k, v, n, n - np.int32(answered), mean_q)


def plain_context():
    rope = RopeConfig(kind="default", theta=1e4, trained_length=128)
    return LayerContext(scale=WIDTH**-0.5, window=None, rope=rope, total=jnp.zeros(1, jnp.int32))


def layer_shape(q, k):
    """Of one layer with queries `[B, N, H]` and a cache `[B, K, S, H]`."""
    batch, heads, slots, width = k.shape
    return CacheShape(
        batch=batch,
        slots=slots,
        reserve=0,
        chunk=8,
        num_heads=q.shape[1],
        num_kv_heads=heads,
        head_dim=width,
        dtype=k.dtype,
        window=None,
    )


def filled(base, q, k, v, lengths, prompts):
    ctx, shape = plain_context(), layer_shape(q, k)
    store = AppendCache(k, v, lengths, lengths, lengths, lengths)
    cache = base.adopt(with_store(base.init_cache(shape), store), ctx)
    return dataclasses.replace(cache, prompt=prompts)


def _body(method, q, k, v, lengths, prompts, mean_q):
    """A decode step whose own token is already the last of the row."""
    base = method.base if isinstance(method, Resa) else method
    ctx, slots = plain_context(), k.shape[2]
    cache = filled(base, q, k, v, lengths, prompts)
    store = cache.store
    scores = ctx.gather_seq(base.scores(q, cache, ctx), axis=2)
    held = base.selectable(store, ctx).tokens > 0
    scores = jnp.where(held[:, None], scores, -jnp.inf)
    if not isinstance(method, Resa):
        chosen = method.attend_selected(q[:, None], cache, ctx)
        none = [jnp.zeros(q.shape[:2])] * 4
        return chosen.out[:, 0], chosen.lse[:, 0], chosen.kept, scores, *none
    background = residual.empty_background(layer_shape(q, k))
    at = jnp.arange(slots) + ctx.seq_offset(slots)
    seen = jnp.where((at < lengths[:, None])[:, None, :, None], k, 0)
    background = dataclasses.replace(
        background,
        query_sum=mean_q * lengths[:, None, None],
        key_sum=ctx.psum_seq(jnp.sum(seen, axis=2)),
        counted=lengths,
    )
    rows = jnp.ones_like(lengths, bool)
    background = residual.begin_answer(background, store, rows, ctx)
    prior = residual.prior_of(background, q[:, None], ctx)
    chosen = base.attend_selected(q[:, None], cache, ctx, prior)
    everything = chosen.kept == lengths[:, None]

    def combine(lam):
        return residual.combine(chosen, prior, everything, lam=lam)

    out, lse = combine(method.lam)
    swept = jnp.stack([combine(lam)[0][:, 0] for lam in LAMS], 2)
    shown = swept, prior.query[:, 0], prior.bias, prior.lse
    return out[:, 0], lse[:, 0], chosen.kept, scores, *shown


@functools.cache
def _program(method, sizes):
    spec = PartitionSpec
    heads, cache = spec("data", "tensor"), spec("data", "tensor", "seq")
    rows = spec("data")
    return jax.jit(
        jax.shard_map(
            functools.partial(_body, method),
            mesh=make_mesh(*sizes),
            in_specs=(heads, cache, cache, rows, rows, heads),
            out_specs=heads,
            check_vma=False,
        ),
        compiler_options=QUICK,
    )


def step(method, given, sizes=(1, 1, 1)):
    k, v = (np.swapaxes(x, 1, 2) for x in (given.k, given.v))
    run = _program(method, sizes)
    done = run(given.q, k, v, given.lengths, given.prompts, given.mean_q)
    return Step(*(np.asarray(x) for x in done))


def on_one_device(body):
    """`body` compiled inside a manual mesh of one device, as the engine runs methods."""
    everywhere = PartitionSpec()
    shard_map = functools.partial(
        jax.shard_map, mesh=make_mesh(), in_specs=everywhere, out_specs=everywhere, check_vma=False
    )
    return jax.jit(shard_map(body), compiler_options=QUICK)
