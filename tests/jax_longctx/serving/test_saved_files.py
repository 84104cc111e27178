"""Files of saved contexts that are damaged, swapped or foreign: none is used, one line says why."""

import json
import logging
import os
import shutil

import pytest

from jax_longctx.engine import context_io
from jax_longctx.models.storage import seal
from jax_longctx.serving import contexts as module
from jax_longctx.serving.contexts import Contexts
from tests.jax_longctx.serving.tiny import BOOK, asked, chat, read

MADE = {"model": {"vocab_size": 100}, "method": {"name": "full"}}
ROWS = {"a": [1, 2, 3], "b": [4, 5, 6]}


def write_context(folder, row, **changes):
    """A saved context's manifest: its arrays are not looked at before they are loaded."""
    folder.mkdir(exist_ok=True)
    described = {"made_by": MADE, "rows": [row], "total": [len(row)], **changes}
    sealed = seal(context_io.FORMAT, described)
    (folder / context_io.MANIFEST).write_text(json.dumps(sealed))


def kept(folder):
    """Two saved texts: by name their files KEY.json, and the ids that name them."""
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
    """What a later server finds: ids by name of the text that they name."""
    contexts = Contexts(folder, MADE, ttl=100)
    listed = [(entry.text.tokens.tolist(), entry.id) for entry in contexts.listed()]
    contexts.close()
    return {name: each for name, row in ROWS.items() for tokens, each in listed if tokens == row}


def swap(first, second):
    aside = first.with_name("aside")
    first.rename(aside)
    second.rename(first)
    aside.rename(second)


def resealed(file, **changes):
    """The file with other values, of the text or of its entry, and with the right digest."""
    fields = json.loads(file.read_text())
    entry = fields["entries"][0]
    for name, value in changes.items():
        (entry if name in entry or name == "more" else fields)[name] = value
    fields = {name: value for name, value in fields.items() if name not in ("format", "sha256")}
    file.write_text(json.dumps(seal(module.FORMAT, fields)))


def unsealed(*files):
    """As the version before wrote them."""
    for file in files:
        fields = json.loads(file.read_text())
        file.write_text(json.dumps({name: fields[name] for name in ("total", "entries")}))


def pipe(file):
    file.unlink()
    os.mkfifo(file)


# What is done to the files of `a` and `b`, and which of them a server finds then.
FAULTS = {
    "swapped": (lambda a, b: swap(a, b), ""),
    "swapped folders": (lambda a, b: swap(a.with_suffix(""), b.with_suffix("")), ""),
    "copied": (lambda a, b: shutil.copy(a, b), "a"),
    "cut": (lambda a, b: os.truncate(b, 100), "a"),
    "emptied": (lambda a, b: b.write_text(""), "a"),
    "edited": (lambda a, b: b.write_text(b.read_text().replace("100", "900")), "a"),
    "nested": (lambda a, b: b.write_text("[" * 100_000), "a"),
    "a list": (lambda a, b: b.write_text("[]"), "a"),
    "a pipe": (lambda a, b: pipe(b), "a"),
    "no manifest": (lambda a, b: shutil.rmtree(b.with_suffix("")), "a"),
    "of an earlier version": (lambda a, b: unsealed(a, b), "ab"),
    "the same id": (
        lambda a, b: resealed(b, id=json.loads(a.read_text())["entries"][0]["id"]),
        "",
    ),
}
FAULTS |= {
    f"{name} {value!r}": (lambda a, b, change={name: value}: resealed(b, **change), "a")
    for name, value in [
        ("id", 5),
        ("id", "../a"),
        ("chat", "yes"),
        ("created", float("inf")),
        ("ttl", -1),
        ("ttl", float("nan")),
        ("save", 1),
        ("more", 1),
        ("total", "3"),
        ("total", 7),
        ("key", "0" * 32),
        ("entries", {}),
    ]
}
FAULTS |= {
    f"the context's {name} {value!r}": (
        lambda a, b, change={name: value}: write_context(b.with_suffix(""), ROWS["b"], **change),
        "a",
    )
    for name, value in [
        ("made_by", {**MADE, "method": {"name": "quest"}}),
        ("rows", [[4, 5, 100]]),
        ("rows", [[4, 5, 6.0]]),
        ("rows", [[4, 5, 7]]),
        ("rows", 5),
        ("rows", []),
        ("total", [4]),
    ]
}


@pytest.mark.parametrize("fault", FAULTS)
def test_only_the_files_of_a_text_are_used_for_it(tmp_path, caplog, fault):
    files, names = kept(tmp_path)
    assert found(tmp_path) == names
    change, left = FAULTS[fault]
    change(*files.values())
    before = sorted(tmp_path.rglob("*"))
    assert found(tmp_path) == {name: names[name] for name in left}
    # A line for each says which it is, and nothing is removed.
    said = [message for message in caplog.messages if "is not used" in message]
    assert len(said) == len(caplog.messages) == 2 - len(left)
    for name in set(ROWS) - set(left):
        assert any(files[name].stem in line for line in said)
    assert sorted(tmp_path.rglob("*")) == before
    # The text can be read and saved again.
    contexts = Contexts(tmp_path, MADE, ttl=100)
    text = contexts.text(ROWS["b"], 3)
    contexts.remove_files(text)
    write_context(contexts.path(text), ROWS["b"])
    name = contexts.enter(text, chat=False, ttl=None, save=True).id
    contexts.write_entries(text)
    contexts.close()
    assert found(tmp_path)["b"] == name or "b" in left


def test_contexts_that_are_swapped_under_a_server_are_read_again(serve, tiny, tmp_path, caplog):
    books = [f"{number} {BOOK}" for number in range(2)]
    first = serve(tiny, contexts=tmp_path / "kept")
    with first.http() as http:
        names = [read(http, text=book, save=True)["id"] for book in books]
    first.stop()
    second = serve(tiny, contexts=tmp_path / "kept")
    swap(*(path for path in second.served.contexts.folder.iterdir() if path.is_dir()))
    with second.client() as client, caplog.at_level(logging.WARNING):
        for name, book in zip(names, books, strict=True):
            answer = chat(client, "What?", name, seed=3, max_tokens=12).choices[0].message.content
            assert answer == asked(tiny, book, "What?", seed=3)
    assert sum("holds another text" in message for message in caplog.messages) == 2
