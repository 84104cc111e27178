import dataclasses
import datetime
import json
import os
import random
import zipfile
from os import replace

import pyarrow.parquet
import pytest

from jax_longctx.batch import answering
from jax_longctx.engine import Sampling
from jax_longctx.text.child import ChatTemplate
from tests.checkpoints_convert.tiny import full_disk
from tests.jax_longctx.cli.conftest import die_at, last_of_each, refused
from tests.small_methods import small_method
from tests.support import engine_over

BOOK = "The pass key is 12345. Remember it. "
ROWS = [
    {"id": "a", "prompt": "The pass key is"},
    {"id": 7, "context": BOOK * 5, "question": "Who?"},
    {"file": "book.txt", "questions": ["Why?", "What is the pass key?"]},
    {"prompt": "Remember it. " * 9},
    {"id": "b", "context": BOOK, "questions": ["Where?"]},
    {"prompt": "12"},
]
LIMIT = ("--max-tokens", 6, "--rows", 4)
DRAWN = ("--max-tokens", 12, "--temperature", 1.0, "--seed", 3)


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def given(tmp_path, book):
    return write(tmp_path / "in.jsonl", ROWS)


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out.jsonl"


@pytest.fixture
def batch(run, loads, given, out):
    """Runs the command, over other rows than those above where they are given."""

    def answer(*options, rows=None, into=out, code=0):
        if rows is not None:
            write(given, rows)
        return run("batch", given, into, *last_of_each(["-c", "m", *options]), code=code)

    return answer


@pytest.fixture
def killed(batch, monkeypatch):
    def at(count, *options, **how):
        with monkeypatch.context() as patch:
            die_at(patch, count)
            return batch(*options, **how)

    return at


def alone(tiny, row, folder):
    """The texts that the library gives for each question of a row on its own."""
    encode, layout = tiny.tokenizer.encode, tiny.layout()
    if "prompt" in row:
        tokens = encode(row["prompt"], bos=True)
        context, asked = tokens[:-1], [tokens[-1:]]
    else:
        text = row.get("context") or (folder / row["file"]).read_text()
        context = encode(layout.context(text), bos=True)
        questions = row.get("questions", [row.get("question")])
        asked = [encode(layout.question(question)) for question in questions]
    found = []
    for question in asked:
        # In one shape, which costs a compilation less a row.
        read = tiny.engine.prefill([context], reserve=128, capacity=256, questions=[question])
        (answer,) = tiny.ask(read, [question], max_tokens=6, keep=False)
        found.append(answer.text)
    return found


def check_answers(tiny, found, folder):
    """Lines of the output are what the rows of the input are answered alone."""
    for row, line in zip(ROWS, found, strict=True):
        answers = line["answers"] if "questions" in row else [line]
        assert [answer["answer"] for answer in answers] == alone(tiny, row, folder)
        assert all(answer["tokens"]["answer"] <= 6 for answer in answers)


@pytest.mark.parametrize("method", ["full", pytest.param("citrus", marks=pytest.mark.thorough)])
def test_every_row_as_it_is_answered_alone(batch, tiny, out, method, monkeypatch):
    base = tiny.engine
    engine = engine_over(base.config, base.params, small_method(method), base.mesh, chunk=64)
    monkeypatch.setattr(tiny, "engine", engine)
    result = batch(*LIMIT)
    assert result.stdout == "" and "6 rows" in result.stderr and "tokens/s" in result.stderr
    found = lines_of(out)
    assert [line["line"] for line in found] == [1, 2, 3, 4, 5, 6]
    assert [line.get("id") for line in found] == ["a", 7, None, None, "b", None]
    check_answers(tiny, found, out.parent)
    assert {path.name for path in out.parent.glob("out*")} == {"out.jsonl", "out.jsonl.origin"}


BAD = {
    "not json": "the row is not JSON",
    "[1]": "a JSON list; expected an object",
    '{"id": 1}': "the row has nothing",
    '{"prompt": "x", "question": "y"}': "the row has prompt, question",
    '{"prompt": ""}': "prompt is ''; expected a text",
    '{"context": "x", "questions": []}': "questions is []",
    '{"context": "x", "questions": ["y", 3]}': "questions is 3",
    '{"file": "none.txt", "question": "y"}': "file 'none.txt' cannot be read as text: No such",
    '{"promt": "x"}': "unknown key 'promt'",
    '{"id": [1], "prompt": "x"}': "id is [1]",
    '{"prompt": "\\ud800"}': "in.jsonl, line 23: half of a surrogate pair ('\\ud800') is not UTF-8",
}


