"""Counting-Stars (Song et al. 2024): thirty-two counts of stars, evenly spread over a text.

The wording, the numbers, the places and the score are those of `gen_test_data.ipynb` and
`viz.ipynb` of nick7nlp/Counting-Stars at 32e16f2, English. The authors' text is Paul Graham's
essays: join the files of `context_data/PaulGrahamEssays` and give the result as `haystack`.

Two differences: a prompt has the most words that fit its tokens, where the authors count words; and
it begins at a drawn word, as they have one prompt of a length. An answer that is no JSON scores 0;
the authors' code stops there.
"""

import dataclasses
import itertools
import json
import random
import re
from typing import Any

from jax_longctx.evaluation.haystack import most_units, open_haystack
from jax_longctx.evaluation.tasks.task import Count, Sample, Task, fixed

# The right counts, and the mistaken ones of the reasoning form.
RIGHT = (
    *(15, 117, 42, 69, 58, 107, 9, 49, 113, 66, 26, 102, 81, 94, 77, 61),
    *(5, 19, 109, 3, 35, 54, 86, 89, 127, 21, 46, 122, 38, 97, 74, 29),
)
WRONG = (
    *(16, 116, 43, 70, 59, 106, 8, 48, 112, 67, 25, 101, 82, 93, 76, 62),
    *(6, 18, 108, 4, 34, 53, 85, 90, 126, 22, 45, 121, 39, 96, 75, 30),
)
COUNTED = "\nThe little penguin counted {right} ★\n"
RECOUNTED = (
    "\nThe little penguin counted {wrong} ★, but found that a mistake had been made, so the "
    "counting was done again, and this time {right} ★ was counted correctly.\n"
)
ASKED = (
    "\n\n\n\nOn this moonlit and misty night, the little penguin is looking up at the sky and "
    "concentrating on counting ★. Please help the little penguin collect the {correct}number of "
    '★, for example: {{"little_penguin": [x, x, x,...]}}. The summation is not required, and the '
    "numbers in [x, x, x,...] represent the {correctly}counted number of ★ by the little penguin. "
    "Only output the results in JSON format without any explanation."
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CountingStars(Task):
    """Counting-Stars: all counts of stars that stand in a text, without the mistaken ones.

    Attributes:
      haystack: `topics` (Python's documentation), `noise`, or the path of a text.
    """

    name: str = fixed("stars_searching")
    metric: str = fixed("counts found")
    reasoning: bool = fixed(False)

    haystack: str = "topics"
    max_new: int = 256

    def sample(self, count: Count, draw: random.Random, index: int, tokens: int) -> Sample:
        """Words of the text with a count after each thirty-second part of them."""
        words = open_haystack(self.haystack, count).text.replace("\n", " ").split(" ")
        start = draw.randrange(len(words))
        form, correct = (RECOUNTED, "correct") if self.reasoning else (COUNTED, "")
        question = ASKED.format(correct=correct and "correct ", correctly=correct and "correctly ")
        pairs = zip(RIGHT, WRONG, strict=True)
        counts = [form.format(right=right, wrong=wrong) for right, wrong in pairs]

        def text(units: int) -> str:
            chosen = itertools.islice(itertools.cycle(words), start, start + units)
            return sprinkled(" ".join(chosen), counts).lstrip()

        room = self.room(count, question, tokens)
        fitted = most_units(count, lambda units: text(units).rstrip(), room, fewest=len(counts))
        end = text(fitted.units).removeprefix(fitted.text)
        return self.made(count, index, fitted, end + question, "", map(str, RIGHT))

    def score(self, answer: str, sample: Sample) -> float:
        """Share of the counts found; with the mistaken one beside it half, that one alone 25%."""
        found = counts_of(answer)[: len(RIGHT)]
        worth = {(True, False): 1.0, (True, True): 0.5, (False, True): 0.25, (False, False): 0.0}
        points = [
            worth[right in found, self.reasoning and wrong in found]
            for right, wrong in zip(RIGHT, WRONG, strict=True)
        ]
        return 100 * sum(points) / len(RIGHT)


def sprinkled(text: str, counts: list[str]) -> str:
    """The text with each sentence behind the next of equal parts of its words.

    Places count the words of sentences that stand before, as the authors' code does.
    """
    part = max(len(text.split(" ")) // len(counts), 1)
    for number, sentence in enumerate(counts):
        words = text.split(" ")
        place = part * (number + 1) + number * len(sentence.split(" "))
        text = " ".join(words[:place]) + sentence + " ".join(words[place:])
    return text


def counts_of(answer: str) -> list[Any]:
    """The list of the JSON object that the answer is; of one in a code block, what can be read."""
    fenced = "```" in answer
    text = answer.replace("```", "").replace("json", "").strip() if fenced else answer
    try:
        found = json.loads(text)["little_penguin"]
        return found if isinstance(found, list) else []
    except (ValueError, KeyError, TypeError, RecursionError):
        cut = re.search(r'"little_penguin"\s*:\s*\[([^\]]*)', text) if fenced else None
        return [float(number) for number in re.findall(r"\d+", cut[1])] if cut else []
