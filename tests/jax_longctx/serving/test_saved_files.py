import contextlib
import functools
import json
import os
import shutil

import pytest

from jax_longctx.engine import context_io
from jax_longctx.errors import CheckpointError, InputError
from jax_longctx.files import seal
from jax_longctx.serving import contexts as module
from jax_longctx.serving.contexts import Contexts
from tests.jax_longctx.serving.tiny import BOOK, asked, chat, read
from tests.support import swap

MADE = {"method": {"name": "full"}}
ROWS = {"a": [1, 2, 3], "b": [4, 5, 6]}


def write_context(folder, row, **changes):
    """A saved context's manifest: its arrays are not looked at before they are loaded."""
    folder.mkdir(exist_ok=True)
    described = {"made_by": MADE, "rows": [row], "total": [len(row)], **changes}
    (folder / context_io.MANIFEST).write_text(json.dumps(seal(context_io.FORMAT, described)))


def kept(folder):
    """The files KEY.json of two saved texts, and their ids, by the texts' names."""
    contexts, files, names = Contexts(folder, MADE, ttl=100), {}, {}
    for name, row in ROWS.items():
        text = contexts.text(row, len(row))
        write_context(contexts.path(text), row)
        names[name] = contexts.enter(text, chat=True, ttl=None, save=True).id
        contexts.write_entries(text)
        files[name] = folder / f"{text.key}.json"
    contexts.close()
    return files, names


def found(folder):
    """What a later server finds: ids by the names of the texts that they name."""
    # Earlier versions did not state all weights.
    contexts = Contexts(folder, MADE | {"all_weights": "a hash"}, ttl=100)
    listed = [(entry.text.tokens.tolist(), entry.id) for entry in contexts.listed()]
    contexts.close()
    return {name: each for name, row in ROWS.items() for tokens, each in listed if tokens == row}


def test_what_a_server_writes_is_its_owners_alone(serve, tiny, tmp_path):
    before = os.umask(0o022)
    try:
        for folder in (tmp_path / "a", tmp_path / "b" / "new"):
            running = serve(tiny, contexts=folder)
            with running.http() as http:
                read(http, text=BOOK, save=True)
            (own,) = folder.iterdir()
            running.stop()
            modes = {path: path.stat().st_mode & 0o777 for path in [own, *own.rglob("*")]}
            assert len(modes) > 5
            for path, mode in modes.items():
                assert mode == (0o700 if path.is_dir() else 0o600), path
            # As an earlier version left it.
            own.chmod(0o755)
            serve(tiny, contexts=folder).stop()
            assert own.stat().st_mode & 0o777 == 0o700
    finally:
        os.umask(before)


def resealed(a, b, name, value):
    """The file of `b` with another value, of the text or of its entry, and the right digest."""
    fields = json.loads(b.read_text())
    (fields if name in fields else fields["entries"][0])[name] = value
    del fields["format"], fields["sha256"]
    b.write_text(json.dumps(seal(module.FORMAT, fields)))


def unsealed(*files):
    """As the version before wrote them."""
    for file in files:
        fields = json.loads(file.read_text())
        file.write_text(json.dumps({name: fields[name] for name in ("total", "entries")}))


# What is done to the files of `a` and `b`, and which of them a server finds then.
FAULTS = {
    "swapped": (swap, ""),
    "swapped folders": (lambda a, b: swap(a.with_suffix(""), b.with_suffix("")), ""),
    "of an earlier version": (lambda a, b: [unsealed(a), unsealed(b)], "ab"),
    "copied": (shutil.copy, "a"),
    "edited": (lambda a, b: b.write_text(b.read_text().replace("100", "900")), "a"),
    "a pipe": (lambda a, b: [b.unlink(), os.mkfifo(b)], "a"),
    "no folder": (lambda a, b: shutil.rmtree(b.with_suffix("")), "a"),
    "open to others": (lambda a, b: b.chmod(0o646), "a"),
    "a folder open to others": (lambda a, b: b.with_suffix("").chmod(0o770), "a"),
    "a file open to others": (
        lambda a, b: (b.with_suffix("") / context_io.MANIFEST).chmod(0o666),
        "a",
    ),
    "another text": (lambda a, b: write_context(b.with_suffix(""), [4, 5, 7]), "a"),
    "another method": (lambda a, b: write_context(b.with_suffix(""), [4, 5, 6], made_by={}), "a"),
}
for name, value in (
    *(("id", 5), ("id", "../a"), ("chat", "yes"), ("created", float("inf")), ("ttl", -1)),
    *(("save", 1), ("more", 1), ("total", "3"), ("total", 7), ("key", "0" * 32), ("entries", [])),
    ("tokenizer", "another's"),
):
    FAULTS[f"{name} {value}"] = (functools.partial(resealed, name=name, value=value), "a")


