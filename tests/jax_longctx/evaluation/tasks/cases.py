"""One case a task: settings, a length, and who answers it from the prompt alone.

The answerers read prompts by regular expressions, as written here, and share nothing with the
generators.
"""

import dataclasses
import html.parser
import re
from collections import Counter
from collections.abc import Callable, Mapping

from jax_longctx.evaluation.tasks import Sample


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """How a task is checked.

    Attributes:
      answer: the right answer, read from the prompt.
      slack: most words that may be missing to the length asked for; of real tokens `real_slack`.
      text: whether the task has a text to hide in; lengths are looked at in one of short sentences.
      tokens: words of a prompt.
      settings: the task's.
      hidden: whether the right answers stand in the context, that many times each, and neither
        in the query nor in the answer prefix; 0 where they need not.
    """

    answer: Callable[[Sample], str]
    slack: int
    real_slack: int = 25
    text: bool = False
    tokens: int = 600
    settings: Mapping[str, object] = dataclasses.field(default_factory=dict)
    hidden: int = 1


def passkey(sample: Sample) -> str:
    (key,) = set(re.findall(r"\d{5}", sample.context))
    return f" {key}."


def kept(sample: Sample) -> str:
    """Where the things of the question are kept, each in a sentence."""
    things = re.findall(r"the (\w+ \w+ of \w+)", sample.query)
    found = [
        re.findall(rf"The {thing} is kept in the ([\w ]+)\.", sample.context) for thing in things
    ]
    assert all(len(places) == 1 for places in found)
    return ". ".join(
        f"{thing}: {places[0].upper()}" for thing, places in zip(things, found, strict=True)
    )


def secrets(sample: Sample) -> str:
    """All that the context assigns to the keys of the question."""
    keys = re.search(r"assigned to (.*) in the text above", sample.query)
    assert keys is not None
    named = [key for key in re.split(r",? and |, ", keys[1])]
    pairs = re.findall(r"A secret \w+ assigned to ([\w-]+) is: ([\w-]+)\.", sample.context)
    return ", ".join(value for key, value in pairs if key in named)


def variables(sample: Sample) -> str:
    """All that come to hold the value of the question."""
    value = re.search(r"the value (\d+)", sample.query)
    assert value is not None
    held = {}
    for name, other, number in re.findall(r"VAR (\w+) = (?:VAR (\w+)|(\d+))", sample.context):
        held[name] = number or held[other]
    return " ".join(name for name, number in held.items() if number == value[1])


def repeated(sample: Sample) -> str:
    """The ten most common words of the last list."""
    listed = sample.context.rpartition("Find them.")[2].split()
    assert listed[::2] == [f"{i + 1}." for i in range(len(listed) // 2)]
    return ", ".join(word for word, _ in Counter(listed[1::2]).most_common(10))


def coded(sample: Sample) -> str:
    """The three most frequent words behind the dots."""
    text = sample.context.partition("comes up.")[2].split()
    (dots, _), *three = Counter(text).most_common(4)
    assert dots == "..."
    return " ".join(word for word, _ in three)


def entry(sample: Sample) -> str:
    """What the made-up encyclopaedia says, through the town's entry where a river is asked for."""
    text = sample.context
    name = re.search(r"(?:was|where|of) ([A-Z]\w+ [A-Z]\w+)", sample.query)
    assert name is not None
    found = re.search(
        rf"{name[1]} was born in (\w+) in the year (\d+)\. "
        rf"The occupation of {name[1]} was (\w+)\.",
        text,
    )
    assert found is not None
    town, year, trade = found.groups()
    if "river" in sample.query:
        (river,) = re.findall(rf"{town} is a town on the river (\w+)\.", text)
        return river
    return year if "year" in sample.query else town if "town" in sample.query else trade


def chain(sample: Sample) -> str:
    """A chain through the list, from its last key on."""
    keys = re.findall(r"Name of key: (\w+)-(\w+)", sample.context)
    number = re.search(r"chain of (\d+) keys", sample.query)
    assert number is not None
    after, found = dict(keys), [keys[-1]]
    while len(found) < int(number[1]):
        word = found[-1][1]
        found.append((word, after[word]))
    return " " + ", ".join("-".join(key) for key in found) + "."


class Cells(html.parser.HTMLParser):
    """The records of a page: what stands in the elements that hold values, by record."""

    def __init__(self):
        super().__init__()
        self.rows: list[list[str]] = []
        self._open = False

    def handle_starttag(self, tag, attrs):
        if tag in ("tr", "h3", "dl"):
            self.rows.append([])
        self._open = tag in ("td", "h3", "span", "dd")
        if self._open:
            self.rows[-1].append("")

    def handle_endtag(self, tag):
        self._open = False

    def handle_data(self, data):
        if self._open:
            self.rows[-1][-1] += data


def page_rows(sample: Sample) -> list[list[str]]:
    """What the page lists, read by Python's parser, blank cells as N/A."""
    page = re.search(r"```html\n(.*)\n```", sample.context, re.DOTALL)
    assert page is not None
    parser = Cells()
    parser.feed(page[1])
    return [[cell or "N/A" for cell in row] for row in parser.rows if row]


def table(sample: Sample) -> str:
    """The page's records in the form asked for."""
    rows = page_rows(sample)
    wanted = re.search(r"whose (\w+) is (below|at least) ([\d.]+) of", sample.query)
    if wanted is not None:
        at = sample.answer_prefix.splitlines()[-1].split("\t").index(wanted[1])
        numbers = [row[at].replace("$", "") for row in rows]
        rows = [
            row
            for row, number in zip(rows, numbers, strict=True)
            if number != "N/A" and (float(number) < float(wanted[3])) == (wanted[2] == "below")
        ]
    return "\n" + "\n".join("\t".join(row) for row in rows)


CASES: dict[str, Case] = {
    "passkey": Case(answer=passkey, slack=5, text=True, hidden=2),
    "niah_single": Case(answer=kept, slack=5, text=True),
    "niah_multi": Case(answer=kept, slack=5, text=True, tokens=1200),
    "niah_single_1": Case(answer=secrets, slack=5),
    "niah_single_2": Case(answer=secrets, slack=5, text=True),
    "niah_single_3": Case(answer=secrets, slack=5, text=True),
    "niah_multikey_1": Case(answer=secrets, slack=5, text=True),
    "niah_multikey_2": Case(answer=secrets, slack=8, real_slack=30),
    "niah_multikey_3": Case(answer=secrets, slack=8, real_slack=110),
    "niah_multivalue": Case(answer=secrets, slack=5, text=True),
    "niah_multiquery": Case(answer=secrets, slack=5, text=True),
    "vt": Case(answer=variables, slack=5, hidden=0),
    "cwe": Case(answer=repeated, slack=1, hidden=0),
    "chain_of_key": Case(answer=chain, slack=4, hidden=1),
    "html_tsv_syn": Case(
        answer=table,
        settings={"output": 60, "max_new": 100},
        slack=10,
        real_slack=70,
        hidden=0,
        tokens=800,
    ),
    "qa_1": Case(answer=entry, slack=23, real_slack=110, hidden=0),
    "qa_2": Case(answer=entry, slack=23, real_slack=110, hidden=0),
    "fwe": Case(answer=coded, slack=10, real_slack=40, hidden=0),
}