def test_bad_rows_are_named_and_the_others_answered(batch, tiny, given, out):
    good = '{"id": "good", "prompt": "The pass"}'
    given.write_text("\n\n".join([good, *BAD, good]) + "\n")
    result = batch(*LIMIT, "--rows", 1, code=3)
    first, *wrong, last = lines_of(out)
    (answer,) = tiny.generate("The pass", max_tokens=6)
    assert first["answer"] == last["answer"] == answer.text
    assert (first["line"], last["line"], last["id"]) == (1, 2 * len(BAD) + 3, "good")
    for line, message in zip(wrong, BAD.values(), strict=True):
        assert message in line["error"], line
    assert wrong[2]["id"] == 1
    assert "13 rows, 11 with an error" in result.stderr
    again = batch(*LIMIT, "--rows", 1, code=3)
    assert "complete already: 13 rows, 11 with an error" in again.stderr


CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Who?<|end|>"},
    {"role": "assistant", "content": "The pass."},
    {"role": "user", "content": "Why?"},
]


def test_messages_are_laid_out_by_the_chat_template(batch, tiny, out, monkeypatch):
    batch(*LIMIT, rows=[{"id": 1, "messages": CHAT}, {"messages": CHAT[1:2]}])
    for line, messages in zip(lines_of(out), (CHAT, CHAT[1:2]), strict=True):
        row = tiny.tokenizer.encode(tiny.tokenizer.chat(messages), bos=True)
        context = tiny.engine.prefill([row[:-1]], reserve=128, total=[len(row)])
        (answer,) = tiny.ask(context, [row[-1:]], max_tokens=6, keep=False)
        assert line["answer"] == answer.text
        assert line["tokens"] == {"prompt": len(row), "answer": len(answer.tokens)}
    changed = [{**CHAT[0], "content": "Be long."}, *CHAT[1:]]
    rows = [{"id": 1, "messages": changed}, {"messages": CHAT[1:2]}]
    assert "was made with input" in batch(*LIMIT, rows=rows, code=2).stderr
    wrong = {
        "expected a list of objects with role": ["", [], ["Who?"], [{"role": "user"}]],
        "'tool'": [[{"role": "tool", "content": "x"}]],
        "'content': 3": [[{"role": "user", "content": 3}]],
        "the last of messages is not the user's": [CHAT[:3]],
    }
    rows = [{"messages": value} for values in wrong.values() for value in values]
    rows.append({"messages": CHAT, "prompt": "x"})
    batch(*LIMIT, "--overwrite", rows=rows, code=3)
    messages = [said for said, values in wrong.items() for _ in values]
    for line, said in zip(lines_of(out), [*messages, "the row has messages, prompt"], strict=True):
        assert said in line["error"], line
    with monkeypatch.context() as patch:
        patch.setattr(tiny.tokenizer, "_chat", None)
        batch(*LIMIT, "--overwrite", rows=[{"messages": CHAT}, {"prompt": "12"}], code=3)
    without, answered = lines_of(out)
    assert "messages need a chat template, and this checkpoint has none" in without["error"]
    assert "answer" in answered
    # A template may fail on some messages alone.
    chosen = "{% if messages|length == 3 %}{{ 1 // 0 }}{% endif %}"
    template = ChatTemplate(chosen + tiny.tokenizer.chat_template, {})
    monkeypatch.setattr(tiny.tokenizer, "_chat", template)
    chats = [{"messages": CHAT[1:]}, {"messages": CHAT[1:2]}]
    batch(*LIMIT, "--overwrite", rows=chats, code=3)
    failed, answered = lines_of(out)
    assert "the chat template fails: ZeroDivisionError" in failed["error"]
    assert "answer" in answered


