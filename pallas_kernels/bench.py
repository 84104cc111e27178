"""Check and time dense attention on the device at hand: `python -m pallas_kernels.bench`.

Checks compare against the float32 definition on small ragged shapes. Times are medians of device
loops: the operation runs 16 times inside one jitted loop, each run's queries made from the last
run's output so that none can be dropped or overlapped, and the loops are queued without waiting.
Matrix-bound cases are in TFLOP/s (4 T S N H operations, half when causal), memory-bound ones in
TB/s of k and v (all slots of the capacity) and as a share of a device copy measured in the same
run (bytes read plus bytes written). Inputs are random, bfloat16. A case that fails is recorded
with its error and the rest run.
"""

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.decode_attention import xla as decode_xla
from pallas_kernels.prefill_attention import gpu, reference, tpu, xla

N, K, H = 32, 8, 128
SCALE = H**-0.5

# Steps in one compiled loop, of a static number: a dynamic one costs a host round trip a step.
INNER = 16

Row = dict[str, Any]


def _random(seed: int, *shape: int) -> Array:
    return jax.jit(
        lambda: jax.random.normal(jax.random.key(seed), shape, jnp.float32).astype(jnp.bfloat16)
    )()


def _measure(step: Callable[..., Array], q: Array, *rest: Any, least: float = 0.1) -> Row:
    """Time step(q, *rest), which returns an array like q: five measurements, sorted, in seconds."""

    @jax.jit
    def loop(q: Array, *rest: Any) -> Array:
        def once(_: Array, q: Array) -> Array:
            # The next queries depend on this output, and stay random in size and sign.
            return (q + 1e-3 * step(q, *rest)).astype(q.dtype)

        return lax.fori_loop(0, INNER, once, q)

    compiled = loop.lower(q, *rest).compile()

    def run(calls: int) -> float:
        start, x = time.perf_counter(), q
        for _ in range(calls):  # queued without waiting: the device does not idle between them
            x = compiled(x, *rest)
        x.block_until_ready()
        return (time.perf_counter() - start) / (calls * INNER)

    run(1)
    calls = max(1, min(200, round(least / INNER / max(run(1), 1e-6))))
    run(calls)
    times = sorted(run(calls) for _ in range(5))
    memory = compiled.memory_analysis()
    return dict(times=times, temp=memory.temp_size_in_bytes if memory else 0)


