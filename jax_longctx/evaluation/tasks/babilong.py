"""BABILong: the facts of a small story, spread over a long unrelated text.

Kuratov et al. 2024, in Star Attention's setting (five kinds of questions, scored by labels). Facts
keep their order and stand at drawn places, sometimes together. Worked examples of the same kind
come before the text.

The facts are simulated as in bAbI (Weston et al. 2015, tasks 1 to 5): people go from room to room,
and take, drop and give things. At the start all places are unknown and nothing is held. Only a
person in the thing's room, where that is known, can take it; only its holder can drop it, or give
it to somebody in the same room; a thing moves with its holder. Only questions with one answer are
asked.

Differences from the published set: the wording of the facts, and the text around them (whole
sentences of Python's documentation or the user's text, not novels: the label names it). The answer
is cut where the model continues with another question, as Star's scorer intends.
"""

import dataclasses
import functools
import itertools
import random
from collections.abc import Callable, Sequence

from jax_longctx.evaluation.haystack import open_haystack
from jax_longctx.evaluation.tasks.task import Count, Sample, Task, fixed

INTRO = (
    "A few facts are spread over the text in the context below, which is about other things. "
    "Answer the question behind it from those facts alone, in the order in which they stand: "
    "what comes later holds. Answer in one word.\n\n"
)
SHOWN = "<example>\n{facts}\nQuestion: {question}\nAnswer: {answer}\n</example>\n\n"
ASKED = "\n</context>\n\nQuestion: {question}"
EXAMPLES = 2
# Most of a prompt's tokens that facts may take.
SHARE = 0.5


PEOPLE = ("Mary", "John", "Daniel", "Sandra")
GIVERS = ("Bill", "Fred", "Jeff", "Mary")
ROOMS = ("bathroom", "bedroom", "garden", "hallway", "kitchen", "office")
THINGS = ("apple", "football", "milk")
SIDES = (("north", "south"), ("east", "west"), ("south", "north"), ("west", "east"))

# Possible answers, and the range of the number of facts from Star's table, except that a gift here
# needs at least four: two people enter a room, one takes a thing and gives it.
LABELS = {**dict.fromkeys(("qa1", "qa2", "qa3", "qa4"), ROOMS), "qa5": (*GIVERS, *THINGS)}
RANGES = {"qa1": (2, 10), "qa2": (2, 68), "qa3": (4, 32), "qa4": (2, 2), "qa5": (4, 126)}


@dataclasses.dataclass(frozen=True)
class Story:
    """Facts in order, a question and its only answer."""

    facts: tuple[str, ...]
    question: str
    answer: str


class _World:
    """The places of people and things, the holders of things, and the facts so far."""

    def __init__(self, draw: random.Random, people: Sequence[str]):
        self.draw, self.people = draw, people
        self.facts: list[str] = []
        self.place: dict[str, str] = {}
        self.holder: dict[str, str] = {}
        # Rooms of each thing in order; the last is its current room.
        self.rooms: dict[str, list[str]] = {}
        self.gifts: list[tuple[str, str, str]] = []

    def move(self) -> bool:
        person = self.draw.choice(self.people)
        room = self.draw.choice([room for room in ROOMS if room != self.place.get(person)])
        verb = self.draw.choice(("walked to", "headed for", "hurried to", "went over to"))
        self.facts.append(f"{person} {verb} the {room}.")
        self.place[person] = room
        for thing, holder in self.holder.items():
            if holder == person:
                self.rooms[thing].append(room)
        return True

    def take(self) -> bool:
        pairs = [
            (person, thing)
            for person, room in self.place.items()
            for thing in THINGS
            if thing not in self.holder and self.rooms.get(thing, [room])[-1] == room
        ]
        if not pairs:
            return False
        person, thing = self.draw.choice(pairs)
        verb = self.draw.choice(("picked up", "took", "grabbed"))
        self.facts.append(f"{person} {verb} the {thing}.")
        self.holder[thing] = person
        self.rooms.setdefault(thing, [self.place[person]])
        return True

    def drop(self) -> bool:
        if not self.holder:
            return False
        thing, person = self.draw.choice(list(self.holder.items()))
        verb = self.draw.choice(("put down", "dropped", "set aside"))
        self.facts.append(f"{person} {verb} the {thing}.")
        del self.holder[thing]
        return True

    def give(self) -> bool:
        gifts = [
            (person, thing, other)
            for thing, person in self.holder.items()
            for other in self.people
            if other != person and self.place.get(other) == self.place[person]
        ]
        if not gifts:
            return False
        person, thing, other = self.draw.choice(gifts)
        verb = self.draw.choice(("handed", "passed", "gave"))
        self.facts.append(f"{person} {verb} the {thing} to {other}.")
        self.holder[thing] = other
        self.gifts.append((person, thing, other))
        return True


def draw_story(kind: str, draw: random.Random, facts: int) -> Story:
    """A story of the kind `qa1` ... `qa5` with `facts` facts."""
    if kind == "qa4":
        return _relations(draw)
    people = GIVERS if kind == "qa5" else PEOPLE
    while True:
        world = _World(draw, people)
        acts = [world.move] if kind == "qa1" else [world.move, world.move, world.take, world.drop]
        while len(world.facts) < facts:
            # Gifts need two people in one room, so they are tried first or would be rare.
            if kind != "qa5" or draw.random() < 0.5 or not world.give():
                draw.choice(acts)()
        asked = _QUESTIONS[kind](world)
        if asked:
            return Story(tuple(world.facts), *draw.choice(asked))


