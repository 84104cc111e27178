"""The programs of a plan, compiled ahead of time for devices that need not exist.

libtpu compiles for a TPU slice on any machine; a compiled program gives its memory and its
collectives. A CPU target is compiled for this machine's own devices. Each program that a run uses
is compiled once, with the shapes of the run, and several at a time. On a TPU a program holds one
layer of each kind and loops over the layers:

- `context`: the context's segments. Most have one shape and share a program; the first, the last,
  an anchor's or one that ends a row may have another shape or variant, and a program of its own;
- `finish`: the end of the context, and of the question where the method then makes new caches;
- `question`: the segments of a question, the longest that leaves room for one token of answer;
- `decode`: a block of decode steps, with all variants of step (`contract.step_variant`).

The programs that make empty caches and choose the first token need less memory than these.

On a CPU the host calls a program for each layer, and others for what comes before and after the
layers. A CPU target has these in place of the above, under the same kinds.
"""

import concurrent.futures
import contextlib
import dataclasses
import math
import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.compilation_cache import compilation_cache

from jax_longctx.contract import Prompt, Segment, Stage
from jax_longctx.engine import Sampling
from jax_longctx.engine.ahead import Listing
from jax_longctx.engine.capacity import bytes_per_device, reserved, staged_caches
from jax_longctx.engine.decode import DecodeState, Steps, answer_variants, decode_block, first_state
from jax_longctx.engine.engine import BLOCK
from jax_longctx.engine.prefill import Logits, finish_donated, whole_finish, whole_segment
from jax_longctx.engine.sampling import Choices, RowValues, sampling_static, sampling_values
from jax_longctx.engine.setup import Setup
from jax_longctx.errors import ConfigError, InputError
from jax_longctx.models import params as parameters
from jax_longctx.planning.collectives import count_collectives, count_reads
from jax_longctx.planning.plan import PlanRequest
from jax_longctx.planning.work import context_segments, weight_bytes
from jax_longctx.run_spec import RunSpec
from jax_longctx.sharding import logical_sharding, make_mesh, tree_shardings

