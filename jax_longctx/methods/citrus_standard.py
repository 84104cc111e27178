"""CItruS without an instruction: standard chunked state eviction (CSE).

Bai et al. 2024, section 4.1; `citrus` says what is common. Each chunk ranks what was cached before
it; the instruction evicts once, after the context.
"""

from jax_longctx.contract import Registered, method
from jax_longctx.methods import citrus
from jax_longctx.methods.citrus import attend_alone
from jax_longctx.parts import eviction, instruction

__all__ = ["CitrusStandard"]


@method(source="Bai et al. 2024 (CItruS), section 4.1")
class CitrusStandard(Registered):
    """Reads in chunks and keeps what each chunk looks at.

    Many questions may be asked of one context. Attributes as in `Citrus`.
    """

    budget: int = 1024
    chunk: int = 256
    sink: int = 0
    score: instruction.Score = "probability"

    query_aware = True

    __post_init__ = citrus.check
    positions = instruction.positions
    protocol = instruction.protocol
    validate = eviction.validate
    reach = eviction.reach
    init_cache = citrus._init_cache
    segments = eviction.segments
    attend = attend_alone
    finish = eviction.finish
    fork = eviction.fork
    read_bytes = eviction.read_bytes