BINARY = {
    "a.pdf": (b"%PDF-1.4\ntext", "is a damaged PDF ("),
    "a.docx": (b"PK\x03\x04 [Content_Types].xml", "is a damaged zip archive ("),
    "a.gz": (b"\x1f\x8b\x08", "is a damaged archive ("),
    "a": ("Text".encode("utf-16"), "is UTF-16, not UTF-8 text; convert it first"),
    "b": ("\ufeffText".encode("utf-16-be"), "is UTF-16, not UTF-8 text; convert it first"),
    "c": (b"text \xff", "is not UTF-8 text (byte 5 is 0xff); convert it first"),
}


def test_a_file_that_is_no_text_is_named_for_what_it_is(batch, run, loads, out):
    for name, (content, _) in BINARY.items():
        out.with_name(name).write_bytes(content)
    batch(*LIMIT, rows=[{"file": name, "question": "Who?"} for name in BINARY], code=3)
    for line, (name, (_, said)) in zip(lines_of(out), BINARY.items(), strict=True):
        assert line["error"].startswith(f"{name} {said}"), line
        refused(run("ask", out.with_name(name), "Who?", "-c", "m"), f"{out.with_name(name)} {said}")


def test_a_row_names_several_documents(batch, tiny, out):
    out.with_name("a.html").write_text("<p>One &amp; two")
    out.with_name("b.txt").write_text("Three")
    text = "Document: a.html\n\nOne & two\n\nDocument: b.txt\n\nThree"
    rows = [{"files": ["a.html", "b.txt"]}, {"context": text}, {"file": "a.html"}]
    rows = [{**row, "question": "Who?"} for row in [*rows, {"context": "One & two"}]]
    batch(*LIMIT, rows=[*rows, {"files": [], "question": "Who?"}], code=3)
    both, joined, one, shown, wrong = lines_of(out)
    assert both["answer"] == joined["answer"] != one["answer"] == shown["answer"]
    assert "files is []; expected a list of texts" in wrong["error"]


def test_what_is_left_out_of_a_file_is_told_once(batch, out, caplog):
    with zipfile.ZipFile(out.with_name("a.zip"), "w") as archive:
        archive.writestr("text.txt", "Text")
        archive.writestr("picture.png", b"\x89PNG\0")
    rows = [{"file": name, "question": "Who?"} for name in ("a.zip", "book.txt", "a.zip")]
    batch(*LIMIT, rows=rows)
    assert caplog.text.count("left out of a.zip: 1 that are no text (a.zip/picture.png)") == 1


def test_a_row_that_does_not_fit_is_a_bad_row(batch, tiny, out, monkeypatch):
    monkeypatch.setattr(tiny.engine, "memory_limit", 250_000)
    batch(*LIMIT, rows=[*ROWS, {"id": "long", "prompt": BOOK * 100}], code=3)
    *found, long = lines_of(out)
    assert "a cache of" in long["error"] and long["id"] == "long"
    check_answers(tiny, found, out.parent)


def test_a_run_that_was_killed_at_any_write_goes_on(batch, killed, tmp_path, monkeypatch):
    # Two windows of two batches each.
    monkeypatch.setattr(answering, "WINDOW_BATCHES", 2)
    options, whole = (*LIMIT, "--rows", 1, "--temperature", 1.0), tmp_path / "whole.jsonl"
    batch(*options, rows=[row for row in ROWS if "file" not in row][1:], into=whole)
    computed, compute = [], answering._compute
    monkeypatch.setattr(answering, "_compute", lambda *args: computed.append(1) or compute(*args))
    for count in range(1, 100):
        into = tmp_path / f"{count}.jsonl"
        computed.clear()
        try:
            killed(count, *options, into=into)
            break
        except AssertionError:
            assert not into.exists()
        # What is written again may be damaged.
        partial = into.with_name(f"{into.name}.partial")
        partial.write_bytes(partial.read_bytes().replace(b"answer", b"Answer"))
        batch(*options, into=into)
        assert into.read_bytes() == whole.read_bytes()
        # At most the batch that was being written is computed again.
        assert len(computed) <= 4 + 1
    assert count > 8


def test_a_full_disk_is_named_by_its_file_and_the_run_goes_on(batch, tiny, out):
    batch(*LIMIT, into=out.with_name("first.jsonl"))  # compiles, and writes what is compiled
    for size, name in ((100, "out.jsonl.journal"), (700, "out.jsonl.")):
        with full_disk(size):
            said = batch(*LIMIT, code=2).stderr
        assert name in said and "could not be written: File too large" in said, said
    batch(*LIMIT)
    check_answers(tiny, lines_of(out), out.parent)


