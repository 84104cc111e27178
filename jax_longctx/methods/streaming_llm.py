"""StreamingLLM: the first tokens and the newest ones, at distances that never grow.

Xiao et al. 2024, sections 3.1 and 3.2. Each layer keeps the first `sink` tokens, which draw
attention by their position alone, and the newest `budget - sink`. Keys are cached before rotary
embedding and rotated as if the tokens that stay followed one another, so a model takes a text of
any length at distances below the cache's size. Memory and time per token are constant; evicted
tokens are lost.

A segment attends to the cache and to itself; then the oldest tokens after the sinks leave. With
`chunk=1` that is the authors' evaluation. A larger chunk makes prefill faster, and its queries see
up to `chunk - 1` tokens more.
"""

from jax_longctx.contract import method
from jax_longctx.parts.evicting import Evicting, Positions


@method(source="Xiao et al. 2024, sections 3.1 and 3.2")
class StreamingLLM(Evicting):
    """The first tokens and the newest; any length at constant memory.

    Attributes:
      sink: first tokens that never leave; with sink = `budget` no newer token stays.
      positions: `shifted` (the paper) or `true` (positions keep growing).
    """

    sink: int = 4
    positions: Positions = "shifted"

    query_aware = False

    def __post_init__(self) -> None:
        self.at_least(0, "sink")
        super().__post_init__()

    @property
    def kept(self) -> int:
        return max(self.sink, 1)

    @property
    def first(self) -> int:
        return self.sink
