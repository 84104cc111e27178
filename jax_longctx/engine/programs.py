"""The compiled programs: one segment, the end of the context, a block of decode steps.

Pure functions of `(static setup, arrays...)`. Caches are donated everywhere and updated in place.
`attend` and `finish` run inside one manual `shard_map` over the whole mesh; projections, MLP and
head are left to the compiler through shardings. Their weights are divided over `tensor` and `seq`
(`sharding.weight_sharding`), in one of two ways:

- Tokens that every shard of `seq` has (decode steps, chunks of prefill, questions) are multiplied
  in place, with each device's own part of the weights (`products.Divided`).
- Of tokens that are spread over `seq` (`Segment.spread`), either the tokens are gathered for each
  product, or the weights, a layer's at a time: what is fewer bytes
  (`products.gathers_weights`).

There are two modes (`Setup.by_layer`). Neither compiles every layer of the model:

- The device loops. One program holds the whole pass. Consecutive layers that are alike form a run:
  their caches are one `Stacked` cache, and a `fori_loop` goes over them (`_through_run`). XLA
  compiles a layer once for each run. Weights are stacked too (`models.llama.stacked_layers`). Large
  arrays of the cache reach the method as `Plane`s.
- The host loops. Each piece of a pass (embedding, layer, norm, logits) is a program. The host calls
  the layer's program once for each layer. Weights and caches are a layer apart.

In the first mode the pieces are jitted too, and become parts of the one program.

Each is a `Program`, whose calls a rehearsal can take in its place (`engine.ahead`). `CompileClock`
tells how long a thread compiled.
"""

import contextlib
import contextvars
import dataclasses
import functools
import itertools
import logging
import operator
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Literal

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from jax_longctx.caches import Offloaded
from jax_longctx.contract import (
    CHUNK_ROWS,
    STRIPE,
    CacheShape,
    LayerContext,
    Method,
    RowGroup,
    Segment,
    SlotLayout,
    Stage,
    decode_segment,
    step_variant,
    stripes,
)
from jax_longctx.engine.products import Divided, FewRows, gathers_weights
from jax_longctx.engine.sampling import (
    Choices,
    RowValues,
    SamplingStatic,
    choices_of,
    next_token,
    no_choices,
)
from jax_longctx.models.config import ModelConfig
from jax_longctx.models.llama import (
    PLAIN,
    Products,
    ends_of,
    gathered_ends,
    gathered_layer,
    layer_of,
)
from jax_longctx.settings import Offload, StoredForm
from jax_longctx.sharding import (
    HOST,
    AnyMesh,
    Leaf,
    Stacked,
    leaf_fields,
    logical_sharding,
    logical_spec,
    tree_shardings,
    tree_specs,
)
from pallas_kernels.common import empty
from pallas_kernels.plane import Plane
from pallas_kernels.row_matmul import MAX_ROWS

# Options of a function that gives back every donated argument, updated, in the order they came.
#
# JAX pairs donated leaves with outputs by shape, in their order. A leaf left out as unused would
# move all that follow: one leaf is then returned in another's buffer, which XLA's GPU compiler
# overwrites before it has read it (jax-ml/jax#39625). With none left out each keeps its own.
IN_PLACE: dict[str, Any] = {"keep_unused": True}

# Options of programs that loop over layers. XLA's Triton matmuls copy each layer's weights out of
# the stack first; cuBLAS takes their address. Command buffers that hold loops make the whole loop
# one CUDA graph. Where weights and caches nearly fill the memory, rematerialization would compute
# products several times, and copy caches that are written in place.
# To choose how a fusion is compiled, XLA would run it with inputs and outputs of its own: one that
# writes a token into all layers' caches takes twice their bytes, which need not be free.
LOOPED: dict[str, Any] = {
    "compiler_options": {
        "xla_gpu_enable_triton_gemm": False,
        "xla_disable_hlo_passes": "rematerialization",
        "xla_gpu_experimental_enable_fusion_autotuner": False,
        # Kernels that do not wait for one another run side by side.
        "xla_gpu_command_buffer_scheduling_mode": "CONCURRENT",
        # XLA's own kernels are launched while those before them end, and wait within.
        "xla_gpu_enable_pdl": True,
        "xla_gpu_enable_pdl_launch": True,
        "xla_gpu_enable_command_buffer": (
            "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,CONDITIONAL,DYNAMIC_SLICE_FUSION,WHILE"
        ),
    }
}

# This process's mappings, one a line, and the most that a process may have. Only Linux has them.
MAPPINGS, MOST_MAPPINGS = Path("/proc/self/maps"), Path("/proc/sys/vm/max_map_count")

_logger = logging.getLogger(__name__)
# Counting mappings takes milliseconds. So it is done once in this many of JAX's events of tracing,
# lowering and compiling, which is about once in twenty programs.
COUNTED = 60
_events = 0
# JAX's events around tracing, lowering and compiling, or reading a compiled program.
EVENTS = (
    "/jax/core/compile/jaxpr_trace_duration",
    "/jax/core/compile/jaxpr_to_mlir_module_duration",
    "/jax/core/compile/backend_compile_duration",
)
# What is given the calls of `Program`s (see `calls_to`).
_taker: contextvars.ContextVar[Any] = contextvars.ContextVar("taker", default=None)
# Every `Program`; `forget` clears them.
_programs: list["Program"] = []
# Most layers of one turn of the loop, in decode steps on a GPU of the kind that an answer begins
# with. A turn of a CUDA graph's loop takes about 7 us, and each layer in it takes the time to
# compile it.
LAYERS_A_TURN = 4
# Most numbers of a layer's array that are cut out, and put back, for all layers of a turn at once.
MOST_NUMBERS = 2**13
# Rows of a matmul that cuBLAS takes in bfloat16 with results in float32.
LEAST_ROWS = 8

Logits = Literal["none", "hidden", "last", "all"]
BATCH = logical_spec(("batch",))


