"""ReAttention as the library has it, by the rules of the numpy oracle."""

from typing import Any

from jax_longctx.methods import ReAttention
from tests.jax_longctx.methods.oracles.reattention import Rules

__all__ = ["RELEASED", "SMALL", "method_of"]

NAMES = ("global_size", "local_size", "span", "count", "kept", "chunk")
SMALL = Rules(g=2, w=8, m=4, k=2, kept=3, c=8)
RELEASED = {
    "align": 128,
    "selector": "tilemax128",
    "decode_heads": "scrambled",
    "first_chunk": "released",
}


def method_of(rules: Rules, kind: type = ReAttention) -> Any:
    values = (rules.g, rules.w, rules.m, rules.k, rules.kept, rules.c)
    given: dict[str, Any] = dict(zip(NAMES, values, strict=True))
    released = RELEASED if rules.released else {}
    position = "original" if rules.original else "contiguous"
    return kind(**given, **released, position=position, last_token_decode=not rules.together)
