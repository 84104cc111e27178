"""Documents as they come: files, folders and archives, read to plain text.

A file's first bytes say what it is (PDF, zip, gzip). HTML is known by its name, or by its beginning
where the name has no ending. Anything else is UTF-8 text as it stands, Markdown too. The extra
`documents` is for PDF, HTML, EPUB and DOCX (see `formats`).

A folder or a zip archive gives a document for each file, in the order of names. What is no document
there, such as a picture, is left out with a note. Bounds hold for what is unpacked, so that a small
file cannot fill the memory. What has markup, or is packed, is read in a process of its own, within
limits of time and memory (`child`): the libraries take hours over some small files.
"""

import base64
import bisect
import dataclasses
import gzip
import io
import itertools
import logging
import lzma
import os
import re
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path, PurePath
from typing import Any, Literal

from jax_longctx.errors import InputError, NoTextError
from jax_longctx.files import decoded, file_errors, read_bytes
from jax_longctx.memory import shown_bytes
from jax_longctx.text import formats
from jax_longctx.text.child import read_apart

log = logging.getLogger(__name__)

# Of one call: bytes that are unpacked, with characters of PDFs; files of folders and archives.
MOST_BYTES, MOST_FILES = 2**28, 10_000
# Of one file: bytes unpacked from each byte, above those that may be unpacked from any.
MOST_RATIO, FREE_BYTES = 200, 2**24
# Archives in archives.
MOST_NESTED = 3

_HTML = (".html", ".htm", ".xhtml")
# Names that promise what the first bytes must show.
_PROMISED = (".pdf", ".docx", ".epub", ".zip", ".gz")
_LIKE_HTML = re.compile(rb"(\xef\xbb\xbf)?\s*(<\?xml[^>]*>\s*)?<(!doctype\s+html|html)\b", re.I)
# Members of archives that have a name with a dot in front; `./` is no name.
_HIDDEN = re.compile(r"(^|/)\.(?!\.?(/|$))")
# What would end a line, or steer a terminal, in a member's name.
_CONTROL = re.compile(r"[\0-\x1f\x7f-\x9f]")
# Beginnings of binary files that `files.decoded` names: old Office documents, UTF-16.
_TOLD = (b"\xd0\xcf\x11\xe0", b"\xff\xfe", b"\xfe\xff")
# What `gzip` and `zipfile` raise of damaged files.
_DAMAGE = (zipfile.BadZipFile, lzma.LZMAError, zlib.error)
_DAMAGE += (EOFError, NotImplementedError, OSError, ValueError)
_GIVE = "give texts, PDF, HTML, EPUB, DOCX, or gz and zip of these"
Note = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Document:
    """The text of one file.

    Attributes:
      name: its path as given; `ARCHIVE/MEMBER` in an archive.
      pages: offset in the text, in characters, where each page or chapter begins; empty if none.
    """

    name: str
    text: str
    pages: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Joined:
    """Documents as one text. Where there are several, a line `Document: NAME` heads each.

    Attributes:
      places: offset in the text, in characters, of each document and page, with document and page.
      notes: what was left out.
    """

    text: str
    places: tuple[tuple[int, str, int | None], ...] = ()
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, documents: Iterable[Document], notes: Iterable[str] = ()) -> "Joined":
        """Joins them in this order."""
        documents, parts, size = list(documents), list[str](), 0
        places = list[tuple[int, str, int | None]]()
        for document in documents:
            name, begins = document.name, size
            if len(documents) > 1:
                parts.append(f"{'\n\n' if parts else ''}Document: {name}\n\n")
                size += len(parts[-1])
            # The first page has the heading, too.
            places.append((begins, name, 1 if document.pages else None))
            places += ((size + at, name, n) for n, at in enumerate(document.pages[1:], start=2))
            parts.append(document.text)
            size += len(document.text)
        return cls("".join(parts), tuple(places), tuple(notes))

    def place(self, offset: int) -> tuple[str | None, int | None]:
        """Name and page of the document that has this character of the text, where known."""
        at = bisect.bisect_right(self.places, offset, key=lambda place: place[0])
        return self.places[max(at - 1, 0)][1:] if self.places else (None, None)


def read_documents(paths: Iterable[str | Path], note: Note = log.warning) -> list[Document]:
    """The documents of files and folders, in the order given; `-` is stdin.

    Of a folder all files are read, also in folders below it, but for names that begin with a dot.

    Args:
      note: called with a line for each file that is left out of a folder or an archive.

    Raises:
      InputError: a file cannot be read, holds no text, or is beyond a bound.
    """
    reader = _Reader(note)
    return [document for path in paths for document in reader.path(path)]


