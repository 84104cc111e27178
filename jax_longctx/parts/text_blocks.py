"""Star's blocks: how a text is divided over the shards, the anchors, and the cost.

Each shard holds a run of whole blocks, so slot s is token s. The shards read in turns: all read
their first block at once, then their second, and so on. Before a turn each shard reads the anchor
of its block; an anchor that all blocks share is read once.

Context, question and answer that fit in shards x block tokens take one block a shard. One token
more gives every shard a second block, which doubles the cache and leaves shards idle: make the
block a little larger. To avoid that, the engine would have to ask the method how many slots a text
needs (`init_cache` gets the slots alone), and `finish` would have to move blocks to where slots
follow the text, by one `send_seq` of less than a block a layer.

`research/star_anchors.py` has the anchors of the paper's section 4.2, which differ from block to
block (`one_anchor` False).
"""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jax_longctx.contract import (
    CacheShape,
    Feed,
    Method,
    PrefillWork,
    Segment,
    spread_segment,
    tail_size,
)
from jax_longctx.sharding import axes_field
from pallas_kernels.common import Stored

# Variants of segments: the anchor's tokens, and a whole first block whose head is the anchor.
ANCHOR = "anchor"
SENDS = "sends"

Columns = list[list[list[int]]]  # of each row, the tokens of each shard


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StarCache:
    """Phase 1: each shard fills its own slots.

    Attributes:
      decode: what phase 2 reads; its store's slot s is the text's token s.
      filled: tokens of the text that a shard has read, from its first slot on.
      anchor_k, anchor_v: keys (rotated) and values of the shard's anchor.
      anchored: the number of them.
      queries: sum of the rotated queries that a shard has read, where phase 2 needs it.
    """

    decode: Any
    filled: Int[Array, "B X"] = axes_field("batch", "shards")
    anchor_k: Stored = axes_field("batch", "kv_heads", "own_slots", None)
    anchor_v: Stored = axes_field("batch", "kv_heads", "own_slots", None)
    anchored: Int[Array, "B X"] = axes_field("batch", "shards")
    queries: Float[Array, "B X N H"] | None = axes_field("batch", "shards", "heads", None)

    def observed(self, q: Float[Array, "B T N H"], valid: Int[Array, " B"]) -> "StarCache":
        """Adds each row's first `valid[b]` queries to the sum, if there is one."""
        if self.queries is None:
            return self
        read_BT11 = (jnp.arange(q.shape[1]) < valid[:, None])[..., None, None]
        new = jnp.sum(jnp.where(read_BT11, q.astype(jnp.float32), 0.0), axis=1)[:, None]
        return dataclasses.replace(self, queries=self.queries + new)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Blocks(Method):
    """A method that prefills the context in blocks side by side, each after an anchor.

    Attributes:
      block: b, tokens of a block. The paper takes a quarter of the text, at most 32,768.
      anchor: a, tokens of the anchor; a whole block unless given, 0 for none.
      anchor_kv: `recompute` reads the anchor on every shard, `broadcast` sends its keys.
    """

    block: int = 32768
    anchor: int | None = None
    anchor_kv: Literal["recompute", "broadcast"] = "recompute"

    phase = "prefill"
    keeps_all = append_only = True
    cannot_slide = "it reads blocks of a text side by side, and a window reaches across blocks"

    def __post_init__(self) -> None:
        self.at_least(1, "block")
        if not 0 <= self.anchor_size <= self.block:
            raise self.refused(
                f"anchor must be from 0 to the block's {self.block} tokens, got {self.anchor}"
            )

    @property
    def anchor_size(self) -> int:
        """a, in tokens."""
        return self.block if self.anchor is None else self.anchor

    @property
    def one_anchor(self) -> bool:
        """Whether all blocks share one anchor."""
        return True

    def _blocks_each(self, slots: int, shards: int) -> int:
        """Blocks on each shard."""
        return -(-slots // (self.block * shards))

    def empty_cache(self, shape: CacheShape, decode: Method) -> StarCache:
        """An empty cache of whole blocks on every shard, around the cache of `decode`."""
        each = self._blocks_each(shape.slots, shape.shards)
        slots = dataclasses.replace(shape, slots=each * self.block * shape.shards)
        # At least one slot: arrays without elements cannot be donated.
        size = max(self.anchor_size, 1) * shape.shards
        counts = (shape.batch, shape.shards)
        queries = None
        if decode.wants_queries:
            queries = jnp.zeros((*counts, shape.num_heads, shape.head_dim), jnp.float32)
        return StarCache(
            decode.init_cache(slots),
            jnp.zeros(counts, jnp.int32),
            shape.empty_slots(size),
            shape.empty_slots(size),
            jnp.zeros(counts, jnp.int32),
            queries,
        )

    def segments(self, feed: Feed) -> Iterable[Segment]:
        """The context; a row ends in the last segment that holds tokens of it."""
        # Columns, their most tokens in a long text, the size of a chunk, the variant.
        fed: list[tuple[Columns, int, int, str]] = []
        longest, most = max(map(len, feed.rows), default=0), min(feed.chunk, self.block)
        for anchors, blocks, sends in self._turns(feed):
            fed += [(part, 0, most, ANCHOR) for part in _chunks(anchors, most)]
            # One segment: the anchor is sent before the block's last token attends to it.
            chunk, variant = (self.block, SENDS) if sends else (most, "")
            for index, part in enumerate(_chunks(blocks, chunk)):
                full = min(chunk, self.block - index * chunk) if longest > chunk else 0
                fed.append((part, full, chunk, variant))
        last: dict[int, int] = {}
        for index, (columns, *_) in enumerate(fed):
            last |= {b: index for b, row in enumerate(columns) if any(row)}
        for index, (columns, full, chunk, variant) in enumerate(fed):
            ends = np.array([last.get(b) == index for b in range(len(columns))])
            held = max(len(part) for row in columns for part in row)
            # A last block that is short shares the programs of the whole ones.
            yield spread_segment(columns, tail_size(max(held, full), chunk), ends, variant)

    def _turns(self, feed: Feed) -> Iterator[tuple[Columns, Columns, bool]]:
        """Anchors and blocks that the shards read in each turn; whether the anchor is sent."""
        rows, size, shards = feed.context or (), self.block, range(feed.shards)
        each, shared = self._blocks_each(feed.slots, feed.shards), self.one_anchor
        for turn in range(each):
            starts = [(s * each + turn) * size for s in shards]
            blocks = [[list(row[at : at + size]) for at in starts] for row in rows]
            # A shared anchor is read once, by the shards that have a block behind it.
            reads = self.anchor_kv == "recompute" and (turn == 0 or not shared)
            needing = range(each) if shared else [turn]
            anchors = [
                [
                    self.anchor_tokens(row, starts[s], feed.vocab_size)
                    if reads and any(0 < (s * each + t) * size < len(row) for t in needing)
                    else []
                    for s in shards
                ]
                for row in rows
            ]
            sends = turn == 0 and self.anchor_kv == "broadcast" and self.anchor_size > 0
            yield anchors, blocks, sends

    def anchor_tokens(self, row: Sequence[int], start: int, vocab_size: int) -> list[int]:
        """Tokens of the anchor of the block that starts there."""
        return list(row[: self.anchor_size])

    def anchor_positions(
        self, index: Int[Array, "B T"], block: Int[Array, " B"], longest: int
    ) -> Int[Array, "B T"]:
        """Positions of the anchor's tokens before a block; `longest` is the number of slots."""
        return index

    def prefill_work(self, feed: Feed) -> PrefillWork:
        """The work of the shard with the most pairs.

        A block of t tokens behind an anchor of a costs t tokens and t (t + 1) / 2 + a t pairs;
        reading an anchor costs a tokens and a (a + 1) / 2 pairs. Sending one is a sum over shards.
        """
        turns = list(self._turns(feed)) if feed.context else []
        works = (self._shard_work(feed, turns, shard) for shard in range(feed.shards))
        return max(works, key=lambda work: (work.pairs, work.tokens))

    def _shard_work(
        self, feed: Feed, turns: list[tuple[Columns, Columns, bool]], shard: int
    ) -> PrefillWork:
        a, chunk, shards = self.anchor_size, feed.chunk, feed.shards
        tokens = pairs = passes = sums = 0
        for turn, (anchors, blocks, sends) in enumerate(turns):
            read, own = len(anchors[0][shard]), len(blocks[0][shard])
            if not own:
                break
            tokens += read + own
            pairs += read * (read + 1) // 2 + own * (own + 1) // 2
            # All blocks but the text's first attend to an anchor.
            pairs += a * own if shard or turn else 0
            passes += -(-read // chunk) + (1 if sends else -(-own // chunk))
            sums += sends and shards > 1
        received = sums * 2 * a * (shards - 1) / shards
        return PrefillWork(tokens, pairs, received, 2 * sums, passes)


def _chunks(columns: Columns, size: int) -> Iterator[Columns]:
    """Every shard's tokens in parts of at most `size`."""
    longest = max((len(part) for row in columns for part in row), default=0)
    for start in range(0, longest, size):
        yield [[part[start : start + size] for part in row] for row in columns]