def test_links_in_place_of_a_runs_files_are_left_alone(batch, out):
    precious = out.with_name("precious")
    precious.write_text("keep")
    for end in (".partial", ".journal", ".lock"):
        link = out.with_name(out.name + end)
        link.symlink_to(precious)
        batch(*LIMIT, code=2)
        link.unlink()
    assert precious.read_text() == "keep" and not out.exists()
    os.mkfifo(out.with_name("out.jsonl.partial"))
    assert "is a link or no plain file; remove it" in batch(*LIMIT, code=2).stderr


def test_equal_prompts_draw_by_their_line(batch, tiny, tmp_path, monkeypatch):
    def answers(name, rows):
        batch(*DRAWN, "--rows", rows, into=tmp_path / name, rows=[{"prompt": BOOK[:15]}] * 4)
        return [line["answer"] for line in lines_of(tmp_path / name)]

    whole = answers("whole.jsonl", 4)
    assert len(set(whole)) == 4
    with monkeypatch.context() as patch:
        # Two rows of 64 KiB fit, four do not.
        patch.setattr(tiny.engine, "memory_limit", 200_000)
        assert answers("halves.jsonl", 4) == whole
    assert answers("alone.jsonl", 1) == whole
    sampling = Sampling(temperature=1.0, seed=3)
    told = tiny.generate([BOOK[:15]] * 4, sampling=sampling, max_tokens=12)
    assert [answer.text for answer in told] == whole


def test_the_total_length_is_a_prompts_own_and_of_questions_the_contexts(batch, tiny, monkeypatch):
    """As `generate` and `ask` read them: dynamic NTK follows it."""
    totals, prefill = [], tiny.engine.prefill

    def read(contexts, *, questions, total, **options):
        rows = zip(contexts, questions, total, strict=True)
        totals.extend((len(c), len(q), n) for c, q, n in rows)
        return prefill(contexts, questions=questions, total=total, **options)

    monkeypatch.setattr(tiny.engine, "prefill", read)
    batch(*LIMIT, rows=ROWS[:2])
    question, prompt = sorted(totals, key=lambda each: -each[0])
    assert prompt[2] == prompt[0] + prompt[1] and prompt[1] == 1
    assert question[2] == question[0] and question[1] > 1


def test_questions_over_a_text_go_together(batch, run, tiny, book, out, tmp_path, monkeypatch):
    rows = [{"file": "book.txt", "questions": ["Who?"] * 3}] * 2
    rows.append({"file": "book.txt", "questions": ["Why?", "Where is it, and when?"]})
    calls, ask_all = [], tiny.ask_all
    monkeypatch.setattr(
        tiny, "ask_all", lambda *a, **k: calls.append(len(a[1])) or ask_all(*a, **k)
    )
    batch(*DRAWN, "--rows", 1, rows=rows)
    # Those of all rows: the text is read once.
    assert calls == [8]
    first, second, _ = ([answer["answer"] for answer in line["answers"]] for line in lines_of(out))
    assert len({*first, *second}) == 6
    # The questions of `ask` are those of the first line.
    asked = run("ask", book, "Who?", "Who?", "Who?", "--json", "-c", "m", *DRAWN)
    assert [json.loads(line)["answer"] for line in asked.stdout.splitlines()] == first
    calls.clear()
    monkeypatch.setattr(tiny, "together", lambda questions: False)
    batch(*DRAWN, "--rows", 1, into=tmp_path / "two.jsonl")
    assert calls == [] and (tmp_path / "two.jsonl").read_text() == out.read_text()


def test_a_line_beyond_the_trained_length_says_so(batch, tiny, out, monkeypatch):
    monkeypatch.setattr(tiny.engine, "config", dataclasses.replace(tiny.config, max_position=32))
    rows = [{"prompt": "The pass"}, {"prompt": BOOK * 4}, {"context": BOOK * 4, "question": "Who?"}]
    result = batch(*LIMIT, rows=rows)
    short, *others = lines_of(out)
    assert "warning" not in short
    for line in others:
        count = sum(line["tokens"].values())
        assert line["warning"].startswith(f"{count} tokens are more than the 32 that the model was")
    (said,) = [line for line in result.stderr.splitlines() if "warning" in line]
    assert said.startswith("warning: line 2: ")
    assert "dynamic-ntk, free-pages, infllm, reattention" in said


