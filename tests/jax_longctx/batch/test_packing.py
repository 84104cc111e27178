import json
import random

from jax_longctx.batch import rows as rows_module
from jax_longctx.batch.rows import RowPart, RowReader, pack
from jax_longctx.text import Tokenizer, chat_layout
from tests.jax_longctx.cli import tiny_model


def part(row, length, questions=1):
    return RowPart(row, 0, (1,) * length, ((2,) * 5,) * questions, length)


def many(context, reserve):
    return 1000


def test_every_job_once_in_batches_of_like_lengths():
    draw = random.Random(0)
    parts = [part(row, draw.randint(1, 40_000)) for row in range(200)]
    batches = pack(parts, 8, 64, many)
    assert sorted(each.row for batch in batches for each in batch.parts) == list(range(200))
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


def test_memory_and_the_limit_bound_the_rows():
    parts = [part(row, 1000) for row in range(7)]
    assert [len(b.parts) for b in pack(parts, 8, 64, lambda context, reserve: 3)] == [2, 2, 2, 1]
    assert [b.rows for b in pack(parts, 6, 64, many)] == [6, 1]
    assert [b.rows for b in pack(parts, 8, 64, lambda context, reserve: 0)] == [1] * 7
    fits = []
    pack(parts, 8, 64, lambda context, reserve: fits.append((context, reserve)) or 8)
    # What is asked of memory holds the longest row with its question and answer.
    assert fits[0][0] >= 1000 and fits[0][1] >= 69
