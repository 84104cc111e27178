import dataclasses
import json
import os
import resource
import shutil
import signal
import sys
from unittest.mock import create_autospec

import pytest

import jax_longctx
from jax_longctx import api
from jax_longctx.cli.ask import Inputs
from jax_longctx.errors import InputError
from jax_longctx.files import seal
from jax_longctx.planning.targets import CHIPS
from jax_longctx.text import chat_layout, plain_layout
from jax_longctx.text.prompts import Encoder
from tests.jax_longctx.cli.conftest import refused


def expected(tiny, layout, document, question, **options):
    context = tiny.prefill(layout.context(document))
    (answer,) = tiny.ask(context, layout.question(question), **options)
    return answer


def test_layouts_of_chats_and_completions(run, loads, tiny, book):
    text, limit = book.read_text(), ("-c", "model", "--max-tokens", 8)
    answer = expected(tiny, chat_layout(tiny.tokenizer), text, "Who?", max_tokens=8)
    assert len(answer.tokens) == 8
    given = ("Who?", *limit)
    for result in (run("ask", book, *given), run("ask", "-", *given, stdin=book.read_bytes())):
        assert result.exit_code == 0, result.output
        assert result.stdout == answer.text + "\n"
        for part in ("context ", " tokens/s", " s after the question; ", "cache ", "peak memory"):
            assert part in result.stderr
    for asked, layout in [
        (("Who?", "--no-chat"), plain_layout()),
        (("--completion", "The pass key is"), plain_layout(stem=True)),
    ]:
        result = run("ask", book, *asked, *limit)
        question = next(word for word in asked if not word.startswith("--"))
        answer = expected(tiny, layout, text, question, max_tokens=8)
        assert result.stdout == answer.text + "\n"


def test_several_documents_are_named_in_the_prompt(run, loads, tiny, tmp_path):
    (tmp_path / "notes").mkdir()
    pages, note = tmp_path / "a.html", tmp_path / "notes" / "b.md"
    pages.write_text("<title>One</title><p>Two")
    note.write_text("# Three")
    text = f"Document: {pages}\n\nOne\n\nTwo\n\nDocument: {note}\n\n# Three"
    given = ("Who?", "-c", "m", "--max-tokens", 8)
    found = run("ask", "-f", pages, "--file", note.parent, *given, code=0).stdout
    answer = expected(tiny, chat_layout(tiny.tokenizer), text, "Who?", max_tokens=8)
    assert found == answer.text + "\n"
    # One document stands as it is.
    assert run("ask", "-f", note, *given).stdout == run("ask", note, *given, code=0).stdout
    (tmp_path / "notes" / "c.bin").write_bytes(b"\0\xff")
    said = run("ask", note.parent, *given, code=0).stderr
    assert f"left out of {note.parent}: 1 that are no text ({note.parent}/c.bin)" in said


@pytest.mark.parametrize("ahead", [False, True], ids=["", "compiled ahead"])
def test_each_text_is_encoded_once(run, tiny, loads, book, monkeypatch, ahead):
    def load(checkpoint, spec, *, choose=None, ahead=None, **options):
        if choose is not None:
            choose(tiny)
        if ahead is not None:
            ahead(tiny)
        return tiny

    monkeypatch.setattr(api, "load", load)
    monkeypatch.setattr(api.LongContext, "compiles_ahead", ahead)
    encoded, encode = [], Encoder.placed
    monkeypatch.setattr(Encoder, "placed", lambda *a, **k: encoded.append(a[1]) or encode(*a, **k))
    run("ask", book, "Who?", "Why?", "-c", "m", "--max-tokens", 2, code=0)
    assert sum(book.read_text() in text for text in encoded) == 1
    assert len(encoded) == len(set(encoded)) == 3
    encoded.clear()
    run("generate", book.read_text(), "-c", "m", "-m", "auto", "--max-tokens", 2, "--json", code=0)
    assert encoded == [book.read_text()]