def documents_in(
    raw: bytes, name: str, note: Note = log.warning, most: int = MOST_BYTES
) -> list[Document]:
    """The documents in a file's bytes: several in an archive, else one.

    Args:
      note: as for `read_documents`.
      most: bytes that are unpacked at most.

    Raises:
      InputError: as `read_documents`.
    """
    return list(_Reader(note, most).parts(raw, name))


def reply_to(request: dict[str, Any]) -> dict[str, Any]:
    """In the child: the `documents` of a file, or why it `refuses`; `notes`; what may be left."""
    notes = list[str]()
    reader = _Reader(notes.append, request["most"])
    reader.apart = False
    reader._left, reader._files = request["left"], request["files"]
    raw, reply = base64.b64decode(request["document"]), dict[str, Any]()
    try:
        found = reader.parts(raw, request["name"], request["depth"])
        reply["documents"] = [dataclasses.astuple(each) for each in found]
    except InputError as error:
        reply = {"refuses": str(error), "empty": isinstance(error, NoTextError)}
    return {**reply, "notes": notes, "left": reader._left, "files": reader._files}


class _Reader:
    """One call: what it may still unpack, and how many files it may still read."""

    # Whether markup and archives are read in a process of their own.
    apart = True

    def __init__(self, note: Note, most: int = MOST_BYTES):
        self._note, self._most = note, most
        self._left, self._files = most, MOST_FILES

    def path(self, path: str | Path) -> Iterator[Document]:
        """The documents of a file or a folder."""
        if path != "-" and os.path.isdir(path):
            inside = ((str(each), each) for each in _files(path))
            yield from self._each(str(path), inside, read_source)
        else:
            yield from self.parts(read_source(path), "stdin" if path == "-" else str(path))

    def parts(self, raw: bytes, name: str, depth: int = 0) -> Iterator[Document]:
        """The documents in a file's bytes."""
        if raw.startswith(b"\x1f\x8b"):
            inside = self._unpack(lambda: gzip.open(io.BytesIO(raw)), name, len(raw), depth)
            yield from self.parts(inside, name.removesuffix(".gz"), depth + 1)
        elif (kind := _kind(raw, name)) is None:
            yield _whole(name, _plain(raw, name))
        elif self.apart:
            yield from self._apart(raw, name, depth)
        elif kind == "zip":
            yield from self._zip(raw, name, depth)
        elif kind == "pdf":
            yield self._paged(formats.pdf_pages(raw, name, lambda n: self._take(n, name)), name)
        else:
            yield _whole(name, formats.html_text(raw, name))

    def _apart(self, raw: bytes, name: str, depth: int) -> Iterator[Document]:
        left = {"left": self._left, "files": self._files, "most": self._most}
        reply = read_apart(raw, name=name, depth=depth, **left)
        if "error" in reply:
            raise InputError(f"{name} cannot be read: this {reply['error']}; {formats.BY_HAND}")
        self._left, self._files = reply["left"], reply["files"]
        for note in reply["notes"]:
            self._note(note)
        if "refuses" in reply:
            raise (NoTextError if reply["empty"] else InputError)(reply["refuses"])
        for name, text, pages in reply["documents"]:
            yield Document(name, text, tuple(pages))

    def _zip(self, raw: bytes, name: str, depth: int) -> Iterator[Document]:
        try:
            archive = zipfile.ZipFile(io.BytesIO(raw))
        except _DAMAGE as error:
            raise formats.damaged(name, "zip archive", error) from error
        infos = {info.filename: info for info in archive.infolist() if not info.is_dir()}

        def member(part: str) -> bytes:
            info = infos[part]
            if info.flag_bits & 1:
                raise InputError(f"{name} is an encrypted zip archive; unpack it with its password")
            return self._unpack(lambda: archive.open(info), name, info.compress_size, depth)

        names = set(infos)
        if "word/document.xml" in names:
            yield _whole(name, formats.docx_text(member, names, name))
        elif "META-INF/container.xml" in names:
            yield self._paged(formats.epub_chapters(member, names, name), name)
        elif names & {"[Content_Types].xml", "content.xml"}:
            raise InputError(
                f"{name} is an Office document, but no DOCX; write its text to a file first, e.g. "
                f"with libreoffice --convert-to"
            )
        else:
            shown = (part for part in sorted(names) if not _HIDDEN.search(part))
            inside = ((f"{name}/{_CONTROL.sub(' ', part)}", part) for part in shown)
            yield from self._each(name, inside, member, depth + 1)

    def _each(
        self, where: str, files: Iterable[tuple[str, Any]], read: Any, depth: int = 0
    ) -> Iterator[Document]:
        """The documents of a folder's or an archive's files: their names, and what `read` takes."""
        found, left_out = False, list[str]()
        for name, file in files:
            self._files -= 1
            if self._files < 0:
                raise InputError(f"{where} has over {MOST_FILES:,} files; give a part of them")
            try:
                for document in self.parts(read(file), name, depth):
                    found = True
                    yield document
            except NoTextError:
                left_out.append(name)
        if not found:
            raise InputError(f"{where} holds no document; {_GIVE}")
        if left_out:
            names = ", ".join(left_out[:3]) + ", ..." * (len(left_out) > 3)
            self._note(f"left out of {where}: {len(left_out):,} that are no text ({names})")

    def _unpack(self, opened: Callable[[], Any], name: str, packed: int, depth: int) -> bytes:
        """All bytes of a compressed file, within the bounds."""
        if depth >= MOST_NESTED:
            raise InputError(
                f"{name}: archives in archives are read {MOST_NESTED} deep; unpack it first"
            )
        most = max(FREE_BYTES, MOST_RATIO * packed)
        try:
            with opened() as file:
                raw = file.read(min(most, self._left) + 1)
        except _DAMAGE as error:
            raise formats.damaged(name, "archive", error) from error
        self._take(len(raw), name)
        if len(raw) > most:
            raise InputError(
                f"{name} unpacks to over {MOST_RATIO} times its size; unpack it, and give its files"
            )
        return raw

    def _take(self, size: int, name: str) -> None:
        self._left -= size
        if self._left < 0:
            raise InputError(
                f"{name} unpacks to more than is read, {shown_bytes(self._most)}; give a part of it"
            )

    def _paged(self, pages: list[str], name: str) -> Document:
        empty = sum(not page.strip() for page in pages)
        if empty == len(pages):
            raise InputError(
                f"{name} holds no text: its {len(pages):,} pages are pictures, as of a scanner; "
                f"make text of them first, e.g. with ocrmypdf"
            )
        if empty:
            self._note(f"{name}: {empty:,} of {len(pages):,} pages hold no text")
        starts = itertools.accumulate((len(page) + 2 for page in pages[:-1]), initial=0)
        return Document(name, "\n\n".join(pages), tuple(starts))