def copy_bandwidth(size: int = 1 << 31, repeats: int = 20) -> float:
    """Bytes a second, read plus written, of adding one to `size` bytes inside a compiled loop."""
    x = jax.random.normal(jax.random.key(0), (size // 4,), jnp.float32)
    loop = jax.jit(
        lambda x: jax.lax.fori_loop(0, repeats, lambda _, y: y + 1.0, x), donate_argnums=0
    )
    x = loop(x).block_until_ready()
    times = []
    for _ in range(5):
        begun = time.perf_counter()
        x = loop(x).block_until_ready()
        times.append(time.perf_counter() - begun)
    return 2 * size * repeats / statistics.median(times)


@dataclass(frozen=True)
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
    loop(*args).block_until_ready()
    times = []
    for _ in range(repeats):
        begun = time.perf_counter()
        loop(*args).block_until_ready()
        times.append(time.perf_counter() - begun)
    return times


def _difference(result: tuple[Array, Array], expected: tuple[Array, Array]) -> Row:
    """The largest differences; rows that are empty in one and not in the other count as inf."""
    (out, lse), (out_ref, lse_ref) = result, expected
    lse_gap = jnp.where(lse == lse_ref, 0.0, jnp.abs(lse - lse_ref))
    out_gap = jnp.abs(out.astype(jnp.float32) - out_ref.astype(jnp.float32))
    gaps = dict(out=float(jnp.max(out_gap)), lse=float(jnp.max(lse_gap)))
    # NaN compares false, so it fails.
    return gaps | dict(ok=gaps["out"] < 2e-2 and gaps["lse"] < 2e-2)


def _check_cache(attend: Callable, head_dim: int, queries: int, garbage: float) -> Row:
    lengths = jnp.array([0, 1, 511, 512, 513, 1500, 2048], jnp.int32)
    rows, slots = len(lengths), 2048
    q = _random(0, rows, queries, 8, head_dim)
    k, v = (_random(seed, rows, 2, slots, head_dim) for seed in (1, 2))
    beyond = (jnp.arange(slots) >= lengths[:, None])[:, None, :, None]
    bad_k, bad_v = (jnp.where(beyond, jnp.asarray(garbage, x.dtype), x) for x in (k, v))
    exact_q, exact_k, exact_v = (x.astype(jnp.float32) for x in (q, k, v))
    expected = reference.cache_attention(exact_q, exact_k, exact_v, lengths, scale=head_dim**-0.5)
    result = jax.jit(partial(attend, scale=head_dim**-0.5))(q, bad_k, bad_v, lengths)
    return _difference(result, expected)


def _check_causal(attend: Callable, head_dim: int, window: int | None) -> Row:
    q = _random(0, 2, 1000, 8, head_dim)
    k, v = (_random(seed, 2, 1000, 2, head_dim) for seed in (1, 2))
    exact = [x.astype(jnp.float32) for x in (q, k, v)]
    options = dict(scale=head_dim**-0.5, window=window)
    expected = reference.causal_attention(*exact, **options)
    return _difference(jax.jit(partial(attend, **options))(q, k, v), expected)


def _checks(kernels: Any) -> dict[str, Callable[[], Row]]:
    garbage = 3.0
    decode = decode_xla.decode_attention
    cases: dict[str, Callable[[], Row]] = {
        "decode xla, garbage": partial(_check_cache, decode, 128, 1, garbage),
        "decode xla, 4 queries, head dim 64": partial(_check_cache, decode, 64, 4, garbage),
        "cache xla, garbage": partial(_check_cache, xla.cache_attention, 128, 100, garbage),
        "causal xla": partial(_check_causal, xla.causal_attention, 128, None),
    }
    if kernels is None:
        return cases
    for head_dim in (64, 128):
        for window in (None, 100):
            cases[f"causal kernel, head dim {head_dim}, window {window}"] = partial(
                _check_causal, kernels.causal_attention, head_dim, window
            )
        cases[f"cache kernel, head dim {head_dim}, garbage"] = partial(
            _check_cache, kernels.cache_attention, head_dim, 200, garbage
        )
    return cases


def _time_causal(attend: Callable, tokens: int) -> Row:
    q = _random(0, 1, tokens, N, H)
    k, v = (_random(seed, 1, tokens, K, H) for seed in (1, 2))
    measured = _measure(lambda q, *rest: attend(q, *rest, scale=SCALE)[0], q, k, v)
    return _rates(measured, flops=2 * tokens**2 * N * H)


def _time_cache(attend: Callable, queries: int, filled: int, slots: int) -> Row:
    q = _random(0, 1, queries, N, H)
    k, v = (_random(seed, 1, K, slots, H) for seed in (1, 2))
    lengths = jnp.array([filled], jnp.int32)
    measured = _measure(partial(_step, attend), q, k, v, lengths)
    return _rates(measured, flops=4 * queries * filled * N * H)


def _time_decode(attend: Callable, batch: int, slots: int) -> Row:
    q = _random(0, batch, 1, N, H)
    k, v = (_random(seed, batch, K, slots, H) for seed in (1, 2))
    lengths = jnp.full((batch,), slots - 7, jnp.int32)
    measured = _measure(partial(_step, attend), q, k, v, lengths)
    return _rates(measured, moved=2 * k.nbytes) | dict(temp_share=measured["temp"] / (2 * k.nbytes))


def _step(attend: Callable, q: Array, k: Array, v: Array, lengths: Array) -> Array:
    # Lengths that depend on q: what is made of the lengths and the cache alone (the copy of the cut
    # block) would be moved out of the loop.
    lengths = lengths + (q[:, 0, 0, 0] > 1e30)
    return attend(q, k, v, lengths, scale=SCALE)[0]


def _rates(measured: Row, flops: int = 0, moved: int = 0) -> Row:
    times = measured["times"]
    median = statistics.median(times)
    row: Row = dict(ms=median * 1e3, ms_min=times[0] * 1e3, ms_max=times[-1] * 1e3)
    if flops:
        row["TFLOP/s"] = flops / median / 1e12
    if moved:
        row["TB/s"] = moved / median / 1e12
    return row


def _plain_decode(q: Array, k: Array, v: Array, lengths: Array, *, scale: float) -> tuple[Array]:
    """What one would write first: einsum, softmax, einsum."""
    b, t, n, h = q.shape
    q = q.reshape(b, t, k.shape[1], n // k.shape[1], h)
    scores = jnp.einsum("BTKGH,BKSH->BTKGS", q, k, preferred_element_type=jnp.float32) * scale
    seen = jnp.arange(k.shape[2]) < lengths[:, None, None, None, None]
    weights = jax.nn.softmax(jnp.where(seen, scores, -1e30), axis=-1).astype(v.dtype)
    return (jnp.einsum("BTKGS,BKSH->BTKGH", weights, v).reshape(b, t, n, h),)


def _timings(kernels: Any, small: bool) -> dict[str, Callable[[], Row]]:
    shrink = 64 if small else 1
    cases: dict[str, Callable[[], Row]] = {}
    if kernels is not None:
        for tokens in (8192, 32768):
            cases[f"causal kernel {tokens}"] = partial(
                _time_causal, kernels.causal_attention, tokens // shrink
            )
        full = 32768 // shrink
        shape = 8192 // shrink, full - 100, full
        cases["cache kernel 8192 x 32668"] = partial(_time_cache, kernels.cache_attention, *shape)
        half = 8192 // shrink, full // 2, full
        cases["cache kernel 8192 x 16384 of 32768"] = partial(
            _time_cache, kernels.cache_attention, *half
        )
    for batch, slots in ((1, 32768), (1, 131072), (8, 16384)):
        size = batch, max(slots // shrink, 512)
        cases[f"decode {batch} x {slots}, plain einsum"] = partial(
            _time_decode, _plain_decode, *size
        )
        for block in (128, 256, 512, 1024, 2048, 4096):
            attend = partial(decode_xla.decode_attention, block=block)
            cases[f"decode {batch} x {slots}, blocks of {block}"] = partial(
                _time_decode, attend, *size
            )
    cases["causal xla 8192"] = partial(_time_causal, xla.causal_attention, 8192 // shrink)
    return cases


def _attempt(name: str, case: Callable[[], Row]) -> Row:
    """Run one case; a failure is a row of its own, for a lease is short and the rest must run."""
    start = time.perf_counter()
    try:
        row = case()
    except Exception as error:
        row = dict(error=f"{type(error).__name__}: {error}"[:2000])
    row = dict(name=name, **row, took_s=round(time.perf_counter() - start, 1))
    print(json.dumps(row), flush=True)
    return row


def _table(rows: list[Row], copy: float) -> str:
    lines = [f"device copy {copy:.2f} TB/s"]
    for row in rows:
        if "error" in row:
            what = f"FAILED {row['error'][:80]}"
        elif "ok" in row:
            what = f"{'ok' if row['ok'] else 'WRONG'} out {row['out']:.1e} lse {row['lse']:.1e}"
        elif "TB/s" in row:
            share = row["TB/s"] / copy
            what = (
                f"{row['ms']:.3f} ms {row['TB/s']:.2f} TB/s = {share:.0%} of copy, "
                f"temp {row['temp_share']:.1%}"
            )
        else:
            what = f"{row['ms']:.3f} ms {row['TFLOP/s']:.0f} TFLOP/s"
        lines.append(f"{row['name']:48s} {what}")
    return "\n".join(lines)


def main() -> None:
    """Run every check and timing; print a table last."""
    parser = argparse.ArgumentParser(description="Check and time dense attention.")
    parser.add_argument("--out", type=Path, help="write all rows to this JSON file")
    parser.add_argument("--only", default="", help="run the cases whose name holds this")
    parser.add_argument("--small", action="store_true", help="timings of 1/64 the size, to try it")
    options = parser.parse_args()
    device = jax.devices()[0]
    kernels = {"gpu": gpu, "tpu": tpu}.get(device.platform)
    cases = _checks(kernels) | _timings(kernels, options.small)
    copy = copy_bandwidth(1 << 26 if options.small else 1 << 31) / 1e12
    rows = [_attempt(name, case) for name, case in cases.items() if options.only in name]
    print(f"\n{device.device_kind}, jax {jax.__version__}, {N} heads over {K} of {H}, bfloat16")
    print(_table(rows, copy))
    if options.out is not None:
        report = dict(device=device.device_kind, jax=jax.__version__, copy=copy, rows=rows)
        options.out.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