def test_going_on_counts_what_waits_in_the_journal(batch, killed, tmp_path):
    rows = [*({"prompt": "Remember it. " * (1 + n)} for n in range(6)), {"prompt": ""}]
    # The bad row, then four rows, none of which can be written yet.
    killed(6, *LIMIT, "--rows", 1, rows=rows, code=1)
    assert (tmp_path / "out.jsonl.partial").read_text() == ""
    result = batch(*LIMIT, "--rows", 1, code=3)
    assert "going on: 5 of 7 rows were answered" in result.stderr
    assert "2 rows in " in result.stderr and "7 rows, 1 with an error" in result.stderr


def test_files_of_rows_are_confined_to_a_folder(batch, tmp_path, book, out):
    secret, shared = tmp_path / "secret.txt", tmp_path / "shared"
    secret.write_text("a secret")
    shared.mkdir()
    (shared / "book.txt").write_text(book.read_text())
    (shared / "link.txt").symlink_to(secret)
    names = ["shared/book.txt", str(shared / "book.txt"), "secret.txt", "shared/../secret.txt"]
    names += [str(secret), "shared/link.txt"]
    rows = [{"file": name, "question": "Who?"} for name in names]
    batch(*LIMIT, "--files-under", shared, rows=rows, code=3)
    found = lines_of(out)
    assert found[0]["answer"] == found[1]["answer"]
    for name, line in zip(names[2:], found[2:], strict=True):
        assert line["error"] == f"file {name!r} is not under {shared}, as files must be"
    out.unlink()
    # Unconfined, all are read.
    batch(*LIMIT)
    assert all("answer" in line for line in lines_of(out))
    refused = batch("--files-under", tmp_path / "none", into=tmp_path / "x", code=2)
    assert "is no folder" in refused.stderr


FEW = [{"file": "book.txt", "question": "Why?"}, {"prompt": "12"}]
SHORT = ("--max-tokens", 2, "--rows", 1)
# What changes, and what the error names; None where answers stay the same.
CHANGES = [
    ({"rows": FEW[::-1]}, (), "input"),
    ({"text": "Another book. "}, (), "input"),
    ({}, ("--max-tokens", 3), "max_tokens 2, now it is 3"),
    ({}, ("--seed", 1), "sampling.seed 0, now it is 1"),
    ({}, ("--stop", "x"), "stop [], now it is ['x']"),
    ({}, ("--no-chat",), "chat True, now it is False"),
    ({"method": "snapkv"}, (), "method.name 'full', now it is 'snapkv'"),
    ({"weight": 1.0}, (), "all_weights '"),
    ({"tokenizer": "other"}, (), "tokenizer None, now it is 'other'"),
    ({}, ("-c", "model", "--rows", 2, "--chunk", 32, "--offload", "host"), None),
]


@pytest.fixture
def changed(tiny, given, book, monkeypatch):
    base = tiny.engine

    def change(rows=FEW, text=BOOK, method="full", weight=0.0, tokenizer=None):
        write(given, rows)
        book.write_text(text)
        # The last value of an array: the fingerprint is of the first ones.
        scale = base.params["final_norm"]["scale"].at[-1].add(weight)
        params = {**base.params, "final_norm": {"scale": scale}}
        engine = engine_over(base.config, params, small_method(method), base.mesh, chunk=64)
        monkeypatch.setattr(tiny, "engine", engine)
        monkeypatch.setattr(type(tiny), "tokenizer_digest", tokenizer)

    return change


