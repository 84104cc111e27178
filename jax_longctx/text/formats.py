"""Plain text of PDF, HTML, EPUB and DOCX: what a page shows, without markup.

PDFium reads PDF (pypdfium2), libxml2 reads markup (lxml). The extra `documents` has both; they are
imported when a document needs them.
"""

import contextlib
import importlib
import posixpath
import re
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import unquote

from jax_longctx.errors import InputError

MOST_PAGES = 20_000
BY_HAND = "write its text to a file first, e.g. with pandoc"
# Reads a member of an archive, within the limits of the whole.
Member = Callable[[str], bytes]
# Counts characters or bytes that a document gave; raises InputError above the limit.
Take = Callable[[int], None]

_SPACES = re.compile(r"[ \t\r\n\f]+")
_HIDDEN = {"script", "style", "template", "svg"}
# What begins on a line of its own; the second set has an empty line around it.
_LINES = {"li", "tr", "dt", "dd", "div", "section", "article", "main", "nav", "header", "footer"}
_LINES |= {"aside", "address", "caption", "figcaption", "option", "body", "summary", "details"}
_APART = {"p", "h1", "h2", "h3", "h4", "h5", "h6", "pre", "ul", "ol", "dl", "table", "hr"}
_APART |= {"blockquote", "figure", "form", "fieldset", "title"}


def pdf_pages(raw: bytes, name: str, take: Take) -> list[str]:
    """The text of each page of a PDF, empty where a page is a picture.

    Raises:
      InputError: it is damaged, encrypted or too long, or pypdfium2 is missing.
    """
    library = _needed("pypdfium2", name)
    try:
        pdf = library.PdfDocument(raw)
    except library.PdfiumError as error:
        if error.err_code in (library.raw.FPDF_ERR_PASSWORD, library.raw.FPDF_ERR_SECURITY):
            raise InputError(
                f"{name} is an encrypted PDF; write it without its password first, e.g. with "
                f"qpdf --decrypt --password=PASSWORD"
            ) from error
        raise damaged(name, "PDF", error) from error
    try:
        return list(_pages(pdf, name, take))
    except library.PdfiumError as error:
        raise damaged(name, "PDF", error) from error
    finally:
        pdf.close()


def _pages(pdf: Any, name: str, take: Take) -> Iterator[str]:
    if len(pdf) > MOST_PAGES:
        raise InputError(
            f"{name} has {len(pdf):,} pages, at most {MOST_PAGES:,} are read; give a part of it"
        )
    for page in pdf:
        text = page.get_textpage()
        take(text.count_chars())
        found = text.get_text_bounded().replace("\r\n", "\n")
        text.close()
        page.close()
        # PDFium writes U+FFFE for a hyphen at a line's end, and joins the word.
        yield found.replace("\ufffe", "").replace("\0", "")


def html_text(raw: bytes, name: str) -> str:
    """The text that a page of HTML shows; its charset is as declared, or UTF-8.

    Raises:
      InputError: it is nested too deeply or not in its charset, or lxml is missing.
    """
    etree = _needed("lxml.etree", name)
    declared = re.search(rb"""(?:charset|encoding)\s*=\s*["']?([\w.:-]+)""", raw[:1024])
    charset = declared[1].decode("ascii", "replace") if declared else "utf-8"
    # UTF-8 comes first: pages that were converted may declare their old charset.
    for each in ("utf-8-sig", charset):
        # Some codecs raise no more than UnicodeError, or give what is not Unicode.
        with contextlib.suppress(LookupError, UnicodeError):
            text = raw.decode(each).encode("utf-8")
            break
    else:
        raise InputError(
            f"{name} is HTML, but not in {charset}; convert it first, e.g. with iconv -t utf-8"
        )
    parser = etree.HTMLParser(encoding="utf-8", no_network=True, huge_tree=True)
    root = etree.fromstring(text, parser)
    # libxml2 mends all but what is too deep, and would leave out the rest.
    for error in parser.error_log:
        if error.level_name == "FATAL":
            raise InputError(f"{name} is HTML that cannot be read: {error.message}; {BY_HAND}")
    lines = _Lines()
    if root is not None:
        _show(etree, root, lines)
    return lines.whole()


def _show(etree: Any, root: Any, lines: "_Lines") -> None:
    pre = 0
    walk = etree.iterwalk(root, events=("start", "end", "comment", "pi"))
    for event, node in walk:
        tag = node.tag if isinstance(node.tag, str) else ""
        if event == "start":
            lines.apart(tag)
            if tag in _HIDDEN:
                walk.skip_subtree()
                continue
            pre += tag == "pre"
            if tag == "li":
                lines.add("- ", pre=True)
            elif tag in ("td", "th"):
                lines.cell()
            elif tag == "br":
                lines.gap = min(lines.gap + 1, 2)
            lines.add(node.text, pre=pre > 0)
            continue
        if event == "end":
            pre -= tag == "pre"
            lines.apart(tag)
        lines.add(node.tail, pre=pre > 0)


