"""Segments: the pieces of a prompt, in a few fixed shapes."""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, cast

import jax
import numpy as np
from jaxtyping import Array, Bool, Int

from jax_longctx.sharding import OwnAxis, axes_field

Role = Literal["context", "probe", "probe_and_context", "query", "decode"]
Stage = Literal["context", "question"]


@dataclasses.dataclass(frozen=True)
class RowGroup:
    """A named block of a segment's T columns: `columns = slice(start, start + size)`."""

    name: str
    start: int
    size: int

    @property
    def columns(self) -> slice:
        return slice(self.start, self.start + self.size)


CHUNK_ROWS = "chunk"
INSTRUCTION_ROWS = "instruction"

# The variant of segments in which a row ends, for methods that do more there.
ENDS = "ends"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Segment:
    """A fixed-shape piece of the prompt, fed through the model in one pass.

    Attributes:
      tokens: token ids; within each row group, row b's first `valid[b, group]` columns are valid.
        The rest is padding, which no cache keeps and no score counts.
      valid: valid tokens of each row in each group; a row with none is a complete no-op.
      ends: whether the row's context (or question) ends with this segment.
      role: `context`: the text itself; `probe`: tokens that attend to the context without joining
        it; `probe_and_context`: both, in two row groups; `query`: the question, whose last token's
        logits start the answer; `decode`: one generated token.
      groups: static layout of the columns. Positions come from the cache.
      variant: a static tag of the method, for programs that differ.
      spread: the columns are divided over the shards of the slots, one row group. A shard computes
        its own columns, of which the first `valid[b, shard]` are valid.
    """

    tokens: Int[Array, "B T"] = axes_field("batch", OwnAxis("token_axis"))
    valid: Int[Array, "B R"] = axes_field("batch", OwnAxis("valid_axis"))
    ends: Bool[Array, " B"] = axes_field("batch")
    role: Role = dataclasses.field(default="context", metadata={"static": True})
    groups: tuple[RowGroup, ...] = dataclasses.field(default=(), metadata={"static": True})
    variant: str = dataclasses.field(default="", metadata={"static": True})
    spread: bool = dataclasses.field(default=False, metadata={"static": True})

    @property
    def token_axis(self) -> str | None:
        """The logical axis of the columns."""
        return "tokens" if self.spread else None

    @property
    def valid_axis(self) -> str | None:
        """The logical axis of a row's `valid`."""
        return "shards" if self.spread else None

    @property
    def chunk_lengths(self) -> np.ndarray:
        """On the host: tokens of text in each row; 0 where the segment is a probe alone."""
        if self.spread:
            return np.asarray(self.valid).sum(axis=1)
        for column, group in enumerate(self.groups):
            if group.name == CHUNK_ROWS:
                return np.asarray(self.valid)[:, column]
        return np.zeros(self.valid.shape[0], np.int32)

    def group(self, name: str) -> RowGroup:
        """The row group of that name; KeyError when the segment has none."""
        for group in self.groups:
            if group.name == name:
                return group
        raise KeyError(f"segment {self.role!r} has row groups {[g.name for g in self.groups]}")

    def valid_of(self, name: str = CHUNK_ROWS) -> Int[Any, " B"]:
        """Valid tokens of each row in the named group."""
        return self.valid[:, self.groups.index(self.group(name))]


@dataclasses.dataclass(frozen=True)
class Prompt:
    """Token rows of one stage, each of its own length.

    At stage `context` the question is None unless the method needs it at prefill. At stage
    `question` the context is in the cache and `context` is None.

    Attributes:
      slots, shards: capacity of the caches, and the number of shards that hold it.
      vocab_size: number of token ids.
    """

    stage: Stage
    chunk: int
    context: Sequence[Sequence[int]] | None = None
    question: Sequence[Sequence[int]] | None = None
    slots: int = 0
    shards: int = 1
    vocab_size: int = 0

    @property
    def rows(self) -> Sequence[Sequence[int]]:
        """The rows of this stage."""
        return (self.context if self.stage == "context" else self.question) or ()


