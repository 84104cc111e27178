"""Documents to plain text: small ones made here, damage, and bombs."""

import gzip
import importlib
import io
import mmap
import random
import sys
import time
import zipfile
from pathlib import Path

import pytest

from jax_longctx.errors import InputError
from jax_longctx.text import child, documents, formats
from jax_longctx.text.documents import Document, Joined, documents_in, read_documents
from tests.patience import patience

PAGE = b"""<html><head><title>Title</title><style>p {x: y}</style>
<script>if (a<b) c()</script></head>
<body><h1>Head &amp; shoulders</h1><p>One <b>bold</b> word,
over two lines.<br>Third<!-- no --> line</p><ul><li>a<li>b</ul><pre>x\n  y</pre>
<table><tr><td>1</td><td>2</td></tr><tr><td>3</td><td>4</table></body></html>"""
SHOWN = (
    "Title\n\nHead & shoulders\n\nOne bold word, over two lines.\nThird line\n\n- a\n- b\n\nx\n  y"
    "\n\n1\t2\n3\t4"
)


def pdf(*pages, more=b"", depth=0):
    """A PDF of one line of text on each page; None is a page without text.

    Args:
      depth: so many parts of a page each show the next one 8 times.
    """
    objects = [b"<< /Type /Catalog /Pages 2 0 R >>", b"", b"<< /Type /Font /Subtype /Type1 "]
    objects[2] += b"/BaseFont /Helvetica >>"
    kids = []
    for number in range(depth):
        inner = b"<< /XObject << /X %d 0 R >> >>" % (4 + max(number - 1, 0))
        shown = b"/X Do " * 8 if number else b"BT (x) Tj ET"
        objects.append(
            b"<< /Type /XObject /Subtype /Form /BBox [0 0 9 9] /Resources %s /Length %d >>\n"
            b"stream\n%s\nendstream" % (inner, len(shown), shown)
        )
    last = b"/XObject << /X %d 0 R >>" % (3 + depth) if depth else b""
    for text in pages:
        drawn = b"" if text is None else b"BT /F1 12 Tf 72 700 Td (%s) Tj ET" % text.encode()
        drawn += b" /X Do" * bool(depth)
        objects.append(b"<< /Length %d >>\nstream\n%s\nendstream" % (len(drawn), drawn))
        kids.append(len(objects) + 1)
        objects.append(
            b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 600 800] /Contents %d 0 R "
            b"/Resources << /Font << /F1 3 0 R >> %s >> >>" % (len(objects), last)
        )
    shown = b" ".join(b"%d 0 R" % kid for kid in kids)
    objects[1] = b"<< /Type /Pages /Count %d /Kids [%s] >>" % (len(kids), shown)
    made, offsets = b"%PDF-1.4\n", []
    for number, content in enumerate(objects, start=1):
        offsets.append(len(made))
        made += b"%d 0 obj\n%s\nendobj\n" % (number, content)
    table = b"".join(b"%010d 00000 n \n" % offset for offset in offsets)
    end = b"trailer << /Size %d /Root 1 0 R %s >>\n" % (len(objects) + 1, more)
    head = b"xref\n0 %d\n0000000000 65535 f \n" % (len(objects) + 1)
    return made + head + table + end + b"startxref\n%d\n%%%%EOF" % len(made)


def packed(files):
    """A zip archive of these names and contents."""
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return made.getvalue()


def docx(body, **notes):
    parts = {"document": f"<w:body>{body}</w:body>", **notes}
    spaces = "xmlns:w='urn:w' xmlns:mc='urn:mc'"
    return packed({f"word/{n}.xml": f"<w:{n} {spaces}>{t}</w:{n}>" for n, t in parts.items()})


def epub(*chapters, more=()):
    """An EPUB whose files stand in the opposite order of its chapters."""
    texts = {f"c {n}.html": f"<p>{text}</p>" for n, text in reversed([*enumerate(chapters)])}
    items = "".join(f"<item id='{name}' href='../t/{name.replace(' ', '%20')}'/>" for name in texts)
    spine = "".join(f"<itemref idref='c {n}.html'/>" for n in range(len(chapters)))
    book = f"<package><manifest>{items}</manifest><spine>{spine}</spine></package>"
    first = {"META-INF/container.xml": "<c><rootfile full-path='in/b.opf'/></c>", "in/b.opf": book}
    return packed(first | {f"t/{name}": text for name, text in texts.items()} | dict(more))


