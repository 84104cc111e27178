"""Caches of a running batch's places, in one of two forms.

`Whole`: each place has its own, whatever the contexts are. `Branches`: all rows go on from one
context, whose keys and values they share (`caches.branched`); a place has a row's question and
answer alone. A row's caches are copied into a place along the axis that `axes_field` calls `batch`.
"""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Int

from jax_longctx.caches import Offloaded
from jax_longctx.caches.branched import (
    Branched,
    branch_of,
    branches,
    split_of,
    with_context,
    without_context,
)
from jax_longctx.engine.allocate import abstract_caches, empty_like, made_on_shards
from jax_longctx.engine.capacity import (
    SPARE,
    bucket,
    bytes_per_device,
    check_host,
    finished_caches,
)
from jax_longctx.engine.compiling import IN_PLACE, program
from jax_longctx.engine.engine import Engine
from jax_longctx.engine.prefill import Context, Live
from jax_longctx.engine.runs import seated_store
from jax_longctx.engine.setup import Setup
from jax_longctx.errors import CapacityError, InputError
from jax_longctx.sharding import described, layers_in, leaf_axes, tree_shardings

# Axes of a cache whose sizes follow from the lengths of text, question and answer.
GROWING = ("slots", "room", "pages", "share", "pool")


class Whole:
    """The caches of a batch whose places are rows of any contexts."""

    def __init__(self, engine: Engine, reserve: int, rows: int, slots: int):
        shapes = _places(engine, reserve, rows, slots)
        self._setup, self._reserve, self.slots = engine.setup, reserve, slots
        self.axes = frozenset(name for axes in leaf_axes(shapes) for name in axes if name)
        # A context that was compressed has slots for its reserve alone.
        self._reserves = "room" in self.axes or (self.long and not engine.method.info.keeps_all)
        self.held = empty_like(engine.setup, shapes)

    @property
    def long(self) -> bool:
        """Whether the length of a place is limited."""
        return not self.axes.isdisjoint({"slots", "pages"})

    def check(self, context: Context, row: int, asked: int, answer: int, slots: int) -> None:
        """CapacityError where a row needs more than the `slots` slots of a place."""
        length = len(context.rows[row])
        if self.long and length + asked + answer + SPARE > slots:
            raise CapacityError(
                f"a context of {length:,} tokens, a question of {asked:,} and an answer of "
                f"{answer:,} need {length + asked + answer + SPARE:,} slots, a place of this "
                f"batch has {slots:,}; shorten them, or make a batch with more slots"
            )
        if self._reserves:
            _check_reserve(asked, answer, self._reserve)

    def seat(self, given: tuple[Any, ...], row: Any, place: Any) -> None:
        """Copies row `row` of these caches to a place."""
        if jax.tree.structure(self.held) != jax.tree.structure(given):
            raise InputError(
                "the context's caches are of another form than this batch's; prefill it with the "
                "engine that this batch runs on"
            )
        self.held = _seated(self._setup, self.held, given, row, place)

    @contextlib.contextmanager
    def lent(self) -> "Iterator[Live]":
        """The caches for a block of decode steps, which changes them."""
        live = Live(self.held)
        try:
            yield live
        finally:
            self.held = live.caches


