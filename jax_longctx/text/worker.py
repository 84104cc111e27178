"""Renders chat templates, encodes texts and reads documents in a process that `child` starts.

Templates and tokenizers come with a checkpoint and are not trusted, nor are documents. jinja2's
immutable sandbox limits what templates can access, but not their time and memory: the kernel limits
both for this process. A timer of processor time kills it when a request takes too long.

Reads one JSON request a line and writes one JSON reply a line. To a template: `text`; `refuses`,
the template's reason to reject the messages; or `error`, the fault of the template. To a text (or
to none, where a tokenizer is only to be loaded): `ids`, and `offsets` where they are asked for;
`unknown`, where the file of the tokenizer is to be sent too; `refuses`, where the text is not
Unicode; or `error`, the fault of the tokenizer. To a document: `documents.reply_to`. For all else
it imports nothing of the library, so that it starts fast.

Templates find the names that Hugging Face defines: `raise_exception`, `strftime_now`, the `tojson`
filter, loop controls, and the `generation` block (which marks the assistant's words for training
and renders as its body).
"""

import datetime
import functools
import json
import resource
import signal
import sys
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox

# Most characters of an error's text, which the template may make of any length.
MOST_CHARACTERS = 300


def main() -> None:
    """Answers requests until stdin ends."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # The parent may ignore it; the default ends the process.
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    _, most_bytes = resource.getrlimit(resource.RLIMIT_AS)
    for line in sys.stdin.buffer:
        request = json.loads(line)
        if sys.platform == "linux":  # macOS does not enforce it; there time alone is bounded
            # What an earlier request left counts as none.
            allowed = _held_bytes() + request["memory"]
            if most_bytes != resource.RLIM_INFINITY:
                allowed = min(allowed, most_bytes)
            resource.setrlimit(resource.RLIMIT_AS, (allowed, most_bytes))
        signal.setitimer(signal.ITIMER_PROF, request["seconds"])
        if "document" in request:
            reply = _read(request)
        elif "tokenizer" in request:
            reply = _encoded(request)
        else:
            # A chat is about as long as its messages; a hostile template may fill the memory.
            reply = _rendered(request, most=2**20 + 4 * len(line))
        if sys.platform == "linux":
            # The next request may be longer.
            resource.setrlimit(resource.RLIMIT_AS, (most_bytes, most_bytes))
        sys.stdout.buffer.write(json.dumps(reply).encode() + b"\n")
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.buffer.flush()
        # They would stay in memory until the next request.
        del line, request, reply


def _held_bytes() -> int:
    """Of address space."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


# By the digests of their files: a checkpoint's, and of its copies with other settings.
MOST_TOKENIZERS = 8
_tokenizers: dict[str, Any] = {}


def _encoded(request: dict[str, Any]) -> dict[str, Any]:
    import tokenizers

    key = request["tokenizer"]
    try:
        backend = _tokenizers.get(key)
        if backend is None:
            if "file" not in request:
                return {"unknown": True}
            backend = tokenizers.Tokenizer.from_str(request["file"])
            backend.no_truncation()
            backend.no_padding()
            while len(_tokenizers) >= MOST_TOKENIZERS:
                _tokenizers.pop(next(iter(_tokenizers)))
            _tokenizers[key] = backend
        if "text" not in request:
            # As the library does to learn of the beginning-of-text token.
            return {"ids": backend.encode("").ids}
        encode = backend.encode_batch if request["offsets"] else backend.encode_batch_fast
        (found,) = encode([request["text"]], add_special_tokens=False)
        return {"ids": found.ids, **({"offsets": found.offsets} if request["offsets"] else {})}
    except TypeError:  # the package raises this for half a surrogate pair
        return {"refuses": "it holds characters that are not Unicode (no UTF-8)"}
    except BaseException as error:  # Rust's panics are no Exception
        return {"error": f"fails: {_shown(error)}"}


def _read(request: dict[str, Any]) -> dict[str, Any]:
    try:
        from jax_longctx.text.documents import reply_to

        return reply_to(request)
    except Exception as error:  # such as a library's own
        return {"error": f"fails: {_shown(error)}"}


def _rendered(request: dict[str, Any], most: int) -> dict[str, str]:
    try:
        template = _compiled(request["source"])
    except jinja2.TemplateSyntaxError as error:
        return {"error": _line(f"is not valid at its line {error.lineno}: {error.message}")}
    except Exception as error:  # such as deep nesting or endless numbers
        return {"error": f"cannot be compiled: {_shown(error)}"}
    try:
        text = template.render(request["variables"])
    except jinja2.TemplateError as error:
        return {"refuses": _line(str(error.message)) or "it does not say why"}
    except Exception as error:  # a template may raise any exception
        return {"error": f"fails: {_shown(error)}"}
    if len(text) > most:
        return {"error": f"renders {len(text):,} characters; at most {most:,} are taken"}
    return {"text": text}


# Only one, so that a large template is freed when the next one comes.
@functools.lru_cache(maxsize=1)
def _compiled(source: str) -> jinja2.Template:
    return _environment().from_string(source)


def _shown(error: BaseException) -> str:
    if isinstance(error, MemoryError):
        return "it takes too much memory"
    return _line(f"{type(error).__name__}: {error}")


def _line(text: str) -> str:
    """One line of printable text, cut where it is long."""
    shown = "".join(c if c.isprintable() else " " for c in text[: MOST_CHARACTERS + 1])
    words = " ".join(shown[:MOST_CHARACTERS].split()).rstrip(".")
    return words + "..." * (len(shown) > MOST_CHARACTERS)


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %} ... {% endgeneration %}`: its body, unchanged."""

    # jinja2 declares it as a plain set of the instance; a ClassVar would contradict it.
    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


def _environment() -> jinja2.Environment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[jinja2.ext.loopcontrols, _GenerationBlock],
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda pattern: datetime.datetime.now().strftime(pattern)
    return environment


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **more: Any) -> str:
    # Jinja's own filter escapes for HTML, unlike the texts of training.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **more)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


if __name__ == "__main__":
    main()
