"""What a method is that selects pages for each query: its settings, its cache, its two duties.

What they share is in `selection` (the duties of a method) and `sparse_decode` (a decode step).
"""

import dataclasses
import typing
from typing import ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jax_longctx.caches import AppendCache
from jax_longctx.contract import LayerContext
from jax_longctx.errors import ConfigError
from jax_longctx.parts.digests import PageDigests
from jax_longctx.sharding import axes_field

__all__ = [
    "Allocation",
    "Granularity",
    "Pools",
    "Prior",
    "SelectiveCache",
    "Selector",
    "Span",
    "check",
]

Granularity = Literal["query_head", "kv_head", "layer"]
Allocation = Literal[
    "uniform",
    "ada-floor",
    "ada-blend",
    "psa-oracle",
    "psa-estimate",
    "psa-digest",
    "psa-resa",
]
Pools = Literal["mass", "scores"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SelectiveCache:
    """All keys and values, and what selects among them.

    Attributes:
      store: keys after rotary embedding, and values.
      digests: a summary of each page, or None where the keys themselves are scored.
      prompt: tokens of context and question.
      kept: tokens attended in decode so far, summed over the steps, of each query head.
      steps: decode steps so far; `kept / steps` is the mean budget that was used.
      resident: pages in the emulated page cache (`page_cache`); None without one.
    """

    store: AppendCache
    digests: PageDigests | None
    prompt: Int[Array, " B"] = axes_field("batch")
    kept: Int[Array, "B N"] = axes_field("batch", "heads")
    steps: Int[Array, " B"] = axes_field("batch")
    resident: Bool[Array, "B P"] | None = axes_field("batch", "pages")

    def with_store(self, store: AppendCache) -> "SelectiveCache":
        """The cache around another store."""
        return dataclasses.replace(self, store=store)

    def end_context(self) -> "SelectiveCache":
        """Remembers where the context ends, so that `rewind` can return there."""
        return dataclasses.replace(self, store=self.store.end_context())

    def rewind(self) -> "SelectiveCache":
        """The cache at the end of the context.

        Digests beyond it become garbage, which no query sees before they are made anew.
        """
        return dataclasses.replace(
            self,
            store=self.store.rewind(),
            kept=jnp.zeros_like(self.kept),
            steps=jnp.zeros_like(self.steps),
        )


class Selector(typing.Protocol):
    """What every selector says of itself.

    Attributes:
      budget: tokens that each head attends beside the fixed ones; under PSA at most.
      ratio: the budget as a share of the prompt, in place of `budget`.
      page_size: tokens of a page.
      sink, local: first and last tokens that are always attended.
      count_fixed: whether these are part of the budget.
      whole_pages: whether they are extended to whole pages.
      granularity: which heads select together.
      min_pages: least pages of a head.
      skip_layers: first layers that stay exact.
      allocation: `uniform`; `ada-floor`, `ada-blend` (Ada-KV); `psa-oracle`, `psa-estimate`,
        `psa-digest`, and for RESA `psa-resa` (PSA).
      alpha: share of the uniform budget that Ada-KV leaves to each head.
      epsilon: share of the attention at which PSA stops.
      resident_pages: pages that an emulated page cache holds and attends; 0 for none.
      pools: whether heads that select together average `scores`, or their softmax (`mass`).
    """

    @property
    def budget(self) -> int: ...
    @property
    def ratio(self) -> float | None: ...
    @property
    def page_size(self) -> int: ...
    @property
    def sink(self) -> int: ...
    @property
    def local(self) -> int: ...
    @property
    def count_fixed(self) -> bool: ...
    @property
    def whole_pages(self) -> bool: ...
    @property
    def granularity(self) -> Granularity: ...
    @property
    def min_pages(self) -> int: ...
    @property
    def skip_layers(self) -> int: ...
    @property
    def allocation(self) -> Allocation: ...
    @property
    def alpha(self) -> float: ...
    @property
    def epsilon(self) -> float: ...
    @property
    def resident_pages(self) -> int: ...

    pools: ClassVar[Pools]

    def summarise(
        self, keys: Float[Array, "B K P Z H"], held: Bool[Array, "B P Z"]
    ) -> PageDigests | None:
        """What is kept of each page, of its held keys."""
        ...

    def scores(
        self, q: Float[Array, "B N H"], cache: SelectiveCache, ctx: LayerContext
    ) -> Float[Array, "B N P"]:
        """What each of this shard's pages promises to each query head, on the scale of q.k."""
        ...


class Prior(NamedTuple):
    """Logits that stand in for those that are not selected (RESA).

    A slot has scale query.k, or what `logits` says of it, and `bias` for this query.

    Attributes:
      query: RESA's mean query, in the queries' dtype.
      lse, out: log-sum-exp over all slots and the softmax's output, float32; without the bias.
      bias: float32.
      logits: where not every slot has one, -inf there.
    """

    query: Float[Array, "B 1 N H"]
    lse: Float[Array, "B N"]
    out: Float[Array, "B N H"]
    bias: Float[Array, "B N"]
    logits: Float[Array, "B N S"] | None


class Span(NamedTuple):
    """The tokens start <= slot < stop that may be selected; those around them are fixed.

    `tokens` is how many of them each page of the whole cache holds.
    """

    start: Int[Array, " B"]
    stop: Int[Array, " B"]
    tokens: Int[Array, "B P"]


# Caches and their shards are whole numbers of this many slots, so that no page is cut.
_GRANULE = 128


def check(method: Selector, name: str) -> None:
    """Raises ConfigError for settings that make no selector."""
    for field, least in (
        ("budget", 1),
        ("sink", 0),
        ("local", 0),
        ("min_pages", 1),
        ("skip_layers", 0),
        ("page_size", 1),
    ):
        if getattr(method, field) < least:
            given = getattr(method, field)
            raise ConfigError(f"{name}: {field} must be at least {least}, got {given}")
    if _GRANULE % method.page_size:
        raise ConfigError(f"{name}: page_size must divide {_GRANULE}, got {method.page_size}")
    if method.ratio is not None and not 0 < method.ratio <= 1:
        raise ConfigError(f"{name}: ratio must be above 0 and at most 1, got {method.ratio}")
    if not 0 <= method.alpha <= 1:
        raise ConfigError(f"{name}: alpha must be from 0 to 1, got {method.alpha}")
    if not 0 < method.epsilon <= 1:
        raise ConfigError(f"{name}: epsilon must be above 0 and at most 1, got {method.epsilon}")
    if method.whole_pages and not method.local:
        raise ConfigError(f"{name}: whole_pages extends the local window; local must be at least 1")
    needed = {"ada": "kv_head", "psa": "query_head"}.get(method.allocation[:3])
    if needed is not None and method.granularity != needed:
        raise ConfigError(
            f"{name}: allocation {method.allocation} needs granularity {needed}, "
            f"got {method.granularity}"
        )
