"""What the measurements share: the time of a step on the device, a copy's bandwidth, cut shapes.

A step is timed in compiled loops, so that the host costs nothing. Of a model with many layers some
layers and one alone may be timed in place of all: they compile in a fraction of it. Layers are
alike. The difference of both times is the time of the layers between them, what remains is fixed
(embedding, head, the host), and the whole is scaled from both.
"""

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh

from jax_longctx.engine import Engine, programs
from jax_longctx.engine.engine import BLOCK
from jax_longctx.errors import CapacityError, InputError
from jax_longctx.models.config import ModelConfig
from jax_longctx.models.llama import first_layers, init_params, stacked_layers
from jax_longctx.models.presets import preset

# Where a case does not fit the memory.
TOO_MUCH = (CapacityError, jax.errors.JaxRuntimeError)
# Steps in one compiled loop, of a static number: a dynamic one costs a host round trip a step.
INNER = 16


@dataclasses.dataclass(frozen=True)
class Timing:
    """Seconds of one run: the median of many, the least and the most; temporaries in bytes."""

    seconds: float
    least: float
    most: float
    temporaries: int


def measure(
    step: Callable[..., Any],
    q: Array,
    *rest: Any,
    repeats: int = 20,
    inner: int = INNER,
    least: float = 0.0,
) -> Timing:
    """Time step(i, q, *rest) on the device: `repeats` compiled loops of `inner` runs each.

    Run i takes a q that depends on what run i - 1 returned (nothing is added to it, which the
    compiler cannot know), so that none is dropped or moved out of the loop. What the loop costs
    without the step is measured alike and taken off.

    Args:
      step: returns any arrays; i is for turning through inputs that would fit a cache.
      least: seconds that a loop takes; a quicker one is made longer, up to 64 times. What the host
        does around a loop differs by tens of microseconds, as much as 16 runs of a small kernel.
    """
    compiled = _loop(step, inner).lower(q, *rest).compile()
    taken = min(_loop_times(compiled, (q, *rest), 2)) if least else 0.0
    if taken < least:
        inner *= min(math.ceil(least / max(taken, 1e-9)), 64)
        compiled = _loop(step, inner).lower(q, *rest).compile()
    idle = statistics.median(_loop_times(_loop(lambda _, q: q, inner), (q,), repeats))
    times = [max(t - idle, 0.0) / inner for t in _loop_times(compiled, (q, *rest), repeats)]
    memory = compiled.memory_analysis()
    return Timing(
        seconds=statistics.median(times),
        least=min(times),
        most=max(times),
        temporaries=memory.temp_size_in_bytes if memory else 0,
    )


def _loop(step: Callable[..., Any], inner: int) -> Any:
    def once(i: Array, q: Array, rest: tuple) -> Array:
        # Behind the barrier nothing of the step can be left out as unused.
        made = jax.tree.leaves(lax.optimization_barrier(step(i, q, *rest)))
        flags = [(x[(0,) * x.ndim] > 1e30).astype(q.dtype) for x in made]
        return q + sum(flags)

    def loop(q: Array, *rest: Any) -> Array:
        return lax.fori_loop(0, inner, lambda i, q: once(i, q, rest), q)

    return jax.jit(loop)


def _loop_times(loop: Callable[..., Array], args: tuple, repeats: int) -> list[float]:
    times = []
    for _ in range(1 + repeats):  # the first warms up
        begun = time.perf_counter()
        loop(*args).block_until_ready()
        times.append(time.perf_counter() - begun)
    return times[1:]


