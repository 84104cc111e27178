"""How Star cuts a text: which block goes to which shard, behind which anchor, at what cost.

The text's slots are dealt to the shards in runs of whole blocks, so that slot s is token s. A
shard has room for `blocks_each` of them and fills them in turns: all shards read their first block
at once, then their second ... Before a turn each shard reads the anchor of its block; once for all
turns where all blocks have the same. As many blocks as shards need slots for no token more: the
text with its question and answer fits in shards x block. A token beyond gives every shard room for
a block more, which doubles the cache and leaves shards idle; make the block a little larger.

To keep one block a shard there, question and answer would live in `room` slots more on each. Two
things are missing for it:

- the engine chooses the slots (`engine.capacity.bucket`, rounded up so that few programs are
  compiled) and tells `init_cache` those alone, of which 4 blocks with an answer and 4.01 blocks are
  the same. A method would have to be asked, in an optional duty beside `step_variant`, how many
  slots a text and a reserve take: shards x (blocks x block + room). All who call `bucket` for a
  text (engine, footprint, planning, batch) would ask it; an evaluation's common `capacity` too;
- slots must follow the text after phase 1, for any method to decode over them. A shard's blocks
  begin at token i x blocks x block but its slots at i x (blocks x block + room), so that `finish`
  would send the first i x room tokens of shard i to the shard before (one `send_seq` of at most
  (shards - 1) x room tokens a layer, less than a block) and move the rest down as far, in place.
  Phase 1 would count positions by blocks, no longer by `seq_offset` of the slots.

The anchors of the paper's section 4.2 (Table 3), which are read before every block: content
`constant`, `random` or `shuffled`, or that of the block before (`previous`); positions `previous`
(of the block before) or `random` (drawn below the block, ascending).
"""

import random
from collections.abc import Iterator, Sequence
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jax_longctx.contract import PrefillWork, Prompt, Segment, spread_segment, tail_size
from jax_longctx.errors import ConfigError

__all__ = [
    "ANCHOR",
    "SENDS",
    "Blocks",
    "anchor_positions",
    "anchor_tokens",
    "blocks_each",
    "check",
    "one_anchor",
    "prefill_work",
    "segments",
]

# Variants of segments: the anchor's tokens, and a whole first block whose head is the anchor.
ANCHOR = "anchor"
SENDS = "sends"

Columns = list[list[list[int]]]  # of each row, the tokens of each shard


class Blocks(Protocol):
    """The settings of Star that say how a text is cut (see `star.Star`)."""

    @property
    def block(self) -> int: ...
    @property
    def anchor(self) -> int | None: ...
    @property
    def anchor_size(self) -> int: ...
    @property
    def anchor_kv(self) -> str: ...
    @property
    def content(self) -> str: ...
    @property
    def positions(self) -> str: ...
    @property
    def constant(self) -> int: ...
    @property
    def seed(self) -> int: ...


def check(star: Blocks) -> None:
    """Raises ConfigError where these settings do not go together."""
    if star.block < 1:
        raise ConfigError(f"star: block must be at least 1, got {star.block}")
    if not 0 <= star.anchor_size <= star.block:
        raise ConfigError(
            f"star: anchor must be from 0 to the block's {star.block} tokens, got {star.anchor}"
        )
    if star.anchor_kv == "broadcast" and not one_anchor(star):
        raise ConfigError(
            "star: anchor_kv=broadcast sends the first block's own keys; with other content or "
            "positions set anchor_kv=recompute"
        )


def one_anchor(star: Blocks) -> bool:
    """Whether all blocks have the same."""
    return star.content == "first" and star.positions == "first"