@pytest.mark.parametrize("finished", [True, False])
def test_answers_of_something_else_are_neither_called_complete_nor_continued(
    batch, killed, changed, out, finished
):
    name = out.name if finished else f"{out.name}.journal"
    changed()
    batch(*SHORT) if finished else killed(2, *SHORT, code=1)
    before = {path: path.read_bytes() for path in out.parent.glob("out*")}
    for what, options, named in CHANGES:
        changed(**what)
        said = " ".join(batch(*SHORT, *options, code=0 if named is None else 2).stderr.split())
        if named is None:
            assert ("complete already" if finished else "going on: ") in said
        else:
            assert f"{name} was made with {named}" in said and "--overwrite" in said, said
            assert {path: path.read_bytes() for path in out.parent.glob("out*")} == before
    changed()
    anew = (*SHORT, "--max-tokens", 3, "--overwrite")
    assert "2 rows in " in batch(*anew).stderr
    assert [line["tokens"]["answer"] for line in lines_of(out)] == [3, 3]
    # The same command goes on with what it began.
    assert "complete already" in batch(*anew).stderr


def test_an_output_that_was_changed_or_has_no_origin_is_not_called_complete(batch, out):
    def refused(said):
        assert said in batch(*SHORT, code=2).stderr.replace("\n", " ")

    batch(*SHORT, rows=FEW)
    origin, text = out.with_name("out.jsonl.origin"), out.read_text()
    out.write_text(text.replace('"finish"', '"finisH"', 1))
    refused("was changed after it was written")
    out.write_text(text)
    # A run that ended before its first result leaves it.
    out.with_name("out.jsonl.partial").touch()
    assert "complete already" in batch(*SHORT).stderr
    assert "was made with max_tokens" in batch(*SHORT, "--max-tokens", 5, code=2).stderr
    for damage in (origin.read_text().replace("sha", "shA"), "[" * 100_000):
        origin.write_text(damage)
        refused("--overwrite")
    for other in (lambda: None, lambda: os.mkfifo(origin)):
        origin.unlink(missing_ok=True)
        other()
        refused("--overwrite")
    # A journal of the version before this one.
    out.rename(out.with_name("out.jsonl.partial"))
    out.with_name("out.jsonl.journal").write_text('{"format": 3, "given": {}}\n')
    refused("has format 3, expected 4: another version or program wrote it")
    out.with_name("out.jsonl.journal").unlink()
    refused("out.jsonl.partial is there without its out.jsonl.journal; remove out.jsonl.partial")
    batch(*SHORT, "--overwrite")
    assert out.read_text() == text


def test_an_input_that_changes_while_it_is_answered_is_an_error(batch, book, out, monkeypatch):
    compute = answering._compute
    monkeypatch.setattr(
        answering, "_compute", lambda *args: book.write_text("Another. ") and compute(*args)
    )
    assert "changed while it was read" in batch(*SHORT, rows=FEW, code=2).stderr.replace("\n", " ")
    assert not out.exists()


@pytest.fixture
def computed(monkeypatch):
    """Numbers of the rows that are computed, in the order of their batches."""
    rows, compute = [], answering._compute

    def counting(model, options, work):
        rows.extend(row for part in work["parts"] for row, _ in part["places"])
        return compute(model, options, work)

    monkeypatch.setattr(answering, "_compute", counting)
    return rows


MENDED = [
    *({"prompt": "The pass key is " + "1" * n} for n in range(3)),
    {"file": "late.txt", "questions": ["Who?", "Why?"]},
    {"prompt": "Remember"},
    {"messages": [{"role": "user", "content": "Who?"}]},
]
# Of the file that is not there yet, and of a row that is no object.
FAULTY = [*MENDED[:3], MENDED[3], ["Remember"], MENDED[5]]


@pytest.mark.parametrize("died", [None, 6])
def test_rows_with_errors_are_tried_again_and_the_others_stay(
    batch, killed, out, monkeypatch, computed, died
):
    monkeypatch.setattr(answering, "WINDOW_BATCHES", 2)
    options, again = ("--max-tokens", 2, "--rows", 1), ("--retry-errors",)
    late, whole = out.with_name("late.txt"), out.with_name("whole.jsonl")
    late.write_text(BOOK)
    batch(*options, rows=MENDED, into=whole)
    late.unlink()
    if died is None:
        batch(*options, rows=FAULTY, code=3)
        assert ["error" in line for line in lines_of(out)] == [False] * 3 + [True] * 2 + [False]
        assert "or try these rows with --retry-errors" in batch(*options, code=3).stderr
    else:
        killed(died, *options, rows=FAULTY, code=1)
    late.write_text(BOOK)
    # Without the option the input must be the same; with it, what was answered.
    assert "made with input" in batch(*options, rows=MENDED, code=2).stderr.replace("\n", " ")
    other = batch(*options, *again, rows=[{"prompt": "x"}, *MENDED[1:]], code=2)
    assert "rows with an error alone may change" in " ".join(other.stderr.split())
    computed.clear()
    said = batch(*options, *again, rows=MENDED).stderr
    assert out.read_bytes() == whole.read_bytes()
    assert set(computed) == {3, 4} if died is None else set(computed) >= {3, 4}
    assert "2 rows in " in said or died
    assert not list(out.parent.glob("*.partial")) + list(out.parent.glob("*.journal"))
    computed.clear()
    assert "complete already: 6 rows, 0 with an error" in batch(*options, *again).stderr
    assert "complete already" in batch(*options).stderr and computed == []


