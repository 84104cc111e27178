"""What to measure on a TPU first: are the kernels right, and how near are they to the limits?

1. Checks: each TPU kernel against its definition (`reference`), on small arrays. Rows end beside
   the edges of blocks, one is empty, and beyond a row's length the cache holds NaN. Kernels that
   can also read their cache as a `Plane`, as in a loop over layers.
2. Kernels: the cases of `bench kernels`, at the shapes of an 8B model, beside bytes and FLOPs at
   rates measured in the same run.
3. Steps: a decode step of a few layers of Llama-3.1-8B's shape, scaled to all.

What the time does not suffice for has a row that says so. With `interpret` the checks alone run, in
the interpreter of Pallas on a CPU. The kernel of a chunk's attention is that of JAX (splash), which
has an interpreter of its own.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import tpu as pltpu

from jax_longctx.bench import decode, kernels
from jax_longctx.bench.asked import Decode
from jax_longctx.bench.timing import device_facts
from jax_longctx.errors import InputError
from jax_longctx.run_spec import RunSpec
from pallas_kernels.attention_mass import reference as mass_reference
from pallas_kernels.attention_mass import tpu as mass_tpu
from pallas_kernels.decode_attention import reference as decode_reference
from pallas_kernels.decode_attention import tpu as decode_tpu
from pallas_kernels.plane import Plane
from pallas_kernels.prefill_attention import reference as prefill_reference
from pallas_kernels.prefill_attention import tpu as prefill_tpu
from pallas_kernels.quantised import SCALES, dequantised, quantise
from pallas_kernels.sparse_decode_attention import Pages
from pallas_kernels.sparse_decode_attention import reference as sparse_reference
from pallas_kernels.sparse_decode_attention import tpu as sparse_tpu
from pallas_kernels.sparse_prefill_attention import BLOCK, Blocks
from pallas_kernels.sparse_prefill_attention import reference as listed_reference
from pallas_kernels.sparse_prefill_attention import tpu as listed_tpu
from pallas_kernels.topk_scores import reference as topk_reference
from pallas_kernels.topk_scores import tpu as topk_tpu

K, G, H, SLOTS, PAGE = 2, 4, 128, 512, 16
SCALE = H**-0.5
INTERPRETER = pltpu.InterpretParams()
# Rows that end beside a block's edges, an empty one and one that fills the cache.
LENGTHS = (0, 1, 127, 128, 129, SLOTS)
# Largest error, as a share of the largest value: bfloat16 has 8 bits.
ROUNDED, NEARLY = 1.5e-2, 1e-3
# Of the whole time: when no kernel's case begins any more, and no step.
KERNELS_UNTIL, STEPS_UNTIL = 0.6, 0.85
# The steps: layers of the shape that are timed, methods and the case.
LAYERS = 4
STEPS = ["full", "quest", "reattention"]
CASE = "1x32768"


@dataclass(frozen=True)
class Check:
    """One kernel on one set of arrays.

    Attributes:
      run: the kernel; it takes `interpret`.
      definition: what it must return, in plain JAX.
      inputs, given: the arguments of the definition, and those of the kernel: the same, with NaN
        where nothing may be read.
      tolerance: largest difference as a share of the largest value. Indices must be equal.
      caches: which arguments the kernel also reads as planes.
      interpreter: its `interpret` on a CPU.
    """

    kernel: str
    run: Callable[..., Any]
    definition: Callable[..., Any]
    inputs: tuple[Any, ...]
    given: tuple[Any, ...]
    tolerance: float
    caches: tuple[int, ...] = ()
    interpreter: Any = INTERPRETER

    def cases(self) -> dict[str, tuple[Any, ...]]:
        """The kernel's arguments: arrays, and planes where it reads them."""
        found = {"arrays": self.given}
        if self.caches:
            planes = {at: jax.tree.map(_plane, self.given[at]) for at in self.caches}
            found["planes"] = tuple(planes.get(at, x) for at, x in enumerate(self.given))
        return found

    def rows(self, interpret: bool) -> Iterator[dict[str, Any]]:
        """Whether the kernel is right, a row for each of its cases."""
        how = self.interpreter if interpret else False
        run = jax.jit(partial(self.run, interpret=how))
        for name, given in self.cases().items():
            row = {"kernel": self.kernel, "case": name, "tolerance": self.tolerance}
            try:
                # Products of float32 numbers are rounded to bfloat16 on a TPU unless it is said.
                with jax.default_matmul_precision("highest"):
                    expected = jax.jit(self.definition)(*self.inputs)
                error = difference(run(*given), expected)
            # Whatever a kernel raises on an unknown device is what its row shall say.
            except Exception as fault:
                said = f"{type(fault).__name__}: {fault}"
                yield {**row, "passed": False, "failed": said[:500]}
                continue
            if np.isfinite(error):
                yield {**row, "passed": error <= self.tolerance, "error": error}
            else:
                said = "shapes, indices, NaN or infinities are not the definition's"
                yield {**row, "passed": False, "failed": said}


