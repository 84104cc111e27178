"""How much training lowered the losses of texts' last tokens: Table 5 of the RefreshKV paper.

Xu et al. 2025, section 6. Of a text of L + S tokens the first L are read as a prompt, whose last
token is the question; the last S are then fed one by one through the method's decode path, each the
text's own, whatever the model would have said (`jax_longctx.evaluation.perplexity`): S losses a
text.

Two checkpoints are compared on the same texts. The perplexity of a method is exp of the mean loss
over all texts and tokens. How much it fell is in nats a token, and so is by how much more it fell
than that of the first method; the intervals are of a paired bootstrap over texts: each resample
takes the same texts for all methods and both checkpoints.
"""

from typing import Any

import numpy as np
from jaxtyping import Float

from jax_longctx.evaluation.intervals import bootstrap
from jax_longctx.evaluation.specs import Spec
from jax_longctx.methods import make_method

__all__ = ["drop_interval", "parse_method"]


def parse_method(spec: str) -> Any:
    """The method of `"refreshkv:schedule=fixed,stride=10"`.

    Raises:
      InputError: it is not written so.
      ConfigError: there is no such method, or not with such settings.
    """
    parsed = Spec.parse(spec)
    return make_method(parsed.name, dict(parsed.settings))


def drop_interval(
    before: Float[np.ndarray, " n"],
    after: Float[np.ndarray, " n"],
    than: tuple[np.ndarray, np.ndarray] | None = None,
    seed: int = 0,
) -> tuple[float, float, float]:
    """How much the mean loss fell: (estimate, lower, upper), 95% by a bootstrap over texts.

    Args:
      before, after: mean loss of every text.
      than: the same of another method; by how much more it fell than that one's.
    """
    drops = before - after
    if than is not None:
        drops = drops - (than[0] - than[1])
    return bootstrap(drops, seed)
