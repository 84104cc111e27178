"""What methods share that evict by an instruction, known before the text is read (CItruS, 4.2).

Each segment of the context holds two row groups: a chunk of the text, and the instruction once
more. Both attend to the cache as it was before the segment and causally to themselves, at the
positions that follow the cache, and neither sees the other; what the instruction looks at says
what leaves. Only the chunk joins. That is two forward passes of the paper in one, equal to them
because no row of one group depends on the other; it costs `width / chunk` more of each layer.
"""

from collections.abc import Iterable
from typing import Any, Literal

import jax.numpy as jnp
from jaxtyping import Array, Float

from jax_longctx.contract import QKV, LayerContext, Prompt, Segment, beside, chunk_segments
from jax_longctx.parts import eviction
from pallas_kernels.attention_mass import attention_mass

__all__ = [
    "Score",
    "layer_scores",
    "look",
    "mass_on_cache",
    "positions",
    "protocol",
    "segments",
    "with_tokens",
]

Score = Literal["probability", "logit"]


@property
def positions(self: Any) -> eviction.Positions:
    """Keys stand at their slots."""
    return "shifted"


@property
def protocol(self: Any) -> eviction.Protocol:
    """Cached tokens leave before a chunk joins, and once more for the question."""
    return "citrus"


def segments(self: eviction.Evictor, prompt: Prompt) -> Iterable[Segment]:
    """The context in chunks, each with the instruction beside it; the question as a probe first.

    Raises:
      InputError: an instruction longer than the cache which it looks at, before anything is read.
    """
    if prompt.stage == "question":
        return eviction.segments(self, prompt)
    instructions = prompt.question or ()
    width = eviction.question_width(self, instructions)
    chunks = chunk_segments(prompt.context or (), self.chunk, "context")
    return (beside(chunk, instructions, width) for chunk in chunks)


def look(
    method: eviction.Evictor, new: QKV, cache: Any, segment: Segment, ctx: LayerContext, rows: str
) -> eviction.Look:
    """One row group of the segment over the budgeted cache and itself."""
    columns = segment.group(rows).columns
    q, k, v = new
    part = q[:, columns], k[:, columns], v[:, columns]
    return eviction.look(method, part, cache, segment.valid_of(rows), ctx)


def mass_on_cache(seen: eviction.Look) -> Float[Array, "B K C"]:
    """Probability that each slot gets, summed over the valid rows and each kv head's group."""
    return attention_mass(
        seen.q, seen.past_k, seen.lse, seen.length, scale=seen.scale, valid=seen.valid
    )


def with_tokens(slots: Float[Array, "B K C"], seen: eviction.Look) -> Float[Array, "B K U"]:
    """Values of slots, and zeros for the tokens of the segment `seen`."""
    return jnp.pad(slots, ((0, 0), (0, 0), (0, seen.k.shape[1])))


def layer_scores(
    method: Any, looks: eviction.Look, joins: eviction.Look, ctx: LayerContext
) -> Float[Array, "B K U"]:
    """Slots by what the rows `looks` pay to them, alike for all heads; `joins` do not compete.

    The sum over heads and rows ranks as their mean does.
    """
    if method.score == "probability":
        given_BKC = mass_on_cache(looks)
    else:
        counts_BT = jnp.arange(looks.q.shape[1]) < looks.valid[:, None]
        q_BTNH = jnp.where(counts_BT[..., None, None], looks.q.astype(jnp.float32), 0)
        batch, heads, _, size = looks.past_k.shape
        q_BKH = q_BTNH.sum(1).reshape(batch, heads, -1, size).sum(2)  # [B, K, G, H] before
        given_BKC = jnp.einsum("BKH,BKCH->BKC", q_BKH, looks.past_k.astype(jnp.float32))
    layer_B1C = ctx.psum_heads(jnp.sum(given_BKC, axis=1, keepdims=True))
    first_C = jnp.arange(layer_B1C.shape[2]) < method.sink
    layer_B1C = jnp.where(first_C, jnp.inf, layer_B1C)
    return with_tokens(jnp.broadcast_to(layer_B1C, given_BKC.shape), joins)
