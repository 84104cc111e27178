import errno
import gzip
import json
import os
import shutil
import threading
import time
from pathlib import Path
from unittest.mock import Mock

import openai
import pytest

import jax_longctx
from jax_longctx import Conversation, files
from jax_longctx.engine import context_io
from jax_longctx.errors import CapacityError, CheckpointError
from jax_longctx.serving import executor
from jax_longctx.serving.doors import Access
from jax_longctx.text import PromptText, chat_layout
from tests.jax_longctx.serving.tiny import (
    BOOK,
    aside,
    asked,
    asked_plainly,
    chat,
    complete,
    generated,
    needed_bytes,
    read,
    refused,
    shown,
    wait_until,
)
from tests.jax_longctx.text.test_documents import packed as documents
from tests.patience import patience

OTHER = "Remember the key. It is a pass. " * 9
QUESTIONS = ["What is the pass key?", "Remember what?"]
STREAMING = jax_longctx.make_method("streaming-llm", {"budget": "64", "chunk": "32"})


def ask(client, context, question, *, seed=0, max_tokens=12):
    found = chat(client, question, context, seed=seed, max_tokens=max_tokens)
    return found.choices[0].message.content, found.usage


def check_prompt(client, model, prompt):
    """That its completion is that of `generate`; how many tokens were known."""
    found = complete(client, prompt, seed=1, max_tokens=8)
    assert found.choices[0].text == generated(model, prompt, seed=1, max_tokens=8).text
    return found.usage.prompt_tokens_details.cached_tokens


def full_disk(key, path):
    raise CheckpointError(f"{path} could not be written: No space left on device")


@pytest.mark.parametrize("chat", [True, False])
def test_answers_about_a_context_are_those_of_ask(server, client, tiny, chat):
    with server.http() as http:
        context = read(http, text=BOOK, chat=chat)
        layout = tiny.layout(chat)
        count = len(tiny.tokenizer.encode(layout.context(BOOK), bos=True))
        assert (context["tokens"], context["state"], context["chat"]) == (count, "ready", chat)
        for seed, question in enumerate(QUESTIONS):
            text, usage = ask(client, context["id"], question, seed=seed)
            assert text == asked(tiny, BOOK, question, seed=seed, chat=chat)
            assert usage.prompt_tokens_details.cached_tokens == count
            size = len(tiny.tokenizer.encode(layout.question(question)))
            assert usage.prompt_tokens == count + size
        about = {"context": context["id"]}
        found = complete(client, " Remember", seed=1, max_tokens=8, extra_body=about)
        expected = asked_plainly(tiny, layout.context(BOOK), " Remember", seed=1, max_tokens=8)
        assert found.choices[0].text == expected


def test_the_templates_variables_and_the_last_message_are_the_requests(server, client, tiny):
    turns = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "A key "}]
    tokenizer, layout, think = tiny.tokenizer, tiny.layout(True), {"think": "<|end|>"}
    with server.http() as http:
        about = read(http, text=BOOK)["id"]

    def answered(messages=turns[:1], **body):
        how = {"model": "tiny", "seed": 4, "max_tokens": 12, "extra_body": body}
        return client.chat.completions.create(messages=messages, **how).choices[0].message.content

    def expected(prompt):
        return generated(tiny, prompt, seed=4).text

    assert answered(chat_template_kwargs=think) == expected(
        tokenizer.chat(turns[:1], variables=think)
    )
    closed = tokenizer.chat(turns, answer=False)
    assert answered(turns, add_generation_prompt=False) == expected(closed)
    for said in ("A key ", "<", "|"):
        begun = [turns[0], turns[1] | {"content": said}]
        opened = str(tokenizer.chat(begun, answer=False)).rpartition("<|end|>")[0]
        assert answered(begun, continue_final_message=True) == expected(opened.rstrip())
    assert answered(chat_template_kwargs=think, context=about) == asked_plainly(
        tiny, layout.context(BOOK), chat_layout(tokenizer, think).question("Why?"), seed=4
    )
    for body, said in [
        ({"chat_template_kwargs": {"messages": "x"}}, "variable 'messages' is set for you"),
        ({"chat_template_kwargs": {"think": [1]}}, "chat_template_kwargs.think"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "opens no new answer"),
        ({"continue_final_message": True, "context": about}, "about a context is a new message"),
    ]:
        with pytest.raises(openai.BadRequestError, match=said):
            answered(**body)


