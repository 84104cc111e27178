"""Append-only storage: every key and value of a row in slots 0..length-1, in token order.

Slots are sharded over the mesh axis `seq`, in stripes or in blocks (`contract.context`). A slot is
written by the shard that owns it. Writes to a donated cache are in place, and no read copies a
cache; tests check both in the programs compiled for CPU and TPU.
"""

import dataclasses
import functools
from typing import Any, ClassVar, Literal, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from jax_longctx.caches import paged, reading
from jax_longctx.caches.marks import Mark
from jax_longctx.caches.reading import Turned, line_numbers
from jax_longctx.caches.scope import Listed, Scope, Votes
from jax_longctx.caches.sparse_reading import earlier_attention
from jax_longctx.contract import QKV, STRIPE, Attended, CacheShape, LayerContext, resized
from jax_longctx.sharding import OwnAxis, axes_field
from pallas_kernels.common import AnyCache, merge
from pallas_kernels.decode_attention import decode_attention
from pallas_kernels.dispatch import platform
from pallas_kernels.plane import each_array, laid_as, part_of, rows_of, with_rows, written
from pallas_kernels.prefill_attention import cache_attention, causal_attention
from pallas_kernels.quantised import AnyStored, dequantised, stored_as


class Rewinding:
    """A dataclass of arrays that can go back to the end of the context.

    A field `context_x` holds what `x` was there. Fields that are such dataclasses go back too.
    """

    def end_context(self, reserve: int) -> Any:
        """Remembers where the context ends; `reserve` tokens will follow at most."""
        changes: dict[str, Any] = {}
        for name, value in vars(self).items():
            if isinstance(value, Rewinding):
                changes[name] = value.end_context(reserve)
            elif name.startswith("context_"):
                changes[name] = getattr(self, name.removeprefix("context_"))
        return dataclasses.replace(cast(Any, self), **changes)

    def rewind(self) -> Any:
        """The cache at the end of the context. It shares the buffers; later slots are garbage."""
        changes: dict[str, Any] = {}
        for name, value in vars(self).items():
            if isinstance(value, Rewinding):
                changes[name] = value.rewind()
            elif name.startswith("context_"):
                # New arrays: a fork is donated to the next step while the context keeps its own.
                changes[name.removeprefix("context_")] = jnp.array(value, copy=True)
        return dataclasses.replace(cast(Any, self), **changes)


