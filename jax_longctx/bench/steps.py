"""Decode steps of many rows, timed on the host's clock and in a profile.

One row's context is prefilled, or drawn at random, and asked. The caches that it would answer from
are then copied along the batch axis. So 128 rows of a method that evicts cost one prefill, and the
memory never holds 128 whole contexts. All rows are alike; a step reads each row's own copy.

The wall time of a step comes from whole decode blocks, with the host's round trip of each block.
The kernels come from a profile of one more block. A profile runs without CUDA graphs, so its own
wall time is of no use. The gaps of a step are its wall time less the sum of its kernels.
"""

import dataclasses
import functools
import itertools
import statistics
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Int

from jax_longctx.bench.timing import call_times
from jax_longctx.caches import AppendCache, WindowCache
from jax_longctx.engine import Context, Engine, capacity
from jax_longctx.engine.allocate import abstract_caches, empty_like
from jax_longctx.engine.decode import Steps, answer_variants, decode_turns, first_state, next_block
from jax_longctx.engine.engine import BLOCK
from jax_longctx.engine.prefill import Live, finish_question, fork, prefill_question
from jax_longctx.engine.runs import places_of_layers, with_layer
from jax_longctx.engine.sampling import sampling_static, sampling_values
from jax_longctx.errors import InputError
from jax_longctx.settings import Sampling
from jax_longctx.sharding import HOST, described, leaf_axes, tree_shardings
from pallas_kernels.quantised import stored_as

# The question of every row.
QUESTION = (1,)
# Blocks beside those that are timed: the first compiles, the second warms up, the last is profiled.
OTHERS = 3


@dataclasses.dataclass(frozen=True)
class Kernels:
    """Kernels and copies of a profile, on the streams of one device (the mean of several).

    Attributes:
      number: how many ran.
      seconds: the sum of their times.
    """

    number: float
    seconds: float


@dataclasses.dataclass(frozen=True)
class Step:
    """A decode step of all rows.

    Attributes:
      seconds: wall time, the median of whole blocks.
      kernels: of a step; None where they were not counted.
      fetched: what the timed steps and those before fetched from the host's memory; None where
        contexts lie on the devices.
    """

    seconds: float
    kernels: Kernels | None
    fetched: capacity.Fetched | None = None


def check_mesh(mesh: Mesh) -> None:
    """Raises InputError for a mesh that divides the rows: each of its parts would work alone."""
    if mesh.shape["data"] > 1:
        raise InputError(
            f"--mesh data={mesh.shape['data']}: steps are timed for one part of the data axis; "
            f"leave data out"
        )


def answer_tokens(blocks: int) -> int:
    """Tokens of an answer whose `blocks` blocks are timed."""
    return 1 + BLOCK * (blocks + OTHERS)


def step_of(engine: Engine, context: Context, rows: int, blocks: int, kernels: bool) -> Step:
    """Times a decode step of `rows` rows like the one of `context`, which is given up.

    Args:
      blocks: that are timed; the context has room for `answer_tokens(blocks)`.
      kernels: whether the kernels are counted, where the platform's profile has them (on GPUs).

    Raises:
      InputError: the profile has no kernels, or logits were not finite.
    """
    answering = Answering(engine, context, rows, answer_tokens(blocks))
    answering.block()
    seconds = statistics.median(call_times(answering.block, blocks)) / BLOCK
    found = None
    if kernels and engine.setup.platform == "gpu":
        of_block = profiled(answering.block)
        found = Kernels(of_block.number / BLOCK, of_block.seconds / BLOCK)
    answering.check()
    return Step(seconds, found, answering.fetched())


