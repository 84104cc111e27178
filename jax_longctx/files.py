"""Paths and files that users name.

A file that is read is a plain file, and one that is made is no link: opening a FIFO that nobody
writes blocks for ever, and a device may never end. Their errors are OSErrors, so callers name the
path and say what to do as for any other file.
"""

import contextlib
import errno
import hashlib
import io
import json
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jax_longctx.errors import CheckpointError, DamagedError, InputError, LongctxError

# TensorStore keeps names with this end for itself.
LOCKS = ".__lock"
# Key of the digest in a sealed file.
DIGEST = "sha256"
# What a file is that begins with these bytes, and how a text is made of it.
_WRITE = "write its text to a file first, e.g. with "
_KINDS = {
    b"%PDF-": ("a PDF, not a text", f"{_WRITE}pdftotext"),
    b"PK\x03\x04": ("a zip archive (as .docx, .odt and .epub are), not a text", f"{_WRITE}pandoc"),
    b"\xd0\xcf\x11\xe0": ("an old Office document, not a text", f"{_WRITE}libreoffice"),
    b"\x1f\x8b": ("a gzip file, not a text", "unpack it first, with gunzip"),
    **dict.fromkeys(
        (b"\xff\xfe", b"\xfe\xff"),
        ("UTF-16, not UTF-8 text", "convert it first, e.g. with iconv -f utf-16 -t utf-8"),
    ),
}
_OTHER = ("not UTF-8 text", "convert it first, e.g. with iconv -t utf-8")


def reason(error: BaseException) -> str:
    """Why a file was not read or written, or what is wrong in it, in words."""
    if not isinstance(error, OSError):
        return first_line(error)
    limit = " (ulimit -f limits the size of files)" if error.errno == errno.EFBIG else ""
    return f"{error.strerror or error}{limit}"


def first_line(error: BaseException) -> str:
    """The first line of an error's message."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]


@contextlib.contextmanager
def file_errors(
    said: str, advice: str = "", kind: type[LongctxError] = InputError
) -> Iterator[None]:
    """Raises an OSError of the block as a `kind`: what is `said`, why, and the advice."""
    try:
        yield
    except OSError as error:
        advice = f"; {advice}" if advice else ""
        raise kind(f"{said}: {reason(error)}{advice}") from error


def expanded(path: str | Path) -> Path:
    """The path, a leading `~` or `~USER` replaced, which shells leave in `--option=~/x`."""
    return Path(os.path.expanduser(path))


def whole_path(path: str | Path) -> Path:
    """The only form in which a path reaches TensorStore: absolute, without `~` and links.

    TensorStore refuses `.`, `..` and doubled slashes. `..` after a link is its target's parent.

    Raises:
      InputError: there is no working directory, or TensorStore cannot name the path.
    """
    shown = ascii(str(path))
    try:
        found = Path(os.path.realpath(expanded(path)))
        str(found).encode()
    except OSError as error:
        said = f"{shown}: no working directory: {error.strerror}; change to another"
        raise InputError(said) from error
    except ValueError as error:  # a null byte, or no UTF-8
        raise InputError(f"{shown} cannot be used: {error}; choose another name") from error
    for part in found.parts:
        if "\\" in part or part.endswith(LOCKS):
            raise InputError(
                f"{found} cannot be used: the storage library takes no {part!r} in a path (no "
                f"backslash, no end {LOCKS}); rename it"
            )
    return found


# What addresses have, and paths not.
ADDRESS = "://"


def check_plain(path: str | Path) -> None:
    """Raises OSError where the path is no plain file and no pipe of the shell's (`<(...)`).

    A folder is left to `open`, which raises one.
    """
    kind = stat.S_IFMT(os.stat(path).st_mode)
    # A pipe without a name has a writer: what is below /dev/fd leads to no path, or to itself.
    real = os.path.realpath(path)
    unnamed = kind == stat.S_IFIFO and (real.startswith("/dev/") or not os.path.exists(real))
    if kind not in (stat.S_IFREG, stat.S_IFDIR) and not unnamed:
        raise OSError(errno.EINVAL, "it is a FIFO, a socket or a device", str(path))


def open_plain(path: str | Path) -> io.BufferedReader:
    """A plain file, to read its bytes; raises OSError as `check_plain`."""
    check_plain(path)
    return open(path, "rb")


def read_bytes(path: str | Path) -> bytes:
    """The bytes of a plain file; raises OSError as `check_plain`."""
    with open_plain(path) as file:
        return file.read()


def read_text(path: str | Path, encoding: str = "utf-8") -> str:
    """The text of a plain file; raises OSError as `check_plain`, and UnicodeDecodeError."""
    return read_bytes(path).decode(encoding).replace("\r\n", "\n").replace("\r", "\n")


def decoded(raw: bytes, name: str) -> str:
    """The UTF-8 text of a user's file, a byte order mark dropped.

    Raises:
      InputError: it is none; the error says what it is, where its first bytes tell.
    """
    what, advice = next((told for start, told in _KINDS.items() if raw.startswith(start)), _OTHER)
    try:
        if advice is _OTHER[1]:
            return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        what = f"{what} (byte {error.start} is 0x{raw[error.start]:02x})"
    raise InputError(f"{name} is {what}; {advice}")


def reading(path: Path) -> contextlib.AbstractContextManager[None]:
    """Names the path in a CheckpointError where the block cannot read it."""
    return file_errors(f"{path} cannot be read", kind=CheckpointError)


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object that a file holds."""
    with reading(path):
        return parse_json(read_bytes(path), f"{path} is not a JSON file")


