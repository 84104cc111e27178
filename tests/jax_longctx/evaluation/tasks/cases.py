"""One case a task: settings, a length, and who answers it by reading the prompt alone."""

import dataclasses
import html
import itertools
import random
import re
from collections import Counter
from collections.abc import Callable, Mapping

from jax_longctx.evaluation.tasks import Sample, make_task


def words(text):
    return len(text.split())


_HUGE = f"<Solution>\n{'9' * 400} / 1 = 2\n1 / 0 = 2\n1 + 1 = 2\n</Solution>"
_BITS = (
    *("\n \t\x00\u2028-,=(½²٣他A"),
    *("BD", "true", "1.5"),
    *("1" * 5000, "9" * 400, "[" * 5000, _HUGE, "<Route>", "</Route>", "# Search Procedure"),
    *("```", "json", "tsv\n", '{"little_penguin": [', "]}", "The answer is ", "the final output"),
)
_draw = random.Random(0)
# Answers as no sane model gives them: each bit alone, and bits in a drawn order.
MESSY = (*_BITS, *("".join(_draw.choices(_BITS, k=_draw.randrange(2, 9))) for _ in range(150)))


def any_answer_has_a_score(task, sample):
    for answer in MESSY:
        assert 0 <= task.score(answer, sample) <= 100, answer[:80]
        assert all(0 <= part <= 100 for part in task.parts(answer, sample).values()), answer[:80]


def drawn(name, *, tokens=900, trials=3, seed=2, **settings):
    """The task with these settings, and its prompts of so many words."""
    task = make_task(name, settings)
    return task, list(task.samples(words, tokens=tokens, trials=trials, seed=seed))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    # The right answer, read from the prompt.
    answer: Callable[[Sample], str]
    # Most words that may be missing to the length asked for; of real tokens the latter.
    slack: int = 5
    real_slack: int = 25
    # Whether it has a text to hide in; lengths are looked at in one of short sentences.
    text: bool = False
    tokens: int = 600
    settings: Mapping[str, object] = dataclasses.field(default_factory=dict)
    # How often each right answer stands in the context, and not behind it; 0 where it need not.
    hidden: int = 1


def passkey(sample):
    (key,) = set(re.findall(r"\d{5}", sample.context))
    return f" {key}."


def kept(sample):
    found = []
    for thing in re.findall(r"the (\w+ \w+ of \w+)", sample.query):
        (place,) = re.findall(rf"The {thing} is kept in the ([\w ]+)\.", sample.context)
        found.append(f"{thing}: {place.upper()}")
    return ". ".join(found)


def secrets(sample):
    keys = re.search(r"assigned to (.*) in the text above", sample.query)[1]
    named = re.split(r",? and |, ", keys)
    pairs = re.findall(r"A secret \w+ assigned to ([\w-]+) is: ([\w-]+)\.", sample.context)
    return ", ".join(value for key, value in pairs if key in named)


def variables(sample):
    value, held = re.search(r"the value (\d+)", sample.query)[1], {}
    for name, other, number in re.findall(r"VAR (\w+) = (?:VAR (\w+)|(\d+))", sample.context):
        held[name] = number or held[other]
    return " ".join(name for name, number in held.items() if number == value)


