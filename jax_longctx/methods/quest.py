"""Quest: each query reads the pages that could hold its largest products.

Tang et al. 2024, section 3. Keys are cached after rotary embedding, in pages of `page_size`
tokens, each with the elementwise maximum and minimum of its keys. The sum over coordinates of the
larger of q max and q min bounds every q.k of the page from above; a decode step attends the pages
of the largest bounds, beside the first `sink` and the last `local` tokens. Prefill is exact.

Bytes of a decode step, as a share of full attention's: 1 / page_size for the bounds, and the budget
over the length. All keys stay in memory.

The defaults are those of RESA (appendix, "Additional Configuration"): fixed tokens on top of the
budget, every layer sparse. `Quest.released()` is the authors' accuracy code: no fixed tokens, at
least three pages, the first two layers dense. It ranks pages for each query head, which forfeits
reading a page once for a group; `granularity=kv_head` ranks by the group's mean softmax.
"""

from typing import ClassVar

from jaxtyping import Array, Bool, Float

from jax_longctx.contract import Registered, method
from jax_longctx.parts import selection
from jax_longctx.parts.digests import PageDigests, masked_max

__all__ = ["Quest"]


@method(source="Tang et al. 2024, section 3")
class Quest(Registered):
    """Decode reads the pages whose keys' bounds promise most.

    Attributes: those of every selector (see `selection.Selector`).
    """

    budget: int = 1024
    ratio: float | None = None
    page_size: int = 16
    sink: int = 4
    local: int = 64
    count_fixed: bool = False
    whole_pages: bool = False
    granularity: selection.Granularity = "query_head"
    min_pages: int = 1
    skip_layers: int = 0
    allocation: selection.Allocation = "uniform"
    alpha: float = 0.2
    epsilon: float = 0.95

    pools: ClassVar[selection.Pools] = "mass"
    phase = "decode"
    query_aware = True
    keeps_all = True
    append_only = True

    @classmethod
    def released(cls) -> "Quest":
        """What the authors' released accuracy code computes."""
        return cls(sink=0, local=0, min_pages=3, skip_layers=2)

    def __post_init__(self) -> None:
        selection.check(self, "quest")

    @property
    def resident_pages(self) -> int:
        return 0

    def summarise(
        self, keys: Float[Array, "B K P Z H"], held: Bool[Array, "B P Z"]
    ) -> PageDigests | None:
        """The elementwise maximum and minimum of each page's keys."""
        return PageDigests(masked_max(keys, held), -masked_max(-keys, held), None)

    scores = selection.scores_of_digests
    validate = selection.validate
    init_cache = selection.init_cache
    segments = selection.segments
    attend = selection.attend
    adopt = selection.adopt
    finish = selection.finish
    fork = selection.fork
    read_bytes = selection.read_bytes
