"""RoCo: the tokens of high mean attention, and those whose attention is still uncertain.

Ren and Zhu 2024 (EasyKV), section 3. Each kv head keeps its own `budget` tokens. For every kept
token three sums are carried, with P the mean probability over the kv head's query heads:

    total += sum_i P[i, s]    squares += sum_i P[i, s]^2    count += queries that could see s

and when j tokens must leave

    mean = total / count      std = sqrt(squares / count - mean^2)
    scope = the f tokens of smallest std, the first `sink` and the newest `protected_last` left out
    the j tokens of the scope with the smallest mean leave
    f = max(budget - int(recent_ratio * budget) - sink, j)

The ratio only makes the scope smaller: no recent window is protected beyond `protected_last`. In
decode one token leaves a step, with `decode_recent_ratio` and without protected sinks (the authors'
mode encoding_decoding). Cost: H2O's, and three numbers a token.

Differences from the authors' code: variances are clamped at 0 (rounding gave NaN), of equals the
older stays, the newest tokens are those of each row of a batch, `budget` is their budget plus
stride, and statistics begin with the first token (theirs with the first segment that evicts). As a
baseline of CItruS (`protocol=citrus`, `positions=shifted`) only tokens before the chunk are in the
scope, and the newest are counted from the chunk's end. The question's statistics are added before
the eviction that it causes, and none after it: nothing leaves then.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

from jax_longctx.contract import method
from jax_longctx.parts.evicting import Evicting, Look
from pallas_kernels.select_large_k import select_mask


@method(source="Ren and Zhu 2024, section 3; EasyKV")
class RoCo(Evicting):
    """High mean attention, or attention still uncertain, per kv head.

    Attributes:
      sink: first slots that do not leave in prefill.
      recent_ratio, decode_recent_ratio: how much smaller the scope is, as shares of the budget, in
        prefill and in decode.
      protected_last: newest tokens that never leave.
    """

    sink: int = 4
    recent_ratio: float = 0.1
    decode_recent_ratio: float = 0.3
    protected_last: int = 10

    num_sums = 3

    def __post_init__(self) -> None:
        self.at_least(0, "sink", "protected_last")
        for name in ("recent_ratio", "decode_recent_ratio"):
            if not 0 <= getattr(self, name) < 1:
                raise self.refused(
                    f"{name} must be at least 0 and below 1, got {getattr(self, name)}"
                )
        super().__post_init__()

    @property
    def kept(self) -> int:
        return max(self.sink + self.protected_last, 1)

    def gained(self, seen: Look) -> Float[Array, "B K U 3"]:
        total, squares = seen.mass(squares=True)
        count = jnp.broadcast_to(seen.onlookers, total.shape)
        group = seen.q.shape[2] // seen.k.shape[2]
        return jnp.stack([total / group, squares, count], axis=-1)

    def rank(self, seen: Look) -> Float[Array, "B K U"]:
        """Means within the scope, +inf outside it."""
        answering = seen.segment.role == "decode"
        sink = 0 if answering else self.sink
        ratio = self.decode_recent_ratio if answering else self.recent_ratio
        end_B11 = seen.length + seen.joining[:, None, None]
        in_scope = seen.competing & (seen.order >= sink)
        in_scope &= seen.order < end_B11 - self.protected_last
        total, squares, count = jnp.moveaxis(seen.sums, -1, 0)
        # Empty slots have counted nothing.
        count = jnp.maximum(count, 1)
        mean = total / count
        in_scope_BKU = jnp.broadcast_to(in_scope, mean.shape)
        std = jnp.sqrt(jnp.maximum(squares / count - mean**2, 0))
        fixed = self.budget - int(ratio * self.budget) - sink
        size_B = jnp.maximum(fixed, seen.leaving)
        # The uncertain tokens are chosen, not the scope: of equals the older must stay.
        uncertain_B = jnp.sum(in_scope[:, 0], axis=1) - size_B
        std = jnp.where(in_scope_BKU, std, -jnp.inf)
        uncertain_BK = jnp.broadcast_to(uncertain_B[:, None], mean.shape[:2])
        in_scope_BKU &= ~select_mask(std, uncertain_BK)
        return jnp.where(in_scope_BKU, mean, jnp.inf)
