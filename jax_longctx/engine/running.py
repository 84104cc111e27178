"""A running batch: rows that decode together, join and leave.

A place of the batch holds one row: its caches (`places`), its state and its values. A row joins
when its question has been read in caches of its own, which are then copied into the place. The
programs are those of `Engine.stream` over a batch of all places; a free place is a row that is
done. No program depends on the rows or their asks, so none is compiled as rows come and go.

A row's answer equals `Engine.stream` of the row alone, up to the rounding of sums.

On a CPU a step computes what empty places and slots hold, too. So a batch may be `fitted`: its
caches have as many places and slots as its rows need, in a few sizes. They are made anew where a
row joins that does not fit, and where those that are left have needed less for some steps, so that
rows that come and go do not move the others each time. Each size has programs of its own, which are
compiled when it first comes up.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float, Int

from jax_longctx.engine.capacity import SPARE, reserved
from jax_longctx.engine.compiling import IN_PLACE, limit_mappings, program
from jax_longctx.engine.decode import (
    DecodeState,
    Steps,
    answer_variants,
    decode_turns,
    first_state,
    next_block,
    start_answer,
    turns_of_all,
)
from jax_longctx.engine.engine import BLOCK, Engine
from jax_longctx.engine.places import Branches, Whole, cannot_share, check_places
from jax_longctx.engine.prefill import Context, Live, prefill_question
from jax_longctx.engine.rows import (
    Ask,
    Chosen,
    Reason,
    Row,
    chosen_of,
    values_of,
    widened,
    with_stops,
)
from jax_longctx.engine.sampling import (
    ANY,
    Choices,
    RowValues,
    counts_of,
    form_of,
    sampling_values,
    with_bounds,
)
from jax_longctx.engine.setup import Ends, everywhere, replicated
from jax_longctx.errors import CapacityError, ConfigError, InputError
from jax_longctx.settings import Sampling

# Sizes of a fitted batch: places by powers of four, slots by powers of two from here on. Matmuls of
# 1, 2, 4, 8 rows take 6, 10, 11, 22 ms on two cores beside other work (eight MLPs and the output
# table of the 135M shape in float32).
FITTED_FROM = 512
# Steps that smaller caches would have served, before they are made.
STEPS_TO_SHRINK = 16


class RunningBatch:
    """Rows that decode together, join and leave: one engine, a fixed number of places.

    It is not thread-safe, and neither is its engine.

    Args:
      places: most rows at a time.
      slots: of each row's caches (`Engine.slots_for` of the longest). Contexts that are prefilled
        with this capacity and `reserve` are copied as they are; others take a program more for
        each size.
      reserve: tokens of a question and its answer, for caches whose size follows from these.
      context: one text whose keys and values all rows share; only for methods with
        `own_tokens` (`contract.Method`). A decode step reads them once for all rows, and a place
        holds a question and an answer alone. `slots` does not count then.
      fitted: makes the caches no larger than the rows need, of a few sizes (see the top).

    Attributes:
      slots, reserve: as they were rounded.
      ended: why rows ended, by place, in the latest `join` or `step`.
      growing: bytes on each device that the places may take beside those that they have now.

    Raises:
      CapacityError: caches of that many rows do not fit.
      ConfigError: contexts in the host's memory, on a mesh that divides rows.
      InputError: rows cannot share this context.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        places: int,
        slots: int = 1,
        reserve: int,
        context: Context | None = None,
        fitted: bool = False,
    ):
        if places < 1:
            raise InputError(f"a running batch needs at least 1 place, got {places}")
        self.engine, self.places, self.reserve = engine, places, reserved(reserve)
        setup, data = engine.setup, engine.mesh.shape["data"]
        rows = -(-places // data) * data
        if setup.offload is not None and data > 1:
            raise ConfigError(
                f"offload host: a running batch copies rows between places, the mesh divides them "
                f"over data={data}; leave data out, or offload"
            )
        limit_mappings()
        self._make: Callable[..., Whole | Branches]
        if context is None:
            self.slots = engine.slots_for(slots - SPARE)
            need = check_places(engine, self.reserve, rows, self.slots)
            self._make = functools.partial(Whole, engine, self.reserve)
        else:
            self.slots, need = context.slots, 0
            engine.check_context(context)
            why = cannot_share(engine, context.batch)
            if why is not None:
                raise InputError(f"{why}; leave out `context`, so that each row has its own")
            self._make = functools.partial(Branches, engine, self.reserve, context)
        self._most, self._fitted = rows, fitted
        # While rows move, their old caches are there too.
        self.growing = need if fitted else 0
        # Steps with smaller needs than the caches.
        self._idle = 0
        size = self._size([0]) if fitted else (rows, self.slots)
        self._caches = self._make(*size)
        self._state, self._total, self._values = self._empty(size[0])
        self._given: RowValues | None = None
        # No answer is longer, of methods whose steps differ.
        longest = max(self.slots, self.reserve)
        self._variants = answer_variants(engine.method, longest)
        # By place.
        self._rows: dict[int, Row] = {}
        self.ended: dict[int, Reason] = {}

    @property
    def free(self) -> int:
        """Places without a row."""
        return self.places - len(self._rows)

    @property
    def running(self) -> dict[int, Ask]:
        """The rows that are being answered, by place."""
        return {place: row.ask for place, row in self._rows.items()}

    @property
    def resident_bytes(self) -> int:
        """Bytes the caches of all places hold, on all devices and the host; no shared context's."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self._caches.held))

    def fits(self, context: Context, ask: Ask, row: int = 0) -> None:
        """Checks that the row can be answered in this batch, once a place and memory are free.

        Raises:
          CapacityError: the row needs larger caches than a place has.
          InputError: another method's context, or a question that it was not read for.
        """
        engine = self.engine
        engine.check_context(context)
        if not 0 <= row < context.batch:
            raise InputError(
                f"the context has rows 0 to {context.batch - 1}, there is no row {row}"
            )
        question = engine.padded([ask.question])[0]
        if context.questions is not None and question != context.questions[row]:
            raise InputError(
                "this method read the context for another question; prefill again for this one"
            )
        self._caches.check(context, row, len(question), ask.max_tokens, self.slots)

    def join(self, context: Context, ask: Ask, row: int = 0) -> tuple[int, Chosen]:
        """Reads the question over the context's row, and gives the row a place.

        The context is left as it was. The row ends at once where its first token ends the answer
        (see `ended`); its place is free then.

        Returns:
          (place, first token).

        Raises:
          InputError: no place is free, or as `fits`.
          CapacityError: the row never fits, or memory is short for its question now.
        """
        self.fits(context, ask, row)
        if not self.free:
            raise InputError(f"all {self.places} places are taken; wait until a row ends")
        engine, rows = self.engine, [[] for _ in context.rows]
        rows[row] = list(ask.question)
        limit_mappings()
        form = form_of(engine.forms, ask.sampling)
        engine.ensure_reserve(context, len(ask.question))
        values = values_of(ask)
        bounded = values if form is None else with_bounds(values, {}, {0: form.allowed()})
        seen = engine.seen([context.rows[row]], [ask.question])
        place = min(set(range(self.places)) - self._rows.keys())
        slots = 0
        if not self._caches.axes.isdisjoint({"slots", "pages", "share"}):
            slots = len(context.rows[row]) + len(ask.question) + ask.max_tokens + SPARE
        self.ended = {}
        # Before the context's buffers are lent.
        self._fit(slots)
        with engine.asked(context, keep=True) as live:
            state, choices = self._begun(live, context, rows, row, bounded, seen)
            (first,) = chosen_of(choices, 0, ask)
            reason = self._reason(ask, first.token, 1, bool(np.all(np.asarray(state.finite))))
            if reason is None:
                taken = {each.index for each in self._rows.values()}
                index = min(set(range(self.places)) - taken)
                new = Row(ask, index, slots, [], form)
                new.take([first])
                self._seat(live, context, state, row, new.index)
                self._rows[place] = new
                self._set_values(new.index, values)
            else:
                self.ended[place] = reason
        return place, first

    def step(self, most: int = BLOCK) -> dict[int, list[Chosen]]:
        """Decodes in `most` turns, at most `BLOCK`; rows that end leave.

        A turn chooses a token of each row. There is one turn where a row has a form. Under a method
        whose decode steps are of several kinds a turn takes the rows whose next step is of one
        kind, so that some get fewer tokens, or none.

        Returns:
          the new tokens of each row by place. `ended` names those that ended, which are free now.
        """
        self.ended = {}
        masks = self._masks()
        found: dict[int, list[Chosen]] = {place: [] for place in self.ended}
        if not self._rows:
            return found
        # Rows that fit stay where they are when there is no memory for smaller caches beside.
        with contextlib.suppress(CapacityError):
            self._fit()
        engine, most = self.engine, 1 if masks else max(1, min(most, BLOCK))
        steps = [range(0)] * len(self._values.limit)
        for row in self._rows.values():
            done = len(row.tokens)
            steps[row.index] = range(done, min(done + most, row.ask.max_tokens))
        turns = decode_turns(engine.method, self._variants, steps, BLOCK)
        choices, finite = jax.tree.map(np.asarray, (self._next(turns, masks), self._state.finite))
        for place, row in list(self._rows.items()):
            found[place] = chosen_of(choices, row.index, row.ask)
            if not found[place]:
                continue
            row.take(found[place])
            whole = bool(finite[row.index])
            reason = self._reason(row.ask, row.tokens[-1], len(row.tokens), whole)
            if reason is not None:
                self.ended[place] = reason
                self._free(place, running=reason == "not finite")
        return found

    def _masks(self) -> dict[int, Any]:
        """What rows' forms allow next, by place; a row whose form cannot go on leaves."""
        masks = {}
        for place, row in list(self._rows.items()):
            try:
                if row.form is not None:
                    masks[place] = row.form.allowed()
            except InputError:
                self.ended[place] = "no form"
                self._free(place, running=True)
        return masks

    def leave(self, place: int) -> None:
        """Takes a row out before it has ended. A place without a row is left as it is."""
        if place in self._rows:
            self._free(place, running=True)

    def list_programs(
        self,
        context: Context,
        questions: Sequence[int],
        *,
        max_tokens: int,
        stop_ids: Sequence[int] = (),
    ) -> None:
        """Calls the programs of rows over this context of shapes, within `compiling.listing`.

        The batch stays as it is; no row may run.

        Args:
          questions: tokens of each.
          max_tokens, stop_ids: of an answer.
        """
        before = self._caches.held, self._state, self._total, self._values
        values = values_of(Ask([0], stop_ids=stop_ids))
        seen = np.zeros((1, self.engine.config.vocab_size), bool)
        try:
            for asked in questions:
                rows = [[0] * asked, *([] for _ in context.rows[1:])]
                with self.engine.asked(context, keep=True) as live:
                    state, _ = self._begun(live, context, rows, 0, values, seen)
                    self._seat(live, context, state, 0, 0)
            self._set_values(0, values)
            shape = len(self._values.limit), BLOCK
            self._next(turns_of_all(self.engine.method, self._variants, max_tokens, shape))
            self._stop(0)
        finally:
            self._caches.held, self._state, self._total, self._values = before
            self._given = None

    def _begun(
        self,
        live: Live,
        context: Context,
        rows: list[list[int]],
        row: int,
        values: RowValues,
        seen: Any,
    ) -> tuple[DecodeState, Choices]:
        """Reads the question of a row; its state and its first token."""
        engine, ends = self.engine, self.engine.setup.ends
        logits = prefill_question(engine.setup, engine.params, live, rows, context.total)
        if engine.method.info.answers_apart:
            engine.answer_apart(live, context, self.reserve, keep=True)
        state = everywhere(ends, first_state(np.ones(1, bool), seen))
        own = _row_of(ends, logits, np.int32(row))
        return start_answer(ends, state, own, jax.device_put(values), ANY)

    def _seat(self, live: Live, context: Context, state: Any, row: int, index: int) -> None:
        """Copies a row's caches and its state to the place of that index."""
        given = np.int32(row), np.int32(index)
        self._caches.seat(live.caches, *given)
        self._state, self._total = _stated(
            self.engine.setup.ends, self._uncounted(), self._total, state, context.total, *given
        )

    def _uncounted(self) -> DecodeState:
        """The state without counts of tokens: `_next` makes them of the rows that are there."""
        return dataclasses.replace(self._state, counts=None)

    def _next(self, turns: Any, masks: Mapping[int, Any] = MappingProxyType({})) -> Choices:
        """A block of decode steps; `masks` are what forms allow, by place."""
        setup, params = self.engine.setup, self.engine.params
        self._given = values = self._given or jax.device_put(self._values)
        rows = {row.index: row for row in self._rows.values()}
        given = {self._rows[place].index: mask for place, mask in masks.items()}
        values = with_bounds(values, {at: row.ask.sampling for at, row in rows.items()}, given)
        if values.counted is None:
            self._state = self._uncounted()
        elif self._state.counts is None:
            tokens = {at: row.tokens for at, row in rows.items()}
            counts = counts_of(tokens, len(self._values.limit), setup.config.vocab_size)
            self._state = dataclasses.replace(self._state, counts=everywhere(setup.ends, counts))
        steps = Steps(self._total, turns, values, self._variants, ANY)
        with self._caches.lent() as live:
            live.caches, self._state, choices = next_block(
                setup, params, live.caches, self._state, steps
            )
        return choices

    def _stop(self, index: int) -> None:
        self._state = _stopped(self.engine.setup.ends, self._uncounted(), np.int32(index))

    def _size(self, rows: Sequence[int]) -> tuple[int, int]:
        """Places and slots of caches for these rows, given the slots that each needs."""
        data = self.engine.mesh.shape["data"]
        places = data * 4 ** (((len(rows) - 1) // data).bit_length() + 1 >> 1)
        slots = max(FITTED_FROM, 1 << (max(rows) - 1).bit_length())
        return min(places, self._most), min(self.engine.slots_for(slots - SPARE), self.slots)

    def _fit(self, *more: int) -> None:
        """Moves the rows of a fitted batch to caches that fit them, and rows of `more` slots."""
        size = self._size([*(row.slots for row in self._rows.values()), *more])
        rows, slots = len(self._values.limit), self._caches.slots
        self._idle = 0 if size == (rows, slots) else self._idle + 1
        fits = size[0] <= rows and size[1] <= slots
        waits = fits and self._rows and self._idle < STEPS_TO_SHRINK
        if not self._fitted or not self._idle or waits:
            return
        self._idle = 0
        old, self._caches = self._caches, self._make(*size)
        kept = self._uncounted(), self._total, self._values
        indices = [row.index for row in self._rows.values()]
        for index, row in enumerate(self._rows.values()):
            self._caches.seat(old.held, np.int32(row.index), np.int32(index))
            row.index = index

        def moved(new: Any, old: Any) -> Any:
            made = np.array(new)
            made[: len(indices)] = np.asarray(old)[indices]
            return made

        state, total, values = self._empty(size[0])
        stops = widened(values.stops, self._values.stops.shape[1])
        made = state, total, dataclasses.replace(values, stops=stops)
        state, total, self._values = jax.tree.map(moved, made, kept)
        self._state, self._total = everywhere(self.engine.setup.ends, (state, total))
        self._given = None

    def _empty(self, rows: int) -> tuple[DecodeState, Any, RowValues]:
        """State, totals and values of places without rows."""
        seen: Any = np.zeros((rows, self.engine.config.vocab_size), bool)
        state = first_state(np.zeros(rows, bool), seen)
        ends, total = self.engine.setup.ends, np.zeros(rows, np.int32)
        state, total = everywhere(ends, (state, total))
        return state, total, with_stops(sampling_values(Sampling(seed=(0,)), rows))

    def _free(self, place: int, *, running: bool) -> None:
        index = self._rows.pop(place).index
        if running:
            self._stop(index)

    def _reason(self, ask: Ask, token: int, count: int, finite: bool) -> Reason | None:
        if not finite:
            return "not finite"
        if token in ask.stop_ids:
            return "stop"
        return "length" if count >= ask.max_tokens else None

    def _set_values(self, place: int, values: RowValues) -> None:
        """The values of a place, in new arrays: the device may still read the old ones."""
        both = self._values, values
        columns = max(each.stops.shape[1] for each in both)
        old, new = (dataclasses.replace(x, stops=widened(x.stops, columns)) for x in both)

        def put(old: Any, new: Any) -> Any:
            made = old.copy()
            made[place] = new[0]
            return made

        self._values = jax.tree.map(put, old, new)
        self._given = None


@program(static=(0,))
def _row_of(ends: Ends, logits: Float[Array, "B V"], row: Int[Array, ""]) -> Float[Array, "1 V"]:
    return replicated(ends, jax.lax.dynamic_slice_in_dim(logits, row, 1))


@program(static=(0,), donate_argnums=1, **IN_PLACE)
def _stopped(ends: Ends, state: DecodeState, place: Int[Array, ""]) -> DecodeState:
    """The state without the row at `place`."""
    done, finite = (x.at[place].set(True) for x in (state.done, state.finite))
    return replicated(ends, dataclasses.replace(state, done=done, finite=finite))


@program(static=(0,), donate_argnums=(1, 2), **IN_PLACE)
def _stated(
    ends: Ends,
    state: DecodeState,
    total: Int[Array, " B"],
    row_state: DecodeState,
    row_total: Int[Array, " R"],
    row: Int[Array, ""],
    place: Int[Array, ""],
) -> tuple[DecodeState, Int[Array, " B"]]:
    """State and totals with a row's own at `place`."""

    def set_row(old: Array, new: Array) -> Array:
        return jax.lax.dynamic_update_slice_in_dim(old, new, place, axis=0)

    state = jax.tree.map(set_row, state, row_state)
    total = set_row(total, jax.lax.dynamic_slice_in_dim(row_total, row, 1))
    return replicated(ends, (state, total))
