"""Scores of answers, against cases computed by hand."""

import pytest

from jax_longctx.evaluation import metrics


@pytest.mark.parametrize(
    ("answer", "stop", "expected"),
    [
        ("  42 \n", (), "42"),
        ("a\tb\x00c", (), "a\nb\nc"),
        ("\x01 a", (), "a"),
        ("right. Question: more. Answer", ("Question:", "Answer"), "right. "),
        ("right", ("\n",), "right"),
        ("one\ttwo", ("\n",), "one"),
    ],
)
def test_clean(answer, stop, expected):
    assert metrics.clean(answer, stop) == expected


def test_string_and_number_matches():
    assert metrics.string_match_all("AB and cd", ("ab", "CD", "ef", "gh")) == 50
    assert metrics.string_match_all("", ("ab",)) == 0
    assert metrics.string_match_part("xABx", ("no", "ab")) == 100
    assert metrics.string_match_part("a b", ("no", "ab")) == 0
    first = {"is 17.": 100, "017": 0, "1 17": 0, "": 0, "171": 0}
    assert {answer: metrics.exact_first_int(answer, "17") for answer in first} == first


def test_rouge():
    # "the cat sat on the mat" and "the cat the dog sat": 4 words in common (the twice, cat, sat) of
    # 6 and 5; one pair (the cat) of 5 and 4; in order the, cat, sat: 3.
    scores = metrics.rouge("The cat sat on the mat", "the cat the dog sat")
    assert scores == pytest.approx(
        {"rouge_1": 800 / 11, "rouge_2": 200 / 9, "rouge_l": 600 / 11}, abs=1e-9
    )
    # Precision 1, recall 1/4: F is 2 * 1 * 0.25 / 1.25.
    assert metrics.rouge("b", "a b c d")["rouge_1"] == pytest.approx(40)
    assert metrics.rouge("", "a b") == {"rouge_1": 0, "rouge_2": 0, "rouge_l": 0}
    assert metrics.rouge("mat.", "mat")["rouge_1"] == 0


def test_token_f1_and_needlebench():
    assert metrics.normalize(" The cat's  hat, an (old) one ") == "cats hat old one"
    # {red, hat} and {red, hat, band}: F is 2 * 2 / 5.
    assert metrics.token_f1(
        "The red hat!", "a red hat-band? Red".replace("hat-band", "hat band")
    ) == (pytest.approx(200 * 2 / 6))
    assert metrics.token_f1("red red", "red") == pytest.approx(200 / 3)
    assert metrics.token_f1("", "red") == 0
    assert metrics.needlebench("the blue box", "blue", "It is in the blue box.") == 100
    # "redbox" and "bluebox": substitute three letters and insert one: 4 of 7.
    assert metrics.needlebench("red  box", "blue", "blue\nbox") == pytest.approx(20 * 3 / 7)
    assert metrics.needlebench("", "blue", "blue box") == 0
    # Two of "sitting"'s seven letters are other ones, and one more.
    assert metrics.needlebench("kitten", "blue", "sitting") == pytest.approx(20 * 4 / 7)
