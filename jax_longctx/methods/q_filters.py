"""Q-Filters: the keys stay that lie in the direction in which the model's queries point.

Godey et al. 2025, "Q-Filters: Leveraging QK Geometry for Efficient KV Cache Compression", section
3. A head's queries share a direction, whatever the text. So a key's part in it foretells how much
the key will be attended. A query head's direction is the first right singular vector of its queries
(rotated, not centred), with the sign under which their mean lies in it. A kv head's filter is the
mean of its query heads' directions, and a token's score the product of its rotated key with it.

Filters are a property of the model. `jax-longctx calibrate` makes them of all queries of some texts
(`evaluation.heads`); the authors draw 3,000 queries a head, and publish filters of some models with
the other sign. kvpress ranks by the published ones. The authors compress while they read, and keep
the newest tokens besides (`local`); here, as in kvpress, the whole text is ranked once.

Layers with other filters are other programs, as under `over_layers=pyramid`.
"""

import dataclasses
import functools
import hashlib
import json
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jax_longctx.caches import AppendCache, Rewinding
from jax_longctx.caches.reading import numbers
from jax_longctx.contract import CacheShape, LayerContext, method
from jax_longctx.errors import ConfigError
from jax_longctx.files import whole_path
from jax_longctx.models.config import ModelConfig
from jax_longctx.parts.compressing import Compressing, whole
from jax_longctx.parts.layer_budgets import Budgeted
from jax_longctx.parts.tables import read_numbers, shape_of
from jax_longctx.sharding import axes_field


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FilteredCache(Rewinding):
    """Every key and value of a row, and the layer's filters."""

    store: AppendCache
    filters: Float[Array, "B K H"] = axes_field("batch", "kv_heads", None)


@method(source="Godey et al. 2025 (Q-Filters), section 3")
class QFilters(Compressing):
    """After the context, only the keys stay that lie where the model's queries point.

    Attributes:
      filters: a file that `jax-longctx calibrate` wrote: a line for each layer, the numbers of one
        kv head's filter after another's, apart by tabs. One line, or one head's numbers, are
        repeated. "#" and a digest of the numbers are added.
    """

    filters: str = ""

    measures_keys = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.filters and not re.search(r"#[0-9a-f]{12}(/\d+)?$", self.filters):
            # The dataclass is frozen, and other filters make other programs and contexts.
            path, found = whole_path(self.filters), read_numbers(self.filters, "filters")
            object.__setattr__(self, "filters", f"{path}#{_digest(*found)}")

    @property
    def weights_of(self) -> str | None:
        return _read(self.filters)[1].get("weights") if self.filters else None

    def validate(self, config: ModelConfig) -> None:
        if not self.filters:
            raise self.refused(
                "its filters are a property of the model: write a file of them with jax-longctx "
                "calibrate, and name it: --set filters=FILE"
            )
        try:
            of, here = _read(self.filters)[1], shape_of(config)
            other = [f"{key} {of[key]}" for key in here if of.get(key, here[key]) != here[key]]
            if other:
                raise ValueError(f"it is of a model with {', '.join(other)}")
            self._of(config, config.num_layers)
        except ValueError as error:
            raise self.refused(
                f"filters does not fit this model of {config.num_layers} layers with "
                f"{config.num_kv_heads} kv heads of {config.head_dim} numbers: {error}; take a "
                "file of this model"
            ) from error

    def _of(self, shape: CacheShape | ModelConfig, layers: int) -> Float[np.ndarray, "L K H"]:
        table, _ = _read(self.filters)
        sizes = (layers, shape.num_kv_heads, shape.head_dim)
        return np.broadcast_to(table.reshape(len(table), -1, shape.head_dim), sizes)

    def of_layer(self, layer: int, layers: int) -> Budgeted:
        own = super().of_layer(layer, layers)
        line = layer % len(_read(self.filters)[0])
        return dataclasses.replace(own, filters=f"{self.filters}/{line}")

    def init_cache(self, shape: CacheShape) -> FilteredCache:
        rows = np.tile(self._of(shape, 1), (shape.batch, 1, 1))
        return FilteredCache(super().init_cache(shape), jnp.asarray(rows))

    def scores(self, cache: Any, ctx: LayerContext) -> Float[Array, "B K S"]:
        keys = numbers(cache.store.k).astype(jnp.float32)
        return whole(jnp.einsum("BKSH,BKH->BKS", keys, cache.filters), ctx)


@functools.lru_cache(maxsize=8)
def _read(filters: str) -> tuple[Float[np.ndarray, "L KH"], dict[str, Any]]:
    """The numbers of a file, or of one of its lines; and of which model they are."""
    path, _, digest = filters.rpartition("#")
    digest, _, line = digest.partition("/")
    table, of = read_numbers(path, "filters")
    if _digest(table, of) != digest:
        raise ConfigError(
            f"filters: {path} has changed, its numbers are not {digest} any more; name the file "
            "without that, or bring the earlier one back"
        )
    table = table.astype(np.float32)
    return (table[int(line)][None] if line else table), of


def _digest(table: np.ndarray, of: dict[str, Any]) -> str:
    told = json.dumps(of).encode() if of else b""
    return hashlib.sha256(table.tobytes() + told).hexdigest()[:12]