def _relations(draw: random.Random) -> Story:
    """Two facts about three rooms and their directions."""
    one, two, three = draw.sample(ROOMS, 3)
    side, _ = draw.choice(SIDES)
    other = draw.choice([pair[0] for pair in SIDES if side not in pair])
    facts = [f"The {one} is {side} of the {two}.", f"The {two} is {other} of the {three}."]
    asked = [
        (f"What is {side} of the {two}?", one),
        (f"What is the {one} {side} of?", two),
        (f"What is the {two} {other} of?", three),
        (f"What is {other} of the {three}?", two),
    ]
    draw.shuffle(facts)
    return Story(tuple(facts), *draw.choice(asked))


def _where_was_what(world: _World) -> list[tuple[str, str]]:
    """Rooms that a thing left for a room it entered only once."""
    return [
        (f"Where was the {thing} before the {room}?", before)
        for thing, rooms in world.rooms.items()
        for before, room in itertools.pairwise(rooms)
        if rooms.count(room) == 1
    ]


def _who_gave(world: _World) -> list[tuple[str, str]]:
    """Questions about gifts that have one answer."""
    answers: dict[str, set[str]] = {}
    for giver, thing, receiver in world.gifts:
        answers.setdefault(f"Who gave the {thing} to {receiver}?", set()).add(giver)
        answers.setdefault(f"Who did {giver} give the {thing} to?", set()).add(receiver)
        answers.setdefault(f"What did {giver} give to {receiver}?", set()).add(thing)
    return [(asked, found.pop()) for asked, found in answers.items() if len(found) == 1]


_QUESTIONS: dict[str, Callable[[_World], list[tuple[str, str]]]] = {
    "qa1": lambda world: [(f"Where is {person}?", room) for person, room in world.place.items()],
    "qa2": lambda world: [(f"Where is the {it}?", rooms[-1]) for it, rooms in world.rooms.items()],
    "qa3": _where_was_what,
    "qa5": _who_gave,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Babilong(Task):
    """BABILong: questions about a small story whose facts are spread over a long text.

    Attributes:
      haystack: `topics` (Python's documentation), `noise`, or the path of a text.
    """

    name: str = fixed("babilong_qa1")
    metric: str = fixed("names the answer and no other")
    stop: tuple[str, ...] = fixed(("Question",))
    kind: str = fixed("qa1")

    haystack: str = "topics"
    max_new: int = 32

    def sample(self, count: Count, draw: random.Random, index: int, tokens: int) -> Sample:
        """A story with its facts at drawn places, in their order."""
        haystack = open_haystack(self.haystack, count)
        story = self._story(count, draw, tokens)
        query, prefix = ASKED.format(question=story.question), "\n\nAnswer:"
        depths = sorted(draw.random() for _ in story.facts)
        filled = haystack.fill(
            list(zip(depths, story.facts, strict=True)),
            tokens=self.room(count, query + prefix, tokens),
            start=draw.randrange(len(haystack.pieces)),
            head=f"{INTRO}{_examples(self.kind)}<context>\n",
            inline=True,
        )
        meta = {"facts": list(story.facts), "question": story.question, "depths": depths}
        return self.made(count, index, filled, query, prefix, (story.answer,), **meta)

    def _story(self, count: Count, draw: random.Random, tokens: int) -> Story:
        """A story whose facts leave room for other text."""
        fewest, most = RANGES[self.kind]
        while True:
            story = draw_story(self.kind, draw, draw.randint(fewest, most))
            if count(" ".join(story.facts)) <= SHARE * tokens or most == fewest:
                return story
            most = max(fewest, len(story.facts) - 1)

    def score(self, answer: str, sample: Sample) -> float:
        """100 where the answer names the right label, and no other but the question's own."""
        for stop in self.stop:
            answer = answer.partition(stop)[0]
        return label_score(answer, sample.outputs[0], sample.meta["question"], LABELS[self.kind])


@functools.cache
def _examples(kind: str) -> str:
    """Solved stories of the kind with few facts, always the same."""
    draw = random.Random(f"examples of {kind}")
    fewest, most = RANGES[kind]
    stories = [draw_story(kind, draw, min(fewest + i + 2, most)) for i in range(EXAMPLES)]
    return "".join(
        SHOWN.format(facts=" ".join(each.facts), question=each.question, answer=each.answer)
        for each in stories
    )


def label_score(answer: str, gold: str, question: str, labels: Sequence[str]) -> float:
    """100 where `gold` is the only label in the answer that is not in the question.

    The answer counts up to its first full stop, `<example>` or `<context>`, ignoring case
    (BABILong's metric, as Star Attention uses it).
    """
    text = answer.lower().partition(".")[0].partition("<context>")[0].partition("<example>")[0]
    asked = question.lower()
    named = {label.lower() for label in labels if label.lower() in text}
    return 100.0 * (named - {label for label in named if label in asked} == {gold.lower()})
