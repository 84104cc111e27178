"""`ask`: what reaches the model, what is shown, and what is refused."""

import dataclasses
import json
import resource
import shutil
import signal
import sys
from unittest.mock import create_autospec

import pytest

import jax_longctx
from jax_longctx.cli.ask import Request
from jax_longctx.errors import InputError
from jax_longctx.text import chat_layout, plain_layout


def expected(tiny, layout, document, question, **options):
    context = tiny.prefill(layout.context(document))
    (answer,) = tiny.ask(context, layout.question(question), **options)
    return answer


def assert_refused(result, message):
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


def test_chat_template_is_used_where_there_is_one(run, loads, tiny, book):
    result = run("ask", book, "Who?", "-c", "model", "--max-tokens", 12)
    answer = expected(tiny, chat_layout(tiny.tokenizer), book.read_text(), "Who?", max_tokens=12)
    assert result.exit_code == 0, result.output
    assert result.stdout == answer.text + "\n"
    assert len(answer.tokens) == 12


def test_no_chat_and_completion(run, loads, tiny, book):
    text = book.read_text()
    result = run("ask", book, "Who?", "-c", "m", "--no-chat", "--max-tokens", 9)
    answer = expected(tiny, plain_layout(), text, "Who?", max_tokens=9)
    assert result.stdout == answer.text + "\n"
    result = run("ask", book, "--completion", "The pass key is", "-c", "m", "--max-tokens", 9)
    answer = expected(tiny, plain_layout(stem=True), text, "The pass key is", max_tokens=9)
    assert result.stdout == answer.text + "\n"


def test_many_questions_over_one_reading(run, loads, tiny, book, monkeypatch):
    read = []
    prefill = tiny.prefill
    monkeypatch.setattr(tiny, "prefill", lambda *a, **k: read.append(1) or prefill(*a, **k))
    result = run("ask", book, "Who?", "Why?", "Who?", "-c", "m", "--max-tokens", 8, "--json")
    records = [json.loads(line) for line in result.stdout.splitlines()]
    assert [record["question"] for record in records] == ["Who?", "Why?", "Who?"]
    assert records[0]["answer"] == records[2]["answer"] != records[1]["answer"]
    assert len(read) == 1


def test_many_questions_are_shown_in_their_order(run, loads, tiny, book):
    layout, text = chat_layout(tiny.tokenizer), book.read_text()
    sampling = jax_longctx.Sampling(temperature=0.9, seed=3)
    answers = [
        expected(
            tiny, layout, text, question, max_tokens=11, sampling=sampling.at([(0, number)])
        ).text
        for number, question in enumerate(["Who?", "Why?"])
    ]
    given = ("-c", "m", "--max-tokens", 11, "--temperature", 0.9, "--seed", 3)
    result = run("ask", book, "Who?", "Why?", *given)
    assert result.exit_code == 0, result.output
    assert result.stdout == "".join(answer + "\n" for answer in answers)
    assert "> Who?" in result.stderr and "> Why?" in result.stderr
    assert result.stderr.count("first token") == 2 and result.stderr.count("read in") == 1


def test_json_record(run, loads, tiny, book):
    result = run("ask", book, "Who?", "-c", "m", "--max-tokens", 8, "--json", "--seed", 5)
    layout = chat_layout(tiny.tokenizer)
    answer = expected(tiny, layout, book.read_text(), "Who?", max_tokens=8)
    (line,) = result.stdout.splitlines()
    record = json.loads(line)
    assert record["answer"] == answer.text
    assert record["finish"] == answer.finish
    context = tiny.tokenizer.encode(layout.context(book.read_text()), bos=True)
    question = tiny.tokenizer.encode(layout.question("Who?"))
    assert record["tokens"] == {"context": len(context), "question": len(question), "answer": 8}
    assert record["seconds"]["prefill"] > 0 and record["seconds"]["first_token"] > 0
    # Two layers, two kv heads of 8 numbers, keys and values, four bytes: at least that.
    assert record["memory"]["cache_bytes"] >= len(context) * 2 * 2 * 8 * 2 * 4
    assert record["memory"]["peak_bytes"] > 10**7
    assert record["method"] in run("methods").stdout
    assert record["sampling"]["seed"] == 5
    assert set(record["versions"]) == {"jax_longctx", "jax", "python"}


