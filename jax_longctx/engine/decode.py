"""Decode steps, in blocks."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jax_longctx.contract import Method, decode_segment
from jax_longctx.engine.compiling import IN_PLACE, STEPPED, Program, is_listing, program
from jax_longctx.engine.layers import hidden_states
from jax_longctx.engine.sampling import (
    Choices,
    RowValues,
    SamplingStatic,
    choices_of,
    next_token,
    no_choices,
)
from jax_longctx.engine.setup import Ends, Setup, everywhere, replicated, without_layers

# Why no token can be chosen.
NOT_FINITE = (
    "the model's logits are not finite: its weights hold NaN or infinite values, or overflow in "
    "this dtype; convert the checkpoint again or try float32"
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeState:
    """Where each row's answer stands.

    Attributes:
      token: the row's newest token, not yet fed through the model.
      done: rows that have stopped; they are no-ops.
      count: tokens generated so far, `token` included.
      waited: turns that other rows took since the row's last one (see `_decode_block`).
      seen: tokens under the repetition penalty, or None.
      finite: rows whose logits have been numbers so far.
      counts: how often each token is in the row's answer; None where no penalty needs it.
    """

    token: Int[Array, " B"]
    done: Bool[Array, " B"]
    count: Int[Array, " B"]
    waited: Int[Array, " B"]
    seen: Bool[Array, "B V"] | None
    finite: Bool[Array, " B"]
    counts: Int[Array, "B V"] | None = None

    def chosen(
        self, logits: Array, active: Array, values: RowValues, static: SamplingStatic
    ) -> tuple["DecodeState", Choices]:
        """The state after the `active` rows' next token, and a column of these tokens."""
        given = logits, self.seen, self.count, active, values, static
        token = next_token(*given, self.counts)
        choices = choices_of(logits, token, active, values, static)
        # A sum is NaN or infinite when any term is.
        finite = jnp.isfinite(jnp.sum(logits, axis=-1)) | ~active
        count = self.count + active
        stop = jnp.any(token[:, None] == values.stops, axis=-1) | (count >= values.limit)
        seen, counts, rows = self.seen, self.counts, jnp.arange(token.shape[0])
        if seen is not None:
            seen = seen.at[rows, token].max(active)
        if counts is not None:
            counts = counts.at[rows, token].add(active)
        state = DecodeState(
            token=jnp.where(active, token, self.token),
            done=self.done | (active & stop),
            count=count,
            waited=jnp.where(active | self.done, 0, self.waited + 1),
            seen=seen,
            finite=self.finite & finite,
            counts=counts,
        )
        return state, choices


def first_state(
    asked: Bool[Any, " B"], seen: Bool[Any, "B V"] | None, counts: Int[Any, "B V"] | None = None
) -> DecodeState:
    """The state before the first token of the rows that are `asked`."""
    rows = len(asked)
    zeros = {name: np.zeros(rows, np.int32) for name in ("token", "count", "waited")}
    flags = {"done": ~np.asarray(asked), "finite": np.ones(rows, bool), "seen": seen}
    flags["counts"] = counts
    # Copied there: to make them on the device would take programs.
    return DecodeState(**jax.device_put({**zeros, **flags}))


@program(static=(0, 4), donate_argnums=1, **IN_PLACE)
def start_answer(
    ends: Ends,
    state: DecodeState,
    logits: Float[Array, "B V"],
    values: RowValues,
    sampling: SamplingStatic,
) -> tuple[DecodeState, Choices]:
    """Chooses each row's first token from the question's last logits."""
    return replicated(ends, state.chosen(logits, ~state.done, values, sampling))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Steps:
    """The decode steps of a block: their kinds, and how they choose tokens.

    Attributes:
      total: each row's total length, as rotary embedding sees it.
      turns: step i of row b is of the variant of index turns[b, i]; none follow where that is
        negative.
      values: of each row's request.
      variants: of the answer's steps (`answer_variants`).
      sampling: static of all rows' requests.
    """

    total: Int[Any, " B"]
    turns: Int[Any, "B X"]
    values: RowValues
    variants: tuple[str, ...] = dataclasses.field(metadata={"static": True})
    sampling: SamplingStatic = dataclasses.field(metadata={"static": True})