class Answering:
    """Rows in the middle of an answer: copies of the one row of a context.

    Args:
      context: of one row; it is given up, and its caches are freed as they are copied.
      tokens: of the answer.
      first: the answer's first token. The weights are random, so any will do.
    """

    def __init__(self, engine: Engine, context: Context, rows: int, tokens: int, first: int = 1):
        method, setup = engine.method, engine.setup
        live, total = Live(context.usable_caches()), context.total
        context.caches = None
        live.caches = fork(setup, live.caches, keep=False)
        prefill_question(setup, engine.params, live, [list(QUESTION)], total)
        caches = live.caches
        del live
        if method.info.answers_apart:
            caches = finish_question(setup, caches, total, capacity.bucket(tokens + capacity.SPARE))
        leaves, structure = jax.tree.flatten(caches)
        axes, shardings = leaf_axes(caches), jax.tree.leaves(tree_shardings(setup.mesh, caches))
        # Each array of the one row is freed when its copies are made.
        del caches
        for index, (names, sharding) in enumerate(zip(axes, shardings, strict=True)):
            if rows > 1 and "batch" in names:
                given, at = leaves[index], names.index("batch")
                copies = _host_copies if sharding.memory_kind == HOST else _copies
                leaves[index] = jax.block_until_ready(copies(given, rows, at, sharding))
                del given
        self._engine, self._tokens, self._next = engine, tokens, 1
        self._caches: tuple[Any, ...] = jax.tree.unflatten(structure, leaves)
        everywhere = NamedSharding(setup.mesh, PartitionSpec())
        self._total = jax.device_put(jnp.repeat(total, rows), everywhere)
        state = dataclasses.replace(
            first_state(np.ones(rows, bool), None),
            token=jnp.full((rows,), first, jnp.int32),
            count=jnp.ones((rows,), jnp.int32),
        )
        sampling = Sampling().of_rows(rows)
        self._state = jax.device_put(state, everywhere)
        self._values: Any = jax.device_put(sampling_values(sampling, rows, max_tokens=tokens))
        self._static = answer_variants(method, capacity.reserved(tokens)), sampling_static(sampling)

    def block(self) -> Int[np.ndarray, "B X"]:
        """Each row's tokens of the next `BLOCK` steps."""
        engine, variants = self._engine, self._static[0]
        steps = range(self._next, self._next + BLOCK)
        if steps.stop > self._tokens:
            raise ValueError(f"block: step {steps.stop} of an answer of {self._tokens} tokens")
        self._next = steps.stop
        rows = len(self._total)
        turns = decode_turns(engine.method, variants, [steps] * rows, BLOCK)
        given = Steps(self._total, turns, self._values, *self._static)
        self._caches, self._state, chosen = next_block(
            engine.setup, engine.params, self._caches, self._state, given
        )
        return np.asarray(chosen.token)

    def fetched(self) -> capacity.Fetched | None:
        """What the steps so far fetched from the host's memory."""
        return capacity.fetched_of(self._caches, len(self._total))

    def check(self) -> None:
        """Raises InputError where logits were not finite."""
        if not np.all(np.asarray(self._state.finite)):
            raise InputError("logits are not finite: this time is not one of a real step")


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _copies(row: jax.Array, rows: int, axis: int, sharding: NamedSharding) -> jax.Array:
    """The array of one row, repeated `rows` times along `axis`."""
    return jax.lax.with_sharding_constraint(jnp.repeat(row, rows, axis), sharding)


def _host_copies(row: jax.Array, rows: int, axis: int, sharding: NamedSharding) -> jax.Array:
    """`_copies` of an array in the host's memory."""
    return jax.device_put(np.repeat(np.asarray(row), rows, axis), sharding)


def profiled(run: Callable[[], Any]) -> Kernels:
    """The kernels that a call runs.

    Raises:
      InputError: the profile has no kernels of a GPU.
    """
    with tempfile.TemporaryDirectory(prefix="jax-longctx-profile-") as folder:
        with jax.profiler.trace(folder):
            run()
        (path,) = Path(folder).rglob("*.xplane.pb")
        found = kernels_of(jax.profiler.ProfileData.from_file(str(path)))
    if found is None:
        raise InputError(
            "the profile has no kernels of a GPU; allow profiling on this machine (CUPTI), or "
            "leave them out with --no-kernels"
        )
    return found


def kernels_of(profile: Any) -> Kernels | None:
    """The kernels on GPUs' streams in a `jax.profiler.ProfileData`; None where there are none."""
    devices = [
        [
            event.duration_ns
            for line in plane.lines
            if line.name.startswith("Stream")
            for event in line.events
        ]
        for plane in profile.planes
        if plane.name.startswith("/device:GPU")
    ]
    used = [times for times in devices if times]
    if not used:
        return None
    number, nanoseconds = sum(map(len, used)), sum(map(sum, used))
    return Kernels(number / len(used), nanoseconds / len(used) / 1e9)


