"""What each method says of itself (`MethodInfo`) is what it does."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_longctx.caches.uneven import UnevenCache
from jax_longctx.contract import decode_segment
from jax_longctx.engine.allocate import abstract_caches, init_caches
from jax_longctx.engine.capacity import bucket, footprint
from jax_longctx.engine.prefill import finish_context, finish_question, run_segment
from jax_longctx.methods import METHODS, make_method
from tests.small_methods import SMALL
from tests.support import logits_of, random_rows, tiny_config, tiny_engine

pytestmark = pytest.mark.thorough

LENGTH, RESERVE = 90, 16
(CONTEXT,) = random_rows([LENGTH])
# A question and the first token of its answer. The second's ids lie above 40.
QUESTIONS = [(random_rows([20], seed=1)[0], 5), ([*range(44, 64)], 43)]

# RESA's estimate of what it does not read has a part of every value; retrieval heads keep all.
READING = {"resa": {"lam": 0.0}, "free-pages": {"lam": 0.0}, "duo-attention": {"heads": "0"}}


@functools.cache
def engine_of(name):
    """One layer, whose attention is sharp: there a decode step reads the embeddings' values."""
    method = make_method(name, {**SMALL[name], **READING.get(name, {})})
    engine = tiny_engine(method, config=tiny_config(num_layers=1), chunk=16)
    attention = engine.params["layers"]["0"]["attn"]
    attention["q"] = 4 * attention["q"]
    return engine


def read_context(engine, rows, context, question):
    """The layer's cache of that many equal rows, and how the programs go on with it."""
    setup, method = engine.setup, engine.method
    slots = bucket(len(context) + RESERVE + 1)
    total = jnp.full(rows, len(context), jnp.int32)
    (cache,) = init_caches(setup, rows, slots, RESERVE)

    def run(cache, segment):
        given = setup, engine.params, (cache,), segment, total, None, "hidden"
        (cache,), hidden = run_segment(*given)
        return cache, logits_of(engine, hidden)

    asked = [question] * rows if method.info.needs_question else None
    prompt = engine.setup.feed("context", slots, context=[context] * rows, question=asked)
    for segment in method.segments(prompt):
        cache, _ = run(cache, segment)
    (cache,) = finish_context(setup, (cache,), total, RESERVE)
    return cache, run


def read_question(engine, cache, run, rows, question):
    prompt = engine.setup.feed("question", 0, question=[question] * rows)
    for segment in engine.method.segments(prompt):
        cache, _ = run(cache, segment)
    return cache


def holder_of(cache):
    return cache if hasattr(cache, "v") else cache.store


def buffers(tree):
    return {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(tree) if leaf.ndim == 4}


def tokens_read(engine, question, answer):
    """(kv head, index in the text) of the context's values that a decode step reads.

    Each row has one value in its cache that is like no other; it is read where the logits of the
    row are others. A fork shares the cache's buffers where the method only appends.
    """
    method = engine.method
    setup, one = engine.setup, jnp.full(1, LENGTH, jnp.int32)
    empty = abstract_caches(setup, 1, bucket(LENGTH + RESERVE + 1), RESERVE)
    (kept,) = jax.eval_shape(lambda c: finish_context(setup, c, one, RESERVE), empty)
    heads, slots = holder_of(kept).v.shape[1:3]
    rows = heads * slots + 1
    cache, run = read_context(engine, rows, CONTEXT, question)
    holder = holder_of(cache)
    head, slot = np.divmod(np.arange(rows - 1), slots)
    # Pages stand for heads where heads keep numbers of their own.
    filled = np.asarray(holder.count[0])[head] if isinstance(holder, UnevenCache) else None
    marked = holder.v.at[np.arange(1, rows), head, slot].add(1e8)
    cache = jax.tree.map(lambda leaf: marked if leaf is holder.v else leaf, cache)
    held = buffers(cache), buffers((holder.k, marked))
    cache = method.fork(cache)
    shared = held[0] & buffers(cache)
    assert shared >= held[1] if method.info.append_only else not shared
    cache = read_question(engine, cache, run, rows, question)
    if method.info.answers_apart:
        total = jnp.full(rows, LENGTH, jnp.int32)
        (cache,) = finish_question(setup, (cache,), total=total, reserve=RESERVE)
    ones, going = np.ones((rows, 1), np.int32), np.zeros(rows, bool)
    step = decode_segment(np.full((rows, 1), answer), ones, going, method.step_variant(1))
    logits = run(cache, step)[1][:, 0]
    read = np.abs(logits[1:] - logits[0]).max(axis=1) > 1e-5
    token = np.asarray(holder.token[0]) if hasattr(holder, "token") else np.arange(slots)
    token = np.broadcast_to(token, (heads, slots)).ravel()
    if filled is None:
        filled = int(holder.length[0])
    counts = read & (slot < filled) & (token < LENGTH)
    return set(zip(head[counts].tolist(), token[counts].tolist(), strict=True))


# A mark that is a value would decide what a method keeps that chooses by values.
@pytest.mark.parametrize("name", [name for name in METHODS if not METHODS[name].by_values])
def test_query_aware_is_whether_two_questions_read_different_tokens(name):
    """And `append_only` whether a fork shares the buffers."""
    engine = engine_of(name)
    first, second = (tokens_read(engine, *question) for question in QUESTIONS)
    assert first and second
    assert (first != second) == engine.method.info.query_aware


@pytest.mark.parametrize("name", METHODS)
def test_keeps_all_and_answers_apart_are_what_becomes_of_the_memory(name):
    """With a text 200 tokens longer all keys take more; an answer apart has other arrays.

    The bytes are those of the compiled programs (`engine/test_capacity.py`).
    """
    info, setup = engine_of(name).method.info, engine_of(name).setup
    short, long = (footprint(setup, batch=1, context=n, reserve=RESERVE) for n in (200, 400))
    for sizes in (short, long):
        assert (sizes.resident != sizes.kept) == info.answers_apart
    # Keys and values of two heads, 8 float32 numbers each.
    grown = (long.resident - short.resident) // (2 * 2 * 8 * 4)
    assert grown >= 128 if info.keeps_all else grown == 0


@pytest.mark.parametrize("name", METHODS)
def test_needs_question_is_whether_the_context_is_read_beside_it(name):
    engine, (question, _) = engine_of(name), QUESTIONS[1]
    context = [token % 40 for token in CONTEXT]
    prompt = engine.setup.feed("context", 128, context=[context], question=[question])
    fed = {token for part in engine.method.segments(prompt) for token in np.ravel(part.tokens)}
    assert set(context) <= fed
    assert (set(question) <= fed) == engine.method.info.needs_question
