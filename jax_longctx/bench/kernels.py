"""Kernels one by one: every implementation that can run, and libraries, beside both rooflines.

The run "chosen" is the implementation that the public function selects.

Every case runs in compiled loops on the device (`timing.measure`): random inputs, bfloat16, 32
query heads over 8 kv heads of 128. A case's floor is the larger of two times: its operations over
the rate of a large matmul, and the bytes that it must move over the bandwidth of a copy. Both rates
are measured in the same run. `share` is the floor over the time.
"""

import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from jax_longctx.bench.timing import copy_bandwidth, device_facts, measure
from jax_longctx.errors import InputError
from jax_longctx.evaluation.perplexity import pipe_table
from pallas_kernels import dispatch
from pallas_kernels.attention_mass import Reduction, attention_mass
from pallas_kernels.decode_attention import decode_attention
from pallas_kernels.page_scores import page_scores
from pallas_kernels.prefill_attention import cache_attention, causal_attention
from pallas_kernels.prefill_attention import gpu as cudnn
from pallas_kernels.select_large_k import select_large_k
from pallas_kernels.select_pages import Best, Digests, select_pages
from pallas_kernels.sparse_decode_attention import Pages, sparse_decode_attention
from pallas_kernels.topk_scores import topk_scores

N, K, H = 32, 8, 128
SCALE = H**-0.5
PAGE = 16
# Lengths of rows as shares of the capacity; together two fifths of it.
_RAGGED = (1.0, 0.01, 0.3, 0.05, 0.95, 0.004, 0.73, 0.18)
Step = Callable[..., Any]
# Errors of lowering, compiling and running a kernel, other than mistakes in this module.
_FAULTS = (jax.errors.JaxRuntimeError, NotImplementedError, ValueError)


@dataclasses.dataclass(frozen=True)
class Case:
    """One operation at one shape.

    Attributes:
      operations, moved: floating-point operations, and the fewest bytes read and written.
      inputs: makes the arrays; the timing loop carries the first, queries or scores.
      others: what is timed besides implementations, by name: step(i, *inputs).
      run: run(implementation, i, *inputs), where the operation has implementations.
    """

    operation: str
    shape: str
    operations: int
    moved: int
    inputs: Callable[[], tuple[Any, ...]]
    others: dict[str, Step] = dataclasses.field(default_factory=dict)
    run: Callable[..., Any] | None = None

    @property
    def name(self) -> str:
        return f"{self.operation} {self.shape}"

    def steps(self, inputs: tuple[Any, ...]) -> dict[str, Step]:
        """What is timed, by name: step(i, *inputs); all implementations but `reference`."""
        run = self.run
        if run is None:
            return self.others

        def trace(name: str) -> Any:
            return jax.eval_shape(partial(run, name), jnp.int32(0), *inputs)

        def can_run(name: str) -> bool:
            try:
                trace(name)
            except NotImplementedError:
                return False
            except _FAULTS:  # its row will show the error
                pass
            return True

        names = [name for name in dispatch.offered(trace) if name != "reference" and can_run(name)]
        return {
            "chosen": partial(run, None),
            **{name: partial(run, name) for name in names},
            **self.others,
        }


