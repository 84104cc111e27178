"""`batch`: what one row at a time gives, in order, with bad rows named; and again after a kill."""

import dataclasses
import json
import os

import pytest

from jax_longctx.batch import BatchOptions, compile_first
from jax_longctx.batch import lines as lines_module
from jax_longctx.engine import Engine, Sampling
from jax_longctx.locks import only_writer
from jax_longctx.methods import make_method
from tests.small_methods import small_method

BOOK = "The pass key is 12345. Remember it. "
ROWS = [
    {"id": "a", "prompt": "The pass key is"},
    {"id": 7, "context": BOOK * 5, "question": "Who?"},
    {"file": "book.txt", "questions": ["Why?", "What is the pass key?"]},
    {"prompt": "Remember it. " * 9},
    {"id": "b", "context": BOOK, "questions": ["Where?"]},
    {"prompt": "12"},
]
LIMIT = ("--rows", 4, "--max-tokens", 6)


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def given(tmp_path, book):
    """The input, beside the book that it names."""
    return write(tmp_path / "in.jsonl", ROWS)


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


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
        (answer,) = tiny.ask_tokens(read, [question], max_tokens=6, keep=False)
        found.append(answer.text)
    return found


def check_answers(tiny, found, folder):
    """Lines of the output are what the rows of the input are answered alone."""
    for row, line in zip(ROWS, found, strict=True):
        answers = line["answers"] if "questions" in row else [line]
        assert [answer["answer"] for answer in answers] == alone(tiny, row, folder)
        assert all(answer["tokens"]["answer"] <= 6 for answer in answers)


@pytest.mark.parametrize("method", ["full", pytest.param("citrus", marks=pytest.mark.thorough)])
def test_every_row_as_it_is_answered_alone(
    run, loads, tiny, given, tmp_path, book, method, monkeypatch
):
    base = tiny.engine
    engine = Engine(base.config, base.params, small_method(method), base.mesh, chunk=64)
    monkeypatch.setattr(tiny, "engine", engine)
    out = tmp_path / "out.jsonl"
    result = run("batch", given, out, "-c", "m", *LIMIT)
    assert result.exit_code == 0, result.output
    assert result.stdout == "" and "6 rows" in result.stderr and "tokens/s" in result.stderr
    found = lines_of(out)
    assert [line["line"] for line in found] == [1, 2, 3, 4, 5, 6]
    assert [line.get("id") for line in found] == ["a", 7, None, None, "b", None]
    check_answers(tiny, found, tmp_path)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("out.jsonl.")]


def test_bad_rows_are_named_and_the_others_answered(run, loads, tiny, tmp_path):
    given = tmp_path / "in.jsonl"
    bad = {
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
        '{"prompt": "\\ud800"}': "not UTF-8",
    }
    good = '{"id": "good", "prompt": "The pass"}'
    given.write_text("\n\n".join([good, *bad, good]) + "\n")
    out = tmp_path / "out.jsonl"
    command = ("batch", given, out, "-c", "m", *LIMIT, "--rows", 1)
    result = run(*command)
    assert result.exit_code == 3, result.output
    first, *wrong, last = lines_of(out)
    (answer,) = tiny.generate("The pass", max_tokens=6)
    assert first["answer"] == last["answer"] == answer.text
    assert (first["line"], last["line"], last["id"]) == (1, 2 * len(bad) + 3, "good")
    for line, message in zip(wrong, bad.values(), strict=True):
        assert message in line["error"], line
    assert wrong[2]["id"] == 1
    assert "13 rows, 11 with an error" in result.stderr
    again = run(*command)
    assert again.exit_code == 3
    assert "complete already: 13 rows, 11 with an error" in again.stderr


def test_a_row_that_does_not_fit_is_a_bad_row(run, loads, tiny, given, tmp_path, book, monkeypatch):
    monkeypatch.setattr(tiny.engine, "memory_limit", 250_000)
    rows = [*ROWS, {"id": "long", "prompt": BOOK * 100}]
    out = tmp_path / "out.jsonl"
    assert run("batch", write(given, rows), out, "-c", "m", *LIMIT).exit_code == 3
    found = lines_of(out)
    assert "a cache of" in found[-1]["error"] and found[-1]["id"] == "long"
    check_answers(tiny, found[:-1], tmp_path)


