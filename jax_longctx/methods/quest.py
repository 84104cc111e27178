"""Quest: each query reads the pages that could hold its largest products.

Tang et al. 2024, section 3. Each page has the elementwise maximum and minimum of its keys. The sum
over coordinates of the larger of q max and q min is an upper bound of every q.k of the page. A
decode step attends the pages of the largest bounds.

Bytes of a decode step, as a share of full attention's: 1 / page_size for the bounds, and the budget
over the length. All keys stay in memory.

The defaults are RESA's (appendix, "Additional Configuration"): fixed tokens on top of the
budget, every layer sparse. The authors' accuracy code has no fixed tokens and the first two layers
dense: `sink=0,local=0,skip_layers=2`. Pages are ranked for each query head, so a group may read a
page several times; `granularity=kv_head` ranks by the group's mean softmax.
"""

from jaxtyping import Array, Bool, Float

from jax_longctx.caches import PageDigests, masked_max
from jax_longctx.contract import method
from jax_longctx.parts.selecting import SelectingPages


@method(source="Tang et al. 2024, section 3")
class Quest(SelectingPages):
    """Decode reads the pages whose keys' bounds promise most."""

    @property
    def own_tokens(self) -> int | None:
        return self.recent

    def summarise(self, keys: Float[Array, "B K P Z H"], held: Bool[Array, "B P Z"]) -> PageDigests:
        """The elementwise maximum and minimum of each page's keys."""
        return PageDigests(masked_max(keys, held), -masked_max(-keys, held), None)
