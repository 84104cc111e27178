"""Small models for the tests."""

import functools
import itertools
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np
import tokenizers

from jax_longctx.engine import Engine
from jax_longctx.engine.allocate import init_caches
from jax_longctx.engine.prefill import Live, prefill_text
from jax_longctx.engine.setup import without_layers
from jax_longctx.models.config import ModelConfig
from jax_longctx.models.llama import ends_of
from jax_longctx.models.params import init_params
from jax_longctx.models.rope import RopeConfig
from jax_longctx.run_spec import RunSpec
from jax_longctx.sharding import make_mesh
from jax_longctx.text import Tokenizer

__all__ = [
    "engine_from_hf",
    "engine_over",
    "joined",
    "logits_of",
    "random_rows",
    "score",
    "tiny_config",
    "tiny_engine",
    "word_tokenizer",
]

# Options of `Engine` that are no fields of `RunSpec`.
OWN = {"by_layer", "consume", "memory_limit"}


def tiny_config(**changes: Any) -> ModelConfig:
    """A two-layer Llama with grouped queries whose heads divide over two tensor shards."""
    layers = changes.get("num_layers", 2)
    fields: dict[str, Any] = {
        "family": "llama",
        "vocab_size": 64,
        "num_layers": layers,
        "model_dim": 32,
        "mlp_dim": 48,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "norm_eps": 1e-5,
        "rope": RopeConfig(kind="default", theta=1e4, trained_length=128),
        "max_position": 128,
        "tie_embeddings": False,
        "windows": (None,) * layers,
    }
    return ModelConfig(**{**fields, **changes})


def tiny_engine(method: Any = None, *, mesh: Any = None, seed: int = 0, **options: Any) -> Engine:
    """An engine over a random float32 model; `config` among the options replaces the model."""
    mesh = mesh or make_mesh()
    config = options.pop("config", None) or tiny_config()
    # Engines share the arrays, each in dicts of its own.
    params = jax.tree.map(lambda leaf: leaf, _params(config, mesh, seed))
    return engine_over(config, params, method, mesh, **options)


def engine_over(
    config: ModelConfig, params: Any, method: Any = None, mesh: Any = None, **options: Any
) -> Engine:
    """An engine of these parameters; options are those of `Engine` and fields of `RunSpec`."""
    own = {name: options.pop(name) for name in OWN & options.keys()}
    return Engine(config, params, RunSpec(method=method, mesh=mesh, **options), **own)


@functools.lru_cache(maxsize=32)
def _params(config: ModelConfig, mesh: Any, seed: int) -> Any:
    return init_params(config, RunSpec(mesh=mesh), seed=seed)


def engine_from_hf(
    hf_config: dict[str, Any], state: dict[str, np.ndarray], method: Any = None, **options: Any
) -> Engine:
    """An engine over a Hugging Face state dict, through the converter's own table of names."""
    from checkpoints_convert.config import model_config
    from tests.checkpoints_convert.tiny import params_from_hf

    config = model_config(hf_config)
    return engine_over(config, params_from_hf(config, state), method, **options)


def random_rows(lengths: list[int], vocab: int = 64, seed: int = 0) -> list[list[int]]:
    """Random token rows of these lengths."""
    rng = np.random.default_rng(seed)
    return [[int(token) for token in rng.integers(0, vocab, length)] for length in lengths]


@functools.partial(jax.jit, static_argnums=0)
def _logits(ends: Any, params: Any, hidden: Any) -> Any:
    return ends_of(ends.config, params).logits(hidden)


def logits_of(engine: Engine, hidden: Any) -> np.ndarray:
    """float32 logits [B, T, V] of hidden states [B, T, D]."""
    return np.asarray(_logits(engine.setup.ends, without_layers(engine.params), hidden))


def score(
    engine: Engine, rows: list[list[int]], *, total: list[int] | None = None
) -> list[np.ndarray]:
    """float32 logits [T, V] of every token of each row, read as a context."""
    padded, setup = engine.padded(rows), engine.setup
    totals = [*(total or map(len, rows))] + [0] * (len(padded) - len(rows))
    slots = engine.slots_for(max(map(len, padded)))
    live = Live(init_caches(setup, len(padded), slots, 0))
    feed = setup.feed("context", slots, context=padded)
    given = setup, engine.params, live, feed, jax.device_put(np.array(totals, np.int32))
    pieces: list[list[np.ndarray]] = [[] for _ in rows]
    for segment, hidden in prefill_text(*given, "hidden"):
        logits = logits_of(engine, hidden)
        for b, piece in enumerate(pieces):
            piece.append(logits[b, : int(segment.chunk_lengths[b])])
    return [np.concatenate(piece) for piece in pieces]


def joined(blocks: Iterable[list[list[int]]]) -> list[list[int]]:
    """Each row's tokens of all the blocks that `Engine.stream` or `generate` yields."""
    return [list(itertools.chain(*row)) for row in zip(*blocks, strict=True)]


def word_tokenizer(vocab: int) -> Tokenizer:
    """A tokenizer whose token i is the word "ti", so that any row of ids is a text."""
    words = {f"t{i}": i for i in range(vocab)}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="t0"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return Tokenizer(backend, {})


def swap(first, second):
    """Two files or folders get each other's names."""
    aside = first.with_name("aside")
    first.rename(aside)
    second.rename(first)
    aside.rename(second)