class Branches:
    """The caches of a batch whose rows go on from one context."""

    def __init__(self, engine: Engine, reserve: int, context: Context, rows: int, slots: int):
        own, setup = engine.method.own_tokens, engine.setup
        assert own is not None
        self._setup, self._reserve, self._context = setup, reserve, context
        self.axes, self.long = frozenset[str](), False
        layout = setup.slot_layout
        split = split_of(context.lengths[0], own, layout)
        # The most that a text has beyond its split, so that texts of one size share programs.
        rest = own + layout.turn - 1
        # The rows' own slots are divided over `seq` too.
        whole = layout.turn
        room = -(-(rest + reserve + SPARE) // whole) * whole
        make = functools.partial(branches, rows=rows, room=room, split=split)
        shapes = jax.eval_shape(make, context.usable_caches())
        engine.check_bytes(room, bytes_per_device(engine.mesh, shapes))
        self.slots = slots
        given, structure = jax.tree.flatten(context.usable_caches())
        leaves = tuple((leaf.shape, leaf.dtype) for leaf in given)
        static = structure, leaves, rows, room
        self.held = made_on_shards(setup, shapes, _branches, static, np.int32(split))

    def check(self, context: Context, row: int, asked: int, answer: int, slots: int) -> None:
        """InputError for another context, CapacityError where a row is larger than a place."""
        if context is not self._context:
            raise InputError("the rows of this batch go on from another context")
        _check_reserve(asked, answer, self._reserve)

    def seat(self, given: tuple[Any, ...], row: Any, place: Any) -> None:
        """Copies row `row`, beyond the context, to a place."""
        self.held = _seated(self._setup, self.held, given, row, place)

    @contextlib.contextmanager
    def lent(self) -> "Iterator[Live]":
        """The caches for a block of decode steps; the context's are lent too, and not changed."""
        context = self._context
        caches = context.usable_caches()
        live, context.caches = Live(with_context(self.held, caches)), None
        try:
            yield live
        finally:
            self.held, context.caches = without_context(live.caches, caches)


def check_places(engine: Engine, reserve: int, rows: int, slots: int) -> int:
    """Bytes on each device of caches for `rows` rows; CapacityError where they do not fit."""

    def need(slots: int) -> int:
        caches = _places(engine, reserve, rows, slots)
        return bytes_per_device(engine.mesh, caches) + _seating_bytes(engine.mesh, caches, rows)

    found = engine.check_growing(slots, need)
    if engine.setup.offload is not None:
        check_host(engine.mesh, _places(engine, reserve, rows, slots))
    return found


def _places(engine: Engine, reserve: int, rows: int, slots: int) -> tuple[Any, ...]:
    """Shapes of the caches of that many rows in the middle of their answers."""
    setup = engine.setup

    def places(slots: int) -> tuple[Any, ...]:
        caches = abstract_caches(setup, rows, slots, reserve)
        caches = finished_caches(setup, caches, "context", reserve)
        if setup.method.info.answers_apart:
            # As `Engine.answer_apart` has it.
            caches = finished_caches(setup, caches, "question", bucket(reserve + SPARE))
        return caches

    caches = places(slots)
    if any("pool" in axes for axes in leaf_axes(caches)):
        # A row that asks for less than the reserve may be longer than what the reserve leaves.
        return places(engine.slots_for(slots + reserve))
    return caches


def _seating_bytes(mesh: Mesh, caches: tuple[Any, ...], rows: int) -> int:
    """Bytes of each device while a row goes to its place, in caches of `rows` rows.

    Keys and values in the host's memory pass through the device a layer at a time, and lie there
    twice, as they were read and as they are put back (temporaries of the program for an H200).
    """
    layers = (bytes_per_device(mesh, run, host=True) // layers_in(run) for run in caches)
    return 2 * max(layers) // rows


def cannot_share(engine: Engine, texts: int = 1) -> str | None:
    """Why rows cannot share a context of `texts` texts; None where they can."""
    mesh, config = engine.mesh.shape, engine.config
    if engine.setup.offload is not None:
        return "rows cannot share a context in the host's memory"
    if engine.method.own_tokens is None:
        return "under this method rows cannot share a context"
    if all(config.windows):
        return "rows have nothing to share of a context where every layer has a sliding window"
    if texts != 1 or mesh["data"] != 1:
        return (
            f"rows share a context of one text, on a mesh with data=1: this context has {texts} "
            f"texts, the mesh data={mesh['data']}"
        )
    caches = abstract_caches(engine.setup, 1, engine.slots_for(1), 0)
    in_blocks = mesh["seq"] > 1 and not engine.setup.slot_layout.in_stripes
    if in_blocks and any("pages" in axes for axes in leaf_axes(caches)):
        return (
            "under a method that keeps digests of pages, and a block of slots on each shard, rows "
            f"share a context on a mesh with seq=1: this one has seq={mesh['seq']}"
        )
    return None


def _check_reserve(asked: int, answer: int, reserve: int) -> None:
    if asked + answer > reserve:
        raise CapacityError(
            f"a question of {asked:,} tokens and an answer of {answer:,} need "
            f"{asked + answer:,} slots, a place of this batch reserves {reserve:,}; "
            "shorten them, or make a batch with a larger reserve"
        )


def _branches(structure: Any, leaves: Any, rows: int, room: int, split: Any) -> list[Any]:
    """The arrays of `branches` of caches of these shapes, whose rows part from it at `split`."""
    caches = structure.unflatten(jax.ShapeDtypeStruct(*leaf) for leaf in leaves)
    return jax.tree.leaves(branches(caches, rows, room, split))


@program(static=(0,), donate_argnums=1, **IN_PLACE)
def _seated(
    setup: Setup,
    caches: tuple[Any, ...],
    row_caches: tuple[Any, ...],
    row: Int[Array, ""],
    place: Int[Array, ""],
) -> tuple[Any, ...]:
    """The batch's caches with row `row` of others at `place`.

    Where these are of other sizes than the batch's, along axes that grow, the part that both have
    is copied. What lies beyond holds no token of the row.
    """
    layout = setup.slot_layout

    def put(old: Any, about: Any, new: Any) -> Any:
        if isinstance(old, Branched):
            if isinstance(new, Branched):
                # A row of a batch moves to one of another size.
                return old.with_own(jax.tree.map(put, old.own, about.own, new.own))
            return branch_of(old, about, new, row, place, layout)
        if isinstance(old, Offloaded):
            return seated_store(old, new, row, place)
        axis = about.axes.index("batch")
        for number, (size, own, name) in enumerate(
            zip(old.shape, new.shape, about.axes, strict=True)
        ):
            if number == axis or size == own:
                continue
            if name not in GROWING:
                raise InputError(
                    f"the context's caches have {own} {name or 'entries'}, this batch's {size}; "
                    "prefill it with the engine that this batch runs on"
                )
            along = layout.along(name)
            new = along.resized(new, number, size if along.in_stripes else min(size, own))
        new = jax.lax.dynamic_slice_in_dim(new, row, 1, axis)
        at = [place if number == axis else 0 for number in range(old.ndim)]
        return jax.lax.dynamic_update_slice(old, new, at)

    def store(node: Any) -> bool:
        return isinstance(node, Branched | Offloaded)

    fields = described(caches)
    seated = jax.tree.map(put, caches, fields, row_caches, is_leaf=store)
    return jax.lax.with_sharding_constraint(seated, tree_shardings(setup.mesh, caches))
