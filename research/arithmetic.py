"""Long sums, one step after another, as JSON lines for `eval run -t questions:file=OUT`.

    python -m research.arithmetic OUT.jsonl [--steps 100] [--count 25]
    python -m research.arithmetic OUT.jsonl --rows out-full out-random ...

A model that writes every step needs the one before, so its answer is long and an early fault stays.
The second command scores the rows of evaluations by steps: of all, the percentage before the first
that is wrong or left out. It prints each method's mean with n, an interval at 95% and the
difference from full attention on the same sums.
"""

import argparse
import json
import random
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from jax_longctx.evaluation.summary import SCORE, summarise
from jax_longctx.jobs import lines

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
    return {
        "question": ASKED,
        "instruction": "",
        "text": "\n".join(text),
        "pattern": rf"Answer:\D*{total}\b",
    }


def right_steps(text: str, answer: str) -> float:
    """The percentage of a text's steps that the answer has right before the first fault."""
    total, *by = (int(number) for number in re.findall(r"(?:with|add|subtract) (\d+)", text))
    signs = re.findall(r"add|subtract", text)
    for done, (sign, number) in enumerate(zip(signs, by, strict=True)):
        total += number if sign == "add" else -number
        if not re.search(rf"Step {done + 1}:.*= {total}\b", answer):
            return 100 * done / len(by)
    return 100.0


def scored(made: Sequence[dict[str, str]], folders: Iterable[Path]) -> Iterator[dict[str, Any]]:
    """Each method's steps that are right, by the rows of the folders, of these sums."""
    rows = [row for folder in folders for row in lines.read(folder / "rows.jsonl")[1:]]
    for row in rows:
        of = made[row["index"]]
        if row["outputs"] != [of["pattern"]]:
            raise SystemExit(f"row {row['index']} of {row['label']} is of other sums")
        row["measures"] = {SCORE: right_steps(of["text"], row["answer"])}
    (group,) = summarise(rows).groups
    for (label, _), cell in group.scores.items():
        assert cell.score is not None
        value, apart = cell.score.value, cell.score.difference
        found = {"method": label, "score": value.mean, "interval": [value.low, value.high]}
        more = {} if apart is None else {"difference": [apart.mean, apart.low, apart.high]}
        yield found | {"n": value.count} | more


def main() -> None:
    """Writes the lines, or scores rows."""
    parser = argparse.ArgumentParser(description="Long sums as questions of an evaluation.")
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=100, help="steps of a sum (100)")
    parser.add_argument("--count", type=int, default=25, help="lines (25)")
    parser.add_argument("--rows", type=Path, nargs="+", help="folders of `eval run` over OUT")
    given = parser.parse_args()
    if given.rows:
        made = [json.loads(line) for line in given.out.read_text().splitlines()]
        for found in scored(made, given.rows):
            print(json.dumps(found))
        return
    draw = random.Random(0)
    made = (json.dumps(row(given.steps, draw)) for _ in range(given.count))
    given.out.write_text("\n".join(made) + "\n")


if __name__ == "__main__":
    main()
