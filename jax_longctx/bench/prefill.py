"""Time to first token over several devices, by method, beside the time that its FLOPs take.

Random weights of a published shape, one row of random tokens: context, question and the answer fit
in `tokens`. A method that needs the question takes it beside each chunk. The predicted
time is the FLOPs on the busiest device (see `planning.work`) at two rates measured in the same run
on the same devices: `linear`, of the layers without attention, and `attention`, of a causal square.
It leaves out communication.

Where the platform says what a device holds, as GPUs and TPUs do, one more run of whole models is
watched. Beside the most stands the engine's figure, which counts caches alone; a chunk's
temporaries come on top.

With fewer layers than the shape has, a method is timed with those and with one (see `timing`).
"""

import dataclasses
import functools
import statistics
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jax_longctx.bench.asked import Prefill
from jax_longctx.bench.timing import (
    TOO_MUCH,
    MemoryWatch,
    Shape,
    call_times,
    first_tokens,
    scaled,
)
from jax_longctx.engine import Engine
from jax_longctx.engine.capacity import SPARE, footprint, reserved
from jax_longctx.engine.setup import without_layers
from jax_longctx.errors import ConfigError, InputError
from jax_longctx.memory import allow_pinned
from jax_longctx.methods import make_method
from jax_longctx.models.llama import ends_of, gathered_ends, gathered_layer, layer_of
from jax_longctx.models.params import layer_params
from jax_longctx.planning.work import matmul_weights, prefill_work
from jax_longctx.run_spec import RunSpec
from jax_longctx.sharding import logical_sharding, logical_spec, on_devices
from pallas_kernels.prefill_attention import causal_attention

# Calls queued in a timed loop.
QUEUED = 8
# Most tokens of the causal square: the rate of longer ones is the same.
SQUARE = 131_072


def run(
    asked: Prefill, spec: RunSpec, say: Callable[[str], None] = lambda text: None
) -> dict[str, Any]:
    """Every method at every case; JSON-able. A case that does not fit is recorded as failed.

    All devices lie along seq where the spec has no mesh.

    Raises:
      InputError: more layers than the shape has, or a case shorter than its answer.
    """
    # Settings are checked before weights are made.
    made = [
        [(name, *_made(name, own, block)) for name, own in asked.named()]
        for _, block in asked.sizes
    ]
    if spec.mesh is None:
        if spec.offload is not None:
            # Before the devices start.
            allow_pinned()
        spec = dataclasses.replace(spec, mesh=f"seq={len(jax.devices())}")
    shape = Shape.make(asked.model, spec, say, asked.layers)
    question, runs = asked.question, asked.runs
    # What the engine keeps beside the context: the slots of a case are all filled.
    beside = reserved(question + 1) + SPARE
    # The question's tokens are the last of the context.
    least = question + beside
    for tokens, _ in asked.sizes:
        if tokens < least:
            raise InputError(f"--case {tokens}: question and answer need {least} tokens")
    say("rates ...")
    rates = _rates(shape, max(tokens for tokens, _ in asked.sizes), runs)
    rows = []
    for (tokens, block), chosen in zip(asked.sizes, made, strict=True):
        begun: list[dict[str, Any]] = []
        for name, settings, method in chosen:
            say(f"{name} {settings or ''}, {tokens:,} tokens ...")
            row = {"method": name, "settings": settings, "tokens": tokens, "block": block}
            row |= _row(shape, method, tokens - beside, question, runs, rates)
            begun.append(row)
            # Of the first method: where it failed, the others have no ratio.
            if "first_token" in row and "first_token" in begun[0]:
                row["speedup"] = begun[0]["first_token"] / row["first_token"]
            say(f"  {row.get('first_token', row.get('failed'))}")
        rows += begun
    return {
        "model": asked.model,
        **shape.facts(),
        "mesh": dict(shape.mesh.shape),
        "question": question,
        "runs": runs,
        "rates": rates,
        "rows": rows,
    }


def _made(name: str, settings: dict[str, str], block: int | None) -> tuple[dict[str, str], Any]:
    """The settings, with the case's block size where the method has blocks, and the method."""
    method = make_method(name, settings)
    has_blocks = "block" in {field.name for field in dataclasses.fields(method)}
    if block is None or not has_blocks or "block" in settings:
        return settings, method
    settings = {"block": str(block), **settings}
    return settings, make_method(name, settings)


