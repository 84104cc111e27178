"""Full attention: every token attends every earlier token, exactly.

The baseline of every method and the definition of right; `parts.appending` says how it is computed.
"""

from jax_longctx.contract import method
from jax_longctx.parts.appending import Appending

__all__ = ["Full"]


@method(source="Vaswani et al. 2017, section 3.2")
class Full(Appending):
    """Exact attention over every token; the baseline."""