class Program:
    """A jitted function of the engine, which a rehearsal compiles instead of executing it.

    Its attributes are those of the jitted function.

    Args:
      function, options: as of `jax.jit`.
      static: the positions of the static arguments.

    Attributes:
      name: tells it from other programs.
      ready: of a rehearsal's calls, the compiled programs that are stored on the disk, or will be
        (see `engine.stored`); None for one that could not be loaded.
    """

    def __init__(self, function: Any, *, static: Sequence[int] = (), **options: Any):
        self.jitted: Any = jax.jit(function, static_argnums=static, **options)
        self._static = static
        self.name = f"{function.__module__}.{function.__qualname__} {static} {options}"
        self.ready: dict[Any, Future[Any]] = {}
        _programs.append(self)

    def __call__(self, *args: Any) -> Any:
        taker = _taker.get()
        if taker is not None:
            return taker.call(self, args)
        if self.ready:
            found = self.ready.get(self.key(args))
            if found is not None and found.result() is not None:
                return found.result()(*self.split(args)[1])
        return self.jitted(*args)

    def split(self, args: tuple[Any, ...]) -> tuple[list[Any], tuple[Any, ...]]:
        """The static arguments and the others."""
        fixed = [args[position] for position in self._static]
        return fixed, tuple(arg for i, arg in enumerate(args) if i not in self._static)

    def key(self, args: tuple[Any, ...]) -> Any:
        """What tells the program of these arguments from others of this process, as `jit` does."""
        fixed, others = self.split(args)
        leaves, structure = jax.tree.flatten(others)
        signatures = tuple(map(_signature, leaves))
        precision = jax.config.jax_default_matmul_precision
        return id(self), precision, tuple(fixed), structure, signatures

    def __getattr__(self, name: str) -> Any:
        return getattr(self.jitted, name)


def forget() -> None:
    """Drops all compiled programs of this process."""
    jax.clear_caches()
    for each in _programs:
        each.ready.clear()


def program(**options: Any) -> Callable[[Any], Program]:
    """Makes a `Program` of a function, with its options."""
    return functools.partial(Program, **options)


def _signature(leaf: Any) -> Any:
    """What `jit` tells an argument's programs apart by."""
    if not hasattr(leaf, "dtype"):
        return leaf
    placed = getattr(leaf, "committed", True)
    sharding = getattr(leaf, "sharding", None) if placed else None
    return np.shape(leaf), leaf.dtype, getattr(leaf, "weak_type", False), sharding


@contextlib.contextmanager
def calls_to(taker: Any) -> Iterator[None]:
    """Within it, `taker.call` gets the calls of this thread's `Program`s; None runs them."""
    token = _taker.set(taker)
    try:
        yield
    finally:
        _taker.reset(token)


class CompileClock:
    """How long a thread has traced, lowered and compiled, and how many programs it took.

    JAX reports each of these with its duration when it ends. Tracing nests, so the intervals are
    joined. What other threads compile meanwhile takes no time of this one; `waiting` adds the time
    that it waits for them.

    Attributes:
      programs: programs that were asked for in the whole process.
      hits: of these, programs that the persistent cache held.
    """

    def __init__(self) -> None:
        self._thread, self._spans = threading.get_ident(), []
        self.programs = self.hits = 0

    def __enter__(self) -> "CompileClock":
        jax.monitoring.register_event_duration_secs_listener(self._on_duration)
        jax.monitoring.register_event_listener(self._on_event)
        return self

    def __exit__(self, *_: object) -> None:
        jax.monitoring.unregister_event_duration_listener(self._on_duration)
        jax.monitoring.unregister_event_listener(self._on_event)

    def _on_duration(self, event: str, duration_secs: float, **about: str | int) -> None:
        if event not in EVENTS:
            return
        self.programs += event == EVENTS[-1]
        if threading.get_ident() == self._thread:
            now = time.perf_counter()
            self._spans.append((now - duration_secs, now))

    def _on_event(self, event: str, **about: str | int) -> None:
        self.hits += event == "/jax/compilation_cache/cache_hits"

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """The time of the block counts as time for compilation."""
        begun = time.perf_counter()
        try:
            yield
        finally:
            self._spans.append((begun, time.perf_counter()))

    def seconds(self, begun: float = 0.0, ended: float = float("inf")) -> float:
        """Seconds of compilation between two times of `time.perf_counter()`."""
        total, last = 0.0, begun
        for start, end in sorted(self._spans):
            start, end = max(start, last), min(end, ended)
            if end > start:
                total, last = total + end - start, end
        return total


def _on_compilation(event: str, duration_secs: float, **kwargs: str | int) -> None:
    global _events
    _events += 1


jax.monitoring.register_event_duration_secs_listener(_on_compilation)


def limit_mappings() -> None:
    """Drops all compiled programs once this process uses half of its memory mappings.

    JAX keeps every program. On a CPU each takes tens of memory mappings, of which Linux gives a
    process 65,530: twenty methods at a few text lengths use them up, and then LLVM ends the
    process. A dropped program is compiled again, or read from the disk, when it is next called.
    Call this outside of traced functions, before work that may compile.
    """
    global _events
    if _events < COUNTED or not MAPPINGS.exists():
        return
    _events = 0
    used, most = MAPPINGS.read_bytes().count(b"\n"), int(MOST_MAPPINGS.read_text())
    if used > most // 2:
        _logger.info("dropping all compiled programs: %d of %d mappings in use", used, most)
        forget()


@dataclasses.dataclass(frozen=True)
class Ends:
    """What is static of programs without layers: all methods on a mesh share these programs."""

    config: ModelConfig
    mesh: AnyMesh
    dtype: Any

    def logits(self, params: Any, hidden: Float[Array, "B D"]) -> Float[Array, "B V"]:
        """float32 logits of one hidden state a row."""
        rows = hidden.shape[0]
        if _platform(self.mesh) == "gpu" and rows < LEAST_ROWS:
            # Of fewer XLA converts the whole head to float32 first.
            hidden = jnp.pad(hidden, ((0, LEAST_ROWS - rows), (0, 0)))
        return ends_of(self.config, params).logits(hidden)[:rows]