def test_many_questions_over_one_reading(run, loads, tiny, book, monkeypatch):
    questions = ["Who?", "Why?", "Who?"]
    read, prefill = [], tiny.prefill
    monkeypatch.setattr(tiny, "prefill", lambda *a, **k: read.append(1) or prefill(*a, **k))
    result = run("ask", book, *questions, "-c", "m", "--max-tokens", 8, "--json")
    assert len(read) == 1
    records = [json.loads(line) for line in result.stdout.splitlines()]
    assert [record["question"] for record in records] == questions
    assert records[0]["answer"] == records[2]["answer"] != records[1]["answer"]
    layout, sampling = chat_layout(tiny.tokenizer), jax_longctx.Sampling(temperature=0.9, seed=3)
    answers = []
    for number, question in enumerate(questions):
        how = {"max_tokens": 8, "sampling": sampling.at([(0, number)])}
        answers.append(expected(tiny, layout, book.read_text(), question, **how).text)
    given = ("-c", "m", "--max-tokens", 8, "--temperature", 0.9, "--seed", 3)
    result = run("ask", book, *questions, *given)
    assert result.stdout == "".join(answer + "\n" for answer in answers), result.output
    assert "> Who?" in result.stderr and "> Why?" in result.stderr
    assert result.stderr.count("first token") == 3 and result.stderr.count("read in") == 1


def test_json_record_and_a_stop(run, loads, tiny, book):
    given = ("ask", book, "Who?", "-c", "m", "--max-tokens", 8, "--json", "--seed", 5)
    (line,) = run(*given).stdout.splitlines()
    layout, record = chat_layout(tiny.tokenizer), json.loads(line)
    answer = expected(tiny, layout, book.read_text(), "Who?", max_tokens=8)
    assert (record["answer"], record["finish"]) == (answer.text, answer.finish)
    context = tiny.tokenizer.encode(layout.context(book.read_text()), bos=True)
    question = tiny.tokenizer.encode(layout.question("Who?"))
    assert record["tokens"] == {"context": len(context), "question": len(question), "answer": 8}
    assert record["seconds"]["prefill"] > 0 and record["seconds"]["first_token"] > 0
    # Two layers, two kv heads of 8 numbers, keys and values, four bytes: at least that.
    assert record["memory"]["cache_bytes"] >= len(context) * 2 * 2 * 8 * 2 * 4
    assert record["memory"]["peak_bytes"] > 10**7
    assert (record["method"], record["sampling"]["seed"]) == ("full", 5)
    assert set(record["versions"]) == {"jax_longctx", "jax", "python"}
    stop = answer.text[3:5]
    assert loads[-1][1]["parse_special"] is False
    cut = json.loads(run(*given, "--stop", stop, "--parse-special").stdout)["answer"]
    assert cut == answer.text[: answer.text.index(stop)]
    assert loads[-1][1]["parse_special"] is True


def test_save_and_load_give_the_same_answer(run, loads, book, tmp_path):
    common = ("-c", "m", "--max-tokens", 10)
    for name, asked in (("chat", ["Who?"]), ("plain", ["--completion", "The pass key is"])):
        first = run("ask", book, *asked, *common, "--save-context", tmp_path / name)
        again = run("ask", *asked, *common, "--load-context", tmp_path / name)
        assert first.exit_code == again.exit_code == 0, first.output + again.output
        assert again.stdout == first.stdout
    variables = [word for each in ("a=false", "b=2", "c=x y") for word in ("--template", each)]
    run("ask", book, "Who?", *common, *variables, code=0)
    assert loads[-1][1]["template"] == {"a": False, "b": 2, "c": "x y"}
    run("ask", book, "Who?", *common, "--template", "a=" + "[" * 100_000, code=0)
    refused(run("ask", book, "Who?", *common, "--template", "a"), "--template 'a' is not")
    asking = ("ask", "Who?", *common, "--load-context")
    refused(run(*asking, tmp_path / "plain", "--chat"), "was read without chat template")
    again = run("ask", book, "Who?", *common, "--save-context", tmp_path / "chat")
    refused(again, "exists")
    prompt = tmp_path / "chat" / "prompt.json"
    prompt.write_text(prompt.read_text().replace("true", "false"))
    refused(run(*asking, tmp_path / "chat"), "prompt.json is damaged: its sha256")
    prompt.write_text("[" * 100_000)
    refused(run(*asking, tmp_path / "chat"), "prompt.json is not a JSON file: it is nested too")
    prompt.unlink()
    os.mkfifo(prompt)
    refused(run(*asking, tmp_path / "chat"), "prompt.json cannot be read: it is a FIFO")
    prompt.unlink()
    # As earlier versions wrote it.
    prompt.write_text('{"chat": true, "tokenizer": "other"}')
    said = f"{prompt.parent} was made with tokenizer 'other', now it is None"
    refused(run(*asking, tmp_path / "chat"), said)


