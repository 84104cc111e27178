"""Which variant each of an answer's decode steps is, as the host tells the compiled program."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int

from jax_longctx.contract import Method, step_variant

__all__ = ["answer_variants", "decode_turns"]


def answer_variants(method: Method, tokens: int) -> tuple[str, ...]:
    """The variants of the steps of an answer of so many tokens, in the order of their first."""
    # The first token is the question's; one step at least is compiled.
    steps = range(1, max(tokens, 2))
    return tuple(dict.fromkeys(step_variant(method, step) for step in steps))


def decode_turns(
    method: Method, variants: Sequence[str], steps: range, columns: int
) -> Int[np.ndarray, " X"]:
    """`decode_block`'s `turns` for the answer's steps of these numbers, X = `columns` at most."""
    turns = np.full(columns, -1, np.int32)
    turns[: len(steps)] = [variants.index(step_variant(method, step)) for step in steps]
    return turns
