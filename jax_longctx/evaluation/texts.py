"""Texts of one length in tokens, cut from longer documents."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int

from jax_longctx.errors import InputError

__all__ = ["cut_texts"]


def cut_texts(
    documents: Sequence[Sequence[int]], *, count: int, length: int, lead: Sequence[int] = ()
) -> Int[np.ndarray, "n T"]:
    """`count` texts of `length` tokens, at even distances, none over the border of a document.

    Args:
      documents: token ids, without special tokens.
      lead: begins every text and counts in its length: a beginning-of-text token.

    Raises:
      InputError: the documents hold fewer such texts.
    """
    width = length - len(lead)
    if width < 1:
        raise InputError(f"a text of {length} tokens has no room beside its first {len(lead)}")
    pieces = []
    for document in documents:
        held = len(document) // width
        pieces += [document[i * (len(document) // held) :][:width] for i in range(held)]
    if not 1 <= count <= len(pieces):
        longest = max(map(len, documents), default=0)
        raise InputError(
            f"{count} texts of {length:,} tokens were asked for; the {len(documents)} documents, "
            f"the longest of {longest:,} tokens, hold {len(pieces)}: ask for fewer or shorter ones "
            f"(at least one), or give longer documents"
        )
    chosen = [pieces[i * len(pieces) // count] for i in range(count)]
    return np.array([[*lead, *piece] for piece in chosen], np.int32)
