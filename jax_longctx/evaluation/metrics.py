"""Scores of answers, from 0 to 100, without a model: containment, overlap, edit distance.

Definitions are those of the evaluations the methods' papers use: RULER (string matches), LongBench
(token F1), CItruS (ROUGE), NeedleBench (edit distance). Where packages of one name differ, the
function says which definition it has.
"""

import re
import string
from collections import Counter
from collections.abc import Sequence

_CONTROL = re.compile("[\x00-\x1f]")
_ARTICLES = re.compile(r"\b(a|an|the)\b")


def clean(answer: str, stop: Sequence[str] = ()) -> str:
    """The answer up to the first stop string, its control characters turned into line ends.

    White space around it goes before and after, as in RULER's post-processing.
    """
    answer = _CONTROL.sub("\n", answer.strip()).strip()
    ends = [answer.find(text) for text in stop if text in answer]
    return answer[: min(ends, default=len(answer))]


def string_match_all(answer: str, outputs: Sequence[str]) -> float:
    """The share of the right answers that the answer contains, in any case of letters (RULER)."""
    lowered = answer.lower()
    return 100 * sum(gold.lower() in lowered for gold in outputs) / len(outputs)


def string_match_part(answer: str, outputs: Sequence[str]) -> float:
    """100 where the answer contains one of the right answers, in any case of letters (RULER)."""
    lowered = answer.lower()
    return 100.0 * any(gold.lower() in lowered for gold in outputs)


def exact_first_int(answer: str, gold: str) -> float:
    """100 where the first run of digits is the number, digit by digit."""
    found = re.search(r"\d+", answer)
    return 100.0 * (found is not None and found[0] == gold)


def rouge(answer: str, gold: str) -> dict[str, float]:
    """ROUGE-1, -2 and -L (Lin 2004) as F1 of lower-cased words split at white space.

    N-grams are matched as often as they occur in both; L is the longest common subsequence of the
    two texts as one sentence each. No stemming, and punctuation stays with its word. The packages
    differ: `rouge` takes sets of n-grams, `rouge-score` letters and digits only.
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


def normalize(text: str) -> str:
    """Lower case, without punctuation, articles and double spaces (SQuAD's normalisation)."""
    bare = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return " ".join(_ARTICLES.sub(" ", bare).split())


def token_f1(answer: str, gold: str) -> float:
    """F1 of the two bags of normalised words (SQuAD)."""
    ours, theirs = Counter(normalize(answer).split()), Counter(normalize(gold).split())
    return _f1((ours & theirs).total(), ours.total(), theirs.total())


def best_token_f1(answer: str, outputs: Sequence[str]) -> float:
    """`token_f1` with the right answer it is nearest to."""
    return max(token_f1(answer, gold) for gold in outputs)


def needlebench(answer: str, keyword: str, needle: str) -> float:
    """NeedleBench's score: 100 with the keyword, else at most 20 by nearness to the needle.

    Nearness is 1 less the edit distance over the longer length, both without white space.
    """
    from rapidfuzz.distance import Levenshtein

    if keyword in answer:
        return 100.0
    ours, theirs = "".join(answer.split()), "".join(needle.split())
    return 20 * Levenshtein.normalized_similarity(ours, theirs)