def cases(shrink: int = 1) -> list[Case]:
    """All cases, with 1/shrink of the slots (in whole tiles of 2048)."""

    def slots(size: int) -> int:
        return max(size // shrink // 2048, 1) * 2048

    listed = max(4096 // PAGE // shrink, 1)
    found = [_decode(b, slots(s)) for b, s in ((1, 32768), (1, 131072), (8, 16384))]
    found += [_decode(8, slots(16384), [max(int(slots(16384) * part), 1) for part in _RAGGED])]
    found += [_causal(slots(tokens)) for tokens in (8192, 32768)]
    found += [_chunk(slots(8192), filled, slots(32768)) for filled in (0.5, 0.997)]
    found += [_topk(t, slots(s)) for t, s in ((1, 131072), (512, 8192), (512, 131072))]
    found += [_topk(512, slots(2**20), with_others=False)]
    found += [_mass(t, slots(131072)) for t in (1, 32, 512)]
    found += [_sparse(b, slots(131072), listed) for b in (1, 16)]
    found += [_page_scores(8, slots(131072)), _select(slots(131072))]
    found += [_pages(b, slots(131072)) for b in (1, 8)]
    # Shrinking may make shapes equal: the first of each is kept.
    return list({case.name: case for case in reversed(found)}.values())[::-1]


def run(
    *,
    only: str = "",
    shrink: int = 1,
    repeats: int = 20,
    preferred: str | None = None,
    seconds: float = math.inf,
    faults: Any = _FAULTS,
    say: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Measure the cases whose name holds `only`; InputError where there is none.

    Args:
      preferred: time this implementation alone; the chosen one where a case has no such.
      faults: exceptions of a kernel that become its row; the others are still measured.
      seconds: no case begins later. The cases that are left have a row that says so.

    Returns:
      device, jax, copy_bandwidth (bytes a second), matmul_rate (operations a second) and rows.
    """
    until = time.monotonic() + seconds
    if not (chosen := [case for case in cases(shrink) if only in case.name]):
        raise InputError(f"no case's name holds --only {only!r}; without it all cases run")
    bandwidth, rate = copy_bandwidth(2**31 // shrink), _matmul_rate(8192 // min(shrink, 16))
    rows: list[dict[str, Any]] = []
    for case in chosen:
        if time.monotonic() < until:
            rows += _rows(case, bandwidth, rate, repeats, say, preferred, faults)
        else:
            left = {"run": preferred or "chosen", "failed": "no time was left"}
            rows.append({"operation": case.operation, "shape": case.shape, **left})
    return {**device_facts(), "copy_bandwidth": bandwidth, "matmul_rate": rate, "rows": rows}


def _rows(
    case: Case,
    bandwidth: float,
    rate: float,
    repeats: int,
    say: Callable[[str], None],
    preferred: str | None = None,
    faults: Any = _FAULTS,
) -> Iterator[dict[str, Any]]:
    floor = max(case.operations / rate, case.moved / bandwidth)
    # Shortest timing loop: the host's time around it varies by some 50 us.
    least = 0.0 if dispatch.platform() == "cpu" else 5e-3
    about: dict[str, Any] = dict(operation=case.operation, shape=case.shape)
    about |= dict(operations=case.operations, moved=case.moved, floor_seconds=floor)
    try:
        inputs = case.inputs()
    except faults as error:  # a device with too little memory
        yield about | dict(run=preferred or "chosen", failed=_fault(error))
        return
    steps = case.steps(inputs)
    if preferred is not None:
        name = preferred if preferred in steps else "chosen"
        steps = {name: steps[name]}
    for name, step in steps.items():
        say(f"{case.name}: {name}")
        row = about | dict(run=name)
        try:
            timing = measure(step, *inputs, repeats=repeats, least=least)
        except faults as error:
            yield row | dict(failed=_fault(error))
            continue
        share = floor / timing.seconds if timing.seconds else None
        yield row | dataclasses.asdict(timing) | dict(share=share)


def _fault(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:500]


def _matmul_rate(size: int) -> float:
    """Operations a second of a bfloat16 matmul of `size` cubed."""
    x, y = _random(0, size, size), _random(1, size, size)
    return 2 * size**3 / measure(lambda _, x, y: x @ y, x, y, repeats=10).seconds


def _random(seed: int, *shape: int, dtype: Any = jnp.bfloat16) -> Array:
    key = jax.random.key(seed)
    return jax.jit(lambda: jax.random.normal(key, shape, jnp.float32).astype(dtype))()


def _cache(batch: int, slots: int) -> tuple[Array, Array]:
    k, v = (_random(seed, batch, K, slots, H) for seed in (1, 2))
    return k, v


def _where_cudnn_runs(step: Step) -> dict[str, Step]:
    q: Any = jax.ShapeDtypeStruct((1, 1, N, H), jnp.bfloat16)
    runs = dispatch.platform() == "gpu" and cudnn.unsupported_causal(q) is None
    return {"cudnn": step} if runs else {}


def _decode(batch: int, slots: int, lengths: Sequence[int] | None = None) -> Case:
    filled = [slots - 7] * batch if lengths is None else list(lengths)

    def einsum(_: Array, q: Array, k: Array, v: Array, n: Array) -> Any:
        """The plain form: einsum, softmax, einsum."""
        q = q.reshape(batch, K, N // K, H)
        scores = jnp.einsum("BKGH,BKSH->BKGS", q, k, preferred_element_type=jnp.float32) * SCALE
        seen = jnp.arange(slots) < n[:, None, None, None]
        weights = jax.nn.softmax(jnp.where(seen, scores, -1e30), axis=-1).astype(v.dtype)
        return jnp.einsum("BKGS,BKSH->BKGH", weights, v)

    return Case(
        operation="decode_attention",
        shape=f"{batch} x {slots}" + (" ragged" if lengths else ""),
        operations=4 * sum(filled) * N * H,
        moved=2 * sum(filled) * K * H * 2,
        inputs=lambda: (
            _random(0, batch, 1, N, H),
            *_cache(batch, slots),
            jnp.array(filled, jnp.int32),
        ),
        run=lambda how, _, *x: decode_attention(*x, scale=SCALE, implementation=how),
        others={
            "einsum": einsum,
            **_where_cudnn_runs(lambda _, *x: cudnn.cache_attention(*x, scale=SCALE, parts=1)),
        },
    )


def _causal(tokens: int) -> Case:
    return Case(
        operation="causal_attention",
        shape=f"{tokens}",
        operations=2 * tokens**2 * N * H,
        moved=2 * tokens * (N + K) * H * 2,
        inputs=lambda: (
            _random(0, 1, tokens, N, H),
            *(_random(seed, 1, tokens, K, H) for seed in (1, 2)),
        ),
        run=lambda how, _, *x: causal_attention(*x, scale=SCALE, implementation=how),
    )


def _chunk(queries: int, filled: float, slots: int) -> Case:
    """A chunk of queries over a partly filled cache."""
    length = int(filled * slots)
    return Case(
        operation="cache_attention",
        shape=f"{queries} x {length} of {slots}",
        operations=4 * queries * length * N * H,
        moved=2 * (queries * N + length * K) * H * 2,
        inputs=lambda: (
            _random(0, 1, queries, N, H),
            *_cache(1, slots),
            jnp.array([length], jnp.int32),
        ),
        run=lambda how, _, *x: cache_attention(*x, scale=SCALE, implementation=how),
    )


def _topk(queries: int, slots: int, with_others: bool = True) -> Case:
    best = 4

    def run(how: str | None, _: Array, q: Array, k: Array) -> Any:
        stop = jnp.array([slots], jnp.int32)
        return topk_scores(q, k, (stop * 0, stop), count=best, implementation=how)

    def library(_: Array, q: Array, k: Array) -> Any:
        """All scores of one kv head at a time, and `lax.top_k`."""

        def head(pair: tuple[Array, Array]) -> Any:
            scores = jnp.einsum("RH,SH->RS", *pair, preferred_element_type=jnp.float32)
            return lax.top_k(scores, best)

        return lax.map(head, (_by_kv_head(q), k[0]))

    return Case(
        operation="topk_scores",
        shape=f"{best} best, {queries} x {slots}",
        operations=2 * queries * slots * N * H,
        moved=slots * K * H * 2,
        inputs=lambda: (_random(0, 1, queries, N, H), _random(1, 1, K, slots, H)),
        run=run if with_others else None,
        others={"einsum + lax.top_k": library} if with_others else {"chosen": partial(run, None)},
    )


def _by_kv_head(q: Array) -> Array:
    """The queries [1,T,N,H] as rows [K,R,H]."""
    return jnp.swapaxes(q.reshape(-1, K, N // K, H), 0, 1).reshape(K, -1, H)


def _mass(queries: int, slots: int) -> Case:
    filled = jnp.array([slots], jnp.int32)
    return Case(
        operation="attention_mass",
        shape=f"{queries} x {slots}",
        operations=2 * queries * slots * N * H,
        moved=slots * K * (H * 2 + 4),
        inputs=lambda: (
            _random(0, 1, queries, N, H),
            _random(1, 1, K, slots, H),
            12 + _random(2, 1, queries, N, dtype=jnp.float32),
        ),
        run=lambda how, _, q, k, lse: attention_mass(
            q, k, lse, filled, Reduction(SCALE), implementation=how
        ),
        # This matmul writes its scores in bfloat16.
        others={
            "matmul alone": lambda _, q, k, lse: jnp.einsum("KRH,KSH->KRS", _by_kv_head(q), k[0])
        },
    )


def _sparse(batch: int, slots: int, entries: int) -> Case:
    pages = slots // PAGE

    def run(how: str | None, i: Array, q: Array, k: Array, v: Array, listed: Array) -> Any:
        # Other pages every time: the same pages would stay in the L2 cache.
        listed = (listed + i * 4099) % pages
        stop = jnp.full((batch,), slots, jnp.int32)
        chosen = Pages(listed, stop * 0, stop, PAGE)
        return sparse_decode_attention(q, k, v, chosen, scale=SCALE, implementation=how)

    return Case(
        operation="sparse_decode_attention",
        shape=f"{batch} x {entries * PAGE} of {slots}",
        operations=4 * batch * entries * PAGE * N * H,
        moved=2 * batch * entries * PAGE * K * H * 2,
        inputs=lambda: (
            _random(0, batch, 1, N, H),
            *_cache(batch, slots),
            _page_lists(batch, pages, entries),
        ),
        run=run,
    )


def _page_lists(batch: int, pages: int, entries: int) -> Array:
    """Different random pages for every row and kv head."""
    keys = jax.random.split(jax.random.key(3), batch * K)
    listed = jnp.stack([jax.random.permutation(key, pages)[:entries] for key in keys])
    return listed.reshape(batch, K, entries).astype(jnp.int32)


def _page_bounds(batch: int, pages: int) -> tuple[Array, Array]:
    one, other = (_random(seed, batch, K, pages, H) for seed in (1, 2))
    return jnp.maximum(one, other), jnp.minimum(one, other)


def _page_scores(batch: int, slots: int) -> Case:
    pages = slots // PAGE
    filled = jnp.full((batch,), pages, jnp.int32)
    return Case(
        operation="page_scores",
        shape=f"{batch} x {pages} pages",
        operations=4 * batch * pages * N * H,
        moved=batch * pages * (2 * K * H * 2 + N * 4),
        inputs=lambda: (_random(0, batch, N, H), *_page_bounds(batch, pages)),
        others={"chosen": lambda _, q, *bounds: page_scores(q, Digests(*bounds), filled)},
    )


def _pages(batch: int, slots: int) -> Case:
    pages = slots // PAGE
    first, last = (jnp.full((batch,), end, jnp.int32) for end in (0, pages))
    size = min(64, pages)

    def run(how: str, _: Any, q: Array, high: Array, low: Array) -> Array:
        options = {"size": size, "implementation": how}
        return select_pages(q, Digests(high, low), Best(first, last, size), **options)

    return Case(
        operation="select_pages",
        shape=f"{batch} x {size} of {pages}",
        operations=4 * batch * pages * N * H,
        moved=batch * pages * 2 * K * H * 2,
        inputs=lambda: (_random(0, batch, N, H), *_page_bounds(batch, pages)),
        run=run,
    )


def _select(slots: int) -> Case:
    size = slots // 8
    return Case(
        operation="select_large_k",
        shape=f"{K} x {size} of {slots}",
        operations=0,
        moved=K * (slots + size) * 4,
        inputs=lambda: (_random(0, K, slots, dtype=jnp.float32),),
        run=lambda how, _, scores: select_large_k(scores, size, size=size, implementation=how),
        others={"lax.top_k": lambda _, scores: lax.top_k(scores, size)},
    )


def markdown(result: dict[str, Any]) -> str:
    """A table of all runs: time and spread, rates, share of the roofline, ratio to the chosen's."""
    head = ("operation", "shape", "run", "ms (least - most)", "TFLOP/s", "TB/s", "of roofline")
    chosen = {
        (row["operation"], row["shape"]): row["seconds"]
        for row in result["rows"]
        if row["run"] == "chosen" and "failed" not in row
    }
    return (
        f"{result['device']}, jax {result['jax']}: copy "
        f"{result['copy_bandwidth'] / 1e12:.3g} TB/s, matmul "
        f"{result['matmul_rate'] / 1e12:.3g} TFLOP/s; bfloat16, 32 heads over 8 kv heads of 128."
        "\n\n" + pipe_table((*head, "vs chosen"), [_cells(row, chosen) for row in result["rows"]])
    )


def _cells(row: dict[str, Any], chosen: dict[tuple[str, str], float]) -> list[str]:
    cells = [row["operation"], row["shape"], row["run"]]
    if "failed" in row:
        return [*cells, row["failed"].splitlines()[0].replace("|", "/")[:80], "-", "-", "-", "-"]
    seconds, base = row["seconds"], chosen.get((row["operation"], row["shape"]))
    time = f"{seconds * 1e3:.4f} ({row['least'] * 1e3:.4f} - {row['most'] * 1e3:.4f})"
    if not seconds:
        return [*cells, time, "-", "-", "-", "-"]
    return [
        *cells,
        time,
        f"{row['operations'] / seconds / 1e12:.3g}",
        f"{row['moved'] / seconds / 1e12:.3g}",
        f"{row['share']:.0%}",
        f"{seconds / base:.2f}x" if base else "-",
    ]
