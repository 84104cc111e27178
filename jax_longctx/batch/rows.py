"""The rows of a batch run: JSON lines, checked, tokenized, and packed into batches.

    {"prompt": "Once upon"}                                   continued as it is
    {"context": "A text ...", "question": "Who?"}             one answer
    {"file": "book.pdf", "questions": ["Who?", "Where?"]}     several answers over one text
    {"files": ["a.txt", "b.html"], "question": "Who?"}        one answer over several
    {"messages": [{"role": "user", "content": "Who?"}]}       a chat, as OpenAI's clients send it

or a request in OpenAI's batch format (`batch.requests`), known by its `custom_id`.

A row may have an "id" (text or a whole number). A row that cannot be used has an `error`, which is
written to its line of the output. A "file" may be any file that the process can read, and answers
can show its text; `under` confines the files of untrusted rows to a folder.

Rows about one text, by `context`, `file` or `files`, are taken where the first of them stands. Of
Parquet and of object stores, where a row far off costs much, rows are taken as they stand.

A window of the rows is sorted by length, longest first, and cut into batches. The number of cache
slots is rounded up to a quarter of an octave and the number of rows to a power of two, so that few
programs are compiled. The same window, options and memory limit give the same batches, so a run
that was killed computes the remaining batches as it would have without the kill.
"""

import array
import dataclasses
import hashlib
import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jax_longctx.batch.requests import Request, failed, read_request
from jax_longctx.batch.source import lines_from, seeks
from jax_longctx.engine.capacity import bucket
from jax_longctx.errors import ConfigError, InputError
from jax_longctx.files import check_text, file_errors, read_bytes
from jax_longctx.forms import Forms
from jax_longctx.origin import digest_of
from jax_longctx.text import PromptLayout, PromptText, Tokenizer
from jax_longctx.text.documents import Document, Joined, Note, documents_in, log