def text_of(raw, name):
    (document,) = documents_in(raw, name)
    return document.text


def test_html_as_a_page_shows_it():
    assert text_of(PAGE, "a.html") == SHOWN
    assert text_of(PAGE, "stdin") == SHOWN
    # A name that says otherwise: the text as it stands.
    assert text_of(PAGE, "a.txt") == PAGE.decode()
    latin = "<meta charset=iso-8859-1><p>Größe".encode("latin-1")
    assert text_of(latin, "a.htm") == "Größe"
    # In time that grows with the length alone.
    wide = b"a" + b" " * 1_000_000 + b"b"
    assert text_of(b"<pre>%s \nc" % wide, "a.html") == f"{wide.decode()}\nc"
    deep = b"<div>" * 3000 + b"text"
    with pytest.raises(InputError, match="Excessive depth"):
        text_of(deep, "a.html")


def test_pages_of_pdf_and_chapters_of_epub():
    for raw, name in [(pdf("First page", None, "Third"), "a.pdf"), (epub("One", "", "Two"), "b")]:
        notes = []
        (document,) = documents_in(raw, name, notes.append)
        assert notes == [f"{name}: 1 of 3 pages hold no text"]
        first, third = document.text.split()[0], document.text.split()[-1]
        assert (first, third) in [("First", "Third"), ("One", "Two")]
        at = document.text.index(third)
        assert document.pages[0] == 0 and document.pages[2] == at
        joined = Joined.of([document])
        assert [joined.place(x)[1] for x in (0, at - 1, at, at + 3)] == [1, 2, 3, 3]
    assert Joined.of([Document("a", "text")]).place(2) == ("a", None)
    # Readers of PDF look for its head in the first 1,024 bytes.
    assert text_of(b"\r\n" + pdf("late"), "a.pdf").strip() == "late"


def test_docx():
    one, two, three, four = (f"<w:p><w:r><w:t>{n}</w:t></w:r></w:p>" for n in range(1, 5))
    body = (
        "<w:p><w:pPr><w:tabs><w:tab/></w:tabs></w:pPr><w:r><w:t>One</w:t><w:tab/><w:t> t</w:t>"
        "</w:r><w:r><w:t>wo</w:t><w:br/><w:t>three</w:t></w:r></w:p>"
        f"<w:tbl><w:tr><w:tc>{one}</w:tc><w:tc>{two}</w:tc></w:tr>"
        f"<w:tr><w:tc>{three}</w:tc><w:tc>{four}</w:tc></w:tr></w:tbl>"
        f"<w:p><mc:AlternateContent><mc:Choice><w:r><w:t>new</w:t></w:r></mc:Choice>"
        f"<mc:Fallback>{one}</mc:Fallback></mc:AlternateContent></w:p>"
    )
    found = text_of(docx(body, footnotes="<w:p><w:r><w:t>A note.</w:t></w:r></w:p>"), "a.docx")
    assert found == "One\t two\nthree\n\n1\t2\n3\t4\n\nnew\n\nA note."


def test_folders_and_archives(tmp_path):
    (tmp_path / "b" / ".git").mkdir(parents=True)
    files = {"c.md": b"# C", "a.html": b"<p>A", "b/p.txt.gz": gzip.compress(b"P"), ".no": b"N"}
    files |= {"b/.git/x": b"X", "b/pic.png": b"\x89PNG\r\n\x1a\n\0\0\xff", "b/empty": b""}
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "all.zip").write_bytes(packed(files))
    expected = [("a.html", "A"), ("b/p.txt", "P"), ("c.md", "# C")]
    for where in (tmp_path / "all.zip", tmp_path):
        notes = []
        found = read_documents([where], notes.append)
        both = [(f"{tmp_path}/all.zip/{name}", text) for name, text in expected]
        if where == tmp_path:
            both = [(f"{where}/{n}", t) for n, t in expected[:1]] + both
            both += [(f"{where}/{n}", t) for n, t in expected[1:]]
        assert [(each.name, each.text) for each in found] == both
        assert notes[-1].startswith(f"left out of {where}: 2 that are no text ({where}/b/empty, ")


