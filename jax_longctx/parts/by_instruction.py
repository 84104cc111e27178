"""The kinds of CItruS: an instruction, known before prefill, ranks the tokens.

`ByInstruction` (Bai et al. 2024, section 4.2): each segment of the context holds two row groups, a
chunk of the text and the instruction. Both attend to the cache as it was before the segment and
causally to themselves, at the positions that follow the cache; neither sees the other. The
instruction's attention ranks the cached tokens. Only the chunk joins. The paper takes two forward
passes; one gives the same numbers because the groups are independent. It costs `width / chunk` more
in each layer.

`ByLayer` ranks the slots of a layer once for all its heads (section 4.1).
"""

import dataclasses
from collections.abc import Iterable
from typing import Any, ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float

from jax_longctx.contract import (
    INSTRUCTION_ROWS,
    QKV,
    Feed,
    LayerContext,
    Segment,
    WithCache,
    beside,
    chunk_segments,
)
from jax_longctx.parts.evicting import Evicting, Look, Positions, Protocol
from pallas_kernels.common import side_by_side


@dataclasses.dataclass(frozen=True, kw_only=True)
class ByInstruction(Evicting):
    """A method that evicts in CItruS's setting; `Look.instruction` is the instruction's look.

    Keys stand at their slots. Cached tokens leave before a chunk joins, and once more before the
    question. With `needs_question` False prefill needs no instruction.
    """

    # Fixed, so not settings.
    positions: ClassVar[Positions] = "shifted"
    protocol: ClassVar[Protocol] = "citrus"

    needs_question = True

    def segments(self, feed: Feed) -> Iterable[Segment]:
        """The context in chunks, each with the instruction beside it; the question as a probe.

        Raises:
          InputError: an instruction longer than the cache, before any computation.
        """
        if feed.stage == "question" or not self.needs_question:
            return super().segments(feed)
        instructions = feed.question or ()
        width = self.question_width(instructions)
        chunks = chunk_segments(feed.rows, self.chunk, "context")
        return (beside(chunk, instructions, width) for chunk in chunks)

    def attend(self, new: QKV, cache: Any, segment: Segment, ctx: LayerContext) -> WithCache:
        if segment.role != "probe_and_context":
            return super().attend(new, cache, segment, ctx)
        probe = self.look(new, cache, segment, ctx, INSTRUCTION_ROWS)
        chunk = dataclasses.replace(self.look(new, cache, segment, ctx), instruction=probe)
        return side_by_side((chunk.out, chunk.lse), (probe.out, probe.lse)), self.evict(chunk)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ByLayer(ByInstruction):
    """Ranks a layer's slots by the attention of the chunk, or of the instruction in its place.

    Attributes:
      sink: first tokens that never leave (appendix I; the paper's default is 0).
    """

    sink: int = 0

    def __post_init__(self) -> None:
        self.at_least(0, "sink")
        super().__post_init__()

    @property
    def kept(self) -> int:
        return self.sink

    def rank(self, seen: Look) -> Float[Array, "B 1 U"]:
        """The sum over heads and rows, in place of their mean."""
        given_BKC = (seen.instruction or seen).mass_on_cache()
        layer_B1C = seen.ctx.psum_heads(jnp.sum(given_BKC, axis=1, keepdims=True))
        first_C = jnp.arange(layer_B1C.shape[2]) < self.sink
        return seen.with_tokens(jnp.where(first_C, jnp.inf, layer_B1C))