Kind = Literal["context", "finish", "question", "decode"]
# What a run layer by layer calls, by the functions' names. The number that tells when a segment is
# done is left out.
PARTS = {
    "_embedded": "embedding",
    "_through_layer": "a layer",
    "_normed": "last norm",
    "_wanted": "logits",
    "_next_state": "choice of a token",
    "_finish_layer": "a layer",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compiled:
    """The compiler's figures of one program, on each device.

    Attributes:
      kind: `context`, `finish`, `question` or `decode` (see above).
      arguments: bytes of weights and caches that the program reads.
      temporaries: bytes beside them, with results that are not in place.
      held: bytes in memory while it runs: all weights and caches, also those that it does not
        read, and the temporaries.
      collectives: number of collectives of one decode step or segment, of all its layers; of one
        layer where the program is called for each.
      moved: bytes of their results.
      weights_read: bytes of weights that one decode step or segment reads, or one layer (as above).
      seconds: time of lowering and compiling, beside other programs.
    """

    kind: Kind
    arguments: int
    temporaries: int
    held: int
    collectives: int
    moved: int
    weights_read: int
    seconds: float


def compile_plan(
    request: PlanRequest,
    sizes: dict[str, int],
    progress: Callable[[int, int, str], None] = lambda done, total, name: None,
) -> dict[str, Compiled]:
    """Every program that a run uses, by name and in the order of first use.

    Args:
      progress: called before the wait for each program with the number compiled, of all, and its
        name.

    Raises:
      InputError: this machine cannot compile for the target.
    """
    mesh = make_mesh(**sizes, devices=_devices(request, math.prod(sizes.values())))
    by_layer = request.target.kind == "cpu"
    setup = dataclasses.replace(request.setup(mesh), by_layer=by_layer)
    used = used_programs(request, setup, request.rows(sizes))
    weights = local_arrays(abstract_params(setup))
    compiled: dict[str, Compiled] = {}
    progress(0, len(used), used[0].name)
    with no_persistent_cache(), concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        # Lowering holds the interpreter's lock, compiling does not.
        waiting = []
        for program in used:
            begun = time.perf_counter()
            lowered = program.lower()
            lowering = time.perf_counter() - begun
            waiting.append(pool.submit(_compiled, program, lowered, lowering, weights))
        for done, (program, compiling) in enumerate(zip(used, waiting, strict=True)):
            if done:
                progress(done, len(used), program.name)
            compiled[program.name] = compiling.result()
    return compiled


def most_temporaries(compiled: dict[str, Compiled]) -> int:
    """The most temporaries of any program that runs the model."""
    return max(each.temporaries for each in compiled.values() if each.kind != "finish")


@dataclasses.dataclass(frozen=True)
class UsedProgram:
    """One program and its arguments.

    Attributes:
      name: unique among the programs of a run.
      function: a `Program`.
      args: its arguments; arrays as shapes, or as numpy.
      resident: bytes of weights and caches on each device while it runs.
    """

    name: str
    kind: Kind
    function: Any
    args: tuple[Any, ...]
    resident: int

    def lower(self) -> Any:
        """The lowered program."""
        with warnings.catch_warnings():
            # A cache that shrinks cannot be finished in place, as in a run.
            warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
            return self.function.lower(*self.args)


def used_programs(request: PlanRequest, setup: Setup, rows: int) -> list[UsedProgram]:
    """The programs of a run of `rows` rows, in the order of first use."""
    method, shards, reserve = setup.method, setup.mesh.shape["seq"], request.reserve
    empty, kept, answering = staged_caches(setup, rows, request.context, reserve)
    used, vocabulary = _Used(setup, rows), setup.config.vocab_size
    longest = max(reserve - 1, 1)
    segments = context_segments(setup, request.context, reserve, longest)
    used.segments("context", empty, segments, None, "none")
    used.end("context", empty, finish_donated, reserve)
    asked = Prompt(
        "question", setup.chunk, question=[range(longest)], shards=shards, vocab_size=vocabulary
    )
    logits = used.made(_shape(jnp.float32, rows, vocabulary))
    used.segments("question", kept, method.segments(asked), logits, "last")
    if method.info.answers_apart:
        # A program of one layer runs beside what the layers before it were given.
        used.end("question", kept, whole_finish, reserve, answering if setup.by_layer else ())
    used.decode(answering, answer_variants(method, reserved(reserve)))
    return used.found


class _Used:
    """Lists the programs of a run.

    Attributes:
      found: the list.
    """

    def __init__(self, setup: Setup, rows: int):
        self.setup, self.rows = setup, rows
        self.params, self.weights = abstract_params(setup), weight_bytes(setup)
        self.total = self.made(_shape(jnp.int32, rows))
        self.found: list[UsedProgram] = []
        self._known: dict[Any, int] = {}

    def made(self, shapes: Any) -> Any:
        """The arguments of a program, other than weights and caches.

        What a run layer by layer calls is listed by running it: there these are arrays.
        """
        return _zeros(shapes) if self.setup.by_layer else shapes

    def add(self, name: str, kind: Kind, caches: Any, function: Any, *args: Any) -> None:
        """Adds a program, or those of its layers; a number makes a name unique."""
        resident = self.weights + bytes_per_device(self.setup.mesh, caches)
        parts = [("", function, args)]
        if self.setup.by_layer:
            parts = [
                (f": {PARTS[jitted.__name__]}", jitted, given)
                for jitted, given in _called(self.setup.mesh, function, args)
            ]
        for part, jitted, given in parts:
            signature = jitted, _signature(given)
            if self.setup.by_layer and signature in self._known:
                # The embedding of a chunk, say, whichever stage it is of.
                at = self._known[signature]
                most = max(self.found[at].resident, resident)
                self.found[at] = dataclasses.replace(self.found[at], resident=most)
                continue
            self._known[signature] = len(self.found)
            same = sum(each.name.split(" #")[0] == name + part for each in self.found)
            numbered = f"{name}{part} #{same + 1}" if same else name + part
            self.found.append(UsedProgram(numbered, kind, jitted, given, resident))

    def segments(
        self, kind: Kind, caches: Any, segments: Iterable[Segment], logits: Any, wanted: Logits
    ) -> None:
        """Adds the programs of a stage's segments, each signature once."""
        setup, signatures = self.setup, set()
        for segment in segments:
            signature = _signature(segment)
            if signature in signatures:
                continue
            signatures.add(signature)
            # The segment has one row; all rows are alike.
            whole = jax.tree.map(lambda leaf: np.repeat(leaf, self.rows, axis=0), segment)
            args = setup, self.params, placed(setup.mesh, caches), whole, self.total
            name = _segment_name(kind, segment, setup.mesh.shape["seq"])
            self.add(name, kind, caches, whole_segment, *args, logits, wanted)

    def end(
        self, stage: Stage, caches: Any, function: Any, reserve: int, beside: tuple[Any, ...] = ()
    ) -> None:
        """Adds the program that ends a stage; the caches `beside` are in memory too."""
        args = (self.setup, placed(self.setup.mesh, caches), self.total, stage, reserved(reserve))
        self.add(f"end of the {stage}", "finish", (*caches, *beside), function, *args)

    def decode(self, caches: Any, variants: tuple[str, ...]) -> None:
        """Adds a block of decode steps."""
        setup, rows = self.setup, self.rows
        kinds = " and ".join(filter(None, variants))
        turns = _shape(jnp.int32, rows, BLOCK)
        if setup.by_layer:
            # A step of each variant.
            turns = np.full((rows, BLOCK), -1, np.int32)
            turns[:, : len(variants)] = range(len(variants))
        values = self.made(abstract_values(rows))
        self.add(
            f"decode, {kinds} steps" if kinds else "decode",
            "decode",
            caches,
            decode_block,
            *(setup, self.params, placed(setup.mesh, caches), self.made(abstract_state(rows))),
            Steps(self.total, turns, values, variants, sampling_static(Sampling())),
        )


def _called(mesh: Any, function: Any, args: tuple[Any, ...]) -> list[tuple[Any, tuple[Any, ...]]]:
    """The programs, named in `PARTS`, that a run layer by layer calls in place of `function`."""

    def stand_in(given: tuple[Any, ...], result: Any) -> Any:
        if isinstance(result, tuple):
            return tuple(stand_in(given, each) for each in result)
        if result is None:
            return None
        if isinstance(result, DecodeState | Choices):
            return _zeros(result)
        if not hasattr(result, "shape"):
            return placed(mesh, result)
        if result.ndim < 3:
            return _zeros(result)
        # Hidden states lie where the tokens were embedded.
        like = (arg.sharding for arg in given if getattr(arg, "shape", None) == result.shape)
        sharding = next(like, None) or logical_sharding(mesh, ("batch", given[-1], None))
        return jnp.zeros(result.shape, result.dtype, device=sharding)

    def as_shape(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array) or leaf.ndim < 3:
            return leaf
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)

    listing = Listing(stand_in)
    with listing.rehearsing():
        function.__wrapped__(*args)
    return [
        (jitted, jax.tree.map(as_shape, given))
        for jitted, given in listing.programs
        if jitted.__name__ in PARTS
    ]


