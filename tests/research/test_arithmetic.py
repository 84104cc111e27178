import random
import re

from research.arithmetic import row


def test_the_pattern_takes_the_sum_of_the_steps_alone():
    made = row(40, random.Random(3))
    start, *by = map(int, re.findall(r"(?:with|add|subtract) (\d+)", made["text"]))
    signs = [1 if word == "add" else -1 for word in re.findall("add|subtract", made["text"])]
    assert len(by) == 40
    right = start + sum(sign * number for sign, number in zip(signs, by, strict=True))
    assert 0 <= right < 1000
    assert re.search(made["pattern"], f"Step 40: 1 + 1 = 2\n**Answer:** {right}")
    assert not re.search(made["pattern"], f"Answer: {right}0")
