"""`LayerContext`: what a method knows of one layer and of the mesh, and where its slots lie.

The engine makes it inside the manual `shard_map`. A collective over one shard returns its argument.

Slots are numbered in the text's order. They lie over the shards in one of two ways:

- in stripes: runs of `STRIPE` slots (or the largest common divisor of that and a shard's slots) are
  dealt to the shards in turn. During prefill every shard holds as many filled slots as any
  other, up to a stripe;
- in blocks: each shard holds one run of slots. That is a single stripe of all its slots.

Either way the indices of a shard ascend with its slots, and the slots below a number are the first
ones of each shard. So a kernel that takes a count, or a range, of valid slots needs no mask.

The same holds for the pages of a cache, which divide a stripe: entries stand for both here. Nothing
outside of this module knows the layout. `SlotLayout` has what is done to whole arrays, outside of
`shard_map`, and `OwnSlots` what a method asks inside of it (`LayerContext.slots`).
"""

import dataclasses
import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import get_opaque_trace_state
from jaxtyping import Array, Bool, Float, Int, Shaped

from jax_longctx.contract.merging import Attended, by_gather, by_sum, merge_cost
from jax_longctx.models.rope import RopeConfig
from jax_longctx.settings import Reading
from pallas_kernels.common import Scale
from pallas_kernels.dispatch import platform
from pallas_kernels.peers import AllPeers, gather_over, sum_over

# Queries, keys and values of T new tokens, before rotary embedding: N query heads, K kv heads.
QKV = tuple[Float[Array, "B T N H"], Float[Array, "B T K H"], Float[Array, "B T K H"]]
# An attention's output and log-sum-exp, and the cache with the new tokens.
WithCache = tuple[Attended, Any]

# The first axes of a layer's weights whose products take places of `pallas_kernels.peers`, in the
# order of the places, and the places of a whole layer.
WEIGHT_PLACES = ("embed", "heads", "mlp")
PLACES = 12

# Slots of a stripe: pages divide it, kernels tile by it, and shards hold a multiple of it.
STRIPE = 128