def make_segment(rows: Sequence[Sequence[int]], size: int, role: Role, ends: np.ndarray) -> Segment:
    """One row group of `size` columns from rows of at most that length, padded on the right."""
    tokens = np.zeros((len(rows), size), np.int32)
    for b, row in enumerate(rows):
        tokens[b, : len(row)] = row
    valid = np.array([[len(row)] for row in rows], np.int32)
    # numpy arrays on the host, which become JAX arrays at the `jit` border.
    arrays = cast(tuple[Any, Any, Any], (tokens, valid, ends))
    return Segment(*arrays, role, (RowGroup(CHUNK_ROWS, 0, size),))


def spread_segment(
    rows: Sequence[Sequence[Sequence[int]]], size: int, ends: np.ndarray, variant: str = ""
) -> Segment:
    """Context tokens `rows[b][shard]`, in `size` columns on each shard."""
    shards = len(rows[0])
    tokens = np.zeros((len(rows), shards, size), np.int32)
    for b, row in enumerate(rows):
        for shard, part in enumerate(row):
            tokens[b, shard, : len(part)] = part
    valid = np.array([[len(part) for part in row] for row in rows], np.int32)
    arrays = cast(tuple[Any, Any, Any], (tokens.reshape(len(rows), -1), valid, ends))
    groups = (RowGroup(CHUNK_ROWS, 0, shards * size),)
    return Segment(*arrays, "context", groups, variant, spread=True)


def decode_segment(
    tokens: Int[Any, "B 1"], valid: Int[Any, "B 1"], done: Bool[Any, " B"], variant: str
) -> Segment:
    """One generated token of each row; `valid` is 0 in rows that are done."""
    return Segment(tokens, valid, done, "decode", (RowGroup(CHUNK_ROWS, 0, 1),), variant)


def chunk_segments(rows: Sequence[Sequence[int]], chunk: int, role: Role) -> Iterator[Segment]:
    """Ragged rows in chunks of `chunk` tokens, each padded to that.

    Row b contributes `clip(len_b - i * chunk, 0, chunk)` tokens to chunk i. Where all rows fit in
    one chunk it is padded to `tail_size`. So texts of any lengths share few programs.
    """
    lengths = np.array([len(row) for row in rows])
    longest = int(lengths.max(initial=0))
    size = tail_size(min(chunk, longest), chunk)
    for start in range(0, longest, chunk):
        ends = (lengths > start) & (lengths <= start + chunk)
        yield make_segment([row[start : start + chunk] for row in rows], size, role, ends)


def question_segments(rows: Sequence[Sequence[int]], chunk: int) -> Iterator[Segment]:
    """The question in chunks, and its last token in a segment of its own: it chooses alone."""
    some = np.array([len(row) > 0 for row in rows])
    for segment in chunk_segments([row[:-1] for row in rows], chunk, "query"):
        yield dataclasses.replace(segment, ends=np.zeros_like(some))
    yield make_segment([row[-1:] for row in rows], 1, "query", some)


def mark_ends(segments: Iterable[Segment]) -> Iterator[Segment]:
    """The same segments, of variant ENDS where some row ends."""
    for segment in segments:
        ends = bool(np.any(np.asarray(segment.ends)))
        yield dataclasses.replace(segment, variant=ENDS) if ends else segment


def beside(chunk: Segment, instructions: Sequence[Sequence[int]], width: int) -> Segment:
    """A segment of a chunk's columns, then `width` columns of each row's instruction.

    A row whose context has ended is a no-op: its instruction does not count either.
    """
    size = chunk.tokens.shape[1]
    looking = np.asarray(chunk.valid)[:, 0] > 0
    rows = [row if looks else () for row, looks in zip(instructions, looking, strict=True)]
    probe = make_segment(rows, width, "probe", np.asarray(chunk.ends))
    arrays = (
        np.concatenate([np.asarray(part.tokens) for part in (chunk, probe)], axis=1),
        np.concatenate([np.asarray(part.valid) for part in (chunk, probe)], axis=1),
    )
    tokens, valid = cast(tuple[Any, Any], arrays)
    groups = (*chunk.groups, RowGroup(INSTRUCTION_ROWS, size, width))
    return Segment(tokens, valid, chunk.ends, "probe_and_context", groups)


def tail_size(tokens: int, chunk: int) -> int:
    """The smallest of chunk, chunk/4, chunk/16 ... (at least 8) that holds `tokens`."""
    size = chunk
    while size // 4 >= max(tokens, 8):
        size //= 4
    return size