def difference(found: Any, expected: Any) -> float:
    """The largest difference, as a share of the largest value of its array.

    Infinite where one has NaN, where -inf stands in one alone, and for integers that differ.
    """
    worst = 0.0
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    for ours, theirs in ((np.asarray(x), np.asarray(y)) for x, y in pairs):
        if ours.shape != theirs.shape:
            return np.inf
        if np.issubdtype(theirs.dtype, np.integer):
            worst = worst if np.array_equal(ours, theirs) else np.inf
            continue
        ours, theirs = ours.astype(np.float64), theirs.astype(np.float64)
        finite = np.isfinite(theirs)
        if not np.array_equal(ours[~finite], theirs[~finite]) or np.isnan(ours).any():
            return np.inf
        largest = np.max(np.abs(theirs), where=finite, initial=1e-30)
        off = np.max(np.abs(ours[finite] - theirs[finite]), initial=0.0)
        worst = max(worst, float(off / largest))
    return worst


def _plane(x: jax.Array) -> Plane:
    """The array as the second layer of three; the others hold NaN, or zeros of integers."""
    hollow = jnp.full_like(x, jnp.nan if jnp.issubdtype(x.dtype, jnp.floating) else 0)
    return Plane(jnp.stack([hollow, x, hollow]), jnp.int32(1))