def test_a_chat_goes_on_about_a_context(server, client, tiny):
    turns = [("user", "What?"), ("assistant", "A key."), ("user", "Which?")]
    messages = [{"role": role, "content": content} for role, content in turns]
    with server.http() as http:
        context = read(http, text=BOOK)["id"]
    about, how = {"context": context}, {"seed": 4, "max_tokens": 12}
    found = client.chat.completions.create(model="tiny", messages=messages, extra_body=about, **how)
    whole = [{**messages[0], "content": f"{BOOK}\n\nWhat?"}, *messages[1:]]
    layout = tiny.layout(True)
    before, rest = tiny.tokenizer.chat(whole).after(BOOK)
    assert before == layout.before
    expected = asked_plainly(tiny, layout.context(BOOK), rest, seed=4)
    assert found.choices[0].message.content == expected
    for wrong in (messages[:2], [{"role": "system", "content": "Be short."}, messages[0]]):
        with pytest.raises(openai.BadRequestError, match="begin and end with the user's"):
            client.chat.completions.create(model="tiny", messages=wrong, extra_body=about)


def test_a_conversation_in_the_cache_is_one_that_is_sent_again(server, client, tiny):
    with server.http() as http:
        about = {"context": read(http, text=BOOK)["id"]}
    talk = Conversation(tiny, tiny.prefill(tiny.layout().context(BOOK)))
    for number in range(20):
        # Random bytes are no text that could be sent, nor what the template trims.
        answer = talk.ask(question := f"What {number}?", max_tokens=1)
        if tiny.tokenizer.encode(answer.text.strip()) == answer.tokens:
            break
        talk.clear()
    second = talk.ask("And which?", max_tokens=9).text
    turns = [("user", question), ("assistant", answer.text), ("user", "And which?")]
    messages = [{"role": role, "content": content} for role, content in turns]
    how = {"model": "tiny", "extra_body": about, "temperature": 0}
    for given, tokens, expected in ((messages[:1], 1, answer.text), (messages, 9, second)):
        found = client.chat.completions.create(messages=given, max_tokens=tokens, **how)
        assert found.choices[0].message.content == expected


def test_special_tokens_count_in_completions_alone(server, client, tiny):
    text, encode = "a<|end|>\n<|turn|>user\nb", tiny.tokenizer.encode
    parsed, messages = encode(text, parse_special=True), [{"role": "user", "content": text}]
    assert len(parsed) < len(encode(text)) - 10
    found = chat(client, text, max_tokens=1).usage.prompt_tokens
    assert found == len(encode(tiny.tokenizer.chat(messages)))
    assert complete(client, text, max_tokens=1).usage.prompt_tokens == len(parsed)
    with server.http() as http:
        context = read(http, text=text)
    name, size = context["id"], context["tokens"]
    assert size == len(encode(PromptText(tiny.layout().before))) + len(encode(text))
    found = complete(client, text, max_tokens=1, extra_body={"context": name}).usage
    assert found.prompt_tokens == size + len(parsed)
    found = chat(client, text, name, max_tokens=1).usage
    assert found.prompt_tokens == size + len(encode(tiny.layout().question(text)))


def test_contexts_are_listed_shown_and_deleted_and_end_with_their_time(server):
    with server.http() as http:
        context = read(http, text=OTHER, ttl=50)
        name = context["id"]
        assert context["ttl"] == 50
        assert name in [each["id"] for each in http.get("/v1/contexts").json()["data"]]
        assert shown(http, name) == context
        assert http.delete(f"/v1/contexts/{name}").json()["deleted"] is True
        for answer in (http.get(f"/v1/contexts/{name}"), http.delete(f"/v1/contexts/{name}")):
            assert answer.status_code == 404
            assert answer.json()["error"]["code"] == "context_not_found"
        name = read(http, text=OTHER, ttl=0.3)["id"]
        time.sleep(0.4)
        assert http.get(f"/v1/contexts/{name}").status_code == 404
        texts = server.served.contexts._texts
        wait_until(lambda: not any(name in text.entries for text in texts.values()))


