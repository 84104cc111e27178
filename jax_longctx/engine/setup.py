"""What programs are compiled for: model, method, mesh, dtypes and sizes.

Caches are donated everywhere and updated in place. `attend` and `finish` of a method run inside one
manual `shard_map` over the whole mesh (`sharding.on_devices`). Projections, MLP and head are
left to the compiler through shardings; `engine.products` says how their weights meet the tokens.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from jax_longctx.contract import (
    PLACES,
    STRIPE,
    Feed,
    LayerContext,
    Method,
    SlotLayout,
    Stage,
)
from jax_longctx.engine.products import Divided, FewRows
from jax_longctx.models.config import ModelConfig
from jax_longctx.models.llama import Products, ends_of
from jax_longctx.models.rope import RopeConfig
from jax_longctx.parts.sliding_window import SLIDING_WINDOW
from jax_longctx.settings import Offload, Reading, StoredForm
from jax_longctx.sharding import AnyMesh, logical_spec, numbers_of_layers
from pallas_kernels.common import Capped
from pallas_kernels.peers import AllPeers, meet
from pallas_kernels.quantised import empty
from pallas_kernels.row_matmul import MAX_ROWS

# Rows of a matmul that cuBLAS takes in bfloat16 with results in float32.
LEAST_ROWS = 8
BATCH = logical_spec(("batch",))


@dataclasses.dataclass(frozen=True)
class Ends:
    """What is static of programs without layers: all methods on a mesh share these programs."""

    config: ModelConfig
    mesh: AnyMesh
    dtype: Any

    def logits(self, params: Any, hidden: Float[Array, "B D"]) -> Float[Array, "B V"]:
        """float32 logits of one hidden state a row."""
        rows = hidden.shape[0]
        if _platform(self.mesh) == "gpu" and rows < LEAST_ROWS:
            # Of fewer XLA converts the whole head to float32 first.
            hidden = jnp.pad(hidden, ((0, LEAST_ROWS - rows), (0, 0)))
        return ends_of(self.config, params).logits(hidden)[:rows]


def without_layers(params: Any) -> Any:
    """The parameters that `Ends` needs."""
    return {name: value for name, value in params.items() if name != "layers"}


def _platform(mesh: AnyMesh) -> str:
    if isinstance(mesh, AbstractMesh):
        return jax.default_backend()
    return mesh.devices.flat[0].platform


@dataclasses.dataclass(frozen=True)
class Layer:
    """What is static of a layer, beside the setup.

    Attributes:
      method: `Method.of_layer`, or what has its place in layers with a sliding window.
      window: its sliding window, in tokens.
      rope: its rotary embedding.
    """

    method: Method
    window: int | None
    rope: RopeConfig


@dataclasses.dataclass(frozen=True)
class Setup:
    """The static part of all programs.

    Attributes:
      by_layer: whether the host loops over the layers, not the device (see `engine.layers`). A
        pass then takes a dispatch for each layer, and a decode step waits for the host.
      kv: the 8-bit form in which caches hold keys and values; None for arrays of `dtype`.
      weights: the 8-bit form of the layers' matrices; None for arrays of `dtype`.
      offload: keys and values lie in the host's memory; None for the devices'.
      reading: how a text's earlier keys are read; None for all of them.
    """

    config: ModelConfig
    method: Method
    mesh: AnyMesh
    dtype: Any
    chunk: int
    by_layer: bool = False
    kv: StoredForm | None = None
    weights: StoredForm | None = None
    offload: Offload | None = None
    reading: Reading | None = None

    @property
    def platform(self) -> str:
        """What the programs are for: "cpu", "gpu" or "tpu"."""
        return _platform(self.mesh)

    @property
    def token_bytes(self) -> int:
        """What a cache holds of one token in one layer, over all heads: key, value and scales."""
        width = self.config.head_dim
        token = jax.eval_shape(lambda: empty((1, 1, 1, width), self.dtype, self.kv))
        parts = jax.tree.leaves(token)
        return 2 * self.config.num_kv_heads * sum(x.size * x.dtype.itemsize for x in parts)

    @property
    def evens_keys(self) -> bool:
        """Whether caches hold keys in units of `engine.layers.key_units`."""
        biased = self.config.qkv_bias and not self.config.qk_norm
        return self.kv is not None and biased and not self.method.measures_keys

    @property
    def ends(self) -> Ends:
        """Its part that does not depend on the method."""
        return Ends(self.config, self.mesh, self.dtype)

    def few(self, rows: int) -> bool:
        """Whether this many rows are multiplied by the kernel for few on each device."""
        return self.platform == "gpu" and rows <= MAX_ROWS * self.mesh.shape["data"]

    def peers(self, rows: int) -> AllPeers:
        """What devices exchange so many rows' few numbers through; empty where XLA does."""
        if not self.few(rows):
            return {}
        config, mesh = self.config, self.mesh
        axes = tuple(name for name in ("tensor", "seq") if mesh.shape[name] > 1)
        heads = config.num_heads + 2 * config.num_kv_heads
        # Hidden states in float32; queries, keys and values, or outputs and log-sum-exps.
        row = max(config.model_dim, heads * (config.head_dim + 4))
        # In one order, so that a stored program is found again.
        groups = sorted({axes, ("seq",)} if "seq" in axes else {axes})
        return meet(mesh, groups, -(-rows // mesh.shape["data"]) * row, PLACES)

    def products(self, rows: int, peers: AllPeers) -> Products:
        """How a layer multiplies this many rows, which all shards of `seq` have, with weights."""
        if self.few(rows):
            return FewRows(self.mesh, peers=peers)
        return (Divided if self.mesh.shape["seq"] > 1 else Products)(self.mesh)

    @property
    def slot_layout(self) -> SlotLayout:
        """Where the slots of all caches lie."""
        return SlotLayout(self.mesh.shape["seq"], STRIPE if self.method.stripes else None)

    def layer(self, index: int) -> Layer:
        """The layer of that number."""
        window = self.config.windows[index]
        method = SLIDING_WINDOW
        if window is None:
            method = self.method.of_layer(index, self.config.num_layers)
        return Layer(method, window, self.config.rope_of(index))

    def with_layers(self, caches: tuple[Any, ...]) -> Iterator[tuple[int, Layer, Any]]:
        """The number of the first layer of each of these caches, that layer, and the cache."""
        for numbers, cache in zip(numbers_of_layers(caches), caches, strict=True):
            yield numbers.start, self.layer(numbers.start), cache

    def feed(self, stage: Stage, slots: int, **rows: Any) -> Feed:
        """What `Method.segments` is given of these rows, for caches of `slots`."""
        shards, vocabulary = self.mesh.shape["seq"], self.config.vocab_size
        return Feed(stage, self.chunk, slots=slots, shards=shards, vocab_size=vocabulary, **rows)

    def layer_context(self, layer: Layer, total: Array) -> LayerContext:
        """What a method knows of the layer."""
        scale, cap = self.config.softmax_scale, self.config.attention_cap
        return LayerContext(
            scale=scale if cap is None else Capped(scale, cap),
            window=layer.window,
            rope=layer.rope,
            total=total,
            stripe=self.slot_layout.stripe,
        )


def everywhere(ends: Ends, tree: Any) -> Any:
    """The arrays put on all devices, outside of jit."""
    return jax.device_put(tree, NamedSharding(ends.mesh, PartitionSpec()))


def replicated(ends: Ends, tree: Any) -> Any:
    """The same on all devices: every process reads these."""
    sharding = NamedSharding(ends.mesh, PartitionSpec())
    return jax.lax.with_sharding_constraint(tree, jax.tree.map(lambda _: sharding, tree))