def blocks_each(star: Blocks, slots: int, shards: int) -> int:
    """Blocks that a shard has room for."""
    return -(-slots // (star.block * shards))


def segments(star: Blocks, prompt: Prompt) -> Iterator[Segment]:
    """The context, a row's end marked in the last segment that holds tokens of it."""
    each = blocks_each(star, prompt.slots, prompt.shards)
    fed = [part for turn in range(each) for part in _turn(star, prompt, turn, each)]
    last: dict[int, int] = {}
    for index, (columns, _, _) in enumerate(fed):
        last |= {b: index for b, row in enumerate(columns) if any(row)}
    for index, (columns, chunk, variant) in enumerate(fed):
        ends = np.array([last.get(b) == index for b in range(len(columns))])
        most = max(len(part) for row in columns for part in row)
        yield spread_segment(columns, tail_size(most, chunk), ends, variant)


def _turn(star: Blocks, prompt: Prompt, turn: int, each: int) -> Iterator[tuple[Columns, int, str]]:
    """What is fed in every shard's turn-th block of `each`: tokens, chunk and variant."""
    rows, size, shards = prompt.context or (), star.block, range(prompt.shards)
    starts = [(s * each + turn) * size for s in shards]
    blocks = [[list(row[at : at + size]) for at in starts] for row in rows]
    if not any(part for row in blocks for part in row):
        return
    if _reads_anchor(star, turn):
        anchors = [
            [
                anchor_tokens(star, row, at, prompt.vocab_size)
                if _has_anchor(star, len(row), s * each, turn, each)
                else []
                for s, at in zip(shards, starts, strict=True)
            ]
            for row in rows
        ]
        yield from ((part, prompt.chunk, ANCHOR) for part in _chunks(anchors, prompt.chunk))
    # The keys that are sent must be there before the block's last token attends to them.
    sends = turn == 0 and star.anchor_kv == "broadcast" and star.anchor_size > 0
    chunk, variant = (star.block, SENDS) if sends else (prompt.chunk, "")
    yield from ((part, chunk, variant) for part in _chunks(blocks, chunk))


def _reads_anchor(star: Blocks, turn: int) -> bool:
    """Whether anchors are read before the blocks of this turn."""
    return star.anchor_kv == "recompute" and (turn == 0 or not one_anchor(star))


def _has_anchor(star: Blocks, length: int, first: int, turn: int, each: int) -> bool:
    """Whether the shard whose first block is `first` needs an anchor at this turn.

    For its block of this turn, or for a later one that shares it.
    """
    turns = range(turn, each) if one_anchor(star) else [turn]
    return any(0 < (first + t) * star.block < length for t in turns)


def _chunks(columns: Columns, size: int) -> Iterator[Columns]:
    """Every shard's tokens in parts of at most `size`."""
    longest = max((len(part) for row in columns for part in row), default=0)
    for start in range(0, longest, size):
        yield [[part[start : start + size] for part in row] for row in columns]


def anchor_tokens(star: Blocks, row: Sequence[int], start: int, vocab_size: int) -> list[int]:
    """Tokens of the anchor of the block that starts there."""
    size, draw = star.anchor_size, random.Random(f"{star.seed}/{start}")
    if star.content == "constant":
        return [star.constant] * size
    if star.content == "random":
        return [draw.randrange(vocab_size) for _ in range(size)]
    if star.content == "previous":
        return list(row[start - star.block : start - star.block + size])
    first = list(row[:size])
    if star.content == "shuffled":
        draw.shuffle(first)
    return first


def anchor_positions(
    star: Blocks, index: Int[Array, "B T"], block: Int[Array, " B"], longest: int
) -> Int[Array, "B T"]:
    """Where the anchor's tokens of that index stand before such a block of `longest` slots."""
    if star.positions == "first":
        return index
    if star.positions == "previous":
        return (block[:, None] - 1) * star.block + index

    # Ascending, no position twice, below the block: the same draw in every layer.
    def draw(block: Array) -> Array:
        key = jax.random.fold_in(jax.random.key(star.seed), block)
        weight_S = jax.random.uniform(key, (longest,))
        below_S = jnp.where(jnp.arange(longest) < block * star.block, weight_S, -1.0)
        return jnp.sort(jax.lax.top_k(below_S, star.anchor_size)[1])

    drawn_BA = jax.vmap(draw)(block)
    return jnp.take_along_axis(drawn_BA, jnp.minimum(index, star.anchor_size - 1), axis=1)


def prefill_work(star: Blocks, prompt: Prompt) -> PrefillWork:
    """The work of the shard with the most: blocks of t tokens behind an anchor of a.

    Every block costs t tokens and t (t + 1) / 2 + a t pairs, an anchor that is read a tokens and
    a (a + 1) / 2 pairs. The anchor that is sent is a sum over the shards, all but one zero.
    """
    (row,) = prompt.context or ((),)
    each, shards = blocks_each(star, prompt.slots, prompt.shards), prompt.shards
    return max(
        (_shard_work(star, prompt, len(row), s * each, each) for s in range(shards)),
        key=lambda work: (work.pairs, work.tokens),
    )


def _shard_work(star: Blocks, prompt: Prompt, length: int, first: int, each: int) -> PrefillWork:
    """Of the shard whose first block is `first`."""
    size, a, chunk, shards = star.block, star.anchor_size, prompt.chunk, prompt.shards
    tokens = pairs = passes = sums = 0
    for turn in range(each):
        start = (first + turn) * size
        own = min(max(length - start, 0), size)
        if not own:
            break
        if a and _reads_anchor(star, turn) and _has_anchor(star, length, first, turn, each):
            tokens, pairs = tokens + a, pairs + a * (a + 1) // 2
            passes += -(-a // chunk)
        sends = turn == 0 and star.anchor_kv == "broadcast" and a > 0
        sums += sends and shards > 1
        tokens, pairs = tokens + own, pairs + own * (own + 1) // 2 + (a * own if start else 0)
        passes += 1 if sends else -(-own // chunk)
    received = sums * 2 * a * (shards - 1) / shards
    return PrefillWork(tokens, pairs, received, 2 * sums, passes)
