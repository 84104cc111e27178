"""English that CPython ships, as a haystack of a given size with a sentence hidden in it."""

import importlib
import re
from collections.abc import Callable, Iterator

from jax_longctx.errors import InputError

__all__ = ["hide", "python_topics"]

# A sentence's end before a capital, or a blank line: borders at which a sentence can be put in.
_BORDER = re.compile(r"(?<=[.?!])\s+(?=[A-Z])|\n{2,}")


def python_topics() -> str:
    """The running text of Python's language reference (`pydoc_data.topics`), by paragraphs.

    Grammar, examples and lists are left out and lines are joined: a model as small as the demo's
    takes up the pattern of the code around a question sooner than it looks for an answer.
    """
    try:
        topics = importlib.import_module("pydoc_data.topics").topics
    except ModuleNotFoundError as error:
        raise InputError(
            "this Python comes without its help texts (pydoc_data.topics); "
            "use a Python with its full standard library"
        ) from error
    paragraphs = "\n\n".join(topics.values()).split("\n\n")
    return "\n\n".join(" ".join(text.split()) for text in paragraphs if _is_prose(text))


def _is_prose(paragraph: str) -> bool:
    code = paragraph.startswith(" ") or "::=" in paragraph or ">>>" in paragraph
    return len(paragraph) > 200 and not code


def hide(
    sentence: str, text: str, *, tokens: int, depth: float, count: Callable[[str], int]
) -> tuple[str, int]:
    """The beginning of `text` with `sentence` in it, `tokens` long together.

    Args:
      depth: where the sentence goes, as a share of the tokens before and after it; it goes to the
        nearest border of sentences or paragraphs from there on.
      count: tokens of a text.

    Returns:
      The haystack and the number of its tokens that come before the sentence.

    Raises:
      InputError: the text is shorter than that, or the sentence is longer.
    """
    room = tokens - count(sentence)
    before, pieces = [0], []
    for piece in _pieces(text):
        size = count(piece)
        if before[-1] + size > room:
            break
        before.append(before[-1] + size)
        pieces.append(piece)
    else:
        raise InputError(f"the text has {before[-1]:,} tokens, {room:,} are needed; ask for fewer")
    if not pieces:
        raise InputError(f"{tokens} tokens are too few for any text; ask for more")
    at = next(i for i, done in enumerate(before) if done >= depth * before[-1])
    head, tail = "".join(pieces[:at]), "".join(pieces[at:])
    joined = [part for part in (head.rstrip(), sentence, tail.strip()) if part]
    return "\n\n".join(joined), before[at]


def _pieces(text: str) -> Iterator[str]:
    """Sentences and paragraphs, each with the white space after it."""
    start = 0
    for border in _BORDER.finditer(text):
        yield text[start : border.end()]
        start = border.end()
    yield text[start:]
