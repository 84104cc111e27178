"""Another form of storage is one class, and one line of the method that uses it."""

import dataclasses

import jax
import jax.numpy as jnp

from jax_longctx.caches import AppendCache, Store, empty_append_cache, numbers
from jax_longctx.parts.appending import Appending
from tests.support import joined, random_rows, tiny_engine


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class HalfKeys(Store):
    """A store around another one, whose keys are in float16."""

    inner: AppendCache

    length = property(lambda self: self.inner.length)
    position = property(lambda self: self.inner.position)
    sizes = property(lambda self: self.inner.sizes)
    nbytes = property(lambda self: self.inner.nbytes)

    def append(self, k, v, valid, ctx):
        return HalfKeys(self.inner.append(k, v, valid, ctx))

    def on_device(self):
        k, v = self.inner.k, numbers(self.inner.v)
        return dataclasses.replace(self.inner, k=numbers(k).astype(v.dtype), v=v)


@dataclasses.dataclass(frozen=True, kw_only=True)
class HalfAttention(Appending):
    def init_cache(self, shape):
        empty = empty_append_cache(shape)
        return HalfKeys(dataclasses.replace(empty, k=empty.k.astype(jnp.float16)))


def test_a_store_of_another_form_serves_a_method_that_does_not_know_it():
    engine, full = tiny_engine(HalfAttention()), tiny_engine()
    texts, questions = random_rows([40, 9]), random_rows([3, 5], seed=1)
    context, whole = engine.prefill(texts, reserve=16), full.prefill(texts, reserve=16)
    exact = joined(full.stream(whole, questions, max_tokens=6))
    for _ in range(2):
        assert joined(engine.stream(context, questions, max_tokens=6)) == exact
    keys, *_ = jax.tree.leaves(context.caches)
    assert keys.dtype == jnp.float16
    assert whole.resident_bytes - context.resident_bytes == sum(
        cache.inner.k.nbytes for cache in context.caches
    )
