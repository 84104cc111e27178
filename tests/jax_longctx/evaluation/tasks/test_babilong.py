import random

import pytest

from jax_longctx.evaluation.tasks import babilong
from tests.jax_longctx.evaluation.tasks.cases import answer_from, drawn, facts, words

KINDS = ("qa1", "qa2", "qa3", "qa4", "qa5")


def stories(kind, number=60):
    draw = random.Random(f"tests {kind}")
    fewest, most = babilong.RANGES[kind]
    for _ in range(number):
        story = babilong.draw_story(kind, draw, draw.randint(fewest, min(most, 40)))
        yield story, facts(" ".join(story.facts))


def test_replay_gives_the_one_answer():
    for kind in KINDS:
        answers = set()
        for story, told in stories(kind):
            assert len(told) == len(story.facts)
            assert answer_from(told, story.question) == {story.answer}
            assert story.answer in babilong.LABELS[kind] and story.answer not in story.question
            answers.add(story.answer)
        assert len(answers) >= (7 if kind == "qa5" else 6)
    # Everybody and everything is told of.
    told = [fact for _, told in stories("qa2") for fact in told]
    for key, known in (
        ("who", babilong.PEOPLE),
        ("room", babilong.ROOMS),
        ("taken", babilong.THINGS),
    ):
        assert {fact[key] for fact in told if key in fact} == set(known)
    pairs = [told for _, told in stories("qa4")]
    # Of the directions one alone is north or south: no question has an answer from the other fact.
    assert {len({one["side"], two["side"]} & {"north", "south"}) for one, two in pairs} == {1}
    # The room that both speak of: in some stories the first fact names it last, in some first.
    assert {pair[0]["two"] == pair[1]["one"] for pair in pairs} == {True, False}


@pytest.mark.parametrize("kind", ["qa2", "qa3", "qa5"])
def test_worlds_obey_their_rules(kind):
    seen = set()
    for _, told in stories(kind):
        place, holder, lies = {}, {}, {}
        for fact in told:
            if "who" in fact:
                assert place.get(fact["who"]) != fact["room"]
                place[fact["who"]] = fact["room"]
            elif "taken" in fact:
                thing, person = fact["taken"], fact["taker"]
                assert thing not in holder and lies.get(thing, place[person]) == place[person]
                holder[thing] = person
            elif "dropped" in fact:
                assert holder.pop(fact["dropped"]) == fact["dropper"]
                lies[fact["dropped"]] = place[fact["dropper"]]
            else:
                assert holder[fact["gift"]] == fact["giver"] != fact["getter"]
                assert place[fact["giver"]] == place[fact["getter"]]
                holder[fact["gift"]] = fact["getter"]
            seen |= set(fact)
    assert {"who", "taken", "dropped"} <= seen and ("gift" in seen) == (kind == "qa5")


@pytest.mark.parametrize("kind", KINDS)
def test_facts_stand_in_their_order_at_their_depths(kind, tmp_path):
    path = tmp_path / "birds.txt"
    path.write_text(" ".join(f"Row {i} has {i % 7} birds." for i in range(900)), encoding="utf-8")
    task, samples = drawn(f"babilong_{kind}", tokens=1500, haystack=str(path))
    assert task.label == f"babilong_{kind}@birds"
    for sample in samples:
        text = sample.context.partition("<context>\n")[2]
        parts, found = [], text
        for fact in sample.meta["facts"]:
            head, _, found = found.partition(fact)
            parts.append(words(head))
        around = sum(parts) + words(found)
        before = [sum(parts[: i + 1]) for i in range(len(parts))]
        assert [n / around for n in before] == pytest.approx(sample.meta["depths"], abs=0.01)
        assert sample.meta["question"] in sample.query
        assert sample.query.startswith("\n</context>\n\n")
        fewest, most = babilong.RANGES[kind]
        assert fewest <= len(sample.meta["facts"]) <= most


def test_examples_are_solved_and_the_same_everywhere():
    for kind in KINDS:
        _, (one, two) = drawn(f"babilong_{kind}", trials=2)
        examples = one.context.partition("<context>")[0]
        assert two.context.startswith(examples)
        shown = examples.split("<example>\n")[1:]
        assert len(shown) == 2
        for text in shown:
            told, question, answer = text.partition("\n</example>")[0].splitlines()
            gold = answer.removeprefix("Answer: ")
            assert answer_from(facts(told), question.removeprefix("Question: ")) == {gold}
    for sample in drawn("babilong_qa5", tokens=600, trials=20)[1]:
        assert words(" ".join(sample.meta["facts"])) <= 300


def test_the_one_label_left_counts():
    question = "Where was the milk before the garden?"
    for answer, score in [
        ("kitchen", 100),
        ("The milk is in the KITCHEN. Before it was in the office", 100),
        ("kitchen <context> office", 100),
        ("kitchen <example> office", 100),
        # The garden is named in the question.
        ("Before the garden it was in the kitchen", 100),
        ("kitchen or office", 0),
        ("garden", 0),
        ("office", 0),
        ("Somewhere. kitchen", 0),
        ("", 0),
    ]:
        assert babilong.label_score(answer, "kitchen", question, babilong.ROOMS) == score, answer
    # Names are labels in any case, and another question ends an answer.
    question, labels = "Who did Bill give the apple to?", babilong.LABELS["qa5"]
    for answer, score in (("bill gave the APPLE to fred", 100), ("fred and jeff", 0)):
        assert babilong.label_score(answer, "Fred", question, labels) == score
    task, (sample,) = drawn("babilong_qa1", trials=1)
    others = " ".join(babilong.ROOMS)
    assert task.score(f" {sample.outputs[0]}\nQuestion: {others}", sample) == 100
    assert task.score(f" {sample.outputs[0]}\n{others}", sample) == 0
