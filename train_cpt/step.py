"""One optimiser step: loss and gradients of a global batch, clipped, through AdamW.

Master weights, sums of gradients and moments are float32; the first moment may be bfloat16. The
forward pass runs on a copy of the weights in the compute dtype. One program reads the micro-batches
of a global batch one after another and sums their gradients. Weights are sharded as in inference:
heads, MLP and vocabulary over `tensor`. The tokens of a text are sharded over `seq`. The training
state is sharded over `data` too (as in ZeRO, Rajbhandari et al. 2020, stages 1 and 2), and each
device updates its own part.

The defaults are from Xu et al. 2025, "RefreshKV", section 6: learning rate 5e-6 after 20
warm-up steps, falling linearly, no weight decay.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx, traverse_util
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int, Integer

from jax_longctx.errors import ConfigError
from jax_longctx.models.config import ModelConfig
from jax_longctx.models.llama import Attend, Layer, Llama, model_of
from jax_longctx.models.params import form_of_weights, param_infos
from jax_longctx.settings import at_least
from jax_longctx.sharding import logical_sharding, logical_spec, on_devices
from pallas_kernels import dispatch
from train_cpt.attention import Pattern, attend_with

# What a layer stores for its gradient: everything, the results of its matmuls, or its input alone.
Remat = Literal["none", "dots", "full"]
Float32OrHalf = Literal["float32", "bfloat16"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW with a linear schedule over `steps` steps.

    Attributes:
      warmup: steps until the learning rate is at its peak.
      clip: largest global norm of the gradients; 0 does not clip.
      first_moment: dtype of the stored first moment.
    """

    steps: int
    learning_rate: float = 5e-6
    warmup: int = 20
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    clip: float = 1.0
    first_moment: Float32OrHalf = "float32"

    def __post_init__(self) -> None:
        wrong = {
            "steps at least 1": self.steps < 1,
            "learning_rate above 0": not self.learning_rate > 0,
            f"warmup from 0 to steps={self.steps}": not 0 <= self.warmup <= self.steps,
            "weight_decay at least 0": not self.weight_decay >= 0,
            "beta1 from 0 to below 1": not 0 <= self.beta1 < 1,
            "beta2 from 0 to below 1": not 0 <= self.beta2 < 1,
            "eps above 0": not self.eps > 0,
            "clip at least 0": not self.clip >= 0,
            "first_moment float32 or bfloat16": self.first_moment not in ("float32", "bfloat16"),
        }
        for rule, broken in wrong.items():
            if broken:
                name = rule.split()[0]
                raise ConfigError(f"optimizer: expected {rule}, got {getattr(self, name)!r}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainSetup:
    """The static arguments of a training step.

    Attributes:
      dtype: of the forward pass.
      remat: what layers store for their gradients (see `Remat`).
      loss_chunk: tokens whose logits each device holds at a time.
    """

    config: ModelConfig
    mesh: Mesh
    optimizer: OptimizerConfig
    pattern: Pattern
    dtype: Float32OrHalf = "bfloat16"
    remat: Remat = "full"
    loss_chunk: int = 512

    def __post_init__(self) -> None:
        if self.dtype not in ("float32", "bfloat16"):
            raise ConfigError(f"train: dtype must be float32 or bfloat16, got {self.dtype!r}")
        if self.remat not in (known := get_args(Remat)):
            raise ConfigError(f"train: remat must be of {', '.join(known)}, got {self.remat!r}")
        at_least(1, self, "loss_chunk", within="train: ")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Float32 weights, the optimiser's state, and the number of steps done."""

    params: Any
    moments: Any
    step: Any


def learning_rate(optimizer: OptimizerConfig, step: Int[Array, ""]) -> Float[Array, ""]:
    """The learning rate of a step, counted from 0: above 0, with its peak at step warmup - 1."""
    rising = (step + 1) / max(optimizer.warmup, 1)
    falling = (optimizer.steps - step) / max(optimizer.steps - optimizer.warmup, 1)
    return optimizer.learning_rate * jnp.clip(jnp.minimum(rising, falling), 0.0, 1.0)


def make_optimizer(optimizer: OptimizerConfig) -> optax.GradientTransformation:
    """Clipping, then AdamW."""
    adamw = optax.adamw(
        lambda step: learning_rate(optimizer, jnp.asarray(step)),
        b1=optimizer.beta1,
        b2=optimizer.beta2,
        eps=optimizer.eps,
        weight_decay=optimizer.weight_decay,
        mu_dtype=jnp.dtype(optimizer.first_moment),
    )
    clip = [optax.clip_by_global_norm(optimizer.clip)] if optimizer.clip else []
    return optax.chain(*clip, adamw)


def init_state(setup: TrainSetup, params: Any) -> TrainState:
    """The state before the first step, on its shards.

    Args:
      params: the model's, of any dtype. Do not use them afterwards: the state may share their
        buffers, which the first step overwrites.

    Raises:
      ConfigError: the weights are in 8 bits.
    """
    if (form := form_of_weights(params)) is not None:
        raise ConfigError(
            f"train: expected weights as floats, got {form}; load them without weights={form}"
        )
    state = abstract_state(setup)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
    params = jax.tree.map(
        lambda value, sharding: jax.device_put(value.astype(jnp.float32), sharding),
        params,
        shardings.params,
    )
    init = jax.jit(make_optimizer(setup.optimizer).init, out_shardings=shardings.moments)
    return TrainState(params, init(params), jax.device_put(jnp.int32(0), shardings.step))


@functools.lru_cache(maxsize=16)
def abstract_state(setup: TrainSetup) -> TrainState:
    """Shapes, dtypes and shardings of the state."""
    kept = {
        path: jax.ShapeDtypeStruct(
            info.shape, jnp.float32, sharding=_kept_sharding(setup.mesh, info.shape, info.axes)
        )
        for path, info in param_infos(setup.config).items()
    }
    params = traverse_util.unflatten_dict(kept, sep=".")
    optimizer = make_optimizer(setup.optimizer)
    everywhere = NamedSharding(setup.mesh, PartitionSpec())

    def placed(leaf: Any, sharding: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    moments = optax.tree_map_params(
        optimizer,
        lambda leaf, param: placed(leaf, param.sharding),
        jax.eval_shape(optimizer.init, params),
        params,
        transform_non_params=lambda leaf: placed(leaf, everywhere),
    )
    return TrainState(params, moments, jax.ShapeDtypeStruct((), jnp.int32, sharding=everywhere))


def _kept_sharding(
    mesh: Mesh, shape: tuple[int, ...], axes: tuple[str | None, ...]
) -> NamedSharding:
    """As in a training pass, with the first other axis that divides over `data` on it."""
    spec = [*logical_spec(axes)]
    for axis, size in enumerate(shape):
        if spec[axis] is None and size % mesh.shape["data"] == 0:
            spec[axis] = "data"
            break
    return NamedSharding(mesh, PartitionSpec(*spec))


def inference_shardings(setup: TrainSetup) -> Any:
    """The sharding of each parameter in a forward pass of training, as nested dicts.

    Over `tensor`. An engine takes it too; loaded for one, weights are divided over `seq` besides.
    """
    infos = param_infos(setup.config).items()
    flat = {path: logical_sharding(setup.mesh, info.axes) for path, info in infos}
    return traverse_util.unflatten_dict(flat, sep=".")


def text_sharding(mesh: Mesh) -> NamedSharding:
    """Of `[A, B, T]` tokens: texts over `data`."""
    return NamedSharding(mesh, PartitionSpec(None, "data"))


def place_texts(
    mesh: Mesh, windows: Integer[np.ndarray, "n T"], numbers: Int[np.ndarray, "A B"]
) -> Int[Array, "A B T"]:
    """The texts with these numbers; each process reads the texts of its own devices."""

    def read(index: Any) -> np.ndarray:
        return windows[numbers[index[:2]]].astype(np.int32)

    shape = (*numbers.shape, windows.shape[1])
    return jax.make_array_from_callback(shape, text_sharding(mesh), read)


def _loss_sum(setup: TrainSetup, params: Any, tokens: Array, weights: Array) -> Array:
    """Weighted sum of the next-token losses of `[B, T]` texts; the last token predicts nothing."""
    used = jax.tree.map(lambda value: value.astype(setup.dtype), params)
    used = jax.lax.with_sharding_constraint(used, inference_shardings(setup))
    model = model_of(setup.config, used)
    attend = attend_with(setup.config, setup.mesh, setup.pattern)
    by_token = logical_sharding(setup.mesh, ("batch", "tokens"))
    tokens = jax.lax.with_sharding_constraint(tokens, by_token)
    hidden = hidden_states(model, tokens, attend, setup.remat)
    head = "embed" if setup.config.tie_embeddings else "head"
    return cross_entropy(
        hidden,
        params[head]["table"],
        jnp.roll(tokens, -1, axis=1),
        weights.at[:, -1].set(0.0),
        mesh=setup.mesh,
        chunk=setup.loss_chunk,
    )


def gradients(
    setup: TrainSetup, params: Any, tokens: Int[Array, "A B T"]
) -> tuple[Float[Array, ""], Any]:
    """Mean next-token loss in nats over A micro-batches of B texts, and its float32 gradients."""
    count = tokens.shape[0] * tokens.shape[1] * (tokens.shape[2] - 1)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract_state(setup).params)
    weights = jnp.ones(tokens.shape[1:], jnp.float32)
    loss_and_gradient = jax.value_and_grad(functools.partial(_loss_sum, setup))

    def micro_batch(sums: Any, tokens: Array) -> tuple[Any, None]:
        sums = jax.tree.map(jnp.add, sums, loss_and_gradient(params, tokens, weights))
        return (sums[0], jax.lax.with_sharding_constraint(sums[1], shardings)), None

    zeros = (jnp.float32(0), jax.tree.map(jnp.zeros_like, params))
    sums, _ = jax.lax.scan(micro_batch, zeros, tokens)
    return jax.tree.map(lambda x: x / count, sums)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def train_step(
    setup: TrainSetup, state: TrainState, tokens: Int[Array, "A B T"]
) -> tuple[TrainState, dict[str, Float[Array, ""]]]:
    """The state after one step, and the step's loss, gradient norm and learning rate."""
    loss, grads = gradients(setup, state.params, tokens)
    optimizer = make_optimizer(setup.optimizer)
    updates, moments = optimizer.update(grads, state.moments, state.params)
    new = TrainState(optax.apply_updates(state.params, updates), moments, state.step + 1)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract_state(setup))
    metrics = {
        "loss": loss,
        "gradient_norm": optax.tree.norm(grads),
        "learning_rate": learning_rate(setup.optimizer, state.step),
    }
    return jax.lax.with_sharding_constraint(new, shardings), metrics