@pytest.mark.parametrize("fault", FAULTS)
def test_only_the_files_of_a_text_are_used_for_it(tmp_path, caplog, fault):
    files, names = kept(tmp_path)
    assert found(tmp_path) == names
    change, left = FAULTS[fault]
    change(*files.values())
    before = sorted(tmp_path.rglob("*"))
    assert found(tmp_path) == {name: names[name] for name in left}
    # A line for each says which it is, and nothing is removed.
    assert len(caplog.messages) == 2 - len(left)
    for name in set(ROWS) - set(left):
        assert any(files[name].stem in line and "is not used" in line for line in caplog.messages)
    assert sorted(tmp_path.rglob("*")) == before


def of_another(folder, monkeypatch):
    if os.geteuid() == 0:
        os.chown(folder, 4321, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 4321)


def test_a_folder_that_others_could_write_is_closed_and_another_users_refused(
    tmp_path, monkeypatch
):
    _, names = kept(tmp_path)
    tmp_path.chmod(0o777)
    assert found(tmp_path) == names and tmp_path.stat().st_mode & 0o777 == 0o700
    of_another(tmp_path, monkeypatch)
    with pytest.raises(InputError, match=r"cannot be used: it belongs to user .*--contexts"):
        found(tmp_path)


def test_what_others_may_write_under_a_server_is_not_loaded(tmp_path):
    kept(tmp_path)
    contexts = Contexts(tmp_path, MADE, ttl=100)
    text = contexts.texts[0]
    contexts.check_private(text)
    for path in (tmp_path, contexts.path(text), contexts.path(text) / context_io.MANIFEST):
        before = path.stat().st_mode
        path.chmod(before | 0o002)
        with pytest.raises(CheckpointError, match=f"{path} is not to be trusted: others can"):
            contexts.check_private(text)
        path.chmod(before)
    contexts.close()


def test_contexts_that_are_swapped_under_a_server_are_read_again(serve, tiny, tmp_path, caplog):
    books = [f"{number} {BOOK}" for number in range(2)]
    first = serve(tiny, contexts=tmp_path / "kept")
    with first.http() as http:
        names = [read(http, text=book, save=True)["id"] for book in books]
    first.stop()
    second = serve(tiny, contexts=tmp_path / "kept")
    swap(*(path for path in second.served.contexts.folder.iterdir() if path.is_dir()))
    with second.client() as client:
        for name, book in zip(names, books, strict=True):
            answer = chat(client, "What?", name, seed=3, max_tokens=12).choices[0].message.content
            assert answer == asked(tiny, book, "What?", seed=3)
    assert sum("holds another text" in message for message in caplog.messages) == 2


@contextlib.contextmanager
def replicas(folder, count):
    """The books of replicas with one folder."""
    made = [Contexts(folder, MADE, ttl=100, common=True) for _ in range(count)]
    yield made
    for each in made:
        each.close()


def saved(contexts, row, route=None):
    """The id of a text that was read and saved."""
    text = contexts.text(row, len(row))
    if not text.saved:
        write_context(contexts.path(text), row)
    entry = contexts.enter(text, chat=True, ttl=None, save=False, route=route)
    assert entry.save
    contexts.write_entries(text)
    return entry.id


def test_a_replica_finds_what_another_one_saved_and_not_what_was_deleted(tmp_path, caplog):
    with replicas(tmp_path, 3) as (first, second, third):
        assert {each.folder.stat().st_mode & 0o777 for each in (first, third)} == {0o700}
        book, other = saved(first, ROWS["a"], "0123abcd"), saved(second, ROWS["b"])
        assert book.startswith("ctx_0123abcd")
        assert third.find(book).text.tokens.tolist() == ROWS["a"]
        # The same text is not read again, and has the ids of both.
        again = saved(second, ROWS["a"])
        assert second.find(book).text is second.find(again).text
        assert third.find(other) and first.find(again)
        assert third.remove(book, deleted=True)
        assert not any(each.find(book) for each in (first, second, third))
        assert third.find(again) and first.find(again)
    assert not caplog.records
    # The first to come takes the first place, and what is in it.
    with replicas(tmp_path, 2) as (first, second):
        assert {each.id for each in first.listed()} == {again}
        assert not first.find(book) and second.find(again) and first.find(other)


def test_a_context_that_another_replica_is_removing_is_not_found(tmp_path, caplog):
    with replicas(tmp_path, 2) as (first, second):
        name = saved(first, ROWS["a"])
        text = first.find(name).text
        shutil.rmtree(first.path(text))
        assert second.find(name) is None
    assert "a context of another server is not used" in caplog.text