class _Lines:
    """Text in lines; `gap` are the line breaks that come before more text."""

    def __init__(self) -> None:
        self.gap, self._parts = 0, list[str]()

    def apart(self, tag: str) -> None:
        """Begins a line, or a paragraph, where the tag does."""
        self.gap = max(self.gap, 2 if tag in _APART else 1 if tag in _LINES else 0)

    def add(self, text: str | None, *, pre: bool = False) -> None:
        """More text; spaces count only in `pre`."""
        if text and not pre:
            text = _SPACES.sub(" ", text)
            if self.gap or not self._parts or self._parts[-1][-1].isspace():
                text = text.removeprefix(" ")
        if text:
            gap, self.gap = self.gap if self._parts else 0, 0
            self._parts.append("\n" * gap + text)

    def cell(self) -> None:
        """Parts a cell of a table from the one before."""
        if not self.gap and self._parts:
            self._parts.append("\t")

    def whole(self) -> str:
        """All lines."""
        # A run of spaces is looked at once, from its first.
        return re.sub(r"(?<![ \t])[ \t]++\n", "\n", "".join(self._parts)).strip("\n")


def epub_chapters(read: Member, names: set[str], name: str) -> list[str]:
    """The text of each part of an EPUB, in the order of the book.

    Raises:
      InputError: it is damaged or encrypted, or lxml is missing.
    """
    (package,) = _found(_xml(read("META-INF/container.xml"), name), "rootfile")[:1] or [{}]
    path = package.get("full-path", "")
    if path not in names:
        raise damaged(name, "EPUB", f"it has no {path or 'package document'}")
    root = _xml(read(path), name)
    files = {item.get("id"): item.get("href", "") for item in _found(root, "item")}
    secret = read("META-INF/encryption.xml") if "META-INF/encryption.xml" in names else b""
    chapters = []
    for entry in _found(root, "itemref"):
        href = files.get(entry.get("idref"), "").partition("#")[0]
        part = posixpath.normpath(posixpath.join(posixpath.dirname(path), unquote(href)))
        if part not in names:
            raise damaged(name, "EPUB", f"its part {part} is missing")
        if part.encode() in secret:
            raise InputError(f"{name} is an encrypted EPUB; give a copy without protection")
        chapters.append(html_text(read(part), f"{name}: {part}"))
    return chapters


def docx_text(read: Member, names: set[str], name: str) -> str:
    """The text of a DOCX document: its body, then foot- and endnotes.

    Raises:
      InputError: it is damaged, or lxml is missing.
    """
    etree, lines = _needed("lxml.etree", name), _Lines()
    for part in ("document", "footnotes", "endnotes"):
        if f"word/{part}.xml" not in names:
            continue
        walk = etree.iterwalk(_xml(read(f"word/{part}.xml"), name), events=("start", "end"))
        for event, node in walk:
            match event, _local(node):
                case "start", "Fallback":
                    # What older readers show in place of the part before.
                    walk.skip_subtree()
                case "start", "tc":
                    lines.cell()
                case "start", "tab":
                    lines.add("\t" if _local(node.getparent()) == "r" else None, pre=True)
                case "end", "t":
                    lines.add(node.text, pre=True)
                case "end", "br" | "cr" | "tr":
                    lines.gap = max(lines.gap, 1)
                case "end", "tbl":
                    lines.gap = 2
                case "end", "p":
                    in_cell = _local(node.getparent()) == "tc" and node.getnext() is None
                    lines.gap = lines.gap if in_cell else 2
    return lines.whole()


def _local(node: Any) -> str:
    return node.tag.rpartition("}")[2] if isinstance(node.tag, str) else ""


def _found(root: Any, tag: str) -> list[Any]:
    return [node for node in root.iter() if _local(node) == tag]


def _xml(raw: bytes, name: str) -> Any:
    """The root of an XML file; entities are not replaced, and nothing else is read."""
    etree = _needed("lxml.etree", name)
    parser = etree.XMLParser(resolve_entities=False, no_network=True, load_dtd=False)
    try:
        return etree.fromstring(raw, parser)
    except etree.XMLSyntaxError as error:
        raise damaged(name, "XML file", error) from error


def damaged(name: str, kind: str, why: object) -> InputError:
    """The error of a file that is not whole."""
    said = " ".join(str(why).split()) or type(why).__name__
    return InputError(f"{name} is a damaged {kind} ({said:.120}); get it again, or {BY_HAND}")


def _needed(module: str, name: str) -> Any:
    """A module of the extra `documents`."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise InputError(
            f"{name} needs the package {error.name}; pip install 'jax-longctx[documents]'"
        ) from error