KEYS = ("id", "prompt", "messages", "context", "file", "files", "question", "questions")
ROLES = ("system", "user", "assistant")
# Kinds whose prompt is one text, as long as it is.
WHOLE = ("prompt", "request")
# Fewest slots of a batch.
SMALLEST = 256


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One row of the input.

    Attributes:
      index: number of the row, from 0, without empty lines.
      line: number of the line in the file, from 1.
      id: the user's, or None.
      context, questions: token ids; one question unless the row has several.
      kind: "prompt", "question", "questions" or "request"; it decides the form of the output line.
      request, model: of a request; else its answer is as the run's options say.
      error: why the row cannot be answered, or None.
      digest: of the line and of the file that it names.
    """

    index: int
    line: int
    digest: str
    id: str | int | None = None
    context: tuple[int, ...] = ()
    questions: tuple[tuple[int, ...], ...] = ()
    kind: str = "prompt"
    request: Request | None = None
    model: str = ""
    error: str | None = None

    @property
    def total(self) -> int:
        """Tokens known at prefill: the whole prompt, or the context of a question."""
        prompt = self.kind in WHOLE
        return len(self.context) + (len(self.questions[0]) if prompt else 0)


@dataclasses.dataclass(frozen=True)
class RowPart:
    """One row of a batch: a text and questions about it, of one row of the input or several.

    Attributes:
      places: of the questions: the input's row, and the question's number in it.
      total: the total length for rotary embedding (see `Engine.prefill`).
      request: how the row asks to be answered.
    """

    places: tuple[tuple[int, int], ...]
    context: tuple[int, ...]
    questions: tuple[tuple[int, ...], ...]
    total: int
    request: Request | None = None

    @property
    def length(self) -> int:
        """Tokens of the context and its longest question."""
        return len(self.context) + max(map(len, self.questions))


@dataclasses.dataclass(frozen=True)
class Line:
    """A line of the input, as it stands there.

    Attributes:
      index: number of its row, from 0, without empty lines.
      number: of the line, from 1.
      place: in the file, as of `lines_from`.
      content: the digest of its file, if any, and the line.
      text: what its questions are about, to compare it; None where there is no such text.
    """

    index: int
    number: int
    place: int
    raw: bytes
    content: bytes
    text: Any = None

    @property
    def digest(self) -> str:
        """Of the line and of the file that it names."""
        return hashlib.sha256(self.content).hexdigest()


# Rows in turn: the index, the line's number and place of the first, and how many.
Run = tuple[int, int, int, int]


@dataclasses.dataclass(frozen=True)
class Scan:
    """What a first pass over the input finds, of 24 bytes a row and 32 a run.

    Attributes:
      digest: of the input and of the files that its rows name.
      numbers: of the rows' lines, int64.
      runs: int64, [runs, 4]: `Run`s of all rows, those about one text one after the other.
    """

    digest: str
    numbers: np.ndarray
    runs: np.ndarray


@dataclasses.dataclass(frozen=True)
class RowReader:
    """Reads the rows of one input.

    Attributes:
      path: of the input; paths in rows are relative to its folder, or to this one's for an address.
      tokenizer, layout: None where lines are read, and no rows.
      under: the folder that files must be in, after resolving links; any folder if None.
      usual: how requests are answered that do not say it.
      forms: checks the forms of requests; None checks none.
      note: is told what is left out of files.
    """

    path: Path | str
    tokenizer: Tokenizer | None = None
    layout: PromptLayout | None = None
    under: Path | None = None
    usual: Request = dataclasses.field(default_factory=Request)
    forms: Forms | None = None
    note: Note = log.warning
    # Digests of the files' texts, by their names.
    _known: dict[str, str] = dataclasses.field(default_factory=dict, init=False)
    # The last files, which the next rows name too, and their text.
    _last: dict[tuple[str, ...], str] = dataclasses.field(default_factory=dict, init=False)
    # The last text in tokens, which the next rows may be about too.
    _encoded: dict[str, tuple[int, ...]] = dataclasses.field(default_factory=dict, init=False)

    def scan(self) -> Scan:
        """Reads the input once.

        Raises:
          InputError: the input cannot be read, or is empty.
        """
        found, digest = array.array("q"), hashlib.sha256()
        for line in self.lines():
            digest.update(line.content)
            # Of a text 8 bytes; what has none stands alone. Equal ones are compared again later.
            text = hashlib.sha256(repr(line.text or line.index).encode()).digest()[:8]
            found.extend((line.number, line.place, int.from_bytes(text, signed=True)))
        if not found:
            raise InputError(
                f'{self.path} holds no rows; give JSON lines such as {{"prompt": "..."}}'
            )
        numbers, places, texts = np.asarray(found).reshape(-1, 3).T
        order = np.arange(len(numbers))
        if seeks(self.path):
            _, first, which = np.unique(texts, return_index=True, return_inverse=True)
            order = np.argsort(first[which], kind="stable")
        begins = np.flatnonzero(np.diff(order, prepend=-2) != 1)
        at = order[begins]
        runs = np.stack([at, numbers[at], places[at], np.diff(begins, append=len(order))], 1)
        return Scan(digest.hexdigest()[:16], numbers, runs)

    def read(self, runs: Iterable[Run] | np.ndarray) -> Iterator[Line]:
        """The lines of runs."""
        for *start, count in runs:
            yield from itertools.islice(self.lines(*map(int, start)), int(count))

    def lines(self, index: int = 0, first: int = 1, place: int = 0) -> Iterator[Line]:
        """Every line that holds a row, from one on. InputError where the input cannot be read."""
        with file_errors(f"{self.path} cannot be read", "give a file of JSON lines"):
            for number, (at, raw) in enumerate(lines_from(self.path, place), start=first):
                if raw.strip():
                    yield Line(index, number, at, raw, *self._content(raw))
                    index += 1

    def _content(self, raw: bytes) -> tuple[bytes, Any]:
        try:
            fields = _fields(raw, str(self.path))
            names = _names(fields)
            name = "\0".join(names)
            if names and name not in self._known:
                self._known[name] = hashlib.sha256(self._files(names).encode()).hexdigest()
            text = self._known[name] if names else ""
            return f"{text} ".encode() + raw, text or fields.get("context")
        except InputError as error:
            return f"{error} ".encode() + raw, None

    def row(self, line: Line) -> Row:
        """The row of a line, in tokens."""
        about: dict[str, Any] = {"index": line.index, "line": line.number, "digest": line.digest}
        try:
            fields = _fields(line.raw, f"{self.path}, line {line.number}")
            about["id"] = fields.get("id")
            if isinstance(fields.get("custom_id"), str):
                about |= {"id": fields["custom_id"], "kind": "request"}
                messages, about["model"], request = read_request(fields, self.usual)
                about["request"], form = request, request.sampling.form
                if form is not None and self.forms is not None:
                    # Refused here, it is this row's error.
                    self.forms(form)
                fields = {"messages": messages}
            kind, context, questions = self._parts(fields)
        except (ConfigError, InputError) as error:
            # A chat template that fails may fail on these messages alone.
            return Row(**about, error=" ".join(str(error).split()))
        return Row(**{"kind": kind, **about}, context=context, questions=questions)

    def _parts(
        self, fields: dict[str, Any]
    ) -> tuple[str, tuple[int, ...], tuple[tuple[int, ...], ...]]:
        """A row's kind, context and questions."""
        unknown = sorted(set(fields) - set(KEYS))
        if unknown:
            raise InputError(f"unknown key {unknown[0]!r}; known: {', '.join(KEYS)}")
        assert self.tokenizer is not None and self.layout is not None
        encode, given = self.tokenizer.encode, {key for key in fields if key != "id"}
        if given == {"prompt"}:
            # As in `generate`: the last token is the question.
            prompt = encode(_text(fields, "prompt"), bos=True, parse_special=True)
            return "prompt", tuple(prompt[:-1]), (tuple(prompt[-1:]),)
        if given == {"messages"}:
            chat = encode(self._chat(fields["messages"]), bos=True)
            return "prompt", tuple(chat[:-1]), (tuple(chat[-1:]),)
        texts, asked = given & {"context", "file", "files"}, given & {"question", "questions"}
        if {"prompt", "messages"} & given or len(texts) != 1 or len(asked) != 1:
            raise InputError(
                f"the row has {', '.join(sorted(given)) or 'nothing'}; expected prompt, messages, "
                f"or one of context, file and files with one of question and questions"
            )
        document = _text(fields, "context") if "context" in texts else self._files(_names(fields))
        (kind,) = asked
        questions = (
            _list(fields, "questions") if kind == "questions" else [_text(fields, "question")]
        )
        if document not in self._encoded:
            self._encoded.clear()
            self._encoded[document] = tuple(encode(self.layout.context(document), bos=True))
        rows = (tuple(encode(self.layout.question(question))) for question in questions)
        return kind, self._encoded[document], tuple(rows)

    def _chat(self, messages: Any) -> PromptText:
        """The messages in the chat template; the answer follows the user's last."""
        expected = "a list of objects with role (system, user or assistant) and content, a text"
        if not isinstance(messages, list) or not messages:
            raise InputError(f"messages is {messages!r:.80}; expected {expected}")
        for each in messages:
            known = isinstance(each, dict) and each.keys() == {"role", "content"}
            if not known or each["role"] not in ROLES or not isinstance(each["content"], str):
                raise InputError(f"messages has {each!r:.80}; expected {expected}")
        if messages[-1]["role"] != "user":
            raise InputError("the last of messages is not the user's; end them with the question")
        assert self.tokenizer is not None
        if not self.tokenizer.has_chat:
            raise InputError(
                "messages need a chat template, and this checkpoint has none; give prompt, or take "
                "a checkpoint with one"
            )
        return self.tokenizer.chat(messages)

    def _files(self, names: Iterable[str]) -> str:
        """The text of documents; a line with its name heads each of several."""
        names = tuple(names)
        if names not in self._last:
            text = Joined.of(each for name in names for each in self._documents(name)).text
            self._last.clear()
            self._last[names] = text
        return self._last[names]

    def _documents(self, name: str) -> list[Document]:
        try:
            near = self.path.parent if isinstance(self.path, Path) else Path()
            path = (near / name).resolve()
            under = None if self.under is None else self.under.resolve()
            if under is not None and not path.is_relative_to(under):
                raise InputError(f"file {name!r} is not under {under}, as files must be")
            raw = read_bytes(path)
        except (OSError, RuntimeError, ValueError) as error:
            # A name may have a zero byte, links may form a loop.
            reason = getattr(error, "strerror", None) or error
            raise InputError(f"file {name!r} cannot be read as text: {reason}") from error
        return documents_in(raw, name, self.note)