def test_a_file_is_uploaded_and_its_progress_streamed(server, client, tiny):
    with server.http() as http:
        read(http, text=BOOK)

        def streamed(**how):
            lines = http.post("/v1/contexts", **how).text.split("\n\n")
            assert lines[-2:] == ["data: [DONE]", ""]
            return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]

        book = {"file": ("book.txt", BOOK.encode())}
        # It was read before: there is nothing to tell.
        (last,) = streamed(files=book, data={"ttl": "60", "stream": "true"})
        assert last["state"] == "ready" and last["ttl"] == 60
        assert ask(client, last["id"], "What?")[0] == asked(tiny, BOOK, "What?")
        told = streamed(json={"text": "A new text. " * 30, "stream": True})
        counts = [each["tokens_read"] for each in told]
        assert counts == sorted(counts) and len(counts) > 2
        assert told[0]["object"] == "context.progress" and counts[-1] == told[-1]["tokens"]


def test_documents_are_uploaded(server, client, tiny):
    packed = gzip.compress(b"<p>One &amp; two")
    text = "Document: a.html\n\nOne & two\n\nDocument: b.txt\n\nThree"
    with server.http() as http:
        uploads = [("file", ("a.html.gz", packed)), ("file", ("b.txt", b"Three"))]
        found = http.post("/v1/contexts", files=uploads).json()["id"]
        assert ask(client, found, "What?")[0] == asked(tiny, text, "What?")
        archive = {"file": ("a.zip", documents({"a.txt": "Text", "b.png": b"\0\xff"}))}
        made = http.post("/v1/contexts", files=archive).json()
        assert made["notes"] == ["left out of a.zip: 1 that are no text (a.zip/b.png)"]
        again = http.post("/v1/contexts", files=archive, data={"stream": "true"}).text
        assert made["notes"][0] in again
        assert http.get(f"/v1/contexts/{made['id']}").json()["notes"] == made["notes"]
        bomb = gzip.compress(bytes(server.served.options.access.body + 1))
        for name, raw, said in [
            ("a.gz", bomb, "a.gz unpacks to more than is read, "),
            ("x" * 300 + ".pdf", b"text", "x.pdf is no PDF, as its name says"),
        ]:
            answer = http.post("/v1/contexts", files={"file": (name, raw)})
            assert answer.status_code == 400 and said in answer.json()["error"]["message"]


def test_only_files_under_the_folder_are_read_and_none_unless_told(server, serve, tiny, tmp_path):
    under = tmp_path / "texts"
    under.mkdir()
    (under / "book.txt").write_text(BOOK)
    (under / "bytes.txt").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "secret.txt").write_text("secret")
    (under / "link.txt").symlink_to(tmp_path / "secret.txt")
    running = serve(tiny, access=Access(files_under=under))
    with running.http() as http:
        assert read(http, file="book.txt")["state"] == "ready"
        for name in ("../secret.txt", str(tmp_path / "secret.txt"), "link.txt", "no.txt", "\0"):
            refused(http, 400, "is no file that may be read", file=name)
        refused(http, 400, "not UTF-8", file="bytes.txt")
    with server.http() as http:
        refused(http, 400, "--files-under", file="book.txt")