def test_closing_note_on_stderr(run, loads, book):
    result = run("ask", book, "Who?", "-c", "m", "--max-tokens", 8)
    for part in ("context ", " tokens/s", " s after the question; ", "cache ", "peak memory"):
        assert part in result.stderr


def test_stdin_is_a_document(run, loads, book):
    from_file = run("ask", book, "Who?", "-c", "m", "--max-tokens", 8)
    from_stdin = run("ask", "-", "Who?", "-c", "m", "--max-tokens", 8, stdin=book.read_bytes())
    assert from_stdin.stdout == from_file.stdout


def test_stop_cuts_the_answer(run, loads, book):
    whole = run("ask", book, "Who?", "-c", "m", "--max-tokens", 16).stdout
    stop = whole[3:5]
    cut = run("ask", book, "Who?", "-c", "m", "--max-tokens", 16, "--stop", stop).stdout
    assert cut == whole[: whole.index(stop)] + "\n"


def test_save_and_load_give_the_same_answer(run, loads, book, tmp_path):
    folder = tmp_path / "read"
    common = ("-c", "m", "--max-tokens", 10)
    first = run("ask", book, "Who?", *common, "--save-context", folder)
    again = run("ask", "Who?", *common, "--load-context", folder)
    assert first.exit_code == again.exit_code == 0, first.output + again.output
    assert again.stdout == first.stdout
    refused = run("ask", "Who?", *common, "--load-context", folder, "--no-chat")
    assert_refused(refused, "was read in the chat template")
    assert_refused(run("ask", book, "Who?", *common, "--save-context", folder), "exists")


# The tests' own compile cache may want to grow meanwhile.
@pytest.mark.filterwarnings("ignore:Error writing persistent compilation cache entry")
def test_a_full_disk_below_a_context_is_one_line_after_the_answer(
    run, loads, book, tmp_path, caplog, monkeypatch
):
    common = ("ask", book, "Who?", "-c", "m", "--max-tokens", 10)
    answer = run(*common).stdout
    # Python would keep a module's bytecode cut off, and never be able to import it again.
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2_000, before[1]))
    try:
        result = run(*common, "--save-context", tmp_path / "read")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert (result.exit_code, result.stdout) == (2, answer), result.output
    error = result.stderr.splitlines()[-1]
    assert error == f"error: {tmp_path / 'read'} could not be written: File too large"
    assert result.stderr.count("error") == 1
    assert caplog.text == ""
    assert list(tmp_path.iterdir()) == [book]


def test_a_context_that_cannot_be_kept_is_refused_before_the_text_is_read(
    run, loads, tiny, book, tmp_path, monkeypatch
):
    prefill = create_autospec(tiny.prefill)
    monkeypatch.setattr(tiny, "prefill", prefill)
    common = ("ask", book, "Who?", "-c", "m", "--save-context")
    assert_refused(run(*common, "/proc/none/read"), "nothing can be written to the folder")
    assert loads == []
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    assert_refused(run(*common, tmp_path / "read"), "free; free some, or name another")
    assert not prefill.called


def test_saved_plain_text_is_asked_as_one(run, loads, book, tmp_path):
    folder = tmp_path / "read"
    common = ("-c", "m", "--max-tokens", 10, "--completion", "The pass key is")
    first = run("ask", book, *common, "--save-context", folder)
    again = run("ask", *common, "--load-context", folder)
    assert first.exit_code == again.exit_code == 0, first.output + again.output
    assert again.stdout == first.stdout
    chat = run("ask", "Who?", "-c", "m", "--load-context", folder, "--chat")
    assert_refused(chat, "was read without chat template")