def after(answered: str, row: str, line: Mapping[str, Any]) -> str:
    """The digest `answered` of rows, with one `row` more unless its line has an error."""
    return answered if failed(line) else digest_of([answered, row])


def _fields(raw: bytes, where: str) -> dict[str, Any]:
    try:
        text = raw.decode("utf-8-sig")
        fields = json.loads(text)
        check_text(json.dumps(fields, ensure_ascii=False), where)
    except UnicodeError as error:
        raise InputError(f"the row is not UTF-8 text: {error!s:.120}") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"the row is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise InputError(f"the row is a JSON {type(fields).__name__}; expected an object")
    if not isinstance(fields.get("id"), str | int | None) or isinstance(fields.get("id"), bool):
        found = fields.pop("id")
        raise InputError(f"id is {found!r:.80}; expected text or a whole number")
    return fields


def _text(fields: dict[str, Any], key: str) -> str:
    value = fields[key]
    if not isinstance(value, str) or not value.strip():
        raise InputError(f"{key} is {value!r:.80}; expected a text that is not empty")
    return value


def _list(fields: dict[str, Any], key: str) -> list[str]:
    value = fields[key]
    if not isinstance(value, list) or not value:
        raise InputError(f"{key} is {value!r:.80}; expected a list of texts")
    return [_text({key: each}, key) for each in value]


