"""BABILong: the facts of a small story, spread over a long text that has nothing to do with it.

Kuratov et al. 2024, and Star Attention's setting of it (five kinds of questions, scored by labels).
Facts keep their order; where each stands is drawn, several may stand together. Worked examples of
the same kind come before the text.

The facts are simulated as bAbI's are (Weston et al. 2015, tasks 1 to 5): people go from room to
room, take, drop and give things. Nobody is anywhere and nothing held at the start; only who is in a
thing's room can take it, where that is known; only who holds it can drop or give it, and that to
somebody in the same room; a thing goes where its holder goes. A question is asked only where the
facts leave one answer.

What differs from the published set: the facts are simulated, in other words
and with other text (Python's documentation or the user's, not novels: the label names it), which is
made of whole sentences. The answer is cut where the model goes on to another question, which Star's
scorer means to do.
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
# Facts are at most this share of a prompt's tokens.
SHARE = 0.5


PEOPLE = ("Mary", "John", "Daniel", "Sandra")
GIVERS = ("Bill", "Fred", "Jeff", "Mary")
ROOMS = ("bathroom", "bedroom", "garden", "hallway", "kitchen", "office")
THINGS = ("apple", "football", "milk")
SIDES = (("north", "south"), ("east", "west"), ("south", "north"), ("west", "east"))

# What may be an answer; and how many facts there are, as in Star's table. But here a gift takes
# four: two people in one room, and one of them with a thing.
LABELS = {**dict.fromkeys(("qa1", "qa2", "qa3", "qa4"), ROOMS), "qa5": (*GIVERS, *THINGS)}
RANGES = {"qa1": (2, 10), "qa2": (2, 68), "qa3": (4, 32), "qa4": (2, 2), "qa5": (4, 126)}


@dataclasses.dataclass(frozen=True)
class Story:
    """Facts in their order, a question, and its one answer."""

    facts: tuple[str, ...]
    question: str
    answer: str


class _World:
    """Who is where, what is where and with whom, and how it came about."""

    def __init__(self, draw: random.Random, people: Sequence[str]):
        self.draw, self.people = draw, people
        self.facts: list[str] = []
        self.place: dict[str, str] = {}
        self.holder: dict[str, str] = {}
        # Rooms a thing was in, one after the other; the last is where it is.
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
    """A story of the kind `qa1` ... `qa5` with so many facts."""
    if kind == "qa4":
        return _relations(draw)
    people = GIVERS if kind == "qa5" else PEOPLE
    while True:
        world = _World(draw, people)
        acts = [world.move] if kind == "qa1" else [world.move, world.move, world.take, world.drop]
        while len(world.facts) < facts:
            # Gifts need two people in one room: they would be rare if they were not tried first.
            if kind != "qa5" or draw.random() < 0.5 or not world.give():
                draw.choice(acts)()
        asked = _QUESTIONS[kind](world)
        if asked:
            return Story(tuple(world.facts), *draw.choice(asked))


def _relations(draw: random.Random) -> Story:
    """Which room lies beside another; the second fact says so of a third."""
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


def _where_is_who(world: _World) -> list[tuple[str, str]]:
    return [(f"Where is {person}?", room) for person, room in world.place.items()]


def _where_is_what(world: _World) -> list[tuple[str, str]]:
    return [(f"Where is the {thing}?", rooms[-1]) for thing, rooms in world.rooms.items()]


def _where_was_what(world: _World) -> list[tuple[str, str]]:
    """Rooms before one in which the thing was once alone."""
    return [
        (f"Where was the {thing} before the {room}?", before)
        for thing, rooms in world.rooms.items()
        for before, room in itertools.pairwise(rooms)
        if rooms.count(room) == 1
    ]


def _who_gave(world: _World) -> list[tuple[str, str]]:
    """Givers, receivers and things of gifts that nothing else can be meant by."""
    answers: dict[str, set[str]] = {}
    for giver, thing, receiver in world.gifts:
        answers.setdefault(f"Who gave the {thing} to {receiver}?", set()).add(giver)
        answers.setdefault(f"Who did {giver} give the {thing} to?", set()).add(receiver)
        answers.setdefault(f"What did {giver} give to {receiver}?", set()).add(thing)
    return [(asked, found.pop()) for asked, found in answers.items() if len(found) == 1]


_QUESTIONS: dict[str, Callable[[_World], list[tuple[str, str]]]] = {
    "qa1": _where_is_who,
    "qa2": _where_is_what,
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
        """A story that leaves room for other text."""
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
    """Stories of the kind with few facts, always the same."""
    draw = random.Random(f"examples of {kind}")
    fewest, most = RANGES[kind]
    stories = [draw_story(kind, draw, min(fewest + i + 2, most)) for i in range(EXAMPLES)]
    return "".join(
        SHOWN.format(facts=" ".join(each.facts), question=each.question, answer=each.answer)
        for each in stories
    )


def label_score(answer: str, gold: str, question: str, labels: Sequence[str]) -> float:
    """100 where `gold` is the one label that the answer names beside those of the question.

    Of the answer counts what stands before its first full stop and before any tag of an example or
    a context, in any case of letters (BABILong's metric, as Star Attention uses it).
    """
    text = answer.lower().partition(".")[0].partition("<context>")[0].partition("<example>")[0]
    asked = question.lower()
    named = {label.lower() for label in labels if label.lower() in text}
    return 100.0 * (named - {label for label in named if label in asked} == {gold.lower()})