def one_row(engine: Engine, length: int, tokens: int, random_cache: bool) -> Context:
    """A context of one row, with room for the question and an answer of `tokens` tokens.

    With `random_cache` the keys and values of a method that keeps all of them are drawn at random.
    """
    reserve = len(QUESTION) + tokens
    if random_cache and engine.method.info.keeps_all:
        return random_context(engine, 1, length, reserve)
    draw = np.random.default_rng(length).integers(0, engine.config.vocab_size, length)
    row = list(map(int, draw))
    return engine.prefill([row], reserve=reserve, questions=[list(QUESTION)])


def _is_store(node: Any) -> bool:
    return isinstance(node, AppendCache | WindowCache)


def random_context(engine: Engine, batch: int, length: int, reserve: int) -> Context:
    """A context of `length` tokens a row, with random keys, values and digests of pages.

    Equal digests would let all rows choose the same pages.
    """
    reserve = capacity.reserved(reserve)
    slots = capacity.slots_for(length, reserve, engine.mesh.shape["seq"])
    # What lies in the host's memory is drawn on the devices, a layer at a time.
    setup, offloaded = engine.setup, engine.setup.offload is not None
    if offloaded:
        setup = dataclasses.replace(setup, by_layer=True, offload=None)
    shapes = abstract_caches(setup, batch, slots, reserve)

    numbers = itertools.count(1)

    def drawn(key: Any, like: Any) -> Any:
        """Keys or values, a part of their first axis at a time: drawing takes more memory."""
        parts = jax.random.split(key, like.shape[0])
        return jax.lax.map(
            lambda one: stored_as(like, jax.random.normal(one, like.shape[1:], like.dtype)), parts
        )

    def draw(node: Any, about: Any, seed: Any) -> Any:
        if not _is_store(node):
            if "pages" in about.axes and jnp.issubdtype(node.dtype, jnp.floating):
                key = jax.random.fold_in(jax.random.key(seed), next(numbers))
                return jax.random.normal(key, node.shape, node.dtype)
            return jnp.zeros(node.shape, node.dtype)
        keys = jax.random.split(jax.random.key(seed), 2)
        k, v = map(drawn, keys, (node.k, node.v))
        arrays = {name: x for name, x in vars(node).items() if hasattr(x, "shape")}
        counts = {name: jnp.full(x.shape, length, jnp.int32) for name, x in arrays.items()}
        return dataclasses.replace(node, **{**counts, "k": k, "v": v})

    made: dict[Any, Any] = {}

    def layer(index: int, cache: Any) -> Any:
        """Fills a layer's cache; layers of the same shapes share one program."""
        key = jax.tree.structure(cache), tuple(leaf.shape for leaf in jax.tree.leaves(cache))
        if key not in made:

            def make(seed: Any) -> Any:
                fields = described(cache)
                mapped = functools.partial(jax.tree.map, is_leaf=_is_store)
                return mapped(lambda node, about: draw(node, about, seed), cache, fields)

            made[key] = jax.jit(make, out_shardings=tree_shardings(setup.mesh, cache))
        return made[key](index)

    if offloaded:
        filled = _on_host(engine, batch, slots, reserve, map(layer, itertools.count(), shapes))
    else:
        filled = tuple(layer(index, cache) for index, cache in enumerate(shapes))
    rows = [[0] * length for _ in range(batch)]
    total = jnp.full((batch,), length, jnp.int32)
    return Context(rows, batch, slots, reserve, total, filled)


def _on_host(
    engine: Engine, batch: int, slots: int, reserve: int, layers: Iterator[Any]
) -> tuple[Any, ...]:
    """The engine's caches of these layers', whose keys and values go to the host's memory."""
    setup = engine.setup
    empty = abstract_caches(setup, batch, slots, reserve)
    runs = capacity.finished_caches(setup, empty, "context", reserve)
    capacity.check_host(engine.mesh, runs)
    filled = [*empty_like(setup, runs)]
    for run, index in places_of_layers(runs):
        filled[run] = with_layer(filled[run], jnp.int32(index), next(layers))
    return tuple(filled)