# The tests' own compile cache may want to grow meanwhile.
@pytest.mark.filterwarnings("ignore:Error writing persistent compilation cache entry")
def test_a_full_disk_is_one_line_after_the_answer(run, loads, book, tmp_path, caplog, monkeypatch):
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
    why = "File too large (ulimit -f limits the size of files)"
    assert error == f"error: {tmp_path / 'read'} could not be written: {why}"
    assert result.stderr.count("error") == 1
    assert caplog.text == ""
    assert list(tmp_path.iterdir()) == [book]


CITRUS = ("-m", "citrus", "--set", "budget=64", "--set", "chunk=32")
# What the command line and the manifests alone refuse; READ is a context under full attention.
UNFIT = [
    (("ask", "BOOK", "Who?", *CITRUS, "--save-context", "new/read"), "citrus reads the text for"),
    (("ask", "Who?", *CITRUS, "--load-context", "READ"), "it has no context for --load-context"),
    (("ask", "Who?", "-m", "quest", "--load-context", "READ"), "method.name 'full', now it is 'qu"),
    (("ask", "Who?", "--kv", "int8", "--load-context", "READ"), "kv None, now it is 'int8'"),
    (("ask", "Who?", "--dtype", "bfloat16", "--load-context", "READ"), "dtype 'float32', now it"),
    (("ask", "Who?", "--load-context", "READ", "--no-chat"), "was read in the chat template"),
    (("generate", "The", "-m", "full", "--offload", "host"), "full"),
    (("batch", "ROWS", "new/out", "-m", "snapkv", "--offload", "host"), "snapkv"),
    (("serve", "--length", 300, "--max-tokens", 300, "--contexts", "new/c"), "allow longer texts"),
    (("serve", "-m", "full", "--offload", "host", "--contexts", "new/c"), "full"),
    (("eval", "run", "-t", "passkey", "--length", 99, "-m", "x", "-o", "new/o"), "unknown method"),
    (("eval", "run", "-t", "passkey", "--length", 99, "--kv", "bfloat16", "-o", "new/o"), "kv bf"),
    (("eval", "perplexity", *CITRUS[:2], "-o", "new/o.json"), "budget 1024 + chunk 256"),
    (("eval", "perplexity", "-m", "full", *CITRUS[:2], "-o", "new/o.json"), "budget 1024 + chunk"),
    (("eval", "perplexity", "--protocol", "P3", *CITRUS[:2], "-o", "new/o.json"), "for a question"),
    (("eval", "perplexity", "--length", 9_999_999, "-o", "new/o.json"), "hold 0: ask for fewer"),
    (("eval", "agreement", "-m", "full", *CITRUS[:2], "-o", "new/o.json"), "budget 1024 + chunk"),
    (("eval", "agreement", "--mesh", "tensor=8", "-o", "new/o.json"), "heads=4"),
]


