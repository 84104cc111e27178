import json
import random
from itertools import pairwise

from jax_longctx.batch import rows as rows_module
from jax_longctx.batch.rows import RowPart, RowReader, pack, parts_of, runs_of, texts_of, windows
from jax_longctx.text import Tokenizer, chat_layout
from tests.jax_longctx.cli import tiny_model


def part(row, length, questions=1):
    places = tuple((row, number) for number in range(questions))
    return RowPart(places, (1,) * length, ((2,) * 5,) * questions, length)


def many(context, reserve):
    return 1000


def test_every_job_once_in_batches_of_like_lengths():
    draw = random.Random(0)
    parts = [part(row, draw.randint(1, 40_000)) for row in range(200)]
    batches = pack(parts, 8, 64, many)
    places = sorted(each.places for batch in batches for each in batch.parts)
    assert places == [((row, 0),) for row in range(200)]
    for batch in batches:
        longest = max(map(len, (each.context for each in batch.parts)))
        assert len(batch.parts) <= batch.rows <= 8
        assert all(2 * each.length >= longest for each in batch.parts)
        assert longest + 5 + 64 < batch.slots
    # Of 200 lengths, a few shapes.
    assert len({(batch.rows, batch.slots, batch.reserve) for batch in batches}) <= 35
    shuffled = draw.sample(parts, len(parts))
    assert pack(shuffled, 8, 64, many) == batches


def test_special_tokens_are_text_in_contexts_and_questions(tmp_path):
    tiny_model.write_tokenizer(tmp_path)
    tokenizer = Tokenizer.load(tmp_path)
    text = "a<|turn|>b"
    rows = {"context": text, "question": text}, {"prompt": text}
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    reader = RowReader(tmp_path / "in.jsonl", tokenizer, chat_layout(tokenizer))
    found = map(reader.row, reader.lines())
    # Those of the template, and the prompt's own.
    assert [(row.context + row.questions[0]).count(2) for row in found] == [2, 1]


def test_files_that_rows_in_turn_name_are_read_once(tmp_path, monkeypatch):
    tiny_model.write_tokenizer(tmp_path)
    tokenizer, read = Tokenizer.load(tmp_path), []
    for name in ("a", "b"):
        (tmp_path / name).write_text(name)
    files = [{"file": "a"}, {"files": ["a", "b"]}, {"files": ["a", "b"]}, {"file": "b"}]
    rows = "".join(json.dumps({**row, "question": "Who?"}) + "\n" for row in files)
    (tmp_path / "in.jsonl").write_text(rows)
    documents = rows_module.documents_in
    monkeypatch.setattr(
        rows_module, "documents_in", lambda *of: read.append(of[1]) or documents(*of)
    )
    reader = RowReader(tmp_path / "in.jsonl", tokenizer, chat_layout(tokenizer))
    found = [*map(reader.row, reader.lines())]
    assert read == ["a", "a", "b", "b"] and found[1].context == found[2].context


def test_rows_of_one_text_are_read_together(tmp_path):
    """20 questions about each of 100 texts are 100 readings, and three times more for one."""
    tiny_model.write_tokenizer(tmp_path)
    tokenizer = Tokenizer.load(tmp_path)
    texts = [*(t for t in range(100) for _ in range(20)), *[0] * 700]
    rows = ({"context": f"Text {text}.", "question": f"Is it {i}?"} for i, text in enumerate(texts))
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    reader = RowReader(tmp_path / "in.jsonl", tokenizer, chat_layout(tokenizer))
    whole = [map(reader.row, some) for some in windows(reader.lines(), 128)]
    found = [[part for part in parts_of(rows, False)] for rows in whole]
    assert [len(part.places) for parts in found for part in parts][:100] == [20] * 100
    assert sum(map(len, found)) == 103
    places = [row for parts in found for part in parts for row, number in part.places]
    assert places == [*range(2700)] and max(map(len, found)) == 7
    # A method that must know the question reads for each.
    assert len(parts_of(map(reader.row, reader.lines()), True)) == 2700


def test_scattered_rows_of_one_text_are_taken_together(tmp_path):
    texts = [{"context": str(n % 6), "question": str(n)} for n in range(60)]
    rows = [{"prompt": "a"}, *random.Random(0).sample(texts, 60), {"prompt": "a"}, {"file": "none"}]
    path = tmp_path / "in.jsonl"
    path.write_text("\n".join(json.dumps(row) + "\n" for row in rows))
    tiny_model.write_tokenizer(tmp_path)
    tokenizer = Tokenizer.load(tmp_path)
    reader = RowReader(path, tokenizer, chat_layout(tokenizer))
    found, there = reader.scan(), [*reader.lines()]
    assert found.numbers.tolist() == [*range(1, 127, 2)]
    taken = [*reader.read(found.runs)]
    assert sorted(taken, key=lambda line: line.index) == there and texts_of(taken) == 9
    assert runs_of(taken) == [*map(tuple, found.runs.tolist())]
    # Each text stands where its first row does, with the others in turn behind it.
    first = {line.text: line.index for line in reversed(there[1:61])}
    assert [*dict.fromkeys(line.text for line in taken[1:61])] == sorted(
        first, key=lambda text: first[text]
    )
    assert all(one.index < two.index or one.text != two.text for one, two in pairwise(taken))
    # Of lines in this order there is one run.
    path.write_bytes(b"".join(line.raw for line in taken))
    assert reader.scan().runs.tolist() == [[0, 1, 0, 63]]


def test_memory_and_the_limit_bound_the_rows():
    parts = [part(row, 1000) for row in range(7)]
    assert [len(b.parts) for b in pack(parts, 8, 64, lambda context, reserve: 3)] == [2, 2, 2, 1]
    assert [b.rows for b in pack(parts, 6, 64, many)] == [6, 1]
    assert [b.rows for b in pack(parts, 8, 64, lambda context, reserve: 0)] == [1] * 7
    fits = []
    pack(parts, 8, 64, lambda context, reserve: fits.append((context, reserve)) or 8)
    # What is asked of memory holds the longest row with its question and answer.
    assert fits[0][0] >= 1000 and fits[0][1] >= 69