def _signature(tree: Any) -> Any:
    """What `jit` tells the programs of a run apart by."""
    leaves, structure = jax.tree.flatten(tree)
    return structure, tuple(
        (np.shape(leaf), leaf.dtype) if hasattr(leaf, "shape") else leaf for leaf in leaves
    )


def _zeros(shapes: Any) -> Any:
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)


def _segment_name(kind: Kind, segment: Segment, shards: int) -> str:
    columns = segment.tokens.shape[1]
    size = f"{shards} x {columns // shards:,}" if segment.spread else f"{columns:,}"
    role = "" if segment.role in (kind, "query") else f" {segment.role.replace('_', ' ')}"
    variant = f" ({segment.variant})" if segment.variant else ""
    return f"{kind}{role}{variant}, {size} tokens"


def abstract_params(setup: Setup) -> Any:
    """The parameters as shapes on the mesh, stacked where the setup loops over layers."""
    form = {"dtype": setup.dtype.name, "weights": setup.weights}
    params = parameters.abstract_params(setup.config, RunSpec(mesh=setup.mesh, **form))
    return params if setup.by_layer else parameters.stacked_layers(setup.config, params)


def placed(mesh: Any, caches: Any) -> Any:
    """Shapes with their shardings."""
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        caches,
        tree_shardings(mesh, caches),
    )


