"""CItruS without an instruction: standard chunked state eviction (CSE).

Bai et al. 2024, section 4.1; see `citrus` for the rest. Each chunk ranks the tokens cached before
it; the instruction evicts once, after the context.
"""

from jax_longctx.contract import method
from jax_longctx.parts.by_instruction import ByLayer


@method(source="Bai et al. 2024 (CItruS), section 4.1")
class CitrusStandard(ByLayer):
    """Reads in chunks and keeps what each chunk looks at.

    Many questions may be asked of one context.
    """

    needs_question = False
