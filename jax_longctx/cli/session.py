"""One text read once, and the questions asked of it: what `jax-longctx ask` does.

The context (everything up to and including the document) is read once; each question is asked of
that same context. A method that must know the question while it reads gets one reading a question.
"""

import json
import os
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jax_longctx.cli import processes
from jax_longctx.cli.answers import (
    AnswerOptions,
    closing_note,
    on_progress,
    seconds_of,
    stream_answer,
)
from jax_longctx.cli.options import run_facts
from jax_longctx.cli.request import Request
from jax_longctx.cli.terminal import Terminal
from jax_longctx.errors import CheckpointError, InputError
from jax_longctx.memory import peak_memory, shown_bytes
from jax_longctx.text import PromptLayout, Tokenizer, chat_layout, plain_layout

if TYPE_CHECKING:
    from jax_longctx.api import LongContext
    from jax_longctx.engine import Context

__all__ = ["Session"]

# Written beside a saved context: whether it was laid out as a chat.
PROMPT_FILE = "prompt.json"


class Session:
    """One document, its context, and the questions asked of it."""

    def __init__(
        self, model: "LongContext", request: Request, answers: AnswerOptions, terminal: Terminal
    ):
        self.model, self.request, self.answers, self.terminal = model, request, answers, terminal
        self.rereads = model.engine.method.info.needs_question
        if self.rereads and (request.save or request.load):
            raise InputError(
                "this method reads the text for each question; there is no context to save or load"
            )
        self.unsaved: CheckpointError | None = None
        self.chat = _chosen_chat(model.tokenizer, request)
        self.layout = _layout(model.tokenizer, self.chat, request.stems)

    def run(self, document: str | None) -> None:
        """Reads the document, or loads its context, and answers every question."""
        with self.terminal.warnings():
            self._run(document)

    def _run(self, document: str | None) -> None:
        questions = [self.layout.question(question) for question in self.request.questions]
        if self.rereads and len(questions) > 1:
            self.terminal.note(
                f"this method needs the question while it reads: the text is read "
                f"{len(questions)} times, once for each question"
            )
        context, seconds = None, None
        for number, question in enumerate(questions):
            if context is None or self.rereads:
                context, seconds = self._context(document, questions, question)
            keep = number + 1 < len(questions) and not self.rereads
            self._answer(context, number, question, seconds, keep=keep)
            if not self.rereads:
                seconds = None
        if self.unsaved is not None:
            raise self.unsaved

    def _context(
        self, document: str | None, questions: list[str], question: str
    ) -> tuple["Context", float | None]:
        """The context, and the seconds it took to read; None when it was loaded."""
        if document is None:
            assert self.request.load is not None
            with self.terminal.waiting("loading the context"):
                return self.model.load_context(self.request.load), None
        longest = max(len(self.model.tokenizer.encode(text)) for text in questions)
        reserve = longest + self.answers.max_tokens
        if self.request.save is not None:
            self._check_space(self.request.save, document, reserve)
        begun = time.perf_counter()
        with self.terminal.progress("reading") as update:
            context = self.model.prefill(
                self.layout.context(document),
                reserve=reserve,
                questions=question if self.rereads else None,
                progress=on_progress(update),
            )
        seconds = time.perf_counter() - begun
        if self.request.save is not None:
            self._save(context, self.request.save)
        return context, seconds

    def _check_space(self, folder: Path, document: str, reserve: int) -> None:
        """A full disk is told before the text is read."""
        tokens = len(self.model.tokenizer.encode(self.layout.context(document), bos=True))
        needed = self.model.footprint(tokens, reserve=reserve).kept
        free = shutil.disk_usage(folder.absolute().parent).free
        if needed > free:
            raise CheckpointError(
                f"the context takes {shown_bytes(needed)}, the disk of {folder} has "
                f"{shown_bytes(free)} free; free some, or name another for --save-context"
            )

    def _save(self, context: "Context", folder: Path) -> None:
        """Keeps the context. Where that fails, what it was read for comes first: the answers."""
        try:
            with self.terminal.waiting("saving the context"):
                self.model.save_context(context, folder)
                if processes.is_leader():
                    _write_prompt(folder, self.chat)
        except CheckpointError as error:
            self.unsaved = error
        else:
            self.terminal.note(f"context saved to {folder}")

    def _answer(
        self, context: "Context", number: int, question: str, prefill: float | None, keep: bool
    ) -> None:
        """Question `number`, laid out as `question`; its draws follow from its number."""
        asked, how = self.request.questions[number], self.answers.arguments()
        how["sampling"] = self.answers.sampling.at([(0, number)])
        if len(self.request.questions) > 1 and not self.terminal.as_json:
            self.terminal.note(f"> {asked}")
        # Streamed text shows that work goes on; JSON needs a sign of it.
        with self.terminal.waiting("answering", when=self.terminal.as_json):
            answer = stream_answer(
                self.terminal,
                lambda on_text: self.model.ask(
                    context, question, keep=keep, on_text=on_text, **how
                ),
            )
        length, cache = context.lengths[0], context.answering_bytes
        self.terminal.note(closing_note(answer, length, prefill, cache))
        if self.terminal.as_json:
            self.terminal.record(
                {
                    "question": asked,
                    "answer": answer.text,
                    "finish": answer.finish,
                    "warning": answer.warning,
                    "tokens": {
                        "context": length,
                        "question": len(self.model.tokenizer.encode(question)),
                        "answer": len(answer.tokens),
                    },
                    "seconds": seconds_of(answer, prefill or 0.0),
                    "memory": {"cache_bytes": cache, "peak_bytes": peak_memory()},
                    **run_facts(self.model),
                    **self.answers.facts(),
                }
            )


def _chosen_chat(tokenizer: Tokenizer, request: Request) -> bool:
    """Whether the prompt is a chat: as asked for, as the saved context is, or where possible."""
    saved = None if request.load is None else _read_prompt(request.load)
    if saved is None:
        return tokenizer.has_chat if request.chat is None else request.chat
    if request.chat is not None and request.chat != saved:
        was = "in the chat template" if saved else "without chat template"
        raise InputError(f"{request.load} was read {was}; ask that way, or read the text again")
    return saved


def _layout(tokenizer: Tokenizer, chat: bool, stems: bool) -> PromptLayout:
    return chat_layout(tokenizer) if chat else plain_layout(stem=stems)


def _write_prompt(folder: Path, chat: bool) -> None:
    partial = folder / f"{PROMPT_FILE}.partial"
    try:
        partial.write_text(json.dumps({"chat": chat}), encoding="utf-8")
        os.replace(partial, folder / PROMPT_FILE)
    except OSError as error:
        raise CheckpointError(f"{folder} could not be written: {error.strerror}") from error


def _read_prompt(folder: Path) -> bool | None:
    """Whether a saved context is a chat; None where it was saved from Python."""
    try:
        value: Any = json.loads((folder / PROMPT_FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder / PROMPT_FILE} is damaged: {error}") from error
    if not isinstance(value, dict) or not isinstance(value.get("chat"), bool):
        raise CheckpointError(f"{folder / PROMPT_FILE} does not say whether it is a chat")
    return value["chat"]