class Store(Rewinding):
    """Every key and value of some rows, wherever they lie and however they are stored.

    Tokens have slots 0, 1, 2, ... in the text's order. Pages and slots that are given are this
    shard's (`LayerContext.slots`). Buffers are in any form (`pallas_kernels.quantised`). Other
    places than one row's device memory are classes of their own: `Offloaded`, `BranchedStore`.

    For `attend` such a class defines `length`, `position`, `sizes` and `append`, and `on_device`
    unless keys and values are its buffers `k` and `v`. For methods that read pages or slots it also
    defines `_buffers`, and `_where` unless slots lie there in order.

    Attributes:
      length: slots of each row that hold a token.
      position: position of each row's next token.
    """

    length: Int[Array, " B"]
    position: Int[Array, " B"]
    # Whether `fetch` brings pages to the device.
    fetches: ClassVar[bool] = False

    @property
    def store(self) -> Any:
        """Itself. Other caches hold one as their field `store`."""
        return self

    @property
    def sizes(self) -> tuple[int, ...]:
        """[B, K, S, H]."""
        raise NotImplementedError

    @property
    def nbytes(self) -> int:
        """Bytes of all keys and values."""
        raise NotImplementedError

    @property
    def _buffers(self) -> tuple[AnyCache, AnyCache]:
        """What holds keys and values on the device."""
        raise NotImplementedError

    def _where(self, slots: Array, *, near: bool) -> tuple[Array, Array]:
        """Where `slots` lie in the buffers of keys and of values; see `read`."""
        return slots, slots

    @property
    def all_keys(self) -> AnyCache:
        """All keys, where steps rank them (`Reads.all_keys`), in the order of slots."""
        raise NotImplementedError

    def held(self, ctx: LayerContext, *, but_last: int = 0) -> Int[Array, " B"]:
        """How many of this shard's slots are valid, each row's last `but_last` tokens left out."""
        return ctx.slots(self.sizes[2]).below(self.length - but_last)

    def append(
        self,
        k: Float[Array, "B T K H"],
        v: Float[Array, "B T K H"],
        valid: Int[Array, " B"],
        ctx: LayerContext,
    ) -> Any:
        """Appends each row's first `valid[b]` tokens; a row with none is left as it is."""
        raise NotImplementedError

    def attend(self, new: QKV, valid: Int[Array, " B"], ctx: LayerContext) -> tuple[Attended, Any]:
        """Appends tokens as `append`; each attends to all tokens up to itself.

        Args:
          new: queries and keys are rotated to their positions.
        """
        q, k, v = new
        past_B, store = self.held(ctx), self.append(k, v, valid, ctx)
        whole, scale = store.on_device(), ctx.scale
        if q.shape[1] == 1:
            part = decode_attention(q, whole.k, whole.v, whole.held(ctx), scale=scale)
            return ctx.seq_merge(*part), store
        if ctx.reading is None:
            earlier = cache_attention(q, whole.k, whole.v, past_B, scale=scale)
        else:
            earlier = earlier_attention(new, whole.k, whole.v, past_B, valid, ctx)
        within = causal_attention(q, k, v, scale=scale)
        return merge([ctx.seq_merge(*earlier), within]), store

    def attend_pages(
        self, q: Float[Array, "B 1 N H"], ways: paged.Ways, ctx: LayerContext, prior: Any = None
    ) -> tuple[Array, ...]:
        """A token's attention to this shard's slots of pages, as `sparse_decode_attention` has it.

        Over a context that rows share, `start` is the same for all of them, or beyond what they
        share; `stop` lies beyond it. Flat lists and priors are not for these.

        Args:
          ways: each names the same slots; the first is taken that runs where the store lies.
          prior: RESA's, as that operation takes it.
        """
        return paged.attended(q, self._buffers, ways, ctx, prior)

    def read(
        self,
        slots: Int[Array, "B X C"],
        turned: Turned | None = None,
        *,
        near: bool = False,
        blank: bool = True,
        values: bool = True,
    ) -> tuple[Shaped[Array, "B K C H"], Any]:
        """Keys and values in `slots`, X = 1 list for all heads or K; zeros for -1.

        They are among the first tokens, the newest ones, or those that were fetched.

        Args:
          turned: how keys are rotated as they are read, for X = 1; None as they are stored.
          near: all are among the first or the newest.
          blank: without it any key and value for -1.
          values: without them None in their place.
        """
        where = self._where(slots, near=near)
        return reading.read_pair(self._buffers, where, turned, blank=blank, values=values)

    def fetch(self, wanted: Any, valid: Int[Array, " B"], ctx: LayerContext, *, step: bool) -> Any:
        """The store with these of its pages on the device.

        Args:
          wanted: pages [B, Y, C] of all heads, of each kv head or of each query head, -1 for none;
            or a scope.
          valid: tokens of each row; the pages of a row without any are not fetched.
          step: whether this is a decode step, which is counted.
        """
        return self

    def select(self, votes: Votes, ctx: LayerContext) -> Scope | Listed:
        """The scope of each row's newest tokens by their votes."""
        return votes.listed(self.length, self.sizes[2], ctx)

    def on_device(self) -> Any:
        """The store with all keys and values in buffers `k` and `v` on the device."""
        return self


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AppendCache(Store):
    """Keys and values of every token of a row, on the device.

    Attributes:
      k, v: slot s of row b is valid when `s < length[b]`; other slots hold garbage.
      length: valid slots of each row.
      position: position of each row's next token.
      context_length, context_position: both as they were at the end of the context.
      slots_axis: the slots' logical axis: `budget` where they are whole on every shard and no more
        than a budget's.
    """

    k: AnyCache = axes_field("batch", "kv_heads", OwnAxis("slots_axis"), None, in_place=True)
    v: AnyCache = axes_field("batch", "kv_heads", OwnAxis("slots_axis"), None, in_place=True)
    length: Int[Array, " B"] = axes_field("batch")
    position: Int[Array, " B"] = axes_field("batch")
    context_length: Int[Array, " B"] = axes_field("batch")
    context_position: Int[Array, " B"] = axes_field("batch")
    slots_axis: Literal["slots", "budget"] = dataclasses.field(
        default="slots", metadata={"static": True}
    )

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.k.shape

    @property
    def _buffers(self) -> tuple[AnyCache, AnyCache]:
        return self.k, self.v

    @property
    def all_keys(self) -> AnyCache:
        return self.k

    @property
    def nbytes(self) -> int:
        return self.k.nbytes + self.v.nbytes

    def marked(self, mark: Mark, ctx: LayerContext) -> "AppendCache":
        """See `caches.marks`."""
        ctx = ctx if self.slots_axis == "slots" else ctx.undivided()
        slots_S = ctx.slots(self.k.shape[2]).at(jnp.arange(self.k.shape[2]))
        # Tokens that have left moved the others.
        whole_B11 = (self.length == self.position)[:, None, None]
        return dataclasses.replace(self, v=mark(self.v, jnp.where(whole_B11, slots_S, -1)))

    def append(
        self,
        k: Float[Array, "B T K H"],
        v: Float[Array, "B T K H"],
        valid: Int[Array, " B"],
        ctx: LayerContext,
    ) -> "AppendCache":
        return dataclasses.replace(
            self,
            k=write_run(self.k, k, self.length, valid, ctx),
            v=write_run(self.v, v, self.length, valid, ctx),
            length=self.length + valid,
            position=self.position + valid,
        )


