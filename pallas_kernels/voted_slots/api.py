"""The slots that a lone token attends: the first ones, spans around the most named ones, the last.

ReAttention (Liu et al. 2024, section 2.2): each naming is a vote. The slots, or pages, of most
votes stay, of equals the lower one, and around each a span of slots. Implementations: `xla` on
every platform, `gpu` (Mosaic), `reference` for tests.
"""

from jax import Array
from jaxtyping import Int

from pallas_kernels import dispatch
from pallas_kernels.voted_slots import gpu, reference, xla
from pallas_kernels.voted_slots.xla import Spans


def voted_slots(
    named: Int[Array, "B E"],
    stop: Int[Array, " B"],
    length: Int[Array, " B"],
    spans: Spans,
    *,
    slots: int,
    size: int,
    implementation: str | None = None,
) -> tuple[Int[Array, "B C"], Int[Array, " B"]]:
    """[0, first) and [stop[b], length[b]), and between them the spans around the most named.

    Args:
      named: slots, or pages of `page` slots, int32; those below 0 are no votes. Others lie before
        stop[b], and their pages' last slots behind `first`.
      stop, length: at most `slots`; where stop[b] < first there are no votes, and stop[b] is
        min(length[b], first).
      slots: of the cache.
      size: static length of the lists.
      implementation: "xla", "gpu" or "reference"; None picks by platform.

    Returns:
      (slots, number): number[b] int32 slots of each row, ascending, then -1 up to C = `size`. Of
      more than `size` the first come back.

    Raises:
      ValueError: `size`, or one of the spans but `first`, is below 1.
    """
    if min(spans.kept, spans.size, spans.page, size) < 1:
        raise ValueError(f"voted_slots: {spans}, size {size}; expected at least 1")
    run = dispatch.select(
        "voted_slots",
        implementation,
        f"{named.shape[1]} votes, lists of {size}",
        xla=xla.voted_slots,
        gpu=dispatch.Kernel(gpu.voted_slots, lambda: gpu.unsupported(named.shape[1], size)),
        reference=reference.voted_slots,
    )
    return run(named, stop, length, spans, slots=slots, size=size)


def takes_votes(votes: int, size: int) -> bool:
    """Whether the platform's kernel lists `size` slots by `votes` votes in one launch."""
    return dispatch.platform() == "gpu" and gpu.unsupported(votes, size) is None