def without_layers(params: Any) -> Any:
    """The parameters that `Ends` needs."""
    return {name: value for name, value in params.items() if name != "layers"}


def _platform(mesh: AnyMesh) -> str:
    if isinstance(mesh, AbstractMesh):
        return jax.default_backend()
    return mesh.devices.flat[0].platform


@dataclasses.dataclass(frozen=True)
class Setup:
    """Everything static: what the programs are compiled for.

    Attributes:
      by_layer: whether the host loops over the layers, not the device (see the module). A pass
        then takes a dispatch for each layer, and a decode step waits for the host.
      kv: the 8-bit form in which caches hold keys and values; None for arrays of `dtype`.
      weights: the 8-bit form of the layers' matrices; None for arrays of `dtype`.
      offload: keys and values lie in the host's memory; None for the devices'.
    """

    config: ModelConfig
    method: Method
    mesh: AnyMesh
    dtype: Any
    chunk: int
    by_layer: bool = False
    kv: StoredForm | None = None
    weights: StoredForm | None = None
    offload: Offload | None = None

    @property
    def platform(self) -> str:
        """What the programs are for: "cpu", "gpu" or "tpu"."""
        return _platform(self.mesh)

    @property
    def token_bytes(self) -> int:
        """What a cache holds of one token in one layer, over all heads: key, value and scales."""
        width = self.config.head_dim
        token = jax.eval_shape(lambda: empty((1, 1, 1, width), self.dtype, self.kv))
        parts = jax.tree.leaves(token)
        return 2 * self.config.num_kv_heads * sum(x.size * x.dtype.itemsize for x in parts)

    @property
    def ends(self) -> Ends:
        """Its part that does not depend on the method."""
        return Ends(self.config, self.mesh, self.dtype)

    def products(self, rows: int) -> Products:
        """How a layer multiplies this many rows, which all shards of `seq` have, with weights."""
        few = self.platform == "gpu" and self.mesh.size == 1 and rows <= MAX_ROWS
        if few:
            return FewRows(self.mesh)
        return Divided(self.mesh) if self.mesh.shape["seq"] > 1 else PLAIN

    @property
    def slot_layout(self) -> SlotLayout:
        """Where the slots of all caches lie.

        A sliding window hides slots by their positions, and kernels know those of a block alone.
        """
        dealt = stripes(self.method) and not any(self.config.windows)
        return SlotLayout(self.mesh.shape["seq"], STRIPE if dealt else None)

    def layer_context(self, window: int | None, total: Array) -> LayerContext:
        return LayerContext(
            scale=self.config.softmax_scale,
            window=window,
            rope=self.config.rope,
            total=total,
            stripe=self.slot_layout.stripe,
        )

    def shard_map(self, body: Any, in_specs: Any, out_specs: Any) -> Any:
        """`body` as one program a device, manual over every mesh axis."""
        # Values that are equal on all shards of an axis (a psum's result) carry no proof of it
        # through kernels, so the replication check stays off.
        return jax.shard_map(
            body, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
        )


def hidden_states(
    setup: Setup, params: Any, caches: tuple[Any, ...], segment: Segment, total: Int[Array, " B"]
) -> tuple[Float[Array, "B T D"], tuple[Any, ...]]:
    """Final normed hidden states of the segment's columns, and the updated caches.

    Outside of jit the caches are donated.
    """
    ends, ends_params = setup.ends, without_layers(params)
    x_BTD = _embedded(ends, ends_params, segment.tokens, segment.token_axis)
    updated, layer, layers = [], 0, params["layers"]
    for cache in caches:
        window = setup.config.windows[layer]
        if setup.by_layer:
            weights = layers[str(layer)]
            x_BTD, cache = _through_layer(setup, window, weights, x_BTD, cache, segment, total)
        else:
            run = cache if isinstance(cache, Stacked) else _alone(cache)
            x_BTD, run = _through_run(setup, window, layers, layer, x_BTD, run, segment, total)
            cache = run if isinstance(cache, Stacked) else _of_layer(run.cache, 0)
        updated.append(cache)
        layer += layers_in(cache)
    return _normed(ends, ends_params, x_BTD), tuple(updated)


def layers_in(cache: Any) -> int:
    """How many layers' cache it is."""
    return cache.count if isinstance(cache, Stacked) else 1


def each_layer(caches: tuple[Any, ...]) -> Iterator[Any]:
    """One layer's cache after another; those of a run are copied out of it, one at a time."""
    for cache in caches:
        if isinstance(cache, Stacked):
            for index in range(cache.count):
                yield jax.tree.map(operator.itemgetter(index), cache.cache)
        else:
            yield cache


def per_layer(caches: tuple[Any, ...]) -> tuple[Any, ...]:
    """A cache for each layer: `each_layer`, all at once."""
    return tuple(each_layer(caches))


@program()
def copied_layer(run: Any, layer: Int[Any, ""]) -> Any:
    """A layer's cache in arrays of its own on the devices; `layer` counts within the run."""

    def copied(node: Any) -> Any:
        if isinstance(node, Offloaded):
            return (_planes(node, layer) if isinstance(run, Stacked) else node).on_device()
        return _of_layer(node, layer) if isinstance(run, Stacked) else jnp.copy(node)

    cache = run.cache if isinstance(run, Stacked) else run
    return jax.tree.map(copied, cache, is_leaf=_is_offloaded)


@program(donate_argnums=0, **IN_PLACE)
def with_layer(run: Any, layer: Int[Any, ""], cache: Any) -> Any:
    """`copied_layer` undone, at the end of a context: the run with another cache of a layer."""

    def put(old: Any, new: Any) -> Any:
        if not isinstance(run, Stacked):
            return old.filled(new) if isinstance(old, Offloaded) else new
        if not isinstance(old, Offloaded):
            return jax.lax.dynamic_update_index_in_dim(old, new, layer, 0)
        return _with_planes(old, _planes(old, layer).filled(new), layer)

    before = run.cache if isinstance(run, Stacked) else run
    after = jax.tree.map(put, before, cache, is_leaf=_is_offloaded)
    return Stacked(after, run.count) if isinstance(run, Stacked) else after


