"""The programs that a run uses, each once, with the shapes that it calls them with.

- `context`: the pieces of the text as the method feeds them. Most are alike; the first, the last,
  an anchor's or one that ends a row may be of another shape or variant, a program of its own;
- `finish`: the end of the context, and of the question where the method then makes new caches;
- `question`: the pieces of a question, the longest that leaves room for a token of answer;
- `decode`: a block of an answer's steps, one program for each kind of step (`contract.Scheduled`).

What makes the empty caches and chooses the first token holds nothing that these do not.
"""

import dataclasses
import functools
import warnings
from collections.abc import Iterable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jax_longctx.contract import Prompt, Segment
from jax_longctx.engine import Sampling, programs
from jax_longctx.engine.capacity import bucket, bytes_per_device, staged_caches
from jax_longctx.engine.engine import BLOCK
from jax_longctx.engine.programs import answer_variants
from jax_longctx.planning.plan import PlanRequest
from jax_longctx.planning.work import abstract_tree, context_segments, weight_bytes
from jax_longctx.sharding import tree_shardings

__all__ = ["Kind", "UsedProgram", "used_programs"]

Kind = Literal["context", "finish", "question", "decode"]


@dataclasses.dataclass(frozen=True)
class UsedProgram:
    """One program and what it is called with.

    Attributes:
      name: of one run's programs no two have the same.
      function: of `engine.programs`, compiled by `jit`.
      args: its arguments; arrays as shapes, or as numpy.
      resident: bytes of weights and caches on each device while it runs.
    """

    name: str
    kind: Kind
    function: Any
    args: tuple[Any, ...]
    resident: int

    def lower(self) -> Any:
        """The program, ready to be compiled."""
        with warnings.catch_warnings():
            # As where it is run: a cache that shrinks cannot be finished in place.
            warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
            return self.function.lower(*self.args)


@dataclasses.dataclass
class _Listing:
    """What the programs of a run have in common."""

    setup: programs.Setup
    rows: int
    found: list[UsedProgram] = dataclasses.field(default_factory=list)

    @functools.cached_property
    def params(self) -> Any:
        return abstract_tree(self.setup)

    @property
    def total(self) -> Any:
        return jax.ShapeDtypeStruct((self.rows,), jnp.int32)

    def add(self, name: str, kind: Kind, caches: Any, function: Any, *args: Any) -> None:
        """A program; its name is made one of its own by a number."""
        same = sum(each.name.split(" #")[0] == name for each in self.found)
        name = f"{name} #{same + 1}" if same else name
        resident = weight_bytes(self.setup) + bytes_per_device(self.setup.mesh, caches)
        self.found.append(UsedProgram(name, kind, function, args, resident))

    def segments(self, kind: Kind, caches: Any, segments: Iterable[Segment]) -> None:
        """Those of a stage's segments, each signature once."""
        signatures = set()
        logits = None
        if kind == "question":
            shape = (self.rows, self.setup.config.vocab_size)
            logits = jax.ShapeDtypeStruct(shape, jnp.float32)
        for segment in segments:
            leaves, structure = jax.tree.flatten(segment)
            signature = structure, tuple(np.shape(leaf) for leaf in leaves)
            if signature in signatures:
                continue
            signatures.add(signature)
            self.add(
                _segment_name(kind, segment, self.setup.mesh.shape["seq"]),
                kind,
                caches,
                programs.whole_segment,
                self.setup,
                self.params,
                _placed(self.setup, caches),
                # Rows are alike: one was cut.
                jax.tree.map(lambda leaf: np.repeat(leaf, self.rows, axis=0), segment),
                self.total,
                logits,
                "last" if kind == "question" else "none",
            )

    def decode(self, caches: Any, tokens: int) -> None:
        """One program for all kinds of steps of an answer of so many tokens."""
        variants = answer_variants(self.setup.method, tokens)
        kinds = " and ".join(filter(None, variants))
        self.add(
            f"decode, {kinds} steps" if kinds else "decode",
            "decode",
            caches,
            programs.decode_block,
            self.setup,
            self.params,
            _placed(self.setup, caches),
            _state(self.rows),
            self.total,
            jax.ShapeDtypeStruct((BLOCK,), jnp.int32),
            jax.ShapeDtypeStruct((3,), jnp.float32),
            (BLOCK, variants, Sampling().static()),
        )


def used_programs(request: PlanRequest, setup: programs.Setup, rows: int) -> list[UsedProgram]:
    """What a run of `rows` rows uses, in the order of first use."""
    context, reserve, shards = request.context, request.reserve, setup.mesh.shape["seq"]
    empty, kept, answering = staged_caches(setup, rows, context, reserve)
    slots = bucket(context + reserve + 1, shards)
    question = max(reserve - 1, 1)
    listing = _Listing(setup, rows)
    listing.segments("context", empty, context_segments(setup, 1, context, slots, question))
    listing.add(
        "end of the context",
        "finish",
        empty,
        programs.finish_donated,
        setup,
        _placed(setup, empty),
        listing.total,
        "context",
        reserve,
    )
    asked = Prompt(
        "question",
        setup.chunk,
        question=[range(question)],
        shards=shards,
        vocab_size=setup.config.vocab_size,
    )
    listing.segments("question", kept, setup.method.segments(asked))
    if setup.method.info.shrinks:
        listing.add(
            "end of the question",
            "finish",
            kept,
            programs.whole_finish,
            setup,
            _placed(setup, kept),
            listing.total,
            "question",
            bucket(reserve),
        )
    listing.decode(answering, reserve)
    return listing.found


def _segment_name(kind: Kind, segment: Segment, shards: int) -> str:
    columns = segment.tokens.shape[1]
    size = f"{shards} x {columns // shards:,}" if segment.spread else f"{columns:,}"
    role = "" if segment.role in (kind, "query") else f" {segment.role.replace('_', ' ')}"
    variant = f" ({segment.variant})" if segment.variant else ""
    return f"{kind}{role}{variant}, {size} tokens"


def _placed(setup: programs.Setup, caches: Any) -> Any:
    """Shapes with their shardings."""
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        caches,
        tree_shardings(setup.mesh, caches),
    )


def _state(rows: int) -> programs.DecodeState:
    def each(dtype: Any, *shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype)

    return programs.DecodeState(
        token=each(jnp.int32, rows),
        done=each(jnp.bool_, rows),
        count=each(jnp.int32, rows),
        limit=each(jnp.int32, rows),
        stops=each(jnp.int32, 2),
        seen=None,
        finite=each(jnp.bool_, rows),
        keys=each(jnp.uint32, 2 * rows),
    )
