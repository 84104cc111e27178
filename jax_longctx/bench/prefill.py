"""Time to first token over several devices, by method, beside what its FLOPs would take.

Random weights of a published shape, one row of random tokens: context, a question of one token and
the answer fit in `tokens`. The model of a method's time is its FLOPs on the busiest device (see
`planning.work`) at two rates measured in the same run on the same devices: `linear`, of the layers
without attention, and `attention`, of a causal square; nothing of what travels is in it. Beside
them: what a device receives from its neighbour a second, and the time of one decode step's merges
by either way (`contract.merging`), a chain of them on its own.

With fewer layers than the shape has, a method is timed with those and with one (see `layers`).
"""

import dataclasses
import functools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jax_longctx.bench.decode import WARM
from jax_longctx.bench.layers import check_layers, cut, first_layers, scaled
from jax_longctx.contract import merging
from jax_longctx.engine import Engine, programs
from jax_longctx.engine.engine import BLOCK, SPARE
from jax_longctx.errors import CapacityError, InputError
from jax_longctx.methods import make_method
from jax_longctx.models.config import ModelConfig
from jax_longctx.models.llama import init_params, param_infos
from jax_longctx.models.presets import preset
from jax_longctx.planning.plan import prefill_work
from jax_longctx.sharding import logical_sharding, logical_spec
from pallas_kernels.prefill_attention import causal_attention

__all__ = ["Case", "run"]

# Merges in the chain that is timed, and calls queued in a timed loop.
CHAIN = 16
QUEUED = 8


@dataclasses.dataclass(frozen=True)
class Case:
    """Tokens of context, question and answer together; the block of methods that have one."""

    tokens: int
    block: int | None = None


@dataclasses.dataclass(frozen=True)
class Bench:
    """What all measurements of a run have in common.

    Attributes:
      layers: that are timed; all of the shape's in `config`.
      blocks: of decode steps that are timed.
    """

    config: ModelConfig
    params: Any
    mesh: Mesh
    layers: int
    runs: int
    blocks: int
    chunk: int

    @property
    def answer(self) -> int:
        """Tokens of an answer."""
        return WARM + self.blocks * BLOCK if self.blocks else 1

    def engine(self, method: Any, layers: int) -> Engine:
        """The method on the first layers of the shape."""
        config, params = first_layers(self.config, self.params, layers)
        return Engine(config, params, method, self.mesh, chunk=self.chunk)


