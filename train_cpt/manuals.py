"""English texts of this machine: manuals, and the docstrings of Python packages.

They are for experiments without a download. A documentation file (`.txt`, `.rst`, `.md`, `.info`,
plain or gzipped) is a document, and so are the docstrings of all Python files of a folder, in
order. Repeated paragraphs are left out across all documents: installed documentation repeats
itself, and no text of one split may be in another. Documents that are too short after that, or in
which fewer than one word in forty is "the", are left out too.
"""

import ast
import contextlib
import gzip
import hashlib
import json
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from jax_longctx.errors import InputError
from jax_longctx.files import file_errors, no_link, partial_of, read_bytes

SUFFIXES = (".txt", ".rst", ".md", ".info")
# Changes, licences and lists of names are not prose.
NOT_PROSE = re.compile(r"change|copyright|licen[sc]e|news|authors|thanks|tags|index|record", re.I)
WORD = re.compile(r"[A-Za-z']+")


def collect(
    folders: Sequence[Path],
    destination: Path,
    *,
    least: int = 40_000,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[int, int]:
    """Writes a JSON line for each document: its text, its path, and its SHA-256.

    Args:
      least: fewest characters of a document.
      progress: called with (folders done, folders in all).

    Returns:
      Number of documents, and of their characters.

    Raises:
      InputError: a folder is missing, the destination exists, or nothing was found.
    """
    for folder in folders:
        if not folder.is_dir():
            raise InputError(f"{folder} is no folder; name folders of manuals or Python packages")
    if destination.exists():
        raise InputError(f"{destination} exists already; nothing was overwritten, name another")
    seen: set[bytes] = set()
    count = size = 0
    partial = partial_of(destination)
    with contextlib.ExitStack() as held:
        held.enter_context(file_errors(f"{destination} could not be written"))
        held.callback(partial.unlink, missing_ok=True)
        destination.parent.mkdir(parents=True, exist_ok=True)
        file = held.enter_context(open(partial, "w", encoding="utf-8", opener=no_link))
        for number, folder in enumerate(folders, start=1):
            for name, text in _documents(folder):
                fresh = _fresh(text, seen)
                words = WORD.findall(fresh[:200_000].lower())
                if len(fresh) < least or 40 * words.count("the") <= len(words):
                    continue
                digest = hashlib.sha256(fresh.encode()).hexdigest()
                file.write(json.dumps({"text": fresh, "from": name, "sha256": digest}) + "\n")
                count, size = count + 1, size + len(fresh)
            if progress is not None:
                progress(number, len(folders))
        if not count:
            raise InputError(
                f"no document of {least:,} characters of English was found; name other folders"
            )
        file.close()
        partial.rename(destination)
    return count, size


def _documents(folder: Path) -> Iterator[tuple[str, str]]:
    """(name, text) of manuals and of folders' docstrings, in the order of their paths."""
    places = sorted({path.parent for path in folder.rglob("*") if path.is_file()})
    for place in places:
        docstrings = []
        for path in sorted(place.iterdir()):
            if path.is_symlink() or not path.is_file():
                continue
            if path.suffix == ".py":
                docstrings += _docstrings(path)
            name = path.name.removesuffix(".gz")
            if path.suffix != ".py" and name.endswith(SUFFIXES) and not NOT_PROSE.search(name):
                yield str(path), _manual(path)
        if docstrings:
            yield str(place), "\n\n".join(docstrings)


def _manual(path: Path) -> str:
    """The text of a file; empty where it is not UTF-8, or not gzip despite its suffix."""
    try:
        data = read_bytes(path)
        return (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8")
    except (OSError, EOFError, UnicodeDecodeError):
        return ""


def _docstrings(path: Path) -> list[str]:
    """Docstrings of a module, its classes and functions, in order; none of a file with errors."""
    try:
        with warnings.catch_warnings():
            # Invalid escape sequences.
            warnings.simplefilter("ignore")
            tree = ast.parse(read_bytes(path))
    except (OSError, SyntaxError, ValueError, RecursionError):
        return []
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    texts = [ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, kinds)]
    return [text for text in texts if text]


def _fresh(text: str, seen: set[bytes]) -> str:
    """The paragraphs that are not in `seen`; they are added to it."""
    kept = []
    for paragraph in re.split(r"\n\s*\n", text):
        words = " ".join(paragraph.split())
        digest = hashlib.sha256(words.encode("utf-8", "surrogatepass")).digest()[:16]
        if words and digest not in seen:
            seen.add(digest)
            kept.append(paragraph.strip("\n").encode("utf-8", "replace").decode())
    return "\n\n".join(kept)
