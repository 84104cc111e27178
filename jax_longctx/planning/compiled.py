"""The programs of a plan compiled ahead of time, for devices that are not there.

libtpu compiles for a TPU slice on any machine; the compiled programs say what they hold in memory
and which collectives they have. A CPU target is compiled for this machine's own devices.
"""

import contextlib
import dataclasses
import math
import os
import re
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.compilation_cache import compilation_cache

from jax_longctx.contract import step_variant
from jax_longctx.engine import Sampling, programs
from jax_longctx.engine.capacity import bucket
from jax_longctx.engine.engine import BLOCK
from jax_longctx.engine.footprint import answering_caches
from jax_longctx.errors import ConfigError, InputError
from jax_longctx.planning.plan import PlanRequest
from jax_longctx.planning.work import abstract_tree, first_segment
from jax_longctx.sharding import make_mesh, tree_shardings

__all__ = ["Compiled", "compile_plan"]

_COLLECTIVE = re.compile(
    r"= (?P<shape>.*?) (?:all-reduce|all-gather|reduce-scatter|collective-permute|all-to-all)"
    r"(?P<start>-start)?\("
)
_ARRAY = re.compile(r"(pred|[a-z]+\d+)\[([\d,]*)\]")
_TYPES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s16": 2, "u16": 2, "s64": 8, "f64": 8}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compiled:
    """What the compiler says of one program, on each device.

    Attributes:
      arguments: bytes of weights and caches.
      temporaries: bytes beside them, results that are not in place included.
      collectives: how many there are, of one decode step or one segment.
      moved: bytes of their results.
      seconds: that compiling took.
    """

    arguments: int
    temporaries: int
    collectives: int
    moved: int
    seconds: float


def compile_plan(request: PlanRequest, sizes: dict[str, int]) -> dict[str, Compiled]:
    """`prefill` (the first segment) and `decode` (a block of steps, of which one is counted).

    Raises:
      InputError: the target cannot be compiled for here.
    """
    mesh = make_mesh(**sizes, devices=_devices(request, math.prod(sizes.values())))
    setup, rows = request.setup(mesh), request.rows(sizes)
    slots = bucket(request.context + request.reserve + 1, sizes.get("seq", 1))
    params = abstract_tree(setup)
    total = jax.ShapeDtypeStruct((rows,), jnp.int32)
    empty, answering = answering_caches(setup, rows, request.context, request.reserve)
    segment = first_segment(setup, rows, request.context, slots)
    with _no_persistent_cache():
        prefill = _compiled(
            programs.run_segment.lower(
                setup, params, _placed(setup, empty), segment, total, None, "none"
            )
        )
        decode = _compiled(
            programs.decode_block.lower(
                setup,
                params,
                _placed(setup, answering),
                _state(rows),
                total,
                jax.ShapeDtypeStruct((), jnp.int32),
                jax.ShapeDtypeStruct((3,), jnp.float32),
                (BLOCK, step_variant(setup.method, 1), Sampling().static()),
            )
        )
    return {"prefill": prefill, "decode": decode}


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

    # There is no TPU here: nobody is asked for its address, and others may compile beside us.
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


def _placed(setup: programs.Setup, caches: Any) -> Any:
    """Shapes with their shardings."""
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        caches,
        tree_shardings(setup.mesh, caches),
    )


def _state(rows: int) -> programs.DecodeState:
    def each(dtype: Any, *shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype)

    return programs.DecodeState(
        token=each(jnp.int32, rows),
        done=each(jnp.bool_, rows),
        count=each(jnp.int32, rows),
        limit=each(jnp.int32, rows),
        stops=each(jnp.int32, 2),
        seen=None,
        finite=each(jnp.bool_, rows),
        seed=each(jnp.uint32),
    )


def _compiled(lowered: Any) -> Compiled:
    begun = time.perf_counter()
    program = lowered.compile()
    seconds = time.perf_counter() - begun
    memory = program.memory_analysis()
    collectives, moved = count_collectives(program.as_text())
    return Compiled(
        arguments=memory.argument_size_in_bytes,
        temporaries=memory.temp_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes,
        collectives=collectives,
        moved=moved,
        seconds=seconds,
    )


def count_collectives(text: str) -> tuple[int, int]:
    """How many collectives a compiled program has, and the bytes of their results."""
    count = moved = 0
    for found in _COLLECTIVE.finditer(text):
        arrays = [_array_bytes(*array) for array in _ARRAY.findall(found["shape"])]
        count += 1
        # What is started in the background lists its operands before its results.
        moved += sum(arrays[len(arrays) // 2 :] if found["start"] and len(arrays) > 1 else arrays)
    return count, moved


def _array_bytes(kind: str, sizes: str) -> int:
    return _TYPES.get(kind, 4) * math.prod(int(size) for size in sizes.split(",") if size)


@contextlib.contextmanager
def _no_persistent_cache() -> Iterator[None]:
    """Compiles here and now: a program for an absent TPU cannot be read back from a cache."""
    before = jax.config.jax_enable_compilation_cache
    try:
        jax.config.update("jax_enable_compilation_cache", False)
        compilation_cache.reset_cache()
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
        compilation_cache.reset_cache()