@dataclasses.dataclass(frozen=True)
class SlotLayout:
    """Where the slots of an engine's caches lie.

    Along a dealt axis an array holds the entries of shard 0, then of shard 1 and so on.

    Attributes:
      shards: shards of the slots.
      stripe: slots of a stripe; None for blocks.
    """

    shards: int = 1
    stripe: int | None = None

    @property
    def in_stripes(self) -> bool:
        """Whether the order of an array is another one than the text's."""
        return self.stripe is not None and self.shards > 1

    @property
    def turn(self) -> int:
        """Slots of one turn of the shards: the layout repeats after it."""
        return STRIPE * self.shards

    def along(self, name: str | None) -> "SlotLayout":
        """The layout along a logical axis of that name: only slots and pages are dealt."""
        return self if name in ("slots", "pages") else SlotLayout()

    def of_shard(self, size: int, page: int, shard: Any) -> "OwnSlots":
        """The `size` entries of a shard, each of `page` slots."""
        stripe = size if self.stripe is None else math.gcd(self.stripe, size * page) // page
        return OwnSlots(size, self.shards, shard, stripe)

    def resized(self, x: Array, axis: int, size: int) -> Array:
        """`x` with `size` entries along `axis`: the last ones are cut, or zeros follow."""
        return self._each_run(x, axis, lambda run, at, runs: resized(run, at, size // runs))

    def from_entry(self, x: Array, axis: int, start: Int[Array, ""], size: int) -> Array:
        """`size` entries from `start` on, as entries 0, 1, ...; those beyond `x` hold anything.

        In stripes `start` is a multiple of the stripes of all shards (`turn`).
        """
        return self._each_run(
            x, axis, lambda run, at, runs: _from_entry(run, at, start // runs, size // runs)
        )

    def in_order(self, x: Array, axis: int, slots: int) -> Array:
        """An array of a cache with `slots` slots, its entries along `axis` as in the text."""
        return self._moved(x, axis, slots, dealt=True)

    def dealt(self, x: Array, axis: int, slots: int) -> Array:
        """`in_order` undone."""
        return self._moved(x, axis, slots, dealt=False)

    def _moved(self, x: Array, axis: int, slots: int, *, dealt: bool) -> Array:
        """`x` in the other order, from the shards' if it is `dealt`."""
        if self.stripe is None or self.shards == 1:
            return x
        # The stripe may be shorter than `stripe`: it divides a shard's slots.
        turns = slots // self.shards // math.gcd(self.stripe, slots // self.shards)
        by = (self.shards, turns) if dealt else (turns, self.shards)
        apart = x.reshape(*x.shape[:axis], *by, -1, *x.shape[axis + 1 :])
        return jnp.swapaxes(apart, axis, axis + 1).reshape(x.shape)

    def _each_run(self, x: Array, axis: int, change: Any) -> Array:
        """`change(run, axis, runs)` of each shard's entries, all at once; blocks are one run."""
        if not self.in_stripes:
            return change(x, axis, 1)
        apart = x.reshape(*x.shape[:axis], self.shards, -1, *x.shape[axis + 1 :])
        changed = change(apart, axis + 1, self.shards)
        return changed.reshape(*x.shape[:axis], -1, *x.shape[axis + 1 :])


def resized(x: Array, axis: int, size: int) -> Array:
    """`x` with `size` entries along `axis`: the last ones are cut, or zeros follow."""
    if size <= x.shape[axis]:
        return jax.lax.slice_in_dim(x, 0, size, axis=axis)
    more = size - x.shape[axis]
    return jnp.pad(x, [(0, more if i == axis else 0) for i in range(x.ndim)])


def _from_entry(x: Array, axis: int, start: Int[Array, ""], size: int) -> Array:
    x = resized(x, axis, max(size, x.shape[axis]))
    # A slice that would pass the end begins earlier; rolling brings its entries to the front.
    first = jnp.minimum(start, x.shape[axis] - size)
    return jnp.roll(jax.lax.dynamic_slice_in_dim(x, first, size, axis), first - start, axis)


@dataclasses.dataclass(frozen=True)
class OwnSlots:
    """A shard's entries (slots or pages) of one axis, inside `shard_map`.

    Attributes:
      size: how many it has.
      shards, shard: number of shards, and which of them this is.
      stripe: entries of a stripe; `size` in blocks.
    """

    size: int
    shards: int
    shard: Any
    stripe: int

    def below(self, entry: Int[Array, "*shape"]) -> Int[Array, "*shape"]:
        """How many of this shard's entries lie before `entry`, which may be any number."""
        if self.shards == 1:
            return jnp.clip(entry, 0, self.size)
        turn = self.stripe * self.shards
        part = jnp.clip(entry % turn - self.shard * self.stripe, 0, self.stripe)
        return jnp.clip(entry // turn * self.stripe + part, 0, self.size)

    def find(self, entry: Int[Array, "*shape"]) -> Int[Array, "*shape"]:
        """Entries as indices on this shard; -1 for another shard's entries and for none."""
        local, mine = entry, entry >= 0
        if self.shards > 1:
            local = entry // (self.stripe * self.shards) * self.stripe + entry % self.stripe
            mine &= entry // self.stripe % self.shards == self.shard
        return jnp.where(mine & (local < self.size), local, -1)

    def at(self, local: Int[Any, "*shape"]) -> Int[Array, "*shape"]:
        """The entries at indices of this shard; indices from `size` on go on alike."""
        if self.shards == 1:
            return local
        turns = local // self.stripe * self.shards + self.shard
        return turns * self.stripe + local % self.stripe

    def most(self, run: int) -> int:
        """How many of `run` consecutive entries this shard has at most."""
        touched = -(-(run - 1) // self.stripe) + 1
        return min(run, -(-touched // self.shards) * self.stripe, self.size)

    def whole(self, x: Array, axis: int) -> Array:
        """All shards' arrays along an axis of these entries, in the text's order, on each."""
        if self.shards == 1:
            return x
        apart = x.reshape(*x.shape[:axis], -1, self.stripe, *x.shape[axis + 1 :])
        every = jax.lax.all_gather(apart, "seq", axis=axis + 1)  # [.., turns, shards, stripe, ..]
        return every.reshape(*x.shape[:axis], -1, *x.shape[axis + 1 :])

    def part(self, x: Array, axis: int) -> Array:
        """This shard's entries of an array that all shards hold whole, in the text's order."""
        if self.shards == 1:
            return x
        apart = x.reshape(*x.shape[:axis], -1, self.shards, self.stripe, *x.shape[axis + 1 :])
        mine = jax.lax.dynamic_index_in_dim(apart, self.shard, axis + 1, keepdims=False)
        return mine.reshape(*x.shape[:axis], -1, *x.shape[axis + 1 :])


class Exchanges:
    """Sums and gathers of a layer's attention, one after another, from the places that are left.

    Kernels that do not wait for one another run side by side, on each GPU in an order of its own,
    and one that waits for other GPUs holds up what they wait for: a program may then hang. So each
    call waits for the one before it, the first for the layer's queries, and the layer's result
    (`done`) for the last. What is made in a loop or branch within the attention cannot be waited
    for outside: there XLA exchanges.

    Args:
      queries: that the first call waits for.
      places: that these calls take.
    """

    def __init__(self, peers: AllPeers, queries: Array | None = None, places: Iterable[int] = ()):
        self._peers, self._queries, self._places = peers, queries, iter(places)
        self._last: Array | None = None
        self._level, self._in_result = get_opaque_trace_state(), True

    def sum(self, axes: tuple[str, ...], x: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
        """As `sum_over`."""
        return self._next(functools.partial(sum_over, axes, x), in_result=False)

    def gather(
        self, axis: str, x: Shaped[Array, "..."], *, in_result: bool = False
    ) -> Shaped[Array, "S ..."]:
        """As `gather_over`.

        Args:
          in_result: whether `x` is made of the queries, and the layer's result of what is gathered.
        """
        return self._next(functools.partial(gather_over, axis, x), in_result)

    def done(self, result: Float[Array, "..."]) -> Float[Array, "..."]:
        """The layer's result, which waits for the last call; NaN where that call's begins so."""
        if not self._peers or self._last is None or self._in_result:
            return result
        # XLA cannot know that no number is NaN.
        last = self._last.reshape(-1)[0].astype(result.dtype)
        return jnp.where(jnp.isnan(last), last, result)

    def _next(self, exchange: Any, in_result: bool) -> Array:
        if get_opaque_trace_state() != self._level:
            return exchange(self._peers, None)
        after = self._last if self._last is not None or in_result else self._queries
        made = exchange(self._peers, next(self._places, None), after)
        self._last, self._in_result = made, in_result
        return made


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerContext:
    """What `attend` and `finish` know about the layer and the mesh.

    The layer's index is not among it: equal layers share one trace. `init_cache` decides what
    differs by layer.

    Attributes:
      scale: factor of the attention logits, or that and their cap.
      window: sliding window of this layer in tokens, or None.
      rope: the layer's rotary embedding.
      total: each row's total length, known before its first chunk (see `RopeConfig.by_length`).
      stripe: slots of a stripe, where they are dealt to the shards in stripes; None for blocks.
      sinks: in `attend`, the logits of this shard's heads' sinks, if the model has any.
      divided: whether the slots are divided over the shards; if not, each shard has all of them.
      output: in `attend`, but not of a decode step, the layer's output projection of this shard's
        heads, where the method `wants_output`.
      exchanges: what few numbers go through to the other shards.
      reading: in `attend` of a text, how earlier keys are read; None for all of them.
    """

    scale: Scale
    window: int | None
    rope: RopeConfig
    total: Int[Array, " B"]
    stripe: int | None = None
    sinks: Float[Array, " N"] | None = None
    divided: bool = True
    output: Float[Array, "N H D"] | None = None
    exchanges: Exchanges = dataclasses.field(default_factory=lambda: Exchanges({}), compare=False)
    reading: Reading | None = None

    def undivided(self) -> "LayerContext":
        """The same, for slots that are whole on every shard."""
        return dataclasses.replace(self, divided=False)

    def with_sinks(self, lse: Float[Array, "B T N"]) -> Float[Array, "B T N"]:
        """Of attention over tokens, the log of what the model's probabilities are divided by.

        With sinks the probabilities of the tokens add up to less than 1. -inf stays.
        """
        if self.sinks is None:
            return lse
        joined = jnp.logaddexp(lse, self.sinks.astype(jnp.float32))
        return jnp.where(lse > -jnp.inf, joined, lse)

    def rotate(
        self, x: Float[Array, "B T N H"], positions: Int[Any, "#B T"]
    ) -> Float[Array, "B T N H"]:
        """`x` under rotary embedding at `positions`; for numpy positions see `rope_angles`."""
        if self.rope.share == 0:
            return x
        return apply_rope(x, *rope_angles(self.rope, x.shape[-1], positions, self.total))

    def rotate_queries(
        self, q: Float[Array, "B T N H"], positions: Int[Any, "#B T"]
    ) -> Float[Array, "B T N H"]:
        """`rotate` of `grown` queries."""
        return self.rotate(self.grown(q, positions), positions)

    def turned_back(
        self, k: Float[Array, "B K C H"], positions: Int[Array, "B K C"]
    ) -> Float[Array, "B K C H"]:
        """Keys before rotary embedding, of keys rotated at `positions`; rounded once more."""
        if self.rope.share == 0:
            return k
        (batch, heads, size, width), wide = k.shape, k.astype(jnp.float32)
        own = dataclasses.replace(self, total=jnp.repeat(self.total, heads))
        flat = wide.reshape(batch * heads, size, 1, width)
        turned = own.rotate(flat, -positions.reshape(batch * heads, size)).reshape(k.shape)
        # Both rotations carry the embedding's factor.
        factor_H = np.asarray(self.rope.scales(width) * 2, np.float32)
        return (turned / factor_H**2).astype(k.dtype)

    def grown(
        self, q: Float[Array, "B T N H"], positions: Int[Any, "#B T"]
    ) -> Float[Array, "B T N H"]:
        """Queries times what the model multiplies them with at these positions (`query_growth`)."""
        if not self.rope.query_growth:
            return q
        return q * self.growth(positions)[..., None, None].astype(q.dtype)

    def growth(self, positions: Int[Any, "#B T"]) -> Float[Array, "#B T"]:
        """What the model multiplies queries with at these positions (`query_growth`)."""
        turns = jnp.floor_divide(positions, self.rope.trained_length).astype(jnp.float32)
        return 1 + self.rope.query_growth * jnp.log1p(turns)

    def for_raw_keys(self, q: Float[Array, "B T N H"]) -> Float[Array, "B T N H"]:
        """Rotated queries for keys without rotary embedding.

        Rotated keys carry the factor of their own embedding; those do not.
        """
        if self.rope.share == 1:
            return q * self.rope.scale
        return (q * np.asarray(self.rope.scales(q.shape[-1]) * 2, np.float32)).astype(q.dtype)

    @property
    def head_shards(self) -> int:
        """Number of shards of the heads."""
        return jax.lax.axis_size("tensor")

    def psum_heads(self, x: Array) -> Array:
        """Sum over the shards of the heads; `x` is each shard's sum over its own heads."""
        return self.exchanges.sum(("tensor",), x)

    def gather_heads(self, x: Array, axis: int) -> Array:
        """The shards' arrays concatenated along `axis`, on every shard of the heads."""
        return jax.lax.all_gather(x, "tensor", axis=axis, tiled=True)

    def head_offset(self, local_heads: int) -> Int[Array, ""]:
        """Global index of this shard's first head, when it holds `local_heads` of them."""
        return jax.lax.axis_index("tensor") * local_heads

    @property
    def seq_size(self) -> int:
        """Number of shards of the slots."""
        return jax.lax.axis_size("seq") if self.divided else 1

    def slots(self, size: int, page: int = 1) -> OwnSlots:
        """Where this shard's `size` slots lie, or its pages of `page` slots each."""
        return SlotLayout(self.seq_size, self.stripe).of_shard(size, page, self.seq_index)

    def seq_offset(self, local_slots: int) -> Int[Array, ""]:
        """Global index of this shard's first slot, when it holds a block of `local_slots` of them.

        Raises:
          ValueError: slots are dealt in stripes, which have no one offset; see `slots`.
        """
        if self.stripe is not None and self.seq_size > 1:
            raise ValueError(
                "seq_offset: the method's slots are dealt to the shards in stripes; ask "
                "LayerContext.slots where they lie, or set stripes = False in the method"
            )
        return jax.lax.axis_index("seq") * local_slots

    def psum_seq(self, x: Array) -> Array:
        """Sum over the shards of the slots."""
        if self.seq_size == 1:
            return x
        return self.exchanges.sum(("seq",), x)

    def pmax_seq(self, x: Array) -> Array:
        """Maximum over the shards of the slots."""
        return jax.lax.pmax(x, "seq") if self.seq_size > 1 else x

    def gather_seq(self, x: Array, axis: int) -> Array:
        """The shards' arrays concatenated along `axis`, on every shard of the slots.

        Along an axis of slots or pages that is not the text's order; see `OwnSlots.whole`.
        """
        if self.seq_size == 1:
            return x
        axis %= x.ndim
        every = jnp.moveaxis(self.exchanges.gather("seq", x), 0, axis)
        return every.reshape(*x.shape[:axis], -1, *x.shape[axis + 1 :])

    @property
    def seq_index(self) -> Int[Array, ""]:
        """Which shard of the slots this is."""
        return jax.lax.axis_index("seq")

    def send_seq(self, x: Array, to: Sequence[int]) -> Array:
        """Shard s's `x` on shard to[s] (a permutation of the shards), in one hop."""
        return jax.lax.ppermute(x, "seq", list(enumerate(to)))

    def agree(self, decided: Bool[Array, "*S"]) -> Bool[Array, "*S"]:
        """True on all shards of the same rows where it is True on any of them.

        Shards add the same numbers in different orders, so their last bits and their decisions may
        differ. If only some shards enter a branch with a collective, the program hangs.
        """
        return jax.lax.pmax(decided.astype(jnp.int32), ("tensor", "seq")) > 0

    def seq_merge(self, out: Float[Array, "B T N H"], lse: Float[Array, "B T N"]) -> Attended:
        """Each shard's partial attention over its own slots, merged; the same on every shard."""
        if self.seq_size == 1:
            return out, lse
        _, times = merge_cost(lse.size, out.shape[-1], out.dtype.itemsize, self.seq_size)
        if times > 1:
            return by_sum(out, lse)
        gather = functools.partial(self.exchanges.gather, "seq", in_result=True)
        return by_gather(out, lse, gather)


def rope_angles(
    config: RopeConfig, head_dim: int, positions: Int[Any, "#B T"], total: Int[Array, " B"]
) -> tuple[Float[Any, "#B T F"], Float[Any, "#B T F"]]:
    """cos and sin at `positions`, times `config.scales`; float32 whatever the model's dtype.

    Args:
      positions: of a numpy array the angles are numpy arrays, made once, when a program is
        traced. XLA would make them anew in every turn of a loop over layers.
      total: each row's total length, fixed before its first chunk; read where `config.by_length`.
    """
    if config.by_length:
        frequency = _frequencies_by_length(config, head_dim, total)[:, None, :]  # [B, 1, H/2]
        positions = jnp.asarray(positions)
    else:
        frequency = np.asarray(config.frequencies(head_dim), np.float32)
    # NumPy's functions, where nothing is traced: XLA would compile a program for each of them.
    cosine, sine = (np.cos, np.sin) if isinstance(positions, np.ndarray) else (jnp.cos, jnp.sin)
    angle_BTF = positions[..., None].astype(np.float32) * frequency
    scale_F = np.asarray(config.scales(head_dim), np.float32)
    return cosine(angle_BTF) * scale_F, sine(angle_BTF) * scale_F


def _frequencies_by_length(config: RopeConfig, head_dim: int, total: Array) -> Array:
    """[B, H/2]."""
    if config.kind == "longrope":
        short_F, long_F = (
            np.asarray(config.frequencies(head_dim, long=long), np.float32)
            for long in (False, True)
        )
        return jnp.where(total[:, None] > config.trained_length, long_F, short_F)
    turned = config.turned(head_dim)
    length_B1 = jnp.maximum(total, config.trained_length).astype(jnp.float32)[:, None]
    stretch_B1 = config.factor * length_B1 / config.trained_length - (config.factor - 1)
    theta_B1 = config.theta * stretch_B1 ** (turned / (turned - 2))
    exponent = jnp.arange(0, turned, 2, dtype=jnp.float32) / turned
    return resized(theta_B1**-exponent, 1, head_dim // 2)


def apply_rope(
    x: Float[Array, "B T N H"], cos: Float[Any, "#B T F"], sin: Float[Any, "#B T F"]
) -> Float[Array, "B T N H"]:
    """`x` rotated, computed in float32 and returned in its own dtype."""
    if platform() == "gpu":
        # Elementwise but for an order: XLA fuses it with what follows, which a concatenation ends.
        halves = x.astype(jnp.float32).reshape(*x.shape[:-1], 2, -1)  # [B, T, N, 2, F]
        cos, sin = cos[:, :, None, None], sin[:, :, None, None]
        signs = np.array([[-1.0], [1.0]], np.float32)
        turned = halves * cos + jnp.flip(halves, axis=-2) * (sin * signs)
        return turned.reshape(x.shape).astype(x.dtype)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, :, None], sin[:, :, None]
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)
