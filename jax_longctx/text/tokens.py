"""Names, bytes and places of an answer's tokens, for log-probabilities.

A token's name is the text that it adds after other text, so that a leading space is kept. A token
without text of its own has another name: a part of a character its bytes, as `bytes:\\xe4`, and a
special token its entry in the vocabulary.
"""

import functools
import re
from collections.abc import Callable, Sequence

from jax_longctx.text.tokenizer import Tokenizer

REPLACED = "\ufffd"
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


class TokenNames:
    """Names tokens of one tokenizer."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer

    @functools.cached_property
    def _added(self) -> Callable[[int], str]:
        """What a token adds to a text before it; decoders strip a space at the beginning.

        It is kept: a long prompt and its likely tokens name the same ones many times.
        """
        before, decode = self._tokenizer.encode("a"), self._tokenizer.decode
        begun = len(decode(before))
        return functools.cache(lambda token: decode([*before, token])[begun:])

    def text(self, token: int) -> str:
        """The text of a token; empty where it has none."""
        text = self._added(token)
        return "" if REPLACED in text else text

    def raw(self, token: int) -> bytes | None:
        """The token's bytes, whole characters or not; None for one that adds none."""
        text = self.text(token)
        if text:
            return text.encode()
        piece = self._tokenizer.piece(token)
        if piece is None or not self._added(token):
            return None
        byte = _BYTE.fullmatch(piece)
        if byte:
            return bytes([int(byte[1], 16)])
        found = [_byte_letters().get(letter) for letter in piece]
        return None if None in found else bytes(each for each in found if each is not None)

    def name(self, token: int) -> str:
        """The token as text."""
        text = self.text(token)
        if text:
            return text
        raw = self.raw(token)
        if raw is not None:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
        return self.entry(token)

    def entry(self, token: int) -> str:
        """The token's entry in the vocabulary, or its number where the model has more tokens."""
        return self._tokenizer.piece(token) or f"<token {token}>"

    def distinct(self, tokens: Sequence[int]) -> list[str]:
        """A name for each token, none of them twice."""
        found: dict[str, int] = {}
        for token in tokens:
            names = (self.name(token), self.entry(token), f"<token {token}>")
            found[next(name for name in names if name not in found)] = token
        return list(found)


class Places:
    """Where tokens begin in their text.

    Args:
      after: the tokens that the text follows on.
      begun: characters before the text.
      special: whether special tokens are in the text, as in a prompt's.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        after: Sequence[int] = (),
        begun: int = 0,
        *,
        special: bool = False,
    ):
        self._names = TokenNames(tokenizer)
        self._decoder, self._sent = tokenizer.stream_decoder(after, special=special), begun
        self._special = tokenizer.special_ids

    def next(self, token: int) -> tuple[str, int]:
        """The next token's name, and the characters before it.

        The parts of a character all begin where it does.
        """
        before, new = self._sent, self._decoder.push([token])
        self._sent += len(new)
        names = self._names
        own = names.entry(token) if token in self._special else names.text(token)
        # At the beginning of a text the decoder strips a space.
        own = new if own[:1] == " " and own[1:] == new else own
        if own and new.endswith(own):
            return own, self._sent - len(own)
        return names.name(token), before


@functools.cache
def _byte_letters() -> dict[str, int]:
    """The letters that byte-level vocabularies write for bytes: printable ones are themselves."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {chr(byte): byte for byte in printable}
    return letters | {chr(256 + place): byte for place, byte in enumerate(others)}