def written_after(store: Any, read: Any) -> tuple[Any, Any]:
    """The store, to which nothing is written before `read` of it is known, and `read`.

    Else `read` might be of a copy of all layers' keys.
    """
    length, read = jax.lax.optimization_barrier((store.length, read))
    return dataclasses.replace(store, length=length), read


def with_store(cache: Any, store: Any) -> Any:
    """A cache that is a store or holds one, with another store."""
    return store if cache.store is cache else dataclasses.replace(cache, store=store)


def empty_append_cache(shape: CacheShape) -> AppendCache:
    """A cache of `shape.slots` empty slots."""
    # An array for each field: a donated buffer may be named once.
    keys_and_values = (shape.empty_slots(shape.slots) for _ in range(2))
    counts = (jnp.zeros((shape.batch,), jnp.int32) for _ in range(4))
    return AppendCache(*keys_and_values, *counts)


def cache_of(
    k: AnyStored,
    v: AnyStored,
    length: Int[Array, " B"],
    position: Int[Array, " B"],
    reserve: int,
    ctx: LayerContext,
    turned: Int[Array, "B K C"] | None = None,
) -> AppendCache:
    """A cache of tokens that are whole on every shard, with room for `reserve` more.

    Args:
      k, v: [B, K, C, H], as they are stored; slot c of row b holds a token where c < length[b].
      position: of each row's next token.
      turned: the positions of keys that are to be stored before rotary embedding.
    """
    if turned is not None:
        k = stored_as(k, ctx.turned_back(dequantised(part_of(k)), turned))
    turn = STRIPE * ctx.seq_size
    # A slot to spare (`write_run`).
    slots = -(-(k.shape[2] + reserve + 1) // turn) * turn
    own = ctx.slots(slots // ctx.seq_size)
    k, v = (
        jax.tree.map(lambda part: own.part(resized(part, 2, slots), 2), part_of(x)) for x in (k, v)
    )
    return AppendCache(k, v, length, position, jnp.zeros_like(length), jnp.zeros_like(length))


def compacted(
    store: AppendCache,
    slots: Int[Array, "B K C"],
    count: Int[Array, " B"],
    reserve: int,
    ctx: LayerContext,
    *,
    raw: bool = False,
    whole: bool = False,
) -> AppendCache:
    """A cache of the tokens in these slots, count[b] of each row and kv head, then -1.

    Tokens stand at their slots; with `raw` their keys are stored before rotary embedding. With
    `whole` the new slots are whole on every shard, and never grow.
    """
    k, v = (reading.gather_stored(x, slots, ctx) for x in (store.k, store.v))
    turned = slots if raw else None
    ctx = ctx.undivided() if whole else ctx
    made = cache_of(k, v, count, store.position, reserve, ctx, turned)
    return dataclasses.replace(made, slots_axis="budget") if whole else made


def write_run(
    buffer: Any,
    new: Float[Array, "B T K *H"],
    start: Int[Array, " B"],
    valid: Int[Array, " B"],
    ctx: LayerContext,
) -> Any:
    """Writes each row's first `valid[b]` new tokens into global slots from `start[b]` on.

    In place when `buffer` is donated. A shard writes its own slots. The slot after a row's last
    valid one may get garbage, so a buffer has one slot to spare.
    """
    own = ctx.slots(buffer.shape[2])
    if own.shards == 1:
        return write_rows(buffer, new, start, valid)
    if new.shape[1] == 1:
        return write_rows(buffer, new, own.find(start), valid, whole=False)
    # This shard's tokens follow one another in its slots, but not among the new ones.
    local_B = own.below(start)
    at_BX = own.at(local_B[:, None] + jnp.arange(own.most(new.shape[1]))) - start[:, None]
    at_BX = jnp.clip(at_BX, 0, new.shape[1] - 1)
    at_BX = at_BX.reshape(*at_BX.shape, *(1 for _ in new.shape[2:]))
    mine = jnp.take_along_axis(new, at_BX, axis=1)
    return write_rows(buffer, mine, local_B, own.below(start + valid) - local_B, whole=False)


def write_rows(
    buffer: AnyStored,
    new: Shaped[Array, "B T K *H"],
    start: Int[Array, " B"],
    valid: Int[Array, " B"],
    *,
    whole: bool = True,
) -> AnyStored:
    """`write_run` for a buffer that is whole on every shard, or for one shard's slots.

    Without `whole`, `start` may lie outside the buffer; tokens outside are not written.
    """

    def write(old: Any, part: Array) -> Any:
        rows, first = rows_of(old)
        new_BKTH = laid_as(old, jnp.swapaxes(part, 1, 2))
        rows = _write(rows, new_BKTH, start, valid, first, whole)
        # Else XLA for GPUs writes scales once more in every fusion that reads them, which takes a
        # copy of all layers'.
        return with_rows(old, rows, apart=part.ndim == 3)

    return each_array(write, buffer, stored_as(buffer, new))


def _write(buffer: Array, new: Array, start: Array, valid: Array, first: Any, whole: bool) -> Array:
    """`write_rows` into the buffer's rows from `first` on."""
    if new.shape[0] == new.shape[2] == 1 and whole:
        # The decode step of one row: one small kernel a buffer, whatever `valid` says.
        return jax.lax.dynamic_update_slice(buffer, new, (first, 0, start[0], *_first(buffer)))
    # Of one number a slot: a TPU has another layout for all of them as one row.
    numbers = buffer.ndim == 3 and platform() == "tpu"
    if (new.shape[2] == 1 and not numbers) or new.shape[2] > buffer.shape[2]:
        return _write_lines(buffer, new, start, valid, first)
    if new.shape[0] == 1:
        return _write_row(0, buffer, new, start, valid, first)
    if platform() != "tpu":
        # One kernel for all rows, where a loop over the rows would be a launch each.
        return _write_lines(buffer, new, start, valid, first)
    write = functools.partial(_write_row, new=new, start=start, valid=valid, first=first)
    return jax.lax.fori_loop(0, new.shape[0], write, buffer)


def _write_row(
    row: Any, buffer: Array, new: Array, start: Array, valid: Array, first: Any
) -> Array:
    """One row, as a slice read, changed and written back: no scatter.

    A scatter along the slots makes the TPU compiler move them to the front, a copy of the cache
    there and back (8B shape, 512 tokens: 727 MB of temporaries beside a cache of 537).
    """
    _, heads, slots, *width = buffer.shape
    size = new.shape[2]
    at = jnp.clip(start[row], 0, slots - size)
    place = (first + row, 0, at, *_first(buffer))
    old_1KTH = jax.lax.dynamic_slice(buffer, place, (1, heads, size, *width))
    index_T = at + jnp.arange(size) - start[row]
    mine_T = (index_T >= 0) & (index_T < valid[row])
    new_1KTH = jax.lax.dynamic_slice(new, (row, 0, 0, *_first(buffer)), (1, heads, size, *width))
    # A run that crosses the shard's border is written shifted; rolling keeps it one slice.
    new_1KTH = jnp.roll(new_1KTH, start[row] - at, axis=2)
    merged = jnp.where(mine_T.reshape(-1, *(1 for _ in width)), new_1KTH, old_1KTH)
    return jax.lax.dynamic_update_slice(buffer, merged, place)


def _first(buffer: Array) -> tuple[int, ...]:
    """Where a slice of whole slots begins along the axes after the slots."""
    return (0,) * (buffer.ndim - 3)


def _write_lines(buffer: Array, new_BKTH: Array, start: Array, valid: Array, first: Any) -> Array:
    """A scatter of whole lines of the flattened cache. The cache's layout does not change.

    For one row slices are quicker: 8192 tokens a layer took about 0.05 ms by slices and 0.14 ms by
    lines on an H200 (8B shape, from the profiles of a prefill).
    """
    batch, (_, heads, slots, *width) = new_BKTH.shape[0], buffer.shape
    step_T = jnp.arange(new_BKTH.shape[2])
    slot_BT = start[:, None] + step_T
    inside_BT = (slot_BT >= 0) & (slot_BT < slots) & (step_T < valid[:, None])
    line_BKT = line_numbers(batch, heads, slots, slot_BT[:, None], first)
    # One past the end or later is what `drop` drops; a negative line would wrap around. Each is
    # another one: where lines may meet a GPU writes every two channels by an atomic operation.
    beyond_BKT = buffer.shape[0] * heads * slots + jnp.arange(line_BKT.size).reshape(line_BKT.shape)
    line_BKT = jnp.where(inside_BT[:, None], line_BKT, beyond_BKT)
    flat = buffer.reshape(-1, *width)  # [B*K*S, H]
    new_EH = new_BKTH.reshape(-1, *width)  # [B*K*T, H]
    flat = flat.at[line_BKT.reshape(-1)].set(new_EH, mode="drop", unique_indices=True)
    return flat.reshape(buffer.shape)


def where_rows(pick: Bool[Array, " B"], new: Any, old: Any) -> Any:
    """`new` in the rows of `pick`, else `old`; for any tree of arrays whose first axis is rows.

    An array or a `Plane` that is the same in both is handed on as it is. Where `old` has a `Plane`,
    `new` may have an array that was made anew.
    """

    def choose(a: Any, b: Any) -> Any:
        if a is b:
            return a
        chosen = jnp.where(pick.reshape(-1, *(1,) * (a.ndim - 1)), part_of(a), part_of(b))
        # Of the newer plane only the layer's part is changed again. To write to the older one would
        # keep the arrays of both.
        return written(b, written(a, chosen))

    return each_array(choose, new, old)