@functools.lru_cache(maxsize=4)
def step_program(setup: TrainSetup, shape: tuple[int, ...]) -> Any:
    """The step, compiled before its first run."""
    tokens = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=text_sharding(setup.mesh))
    return train_step.lower(setup, abstract_state(setup), tokens).compile()


@functools.partial(jax.jit, static_argnums=0)
def text_losses(
    setup: TrainSetup, params: Any, tokens: Int[Array, "B T"], last: Int[Array, ""] | int
) -> Float[Array, ""]:
    """Mean loss in nats of predicting the last `last` tokens of every text."""
    batch, length = tokens.shape
    # The token at t is predicted from t - 1.
    counted_T = jnp.arange(length) >= length - 1 - last
    weights = jnp.broadcast_to(counted_T.astype(jnp.float32), (batch, length))
    return _loss_sum(setup, params, tokens, weights) / (batch * jnp.minimum(last, length - 1))


def _joined(layers: Sequence[Layer], remat: Remat) -> Any:
    """The layers, which are alike, as one function.

    The forward pass of a layer runs again for its gradient. The layers are a loop, so that XLA
    compiles one; but not on a GPU, where the copy of all weights that it takes costs more than it
    saves: on an H200 7% of the rate and 2.9 GB, with Qwen2.5-1.5B.
    """
    graph = nnx.graphdef(layers[0])
    saved = jax.checkpoint_policies.dots_with_no_batch_dims_saveable if remat == "dots" else None
    states = [*map(nnx.state, layers)]

    def through(run: Any, x_BTD: Array) -> Array:
        if dispatch.platform() == "gpu":
            return functools.reduce(lambda x_BTD, state: run(x_BTD, state)[0], states, x_BTD)
        stacked = jax.tree.map(lambda *each: jnp.stack(each), *states)
        return jax.lax.scan(run, x_BTD, stacked)[0]

    def call(x_BTD: Array, cache: None, attend: Attend) -> tuple[Array, None]:
        def run(x_BTD: Array, state: Any) -> tuple[Array, None]:
            return nnx.merge(graph, state)(x_BTD, cache, attend)[0], None

        return through(jax.checkpoint(run, policy=saved), x_BTD), cache

    return call