def abstract_state(rows: int) -> DecodeState:
    """The state of greedy decoding, as shapes."""
    return jax.eval_shape(lambda: first_state(np.ones(rows, bool), None))


def abstract_values(rows: int) -> RowValues:
    """The values of requests, as shapes."""
    values = sampling_values(Sampling(seed=(0,)), rows)
    return jax.tree.map(lambda leaf: _shape(leaf.dtype, *leaf.shape), values)


def _shape(dtype: Any, *sizes: int) -> Any:
    return jax.ShapeDtypeStruct(sizes, dtype)


def _devices(request: PlanRequest, count: int) -> list[Any]:
    target = request.target
    if target.topology is not None:
        return _tpu_devices(target.topology)
    if target.kind != "cpu":
        raise InputError(
            f"--compile cannot compile for {target.name} on this machine; it can for TPUs "
            f"(libtpu) and cpu"
        )
    found = jax.devices("cpu")
    if len(found) < count:
        raise InputError(
            f"--compile for {target.name} needs {count} CPU devices, there are {len(found)}; "
            f"set JAX_NUM_CPU_DEVICES={count}"
        )
    return found


def _tpu_devices(topology: str) -> list[Any]:
    from jax.experimental import topologies

    # There is no TPU: libtpu must not query its address, and other processes may compile too.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    try:
        described = topologies.get_topology_desc(platform="tpu", topology_name=topology)
    except (jax.errors.JaxRuntimeError, RuntimeError) as error:
        first = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"no TPU slice {topology} can be compiled for: {first:.200}; install libtpu "
            f"(pip install 'jax-longctx[tpu]'), and give a slice of whole hosts (2x2 chips)"
        ) from error
    return list(described.devices)


def local_arrays(tree: Any) -> set[tuple[str, tuple[int, ...]]]:
    """Types and shapes of a device's part of these arrays (shapes on a mesh), as HLO has them."""
    kinds = {"bfloat16": "bf16", "float16": "f16", "float32": "f32", "int8": "s8"}
    return {
        (kinds[leaf.dtype.name], leaf.sharding.shard_shape(leaf.shape))
        for leaf in jax.tree.leaves(tree)
        if leaf.ndim > 1
    }


def _compiled(
    used: UsedProgram, lowered: Any, lowering: float, weights: set[tuple[str, tuple[int, ...]]]
) -> Compiled:
    """The figures of a program that took so many seconds to lower.

    Args:
      weights: from `local_arrays`.
    """
    begun = time.perf_counter()
    program = lowered.compile()
    seconds = lowering + time.perf_counter() - begun
    memory = program.memory_analysis()
    text = program.as_text()
    collectives, moved = count_collectives(text)
    arguments = memory.argument_size_in_bytes
    temporaries = (
        memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    )
    return Compiled(
        kind=used.kind,
        arguments=arguments,
        temporaries=temporaries,
        held=max(arguments, used.resident) + temporaries,
        collectives=collectives,
        moved=moved,
        weights_read=count_reads(text, weights),
        seconds=seconds,
    )


@contextlib.contextmanager
def no_persistent_cache() -> Iterator[None]:
    """Turns off the compilation cache: a program for an absent TPU cannot be read back from it."""
    before = jax.config.jax_enable_compilation_cache
    try:
        jax.config.update("jax_enable_compilation_cache", False)
        compilation_cache.reset_cache()
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
        compilation_cache.reset_cache()
