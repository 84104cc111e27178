"""Methods that decode over a cache of all keys which another method's prefill has filled."""

from typing import Any, Protocol, runtime_checkable

from jaxtyping import Array, Float

from jax_longctx.contract import LayerContext

__all__ = ["Adopting", "Remembering", "page_size"]


@runtime_checkable
class Adopting(Protocol):
    """Its caches name the cache of all keys `store`, and go around another by `with_store`."""

    def adopt(self, cache: Any, ctx: LayerContext) -> Any:
        """The cache, its other parts made right for what `cache.store` holds."""
        ...


@runtime_checkable
class Remembering(Adopting, Protocol):
    """One that also wants to know the queries which the store was filled with."""

    def recall_queries(self, cache: Any, total: Float[Array, "B N H"]) -> Any:
        """The adopted cache with the float32 sum of the text's queries, rotated as its keys."""
        ...


def page_size(method: Any) -> int:
    """Slots that the method summarises together, which no other may cut; 1 where it does not."""
    selector = getattr(method, "base", method)
    return getattr(selector, "page_size", 1)
