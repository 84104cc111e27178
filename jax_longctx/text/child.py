"""Chat templates, encoding and documents in child processes, within limits of time and memory.

Each child runs `worker`, and serves one thread at a time. A request that exceeds a limit ends its
process only; the next request starts a new one.
"""

import atexit
import base64
import contextlib
import hashlib
import json
import math
import os
import queue
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from jax_longctx.errors import CheckpointError, ConfigError, InputError

WORKER = Path(__file__).with_name("worker.py")
# Processes that work at the same time, on documents and on all else.
CHILDREN = 4
# Seconds of processor time and bytes of memory to render a template, to encode a text or to load a
# tokenizer, and those for each character of a text or a tokenizer: some ten times what the slowest
# published tokenizers take, and thousands of times what published templates need.
SECONDS, MEMORY = 3.0, 2**30
SECONDS_EACH, MEMORY_EACH = 2e-5, 1000
# The same of a document, and for each of its bytes: some ten times what slow PDFs take.
READING = {"seconds": (60.0, 5e-6), "memory": (2**32, 40)}
# Threads of a tokenizer and of numpy (40 MB for each core) would take address space.
ALONE = {"TOKENIZERS_PARALLELISM": "false", "OPENBLAS_NUM_THREADS": "1"}
# How many times longer a decoder, which runs in this process, may make a text.
MOST_GROWTH = 100


class Child:
    """A child process that answers requests of one thread at a time."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> subprocess.Popen[bytes]:
        """The process, which is started unless it runs; nothing waits for it."""
        if self._process is not None and self._process.poll() is None:
            return self._process
        self.stop()
        # The child gets this process's import paths, so that it can skip `site`.
        paths = os.pathsep.join([*filter(None, sys.path), str(WORKER.parents[2])])
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-S", "-P", str(WORKER)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": paths, **ALONE},
                # Ctrl-C reaches only the parent; when the parent ends, so do stdin and child.
                start_new_session=True,
            )
        except OSError as error:
            raise ConfigError(
                f"the process for chat templates and texts cannot start: {error.strerror}"
            ) from error
        return self._process

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The child's reply, or `error` with the reason why there is none."""
        line, process = json.dumps(request).encode() + b"\n", self.start()
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(line)
            process.stdin.flush()
            reply = process.stdout.readline()
        except BrokenPipeError:
            reply = b""
        except BaseException:
            # Otherwise the pipe would hold this reply when the next one is read.
            self.stop()
            raise
        if reply.endswith(b"\n"):
            return json.loads(reply)
        code = self.stop()
        if code == -signal.SIGPROF:
            return {"error": f"takes more than {request['seconds']:.3g} s of processor time"}
        if code == -signal.SIGABRT:
            return {"error": "takes too much memory"}
        return {"error": f"ends the process that it runs in (exit code {code})"}

    def stop(self) -> int | None:
        """Ends the process, if there is one, at once, and returns its exit code."""
        process, self._process = self._process, None
        if process is None:
            return None
        # Without effect on one that has ended.
        process.kill()
        process.communicate()
        return process.returncode


# All children of this process, and the idle ones: first in line is the one that was used last, and
# has the tokenizer. Documents have their own: slow ones keep nobody from a tokenizer.
_own: list[Child] = []
_idle: "list[queue.LifoQueue[Child]]" = []
_left: list[Child] = []


def _make_children() -> None:
    """In a forked process too, which leaves its parent's: a thread there may hold their pipes."""
    _left.extend(_own)
    _own[:], _idle[:] = [Child() for _ in range(2 * CHILDREN)], [queue.LifoQueue() for _ in "ab"]
    for number, child in enumerate(_own):
        _idle[number % 2].put(child)


def _stop_children() -> None:
    for child in _own:
        child.stop()


_make_children()
os.register_at_fork(after_in_child=_make_children)
atexit.register(_stop_children)


@contextlib.contextmanager
def _any_child(documents: bool = False) -> Iterator[Child]:
    """A child for this thread alone."""
    idle = _idle[documents]
    child = idle.get()
    try:
        yield child
    finally:
        idle.put(child)


def start_child() -> None:
    """Starts a process and returns at once. It imports the libraries for requests."""
    with _any_child() as child:
        child.start()