def test_options_reach_the_library(run, loads, book):
    result = run(
        *("ask", book, "Who?", "-c", "model", "--dtype", "float32", "--chunk", 32),
        *("--mesh", "data=1,tensor=1", "--max-tokens", 4),
    )
    assert result.exit_code == 0, result.output
    ((checkpoint, options),) = loads
    assert str(checkpoint) == "model"
    assert (options["dtype"], options["chunk"]) == ("float32", 32)
    assert options["mesh"].shape == {"data": 1, "seq": 1, "tensor": 1}
    assert options["method"] is None


def test_method_is_made_with_its_settings(run, loads, book):
    from jax_longctx.methods import METHODS

    for name in METHODS:
        result = run("ask", book, "Who?", "-c", "m", "--method", name, "--max-tokens", 2)
        assert result.exit_code == 0, result.output
        assert type(loads[-1][1]["method"]) is METHODS[name]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--method", "ful"], "unknown method 'ful'; known: "),
        (["--method", "ful"], "did you mean 'full'?"),
        (["--set", "budget=3"], "name the method with --method"),
        (["--method", "full", "--set", "budget"], "--set 'budget' is not understood"),
        (["--method", "full", "--set", "budget=3"], "has no setting 'budget'"),
        (["--method", "full", "--set", "a=1", "--set", "a=2"], "--set a is given twice"),
        (["--dtype", "int8"], "--dtype 'int8' is not one of float32"),
        (["--mesh", "rows=2"], "mesh 'rows=2' is not understood"),
        (["--mesh", "data=²"], "mesh 'data=²' is not understood"),
        (["--mesh", "data=4096"], "needs 4096 devices"),
        (["--chunk", "0"], "--chunk must be at least 1"),
        (["--max-tokens", "0"], "--max-tokens must be at least 1"),
        (["--temperature", "-1"], "temperature must be at least 0"),
        (["--top-p", "0"], "top_p must be above 0"),
        (["--seed", "-1"], "--seed must be at least 0"),
        (["--stop", ""], "a stop string is empty"),
    ],
)
def test_bad_options_are_refused_before_the_model_loads(run, loads, book, args, message):
    assert_refused(run("ask", book, "Who?", "-c", "m", *args), message)
    assert loads == []


def test_bad_texts_are_refused_before_the_model_loads(run, loads, tmp_path):
    path = tmp_path / "text"
    assert_refused(run("ask", path, "Who?", "-c", "m"), "cannot be read: No such file")
    path.write_bytes(b"abc\xff")
    assert_refused(run("ask", path, "Who?", "-c", "m"), "not UTF-8")
    path.write_bytes(b"")
    assert_refused(run("ask", path, "Who?", "-c", "m"), "is empty")
    path.write_bytes(b"text")
    assert_refused(run("ask", path, "", "-c", "m"), "a question is empty")
    assert loads == []


def test_damaged_saved_contexts(run, loads, tmp_path):
    assert_refused(run("ask", "Who?", "-c", "m", "--load-context", tmp_path), "not a saved context")
    (tmp_path / "prompt.json").write_text("{}")
    result = run("ask", "Who?", "-c", "m", "--load-context", tmp_path)
    assert_refused(result, "does not say whether it is a chat")


@pytest.mark.parametrize("command", ["ask", "generate"])
def test_a_text_beyond_the_trained_length_is_told_before_it_is_read(
    run, loads, tiny, book, monkeypatch, command
):
    monkeypatch.setattr(tiny.engine, "config", dataclasses.replace(tiny.config, max_position=32))
    given = (book, "Who?") if command == "ask" else (book.read_text(),)
    result = run(command, *given, "-c", "m", "--max-tokens", 4, "--json")
    assert result.exit_code == 0, result.output
    first, closing = result.stderr.splitlines()
    assert first.startswith("warning: ") and "more than the 32 that the model was" in first
    assert first.endswith("methods that go on: dynamic-ntk, free-pages, infllm, reattention")
    assert closing.startswith("context ")
    record = json.loads(result.stdout)
    count = sum(record["tokens"].values())
    assert record["warning"].startswith(f"{count} tokens are more than the 32 ")


