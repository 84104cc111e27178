"""Full attention: every token attends every earlier token, exactly.

The baseline of every method; `parts.appending` holds the computation.
"""

from jax_longctx.contract import method
from jax_longctx.parts.appending import Exact


@method(source="Vaswani et al. 2017, section 3.2")
class Full(Exact):
    """Exact attention over every token; the baseline."""
