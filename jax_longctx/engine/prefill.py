"""One segment of a text or a question through the model."""

from typing import Any, Literal

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jax_longctx.contract import CHUNK_ROWS, RowGroup, Segment
from jax_longctx.engine.compiling import IN_PLACE, LOOPED, Program, program
from jax_longctx.engine.layers import hidden_states
from jax_longctx.engine.setup import Ends, Setup, without_layers
from jax_longctx.models.llama import ends_of

Logits = Literal["none", "hidden", "last", "all"]


def _segment(
    setup: Setup,
    params: Any,
    caches: tuple[Any, ...],
    segment: Segment,
    total: Int[Array, " B"],
    last: Float[Array, "B V"] | None,
    logits: Logits,
) -> tuple[tuple[Any, ...], Any]:
    """One segment through the model.

    Args:
      last: each row's logits so far, kept where the row has no token in this segment; given when
        `logits` is "last".
      logits: what to return beside the caches: a marker that is ready when the segment is done,
        the hidden states `[B, T, D]` that logits are made of, the logits of each row's last valid
        token, or of all tokens `[B, T, V]` (of the chunk rows).
    """
    hidden_BTD, caches = hidden_states(setup, params, caches, segment, total)
    if logits == "none":
        return caches, _marker(hidden_BTD)
    columns = segment.group(CHUNK_ROWS)
    given = hidden_BTD, segment.valid_of(CHUNK_ROWS), last
    return caches, _wanted(setup.ends, without_layers(params), *given, columns, logits)


# All layers as one program.
whole_segment = Program(_segment, static=(0, 6), donate_argnums=(2, 5), **IN_PLACE, **LOOPED)


def run_segment(setup: Setup, *args: Any) -> tuple[tuple[Any, ...], Any]:
    """`whole_segment` or, with `Setup.by_layer`, its layers from Python."""
    return (_segment if setup.by_layer else whole_segment)(setup, *args)


@program()
def _marker(hidden_BTD: Float[Array, "B T D"]) -> Float[Array, ""]:
    """A number that is ready when these are."""
    return jnp.sum(hidden_BTD[:1, :1, :1].astype(jnp.float32))


@program(static=(0, 5, 6), donate_argnums=4, **IN_PLACE)
def _wanted(
    ends: Ends,
    params: Any,
    hidden_BTD: Float[Array, "B T D"],
    valid_B: Int[Any, " B"],
    last: Float[Array, "B V"] | None,
    columns: RowGroup,
    logits: Logits,
) -> Array:
    """What `run_segment` returns beside the caches, of these columns."""
    hidden_BTD = hidden_BTD[:, columns.columns]
    if logits == "hidden":
        return hidden_BTD
    if logits == "all":
        return ends_of(ends.config, params).logits(hidden_BTD)
    assert last is not None
    ends_B11 = jnp.maximum(valid_B - 1, 0)[:, None, None]
    new_BV = ends.logits(params, jnp.take_along_axis(hidden_BTD, ends_B11, axis=1)[:, 0])
    return jnp.where((valid_B > 0)[:, None], new_BV, last)