def request_of(words=(), stems=(), chat=None, save=None, load=None):
    return Request(
        words=list(words), completion=list(stems), chat=chat, save_context=save, load_context=load
    )


def test_file_and_questions():
    request = request_of(["book.txt", "Who?", "Why?"])
    assert (request.file, request.questions) == ("book.txt", ["Who?", "Why?"])
    assert request.chat is None


def test_stems_take_the_place_of_questions():
    request = request_of(["book.txt"], ["The key is"])
    assert (request.file, request.questions) == ("book.txt", ["The key is"])


def test_saved_context_takes_the_place_of_the_file(tmp_path):
    request = request_of(["Who?"], load=tmp_path)
    assert (request.file, request.questions) == (None, ["Who?"])


def test_refusals(tmp_path):
    book = tmp_path / "book.txt"
    book.write_text("text")
    cases = [
        (lambda: request_of(), "no FILE given"),
        (lambda: request_of(["book.txt"]), "no question given"),
        (lambda: request_of(["book.txt", "Who?", " "]), "a question is empty"),
        (lambda: request_of(["book.txt"], [""]), "a question is empty"),
        (lambda: request_of(["book.txt", "Who?"], ["The key is"]), "exclude each other"),
        (lambda: request_of(["book.txt"], ["The key is"], chat=True), "leave out --chat"),
        (
            lambda: request_of(["b", "q"], save=tmp_path / "new", load=tmp_path),
            "exclude each other",
        ),
        (lambda: request_of(["b", "q"], save=tmp_path), "exists; choose another name"),
        (lambda: request_of([str(book), "q"], load=tmp_path), "is a file, but --load-context"),
        (lambda: request_of(["book.txt", "Who\udcff?"]), "a question is not UTF-8"),
        (lambda: request_of(load=tmp_path), "no question given"),
    ]
    for call, message in cases:
        with pytest.raises(InputError, match=message):
            call()


def test_a_question_too_long_for_a_file_name_is_a_question(tmp_path):
    assert request_of(["why? " * 2000], load=tmp_path).file is None


@pytest.mark.slow
def test_an_offloaded_context_is_reported(run, loads, tiny, book, monkeypatch):
    book.write_text(book.read_text() * 8)
    quest = jax_longctx.make_method("quest", {"budget": 32, "local": 16})
    resident = tiny.with_method(quest)
    offloaded = tiny.with_method(quest, offload="host", working_set=512)
    records = []
    for model in (resident, offloaded):
        monkeypatch.setattr(tiny, "engine", model.engine)
        options = ("--offload", "host", "--working-set", 512) if model is offloaded else ()
        given = ("-c", "m", "-m", "quest", "--max-tokens", 12, *options)
        result = run("ask", book, "Who?", "Why?", *given, "--json")
        assert result.exit_code == 0, result.output
        records.append([json.loads(line) for line in result.stdout.splitlines()])
        assert ("chosen pages on the device" in result.stderr) == (model is offloaded)
    assert [call["offload"] for _, call in loads] == [None, "host"]
    assert loads[1][1]["working_set"] == 512
    for here, there in zip(*records, strict=True):
        assert here["answer"] == there["answer"]
        assert here["offload"] is None and there["offload"] == {
            "working_set": 512,
            "prefetch": False,
        }
        assert "fetched" not in here
        assert there["fetched"]["hits"] + there["fetched"]["misses"] > 0
        assert 0 <= there["fetched"]["hit_rate"] <= 1 and 0 <= there["fetched"]["waited_share"] <= 1
        assert there["memory"]["host_bytes"] > 0 and "host_bytes" not in here["memory"]


def test_offload_is_checked_before_anything_loads(run, loads, book):
    result = run("ask", book, "Who?", "-c", "m", "--offload", "disk")
    assert_refused(result, "unknown --offload 'disk'; known: host")
    result = run("ask", book, "Who?", "-c", "m", "--working-set", 512)
    assert_refused(result, "working_set is for offloaded contexts; give offload host too")
    assert not loads