def test_memory_pressure_saves_contexts_and_loads_them_again(serve, tiny):
    books = [f"{number} {BOOK}" for number in range(3)]
    count = len(tiny.tokenizer.encode(tiny.layout(True).context(books[0]), bos=True))
    # Room for two texts of this size.
    need = needed_bytes(serve, tiny, books[0])
    running = serve(tiny, context_bytes=int(2.5 * need))
    with running.http() as http, running.client() as client:
        names = [read(http, text=book)["id"] for book in books]
        states = [shown(http, name)["state"] for name in names]
        assert states == ["saved", "ready", "ready"]
        for _ in range(2):
            for name, book in zip(names, books, strict=True):
                text, usage = ask(client, name, "What?", seed=3)
                assert text == asked(tiny, book, "What?", seed=3)
                assert usage.prompt_tokens_details.cached_tokens == count
        figures = http.get("/metrics").text
        assert running.served.contexts.resident_bytes <= 2.5 * need
    assert "longctx_contexts_saved_total 3.0" in figures
    # All six questions found their context on the disk.
    assert "longctx_contexts_loaded_total 6.0" in figures


def test_a_text_that_never_fits_is_refused_with_the_arithmetic(serve, tiny):
    running = serve(tiny, context_bytes=1000)
    with running.http() as http, running.client() as client:
        answer = refused(http, 400, "the server keeps 1000 B for texts", text=BOOK)
        assert answer.json()["error"]["code"] == "out_of_memory"
        with pytest.raises(openai.BadRequestError, match=r"needs .* on each device"):
            complete(client, BOOK)
        assert http.get("/v1/contexts").json()["data"] == []


def test_prompts_reuse_what_was_read(serve, tiny):
    running = serve(tiny)
    with running.client() as client:
        tails = (" What?", " What?", " Which key?", " Why?")
        cached = [check_prompt(client, tiny, BOOK + tail) for tail in tails]
        shared = len(tiny.tokenizer.encode(BOOK, bos=True))
        whole = len(tiny.tokenizer.encode(BOOK + " What?", bos=True)) - 1
        # The third prompt is split where it leaves the first; the fourth finds that part.
        assert cached[:3] == [0, whole, 0]
        assert shared - 2 <= cached[3] < whole


@pytest.mark.slow
def test_an_evicting_method_reuses_the_same_text_alone(serve, tiny):
    model = tiny.with_method(STREAMING)
    running = serve(model)
    with running.http() as http, running.client() as client:
        tails = (" What?", " What?", " Which key?", " Which key?")
        cached = [check_prompt(client, model, BOOK + tail) for tail in tails]
        assert [count > 0 for count in cached] == [False, True, False, True]
        context = read(http, text=BOOK)["id"]
        assert ask(client, context, "What?", seed=2)[0] == asked(model, BOOK, "What?", seed=2)


def test_saved_contexts_are_found_after_a_restart(serve, tiny, tmp_path):
    folder = tmp_path / "kept"
    first = serve(tiny, contexts=folder)
    with first.http() as http, first.client() as client:
        context = read(http, text=BOOK, save=True, ttl=500)
        name = context["id"]
        assert context["saved"] is True
        unsaved = read(http, text=OTHER)["id"]
        expected = ask(client, name, "What?", seed=6)[0]
    first.stop()
    # Another method's server does not see them.
    other = serve(tiny.with_method(STREAMING), contexts=folder)
    with other.http() as http:
        assert http.get("/v1/contexts").json()["data"] == []
    other.stop()
    second = serve(tiny, contexts=folder)
    with second.http() as http, second.client() as client:
        found = shown(http, name)
        assert (found["state"], found["tokens"]) == ("saved", context["tokens"])
        assert http.get(f"/v1/contexts/{unsaved}").status_code == 404
        assert ask(client, name, "What?", seed=6)[0] == expected
        http.delete(f"/v1/contexts/{name}")
        wait_until(lambda: not list(second.served.contexts.folder.glob("*/")))


@pytest.mark.slow
def test_short_device_memory_drops_texts_and_then_refuses(serve, tiny, monkeypatch):
    """The device says that it is full, whatever the budget says."""
    running = serve(tiny)
    executor = running.served.executor
    read_on = executor.read_on

    def full(key):
        if executor.contexts or full.always:
            executor._prefilling.pop(key).close()
            raise CapacityError("a cache needs more than is free")
        return read_on(key)

    full.always = False
    monkeypatch.setattr(executor, "read_on", full)
    with running.http() as http, running.client() as client:
        names = [read(http, text=text)["id"] for text in (BOOK, OTHER)]
        states = [shown(http, name)["state"] for name in names]
        assert states == ["saved", "ready"]
        assert ask(client, names[0], "What?")[0] == asked(tiny, BOOK, "What?")
        full.always = True
        refused(http, 400, "a cache needs more than is free", text="A third text.")


