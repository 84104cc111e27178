"""ArkVale: each layer reads the pages whose digests promise most.

Chen et al. 2024, section 4. Keys are cached after rotary embedding, in pages of `page_size` tokens,
each with a digest: a box or a ball around the middle of the keys' extremes, or the mean key. A
page's score is the largest q.k that its box or ball allows, averaged over the query heads of the
layer; a decode step attends the best pages beside the first `sink` and the last `local` tokens.
Prefill is exact. The default digest, `cuboid-mean`, has the mean distance from the middle as its
radius: tighter than a bound, and not one. `cuboid-max` is Quest's.

Bytes of a decode step, as a share of full attention's: 1 / page_size for the digests (half for
balls and points), and the budget over the length.

Differs from the authors' code: all keys stay on the device and exactly the best pages are attended,
as in the paper; theirs attends a cache of pages that it updates with them, which `resident`
emulates (`page_cache`). The digest of the page that is being filled is kept too, and not used: the
local window covers it.
"""

from typing import ClassVar, Literal

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jax_longctx.contract import Registered, method
from jax_longctx.errors import ConfigError
from jax_longctx.parts import selection
from jax_longctx.parts.digests import PageDigests, masked_max, masked_mean

__all__ = ["ArkVale", "Digest"]

Digest = Literal[
    "cuboid-mean",
    "cuboid-max",
    "cuboid-center",
    "sphere-mean",
    "sphere-max",
    "sphere-center",
    "centroid",
]


@method(source="Chen et al. 2024, section 4")
class ArkVale(Registered):
    """Decode reads the pages whose digests promise most, chosen by all heads together.

    Attributes: those of every selector (see `selection.Selector`), and
      digest: shape and radius of what is kept of a page; `center` is the middle of the smallest
        and the largest distance.
      resident: tokens of the authors' page cache, which are attended instead of the budget's alone;
        the budget says how many are recalled at most. None attends exactly the best pages.
    """

    budget: int = 1024
    ratio: float | None = None
    page_size: int = 32
    digest: Digest = "cuboid-mean"
    sink: int = 4
    local: int = 64
    count_fixed: bool = False
    whole_pages: bool = False
    granularity: selection.Granularity = "layer"
    min_pages: int = 1
    skip_layers: int = 0
    allocation: selection.Allocation = "uniform"
    alpha: float = 0.2
    epsilon: float = 0.95
    resident: int | None = None

    pools: ClassVar[selection.Pools] = "scores"
    phase = "decode"
    query_aware = True
    keeps_all = True
    append_only = True

    @classmethod
    def released(cls) -> "ArkVale":
        """The authors' settings: 32 pages, of which the sinks' one and the window's two are part.

        The window counts with the page that is being filled; the first two layers are dense. What
        their code attends is `dataclasses.replace(ArkVale.released(), resident=125 * 32)`: a cache
        of 128 pages, sinks and window among them.
        """
        return cls(budget=30 * 32, sink=32, local=33, whole_pages=True, skip_layers=2)

    def __post_init__(self) -> None:
        selection.check(self, "arkvale")
        covered = self.local > 0 if self.whole_pages else self.local >= self.page_size
        if not covered:
            raise ConfigError(
                f"arkvale: local {self.local} must cover the page of {self.page_size} tokens that "
                "is being filled, which has no digest yet; raise local or set whole_pages=true"
            )
        if self.resident is None:
            return
        if self.granularity != "layer" or self.allocation != "uniform" or self.ratio is not None:
            raise ConfigError(
                "arkvale: resident, one page cache a layer, needs granularity layer, allocation "
                f"uniform and a budget in tokens; got granularity {self.granularity}, allocation "
                f"{self.allocation}, ratio {self.ratio}"
            )
        if self.resident < max(self.budget, self.page_size):
            raise ConfigError(
                f"arkvale: resident {self.resident} must hold the budget of {self.budget} tokens "
                f"that may be recalled, and a page of {self.page_size}; raise resident"
            )

    @property
    def resident_pages(self) -> int:
        return 0 if self.resident is None else self.resident // self.page_size

    def summarise(
        self, keys: Float[Array, "B K P Z H"], held: Bool[Array, "B P Z"]
    ) -> PageDigests | None:
        """The pages' boxes, balls or mean keys, in the keys' dtype (a ball's radius in float32)."""
        shape, _, extent = self.digest.partition("-")
        if shape == "centroid":
            return PageDigests(masked_mean(keys, held).astype(keys.dtype), None, None)
        high, low = masked_max(keys, held), -masked_max(-keys, held)
        if self.digest == "cuboid-max":
            # Exact in any dtype, where middle plus radius would be rounded.
            return PageDigests(high, low, None)
        centre = (high.astype(jnp.float32) + low.astype(jnp.float32)) / 2
        away = jnp.abs(keys.astype(jnp.float32) - centre[..., None, :])
        if shape == "sphere":
            away = jnp.linalg.norm(away, axis=-1)
        if extent == "mean":
            radius = masked_mean(away, held)
        else:
            radius = masked_max(away, held)
            if extent == "center":
                radius = (radius - masked_max(-away, held)) / 2
        if shape == "sphere":
            return PageDigests(centre.astype(keys.dtype), None, radius)
        return PageDigests(
            (centre + radius).astype(keys.dtype), (centre - radius).astype(keys.dtype), None
        )

    scores = selection.scores_of_digests
    validate = selection.validate
    init_cache = selection.init_cache
    segments = selection.segments
    attend = selection.attend
    adopt = selection.adopt
    finish = selection.finish
    fork = selection.fork
    read_bytes = selection.read_bytes