def test_names_in_archives_stay_in_their_line():
    raw = packed({"./a": "A", "./.b": "B", "c/../d\n\x1b[2J": "D"})
    found = documents_in(raw, "x.zip")
    assert [each.name for each in found] == ["x.zip/./a", "x.zip/c/../d  [2J"]


def test_one_text_of_several_documents():
    documents = [
        Document("a", "one"),
        Document("b.pdf", "two\n\nthree", (0, 5)),
        Document("c", "x"),
    ]
    joined = Joined.of(documents)
    assert (
        joined.text == "Document: a\n\none\n\nDocument: b.pdf\n\ntwo\n\nthree\n\nDocument: c\n\nx"
    )
    places = {"one": ("a", None), "Document: b": ("b.pdf", 1), "two": ("b.pdf", 1)}
    places |= {"three": ("b.pdf", 2), "x": ("c", None)}
    for word, place in places.items():
        assert joined.place(joined.text.index(word)) == place
    # A single document stands as it is.
    assert Joined.of(documents[:1]) == Joined("one", ((0, "a", None),))


WRONG = {
    "scan.pdf": (pdf(None, None), "holds no text: its 2 pages are pictures, .*ocrmypdf"),
    "cut.pdf": (pdf("text")[:200], r"is a damaged PDF \(.*get it again"),
    "fake.pdf": (b"text", "is no PDF, as its name says"),
    "fake.docx": (b"text", "is no DOCX, as its name says"),
    "cut.zip": (packed({"a": "x" * 99})[:60], "is a damaged zip archive"),
    "cut.gz": (gzip.compress(b"x" * 99)[:-4], "is a damaged archive"),
    "a.odt": (packed({"content.xml": "<x/>"}), "is an Office document, but no DOCX"),
    "bad.docx": (docx("<w:p>"), "is a damaged XML file"),
    "bomb.docx": (
        packed({"word/document.xml": "<!DOCTYPE x [<!ENTITY a 'y'>]><x>&a;</x>"}),
        "empty",
    ),
    "lost.epub": (packed({"META-INF/container.xml": "<c/>"}), "damaged EPUB"),
    "drm.epub": (
        epub("x", more={"META-INF/encryption.xml": "t/c 0.html"}),
        "is an encrypted EPUB",
    ),
    "x.bin": (b"\0\xff\0", "is binary data of an unknown kind; give texts, PDF"),
    "a.tar": (b"a" * 257 + b"ustar", "is a tar archive; unpack it"),
    "latin": ("Größe".encode("latin-1"), "is not UTF-8 text .*iconv"),
    "codec.html": (b"<meta charset=undefined>\xff", "is HTML, but not in undefined"),
    "half.html": (b"<meta charset=unicode_escape>\xff\\ud800", "but not in unicode_escape"),
    "old.doc": (b"\xd0\xcf\x11\xe0", "is an old Office document"),
    "empty": (b" \n", "is empty; give a text"),
    "none.zip": (packed({"a.bin": b"\0\xff"}), "holds no document"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_holds_no_text_is_an_error(name):
    raw, said = WRONG[name]
    with pytest.raises(InputError, match=said) as error:
        documents_in(raw, name)
    assert str(error.value).startswith(name) and "\n" not in str(error.value)


def test_encrypted_files():
    locked = bytearray(packed({"a.txt": "text"}))
    for head, flags in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        locked[locked.index(head) + flags] |= 1
    with pytest.raises(InputError, match="is an encrypted zip archive; unpack it"):
        documents_in(bytes(locked), "a.zip")
    key = b"<%s>" % (b"00" * 32)
    filters = b"/Encrypt << /Filter /Standard /V 1 /R 2 /P -4 /O %s /U %s >> " % (key, key)
    with pytest.raises(InputError, match=r"is an encrypted PDF; .*qpdf"):
        documents_in(pdf("text", more=filters + b"/ID [<00> <00>]"), "a.pdf")


@pytest.mark.parametrize(
    ("name", "raw"),
    [
        ("a.pdf", lambda: pdf("text", depth=14)),
        ("a.html", lambda: b"<p %s>" % b" ".join(b"a%d" % n for n in range(80_000))),
        ("a.zip", lambda: packed({"in": pdf("text", depth=14)})),
    ],
)
def test_bounds_on_the_time_of_reading(monkeypatch, name, raw):
    monkeypatch.setitem(child.READING, "seconds", (0.5, 0))
    with pytest.raises(InputError, match=f"{name} cannot be read: this takes more than 0.5 s of"):
        documents_in(raw(), name)
    # The next one has a new process.
    monkeypatch.setitem(child.READING, "seconds", (patience(20), 0))
    assert text_of(pdf("text"), "a.pdf") == "text"


def test_bounds_on_the_memory_of_reading(monkeypatch):
    monkeypatch.setitem(child.READING, "memory", (2**26, 0))
    with pytest.raises(InputError, match=r"a\.html cannot be read: this (fails: |ends the)"):
        documents_in(b"<p>" + b"text " * 2**23, "a.html")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_an_idle_process_holds_no_document_and_outlives_a_fault():
    def held():
        return int(Path(f"/proc/{process.pid}/statm").read_text().split()[1]) * mmap.PAGESIZE

    assert child.read_apart(b"<p>text", name="a.html") == {"error": "fails: KeyError: 'most'"}
    text_of(PAGE, "a.html")
    process = child._idle[1].queue[-1].start()
    # Others would take address space.
    assert len([*Path(f"/proc/{process.pid}/task").iterdir()]) == 1
    most, end = held() + 2**26, time.monotonic() + patience(20)
    text_of(b"<p>" + b"text " * 2**23, "a.html")
    assert child._idle[1].queue[-1].start() is process
    while held() > most:
        assert time.monotonic() < end
        time.sleep(0.01)


def test_bounds_on_what_is_unpacked(monkeypatch):
    monkeypatch.setattr(documents._Reader, "apart", False)
    monkeypatch.setattr(documents, "FREE_BYTES", 1000)
    for raw in (gzip.compress(b"x" * 500_000), packed({"a": b"x" * 500_000})):
        with pytest.raises(InputError, match="unpacks to over 200 times its size"):
            documents_in(raw, "a")
    many = packed({f"{n}": f"{n} text" * 20 for n in range(10)})
    with pytest.raises(InputError, match=r"unpacks to more than is read, 1\.0 KiB"):
        documents_in(many, "a", most=1024)
    with pytest.raises(InputError, match=r"a\.pdf unpacks to more than is read"):
        documents_in(pdf("long " * 300), "a.pdf", most=1024)
    monkeypatch.setattr(documents, "MOST_FILES", 9)
    with pytest.raises(InputError, match="has over 9 files"):
        documents_in(many, "a")
    nested = b"text"
    for _ in range(4):
        nested = packed({"a": nested})
    with pytest.raises(InputError, match="archives in archives are read 3 deep"):
        documents_in(nested, "a")
    monkeypatch.setattr(formats, "MOST_PAGES", 2)
    with pytest.raises(InputError, match="has 3 pages, at most 2 are read"):
        documents_in(pdf("a", "b", "c"), "a.pdf")


@pytest.mark.parametrize("name", ["a.html", "a.pdf", "a.docx", "a.epub"])
def test_without_the_extra_a_line_names_it(monkeypatch, name):
    kinds = {"a.html": PAGE, "a.pdf": pdf("x"), "a.docx": docx(""), "a.epub": epub("x")}

    def absent(module):
        raise ModuleNotFoundError(name=module.partition(".")[0])

    monkeypatch.setattr(importlib, "import_module", absent)
    monkeypatch.setattr(documents._Reader, "apart", False)
    said = rf"{name} needs the package (lxml|pypdfium2); pip install 'jax-longctx\[documents\]'"
    with pytest.raises(InputError, match=said):
        documents_in(kinds[name], name)


def test_damage_is_an_error_in_one_line(monkeypatch):
    # In a process of its own, a fault of ours would be an error too.
    monkeypatch.setattr(documents._Reader, "apart", False)
    rng = random.Random(0)
    wholes = [pdf("some text"), docx("<w:p><w:r><w:t>x</w:t></w:r></w:p>"), epub("a", "b")]
    for whole in [*wholes, gzip.compress(PAGE), packed({"a.html": PAGE})]:
        for _ in range(40):
            broken = bytearray(whole)
            for _ in range(rng.randint(1, 8)):
                broken[rng.randrange(4, len(broken))] = rng.randrange(256)
            try:
                documents_in(bytes(broken), "a", lambda line: None)
            except InputError as error:
                assert "\n" not in str(error)