def copy_bandwidth(size: int = 1 << 31, repeats: int = 20) -> float:
    """Bytes a second, read plus written, of adding one to `size` bytes inside a compiled loop."""
    x = jax.random.normal(jax.random.key(0), (size // 4,), jnp.float32)
    loop = jax.jit(lambda x: lax.fori_loop(0, repeats, lambda _, y: y + 1.0, x), donate_argnums=0)
    times = []
    for _ in range(6):  # the first warms up
        begun = time.perf_counter()
        x = loop(x).block_until_ready()
        times.append(time.perf_counter() - begun)
    return 2 * size * repeats / statistics.median(times[1:])


def streamed(begun: float, stream: Iterator[list[list[int]]]) -> tuple[float, list[float]]:
    """Seconds from `begun` to the first block of an answer, and a step's of every whole block.

    The shorter first blocks show more of the host.
    """
    first, steps = 0.0, []
    previous = begun
    for block in stream:
        now = time.perf_counter()
        first = first or now - begun
        if len(block[0]) == BLOCK:
            steps.append((now - previous) / BLOCK)
        previous = now
    return first, steps


def answered(
    engine: Engine, tokens: int, answer: int, runs: int, keep: bool
) -> tuple[list[float], list[float], int]:
    """Random text prefilled and continued: seconds of every run, of every step, bytes a token.

    Args:
      tokens: of the context; the last of them is asked again.
      keep: whether the context could be asked once more.

    Returns:
      Seconds to the first token of each run, a step of each whole block, bytes of cache a token.
    """
    draw = np.random.default_rng(tokens).integers(0, engine.config.vocab_size, tokens)
    row = [int(token) for token in draw]
    found, bytes_per_token = [], 0
    for index in range(1 + runs):
        begun = time.perf_counter()
        prefilled = engine.prefill([row], reserve=1 + answer)
        if not index:  # this run warms up
            bytes_per_token = prefilled.resident_bytes // prefilled.slots
        stream = engine.stream(prefilled, [row[-1:]], max_tokens=answer, keep=keep)
        found.append(streamed(begun, stream))
    steps = [step for _, times in found[1:] for step in times]
    return [first for first, _ in found[1:]], steps, bytes_per_token


def device_facts() -> dict[str, str]:
    """What every result says of where it was measured."""
    return {"device": jax.devices()[0].device_kind, "jax": jax.__version__}


@dataclasses.dataclass(frozen=True)
class Shape:
    """A published shape and random weights of the first `layers` of it, which are timed."""

    config: ModelConfig
    params: Any
    mesh: Mesh
    layers: int
    chunk: int

    @classmethod
    def make(
        cls, model: str, mesh: Mesh, layers: int | None, chunk: int, say: Callable[[str], None]
    ) -> "Shape":
        """All layers unless given. Raises InputError unless the shape has as many, and two."""
        config = preset(model)
        timed = config.num_layers if layers is None else layers
        if not 2 <= timed <= config.num_layers:
            raise InputError(f"--layers must be from 2 to {config.num_layers}, got {layers}")
        say("making weights ...")
        cut = _cut(config, timed)
        params = init_params(cut, mesh, dtype=jnp.bfloat16)
        if mesh.devices.flat[0].platform != "cpu":
            params = stacked_layers(cut, params, consume=True)
        return cls(config, params, mesh, timed, chunk)

    def engine(self, method: Any, layers: int | None = None) -> Engine:
        """The method on the first layers."""
        layers = layers or self.layers
        params = first_layers(self.params, layers)
        return Engine(_cut(self.config, layers), params, method, self.mesh, chunk=self.chunk)

    def setup(self, method: Any) -> programs.Setup:
        """What all layers would run under."""
        return programs.Setup(self.config, method, self.mesh, jnp.dtype(jnp.bfloat16), self.chunk)

    def times[T](self, method: Any, measure: Callable[[Engine], T]) -> dict[int, T]:
        """What is measured of the layers that are timed, and of one where they are not all."""
        numbers = [self.layers, *([1] if self.layers < self.config.num_layers else [])]
        return {number: measure(self.engine(method, number)) for number in numbers}

    def facts(self) -> dict[str, Any]:
        return {**device_facts(), "layers": {"timed": self.layers, "of": self.config.num_layers}}


def _cut(config: ModelConfig, layers: int) -> ModelConfig:
    return dataclasses.replace(config, num_layers=layers, windows=config.windows[:layers])


def scaled(name: str, seconds: dict[int, float], layers: int) -> dict[str, float]:
    """Seconds of all `layers`, from those of as many, or of some and of one."""
    most = max(seconds)
    if most == layers:
        return {name: seconds[most]}
    each = (seconds[most] - seconds[1]) / (most - 1)
    whole = seconds[most] + (layers - most) * each
    return {name: whole, f"{name}_layer": each, f"{name}_fixed": seconds[1] - each}