def hidden_states(
    model: Llama, tokens: Int[Array, "B T"], attend: Attend, remat: Remat = "none"
) -> Float[Array, "B T D"]:
    """Final normed hidden states of texts that begin at position 0."""
    if remat != "none":
        layers: Any = (_joined(model.layers, remat),)
        model.layers = layers
    return model.hidden(tokens, (None,) * len(model.layers), attend)[0]


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def cross_entropy(
    hidden: Float[Array, "B T D"],
    table: Float[Array, "V D"],
    targets: Int[Array, "B T"],
    weights: Float[Array, "B T"],
    mesh: Mesh,
    chunk: int,
) -> Float[Array, ""]:
    """Sum over all tokens of weight times -log softmax(table . hidden)[target], in nats.

    Differentiable in `hidden` and `table`; the weights count as constants.

    Logits of 8K tokens over 128K words take 4 GB in float32, and so does their gradient. So tokens
    are processed in chunks. The forward pass computes a chunk's logits, its loss, and at once its
    gradients by the hidden states and the output table; the backward pass only scales them, since
    the loss is a scalar. Logits are computed once: 6 T D V operations in all. The forward pass
    stores the gradients: `[T, D]`, and `[V, D]` in float32.

    Each device processes its own tokens and its own part of the vocabulary, inside a `shard_map`
    manual over every axis: the table's gradient is summed over the devices once, not once a chunk.
    Softmax and sums are float32; matmuls are in the dtype of the hidden states.

    Args:
      table: the output embedding in any float dtype; its gradient is summed in float32.
      chunk: tokens whose logits `[chunk, V]` each device holds at a time.
    """
    return _sharded(mesh, chunk, False, hidden, table, targets, weights)[0]


