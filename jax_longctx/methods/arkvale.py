"""ArkVale: each layer reads the pages whose digests have the highest scores.

Chen et al. 2024, section 4. Each page has a digest: a box or a ball around the middle of the keys'
extremes, or the mean key. A page's score is the largest q.k in its box or ball, averaged over the
query heads of the layer; a decode step attends the best pages. The default digest, `cuboid-mean`,
has the mean distance from the middle as its radius: its scores are closer than an upper bound, but
no bound. `cuboid-max` is Quest's.

Bytes of a decode step, as a share of full attention's: 1 / page_size for the digests (half for
balls and points), and the budget over the length.

Differs from the authors' code: all keys stay on the device and exactly the best pages are attended,
as in the paper. Their code attends a cache of pages that it updates with the best ones. The page
that is being filled has a digest too, which is not used: the local window covers that page.
"""

from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jax_longctx.caches import PageDigests, masked_max, masked_mean
from jax_longctx.contract import method
from jax_longctx.parts.selecting import Granularity, SelectingPages

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
class ArkVale(SelectingPages):
    """Decode reads the pages whose digests promise most, chosen by all heads together.

    Attributes:
      digest: shape and radius; `center` is half of the sum of the largest and the smallest
        distance from the middle.
    """

    page_size: int = 32
    granularity: Granularity = "layer"
    digest: Digest = "cuboid-mean"

    pools = "scores"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.local < self.page_size:
            raise self.refused(
                f"local {self.local} must cover the page of {self.page_size} tokens that "
                "is being filled, which has no digest yet; raise local"
            )

    @property
    def measures_keys(self) -> bool:
        """Whether a digest has a distance over all channels."""
        return self.digest.startswith("sphere")

    @property
    def own_tokens(self) -> int | None:
        return self.recent

    def summarise(self, keys: Float[Array, "B K P Z H"], held: Bool[Array, "B P Z"]) -> PageDigests:
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