def test_what_does_not_fit_is_refused_before_weights_load_and_leaves_no_folder(
    run, checkpoint, book, tmp_path, monkeypatch
):
    read, out = tmp_path / "read", tmp_path / "made" / "read"
    run("ask", book, "Who?", "-c", checkpoint, "--max-tokens", 2, "--save-context", out, code=0)
    out.rename(read)
    out.parent.rmdir()
    (tmp_path / "rows").write_text('{"prompt": "The"}\n')
    monkeypatch.setattr(api, "load_params", lambda *_: pytest.fail("the weights load"))
    names = {"BOOK": book, "READ": read, "ROWS": tmp_path / "rows"}
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.chdir(tmp_path)
    for words, said in UNFIT:
        result = run(*(names.get(word, word) for word in words), "-c", checkpoint)
        assert result.exit_code == 2 and said in " ".join(result.stderr.split()), result.output
        assert sorted(tmp_path.rglob("*")) == before, words
    words = ("warm", checkpoint, "-m", "quest", "-m", "full", "--offload", "host")
    monkeypatch.setattr(
        "jax_longctx.engine.compile_ahead", lambda *_, **__: pytest.fail("compiled")
    )
    assert "full" in run(*words, code=2).stderr


def test_contexts_that_cannot_be_kept_are_refused(run, loads, tiny, book, tmp_path, monkeypatch):
    prefill = create_autospec(tiny.prefill)
    monkeypatch.setattr(tiny, "prefill", prefill)
    common = ("ask", book, "Who?", "-c", "m", "--save-context")
    refused(run(*common, "/proc/none/read"), "nothing can be written to the folder")
    assert loads == []
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    refused(run(*common, tmp_path / "read"), "free; free some, or name another")
    common = ("ask", "Who?", "-c", "m", "--load-context", tmp_path)
    refused(run(*common), "not a saved context")
    (tmp_path / "context.json").write_text(json.dumps(seal(2, {})))
    (tmp_path / "prompt.json").write_text("{}")
    refused(run(*common), "does not say whether it is a chat")
    assert not prefill.called


def test_options_reach_the_library(run, loads, book):
    given = ("ask", book, "Who?", "-c", "model", "--max-tokens", 2)
    run(*given, "--dtype", "float32", "--chunk", 32, "--mesh", "data=1,tensor=1", code=0)
    ((checkpoint, options),) = loads
    assert (str(checkpoint), options["dtype"], options["chunk"]) == ("model", "float32", 32)
    assert options["mesh"] == "data=1,tensor=1"
    assert options["method"] is None
    run(*given, "--method", "snapkv", "--set", "budget=99", code=0)
    assert loads[-1][1]["method"] == jax_longctx.make_method("snapkv", {"budget": 99})


@pytest.mark.slow
def test_auto_chooses_a_mesh_for_the_text(run, checkpoint, book, tmp_path, monkeypatch):
    """Under rates by which this small model gains from several devices."""
    chip = dataclasses.replace(CHIPS["cpu"], latency=0.0, link=1e15)
    monkeypatch.setitem(CHIPS, "cpu", chip)
    (tmp_path / "rows").write_text('{"prompt": "The"}\n{"prompt": "A"}\n')
    kept, longer = tmp_path / "kept", tmp_path / "longer"
    longer.write_text(5 * book.read_text())
    given, few = ("-c", checkpoint, "--json"), ("--max-tokens", 2)
    for words in [("ask", book, "Who?", "-m", "auto"), ("generate", book.read_text())]:
        alone = json.loads(run(*words, *given, *few, code=0).stdout)
        result = run(*words, *given, *few, "--mesh", "auto", code=0)
        found = json.loads(result.stdout)
        text = found["tokens"].get("context") or found["tokens"]["prompt"]
        told = f"mesh seq=2,tensor=2: a step over 1 x {text:,} tokens takes, by arithmetic, seq=2"
        assert told in result.stderr
        assert found["mesh"] == {"data": 1, "seq": 2, "tensor": 2}
        assert found["answer"] == alone["answer"]
    # A context that was saved on one device has three runs of slots: they divide over no two.
    run("ask", longer, "Who?", "-c", checkpoint, *few, "--save-context", kept, code=0)
    slots = json.loads((kept / "context.json").read_text())["slots"]
    for words in [("ask", "Who?", "--load-context", kept, *few), ("chat", "--load", kept)]:
        result = run(*words, "-c", checkpoint, "--mesh", "auto", stdin=b"Who?\n", code=0)
        assert "mesh tensor=2: a step over 1 x " in result.stderr and slots == 3 * 128
    batch = ("batch", tmp_path / "rows", tmp_path / "out", "-c", checkpoint, *few, "--rows", 2)
    result = run(*batch, "--mesh", "auto", code=0)
    assert "a step over 2 x " in result.stderr and "2 rows" in result.stderr
    task = ("-t", "passkey", "--length", 300, "--trials", 2, "-o", tmp_path / "evaluated")
    result = run("eval", "run", *task, "-c", checkpoint, "--mesh", "auto", code=0)
    assert "a step over 4 x 300 tokens takes" in result.stderr