def run(
    *,
    model: str,
    methods: Sequence[tuple[str, dict[str, str]]],
    cases: Sequence[Case],
    mesh: Mesh,
    layers: int | None = None,
    runs: int = 3,
    blocks: int = 2,
    chunk: int = 8192,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Every method at every case; JSON-able. A case that does not fit is recorded as such.

    Raises:
      InputError: more layers than the shape has, or a case shorter than its answer.
    """
    config = preset(model)
    timed = check_layers(config, layers)
    # Settings are checked before anything is made.
    made = [[(name, *_made(name, own, case)) for name, own in methods] for case in cases]
    say("making weights ...")
    params = init_params(cut(config, timed), mesh, dtype=jnp.bfloat16)
    bench = Bench(config, params, mesh, timed, runs, blocks, chunk)
    least = bench.answer + 2 + SPARE
    for case in cases:
        if case.tokens < least:
            raise InputError(f"--case {case.tokens}: question and answer need {least} tokens")
    say("rates ...")
    rates = _rates(bench, max(case.tokens for case in cases))
    rows = []
    for case, chosen in zip(cases, made, strict=True):
        begun: list[dict[str, Any]] = []
        for name, settings, method in chosen:
            say(f"{name} {settings or ''}, {case.tokens:,} tokens ...")
            row = {"method": name, "settings": settings, "tokens": case.tokens, "block": case.block}
            begun.append(row | _row(bench, method, case, rates, begun))
            say(f"  {begun[-1].get('first_token', begun[-1].get('failed'))}")
        rows += begun
    return {
        "model": model,
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "mesh": dict(mesh.shape),
        "chunk": chunk,
        "layers": {"timed": timed, "of": config.num_layers},
        "runs": runs,
        "rates": rates,
        "rows": rows,
    }


def _made(name: str, settings: dict[str, str], case: Case) -> tuple[dict[str, str], Any]:
    """The method of a case, and its settings with the case's block where it has blocks."""
    method = make_method(name, settings)
    has_blocks = "block" in {field.name for field in dataclasses.fields(method)}
    if case.block is None or not has_blocks or "block" in settings:
        return settings, method
    settings = {"block": str(case.block), **settings}
    return settings, make_method(name, settings)


def _row(
    bench: Bench, method: Any, case: Case, rates: dict[str, Any], before: list[dict[str, Any]]
) -> dict[str, Any]:
    """Times and FLOPs of a case; `before` are the rows of the methods named before."""
    context = case.tokens - bench.answer - 1 - SPARE
    whole = bench.config.num_layers
    try:
        measured = {bench.layers: _measure(bench, method, bench.layers, context)}
        if bench.layers < whole:
            measured[1] = _measure(bench, method, 1, context)
    except (CapacityError, jax.errors.JaxRuntimeError) as error:
        return {"failed": str(error).splitlines()[0]}
    first = {n: statistics.median(times) for n, (times, _) in measured.items()}
    setup = programs.Setup(bench.config, method, bench.mesh, jnp.dtype(jnp.bfloat16), bench.chunk)
    rows = bench.mesh.shape["data"]
    work = prefill_work(setup, batch=rows, context=context, reserve=1 + bench.answer)
    by_flops = work.linear / rates["linear"] + work.attention / rates["attention"]
    row: dict[str, Any] = {
        "context": context,
        "measured": {str(n): {"first_token": times} for n, (times, _) in measured.items()},
        "linear": work.linear,
        "attention": work.attention,
        "received": work.received,
        "model_seconds": by_flops,
    }
    row |= scaled("first_token", first, whole)
    row["of_model"] = row["first_token"] / by_flops
    base = next((other for other in before if "first_token" in other), row)
    row["speedup"] = base["first_token"] / row["first_token"]
    if bench.blocks:
        steps = {n: statistics.median(found) for n, (_, found) in measured.items()}
        row |= scaled("step", steps, whole)
        if rates["merge"]:
            row["merge_share"] = whole * rates["merge"][rates["merge"]["used"]] / row["step"]
    return row


def _measure(
    bench: Bench, method: Any, layers: int, context: int
) -> tuple[list[float], list[float]]:
    """Seconds to the first token of every run, and a step of every block; a run before warms up."""
    engine = bench.engine(method, layers)
    draw = np.random.default_rng(context).integers(0, bench.config.vocab_size, context)
    row = [int(token) for token in draw]
    first, steps = [], []
    for index in range(1 + bench.runs):
        begun = time.perf_counter()
        prefilled = engine.prefill([row], reserve=1 + bench.answer)
        stream = engine.stream(prefilled, [row[-1:]], max_tokens=bench.answer, keep=False)
        next(stream)
        previous = time.perf_counter()
        if index:
            first.append(previous - begun)
        for block in stream:
            now = time.perf_counter()
            if index and len(block[0]) == BLOCK:
                steps.append((now - previous) / BLOCK)
            previous = now
    return first, steps


def _rates(bench: Bench, tokens: int) -> dict[str, Any]:
    """FLOP/s and bytes/s of each device, and seconds of a merge."""
    shards = bench.mesh.shape["seq"]
    square = max(tokens // shards, 1)
    return {
        "linear": _linear_rate(bench),
        "attention": _attention_rate(bench, square),
        "square": square,
        "received": _link_rate(bench, square) if shards > 1 else None,
        "merge": _merge_seconds(bench) if shards > 1 else None,
    }


def _timed(run: Callable[[], Any], runs: int) -> float:
    """Median seconds of a call, of several that are queued without waiting."""
    jax.block_until_ready(run())
    times = []
    for _ in range(runs):
        begun = time.perf_counter()
        jax.block_until_ready([run() for _ in range(QUEUED)])
        times.append((time.perf_counter() - begun) / QUEUED)
    return statistics.median(times)


def _linear_rate(bench: Bench) -> float:
    """Two layers over a chunk of tokens on each device, queries passed on as attention's output."""
    engine = bench.engine(make_method("full", {}), 2)
    shards, rows = bench.mesh.shape["seq"], bench.mesh.shape["data"]

    def attend(layer: int, q: Any, k: Any, v: Any, cache: Any) -> tuple[Any, Any]:
        # Keys and values are made too, and as good as nothing is done with them.
        return q + jnp.mean(k + v, axis=2, keepdims=True).astype(q.dtype), cache

    @jax.jit
    def layers(params: Any, tokens: Any) -> Any:
        return programs.bound_model(engine.config, params).hidden(tokens, (None, None), attend)[0]

    sharding = logical_sharding(bench.mesh, ("batch", "tokens"))
    make = functools.partial(jnp.zeros, (rows, shards * bench.chunk), jnp.int32)
    tokens = jax.jit(make, out_shardings=sharding)()
    weights = sum(
        math.prod(info.shape)
        for path, info in param_infos(engine.config).items()
        if path.startswith("layers.") and len(info.shape) > 1
    )
    seconds = _timed(lambda: layers(engine.params, tokens), bench.runs)
    return 2 * weights / bench.mesh.shape["tensor"] * bench.chunk / seconds


def _sharded(bench: Bench, body: Callable[..., Any], *shape: int) -> Callable[[], Any]:
    """`body` on random arrays of a local `shape` with heads second to last, one on each device."""
    mesh = bench.mesh
    spec = logical_spec(("batch", "tokens", "heads", None))
    sizes = (mesh.shape["data"], mesh.shape["seq"], mesh.shape["tensor"], 1)
    whole = tuple(size * parts for size, parts in zip(shape, sizes, strict=True))

    def draw(key: Any) -> Any:
        return jax.random.normal(key, whole, jnp.bfloat16)

    sharding = logical_sharding(mesh, ("batch", "tokens", "heads", None))
    x = jax.jit(draw, out_shardings=sharding)(jax.random.key(0))
    mapped = jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    compiled = jax.jit(mapped)
    return lambda: compiled(x)


def _attention_rate(bench: Bench, square: int) -> float:
    config, parts = bench.config, bench.mesh.shape["tensor"]
    heads, kv_heads, width = (
        config.num_heads // parts,
        config.num_kv_heads // parts,
        config.head_dim,
    )

    def body(x: Any) -> Any:
        kv = x[:, :, :kv_heads]
        return causal_attention(x, kv, kv, scale=width**-0.5)[0]

    seconds = _timed(_sharded(bench, body, 1, square, heads, width), bench.runs)
    return 4 * heads * width * square * (square + 1) / 2 / seconds


def _link_rate(bench: Bench, square: int) -> float:
    """Bytes a second that a device receives of its neighbour's keys."""
    shards = bench.mesh.shape["seq"]
    kv_heads, width = bench.config.num_kv_heads // bench.mesh.shape["tensor"], bench.config.head_dim
    onward = [(s, (s + 1) % shards) for s in range(shards)]

    def body(x: Any) -> Any:
        return jax.lax.ppermute(x, "seq", onward)

    seconds = _timed(_sharded(bench, body, 1, square, kv_heads, width), bench.runs)
    return 2 * square * kv_heads * width / seconds


def _merge_seconds(bench: Bench) -> dict[str, Any]:
    """Seconds of one merge of a decode step, by either way, and which of them is used."""
    shape = (1, 1, bench.config.num_heads // bench.mesh.shape["tensor"], bench.config.head_dim)
    shards = bench.mesh.shape["seq"]

    def chain(merge: Callable[..., Any], times: int) -> Callable[[Any], Any]:
        def body(x: Any) -> Any:
            out, lse = x, jnp.max(x, axis=-1).astype(jnp.float32)
            for _ in range(times):
                # Each waits for the last, as a layer does for the one below.
                out, lse = merge(out, lse)
                lse = lse - math.log(shards)
            return out + lse[..., None].astype(out.dtype)

        return body

    found: dict[str, Any] = {}
    for name, merge in (("by_sum", merging.by_sum), ("by_gather", merging.by_gather)):
        one, many = (
            _timed(_sharded(bench, chain(merge, times), *shape), max(bench.runs, 5))
            for times in (1, 1 + CHAIN)
        )
        found[name] = max(many - one, 0.0) / CHAIN
    sizes = {"size": shape[2], "width": shape[3], "itemsize": 2, "shards": shards}
    found["used"] = merging.choose(**sizes).__name__
    return found