def _is_offloaded(node: Any) -> bool:
    return isinstance(node, Offloaded)


def _planes(stacks: Any, layer: Any) -> Any:
    """A layer's part of every stack; of those that are `in_place` as a `Plane`."""
    leaves, structure = jax.tree.flatten(stacks)
    return structure.unflatten(
        Plane(leaf, layer) if field.in_place else _of_layer(leaf, layer)
        for leaf, field in zip(leaves, leaf_fields(stacks), strict=True)
    )


def _with_planes(stacks: Any, parts: Any, layer: Any) -> Any:
    """`_planes` undone."""
    return jax.tree.map(
        lambda whole, part: (
            part.whole
            if isinstance(part, Plane)
            else jax.lax.dynamic_update_index_in_dim(whole, part, layer, 0)
        ),
        stacks,
        parts,
    )


def seated_store(old: Offloaded, new: Offloaded, row: Any, place: Any) -> Offloaded:
    """A store, or those of a run of layers, with row `row` of another one at `place`."""
    if old.base.ndim == 1:
        return old.seated(new, row, place)

    def layer(index: Any, stores: Any) -> Any:
        parts = _planes(stores, index).seated(_planes(new, index), row, place)
        return _with_planes(stores, parts, index)

    return jax.lax.fori_loop(0, len(old.base), layer, old)


def empty_like(setup: Setup, shapes: tuple[Any, ...]) -> tuple[Any, ...]:
    """Zeros of these caches' shapes on their shards."""

    def made(leaf: Any, at: NamedSharding) -> jax.Array:
        if at.memory_kind == HOST:
            return host_zeros(leaf, at)
        return jnp.zeros(leaf.shape, leaf.dtype, device=at)

    return jax.tree.map(made, shapes, tree_shardings(setup.mesh, shapes))


def as_run(setup: Setup, caches: tuple[Any, ...], like: tuple[Any, ...]) -> tuple[Any, ...]:
    """`per_layer` undone: caches in runs as `like` has them (shapes will do), on its shards."""
    found, layer = [], 0
    for run in like:
        alike = caches[layer : layer + layers_in(run)]
        layer += len(alike)
        if isinstance(run, Stacked):
            shardings, structure = jax.tree.flatten(tree_shardings(setup.mesh, run))
            found.append(_stacker(structure, tuple(shardings))(*alike))
        else:
            found.append(alike[0])
    return tuple(found)


@functools.lru_cache(maxsize=64)
def _stacker(structure: Any, shardings: tuple[Any, ...]) -> Any:
    """Makes a run of its layers' caches; a function a kind of cache, so that it compiles once."""
    return jax.jit(
        lambda *each: Stacked(jax.tree.map(lambda *x: jnp.stack(x), *each), len(each)),
        out_shardings=structure.unflatten(shardings),
    )


def _alone(cache: Any) -> Stacked:
    return Stacked(jax.tree.map(lambda leaf: leaf[None], cache), 1)


def _of_layer(stacks: Any, layer: Any) -> Any:
    """A layer's part of every stack."""
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, layer, keepdims=False), stacks)


@program(static=(0, 3))
def _embedded(
    ends: Ends, params: Any, tokens: Int[Any, "B T"], axis: str | None
) -> Float[Array, "B T D"]:
    # Where the tokens lie, the projections and the MLP are computed.
    config, mesh = ends.config, ends.mesh
    placed = jax.lax.with_sharding_constraint
    tokens = placed(tokens, logical_sharding(mesh, ("batch", axis)))
    if axis is None or mesh.shape["seq"] == 1:
        return ends_of(config, params).embedded(tokens)
    if gathers_weights(config, mesh, _tokens_of_a_shard(mesh, tokens)):
        return ends_of(config, gathered_ends(config, mesh, params)).embedded(tokens)
    x_BTD = ends_of(config, params).embedded(
        placed(tokens, logical_sharding(mesh, ("batch", None)))
    )
    return placed(x_BTD, logical_sharding(mesh, ("batch", axis, None)))


@program(static=(0, 1), donate_argnums=(3, 4), **IN_PLACE)
def _through_layer(
    setup: Setup,
    window: int | None,
    params: Any,
    x: Float[Array, "B T D"],
    cache: Any,
    segment: Segment,
    total: Int[Array, " B"],
) -> tuple[Float[Array, "B T D"], Any]:
    """One layer; the method's `attend` runs inside the manual `shard_map`."""

    def local(q: Array, k: Array, v: Array, cache: Any, segment: Segment, total: Array) -> Any:
        ctx = setup.layer_context(window, total)
        (out, _), cache = setup.method.attend((q, k, v), cache, segment, ctx)
        return out, cache

    return _attended(setup, local, params, x, cache, tree_specs(cache), segment, total)


def _attended(
    setup: Setup,
    local: Any,
    params: Any,
    x: Float[Array, "B T D"],
    cache: Any,
    specs: Any,
    segment: Segment,
    total: Int[Array, " B"],
) -> tuple[Float[Array, "B T D"], Any]:
    """A layer of these parameters, whose attention is `local` over a cache of these `specs`."""

    def attend(q: Array, k: Array, v: Array, cache: Any) -> tuple[Array, Any]:
        heads = logical_spec(("batch", segment.token_axis, "heads", None))
        kv_heads = logical_spec(("batch", segment.token_axis, "kv_heads", None))
        in_specs = (heads, kv_heads, kv_heads, specs, tree_specs(segment), BATCH)
        run = setup.shard_map(local, in_specs, (heads, specs))
        return run(q, k, v, cache, segment, total)

    config, mesh = setup.config, setup.mesh
    products = setup.products(x.shape[0] * x.shape[1])
    if segment.spread and mesh.shape["seq"] > 1:
        if gathers_weights(config, mesh, _tokens_of_a_shard(mesh, x)):
            params, products = gathered_layer(config, mesh, params), PLAIN
        else:
            products = Divided(mesh, spread=True)
    return layer_of(config, params)(x, cache, attend, products)


