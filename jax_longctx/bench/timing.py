"""Shared parts of the benchmarks: a step's time on the device, copy bandwidth, cut models.

A step runs in compiled loops, so that its time has no host overhead. A model of many layers may be
timed with a few of its layers and with one, which compiles much faster. All layers take the same
time. The difference of the two times gives a layer's time, the rest is fixed (embedding, head,
host), and both together give the time of the whole model.
"""

import dataclasses
import math
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh

from jax_longctx.engine import Engine
from jax_longctx.engine.capacity import setup_of
from jax_longctx.engine.setup import Setup
from jax_longctx.errors import CapacityError, InputError
from jax_longctx.evaluation.compute import compared
from jax_longctx.models.config import ModelConfig
from jax_longctx.models.params import first_layers, init_params, stacked_layers
from jax_longctx.models.presets import preset
from jax_longctx.run_spec import RunSpec

# Raised where a case does not fit the memory.
TOO_MUCH = (CapacityError, jax.errors.JaxRuntimeError)
# Steps of one compiled loop. A dynamic number would cost a host round trip a step.
INNER = 16


@dataclasses.dataclass(frozen=True)
class Timing:
    """Seconds of one run: median, least and most of many; temporaries in bytes."""

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
    """Times step(i, q, *rest) on the device: `repeats` compiled loops of `inner` runs each.

    The q of run i depends on the results of run i - 1 (by a zero that the compiler cannot see), so
    the compiler cannot drop a run or move it out of the loop. The time of the loop without the step
    is measured in the same way and subtracted.

    Args:
      step: returns any arrays; i lets it rotate inputs that would stay in a hardware cache.
      least: shortest seconds of a loop; a shorter loop is made up to 64 times longer. The host's
        time around a loop varies by tens of microseconds, as much as 16 runs of a small kernel.
    """
    compiled = _loop(step, inner).lower(q, *rest).compile()
    taken = min(call_times(lambda: compiled(q, *rest), 2)) if least else 0.0
    if taken < least:
        inner *= min(math.ceil(least / max(taken, 1e-9)), 64)
        compiled = _loop(step, inner).lower(q, *rest).compile()
    empty = _loop(lambda _, q: q, inner)
    idle = statistics.median(call_times(lambda: empty(q), repeats))
    found = call_times(lambda: compiled(q, *rest), repeats)
    times = [max(seconds - idle, 0.0) / inner for seconds in found]
    memory = compiled.memory_analysis()
    return Timing(
        seconds=statistics.median(times),
        least=min(times),
        most=max(times),
        temporaries=memory.temp_size_in_bytes if memory else 0,
    )


def _loop(step: Callable[..., Any], inner: int) -> Any:
    def once(i: Array, q: Array, rest: tuple) -> Array:
        # The barrier keeps the compiler from removing unused results of the step.
        made = jax.tree.leaves(lax.optimization_barrier(step(i, q, *rest)))
        flags = [(x[(0,) * x.ndim] > 1e30).astype(q.dtype) for x in made]
        return q + sum(flags)

    def loop(q: Array, *rest: Any) -> Array:
        return lax.fori_loop(0, inner, lambda i, q: once(i, q, rest), q)

    return jax.jit(loop)


def call_times(call: Callable[[], Any], repeats: int) -> list[float]:
    """Seconds until the results of each of `repeats` calls are ready, after one warm-up call."""
    times = []
    for _ in range(1 + repeats):
        begun = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - begun)
    return times[1:]


