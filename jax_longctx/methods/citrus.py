"""CItruS: read in chunks, keep the tokens that a chunk or the instruction attends to most.

Bai et al. 2024, sections 4.1 (chunked state eviction, CSE), 4.2 (instruction-aware) and 4.3; k is
`budget - chunk`, c is `chunk`. For each chunk of the text

1. the chunk attends to the whole cache (up to k + c slots) and to itself;
2. every cached slot is scored by its attention probability, averaged over all query heads of the
   layer and over the rows of the chunk (`CitrusStandard`) or of the instruction in its place
   (`Citrus`, one shared cache; `CitrusIndividual`, with a cache of its own);
3. the k best stay, the same tokens for all heads, and the chunk joins.

After the context the instruction evicts once more, down to k, is fed, and the answer grows the
cache. During prefill keys are cached before rotary embedding and stand at their slots;
after the question they are rotated once. Cost: attention over k + c / 2 more slots a token, one
more product with the cached keys for the scores, and with an instruction its rows once more a
chunk.

Eq. 1 names a scaled product; as the authors' code, this ranks by the softmax. Section 4.2 can be
read as evicting before the chunk is encoded; as in figure 5 and the code, it is encoded first.
Scores are float32, from the log-sum-exp of the attention; the code keeps
probabilities in the model's dtype. Of equal scores the older token stays.
"""

from jax_longctx.contract import method
from jax_longctx.parts.by_instruction import ByLayer


@method(source="Bai et al. 2024 (CItruS), section 4.2")
class Citrus(ByLayer):
    """Reads in chunks and keeps what the instruction looks at."""
