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
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

from jax_longctx.errors import ConfigError, InputError
from jax_longctx.planning.plan import PlanRequest
from jax_longctx.planning.used import Kind, UsedProgram, used_programs
from jax_longctx.sharding import make_mesh

__all__ = ["Compiled", "compile_plan", "most_temporaries"]

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
      kind: `context`, `finish`, `question` or `decode` (see `planning.used`).
      arguments: bytes of weights and caches that the program reads.
      temporaries: bytes beside them, results that are not in place included.
      held: bytes in memory while it runs: all weights and caches, also those that it does not
        read, and the temporaries.
      collectives: how many there are, of one decode step or one segment.
      moved: bytes of their results.
      seconds: that lowering and compiling took.
    """

    kind: Kind
    arguments: int
    temporaries: int
    held: int
    collectives: int
    moved: int
    seconds: float


def compile_plan(
    request: PlanRequest,
    sizes: dict[str, int],
    progress: Callable[[str, int, int], None] | None = None,
) -> dict[str, Compiled]:
    """Every program that a run would use, by name and in the order of first use.

    Args:
      progress: called before each with its name, the number of those done, and of all.

    Raises:
      InputError: the target cannot be compiled for here.
    """
    mesh = make_mesh(**sizes, devices=_devices(request, math.prod(sizes.values())))
    used = used_programs(request, request.setup(mesh), request.rows(sizes))
    compiled = {}
    with _no_persistent_cache():
        for done, program in enumerate(used):
            if progress is not None:
                progress(program.name, done, len(used))
            compiled[program.name] = _compiled(program)
    return compiled


def most_temporaries(compiled: dict[str, Compiled]) -> int:
    """The most that any program takes which runs the model."""
    return max(each.temporaries for each in compiled.values() if each.kind != "finish")


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


def _compiled(used: UsedProgram) -> Compiled:
    begun = time.perf_counter()
    program = used.lower().compile()
    seconds = time.perf_counter() - begun
    memory = program.memory_analysis()
    collectives, moved = count_collectives(program.as_text())
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
