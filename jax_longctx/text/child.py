"""Child processes that render templates and encode texts within limits of time and memory.

Each of them runs `worker`. A request that exceeds a limit ends its process only; the next request
starts a new one.
"""

import atexit
import dataclasses
import hashlib
import json
import math
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import tokenizers

from jax_longctx.errors import CheckpointError, ConfigError, InputError

WORKER = Path(__file__).with_name("worker.py")
# Processes that encode at the same time.
ENCODERS = 4
# Seconds of processor time and bytes of memory to encode a text or to load a tokenizer, and those
# for each character of it: some ten times what the slowest published tokenizers take.
SECONDS, MEMORY = 3.0, 2**29
SECONDS_EACH, MEMORY_EACH = 2e-5, 1000
# How many times longer a decoder, which runs in this process, may make a text.
MOST_GROWTH = 100


class Child:
    """A child process that answers requests; threads take turns."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.RLock()
        atexit.register(self.stop)

    def start(self) -> None:
        """Starts the process unless it runs, without waiting for it."""
        with self._lock:
            if self._process is not None and self._process.poll() is None:
                return
            self.stop()
            # The child gets this process's import paths, so that it can skip `site`.
            paths = os.pathsep.join(path for path in sys.path if path)
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-S", "-P", str(WORKER)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    # A tokenizer's own threads would take address space.
                    env={**os.environ, "PYTHONPATH": paths, "TOKENIZERS_PARALLELISM": "false"},
                    # Ctrl-C reaches only the parent; when the parent ends, so do stdin and child.
                    start_new_session=True,
                )
            except OSError as error:
                raise ConfigError(
                    f"the process for chat templates and texts cannot start: {error.strerror}"
                ) from error

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The child's reply, or `error` with the reason why there is none."""
        line = json.dumps(request).encode() + b"\n"
        with self._lock:
            self.start()
            process = self._process
            assert process is not None and process.stdin is not None and process.stdout is not None
            try:
                process.stdin.write(line)
                process.stdin.flush()
                reply = process.stdout.readline()
            except BrokenPipeError:
                reply = b""
            except BaseException:
                # Otherwise the pipe would hold this reply when the next one is read.
                process.kill()
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
        """Ends the process, if there is one, and returns its exit code."""
        process, self._process = self._process, None
        if process is None:
            return None
        # Closes stdin, which ends the process, and waits for the end.
        process.communicate()
        return process.returncode

    def forget(self) -> None:
        """In a forked process: leaves the child to the process that started it."""
        process, self._process, self._lock = self._process, None, threading.RLock()
        if process is not None:
            # Neither waited for nor closed here: another thread may have held its pipes.
            process.returncode = 0
            _left.append(process)


_left: list[subprocess.Popen[bytes]] = []


def _line_of(children: Iterable[Child]) -> "queue.LifoQueue[Child]":
    line: queue.LifoQueue[Child] = queue.LifoQueue()
    for child in children:
        line.put(child)
    return line


RENDERER = Child()
_own = [Child() for _ in range(ENCODERS)]
# Who is first in line was used last, and has the tokenizer.
_encoders = _line_of(_own)


def _forked() -> None:
    global _encoders
    for child in (RENDERER, *_own):
        child.forget()
    _encoders = _line_of(_own)


os.register_at_fork(after_in_child=_forked)


@dataclasses.dataclass(frozen=True)
class Encoded:
    """Ids of a text; for `offsets`, where in the text each begins and ends."""

    ids: list[int]
    offsets: list[tuple[int, int]]


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

    def encode(self, text: str, *, offsets: bool = False) -> Encoded:
        """Encodes without the special tokens that the tokenizer adds.

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
        return Encoded(reply["ids"], list(map(tuple, reply.get("offsets", ()))))

    def _ask(self, request: dict[str, Any], characters: int) -> dict[str, Any]:
        request = {**request, "tokenizer": self._key, **_limits(characters)}
        child = _encoders.get()
        try:
            reply = child.ask(request)
            if "unknown" in reply:
                # Loading takes some 25 bytes of memory for one of the file.
                more = _limits(len(self._file) // 16 + characters)
                reply = child.ask({**request, "file": self._file, **more})
            return reply
        finally:
            _encoders.put(child)


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