@pytest.mark.parametrize("named", [True, False])
def test_a_damaged_saved_context_is_read_again(serve, tiny, tmp_path, named, caplog):
    folder = tmp_path / "kept"
    first = serve(tiny, contexts=folder)
    with first.http() as http:
        name = read(http, text=BOOK, chat=False, save=True)["id"]
    first.stop()
    # An array's file is cut off, the manifest is whole.
    (arrays,) = folder.glob("*/*/caches")
    size, largest = max((each.stat().st_size, each) for each in arrays.rglob("*") if each.is_file())
    os.truncate(largest, size // 2)
    second = serve(tiny, contexts=folder)
    with second.http() as http, second.client() as client:
        assert shown(http, name)["state"] == "saved"
        expected = asked(tiny, BOOK, "What?", chat=False)
        if named:
            assert ask(client, name, "What?")[0] == expected
        else:
            check_prompt(client, tiny, f"{BOOK}{tiny.layout(False).question('What?')}")
        # It is saved while answers are given.
        wait_until(lambda: shown(http, name)["saved"])
        assert shown(http, name)["state"] == "ready"
        assert "longctx_contexts_loaded_total 0.0" in http.get("/metrics").text
    assert "its text is read again" in caplog.text and str(folder) in caplog.text
    second.stop()
    third = serve(tiny, contexts=folder)
    with third.client() as client, third.http() as http:
        assert ask(client, name, "What?")[0] == expected
        assert "longctx_contexts_loaded_total 1.0" in http.get("/metrics").text


def test_a_sound_context_that_cannot_be_read_stays(serve, tiny, tmp_path, monkeypatch, caplog):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    first = serve(tiny, contexts=Path("../kept"))
    os.chdir(tmp_path)
    with first.http() as http:
        name = read(http, text=BOOK, chat=False, save=True)["id"]
    first.stop()
    kept = sorted(path for path in (tmp_path / "kept").rglob("*") if path.is_file())
    expected = asked(tiny, BOOK, "What?", chat=False)
    errors = CheckpointError("x cannot be read: Too many open files"), CapacityError("no memory")
    for patched in (*errors, None):
        with monkeypatch.context() as patch:
            if patched:
                patch.setattr(executor, "load_context", Mock(side_effect=patched))
            running = serve(tiny, contexts=tmp_path / "kept")
            with running.http() as http, running.client() as client:
                assert ask(client, name, "What?")[0] == expected
                loaded = f"longctx_contexts_loaded_total {0 if patched else 1}.0"
                assert loaded in http.get("/metrics").text
            running.stop()
        assert sorted(path for path in (tmp_path / "kept").rglob("*") if path.is_file()) == kept
    assert "Too many open files" in caplog.text and "no memory" in caplog.text


def test_a_text_that_is_saved_goes_where_another_cannot_be_saved(serve, tiny, monkeypatch):
    books = [f"{number} {BOOK}" for number in range(4)]
    need = needed_bytes(serve, tiny, books[0])
    running = serve(tiny, context_bytes=int(2.5 * need))

    with running.http() as http:
        names = [read(http, text=books[0])["id"], read(http, text=books[1], save=True)["id"]]
        monkeypatch.setattr(running.served.executor, "save", full_disk)
        names.append(read(http, text=books[2])["id"])
        states = [shown(http, name)["state"] for name in names]
        # The least recently used one stays: it is nowhere else.
        assert states == ["ready", "saved", "ready"]
        answer = refused(http, 500, "", text=books[3])
        assert answer.json()["error"]["code"] == "context_files"


def test_a_context_that_is_deleted_while_it_is_loaded_or_saved(serve, tiny, monkeypatch):
    """Files are removed by one thread, when they are neither loaded nor saved."""
    running = serve(tiny)
    contexts = running.served.contexts
    threads, begun, ended = set(), threading.Event(), threading.Event()
    rmtree, save = shutil.rmtree, context_io.save_arrays

    def noted(path, *given, **how):
        # A folder under this name is no context yet.
        if not str(path).endswith(".partial"):
            threads.add(threading.current_thread().name)
        return rmtree(path, *given, **how)

    def slow(*given, **how):
        begun.set()
        assert ended.wait(patience(20))
        return save(*given, **how)

    monkeypatch.setattr(shutil, "rmtree", noted)
    monkeypatch.setattr(context_io, "save_arrays", slow)
    with running.http() as http:
        name = read(http, text=BOOK)["id"]
        with aside(refused, http, 410, "was deleted before", text=BOOK, save=True):
            assert begun.wait(patience(20))
            listed = [each["id"] for each in http.get("/v1/contexts").json()["data"]]
            assert len(listed) == 2 and name in listed
            for each in listed:
                assert http.delete(f"/v1/contexts/{each}").status_code == 200
            ended.set()
        wait_until(lambda: not (contexts._texts or list(contexts.folder.glob("*/"))))
        assert not list(contexts.folder.glob("*.json"))
    assert threads == {"scheduler"}


def test_contexts_are_limited_in_number_and_time(serve, tiny):
    running = serve(tiny, max_contexts=2, max_ttl=5000)
    with running.http() as http:
        refused(http, 400, "at most 5000 s", text=BOOK, ttl=5001)
        names = [read(http, text=BOOK, ttl=5000)["id"] for _ in range(2)]
        answer = refused(http, 429, "there are 2 contexts already", text=BOOK)
        assert int(answer.headers["retry-after"]) >= 1
        http.delete(f"/v1/contexts/{names[0]}")
        assert read(http, text=OTHER)["state"] == "ready"
    # A job may end shortly after its answer.
    wait_until(lambda: not any(text.tickets for text in running.served.contexts._texts.values()))


def test_a_full_disk_leaves_no_file_in_the_way(serve, tiny, tmp_path, monkeypatch, caplog):
    running = serve(tiny, contexts=tmp_path / "kept")
    folder = running.served.contexts.folder
    write = files.write_all

    def full(file, data):
        if Path(file.name).parent == folder:
            write(file, data[:10])
            raise OSError(errno.ENOSPC, "No space left on device")
        write(file, data)

    with running.http() as http:
        with monkeypatch.context() as patched:
            patched.setattr(files, "write_all", full)
            # The client learns no path of the server; the log has it.
            answer = refused(http, 500, "its log says why", text=BOOK, save=True)
        assert str(folder) not in answer.text and f"{folder}/" in caplog.text
        assert "No space left on device" in caplog.text
        assert http.get("/v1/contexts").json()["data"] == []
        assert not [path for path in folder.glob("*.partial") if path.is_file()]
        assert read(http, text=BOOK, save=True)["saved"] is True


def test_a_server_removes_what_a_killed_one_left_and_shares_with_none(serve, tiny, tmp_path):
    first = serve(tiny, contexts=tmp_path / "kept")
    with first.http() as http:
        name = read(http, text=BOOK, save=True)["id"]
    first.stop()
    folder = first.served.contexts.folder
    whole = sorted(folder.rglob("*"))
    (saved,) = folder.glob("*.json")
    for stray in (f"{saved.stem}.partial", f"{saved.name}.partial", "0123.lock"):
        (folder / stray).write_text("{")
    (folder / "0123.partial").mkdir()
    (folder / "4567").mkdir()
    second = serve(tiny, contexts=tmp_path / "kept")
    assert sorted({*folder.rglob("*")} - {folder / "server.lock"}) == whole
    with second.http() as http:
        assert shown(http, name)["state"] == "saved"
    with pytest.raises(jax_longctx.LongctxError, match="another server keeps its contexts"):
        serve(tiny, contexts=tmp_path / "kept")
