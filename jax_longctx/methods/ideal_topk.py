"""Ideal top-k: each query reads exactly the tokens of its largest products.

The upper bound of what a selector can reach (RESA, section 5.1): every key is scored exactly, so
that it saves only the values' half of the reading, and no time. Prefill is exact; decode attends,
for each query head, the `budget` best tokens beside the first `sink` and the last `local`.
`granularity=kv_head` ranks by the mean of the group's softmaxes.
"""

from typing import ClassVar

from jaxtyping import Array, Bool, Float

from jax_longctx.contract import LayerContext, Registered, method
from jax_longctx.parts import selection
from jax_longctx.parts.digests import PageDigests
from pallas_kernels.decode_attention import decode_logits

__all__ = ["IdealTopK"]


@method(source="RESA, section 5.1")
class IdealTopK(Registered):
    """Decode attends the best tokens by exact score: what a selector can reach at most.

    Attributes: those of every selector (see `selection.Selector`) but what concerns pages.
    """

    budget: int = 1024
    ratio: float | None = None
    sink: int = 4
    local: int = 64
    count_fixed: bool = False
    granularity: selection.Granularity = "query_head"
    skip_layers: int = 0
    allocation: selection.Allocation = "uniform"
    alpha: float = 0.2
    epsilon: float = 0.95

    pools: ClassVar[selection.Pools] = "mass"
    phase = "decode"
    query_aware = True
    keeps_all = True
    append_only = True

    def __post_init__(self) -> None:
        selection.check(self, "ideal-topk")

    @property
    def page_size(self) -> int:
        return 1

    @property
    def min_pages(self) -> int:
        return 1

    @property
    def whole_pages(self) -> bool:
        return False

    @property
    def resident_pages(self) -> int:
        return 0

    def summarise(
        self, keys: Float[Array, "B K P Z H"], held: Bool[Array, "B P Z"]
    ) -> PageDigests | None:
        """None: the keys themselves are read."""

    def scores(
        self, q: Float[Array, "B N H"], cache: selection.SelectiveCache, ctx: LayerContext
    ) -> Float[Array, "B N P"]:
        """q.k of this shard's slots, unscaled."""
        return decode_logits(q[:, None], cache.store.k, cache.store.held(ctx), scale=1.0)

    validate = selection.validate
    init_cache = selection.init_cache
    segments = selection.segments
    attend = selection.attend
    adopt = selection.adopt
    finish = selection.finish
    fork = selection.fork
    read_bytes = selection.read_bytes