def _tokens_of_a_shard(mesh: AnyMesh, x: Array) -> int:
    """Tokens on each shard of `seq`, of spread ones [B, T, ...]."""
    return x.shape[0] * x.shape[1] // (mesh.shape["data"] * mesh.shape["seq"])


def _through_run(
    setup: Setup,
    window: int | None,
    layers: Any,
    first: int,
    x: Float[Array, "B T D"],
    run: Stacked,
    segment: Segment,
    total: Int[Array, " B"],
) -> tuple[Float[Array, "B T D"], Stacked]:
    """Consecutive layers that are alike, from layer `first` on, as a loop over one layer's program.

    The loop carries the caches of all these layers. Arrays that are `in_place` reach the method as
    `Plane`s. Of the others, which are small, the layer's part is cut out and put back.

    Args:
      layers: the stacked weights of all layers of the model.
    """
    stacks, structure = jax.tree.flatten(run.cache)
    fields = leaf_fields(run.cache)
    plane: Any = Plane  # of specs here
    specs = [
        plane(logical_spec(("layers", *field.axes)), PartitionSpec())
        if field.in_place
        else logical_spec(field.axes)
        for field in fields
    ]

    # While a layer is traced: the numbers of the arrays that the method hands on as they are.
    same: set[int] = set()

    def local(q: Array, k: Array, v: Array, parts: Any, segment: Segment, total: Array) -> Any:
        ctx = setup.layer_context(window, total)
        cache = structure.unflatten(parts)
        (out, _), cache = setup.method.attend((q, k, v), cache, segment, ctx)
        news = structure.flatten_up_to(cache)
        same.update(i for i, (old, new) in enumerate(zip(parts, news, strict=True)) if old is new)
        return out, [_kept(old, new) for old, new in zip(parts, news, strict=True)]

    groups = _together(stacks, fields)

    a_turn = 1
    usual = segment.role == "decode" and segment.variant == step_variant(setup.method, 1)
    if setup.platform == "gpu" and usual:
        a_turn = max(n for n in range(1, LAYERS_A_TURN + 1) if run.count % n == 0)

    joined = _joined(stacks, groups, axis=1)
    few = [
        not fields[group[0]].in_place and stack.size <= MOST_NUMBERS * run.count
        for stack, group in zip(joined, groups, strict=True)
    ]

    # Under `jit` the layers of a turn share one lowering, and their kernels are compiled once.
    @jax.jit
    def layer(index: Array, x: Array, stacks: Any, own: Any) -> tuple[Array, Any, Any]:
        parts = [
            part
            if part is not None
            else Plane(stack, index)
            if fields[group[0]].in_place
            else _of_layer(stack, index)
            for stack, part, group in zip(stacks, own, groups, strict=True)
        ]
        weights = _of_layer(layers, first + index)
        parts = _apart(parts, groups)
        x, parts = _attended(setup, local, weights, x, parts, specs, segment, total)
        given, stacks, news = stacks, [], _joined(parts, groups)
        for stack, part, group, small in zip(given, news, groups, few, strict=True):
            if isinstance(part, Plane):
                stack = part.whole
            elif not small and not same.issuperset(group):
                stack = jax.lax.dynamic_update_index_in_dim(stack, part, index, 0)
            stacks.append(stack)
        own = [part if small else None for part, small in zip(news, few, strict=True)]
        return x, stacks, own

    def turn(number: Array, carry: tuple[Any, Any]) -> tuple[Any, Any]:
        x, stacks = carry
        begin = number * a_turn
        # Few numbers are cut out, and put back, for all layers of the turn at once.
        held = [
            jax.lax.dynamic_slice_in_dim(stack, begin, a_turn) if small else None
            for stack, small in zip(stacks, few, strict=True)
        ]
        each = []
        for offset in range(a_turn):
            own = [None if part is None else part[offset] for part in held]
            x, stacks, own = layer(begin + offset, x, stacks, own)
            each.append(own)
        for i, (group, small) in enumerate(zip(groups, few, strict=True)):
            if small and not same.issuperset(group):
                news = jnp.stack([own[i] for own in each])
                stacks[i] = jax.lax.dynamic_update_slice_in_dim(stacks[i], news, begin, 0)
        return x, stacks

    with jax.named_scope(f"layers_{first}_to_{first + run.count - 1}"):
        x, stacks = jax.lax.fori_loop(0, run.count // a_turn, turn, (x, joined))
    stacks = _apart(stacks, groups, axis=1)
    return x, Stacked(structure.unflatten(stacks), run.count)


def _together(stacks: Sequence[Array], fields: Sequence[Leaf]) -> list[list[int]]:
    """The numbers of the arrays in groups; the loop carries each group as one array.

    Small arrays of one shape, dtype and sharding (lengths, positions) form a group. To cut an array
    out and to put it back takes a kernel each in every layer.
    """
    groups: dict[Any, list[int]] = {}
    for number, (stack, field) in enumerate(zip(stacks, fields, strict=True)):
        small = not field.in_place and stack.ndim <= 2
        alike = (stack.shape, stack.dtype, logical_spec(field.axes)) if small else number
        groups.setdefault(alike, []).append(number)
    return list(groups.values())


def _joined(arrays: Sequence[Any], groups: list[list[int]], axis: int = 0) -> list[Any]:
    """The arrays of a group as one, along a new axis; one alone stays as it is."""
    return [
        arrays[group[0]] if len(group) == 1 else jnp.stack([arrays[i] for i in group], axis)
        for group in groups
    ]


def _apart(joined: Sequence[Any], groups: list[list[int]], axis: int = 0) -> list[Any]:
    """`_joined` undone."""
    found = {}
    for array, group in zip(joined, groups, strict=True):
        several = len(group) > 1
        for i, number in enumerate(group):
            found[number] = (
                jax.lax.index_in_dim(array, i, axis, keepdims=False) if several else array
            )
    return [found[number] for number in sorted(found)]


def _kept(old: Any, new: Any) -> Any:
    """What the loop carries on: where a method made an array anew, the plane it is written to."""
    if isinstance(old, Plane) and not isinstance(new, Plane):
        return old.write(new)
    return new


@program(static=(0,))
def _normed(ends: Ends, params: Any, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
    return ends_of(ends.config, params).final_norm(x)


def cache_shapes(setup: Setup, batch: int, slots: int, reserve: int) -> list[CacheShape]:
    """What each layer's `init_cache` is asked for."""
    config = setup.config
    return [
        CacheShape(
            batch=batch,
            slots=slots,
            chunk=setup.chunk,
            reserve=reserve,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=setup.dtype,
            kv=setup.kv,
            layer=layer,
            num_layers=config.num_layers,
            window=config.windows[layer],
            shards=setup.mesh.shape["seq"],
            offload=setup.offload,
        )
        for layer in range(config.num_layers)
    ]


def empty_caches(setup: Setup, batch: int, slots: int, reserve: int) -> tuple[Any, ...]:
    """The empty caches, unsharded; call it under `jax.eval_shape` or `init_caches`.

    One a layer with `Setup.by_layer`, else one for each run of consecutive layers that are alike.
    """
    shapes = cache_shapes(setup, batch, slots, reserve)
    if setup.by_layer:
        return tuple(map(setup.method.init_cache, shapes))
    caches = []
    for _, run in itertools.groupby(shapes, functools.partial(_likeness, setup)):
        alike = list(run)
        cache = setup.method.init_cache(alike[0])
        if len(alike) > 1:
            count = len(alike)
            cache = Stacked(
                jax.tree.map(lambda leaf, n=count: jnp.broadcast_to(leaf, (n, *leaf.shape)), cache),
                count,
            )
        caches.append(cache)
    return tuple(caches)


def _likeness(setup: Setup, shape: CacheShape) -> Any:
    """Equal for layers whose caches begin alike and that see alike."""
    made = jax.make_jaxpr(setup.method.init_cache, static_argnums=0, return_shape=True)
    jaxpr, cache = made(shape)
    consts = tuple(np.asarray(const).tobytes() for const in jaxpr.consts)
    return shape.window, jax.tree.structure(cache), str(jaxpr), consts


@functools.lru_cache(maxsize=256)
def abstract_caches(setup: Setup, batch: int, slots: int, reserve: int) -> tuple[Any, ...]:
    """Shapes and dtypes of every layer's empty cache."""
    return jax.eval_shape(functools.partial(empty_caches, setup, batch, slots, reserve))


@functools.lru_cache(maxsize=64)
def _cache_maker(setup: Setup, batch: int, slots: int, reserve: int) -> Any:
    """Makes the arrays of the empty caches that lie on the devices."""
    # Kept: tracing it anew cost a tenth of a second at each prefill of 32 layers.
    shapes = abstract_caches(setup, batch, slots, reserve)
    shardings = jax.tree.leaves(tree_shardings(setup.mesh, shapes))

    def make() -> list[Any]:
        arrays = jax.tree.leaves(empty_caches(setup, batch, slots, reserve))
        return [x for x, at in zip(arrays, shardings, strict=True) if at.memory_kind != HOST]

    return jax.jit(make, out_shardings=[at for at in shardings if at.memory_kind != HOST])


def init_caches(setup: Setup, batch: int, slots: int, reserve: int) -> tuple[Any, ...]:
    """Every layer's empty cache, made on its shards."""
    # New caches mean new shapes, and so new programs.
    limit_mappings()
    made = iter(_cache_maker(setup, batch, slots, reserve)())
    shapes = abstract_caches(setup, batch, slots, reserve)
    return jax.tree.map(
        lambda leaf, at: host_zeros(leaf, at) if at.memory_kind == HOST else next(made),
        shapes,
        tree_shardings(setup.mesh, shapes),
    )


def host_zeros(leaf: Any, sharding: NamedSharding) -> jax.Array:
    """Zeros in the host's memory, which no device has held."""

    def part(index: Any) -> np.ndarray:
        return np.zeros(sharding.shard_shape(leaf.shape), leaf.dtype)

    global _most_pinned
    made = jax.make_array_from_callback(leaf.shape, sharding, part)
    _most_pinned = max(_most_pinned, pinned_bytes())
    return made


def pinned_bytes() -> int:
    """Bytes that this process's arrays hold in the host's memory."""
    return sum(x.nbytes for x in jax.live_arrays() if x.sharding.memory_kind == HOST)


def most_pinned() -> int:
    """The most bytes that this process's arrays held in the host's memory at once."""
    return _most_pinned


_most_pinned = 0


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


def finish_context(
    setup: Setup, caches: tuple[Any, ...], total: Int[Array, " B"], reserve: int
) -> tuple[Any, ...]:
    """Every layer's `finish`, which may change the caches' shapes; `caches` are donated."""
    run = _finish if setup.by_layer else finish_donated
    with warnings.catch_warnings():
        # A cache that shrinks cannot be finished in place, which jit would report.
        warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
        return run(setup, caches, total, "context", reserve)


def finish_question(
    setup: Setup, caches: tuple[Any, ...], total: Int[Array, " B"], reserve: int
) -> tuple[Any, ...]:
    """New caches for the answer, of a method that `answers_apart`; `caches` stay."""
    run = _finish if setup.by_layer else whole_finish
    return run(setup, caches, total, "question", reserve)


def _finish_layer(
    setup: Setup,
    window: int | None,
    cache: Any,
    total: Int[Array, " B"],
    stage: Stage,
    reserve: int,
) -> Any:
    """The method's `finish` of a layer inside the manual `shard_map`; traced once for like ones."""
    finish, specs, _ = _traced_finish(setup, window, cache, total, stage, reserve)
    return setup.shard_map(finish, (tree_specs(cache), BATCH), specs)(cache, total)


def _traced_finish(
    setup: Setup, window: int | None, cache: Any, total: Any, stage: Stage, reserve: int
) -> tuple[Any, Any, list[int | None]]:
    """`finish` of a device's part, the specs of its result, and which arrays it hands on.

    The last is for each array of the result its number among those of `cache`, or None for one that
    is made anew or is sharded otherwise.
    """
    handed: list[int | None] = []

    def finish(cache: Any, total: Array) -> Any:
        new = setup.method.finish(cache, setup.layer_context(window, total), stage, reserve)
        known = {id(leaf): number for number, leaf in enumerate(jax.tree.leaves(cache))}
        handed[:] = [known.get(id(leaf)) for leaf in jax.tree.leaves(new)]
        return new

    # What comes back is known by tracing; its fields then say how it is sharded.
    in_specs = (tree_specs(cache), BATCH)
    traced = jax.eval_shape(setup.shard_map(finish, in_specs, PartitionSpec()), cache, total)
    specs = tree_specs(traced)
    before = jax.tree.leaves(in_specs[0])
    for index, spec in enumerate(jax.tree.leaves(specs)):
        number = handed[index]
        if number is not None and before[number] != spec:
            handed[index] = None
    return finish, specs, handed


finish_layer = Program(_finish_layer, static=(0, 1, 4, 5))
_finish_layer_donated = Program(_finish_layer, static=(0, 1, 4, 5), donate_argnums=2, **IN_PLACE)


def _finish(
    setup: Setup, caches: tuple[Any, ...], total: Array, stage: Stage, reserve: int
) -> tuple[Any, ...]:
    finished, layer = [], 0
    for cache in caches:
        window = setup.config.windows[layer]
        finished.append(finish_one(setup, window, cache, total, stage, reserve))
        layer += layers_in(cache)
    return tuple(finished)


def finish_one(
    setup: Setup, window: int | None, cache: Any, total: Array, stage: Stage, reserve: int
) -> Any:
    """`finish` of a layer, or of a run of them."""
    each = _finish_layer_donated if stage == "context" else finish_layer
    if not isinstance(cache, Stacked):
        return each(setup, window, cache, total, stage, reserve)
    stacks, structure = jax.tree.flatten(cache.cache)
    one = structure.unflatten(jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in stacks)
    finish, specs, handed = _traced_finish(setup, window, one, total, stage, reserve)
    change = setup.shard_map(finish, (tree_specs(one), BATCH), specs)

    def made(_: None, parts: Any) -> tuple[None, Any]:
        news = jax.tree.leaves(change(structure.unflatten(parts), total))
        return None, [new for new, old in zip(news, handed, strict=True) if old is None]

    # Of the arrays that are handed on no slice is made.
    fresh = iter(jax.lax.scan(made, None, stacks)[1])
    found = [next(fresh) if old is None else stacks[old] for old in handed]
    return Stacked(jax.tree.unflatten(jax.tree.structure(specs), found), cache.count)


def fork(method: Method, cache: Any) -> Any:
    """The method's `fork` of a layer's cache, or of those of a run of layers."""
    if isinstance(cache, Stacked):
        return Stacked(jax.vmap(method.fork)(cache.cache), cache.count)
    return method.fork(cache)


# All layers as one program.
finish_donated = Program(_finish, static=(0, 3, 4), donate_argnums=1, **IN_PLACE)
whole_finish = Program(_finish, static=(0, 3, 4))


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
    """

    token: Int[Array, " B"]
    done: Bool[Array, " B"]
    count: Int[Array, " B"]
    waited: Int[Array, " B"]
    seen: Bool[Array, "B V"] | None
    finite: Bool[Array, " B"]

    def chosen(
        self, logits: Array, active: Array, values: RowValues, static: SamplingStatic
    ) -> tuple["DecodeState", Choices]:
        """The state after the `active` rows' next token, and a column of these tokens."""
        token = next_token(logits, self.seen, self.count, active, values, static)
        choices = choices_of(logits, token, active, values, static)
        # A sum is NaN or infinite when any term is.
        finite = jnp.isfinite(jnp.sum(logits, axis=-1)) | ~active
        count = self.count + active
        stop = jnp.any(token[:, None] == values.stops, axis=-1) | (count >= values.limit)
        seen = self.seen
        if seen is not None:
            seen = seen.at[jnp.arange(token.shape[0]), token].max(active)
        state = DecodeState(
            token=jnp.where(active, token, self.token),
            done=self.done | (active & stop),
            count=count,
            waited=jnp.where(active | self.done, 0, self.waited + 1),
            seen=seen,
            finite=self.finite & finite,
        )
        return state, choices


def first_state(asked: Bool[Any, " B"], seen: Bool[Any, "B V"] | None) -> DecodeState:
    """The state before the first token of the rows that are `asked`."""
    rows = len(asked)
    zeros = {name: np.zeros(rows, np.int32) for name in ("token", "count", "waited")}
    flags = {"done": ~np.asarray(asked), "finite": np.ones(rows, bool), "seen": seen}
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


# Columns of a block of decode steps, variants of the answer's steps, the sampling's static part.
DecodeStatic = tuple[int, tuple[str, ...], SamplingStatic]


def _decode_block(
    setup: Setup,
    params: Any,
    caches: tuple[Any, ...],
    state: DecodeState,
    total: Int[Array, " B"],
    turns: Int[Any, "B X"],
    values: RowValues,
    static: DecodeStatic,
) -> tuple[tuple[Any, ...], DecodeState, Choices]:
    """A block of decode steps on the device; stops early when every row is done.

    Step i of row b is of the variant of index turns[b, i]; none follow where that is negative. X
    columns of new tokens come back, -1 where a row chose none.

    A turn is one pass of the rows whose next step is of one variant; the other rows are no-ops in
    it. Rows that began together take all their steps together. Where rows differ, the variant that
    most rows need comes next, so rows that were out of step soon go together. A row that waits
    counts once more for each turn it waited, so it waits for about as many turns as there are rows,
    at most. A block has as many turns as the row with the most steps has steps.

    The loops are nested: each variant has an inner loop for its consecutive turns, and an outer
    loop goes from one such run to the next. To start a program for each run would take as long as
    a step on a GPU.
    """
    columns, variants, sampling = static
    ends, ends_params = setup.ends, without_layers(params)
    several = len(variants) > 1

    def turn(carry: tuple[Any, ...]) -> Array:
        index, taken_B, _, state, _ = carry
        return _turn(turns, index, taken_B, state, len(variants))

    def step(number: int, carry: tuple[Any, ...]) -> tuple[Any, ...]:
        index, taken_B, caches, state, choices = carry
        token_B1, valid_B1, taken_B = _fed(turns, taken_B, state, number if several else None)
        segment = decode_segment(token_B1, valid_B1, state.done, variants[number])
        hidden_B1D, caches = hidden_states(setup, params, caches, segment, total)
        state, choices = _next_state(
            ends, ends_params, hidden_B1D, valid_B1, state, values, choices, index, sampling
        )
        return index + 1, taken_B, caches, state, choices

    def each_run(carry: tuple[Any, ...]) -> tuple[Any, ...]:
        for number in range(len(variants)):
            alike = functools.partial(lambda number, carry: turn(carry) == number, number)
            carry = jax.lax.while_loop(alike, functools.partial(step, number), carry)
        return carry

    choices = no_choices(len(turns), columns, setup.config.vocab_size, sampling)
    taken_B = np.zeros(len(turns), np.int32)
    if setup.by_layer:
        # Where a step leaves them, so that the first step's programs are those of the others.
        taken_B, choices = everywhere(ends, (taken_B, choices))
        carry = (jnp.int32(0), taken_B, caches, state, choices)
        while (number := int(turn(carry))) >= 0:
            carry = step(number, carry)
        return carry[2:]
    carry = (jnp.int32(0), taken_B, caches, state, choices)
    body = each_run if several else functools.partial(step, 0)
    carry = jax.lax.while_loop(lambda carry: turn(carry) >= 0, body, carry)
    *_, caches, state, choices = carry
    return caches, *replicated(ends, (state, choices))


# All layers, and all steps, as one program.
decode_block = Program(_decode_block, static=(0, 7), donate_argnums=(2, 3), **IN_PLACE, **LOOPED)


def _pending(
    turns: Int[Any, "B X"], taken: Int[Array, " B"], state: DecodeState
) -> Int[Array, " B"]:
    """The variant of each row's next step, negative where there is none in this block."""
    taken_B1, columns = taken[:, None], turns.shape[1]
    next_B1 = jnp.take_along_axis(jnp.asarray(turns), jnp.minimum(taken_B1, columns - 1), axis=1)
    return jnp.where(state.done | (taken_B1[:, 0] >= columns), -1, next_B1[:, 0])


@functools.partial(jax.jit, static_argnums=4)
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


@functools.partial(jax.jit, static_argnums=3)
def _fed(
    turns: Int[Any, "B X"], taken: Int[Array, " B"], state: DecodeState, number: int | None
) -> tuple[Int[Array, "B 1"], Int[Array, "B 1"], Int[Array, " B"]]:
    """Each row's newest token, whether it takes this turn, and how many it has taken with it.

    Without a `number` of a variant all rows take it that are not done.
    """
    active_B = ~state.done if number is None else _pending(turns, taken, state) == number
    valid_B = active_B.astype(jnp.int32)
    return state.token[:, None], valid_B[:, None], taken + valid_B


@program(static=(0, 8))
def _next_state(
    ends: Ends,
    params: Any,
    hidden_B1D: Float[Array, "B 1 D"],
    valid_B1: Int[Array, "B 1"],
    state: DecodeState,
    values: RowValues,
    choices: Choices,
    index: Int[Array, ""],
    sampling: SamplingStatic,
) -> tuple[DecodeState, Choices]:
    """The state after each row's next token, which stands in its column."""
    logits_BV = ends.logits(params, hidden_B1D[:, 0])
    state, column = state.chosen(logits_BV, valid_B1[:, 0] > 0, values, sampling)
    return replicated(ends, (state, choices.with_column(index, column)))


def next_block(setup: Setup, *args: Any) -> tuple[tuple[Any, ...], DecodeState, Choices]:
    """`decode_block` or, with `Setup.by_layer`, its steps from Python."""
    return (_decode_block if setup.by_layer else decode_block)(setup, *args)


def everywhere(ends: Ends, tree: Any) -> Any:
    """The arrays put on all devices, outside of jit."""
    return jax.device_put(tree, NamedSharding(ends.mesh, PartitionSpec()))


def replicated(ends: Ends, tree: Any) -> Any:
    """The same on all devices: every process reads these."""
    sharding = NamedSharding(ends.mesh, PartitionSpec())
    return jax.lax.with_sharding_constraint(tree, jax.tree.map(lambda _: sharding, tree))


def answer_variants(method: Method, tokens: int) -> tuple[str, ...]:
    """The variants of the steps of an answer of so many tokens, in the order of their first."""
    # The first token is the question's; one step at least is compiled.
    steps = range(1, max(tokens, 2))
    return tuple(dict.fromkeys(step_variant(method, step) for step in steps))


def decode_turns(
    method: Method, variants: Sequence[str], steps: Sequence[range], columns: int
) -> Int[np.ndarray, "B X"]:
    """`decode_block`'s `turns` for each row's steps of these numbers, X = `columns` at most."""
    turns = np.full((len(steps), columns), -1, np.int32)
    for row, numbers in enumerate(steps):
        indices = [variants.index(step_variant(method, step)) for step in numbers]
        turns[row, : len(indices)] = indices
    return turns
