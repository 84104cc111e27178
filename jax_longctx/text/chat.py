"""Prompts: a checkpoint's chat template, and the split of a prompt into context and question.

The context is everything up to and including the document, and is read once. The question is the
rest: in a chat, the question and the tokens that open the answer. The two are tokenised separately,
so every method gets the same ids, however it reads the context.

Templates are rendered in a child process with limits of time and memory. One process serves all
templates (`chat_worker`). It starts with the first template, and imports jinja2 while the
checkpoint loads. A template that exceeds a limit ends this process only; the next template starts
a new one.
"""

import atexit
import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jax_longctx.errors import CheckpointError, ConfigError, InputError

WORKER = Path(__file__).with_name("chat_worker.py")
# Limits of one rendering, compilation included: thousands of times what published templates need.
SECONDS = 3.0
MEMORY = 2**30
# Placeholders for document and question in the template, so that jinja never renders a document.
# No template contains or strips these private-use characters.
_DOCUMENT = "\ue000document\ue000"
_QUESTION = "\ue000question\ue000"


class ChatTemplate:
    """One chat template with the checkpoint's special tokens.

    Attributes:
      source: the template's own text.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]):
        self.source = source
        self._special_tokens = dict(special_tokens)
        _RENDERER.start()

    def render(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool) -> str:
        """The messages as one text.

        Raises:
          ConfigError: the template is not valid, fails, or exceeds a limit.
          InputError: the template refuses the messages.
        """
        reply = _RENDERER.render(
            {
                "source": self.source,
                "variables": {
                    **self._special_tokens,
                    "messages": [dict(message) for message in messages],
                    "add_generation_prompt": add_generation_prompt,
                },
                "seconds": SECONDS,
                "memory": MEMORY,
            }
        )
        if "refuses" in reply:
            raise InputError(f"the chat template refuses the messages: {reply['refuses']}")
        if "error" in reply:
            raise ConfigError(
                f"the chat template {reply['error']}; repair it, or ask without it (--no-chat)"
            )
        return reply["text"]


def select_template(value: Any) -> str | None:
    """The template of `tokenizer_config.json`: text, or a list of named ones ("default" wins)."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(entry, Mapping) for entry in value):
        named = {entry.get("name"): entry.get("template") for entry in value}
        chosen = named.get("default", next(iter(named.values()), None))
        if chosen is None or isinstance(chosen, str):
            return chosen
    raise CheckpointError(
        f"chat_template is a {type(value).__name__}; expected text or a list of named templates"
    )


class _Renderer:
    """The child process that renders; threads take turns."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.RLock()

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
                    env={**os.environ, "PYTHONPATH": paths},
                    # Ctrl-C reaches only the parent; when the parent ends, so do stdin and child.
                    start_new_session=True,
                )
            except OSError as error:
                raise ConfigError(
                    f"the process that renders chat templates cannot start: {error.strerror}"
                ) from error

    def render(self, request: dict[str, Any]) -> dict[str, str]:
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
            return {"error": f"takes more than {request['seconds']:g} s of processor time"}
        return {"error": f"ends the process that renders it (exit code {code})"}

    def stop(self) -> int | None:
        """Ends the process, if there is one, and returns its exit code."""
        process, self._process = self._process, None
        if process is None:
            return None
        # Closes stdin, which ends the process, and waits for the end.
        process.communicate()
        return process.returncode


_RENDERER = _Renderer()
atexit.register(_RENDERER.stop)


@dataclasses.dataclass(frozen=True)
class PromptLayout:
    """Texts before the document, between document and question, and after the question."""

    before: str
    between: str
    after: str

    def context(self, document: str) -> str:
        """The context's text. Raises InputError when the document is empty."""
        if not document.strip():
            raise InputError("the document is empty; give a text to ask about")
        return self.before + document

    def question(self, question: str) -> str:
        """The text between the context and the answer. Raises InputError when it is empty."""
        if not question.strip():
            raise InputError("a question is empty; write what to ask of the document")
        return self.between + question + self.after


def plain_layout(stem: bool = False) -> PromptLayout:
    """Completion without a chat template: a question and "Answer:", or the answer's own `stem`."""
    if stem:
        return PromptLayout("", "\n\n", "")
    return PromptLayout("", "\n\nQuestion: ", "\nAnswer:")


def chat_layout(tokenizer: Any) -> PromptLayout:
    """The checkpoint's chat template around document and question, in one user message.

    Raises:
      ConfigError: there is no template, or it does not contain the message exactly once.
    """
    content = f"{_DOCUMENT}\n\n{_QUESTION}"
    text = tokenizer.chat([{"role": "user", "content": content}])
    before, found_document, rest = text.partition(_DOCUMENT)
    between, found_question, after = rest.partition(_QUESTION)
    if not (found_document and found_question) or "\ue000" in before + between + after:
        raise ConfigError(
            "the chat template does not show a user's message exactly once; use --no-chat"
        )
    return PromptLayout(before, between, after)