def read_source(path: str | Path) -> bytes:
    """The bytes of a file, or of stdin for `-`. Raises InputError where it cannot be read."""
    name = "stdin" if path == "-" else path
    if path == "-" and sys.stdin is None:
        raise InputError("stdin is closed; pipe a text in, or give a document")
    with file_errors(f"{name} cannot be read", "give the path of a document, or - for stdin"):
        return sys.stdin.buffer.read() if path == "-" else read_bytes(path)


def _files(folder: str | Path) -> Iterator[Path]:
    """All files of a folder but hidden ones, in the order of names."""
    with file_errors(f"{folder} cannot be read", "give a folder that can"):
        inside = sorted(each for each in Path(folder).iterdir() if each.name[0] != ".")
    for path in inside:
        if not path.is_dir():
            yield path
        elif not path.is_symlink():
            yield from _files(path)


def _whole(name: str, text: str) -> Document:
    if not text.strip():
        raise NoTextError(f"{name} is empty; give a text")
    return Document(name, text)


def _kind(raw: bytes, name: str) -> Literal["zip", "pdf", "html"] | None:
    """What a library reads a file as; None where none does."""
    ending = PurePath(name).suffix.lower()
    if raw.startswith((b"PK\x03\x04", b"PK\x05\x06")):
        return "zip"
    if raw.startswith(b"%PDF-") or (ending == ".pdf" and b"%PDF-" in raw[:1024]):
        return "pdf"
    return "html" if ending in _HTML or (not ending and _LIKE_HTML.match(raw)) else None


def _plain(raw: bytes, name: str) -> str:
    """The text of a file that is neither packed nor marked up."""
    ending = PurePath(name).suffix.lower()
    if ending in _PROMISED:
        raise InputError(
            f"{name} is no {ending[1:].upper()}, as its name says; get it again, or rename it"
        )
    if raw[257:262] == b"ustar":
        raise InputError(f"{name} is a tar archive; unpack it, and give the folder")
    try:
        return decoded(raw, name)
    except InputError:
        if b"\0" in raw and not raw.startswith(_TOLD):
            raise NoTextError(f"{name} is binary data of an unknown kind; {_GIVE}") from None
        raise
