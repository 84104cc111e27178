"""The programs of a plan, compiled ahead of time for devices that need not exist.

libtpu compiles for a TPU slice on any machine; a compiled program gives its memory and its
collectives. A CPU target is compiled for this machine's own devices. Each program that a run uses
is compiled once, with the shapes of the run, and several at a time. On a TPU a program holds one
layer of each kind and loops over the layers:

- `context`: the context's segments. Most have one shape and share a program; the first, the last,
  an anchor's or one that ends a row may have another shape or variant, and a program of its own;
- `finish`: the end of the context, and of the question where the method then makes new caches;
- `question`: the segments of a question, the longest that leaves room for one token of answer;
- `decode`: a block of decode steps, with all variants of step (`contract.Method.step_variant`).

The programs that make empty caches and choose the first token need less memory than these.

On a CPU the host calls a program for each layer, and others for what comes before and after the
layers. A CPU target has these in place of the above, under the same kinds.
"""

import collections
import concurrent.futures
import contextlib
import dataclasses
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

import jax
from jax.experimental.compilation_cache import compilation_cache

from jax_longctx.contract import Segment
from jax_longctx.engine import Lengths
from jax_longctx.engine.ahead import lower
from jax_longctx.engine.capacity import bytes_per_device, staged_caches
from jax_longctx.engine.compiling import Program, listing
from jax_longctx.engine.programs import list_answer, list_context, list_question
from jax_longctx.engine.setup import Setup
from jax_longctx.errors import ConfigError, InputError
from jax_longctx.models import params as parameters
from jax_longctx.planning.collectives import count_collectives, count_reads
from jax_longctx.planning.plan import PlanRequest
from jax_longctx.planning.targets import Target
from jax_longctx.planning.work import weight_bytes
from jax_longctx.run_spec import RunSpec
from jax_longctx.sharding import make_mesh

Kind = Literal["context", "finish", "question", "decode"]
# What a run layer by layer calls beside layers, but for the number that tells when it is done.
PARTS = {
    "_embedded": "embedding",
    "_normed": "last norm",
    "_wanted": "logits",
    "_next_state": "choice of a token",
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
    mesh = make_mesh(**sizes, devices=devices_of(request.target, math.prod(sizes.values())))
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
            lowered = lower(program.function, program.args)
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
      args: its arguments; large arrays as shapes.
      resident: bytes of weights and caches on each device while it runs.
    """

    name: str
    kind: Kind
    function: Any
    args: tuple[Any, ...]
    resident: int


def used_programs(request: PlanRequest, setup: Setup, rows: int) -> list[UsedProgram]:
    """The programs of a run of `rows` rows (see above), in the order of first use."""
    reserve, params = request.reserve, abstract_params(setup)
    empty, kept, answering = staged_caches(setup, rows, request.context, reserve)
    weights, found = weight_bytes(setup), dict[Any, UsedProgram]()
    stage: Kind = "context"
    names = collections.Counter[str]()

    def take(program: Program, args: tuple[Any, ...]) -> Any:
        key, (name, kind) = program.key(args), _name(stage, program, args, setup)
        caches = {"context": empty, "question": kept, "decode": answering}[stage]
        if kind == "finish" and stage == "question" and setup.by_layer:
            # A program of one layer runs beside the arguments of the layers before it.
            caches = *kept, *answering
        resident = weights + bytes_per_device(setup.mesh, caches)
        if key in found:
            # The embedding of a chunk, say, whichever stage it is of.
            most = max(found[key].resident, resident)
            found[key] = dataclasses.replace(found[key], resident=most)
        elif name is not None:
            names[name] += 1
            name += f" #{names[name]}" if names[name] > 1 else ""
            found[key] = UsedProgram(name, kind, program, args, resident)
        return program.eval_shape(*args)

    longest = max(reserve - 1, 1)
    lengths = Lengths([request.context] * rows, [], reserve)
    with listing(setup.mesh, take):
        context = list_context(setup, params, lengths, longest)
        stage = "question"
        run, logits = list_question(setup, params, context, longest, 1, keep=False)
        stage = "decode"
        list_answer(setup, params, run, logits, max(reserve, 2))
    return [*found.values()]


def _name(
    stage: Kind, program: Program, args: tuple[Any, ...], setup: Setup
) -> tuple[str | None, Kind]:
    """A program's name and kind; no name for one that is left out."""
    function = program.__name__
    if function in ("_segment", "_through_layer"):
        segment, part = (args[3], "") if function == "_segment" else (args[5], ": a layer")
        if stage == "decode":
            kinds = [segment.variant] if segment.variant else []
            return _decode_name(kinds) + part, stage
        return _segment_name(stage, segment, setup.mesh.shape["seq"]) + part, stage
    if function in ("_finish", "_finish_layer"):
        ended, part = (args[3], "") if function == "_finish" else (args[4], ": a layer")
        return f"end of the {ended}{part}", "finish"
    if function == "_decode_block":
        return _decode_name(filter(None, args[4].variants)), stage
    if function in PARTS:
        return f"{PARTS[function]}, {_tokens(args[2].shape[1])}", stage
    return None, stage


def _decode_name(kinds: Iterable[str]) -> str:
    said = " and ".join(kinds)
    return f"decode, {said} steps" if said else "decode"


def _segment_name(kind: Kind, segment: Segment, shards: int) -> str:
    columns = segment.tokens.shape[1]
    size = f"{shards} x {_tokens(columns // shards)}" if segment.spread else _tokens(columns)
    role = "" if segment.role in (kind, "query") else f" {segment.role.replace('_', ' ')}"
    variant = f" ({segment.variant})" if segment.variant else ""
    return f"{kind}{role}{variant}, {size}"


def _tokens(count: int) -> str:
    return "1 token" if count == 1 else f"{count:,} tokens"


def abstract_params(setup: Setup) -> Any:
    """The parameters as shapes on the mesh, stacked where the setup loops over layers."""
    form = {"dtype": setup.dtype.name, "weights": setup.weights}
    params = parameters.abstract_params(setup.config, RunSpec(mesh=setup.mesh, **form))
    return params if setup.by_layer else parameters.stacked_layers(setup.config, params)


def devices_of(target: Target, count: int) -> list[Any]:
    """The devices that programs are compiled for.

    Raises:
      InputError, ConfigError: this machine cannot compile for the target.
    """
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
    """The figures of a program that was lowered in `lowering` seconds.

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
