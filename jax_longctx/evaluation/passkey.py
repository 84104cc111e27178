"""Passkey retrieval: a five-digit number hidden at a known depth in a text of a known length.

After Mohtashami and Jaggi 2023, landmark attention, section 4.2. A sentence that gives the number
twice is hidden in running text; the question is the start of that sentence, which the model
continues. Every trial draws its own number and begins the text at its own place; a text that is
shorter than what is asked for starts over.
"""

import dataclasses
import random
import re
from collections.abc import Sequence
from typing import Any

from jax_longctx.evaluation.haystack import Haystack

__all__ = ["SENTENCE", "STEM", "Trial", "is_right", "make_trials", "summary"]

SENTENCE = "The pass key is {key}. Remember it. {key} is the pass key."
STEM = "\n\nThe pass key is"


@dataclasses.dataclass(frozen=True)
class Trial:
    """One hidden number.

    Attributes:
      length: tokens asked for, of text and question together.
      depth: where the sentence was asked to be, 0 the start and 1 the end.
      key: the number.
      text: the text with the sentence in it.
    """

    length: int
    depth: float
    key: str
    text: str


def make_trials(
    haystack: Haystack, lengths: Sequence[int], depths: Sequence[float], each: int, seed: int
) -> list[Trial]:
    """`each` trials of every length, their depths taken in turn; the same ones for every method."""
    trials = []
    asked = haystack.count(STEM)
    for length in lengths:
        for index in range(each):
            draw = random.Random(f"{seed}/{length}/{index}")
            key = str(draw.randint(10_000, 99_999))
            start = draw.randrange(len(haystack.pieces))
            depth = depths[index % len(depths)]
            sentence = SENTENCE.format(key=key)
            # One token is the beginning-of-text token's.
            text, _ = haystack.hide(sentence, tokens=length - asked - 1, depth=depth, start=start)
            trials.append(Trial(length, depth, key, text))
    return trials


def is_right(answer: str, key: str) -> bool:
    """Whether the answer's first number is the key."""
    found = re.search(r"\d+", answer)
    return found is not None and found[0] == key


def summary(rows: Sequence[dict[str, Any]]) -> dict[int, tuple[int, int]]:
    """Right answers and trials of every length, of records with `length` and `right`."""
    counts: dict[int, tuple[int, int]] = {}
    for row in rows:
        right, count = counts.get(row["length"], (0, 0))
        counts[row["length"]] = right + bool(row["right"]), count + 1
    return counts