def repeated(sample):
    listed = sample.context.rpartition("Find them.")[2].split()
    assert listed[::2] == [f"{i + 1}." for i in range(len(listed) // 2)]
    return ", ".join(word for word, _ in Counter(listed[1::2]).most_common(10))


def coded(sample):
    text = sample.context.partition("comes up.")[2].split()
    (dots, _), *three = Counter(text).most_common(4)
    assert dots == "..."
    return " ".join(word for word, _ in three)


def entry(sample):
    """What the made-up encyclopaedia says, through the town's entry where a river is asked for."""
    name = re.search(r"(?:was|where|of) ([A-Z]\w+ [A-Z]\w+)", sample.query)[1]
    told = rf"{name} was born in (\w+) in the year (\d+)\. The occupation of {name} was (\w+)\."
    town, year, trade = re.search(told, sample.context).groups()
    if "river" in sample.query:
        (river,) = re.findall(rf"{town} is a town on the river (\w+)\.", sample.context)
        return river
    return year if "year" in sample.query else town if "town" in sample.query else trade


def chain(sample):
    keys = re.findall(r"Name of key: (\w+)-(\w+)", sample.context)
    after, found = dict(keys), [keys[-1]]
    while len(found) < int(re.search(r"chain of (\d+) keys", sample.query)[1]):
        word = found[-1][1]
        found.append((word, after[word]))
    return " " + ", ".join("-".join(key) for key in found) + "."


def page_rows(sample):
    """What the page lists, record by record, blank cells as N/A."""
    page = re.search(r"```html\n(.*)\n```", sample.context, re.DOTALL)[1]
    rows = [
        re.findall(r"<(?:td|h3|span|dd)\b[^>]*>([^<]*)", record)
        for record in re.split(r"(?=<(?:tr|h3|dl)\b)", page)
    ]
    return [[html.unescape(cell) or "N/A" for cell in row] for row in rows if row]


def table(sample):
    return "\n" + "\n".join("\t".join(row) for row in page_rows(sample))


FACT = re.compile(
    r"(?P<who>[A-Z]\w+) (?:walked to|headed for|hurried to|went over to) the (?P<room>\w+)\."
    r"|(?P<taker>[A-Z]\w+) (?:picked up|took|grabbed) the (?P<taken>\w+)\."
    r"|(?P<dropper>[A-Z]\w+) (?:put down|dropped|set aside) the (?P<dropped>\w+)\."
    r"|(?P<giver>[A-Z]\w+) (?:handed|passed|gave) the (?P<gift>\w+) to (?P<getter>\w+)\."
    r"|The (?P<one>\w+) is (?P<side>north|east|south|west) of the (?P<two>\w+)\."
)


def facts(text):
    """What the text tells of people, things and rooms, in its order."""
    return [
        {key: value for key, value in found.groupdict().items() if value}
        for found in FACT.finditer(text)
    ]


def room_of_person(told, person):
    rooms = [fact["room"] for fact in told if fact.get("who") == person]
    return rooms[-1] if rooms else None


def room_of_thing(told, thing):
    """Where its last holder is, or was when he put it down."""
    holder, until = None, len(told)
    for i, fact in enumerate(told):
        if thing in (fact.get("taken"), fact.get("gift")):
            holder, until = fact.get("taker") or fact["getter"], len(told)
        elif fact.get("dropped") == thing:
            until = i
    return None if holder is None else room_of_person(told[:until], holder)


def answer_from(told, question):
    """Every answer that the facts give the question."""

    def asked(pattern):
        found = re.fullmatch(pattern, question)
        return found and found.groups()

    if found := asked(r"Where is the (\w+)\?"):
        return {room_of_thing(told, *found)} - {None}
    if found := asked(r"Where is (\w+)\?"):
        return {room_of_person(told, *found)} - {None}
    if found := asked(r"Where was the (\w+) before the (\w+)\?"):
        rooms = [room_of_thing(told[:i], found[0]) for i in range(len(told) + 1)]
        steps = itertools.pairwise(rooms)
        return {before for before, room in steps if before and room == found[1] != before}
    for pattern, known, wanted in [
        (r"Who gave the (\w+) to (\w+)\?", ("gift", "getter"), "giver"),
        (r"Who did (\w+) give the (\w+) to\?", ("giver", "gift"), "getter"),
        (r"What did (\w+) give to (\w+)\?", ("giver", "getter"), "gift"),
        (r"What is (\w+) of the (\w+)\?", ("side", "two"), "one"),
        (r"What is the (\w+) (\w+) of\?", ("one", "side"), "two"),
    ]:
        if found := asked(pattern):
            return {fact[wanted] for fact in told if tuple(map(fact.get, known)) == found}
    raise AssertionError(question)


def story(sample):
    told = facts(sample.context.partition("<context>")[2])
    (answer,) = answer_from(told, sample.query.partition("Question: ")[2])
    return f" {answer.upper()}. Or the"


def counts(sample):
    """The counts that no mistake is told of."""
    found = re.findall(
        r"(?:counted|this time) (\d+) ★(?:\n| was counted correctly|$)", sample.context
    )
    return f'{{"little_penguin": [{", ".join(found)}]}}'


_SECRETS = ("single_2", "single_3", "multikey_1", "multivalue", "multiquery")
_TABLE = {"output": 60, "max_new": 100}
CASES: dict[str, Case] = {
    "passkey": Case(answer=passkey, text=True, hidden=2),
    "niah_single": Case(answer=kept, text=True),
    "niah_multi": Case(answer=kept, text=True, tokens=1200),
    "niah_single_1": Case(answer=secrets),
    **{f"niah_{name}": Case(answer=secrets, text=True) for name in _SECRETS},
    "niah_multikey_2": Case(answer=secrets, slack=8, real_slack=30),
    "niah_multikey_3": Case(answer=secrets, slack=8, real_slack=110),
    "vt": Case(answer=variables, hidden=0),
    "cwe": Case(answer=repeated, slack=1, hidden=0),
    "chain_of_key": Case(answer=chain, slack=4),
    "html_tsv_syn": Case(answer=table, settings=_TABLE, slack=10, real_slack=70, hidden=0),
    **{f"babilong_qa{n}": Case(answer=story, text=True, hidden=0) for n in range(1, 6)},
    **{f"qa_{n}": Case(answer=entry, slack=23, real_slack=110, hidden=0) for n in (1, 2)},
    "stars_searching": Case(answer=counts, text=True, tokens=1000, hidden=0),
    "stars_reasoning": Case(answer=counts, text=True, tokens=2000, hidden=0),
    "fwe": Case(answer=coded, slack=10, real_slack=40, hidden=0),
}