def _names(fields: dict[str, Any]) -> list[str]:
    """The files that a row names."""
    if "files" in fields:
        return _list(fields, "files")
    return [_text(fields, "file")] if "file" in fields else []


@dataclasses.dataclass(frozen=True)
class Batch:
    """Jobs that are computed together.

    Attributes:
      rows: of the compiled programs, at least the number of parts.
      slots: minimum capacity of the cache in tokens.
      reserve: slots for question and answer.
      request: of all of its parts.
    """

    parts: tuple[RowPart, ...]
    rows: int
    slots: int
    reserve: int
    request: Request | None = None


def windows(lines: Iterable[Line], size: int) -> Iterator[list[Line]]:
    """Lines in turn, `size` together: a text's stay together, of twice as many."""
    some: list[Line] = []
    for line in lines:
        if len(some) >= (2 * size if texts_of([*some[-1:], line]) < 2 else size):
            yield some
            some = []
        some.append(line)
    if some:
        yield some


def runs_of(lines: Iterable[Line]) -> list[Run]:
    """The runs of lines."""
    runs = itertools.groupby(enumerate(lines), lambda at: at[1].index - at[0])
    found = ([line for _, line in run] for _, run in runs)
    return [(some[0].index, some[0].number, some[0].place, len(some)) for some in found]


def texts_of(lines: Sequence[Line]) -> int:
    """How many texts and prompts lines have; a text counts again after another one."""
    pairs = itertools.pairwise(lines)
    return 1 + sum(one.text is None or one.text != two.text for one, two in pairs)


def parts_of(rows: Iterable[Row], split: bool) -> list[RowPart]:
    """Each prompt, and each text with all questions about it; with `split` with one of them."""
    found: dict[Any, tuple[Row, list[tuple[int, int]], list[tuple[int, ...]]]] = {}
    for row in rows:
        for number, question in enumerate(row.questions):
            place = row.index, number
            key = (place,) if split or row.kind in WHOLE else row.context
            _, places, questions = found.setdefault(key, (row, [], []))
            places.append(place)
            questions.append(question)
    return [
        RowPart(tuple(places), row.context, tuple(questions), row.total, row.request)
        for row, places, questions in found.values()
    ]


def pack(
    parts: Iterable[RowPart], rows: int, max_tokens: int, fits: Callable[[int, int], int]
) -> list[Batch]:
    """The batches of a window.

    Args:
      rows: most rows of a batch.
      max_tokens: of an answer.
      fits: (context tokens, reserve) -> rows that fit in memory.
    """
    parts = list(parts)
    # Requests that ask alike go together.
    kinds = list(dict.fromkeys(part.request for part in parts))
    ordered = sorted(
        parts,
        key=lambda part: (
            kinds.index(part.request),
            -part.length,
            -len(part.questions),
            part.places,
        ),
    )
    batches: list[Batch] = []
    group: list[RowPart] = []
    limit = rows
    for part in ordered:
        full = len(group) == limit or (group and 2 * part.length < group[0].length)
        if group and (full or part.request != group[0].request):
            batches.append(_batch(group, limit, max_tokens))
            group = []
        if not group:
            alone = _batch([part], 1, max_tokens)
            fitting = fits(alone.slots - alone.reserve, alone.reserve)
            limit = rows if fitting >= rows else 2 ** math.floor(math.log2(max(fitting, 1)))
        group.append(part)
    if group:
        batches.append(_batch(group, limit, max_tokens))
    return batches


def _batch(parts: Sequence[RowPart], limit: int, max_tokens: int) -> Batch:
    longest = max(len(question) for part in parts for question in part.questions)
    request = parts[0].request
    reserve = bucket(longest + (max_tokens if request is None else request.max_tokens))
    slots = _rounded(max(len(part.context) for part in parts) + reserve + 1)
    rows = min(limit, 2 ** math.ceil(math.log2(len(parts))))
    return Batch(tuple(parts), rows, slots, reserve, request)


def _rounded(tokens: int) -> int:
    """`tokens` rounded up to 4, 5, 6 or 7 times a power of two."""
    octave = 2 ** math.floor(math.log2(max(tokens, SMALLEST)))
    return -(-max(tokens, SMALLEST) // (octave // 4)) * (octave // 4)