def killed_at(monkeypatch, count):
    """The process dies at its `count`-th write to the disk, half of the bytes written."""
    append, left = lines_module.append, [count]

    def dying(file, lines):
        left[0] -= 1
        if left[0]:
            return append(file, lines)
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        os.write(file.fileno(), text.encode()[: len(text) // 2])
        raise SystemError("killed")

    monkeypatch.setattr(lines_module, "append", dying)


def test_a_run_that_was_killed_at_any_write_goes_on(run, loads, tiny, given, tmp_path, monkeypatch):
    import jax_longctx.batch.run as module

    # Two windows of two batches each.
    monkeypatch.setattr(module, "WINDOW_BATCHES", 2)
    given = write(given, [row for row in ROWS if "file" not in row][1:])
    options = ("-c", "m", *LIMIT, "--rows", 1, "--temperature", 1.0)
    whole = tmp_path / "whole.jsonl"
    assert run("batch", given, whole, *options).exit_code == 0
    computed = []
    compute = module._compute
    monkeypatch.setattr(module, "_compute", lambda *args: computed.append(1) or compute(*args))
    writes = 0
    for count in range(1, 100):
        out = tmp_path / f"{count}.jsonl"
        computed.clear()
        with monkeypatch.context() as patch:
            killed_at(patch, count)
            result = run("batch", given, out, *options)
        if result.exit_code == 0:
            break
        writes += 1
        assert not out.exists()
        assert run("batch", given, out, *options).exit_code == 0
        assert out.read_bytes() == whole.read_bytes()
        # At most the batch that was being written is computed again.
        assert len(computed) <= 4 + 1
    assert writes >= 8


@pytest.mark.slow
def test_a_run_that_was_killed_goes_on_offloaded(run, loads, tiny, given, tmp_path, monkeypatch):
    """Contexts on the device or in the host's memory: the same bytes, whoever began."""
    given = write(given, [row for row in ROWS if "file" not in row][1:])
    options = ("-c", "m", *LIMIT, "--rows", 2, "--chunk", 64)
    quest, places = make_method("quest", {"budget": 32, "local": 16}), []
    for place in (None, "host"):
        old = tiny.engine
        how = {"chunk": old.chunk, "offload": place}
        monkeypatch.setattr(tiny, "engine", Engine(old.config, old.params, quest, old.mesh, **how))
        places.append(tiny.engine)
    outs = []
    for begins in (0, 1):
        out = tmp_path / f"{begins}.jsonl"
        monkeypatch.setattr(tiny, "engine", places[begins])
        with monkeypatch.context() as patch:
            killed_at(patch, 3)
            assert run("batch", given, out, *options).exit_code != 0
        monkeypatch.setattr(tiny, "engine", places[1 - begins])
        assert run("batch", given, out, *options).exit_code == 0
        outs.append(out.read_bytes())
    assert outs[0] == outs[1]


def test_equal_prompts_draw_by_their_line(run, loads, tiny, tmp_path, monkeypatch):
    """In one batch, in halves for want of memory, alone, and from the library."""
    given = write(tmp_path / "in.jsonl", [{"prompt": "The pass key is"}] * 4)
    options = ("-c", "m", "--max-tokens", 12, "--temperature", 1.0, "--seed", 3)

    def answers(name, rows):
        out = tmp_path / name
        result = run("batch", given, out, *options, "--rows", rows)
        assert result.exit_code == 0, result.output
        return [line["answer"] for line in lines_of(out)]

    whole = answers("whole.jsonl", 4)
    assert len(set(whole)) == 4
    with monkeypatch.context() as patch:
        # Two rows of 64 KiB fit, four do not.
        patch.setattr(tiny.engine, "memory_limit", 200_000)
        assert answers("halves.jsonl", 4) == whole
    assert answers("alone.jsonl", 1) == whole
    sampling = Sampling(temperature=1.0, seed=3)
    told = tiny.generate(["The pass key is"] * 4, sampling=sampling, max_tokens=12)
    assert [answer.text for answer in told] == whole


def test_the_total_length_is_a_prompts_own_and_of_questions_the_contexts(
    run, loads, tiny, given, tmp_path, monkeypatch
):
    """As `generate` and `ask` read them: dynamic NTK follows it."""
    totals, prefill = [], tiny.engine.prefill

    def read(contexts, *, questions, total, **options):
        rows = zip(contexts, questions, total, strict=True)
        totals.extend((len(c), len(q), n) for c, q, n in rows)
        return prefill(contexts, questions=questions, total=total, **options)

    monkeypatch.setattr(tiny.engine, "prefill", read)
    write(given, [ROWS[0], ROWS[1]])
    assert run("batch", given, tmp_path / "out.jsonl", "-c", "m", *LIMIT).exit_code == 0
    question, prompt = sorted(totals, key=lambda each: -each[0])
    assert prompt[2] == prompt[0] + prompt[1] and prompt[1] == 1
    assert question[2] == question[0] and question[1] > 1


def test_questions_over_a_text_of_its_own_batch_are_answered_together(
    run, loads, tiny, tmp_path, book, monkeypatch
):
    """They draw by their line and number, together or one by one."""
    rows = [{"file": "book.txt", "questions": ["Who?"] * 3}] * 2
    rows.append({"file": "book.txt", "questions": ["Why?", "Where is it, and when?"]})
    given = write(tmp_path / "in.jsonl", rows)
    options = ("-c", "m", "--max-tokens", 12, "--temperature", 1.0, "--seed", 3)
    calls, ask_all = [], tiny.ask_all_tokens
    monkeypatch.setattr(
        tiny, "ask_all_tokens", lambda *a, **k: calls.append(len(a[1])) or ask_all(*a, **k)
    )
    one, two = tmp_path / "one.jsonl", tmp_path / "two.jsonl"
    assert run("batch", given, one, *options, "--rows", 1).exit_code == 0
    assert sorted(calls) == [2, 3, 3]
    first, second, _ = ([answer["answer"] for answer in line["answers"]] for line in lines_of(one))
    assert len({*first, *second}) == 6
    # The questions of `ask` are those of the first line.
    asked = run("ask", book, "Who?", "Who?", "Who?", "--json", *options)
    assert [json.loads(line)["answer"] for line in asked.stdout.splitlines()] == first
    calls.clear()
    monkeypatch.setattr(tiny, "together", lambda questions: False)
    assert run("batch", given, two, *options, "--rows", 1).exit_code == 0
    assert calls == [] and two.read_text() == one.read_text()


def test_a_line_beyond_the_trained_length_says_so(run, loads, tiny, tmp_path, monkeypatch):
    config = dataclasses.replace(tiny.config, max_position=32)
    monkeypatch.setattr(tiny.engine, "config", config)
    rows = [{"prompt": "The pass"}, {"prompt": BOOK * 4}, {"context": BOOK * 4, "question": "Who?"}]
    out = tmp_path / "out.jsonl"
    result = run("batch", write(tmp_path / "in.jsonl", rows), out, "-c", "m", *LIMIT)
    assert result.exit_code == 0, result.output
    short, *others = lines_of(out)
    assert "warning" not in short
    for line in others:
        count = sum(line["tokens"].values())
        assert line["warning"].startswith(f"{count} tokens are more than the 32 that the model was")
    (said,) = [line for line in result.stderr.splitlines() if "warning" in line]
    assert said.startswith("warning: line 2: ")
    assert "dynamic-ntk, free-pages, infllm, reattention" in said


def test_going_on_counts_what_waits_in_the_journal(run, loads, tiny, tmp_path, monkeypatch):
    """Long rows are computed first; the first row of the file is the shortest, the last is bad."""
    rows = [{"prompt": "Remember it. " * (1 + n)} for n in range(6)]
    given = write(tmp_path / "in.jsonl", [*rows, {"prompt": ""}])
    out = tmp_path / "out.jsonl"
    command = ("batch", given, out, "-c", "m", *LIMIT, "--rows", 1)
    with monkeypatch.context() as patch:
        # The journal's header, then four rows, none of which can be written yet.
        killed_at(patch, 6)
        assert run(*command).exit_code == 1
    assert (tmp_path / "out.jsonl.partial").read_text() == ""
    result = run(*command)
    assert result.exit_code == 3
    assert "going on: 4 of 7 rows were answered" in result.stderr
    assert "3 rows in " in result.stderr and "7 rows, 1 with an error" in result.stderr


def test_files_of_rows_are_confined_to_a_folder(run, loads, tiny, tmp_path, book):
    secret = tmp_path / "secret.txt"
    secret.write_text("a secret")
    shared = tmp_path / "shared"
    shared.mkdir()
    (shared / "book.txt").write_text(book.read_text())
    (shared / "link.txt").symlink_to(secret)
    names = ["shared/book.txt", str(shared / "book.txt"), "secret.txt", "shared/../secret.txt"]
    names += [str(secret), "shared/link.txt"]
    rows = [{"file": name, "question": "Who?"} for name in names]
    given, out = write(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    command = ("batch", given, out, "-c", "m", *LIMIT)
    result = run(*command, "--files-under", shared)
    assert result.exit_code == 3, result.output
    found = lines_of(out)
    assert found[0]["answer"] == found[1]["answer"]
    for name, line in zip(names[2:], found[2:], strict=True):
        assert line["error"] == f"file {name!r} is not under {shared}, as files must be"
    out.unlink()
    # Unconfined, all are read.
    assert run(*command).exit_code == 0, out.read_text()
    assert all("answer" in line for line in lines_of(out))
    refused = run("batch", given, tmp_path / "x", "-c", "m", "--files-under", tmp_path / "none")
    assert refused.exit_code == 2 and "is no folder" in refused.stderr


def test_other_runs_into_one_output_are_refused_and_a_finished_one_is_left_alone(
    run, loads, given, tmp_path, monkeypatch
):
    out = tmp_path / "out.jsonl"
    command = ("batch", given, out, "-c", "m", *LIMIT)

    def refused(*more):
        result = run(*command, *more)
        assert result.exit_code == 2, result.output
        return " ".join(result.stderr.split())

    with only_writer(out):
        assert refused().endswith(
            f"error: another process is writing {out}; wait for it, or choose another name"
        )
    assert sorted(tmp_path.glob("out*")) == []
    with monkeypatch.context() as patch:
        killed_at(patch, 2)
        assert run(*command).exit_code == 1
    assert "was begun with max_tokens 6, now it is 7" in refused("--max-tokens", 7)
    write(given, ROWS[1:])
    assert "was begun with input" in refused()
    write(given, ROWS)
    assert run(*command).exit_code == 0
    before = out.read_bytes()
    again = run(*command)
    assert again.exit_code == 0 and "complete already" in again.stderr
    assert out.read_bytes() == before
    write(given, ROWS[1:])
    assert "is not of this input" in refused()


def test_damage_between_two_runs_is_refused_or_computed_again(
    run, loads, given, tmp_path, monkeypatch
):
    """A changed byte, a lost end, and lost files, of both files that a killed run leaves."""
    whole, out = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    options = ("-c", "m", *LIMIT, "--rows", 2)
    assert run("batch", given, whole, *options).exit_code == 0
    with monkeypatch.context() as patch:
        # The last of three batches is answered; its rows are not written.
        killed_at(patch, 8)
        assert run("batch", given, out, *options).exit_code == 1
    files = [tmp_path / f"out.jsonl.{suffix}" for suffix in ("journal", "partial")]
    content = {path: path.read_bytes() for path in files}
    assert all(text.count(b"\n") >= 2 for text in content.values())
    refused = 0
    for path, text in content.items():
        places = [0, len(text) // 3, text.index(b"\n"), len(text) - 1]
        changed = [text[:at] + bytes([text[at] ^ 1]) + text[at + 1 :] for at in places]
        # Still JSON, and still an answer.
        changed.append(text.replace(b'"length"', b'"lengtH"', 1))
        assert changed[-1] != text
        for damaged in [*changed, text[: len(text) // 2], b"", b"[]\n", None]:
            for other, kept in content.items():
                other.write_bytes(kept)
            path.unlink()
            if damaged is not None:
                path.write_bytes(damaged)
            result = run("batch", given, out, *options)
            if result.exit_code == 0:
                assert out.read_bytes() == whole.read_bytes()
                out.unlink()
            else:
                assert result.exit_code == 2 and "begin anew" in result.stderr, result.stderr
                assert str(path.name) in result.stderr.replace("\n", "")
                refused += 1
    # Not those behind the last whole line, nor a lost end of the journal.
    assert refused >= 14


def test_no_input_and_an_output_that_is_a_folder_are_refused(run, loads, tmp_path):
    given = tmp_path / "in.jsonl"
    for text, out, message in [
        (None, "out.jsonl", "does not exist"),
        (json.dumps(ROWS[0]), ".", "is a folder; name a file"),
        ("", "out.jsonl", "holds no rows"),
    ]:
        if text is not None:
            given.write_text(text)
        result = run("batch", given, tmp_path / out, "-c", "m")
        assert result.exit_code == 2 and message in result.stderr
        assert list(tmp_path.iterdir()) == ([given] if text is not None else [])
        assert loads == [] or text == ""


def test_nothing_is_compiled_for_a_run_that_was_begun_or_does_not_fit(tiny, given, monkeypatch):
    options, out = BatchOptions(rows=4, max_tokens=6), given.parent / "out.jsonl"
    assert len(compile_first(tiny, given, out, options)) > 3
    for end in ("", ".partial", ".journal"):
        begun = out.with_name(out.name + end)
        begun.touch()
        assert compile_first(tiny, given, out, options) is None
        begun.unlink()
    monkeypatch.setattr(tiny.engine, "memory_limit", 1000)
    assert compile_first(tiny, given, out, options) is None
    assert sorted(path.name for path in given.parent.iterdir()) == ["book.txt", "in.jsonl"]
