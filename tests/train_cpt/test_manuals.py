"""English collected from a machine: what counts as a document, and what is left out."""

import gzip
import hashlib
import json

import pytest

from jax_longctx.errors import InputError
from train_cpt.manuals import collect


def prose(words, count=60):
    """Paragraphs of English that differ from those of other words."""
    return "\n\n".join(f"The {words} of part {number} is in the book." for number in range(count))


def collected(tmp_path, least=300):
    size = collect([tmp_path / "machine"], tmp_path / "out.jsonl", least=least)
    documents = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert size == (len(documents), sum(len(document["text"]) for document in documents))
    return {document["from"].split("/machine/")[1]: document for document in documents}


def test_manuals_and_docstrings_are_documents_and_repeats_are_left_out(tmp_path):
    folder = tmp_path / "machine"
    (folder / "package").mkdir(parents=True)
    (folder / "guide.txt").write_text(prose("engine"))
    (folder / "guide.md.gz").write_bytes(gzip.compress(prose("kernel").encode()))
    (folder / "again.rst").write_text(prose("engine", 50) + "\n\n" + prose("cache"))
    (folder / "same.txt").write_text(prose("engine"))
    (folder / "changelog.txt").write_text(prose("change"))
    (folder / "numbers.txt").write_text("\n\n".join(f"one two three {n}" for n in range(500)))
    (folder / "short.txt").write_text("The end.")
    (folder / "broken.txt.gz").write_bytes(b"The end")
    (folder / "package" / "a.py").write_text(
        f'"""{prose("module")}"""\nclass A:\n    """{prose("class", 3)}"""\nx = "The x."\n'
    )
    (folder / "package" / "b.py").write_text(f'def f():\n    """{prose("function")}"""\n')
    (folder / "package" / "c.py").write_text("no python")
    found = collected(tmp_path)
    assert sorted(found) == ["again.rst", "guide.md.gz", "guide.txt", "package"]
    assert found["guide.md.gz"]["text"] == prose("kernel")
    # `again.rst` is read first: what it shares with the guide stays there.
    assert found["guide.txt"]["text"] == prose("engine").split("part 49 is in the book.\n\n")[1]
    texts = [prose("module"), prose("class", 3), prose("function")]
    assert found["package"]["text"] == "\n\n".join(texts)
    digest = hashlib.sha256(prose("kernel").encode()).hexdigest()
    assert found["guide.md.gz"]["sha256"] == digest
    paragraphs = [p for d in found.values() for p in d["text"].split("\n\n")]
    assert len(paragraphs) == len(set(paragraphs))


def test_nothing_is_overwritten_and_nothing_found_is_said(tmp_path):
    (tmp_path / "machine").mkdir()
    with pytest.raises(InputError, match="no document of 9 characters"):
        collect([tmp_path / "machine"], tmp_path / "out.jsonl", least=9)
    with pytest.raises(InputError, match="gone is no folder"):
        collect([tmp_path / "gone"], tmp_path / "out.jsonl")
    (tmp_path / "out.jsonl").write_text("mine")
    with pytest.raises(InputError, match="exists already"):
        collect([tmp_path / "machine"], tmp_path / "out.jsonl")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["machine", "out.jsonl"]