def _decode_block(
    setup: Setup, params: Any, caches: tuple[Any, ...], state: DecodeState, steps: Steps
) -> tuple[tuple[Any, ...], DecodeState, Choices]:
    """A block of decode steps; stops early when every row is done.

    The loop over the steps is on the device or, with `Setup.by_layer`, in Python.

    X columns of new tokens come back, -1 where a row chose none.

    A turn is one pass of the rows whose next step is of one variant; the other rows are no-ops in
    it. Rows that began together take all their steps together. Where rows differ, the variant that
    most rows need comes next, so rows that were out of step soon go together. A row that waits
    counts once more for each turn it waited, so it waits for about as many turns as there are rows,
    at most. A block has as many turns as the row with the most steps has steps.

    The device's loops are nested: each variant has an inner loop for its consecutive turns, and an
    outer loop goes from one such run to the next. To start a program for each run would take as
    long as a step on a GPU.
    """
    ends, ends_params = setup.ends, without_layers(params)
    several = len(steps.variants) > 1

    def turn(carry: tuple[Any, ...]) -> Any:
        index, taken_B, _, state, _ = carry
        return _turn(steps.turns, index, taken_B, state, len(steps.variants))

    def step(number: int, carry: tuple[Any, ...]) -> tuple[Any, ...]:
        index, taken_B, caches, state, choices = carry
        own = number if several else None
        token_B1, valid_B1, taken_B = _fed(steps.turns, taken_B, state, own)
        segment = decode_segment(token_B1, valid_B1, state.done, steps.variants[number])
        hidden_B1D, caches = hidden_states(setup, params, caches, segment, steps.total)
        given = hidden_B1D, valid_B1, state, (choices, index)
        state, choices = _next_state(ends, ends_params, *given, steps)
        return index + 1, taken_B, caches, state, choices

    def each_run(carry: tuple[Any, ...]) -> tuple[Any, ...]:
        for number in range(len(steps.variants)):
            alike = functools.partial(lambda number, carry: turn(carry) == number, number)
            carry = jax.lax.while_loop(alike, functools.partial(step, number), carry)
        return carry

    rows, columns = steps.turns.shape
    choices = no_choices(rows, columns, setup.config.vocab_size, steps.sampling)
    taken_B = np.zeros(rows, np.int32)
    if setup.by_layer:
        # Placed as a step leaves them, so that the first step shares the others' programs.
        taken_B, choices = everywhere(ends, (taken_B, choices))
        carry = (np.int32(0), taken_B, caches, state, choices)
        if is_listing():
            turn(carry)
            for number in np.unique(steps.turns[steps.turns >= 0]):
                carry = step(int(number), carry)
            return carry[2:]
        while (number := int(turn(carry))) >= 0:
            carry = step(number, carry)
        return carry[2:]
    carry = (jnp.int32(0), taken_B, caches, state, choices)
    body = each_run if several else functools.partial(step, 0)
    carry = jax.lax.while_loop(lambda carry: turn(carry) >= 0, body, carry)
    *_, caches, state, choices = carry
    return caches, *replicated(ends, (state, choices))


# All layers, and all steps, as one program.
decode_block = Program(_decode_block, static=(0,), donate_argnums=(2, 3), **IN_PLACE, **STEPPED)


def _pending(
    turns: Int[Any, "B X"], taken: Int[Array, " B"], state: DecodeState
) -> Int[Array, " B"]:
    """The variant of each row's next step, negative where there is none in this block."""
    taken_B1, columns = taken[:, None], turns.shape[1]
    next_B1 = jnp.take_along_axis(jnp.asarray(turns), jnp.minimum(taken_B1, columns - 1), axis=1)
    return jnp.where(state.done | (taken_B1[:, 0] >= columns), -1, next_B1[:, 0])


