"""Trying the kernels' configurations on the device at hand, for its table of them."""

import dataclasses
from collections.abc import Callable
from typing import Any

from jax_longctx.bench.kernels import FAULTS, Case, cases, loop_seconds
from pallas_kernels import dispatch, tuning
from pallas_kernels.attention_mass import gpu as attention_mass
from pallas_kernels.bench import measure
from pallas_kernels.decode_attention import gpu as decode_attention
from pallas_kernels.select_large_k import gpu as select_large_k
from pallas_kernels.sparse_decode_attention import gpu as sparse_decode_attention
from pallas_kernels.topk_scores import gpu as topk_scores

__all__ = ["tune"]

# The kernels with a configuration, by operation.
_KERNELS: dict[str, Any] = {
    "attention_mass": attention_mass,
    "decode_attention": decode_attention,
    "select_large_k": select_large_k,
    "sparse_decode_attention": sparse_decode_attention,
    "topk_scores": topk_scores,
}
# What a configuration must gain on the default: repeats differ by as much.
_GAIN = 0.02


def tune(
    *,
    only: str = "",
    shrink: int = 1,
    repeats: int = 20,
    say: Callable[[str], None] = lambda _: None,
) -> dict[str, dict[str, tuning.Entry]]:
    """Measure every candidate on the cases whose name holds `only`.

    Returns:
      By operation and class of shapes the quickest configuration, or the default where it is about
      as quick.
    """
    found: dict[str, dict[str, tuning.Entry]] = {}
    for case in cases(shrink):
        if only not in case.name or case.operation not in _KERNELS:
            continue
        kernel, inputs = _KERNELS[case.operation], case.inputs()
        times = {}
        for config in kernel.CONFIGS:
            attempt = _time(case, inputs, config, repeats, say)
            if attempt is not None:
                shapes, times[config] = attempt
        default = times.get(kernel.CONFIGS[0])
        if default is None:
            say(f"{case.name}: no kernel of this device takes it")
            continue
        best = min(times, key=lambda config: times[config])
        if times[best] > (1 - _GAIN) * default:
            best = kernel.CONFIGS[0]
        entry = tuning.Entry(dataclasses.asdict(best), times[best], default)
        found.setdefault(case.operation, {})[shapes] = entry
    return found


def _time(
    case: Case, inputs: tuple, config: Any, repeats: int, say: Callable[[str], None]
) -> tuple[str, float] | None:
    """The class of the case's shapes, and its seconds; None if it does not run with `config`."""
    with tuning.forced(case.operation, config) as seen:
        try:
            timing = measure(case.steps["ours"], *inputs, repeats=repeats, least=loop_seconds())
        except FAULTS as error:  # a candidate may not fit the device
            say(f"{case.name}: {config}: {type(error).__name__}: {str(error)[:200]}")
            return None
    if not seen:
        return None
    say(f"{case.name}: {config}: {timing.seconds * 1e6:.1f} us ({dispatch.device_kind()})")
    return max(seen), timing.seconds
