"""Model FLOPs of a training step, and the peak they are held against (MFU).

MFU = model FLOPs of the step / (its seconds x devices x peak of one device), as in Chowdhery et al.
2022, "PaLM", appendix B. For a text of T tokens a step has

    6 P T                      every matmul weight, forward and backward; P counts the output
                               table and leaves the embedding out, of which rows are looked up
    + 3 x 4 N H L x pairs      scores and outputs of attention, N heads of width H in L layers

where pairs are those of query and key that the pattern lets meet: T (T + 1) / 2 where all is
causal; what the last S tokens do not see is not counted. Neither is what rematerialisation computes
again: the figure is of the model, not of the hardware.
"""

import functools
import math
import time
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jax_longctx.models.config import ModelConfig
from jax_longctx.models.llama import param_infos
from train_cpt.attention import Pattern

__all__ = ["device_peak", "step_rates", "text_flops"]

# Dense bfloat16 FLOP/s of one device, as JAX counts devices, from the makers' data sheets.
DATA_SHEETS = {
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA H100 80GB HBM3": 989.4e12,
    "NVIDIA H200": 989.4e12,
    "TPU v4": 275e12,
    "TPU v5": 459e12,
    "TPU v5p": 459e12,
    "TPU v5 lite": 197e12,
    "TPU v5e": 197e12,
    "TPU v6 lite": 918e12,
    "TPU v6e": 918e12,
}


def text_flops(config: ModelConfig, pattern: Pattern, length: int) -> int:
    """Model FLOPs of training on one text of `length` tokens, forward and backward."""
    weights = sum(
        math.prod(info.shape)
        for path, info in param_infos(config).items()
        if len(info.shape) > 1 and (config.tie_embeddings or not path.startswith("embed."))
    )
    prefix, tail = length - pattern.tail, pattern.tail
    pairs = prefix * (prefix + 1) // 2 + tail * (tail + 1) // 2
    pairs += tail * min(pattern.budget, prefix)
    width = config.num_heads * config.head_dim
    return 6 * weights * length + 12 * width * config.num_layers * pairs


def step_rates(
    config: ModelConfig,
    pattern: Pattern,
    mesh: Mesh,
    dtype: str,
    shape: tuple[int, ...],
    seconds: float,
) -> dict[str, float]:
    """Tokens a second and MFU of a step on `shape` = (A, B, T) tokens."""
    peak, _ = device_peak(mesh.devices.flat[0], dtype)
    flops = math.prod(shape[:-1]) * text_flops(config, pattern, shape[-1])
    return {
        "tokens_per_second": round(math.prod(shape) / seconds, 1),
        "mfu": float(f"{flops / (seconds * mesh.size * peak):.4g}"),
    }


def device_peak(device: Any, dtype: str) -> tuple[float, str]:
    """FLOP/s of one device in matmuls of a dtype, and where the figure is from.

    The data sheet's where the device is listed and the dtype bfloat16; else measured, with square
    matrices.
    """
    if dtype == "bfloat16" and device.device_kind in DATA_SHEETS:
        return DATA_SHEETS[device.device_kind], "data sheet"
    return _measured_peak(device, dtype), "measured"


@functools.lru_cache(maxsize=8)
def _measured_peak(device: Any, dtype: str) -> float:
    size, times = (1024 if device.platform == "cpu" else 8192), []
    with jax.default_device(device):
        # Values do not matter to the time; the result is fed in again, so that all are computed.
        x = jnp.full((size, size), 1 / size, dtype)
        multiply = jax.jit(lambda x, y: (x @ y).astype(dtype))
        y = multiply(x, x).block_until_ready()
        for _ in range(5):
            begun = time.perf_counter()
            y = multiply(x, y).block_until_ready()
            times.append(time.perf_counter() - begun)
    return 2 * size**3 / min(times)