def _row(
    shape: Shape,
    method: Any,
    context: int,
    question: int,
    runs: int,
    rates: dict[str, Any],
) -> dict[str, Any]:
    """Times, FLOPs and memory of a case, or the reason why it failed."""
    watch, whole = MemoryWatch(), shape.config.num_layers

    def measure(engine: Engine) -> list[float]:
        timed = first_tokens(engine, context, runs, question)
        if engine.config.num_layers == whole and watch.possible:
            with watch:
                first_tokens(engine, context, 0, question)
        return timed

    try:
        measured = shape.times(method, measure)
        first = {n: statistics.median(times) for n, times in measured.items()}
        of_all = scaled("first_token", first, whole)
    except (ConfigError, InputError, *TOO_MUCH) as error:
        return {"failed": str(error).splitlines()[0]}
    work = prefill_work(
        shape.setup(method),
        batch=shape.mesh.shape["data"],
        context=context,
        reserve=question + 1,
        question=question,
    )
    by_flops = work.linear / rates["linear"] + work.attention / rates["attention"]
    row: dict[str, Any] = {
        "context": context,
        "measured": {str(n): {"first_token": times} for n, times in measured.items()},
        "linear": work.linear,
        "attention": work.attention,
        "received": work.received,
        "model_seconds": by_flops,
    }
    row |= of_all
    row["of_model"] = row["first_token"] / by_flops
    if watch.most is not None:
        sizes = dict(batch=shape.mesh.shape["data"], context=context, reserve=question + 1)
        said = footprint(shape.setup(method), **sizes, per_device=True)
        row |= {"peak_bytes": watch.most, "said_bytes": said.peak}
    return row


def _rates(shape: Shape, tokens: int, runs: int) -> dict[str, Any]:
    """FLOP/s of each device."""
    square = max(min(tokens // shape.mesh.shape["seq"], SQUARE), 1)
    return {
        "linear": _linear_rate(shape, runs),
        "attention": _attention_rate(shape, square, runs),
        "square": square,
    }


def _timed(run: Callable[[], Any], runs: int) -> float:
    """Median seconds of a call, when several are queued without waiting."""
    return statistics.median(call_times(lambda: [run() for _ in range(QUEUED)], runs)) / QUEUED


def _linear_rate(shape: Shape, runs: int) -> float:
    """FLOP/s of two layers without attention, over a chunk of tokens on each device."""
    engine = shape.engine(make_method("full", {}), 2)
    shards, rows = shape.mesh.shape["seq"], shape.mesh.shape["data"]

    def attend(q: Any, k: Any, v: Any, cache: Any, *_: Any) -> tuple[Any, Any]:
        # The output needs keys and values, so they are computed too.
        return q + jnp.mean(k + v, axis=2, keepdims=True).astype(q.dtype), cache

    @jax.jit
    def layers(params: Any, tokens: Any) -> Any:
        config, mesh = engine.config, shape.mesh
        x = ends_of(config, gathered_ends(config, mesh, without_layers(params))).embedded(tokens)
        for index in range(2):
            weights = gathered_layer(config, mesh, layer_params(params, index))
            x, _ = layer_of(config, weights)(x, None, attend)
        return x

    sharding = logical_sharding(shape.mesh, ("batch", "tokens"))
    make = functools.partial(jnp.zeros, (rows, shards * shape.spec.chunk), jnp.int32)
    tokens = jax.jit(make, out_shardings=sharding)()
    weights, _ = matmul_weights(engine.config)
    seconds = _timed(lambda: layers(engine.params, tokens), runs)
    return 2 * weights / shape.mesh.shape["tensor"] * shape.spec.chunk / seconds


def _attention_rate(shape: Shape, square: int, runs: int) -> float:
    """FLOP/s of causal attention on a random array [1, square, heads, width] on each device."""
    config, mesh = shape.config, shape.mesh
    parts, width = mesh.shape["tensor"], config.head_dim
    heads, kv_heads = config.num_heads // parts, config.num_kv_heads // parts
    axes = ("batch", "tokens", "heads", None)
    whole = (mesh.shape["data"], square * mesh.shape["seq"], heads * parts, width)

    def draw(key: Any) -> Any:
        return jax.random.normal(key, whole, jnp.bfloat16)

    def body(x: Any) -> Any:
        kv = x[:, :, :kv_heads]
        return causal_attention(x, kv, kv, scale=width**-0.5)[0]

    x = jax.jit(draw, out_shardings=logical_sharding(mesh, axes))(jax.random.key(0))
    spec = logical_spec(axes)
    run = jax.jit(on_devices(mesh, body, spec, spec))
    return 4 * heads * width * square * (square + 1) / 2 / _timed(lambda: run(x), runs)
