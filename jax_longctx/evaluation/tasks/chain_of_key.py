"""Chain-of-key: a chain of listed keys, each beginning with the word the one before ends with.

RefreshKV (Xu et al. 2024), section 3 and appendix A.6: a task with long answers, in which every
step needs another place of the context. Keys are pairs of words. A worked example with other words
stands before the list, and the rules are repeated after it.

Where the paper leaves it open: the whole list is one cycle, so each key has one successor and no
chain ends early; a chain may begin with any key; case is ignored; the longest right beginning of an
answer counts. Words are invented once English runs out.
"""

import dataclasses
import random
import re
from collections.abc import Sequence

from jax_longctx.evaluation.haystack import most_units
from jax_longctx.evaluation.tasks.task import Count, Sample, Task, fixed
from jax_longctx.evaluation.tasks.words import Growing, word_stream
from jax_longctx.settings import at_least

RULES = (
    "Make a chain of {steps} keys, all of them from the list. Each key is two words with a hyphen "
    "between them. After the first, which may be any, each key begins with the word that the key "
    "before it ends with. Write the keys in their order with commas between them."
)
EXAMPLE = "A chain of other keys, which are not in the list and must not be copied: {chain}."
LISTED = "Name of key: {key}"
_LISTED = re.compile(r"^Name of key: (\S+)$", re.MULTILINE)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChainOfKey(Task):
    """Chain-of-key: length of the chain of listed keys before its first break.

    Attributes:
      steps: keys of the chain; the paper's 10 are too many for small models.
    """

    name: str = fixed("chain_of_key")
    metric: str = fixed("share of the chain before its first break")

    steps: int = 10
    max_new: int = 128

    def __post_init__(self):
        super().__post_init__()
        at_least(2, self, "steps")

    def sample(self, count: Count, draw: random.Random, index: int, tokens: int) -> Sample:
        """A list of keys that make one cycle."""
        rules = RULES.format(steps=self.steps)
        query, prefix = f"\n\n{rules}", f"\n\nA chain of {self.steps} keys:"
        stream = word_stream(draw)
        shown = [next(stream) for _ in range(self.steps + 1)]
        example = EXAMPLE.format(chain=", ".join(_keys(shown)[:-1]))
        order, words = draw.random(), Growing(stream)

        def listed(number: int) -> str:
            keys = _keys(words(number))
            random.Random(order).shuffle(keys)
            lines = "\n".join(LISTED.format(key=key) for key in keys)
            return f"{rules}\n\n{example}\n\n{lines}"

        # One word more than steps, so that a chain from any key has its full length.
        room = self.room(count, query + prefix, tokens)
        fitted = most_units(count, listed, room, fewest=self.steps + 1)
        keys = _keys(words(fitted.units))
        # One of many right chains.
        chain = keys[: self.steps]
        return self.made(count, index, fitted, query, prefix, chain, keys=len(keys))

    def score(self, answer: str, sample: Sample) -> float:
        """Share of the requested keys that come before the first wrong one."""
        return chain_score(answer, _LISTED.findall(sample.context), self.steps)


def _keys(words: Sequence[str]) -> list[str]:
    """The keys of a cycle: each word with the next, the last word with the first."""
    return [f"{a}-{b}" for a, b in zip(words, [*words[1:], *words[:1]], strict=True)]


def chain_score(answer: str, keys: Sequence[str], steps: int) -> float:
    """Percentage of `steps` keys that come before the first wrong one.

    A key is wrong if it is not listed, or its first word is not the last word of the key before.
    """
    listed = {key.lower() for key in keys}
    right, before = 0, None
    for item in answer.split(",")[:steps]:
        key = item.strip().strip(".").strip().lower()
        words = key.split("-")
        if key not in listed or (before is not None and words[0] != before):
            break
        right, before = right + 1, words[-1]
    return 100 * right / steps
