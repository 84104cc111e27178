"""English that a machine has on it: manuals, and the docstrings of Python packages.

For experiments without a download. A text file of documentation (`.txt`, `.rst`, `.md`, `.info`,
plain or gzipped) is a document; so are the docstrings of all Python files of one folder, in order.
A paragraph that came before, in whichever document, is left out: installed documentation repeats
itself, and what one split trains on must not be in another. A document that is short by then, or
where fewer than one word in forty is "the", is left out too.
"""

import ast
import gzip
import hashlib
import json
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from jax_longctx.errors import InputError
from jax_longctx.models.storage import partial_of

SUFFIXES = (".txt", ".rst", ".md", ".info")
# Changes, licences and lists of names are no running text.
NOT_PROSE = re.compile(r"change|copyright|licen[sc]e|news|authors|thanks|tags|index|record", re.I)
WORD = re.compile(r"[A-Za-z']+")


def collect(
    folders: Sequence[Path],
    destination: Path,
    *,
    least: int = 40_000,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[int, int]:
    """Writes a JSON line for each document: its text, where it is from, and its SHA-256.

    Args:
      least: characters of a document.
      progress: called with (folders done, folders in all).

    Returns:
      Documents, and their characters together.

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
    with partial_of(destination).open("w", encoding="utf-8") as file:
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
        partial_of(destination).unlink()
        raise InputError(
            f"no document of {least:,} characters of English was found; name other folders"
        )
    partial_of(destination).rename(destination)
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
    """The text of a file; empty where it is not UTF-8 or no gzip after all."""
    try:
        data = path.read_bytes()
        return (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8")
    except (OSError, EOFError, UnicodeDecodeError):
        return ""


def _docstrings(path: Path) -> list[str]:
    """Of a module, its classes and its functions, in order; none where it does not parse."""
    try:
        with warnings.catch_warnings():
            # Other people's escape sequences.
            warnings.simplefilter("ignore")
            tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return []
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    texts = [ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, kinds)]
    return [text for text in texts if text]


def _fresh(text: str, seen: set[bytes]) -> str:
    """The paragraphs that did not come before, which are noted."""
    kept = []
    for paragraph in re.split(r"\n\s*\n", text):
        words = " ".join(paragraph.split())
        digest = hashlib.sha256(words.encode("utf-8", "surrogatepass")).digest()[:16]
        if words and digest not in seen:
            seen.add(digest)
            kept.append(paragraph.strip("\n").encode("utf-8", "replace").decode())
    return "\n\n".join(kept)