@program(static=(4,))
def _turn(
    turns: Int[Any, "B X"], index: Any, taken: Int[Array, " B"], state: DecodeState, variants: int
) -> Int[Array, ""]:
    """The variant of the next turn, negative where there is none; `taken` steps are done."""
    columns = turns.shape[1]
    if variants == 1:
        # All rows that are not done take every turn.
        follows = jnp.any(jnp.asarray(turns)[:, jnp.minimum(index, columns - 1)] >= 0)
        over, most = jnp.all(state.done) | ~follows, 0
    else:
        pending_B = _pending(turns, taken, state)
        votes_BV = pending_B[:, None] == jnp.arange(variants)
        most = jnp.argmax(jnp.sum(votes_BV * (1 + state.waited)[:, None], axis=0))
        # As many turns as a row has steps at most: a row that waited goes on in the next block.
        steps = jnp.max(jnp.sum(jnp.asarray(turns) >= 0, axis=1))
        over = jnp.all(pending_B < 0) | (index >= steps)
    return jnp.where(over | (index >= columns), -1, most)


@program(static=(3,))
def _fed(
    turns: Int[Any, "B X"], taken: Int[Array, " B"], state: DecodeState, number: int | None
) -> tuple[Int[Array, "B 1"], Int[Array, "B 1"], Int[Array, " B"]]:
    """Each row's newest token, whether it takes this turn, and how many it has taken with it.

    Without a `number` of a variant all rows take it that are not done.
    """
    active_B = ~state.done if number is None else _pending(turns, taken, state) == number
    valid_B = active_B.astype(jnp.int32)
    return state.token[:, None], valid_B[:, None], taken + valid_B


@program(static=(0,))
def _next_state(
    ends: Ends,
    params: Any,
    hidden_B1D: Float[Array, "B 1 D"],
    valid_B1: Int[Array, "B 1"],
    state: DecodeState,
    chosen: tuple[Choices, Int[Array, ""]],
    steps: Steps,
) -> tuple[DecodeState, Choices]:
    """The state after each row's next token, which stands in its column of the choices.

    Args:
      chosen: the choices so far, and the column.
    """
    choices, index = chosen
    logits_BV = ends.logits(params, hidden_B1D[:, 0])
    state, column = state.chosen(logits_BV, valid_B1[:, 0] > 0, steps.values, steps.sampling)
    return replicated(ends, (state, choices.with_column(index, column)))


def next_block(
    setup: Setup, params: Any, caches: tuple[Any, ...], state: DecodeState, steps: Steps
) -> tuple[tuple[Any, ...], DecodeState, Choices]:
    """`decode_block` or, with `Setup.by_layer`, its steps from Python."""
    run = _decode_block if setup.by_layer else decode_block
    return run(setup, params, caches, state, steps)


def answer_variants(method: Method, tokens: int) -> tuple[str, ...]:
    """The variants of an answer's steps, in the order of their first step."""
    # The first token is the question's; one step at least is compiled.
    steps = range(1, max(tokens, 2))
    return tuple(dict.fromkeys(method.step_variant(step) for step in steps))


def turns_of_all(method: Method, variants: Sequence[str], tokens: int, shape: Any) -> Any:
    """`Steps.turns` of this shape [B, X] with each kind of step of an answer of so many tokens."""
    kinds = {method.step_variant(step) for step in range(1, tokens)}
    turns = np.full(shape, -1, np.int32)
    turns[:, : len(kinds)] = sorted(map(variants.index, kinds))
    return turns


def decode_turns(
    method: Method, variants: Sequence[str], steps: Sequence[range], columns: int
) -> Int[np.ndarray, "B X"]:
    """`Steps.turns` for each row's steps of these numbers, X = `columns` at most."""
    turns = np.full((len(steps), columns), -1, np.int32)
    for row, numbers in enumerate(steps):
        indices = [variants.index(method.step_variant(step)) for step in numbers]
        turns[row, : len(indices)] = indices
    return turns
