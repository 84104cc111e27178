"""One query's attention to a cache in two halves, with the logits between them.

RefreshKV's full step needs the query's output and its score for every key, to choose the partial
cache by; so do TOVA and H2O while they decode. `decode_logits` reads the keys once and
`attend_logits` the values once; scores are made of the logits and the log-sum-exp. Both at once are
`attend_with_logits`. Implementations: `xla` on every platform, `gpu` (Mosaic) of both at once,
`reference` for tests.
"""

from jax import Array
from jaxtyping import Float, Int

from pallas_kernels import dispatch
from pallas_kernels.common import check_heads
from pallas_kernels.decode_attention import gpu, logits_xla, reference


def decode_logits(
    q: Float[Array, "B 1 N H"],
    k: Float[Array, "B K S H"],
    lengths: Int[Array, " B"],
    *,
    scale: float,
    implementation: str | None = None,
) -> Float[Array, "B N S"]:
    """scale q.k in float32 for the slots below lengths[b]; -inf for the others, whatever they hold.

    Args:
      implementation: "xla" or "reference"; None picks by platform and shape.
    """
    check_heads(q, k, k, kv_axis=1)
    name = dispatch.select(
        "decode_logits",
        implementation,
        {"xla": lambda: None, "reference": lambda: None},
        dispatch.shape_class(q, k.shape[1], None),
    )
    run = {"xla": logits_xla.decode_logits, "reference": reference.decode_logits}[name]
    return run(q, k, lengths, scale=scale)


def attend_logits(
    logits: Float[Array, "B N S"],
    v: Float[Array, "B K S H"],
    *,
    implementation: str | None = None,
) -> tuple[Float[Array, "B 1 N H"], Float[Array, "B 1 N"]]:
    """The values weighted by the softmax of the logits, in v's dtype, and its log-sum-exp.

    A slot whose logit is -inf is not seen, and its value may be anything finite. A head that sees
    nothing has output 0 and log-sum-exp -inf.

    Args:
      logits: float32, from `decode_logits` and changed as a method likes.
      implementation: "xla" or "reference"; None picks by platform and shape.

    Raises:
      ValueError: the heads of the logits are no multiple of those of v.
    """
    heads, kv_heads = logits.shape[1], v.shape[1]
    if heads % kv_heads:
        raise ValueError(f"attend_logits: {heads} heads of logits over {kv_heads} kv heads")
    name = dispatch.select(
        "attend_logits",
        implementation,
        {"xla": lambda: None, "reference": lambda: None},
        f"{v.dtype} {heads} heads of {v.shape[3]} over {kv_heads} kv heads",
    )
    run = {"xla": logits_xla.attend_logits, "reference": reference.attend_logits}[name]
    return run(logits, v)


def attend_with_logits(
    q: Float[Array, "B 1 N H"],
    k: Float[Array, "B K S H"],
    v: Float[Array, "B K S H"],
    lengths: Int[Array, " B"],
    *,
    scale: float,
    implementation: str | None = None,
) -> tuple[Float[Array, "B 1 N H"], Float[Array, "B 1 N"], Float[Array, "B N S"]]:
    """`attend_logits` of `decode_logits`: output in v's dtype, log-sum-exp, logits.

    The logits of slots at and beyond lengths[b] may be anything; what lies there must be finite.

    Args:
      implementation: "xla", "gpu" or "reference"; None picks by platform and shape.
    """
    check_heads(q, k, v, kv_axis=1)
    name = dispatch.select(
        "attend_with_logits",
        implementation,
        {
            "xla": lambda: None,
            "gpu": lambda: gpu.unsupported_logits(q, k),
            "reference": lambda: None,
        },
        dispatch.shape_class(q, k.shape[1], None),
    )
    if name == "gpu":
        return gpu.attend_with_logits(q, k, v, lengths, scale=scale)
    module = {"xla": logits_xla, "reference": reference}[name]
    logits = module.decode_logits(q, k, lengths, scale=scale)
    return *module.attend_logits(logits, v), logits