def copy_bandwidth(size: int = 1 << 31) -> float:
    """Bytes read and written a second while a compiled loop adds one to `size` bytes."""
    x, repeats = jax.random.normal(jax.random.key(0), (size // 4,), jnp.float32), 20
    loop = jax.jit(lambda x: lax.fori_loop(0, repeats, lambda _, y: y + 1.0, x), donate_argnums=0)

    def again() -> Array:
        nonlocal x
        x = loop(x)
        return x

    return 2 * size * repeats / statistics.median(call_times(again, 5))


def first_tokens(engine: Engine, tokens: int, runs: int, question: int = 1) -> list[float]:
    """Seconds to the first token over `runs` random contexts, after a warm-up run.

    Args:
      tokens: of the context; its last `question` tokens are also the question, which is given at
        prefill where the method needs it.
    """
    draw = np.random.default_rng(tokens).integers(0, engine.config.vocab_size, tokens)
    row = [int(token) for token in draw]
    asked, found = [row[-question:]], []
    given: dict[str, Any] = {"questions": asked} if engine.method.info.needs_question else {}
    for _ in range(1 + runs):
        begun = time.perf_counter()
        prefilled = engine.prefill([row], reserve=question + 1, **given)
        for _ in engine.stream(prefilled, asked, max_tokens=1, keep=False):
            found.append(time.perf_counter() - begun)
    return found[1:]


class MemoryWatch:
    """The most bytes that a local device held beyond those at the start, in a `with` block.

    A thread asks each millisecond, and once at the end: the most that a device has ever held cannot
    be set back.

    Attributes:
      possible: whether the platform says what devices hold; CPUs do not.
      most: bytes; None before the block.
    """

    def __init__(self) -> None:
        self.most: int | None = None
        self.possible = None not in _held()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._ask, daemon=True)

    def __enter__(self) -> "MemoryWatch":
        self._before, self.most = _held(), 0
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._look()

    def _look(self) -> None:
        more = [now - was for now, was in zip(_held(), self._before, strict=True)]
        self.most = max(self.most or 0, *more)

    def _ask(self) -> None:
        while not self._stop.wait(1e-3):
            self._look()


def _held() -> list[Any]:
    """Bytes that each local device holds, or None."""
    stats = [device.memory_stats() for device in jax.local_devices()]
    return [about["bytes_in_use"] if about else None for about in stats]


def device_facts() -> dict[str, str]:
    """The device and the version of JAX, for results."""
    return {"device": jax.devices()[0].device_kind, "jax": jax.__version__}


@dataclasses.dataclass(frozen=True)
class Shape:
    """A published shape, and random weights of its first `layers` layers, which are timed."""

    config: ModelConfig
    params: Any
    spec: RunSpec
    layers: int

    @classmethod
    def make(
        cls, model: str, spec: RunSpec, say: Callable[[str], None], layers: int | None = None
    ) -> "Shape":
        """Takes all layers unless given. InputError unless `layers` is from 2 to all."""
        config, mesh = preset(model), spec.devices()
        timed = config.num_layers if layers is None else layers
        if not 2 <= timed <= config.num_layers:
            raise InputError(f"--layers must be from 2 to {config.num_layers}, got {layers}")
        say("making weights ...")
        cut, spec = config.cut(timed), dataclasses.replace(spec, mesh=mesh).over("bfloat16")
        params = init_params(cut, spec)
        if mesh.devices.flat[0].platform != "cpu":
            params = stacked_layers(cut, params, consume=True)
        return cls(config, params, spec, timed)

    @property
    def mesh(self) -> Mesh:
        return self.spec.mesh

    def engine(self, method: Any, layers: int | None = None) -> Engine:
        """An engine of the method on the first layers, all that are timed unless given."""
        layers = layers or self.layers
        params = first_layers(self.params, layers)
        return Engine(self.config.cut(layers), params, compared(self.spec, method))

    def setup(self, method: Any) -> Setup:
        """The setup of the whole model."""
        return setup_of(self.config, compared(self.spec, method))

    def times[T](self, method: Any, measure: Callable[[Engine], T]) -> dict[int, T]:
        """`measure` by number of layers: the timed ones, and one where these are not all."""
        numbers = [self.layers, *([1] if self.layers < self.config.num_layers else [])]
        return {number: measure(self.engine(method, number)) for number in numbers}

    def facts(self) -> dict[str, Any]:
        layers = {"timed": self.layers, "of": self.config.num_layers}
        return {**device_facts(), "layers": layers, **self.spec.facts()}


def scaled(name: str, seconds: dict[int, float], layers: int) -> dict[str, float]:
    """Seconds of all `layers`, from the seconds of all, or of some and of one.

    Raises:
      InputError: one took longer than some, so much that all would take no time.
    """
    most = max(seconds)
    if most == layers:
        return {name: seconds[most]}
    each = (seconds[most] - seconds[1]) / (most - 1)
    whole = seconds[most] + (layers - most) * each
    if whole <= 0:
        raise InputError(
            f"{most} layers took less time than one, so what {layers} take cannot be told; time "
            "more layers, or again while this machine is idle"
        )
    return {name: whole, f"{name}_layer": each, f"{name}_fixed": seconds[1] - each}