def _forward(*arguments: Any) -> tuple[Array, Any]:
    *arrays, mesh, chunk = arguments
    loss, *gradients = _sharded(mesh, chunk, True, *arrays)
    return loss, gradients


def _backward(mesh: Mesh, chunk: int, gradients: Any, scale: Array) -> tuple[Any, ...]:
    return (*((scale * x).astype(x.dtype) for x in gradients), None, None)


cross_entropy.defvjp(_forward, _backward)


def _sharded(mesh: Mesh, chunk: int, differentiate: bool, *arrays: Array) -> tuple[Array, ...]:
    rows, vocabulary = logical_spec(("batch", "tokens")), logical_spec(("vocab", "embed"))
    hidden = logical_spec(("batch", "tokens", "embed"))
    outs = (PartitionSpec(), hidden, vocabulary) if differentiate else (PartitionSpec(),)
    local = functools.partial(_local, chunk, differentiate)
    return on_devices(mesh, local, (hidden, vocabulary, rows, rows), outs)(*arrays)


def _local(
    chunk: int,
    differentiate: bool,
    hidden: Float[Array, "B T D"],
    table: Float[Array, "V D"],
    targets: Int[Array, "B T"],
    weights: Float[Array, "B T"],
) -> tuple[Array, ...]:
    """The loss of this device's tokens and words, and its gradients with `differentiate`."""
    table_VD = table.astype(hidden.dtype)
    # The target's index on this device; out of range where another device has the word.
    targets = targets - jax.lax.axis_index("tensor") * table.shape[0]
    count = targets.size
    chunk = min(chunk, count)
    pieces = tuple(
        jnp.pad(x, ((0, -count % chunk), *((0, 0),) * (x.ndim - 1))).reshape(
            -1, chunk, *x.shape[1:]
        )
        for x in (hidden.reshape(count, -1), targets.reshape(-1), weights.reshape(-1))
    )

    def step(carry: tuple[Array, ...], piece: tuple[Array, ...]) -> tuple[Any, Any]:
        loss, *sums = carry
        part, d_CV = _chunk_loss(table_VD, *piece)
        if not differentiate:
            return (loss + part,), None
        f32 = {"preferred_element_type": jnp.float32}
        d_CD = jax.lax.psum(jnp.einsum("CV,VD->CD", d_CV, table_VD, **f32), "tensor")
        dtable = sums[0] + jnp.einsum("CV,CD->VD", d_CV, piece[0], **f32)
        return (loss + part, dtable), d_CD.astype(hidden.dtype)

    zero = jnp.float32(0)
    start = (zero, jnp.zeros(table.shape, jnp.float32)) if differentiate else (zero,)
    (loss, *dtable), d = jax.lax.scan(step, start, pieces)
    loss = jax.lax.psum(loss, ("data", "seq"))
    if not differentiate:
        return (loss,)
    dhidden = d.reshape(-1, hidden.shape[2])[:count].reshape(hidden.shape)
    return loss, dhidden, jax.lax.psum(dtable[0], ("data", "seq")).astype(table.dtype)


def _chunk_loss(
    table: Float[Array, "V D"],
    hidden: Float[Array, "C D"],
    targets: Int[Array, " C"],
    weights: Float[Array, " C"],
) -> tuple[Float[Array, ""], Float[Array, "C V"]]:
    """The chunk's loss, the same on all shards of the vocabulary, and its gradient by logits."""
    logits = jnp.einsum("CD,VD->CV", hidden, table, preferred_element_type=jnp.float32)
    target = targets[:, None] == jnp.arange(table.shape[0])
    top_C = jax.lax.pmax(jnp.max(logits, axis=1), "tensor")
    # One collective for both sums.
    exp_CV = jnp.exp(logits - top_C[:, None])
    of_target = jnp.sum(jnp.where(target, logits, 0.0), axis=1)
    total_C, of_target_C = jax.lax.psum((jnp.sum(exp_CV, axis=1), of_target), "tensor")
    loss = jnp.sum(weights * (top_C + jnp.log(total_C) - of_target_C))
    gradient = weights[:, None] * (exp_CV / total_C[:, None] - target)
    return loss, gradient.astype(hidden.dtype)