def read_apart(raw: bytes, **request: Any) -> dict[str, Any]:
    """What `documents.reply_to` replies, or `error` with the reason why there is none."""
    limits = {name: least + each * len(raw) for name, (least, each) in READING.items()}
    with _any_child(documents=True) as child:
        return child.ask({"document": base64.b64encode(raw).decode(), **request, **limits})


class ChatTemplate:
    """One chat template with the checkpoint's special tokens.

    Attributes:
      source: the template's own text.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]):
        self.source = source
        self._special_tokens = dict(special_tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        variables: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """The messages as one text.

        Raises:
          ConfigError: the template is not valid, fails, or exceeds a limit.
          InputError: the template refuses the messages, or variables have names of its own.
        """
        own = {
            **self._special_tokens,
            "messages": [dict(message) for message in messages],
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        variables = variables or {}
        if taken := sorted(own.keys() & variables.keys()):
            raise InputError(f"the template's variable {taken[0]!r} is set for you; leave it out")
        request = {"source": self.source, "variables": {**own, **variables}, **_limits(0)}
        with _any_child() as child:
            reply = child.ask(request)
        if "refuses" in reply:
            raise InputError(f"the chat template refuses the messages: {reply['refuses']}")
        if "error" in reply:
            raise ConfigError(
                f"the chat template {reply['error']}; repair it, or ask without it (--no-chat)"
            )
        return reply["text"]


class BoundedTokenizer:
    """Encodes as the tokenizer of a `tokenizer.json` does, within limits of time and memory.

    Args:
      file: the text of that file.
    """

    def __init__(self, file: str):
        self._file = file
        self._key = hashlib.sha256(file.encode("utf-8", "surrogatepass")).hexdigest()

    def load(self, name: str) -> tokenizers.Tokenizer:
        """The same tokenizer in this process, to decode.

        Raises:
          CheckpointError: `name`, the file, is no tokenizer, or exceeds a limit.
        """
        reply = self._ask({}, 0)
        if "ids" not in reply:
            raise CheckpointError(f"{name} is not a tokenizer file: it {reply['error']}")
        backend = tokenizers.Tokenizer.from_str(self._file)
        decoder = backend.decoder
        times = _growth(None if decoder is None else json.loads(decoder.__getstate__()))
        if times > MOST_GROWTH:
            raise CheckpointError(
                f"{name}: its decoder makes texts up to {times:.3g} times as long, at most "
                f"{MOST_GROWTH} are taken; fetch the model's own tokenizer.json"
            )
        return backend

    def encode(
        self, text: str, *, offsets: bool = False
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Ids without the special tokens that the tokenizer adds, and where in the text each is.

        Args:
          offsets: whether to say where; an empty list else.

        Raises:
          InputError: the text is not Unicode, or the tokenizer fails or exceeds a limit on it.
        """
        reply = self._ask({"text": text, "offsets": offsets}, len(text))
        if "refuses" in reply:
            raise InputError("the text holds characters that are not Unicode (no UTF-8)")
        if "error" in reply:
            raise InputError(
                f"the checkpoint's tokenizer {reply['error']} on a text of {len(text):,} "
                f"characters; shorten the text, or convert with a sound tokenizer.json"
            )
        return reply["ids"], list(map(tuple, reply.get("offsets", ())))

    def _ask(self, request: dict[str, Any], characters: int) -> dict[str, Any]:
        request = {**request, "tokenizer": self._key}
        with _any_child() as child:
            reply = child.ask(request | _limits(characters))
            if "unknown" in reply:
                # Loading takes some 25 bytes of memory for one of the file.
                more = _limits(len(self._file) // 16 + characters)
                reply = child.ask({**request, "file": self._file, **more})
        return reply


def _limits(characters: int) -> dict[str, float]:
    seconds = SECONDS + SECONDS_EACH * characters
    return {"seconds": seconds, "memory": MEMORY + MEMORY_EACH * characters}


def _growth(decoder: Any) -> float:
    """How many times longer a step of a decoder makes a text; endless for a regular expression."""
    match decoder:
        case {"type": "Sequence", "decoders": steps}:
            return math.prod(map(_growth, steps))
        case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if old:
            return max(1.0, len(new) / len(old))
        case {"type": "Replace"}:
            return math.inf
    return 1.0