def test_bad_options_and_texts_are_refused_before_the_model_loads(run, loads, book, tmp_path):
    for args, message in [
        (["--method", "ful"], "did you mean 'full'?"),
        (["--method", "full", "--set", "budget=3"], "has no setting 'budget'"),
        (["--method", "full", "--set", "a=1", "--set", "a=2"], "--set a is given twice"),
        (["--working-set", 512], "working_set is for offloaded contexts; give offload host too"),
    ]:
        refused(run("ask", book, "Who?", "-c", "m", *args), message)
    (tmp_path / "text").write_bytes(b"abc\xff")
    refused(run("ask", tmp_path / "text", "Who?", "-c", "m"), "not UTF-8")
    assert loads == []


@pytest.mark.parametrize("command", ["ask", "generate"])
def test_a_text_beyond_the_trained_length_is_told(run, loads, tiny, book, monkeypatch, command):
    monkeypatch.setattr(tiny.engine, "config", dataclasses.replace(tiny.config, max_position=32))
    given = (book, "Who?") if command == "ask" else (book.read_text(),)
    result = run(command, *given, "-c", "m", "--max-tokens", 4, "--json", code=0)
    first, closing = result.stderr.splitlines()
    assert first.startswith("warning: ") and "more than the 32 that the model was" in first
    assert first.endswith("methods that go on: dynamic-ntk, free-pages, infllm, reattention")
    assert closing.startswith("context ")
    record = json.loads(result.stdout)
    count = sum(record["tokens"].values())
    assert record["warning"].startswith(f"{count} tokens are more than the 32 ")


def request_of(*words, files=(), stems=(), chat=None, save=None, load=None):
    given = {"words": list(words), "files": list(files), "completion": list(stems), "chat": chat}
    return Inputs(**given, save_context=save, load_context=load)


def test_the_file_and_the_questions(tmp_path):
    long = "why? " * 2000
    for inputs, sources, questions in [
        (request_of("book.txt", "Who?", "Why?"), ["book.txt"], ["Who?", "Why?"]),
        (request_of("book.txt", stems=["The key is"]), ["book.txt"], ["The key is"]),
        (request_of("Who?", "Why?", files=["a", "b"]), ["a", "b"], ["Who?", "Why?"]),
        (request_of(stems=["The key is"], files=["a"]), ["a"], ["The key is"]),
        (request_of("Who?", load=tmp_path), None, ["Who?"]),
        # Too long for the name of a file.
        (request_of(long, load=tmp_path), None, [long]),
    ]:
        assert (inputs.sources, inputs.questions, inputs.chat) == (sources, questions, None)
    book = tmp_path / "book.txt"
    book.write_text("text")
    for words, how, message in [
        ((), {}, "no FILE given"),
        ((str(book),), {}, "no question given"),
        (("Who wrote it?",), {}, "no question follows; expected FILE QUESTION... \\(- QUESTION"),
        ((str(book), str(book), "q"), {}, "is a file where a question is expected"),
        (("-", str(book)), {}, "is a file where a question is expected"),
        (("book.txt", "Who?", " "), {}, "a question is empty"),
        (("book.txt",), {"stems": [""]}, "a question is empty"),
        (("book.txt", "Who?"), {"stems": ["The key is"]}, "exclude each other"),
        (("book.txt",), {"stems": ["The key is"], "chat": True}, "leave out --chat"),
        (("b", "q"), {"save": tmp_path / "new", "load": tmp_path}, "exclude each other"),
        (("q",), {"files": ["b"], "load": tmp_path}, "--file and --load-context exclude"),
        ((), {"files": ["b"]}, "no question given"),
        ((str(book), "q"), {"files": ["b"]}, "is a file where a question is expected"),
        (("b", "q"), {"save": tmp_path}, "exists; choose another name"),
        ((str(book), "q"), {"load": tmp_path}, "is a file, but --load-context"),
        (("book.txt", "Who\udcff?"), {}, "a question is not UTF-8"),
        ((), {"load": tmp_path}, "no question given"),
    ]:
        with pytest.raises(InputError, match=message):
            request_of(*words, **how)