def parse_json(raw: bytes, fault: str) -> dict[str, Any]:
    """A JSON object; raises CheckpointError, which begins with `fault`, on anything else."""
    try:
        value = json.loads(raw.decode("utf-8"))
    except ValueError as error:  # no UTF-8, or no JSON
        raise CheckpointError(f"{fault}: {error}") from error
    except RecursionError as error:
        raise CheckpointError(f"{fault}: it is nested too deeply") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{fault}: it holds a {type(value).__name__}, expected an object")
    return value


def check_text(text: str, where: str) -> None:
    """Raises InputError where a text from JSON holds half of a surrogate pair."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InputError(
            f"{where}: half of a surrogate pair ({text[error.start]!a}) is not UTF-8 text; mend "
            f"that line, or leave it out"
        ) from error


def distrust(path: str | Path | int) -> str | None:
    """Why others may have written a file or a folder, or None; OSError as `os.stat`."""
    about = os.stat(path)
    if about.st_uid not in (os.geteuid(), 0):
        return f"it belongs to user {about.st_uid}, this process to user {os.geteuid()}"
    mode = stat.S_IMODE(about.st_mode)
    return f"others can write to it (mode {mode:o})" if mode & 0o022 else None


def private_folder(folder: Path, mode: int, *, own: bool = False) -> None:
    """Makes a folder to which this user or root alone can write, or checks the one that is there.

    Args:
      mode: of a new folder.
      own: the library made it. An earlier version may have let others in, which ends here.

    Raises:
      OSError: it cannot be made, or others can write to it.
    """
    folder.mkdir(mode, parents=True, exist_ok=True)
    about = folder.stat()
    if own and about.st_uid == os.geteuid():
        folder.chmod(stat.S_IMODE(about.st_mode) & mode)
    if why := distrust(folder):
        raise PermissionError(errno.EPERM, why, str(folder))


def sha256_of(path: Path) -> str:
    """Of a file's bytes."""
    with open_plain(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def seal(version: int, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields with their `format` and digest, to write as JSON (see `read_sealed`)."""
    # As JSON reads it back: tuples are lists there.
    fields = json.loads(json.dumps({"format": version, **fields}))
    return {**fields, DIGEST: _digest(fields)}


def read_sealed(path: Path, version: int, remedy: str, *others: int) -> dict[str, Any]:
    """The fields given to `seal`, from a JSON file.

    Args:
      version, others: the expected `format`, and others that are read.
      remedy: what to do about another format or about damage, for the error.

    Raises:
      FileNotFoundError: no such file.
      DamagedError: the file is damaged.
      CheckpointError: the file cannot be read, or is of another version.
    """
    try:
        fields = json.loads(read_text(path))
        if not isinstance(fields, dict):
            raise ValueError(f"it holds a JSON {type(fields).__name__}, expected an object")
        if (found := fields.get("format")) not in (version, *others):
            raise CheckpointError(
                f"{path} has format {found!r:.20}, expected {version}: another version wrote it; "
                f"use that one, or {remedy}"
            )
        if fields.pop(DIGEST, None) != _digest(fields):
            raise ValueError(f"its {DIGEST} does not match, it was changed after it was written")
    except FileNotFoundError:
        raise
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"{path} is damaged: {error!s:.200}; {remedy}") from error
    del fields["format"]
    return fields


def _digest(fields: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(fields).encode()).hexdigest()


def partial_of(path: Path) -> Path:
    """The name of a file or a folder until it is whole."""
    return path.with_name(f".{path.name}.partial")


def write_text(path: Path, content: str | bytes, scratch: Path | None = None) -> None:
    """Writes a file whole or not at all, also when it is interrupted, and onto the disk.

    Text is UTF-8. `scratch` is the file until it is whole. Raises OSError as `open` does.
    """
    scratch = scratch or partial_of(path)
    data = content.encode("utf-8") if isinstance(content, str) else content
    file = open(scratch, "wb", 0, opener=no_link)
    try:
        with file:
            write_all(file, data)
            os.fsync(file.fileno())
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)


@contextlib.contextmanager
def folder_made(folder: Path) -> Iterator[None]:
    """Makes a folder; at the end it and its new parents are removed where they are still empty.

    Raises:
      OSError: it cannot be made.
    """
    made = [each for each in (folder, *folder.parents) if not each.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    finally:
        for each in made:
            with contextlib.suppress(OSError):
                each.rmdir()


def write_whole(content: str | bytes, path: Path) -> None:
    """`write_text` of an output that a user named, in a folder that may be missing.

    Raises:
      InputError: it cannot be written.
    """
    with file_errors(f"{path} could not be written"), folder_made(path.parent):
        write_text(path, content, path.with_name(f"{path.name}.partial"))


def save_figure(figure: Any, path: Path, **how: Any) -> None:
    """Writes a figure of matplotlib as `write_whole`; `how` is passed to `savefig`."""
    made = io.BytesIO()
    figure.savefig(made, **{"format": path.suffix.removeprefix(".") or "png", **how})
    write_whole(made.getvalue(), path)


def write_all(file: Any, data: bytes) -> None:
    """Writes to an unbuffered file, whose close then has nothing left that could fail."""
    left = memoryview(data)
    while left:
        left = left[file.write(left) :]


def no_link(path: str, flags: int) -> int:
    """An opener that raises OSError for a symbolic link, whose target it would write to."""
    try:
        return os.open(path, flags | os.O_NOFOLLOW, 0o666)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        said = f"{os.path.basename(path)} is a symbolic link; remove it"
        raise OSError(errno.ELOOP, said, path) from None
