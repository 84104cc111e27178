"""Scores of answers, from 0 to 100, without a model: containment, overlap, edit distance.

Definitions follow the evaluations that the methods' papers use: RULER (string matches), LongBench
(token F1), CItruS (ROUGE), NeedleBench (edit distance).
"""

import re
import string
from collections import Counter
from collections.abc import Sequence

_CONTROL = re.compile("[\x00-\x1f]")
_ARTICLES = re.compile(r"\b(a|an|the)\b")


def clean(answer: str, stop: Sequence[str] = ()) -> str:
    """The answer up to the first stop string, with control characters as line ends.

    White space around it is removed before and after that, as in RULER's post-processing.
    """
    answer = _CONTROL.sub("\n", answer.strip()).strip()
    ends = [answer.find(text) for text in stop if text in answer]
    return answer[: min(ends, default=len(answer))]


def string_match_all(answer: str, outputs: Sequence[str]) -> float:
    """Share of the right answers that the answer contains, ignoring case (RULER)."""
    lowered = answer.lower()
    return 100 * sum(gold.lower() in lowered for gold in outputs) / len(outputs)


def string_match_part(answer: str, outputs: Sequence[str]) -> float:
    """100 where the answer contains one of the right answers, ignoring case (RULER)."""
    lowered = answer.lower()
    return 100.0 * any(gold.lower() in lowered for gold in outputs)


def exact_first_int(answer: str, gold: str) -> float:
    """100 where the first run of digits equals `gold`."""
    found = re.search(r"\d+", answer)
    return 100.0 * (found is not None and found[0] == gold)


def rouge(answer: str, gold: str) -> dict[str, float]:
    """ROUGE-1, -2 and -L (Lin 2004) as F1 of lower-cased words split at white space.

    N-grams count as often as they occur in both; L is the longest common subsequence of the two
    texts, each taken as one sentence. No stemming; punctuation stays with its word. The packages
    differ from this: `rouge` takes sets of n-grams, `rouge-score` drops punctuation.
    """
    from rapidfuzz.distance import LCSseq

    words, golden = answer.lower().split(), gold.lower().split()
    scores = {}
    for n in (1, 2):
        ours, theirs = _ngrams(words, n), _ngrams(golden, n)
        scores[f"rouge_{n}"] = _f1((ours & theirs).total(), ours.total(), theirs.total())
    scores["rouge_l"] = _f1(LCSseq.similarity(words, golden), len(words), len(golden))
    return scores


def _ngrams(words: Sequence[str], n: int) -> Counter[tuple[str, ...]]:
    return Counter(zip(*(words[i:] for i in range(n)), strict=False))


def _f1(common: int, ours: int, theirs: int) -> float:
    return 200 * common / (ours + theirs) if common else 0.0


def normalize(text: str, *, lower: bool = True) -> str:
    """Lower case, without punctuation, articles and double spaces (SQuAD's normalisation)."""
    cased = text.lower() if lower else text
    bare = "".join(letter for letter in cased if letter not in string.punctuation)
    return " ".join(_ARTICLES.sub(" ", bare).split())


def token_f1(answer: str, gold: str) -> float:
    """F1 of the two bags of normalised words (SQuAD)."""
    ours, theirs = Counter(normalize(answer).split()), Counter(normalize(gold).split())
    return _f1((ours & theirs).total(), ours.total(), theirs.total())


def needlebench(answer: str, keyword: str, needle: str) -> float:
    """NeedleBench's score: 100 with the keyword, else at most 20 by similarity to the needle.

    Similarity is 1 - edit distance / longer length, both texts without white space.
    """
    from rapidfuzz.distance import Levenshtein

    if keyword in answer:
        return 100.0
    ours, theirs = "".join(answer.split()), "".join(needle.split())
    return 20 * Levenshtein.normalized_similarity(ours, theirs)