def checks() -> list[Check]:
    """All checks; a test finds that every kernel for TPUs has one."""
    rng, rows = np.random.default_rng(7), len(LENGTHS)
    lengths = jnp.array(LENGTHS, jnp.int32)

    def draw(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape), jnp.bfloat16)

    def spoilt(x: jax.Array, value: float = np.nan, lengths: jax.Array = lengths) -> jax.Array:
        beyond = (jnp.arange(x.shape[2]) >= lengths[:, None])[:, None, :, None]
        return jnp.where(beyond, jnp.asarray(value, x.dtype), x)

    q, k, v = draw(rows, 1, K * G, H), draw(rows, K, SLOTS, H), draw(rows, K, SLOTS, H)
    many = draw(rows, 40, K * G, H)
    lse = 3 + draw(rows, 40, K * G).astype(jnp.float32)
    how = mass_reference.Reduction(scale=SCALE, valid=jnp.full((rows,), 40, jnp.int32))
    chunk = draw(2, 200, K * G, H), draw(2, 200, K, H), draw(2, 200, K, H)
    # Small integers: products are exact, many scores tie, and every index is known.
    whole_q, whole_k = (
        jnp.asarray(rng.integers(-2, 3, shape), jnp.bfloat16)
        for shape in ((rows, 2, K * G, H), (rows, K, SLOTS, H))
    )
    whole_k = whole_k.at[..., 3:].set(0)
    # In 8 bits, with NaN as the scales of slots that may not be read.
    stored = [quantise(x) for x in (k, v)]
    unread = (jnp.arange(SLOTS) >= lengths[:, None])[:, None]
    spoilt_stored = [
        replace(x, scales=jnp.where(unread, jnp.nan, x.scales.astype(jnp.float32)).astype(SCALES))
        for x in stored
    ]
    nothing, exact = jnp.zeros((rows,), jnp.int32), jnp.zeros(whole_q.shape[:3])
    listed = np.stack([rng.permutation(SLOTS // PAGE)[:6] for _ in range(rows * K)])
    listed = jnp.asarray(listed, jnp.int32).reshape(rows, K, 6).at[:, 0, 2].set(-1)

    # More blocks than a turn takes, the first head without one.
    longer = jnp.array([1000, 513], jnp.int32)
    far_k, far_v = draw(2, K, 2 * SLOTS, H), draw(2, K, 2 * SLOTS, H)
    chosen = jnp.arange(2 * SLOTS // BLOCK) * BLOCK < longer[:, None, None, None]
    chosen = jnp.broadcast_to(chosen, (2, K * G, 2, 2 * SLOTS // BLOCK)).at[:, 0].set(False)
    blocks = longer, Blocks.of(chosen)

    def check(
        name: str,
        modules: tuple[Any, Any],
        tolerance: float,
        inputs: tuple[Any, ...],
        caches: tuple[int, ...] = (),
        given: tuple[Any, ...] = (),
        interpreter: Any = INTERPRETER,
        **options: Any,
    ) -> Check:
        """Of the function of that name in a kernel's module and in its definition's."""
        run, definition = (partial(getattr(m, name.split()[0]), **options) for m in modules)
        given = given or tuple(spoilt(x) if at in caches else x for at, x in enumerate(inputs))
        return Check(name, run, definition, inputs, given, tolerance, caches, interpreter)

    scaled: dict[str, Any] = dict(scale=SCALE)
    dense: dict[str, Any] = dict(interpreter=True, scale=SCALE)
    decode, sparse = (decode_tpu, decode_reference), (sparse_tpu, sparse_reference)
    topk, mass = (topk_tpu, topk_reference), (mass_tpu, mass_reference)
    prefill, lists = (prefill_tpu, prefill_reference), (listed_tpu, listed_reference)
    floats = q, *map(dequantised, stored), lengths
    paged = q, k, v, Pages(listed, nothing, lengths, PAGE)
    ranked = whole_q, whole_k, (nothing, lengths), exact
    # Masked slots are multiplied by zero here, so that they must be numbers.
    numbers = many, spoilt(k, 1e4), spoilt(v, 1e4), lengths
    by_blocks = chunk[0], far_k, far_v, *blocks
    far_numbers = chunk[0], *(spoilt(x, 1e4, longer) for x in (far_k, far_v)), *blocks
    eight_bits = q, *spoilt_stored, lengths
    return [
        check("decode_attention", decode, ROUNDED, (q, k, v, lengths), (1, 2), **scaled),
        check("decode_attention of int8", decode, ROUNDED, floats, (1, 2), eight_bits, **scaled),
        check("sparse_decode_attention", sparse, ROUNDED, paged, (1, 2), **scaled),
        check("topk_scores", topk, NEARLY, ranked, (1,), count=4),
        check("attention_mass", mass, NEARLY, (many, k, lse, lengths), (1,), how=how),
        check("cache_attention", prefill, ROUNDED, (many, k, v, lengths), (), numbers, **dense),
        check("causal_attention", prefill, ROUNDED, chunk, **dense),
        check("sparse_prefill_attention", lists, ROUNDED, by_blocks, (1, 2), far_numbers, **scaled),
    ]


def run(
    *, interpret: bool = False, minutes: float = 10, say: Callable[[str], None] = lambda _: None
) -> dict[str, Any]:
    """Checks, and without `interpret` times; JSON-able.

    Returns:
      device, devices, jax, seconds, checks, and `kernels` and `steps` as the commands `bench
      kernels` and `bench decode` return them.

    Raises:
      InputError: there is no TPU, and `interpret` is not given.
    """
    platform = jax.default_backend()
    if not interpret and platform != "tpu":
        raise InputError(
            f"no TPU: JAX runs on {platform} here; run this on a TPU's host (pip install "
            "'jax-longctx[tpu]'), or with --interpret for the kernels' checks alone"
        )
    begun = time.monotonic()
    found: list[dict[str, Any]] = []
    for check in checks():
        say(f"{check.kernel} against its definition ...")
        found += check.rows(interpret)
    result: dict[str, Any] = {**device_facts(), "devices": len(jax.devices())}
    result |= {"interpreted": interpret, "checks": found}
    if not interpret:
        left = 60 * minutes * KERNELS_UNTIL - (time.monotonic() - begun)
        how: dict[str, Any] = dict(preferred="tpu", repeats=5, faults=Exception)
        result["kernels"] = kernels.run(**how, seconds=left, say=say)
        if time.monotonic() - begun < 60 * minutes * STEPS_UNTIL:
            result["steps"] = _steps(say)
        else:
            result["steps"] = {"failed": "no time was left"}
    return result | {"seconds": time.monotonic() - begun}


def _steps(say: Callable[[str], None]) -> dict[str, Any]:
    sizes: dict[str, Any] = dict(cases=[CASE], blocks=1, layers=LAYERS, random_cache=True)
    try:
        return decode.run(Decode(methods=STEPS, **sizes), RunSpec(chunk=8192), say)
    # As above: the kernels' rows shall be sent back all the same.
    except Exception as fault:
        return {"failed": f"{type(fault).__name__}: {fault}"[:500]}


def passed(result: dict[str, Any]) -> bool:
    """Whether every check passed."""
    return all(row["passed"] for row in result["checks"])
