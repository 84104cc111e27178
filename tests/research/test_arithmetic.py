import random
import re

import pytest

from research.arithmetic import right_steps, row


def test_the_pattern_takes_the_sum_of_the_steps_alone():
    made = row(40, random.Random(3))
    start, *by = map(int, re.findall(r"(?:with|add|subtract) (\d+)", made["text"]))
    signs = [1 if word == "add" else -1 for word in re.findall("add|subtract", made["text"])]
    assert len(by) == 40
    right = start + sum(sign * number for sign, number in zip(signs, by, strict=True))
    assert 0 <= right < 1000
    assert re.search(made["pattern"], f"Step 40: 1 + 1 = 2\n**Answer:** {right}")
    assert not re.search(made["pattern"], f"Answer: {right}0")
    assert made["instruction"] == ""


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("Step 1: 5 + 7 = 12\nStep 2: 12 - 2 = 10\nAnswer: 10", 100),
        ("Step 1: 5 + 7 = 12\nStep 2: 12 - 2 = 100", 50),
        ("Step 2: 12 - 2 = 10", 0),
    ],
)
def test_steps_are_right_until_the_first_fault(answer, right):
    assert right_steps("Start with 5.\nStep 1: add 7.\nStep 2: subtract 2.", answer) == right