def test_what_stays_is_counted_once_and_names_its_line(batch, killed, given, out):
    options = ("--max-tokens", 2, "--rows", 1)
    batch(*options, rows=[{"prompt": "1"}, {"prompt": "2"}, [3], {"prompt": "4"}], code=3)
    kept = lines_of(out)
    given.write_text('\n{"prompt": "1"}\n\n{"prompt": "2"}\n{"prompt": "3"}\n{"prompt": "4"}\n')
    # It dies before a batch ends; the first two rows are in the partial file.
    killed(2, *options, "--retry-errors", code=1)
    assert len(lines_of(out.with_name("out.jsonl.partial"))) == 2
    said = batch(*options, "--retry-errors").stderr
    assert "going on: 3 of 4 rows were answered" in said and "1 rows in " in said
    found = lines_of(out)
    assert [line.pop("line") for line in found] == [2, 4, 5, 6]
    assert [line.pop("line") for line in kept] == [1, 2, 3, 4]
    assert [*found[:2], found[3]] == [*kept[:2], kept[3]]


@pytest.mark.slow
def test_a_second_try_that_was_killed_at_any_write_goes_on(
    batch, killed, out, tiny, monkeypatch, computed
):
    monkeypatch.setattr(answering, "WINDOW_BATCHES", 2)
    options = ("--max-tokens", 2, "--rows", 1, "--retry-errors")
    rows = [{"prompt": text} for text in (BOOK * 40, "12", "The pass", BOOK * 41, "", BOOK * 40)]
    with monkeypatch.context() as patch:
        patch.setattr(tiny.engine, "memory_limit", 100_000)
        batch(*options, rows=rows, code=3)
    first = {path: path.read_bytes() for path in out.parent.glob("out*")}
    assert ["error" in line for line in lines_of(out)] == [True, False, False, True, True, True]
    whole = out.with_name("whole.jsonl")
    batch(*options, into=whole, code=3)
    for count in range(1, 100):
        for path, content in first.items():
            path.write_bytes(content)
        try:
            killed(count, *options, code=3)
            break
        except AssertionError:
            assert out.read_bytes() == first[out]
        computed.clear()
        # What was begun goes on without the option, too.
        batch(*options[:4], code=3)
        assert out.read_bytes() == whole.read_bytes() and set(computed) <= {0, 3, 5}
    assert count > 6
    # Between its last steps: the origin is written, the output is not.
    for path, content in first.items():
        path.write_bytes(content)
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", lambda old, new: replace(old, new) if new != out else 1 / 0)
        with pytest.raises(ZeroDivisionError):
            raise batch(*options, code=1).exception
    batch(*options[:4], code=3)
    assert out.read_bytes() == whole.read_bytes()
    # And an output that another put in place of the one that is tried again.
    killed(3, *options, code=1, into=whole)
    whole.write_text("")
    assert "is not the one that" in " ".join(batch(*options, into=whole, code=2).stderr.split())


