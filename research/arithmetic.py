"""Long sums, one step after another, as JSON lines for `eval run -t questions:file=OUT`.

    python -m research.arithmetic OUT.jsonl [--steps 100] [--count 25]

A model that writes every step needs the one before, so its answer is long and an early fault stays.
"""

import argparse
import json
import random
from pathlib import Path

ASKED = (
    "Carry out all the steps in order. Write one line for each, such as `Step 1: 50 + 7 = 57`. "
    "When the last step is done, write `Answer:` and its result."
)


def row(steps: int, draw: random.Random) -> dict[str, str]:
    """A question whose sums stay between 0 and 999."""
    total = draw.randrange(100, 900)
    text = [f"Start with {total}."]
    for step in range(1, steps + 1):
        by = draw.randrange(2, 99)
        add = total < 100 or (total < 900 and draw.random() < 0.5)
        total += by if add else -by
        text.append(f"Step {step}: {'add' if add else 'subtract'} {by}.")
    return {"question": ASKED, "text": "\n".join(text), "pattern": rf"Answer:\D*{total}\b"}


def main() -> None:
    """Writes the lines."""
    parser = argparse.ArgumentParser(description="Long sums as questions of an evaluation.")
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=100, help="steps of a sum (100)")
    parser.add_argument("--count", type=int, default=25, help="lines (25)")
    given = parser.parse_args()
    draw = random.Random(0)
    rows = (json.dumps(row(given.steps, draw)) for _ in range(given.count))
    given.out.write_text("\n".join(rows) + "\n")


if __name__ == "__main__":
    main()