@pytest.mark.slow
def test_an_offloaded_context_is_reported(run, loads, tiny, book, monkeypatch):
    book.write_text(book.read_text() * 8)
    quest = jax_longctx.make_method("quest", {"budget": 32, "local": 16})
    place, records = ("--offload", "host", "--working-set", 512), []
    for options in ((), place):
        tier = {"offload": "host", "working_set": 512} if options else {}
        with monkeypatch.context() as patch:
            patch.setattr(tiny, "engine", tiny.with_method(quest, **tier).engine)
            given = ("-c", "m", "-m", "quest", "--max-tokens", 12, *options)
            result = run("ask", book, "Who?", "Why?", *given, "--json", code=0)
        records.append([json.loads(line) for line in result.stdout.splitlines()])
        assert ("chosen pages on the device" in result.stderr) == bool(options)
    assert [call["offload"] for _, call in loads] == [None, "host"]
    assert loads[1][1]["working_set"] == 512
    for here, there in zip(*records, strict=True):
        assert here["answer"] == there["answer"] and here["offload"] is None
        assert there["offload"] == {"working_set": 512}
        found = there["fetched"]
        assert "fetched" not in here and found["hits"] + found["misses"] > 0
        assert 0 <= found["hit_rate"] <= 1 and 0 <= found["waited_share"] <= 1
        assert there["memory"]["host_bytes"] > 0 and "host_bytes" not in here["memory"]


@pytest.mark.parametrize("questions", [["Who?"], ["Who?", "Why?"]])
def test_it_says_where_answers_were_found(run, loads, book, tmp_path, questions):
    drawn = tmp_path / "read.png"
    given = ("ask", book, *questions, "-c", "m", "--max-tokens", 4)
    plain = run(*given, code=0)
    found = run(*given, "--where", "--picture", drawn, code=0)
    assert found.stdout == plain.stdout
    assert found.stderr.count("\n1. ") == len(questions) and " characters " in found.stderr
    assert drawn.read_bytes().startswith(b"\x89PNG")
    text = book.read_text()
    for line in run(*given, "--where", "--json", code=0).stdout.splitlines():
        sources = json.loads(line)["sources"]
        assert 1 <= len(sources) <= 3
        for source in sources:
            assert source["text"] == text[source["start"] : source["end"]]
        assert sources[0]["score"] == max(source["score"] for source in sources) <= 1


@pytest.mark.parametrize("option", [["--where"], ["--picture", "read.png"]])
@pytest.mark.parametrize(
    ("name", "tier", "why"),
    [
        ("knorm", {}, "the caches of knorm do not say which tokens of the text they hold"),
        ("quest", {"offload": "host"}, "in the host's memory; leave out --offload"),
    ],
)
def test_what_cannot_say_where_is_refused_before_the_text_is_read(
    run, loads, tiny, book, monkeypatch, name, tier, why, option
):
    model = tiny.with_method(jax_longctx.make_method(name), **tier)
    monkeypatch.setattr(tiny, "engine", model.engine)
    monkeypatch.setattr(tiny, "prefill", None)
    refused(run("ask", book, "Who?", "-c", "m", "-m", name, *option), why)
