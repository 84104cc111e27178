"""Keys make one cycle, the example has other words, a broken chain counts to its break."""

import itertools
import re

import pytest

from jax_longctx.errors import ConfigError, LengthError
from jax_longctx.evaluation.tasks import make_task
from jax_longctx.evaluation.tasks.chain_of_key import chain_score
from tests.jax_longctx.evaluation.tasks.cases import drawn


@pytest.mark.parametrize("steps", [3, 10])
def test_keys_are_one_cycle_and_the_example_is_another(steps):
    task, samples = drawn("chain_of_key", tokens=500, trials=5, steps=steps)
    for sample in samples:
        head, _, listed = sample.context.partition("Name of key: ")
        pairs = re.findall(r"(\w+)-(\w+)", listed)
        after = dict(pairs)
        assert len(after) == len(pairs) == sample.meta["keys"] > steps
        assert set(after) == set(after.values())
        walked, word = {pairs[0][0]}, after[pairs[0][0]]
        while word != pairs[0][0]:
            walked.add(word)
            word = after[word]
        assert walked == set(after)
        # The list is shuffled: next to no key follows its predecessor.
        in_order = sum(a[1] == b[0] for a, b in itertools.pairwise(pairs))
        assert in_order < len(pairs) / 4
        example = re.findall(r"(\w+)-(\w+)", head.partition("copied: ")[2])
        assert len(example) == steps
        assert all(a[1] == b[0] for a, b in itertools.pairwise(example))
        assert not {word for key in example for word in key} & set(after)
        assert task.score(", ".join(sample.outputs), sample) == 100
        assert f"chain of {steps} keys" in sample.query
        assert sample.answer_prefix == f"\n\nA chain of {steps} keys:"


KEYS = ("red-dog", "dog-sun", "sun-cup", "cup-red", "a-b-c", "c-red")


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        ("red-dog, dog-sun, sun-cup, cup-red", 100),
        ("cup-red, red-dog, dog-sun, sun-cup", 100),
        ("red-dog, dog-sun, cup-red, red-dog", 50),
        ("red-dog, dog-sun, sun-sea, sea-cup", 50),
        ("red-dog, red-dog, dog-sun, sun-cup", 25),
        ("none, red-dog, dog-sun, sun-cup", 0),
        (" RED-dog , Dog-Sun .\n", 50),
        ("red-dog, dog-sun, sun-cup, cup-red, red-dog, wrong", 100),
        ("a-b-c, c-red, red-dog", 75),
        ("red-dog dog-sun", 0),
        ("", 0),
    ],
)
def test_a_chain_counts_to_its_first_break(answer, score):
    assert chain_score(answer, KEYS, 4) == score


def test_the_papers_examples_and_a_list_of_more_keys():
    """Its table 12: of ten keys three before the break are worth 0.3, two 0.2."""
    ring = [f"{i}-{(i + 1) % 12}" for i in range(12)]
    chain = [f"{i}-{i + 1}" for i in range(10)]
    assert chain_score(", ".join(chain), ring, 10) == 100
    assert chain_score(", ".join([*chain[:3], "5-6", *chain[4:]]), ring, 10) == 30
    assert chain_score(", ".join([*chain[:2], "2-9", *chain[3:]]), ring, 10) == 20
    lengths = range(350, 365, 3)
    few = [drawn("chain_of_key", tokens=tokens)[1][0].meta["keys"] for tokens in lengths]
    assert few == sorted(few) and few[0] >= 11
    with pytest.raises(LengthError, match="few"):
        drawn("chain_of_key", tokens=300)
    with pytest.raises(ConfigError, match="steps must be at least 2, got 1"):
        make_task("chain_of_key", {"steps": 1})