def test_parquet_and_addresses_are_read_as_json_lines(batch, run, loads, given, book, out):
    columns = dict.fromkeys(["id", *(key for row in ROWS for key in row)])
    rows = [{**row, "id": f"{number}"} for number, row in enumerate(ROWS)]
    # An address has no folder that files are relative to.
    rows[2]["file"] = str(book)
    batch(*LIMIT, rows=[{key: row[key] for key in columns if key in row} for row in rows])
    whole = [out.with_name(f"out.jsonl{end}").read_bytes() for end in ("", ".origin")]
    parquet, into = given.with_name("in.parquet"), out.with_name("other")
    table = pyarrow.Table.from_pylist([columns | row for row in rows])
    pyarrow.parquet.write_table(table, parquet, row_group_size=4)
    for source in (parquet, parquet.as_uri(), given.as_uri()):
        run("batch", source, into, "-c", "m", *LIMIT, "--overwrite")
        assert [out.with_name(f"other{end}").read_bytes() for end in ("", ".origin")] == whole
        out.with_name("other").unlink()
    # JSON has no times.
    table = pyarrow.table({"id": [datetime.date(2026, 1, 2)] * 2, "prompt": ["a", "b"]})
    pyarrow.parquet.write_table(table, parquet)
    run("batch", parquet, into, "-c", "m", *LIMIT, code=3)
    assert "id is {'date': '2026-01-02'}; expected text" in into.read_text()
    parquet.write_bytes(given.read_bytes())
    refused(run("batch", parquet, into, "-c", "m", code=2), "give JSON lines, or Parquet as")
    loads.clear()
    for source in ("what://x/y", out.with_name("none").as_uri()):
        refused(run("batch", source, into, "-c", "m", code=2), "an address that your credentials")
    assert loads == []


@pytest.mark.slow
def test_scattered_rows_of_one_text_read_it_once(batch, killed, run, tiny, out, monkeypatch):
    """60 rows of 6 texts, and one of another, are 7 readings, also over a kill."""
    read, prefill = [], tiny.engine.prefill
    monkeypatch.setattr(
        tiny.engine, "prefill", lambda *a, **k: read.extend(a[0]) or prefill(*a, **k)
    )
    rows = [
        {"id": n, "context": f"Text {n % 6}. {BOOK}", "question": f"Is it {n}?"} for n in range(60)
    ]
    rows = [{"prompt": "12"}, *random.Random(0).sample(rows, 60)]
    options = ("--max-tokens", 2, "--rows", 1)
    batch(*options, rows=rows)
    assert len(read) == 7 and [line.get("id") for line in lines_of(out)] == [
        r.get("id") for r in rows
    ]
    scattered = out.read_bytes()
    found = {line["id"]: line["answer"] for line in lines_of(out)[1:]}
    # All rows of the first text wait for the others, and none is answered again.
    killed(5, *options, "--overwrite", into=out.with_name("killed"), code=1)
    read.clear()
    said = batch(*options, into=out.with_name("killed")).stderr
    assert (
        "going on: " in said and len(read) < 7 and out.with_name("killed").read_bytes() == scattered
    )
    read.clear()
    # Parquet is read as it stands; with other rows beside them all answers are the same.
    columns = dict.fromkeys(["id", "prompt", "context", "question"])
    table = pyarrow.Table.from_pylist([columns | row for row in rows])
    pyarrow.parquet.write_table(table, out.with_name("in.parquet"))
    run("batch", out.with_name("in.parquet"), out.with_name("other"), "-c", "m", *options)
    assert len(read) > 12 and out.with_name("other").read_bytes() == scattered
    batch(
        *options, "--overwrite", rows=sorted(rows[1:], key=lambda row: (row["context"], row["id"]))
    )
    assert {line["id"]: line["answer"] for line in lines_of(out)} == found


def test_no_input_and_an_output_that_is_a_folder_are_refused(batch, loads, given, out):
    given.unlink()
    before = sorted(out.parent.iterdir())
    assert "No such file or directory; give a file" in batch(code=2).stderr
    given.mkdir()
    assert "is a folder; give a file" in batch(code=2).stderr
    given.rmdir()
    os.mkfifo(given)
    assert "it is a FIFO, a socket or a device; give a" in batch(code=2).stderr
    given.unlink()
    assert "/dev/null is a device, a FIFO" in batch(rows=ROWS[:1], into="/dev/null", code=2).stderr
    assert "is a folder; name a file" in batch(rows=ROWS[:1], into=out.parent, code=2).stderr
    assert loads == []
    assert "holds no rows" in batch(rows=[], code=2).stderr
    assert sorted(out.parent.iterdir()) == sorted([*before, given])
