"""`jax-longctx ask`: one or many questions over one long text.

The context (everything up to and including the document) is prefilled once; each question is asked
of that context. A method that needs the question at prefill gets one prefill for each question.
"""

import dataclasses
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jax_longctx.cli import options
from jax_longctx.cli.options import argument, option
from jax_longctx.cli.terminal import (
    Compiling,
    Terminal,
    check_argument,
    check_folder,
    check_plot,
    choose_method,
    closing_note,
    read_documents,
    save,
)
from jax_longctx.errors import CheckpointError, InputError
from jax_longctx.files import file_errors, read_json, read_sealed, seal, whole_path, write_whole
from jax_longctx.memory import shown_bytes
from jax_longctx.methods import settings_of
from jax_longctx.origin import check_same

if TYPE_CHECKING:
    from jax_longctx.api import Answer, LongContext
    from jax_longctx.cli.where import Look
    from jax_longctx.engine import Context, Progress
    from jax_longctx.engine.ahead import Compilation
    from jax_longctx.text.documents import Joined

# Written beside a saved context: whether it uses the chat template, and a digest of the tokenizer.
PROMPT_FILE, PROMPT_FORMAT = "prompt.json", 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inputs:
    """The documents and the questions, validated.

    Attributes:
      words: the document and the questions; `files` or a saved context replace the document.
      completion: starts of answers, to be continued, in place of questions.

    Raises:
      InputError: words and options contradict each other.
    """

    PANEL = "Context"

    words: list[str] | None = argument(
        "The document and what to ask of it. --file and --load-context stand for the document, "
        "--completion for the questions.",
        metavar="FILE QUESTION",
        show_default=False,
    )
    files: list[str] | None = option(
        "A document, in place of FILE: a text (UTF-8; - for stdin), PDF, HTML, EPUB, DOCX, gz or "
        "zip of these, or a folder; may be repeated.",
        "--file",
        "-f",
        metavar="FILE",
    )
    completion: list[str] | None = option(
        "Instead of a question: the words an answer starts with, which the model "
        "continues, without chat template. The surest way to ask a small model; may be "
        "repeated.",
        metavar="STEM",
    )
    chat: bool | None = options.chat_template()
    save_context: Path | None = option(
        "Save the context to a new folder: later questions start without prefill.",
        metavar="DIR",
    )
    load_context: Path | None = option(
        "Ask of a saved context (same checkpoint, method and settings); give no FILE.",
        metavar="DIR",
        exists=True,
        file_okay=False,
    )
    where: bool = option(
        "Show the passages of the text that each answer was found in.", default=False
    )
    picture: Path | None = option(
        "Draw what each answer read of the text, to a PNG file.", metavar="FILE"
    )

    @property
    def sources(self) -> list[str] | None:
        """Files and folders; None where a saved context replaces them."""
        if self.load_context is not None:
            return None
        return self.files or (self.words or [""])[:1]

    @property
    def questions(self) -> list[str]:
        """Questions, or starts of answers."""
        return self.completion or self._asked

    @property
    def looks(self) -> bool:
        """Whether answers are to be found in the text."""
        return self.where or self.picture is not None

    @property
    def _asked(self) -> list[str]:
        words = self.words or []
        return words if self.files or self.load_context is not None else words[1:]

    def __post_init__(self) -> None:
        words, save, load = self.words or [], self.save_context, self.load_context
        check_plot(self.picture, "--picture")
        if load is not None and (save is not None or self.files):
            other = "--file" if self.files else "--save-context"
            raise InputError(f"{other} and --load-context exclude each other; give one")
        if load is not None and words and os.path.isfile(words[0]):
            raise InputError(
                f"{words[0]} is a file, but --load-context stands for the text; give questions only"
            )
        if not (words or self.files or load is not None):
            raise InputError("no FILE given; expected FILE QUESTION... (- reads stdin)")
        if save is not None and os.path.lexists(whole_path(save)):
            raise InputError(f"{save} exists; choose another name for --save-context")
        if self.completion and self._asked:
            raise InputError(
                f"question {self._asked[0]!r} and --completion exclude each other; give one of them"
            )
        if self.completion and self.chat:
            raise InputError("--completion is without chat template; leave out --chat")
        files = [question for question in self._asked if os.path.isfile(question)]
        if files:
            raise InputError(
                f"{files[0]} is a file where a question is expected; give several files with "
                f"--file, each"
            )
        told = self.files or not words or words[0] == "-" or os.path.exists(words[0])
        if not (self.questions or told):
            raise InputError(
                f"{words[0]!r:.80} stands where FILE is expected, and no question follows; "
                f"expected FILE QUESTION... (- QUESTION reads the text from stdin)"
            )
        if not self.questions:
            raise InputError("no question given; add QUESTION, or --completion STEM")
        if not all(question.strip() for question in self.questions):
            raise InputError("a question is empty; write what to ask of the text")
        for question in self.questions:
            check_argument("a question", question)


@options.command
def ask(
    inputs: Inputs,
    model: options.ModelChoice,
    method: options.MethodChoice,
    answers: options.AnswerChoice,
    as_json: bool = options.as_json(),
) -> None:
    """Ask one or many questions over one long text, or over several.

    The text is read once for all questions. Methods that need the question first read it for each.
    A line "Document: NAME" heads each of several documents.
    Answers stream to stdout; progress, timings and memory go to stderr.

    [bold]Two questions over one book[/bold]

        jax-longctx ask book.txt "Who tells it?" "How does it end?" -c llama3

    [bold]A completion that starts with the answer's own words[/bold]

        jax-longctx ask log.txt --completion "The pass key is" -c smollm2

    [bold]Several documents, and all those in a folder[/bold]

        jax-longctx ask -f paper.pdf -f notes/ "What do they differ in?" -c llama3

    [bold]Read now, ask later[/bold]

        jax-longctx ask book.txt "Who?" -c llama3 --save-context read

        jax-longctx ask "And why?" -c llama3 --load-context read
    """
    if inputs.save_context is not None:
        folder = whole_path(inputs.save_context)
        check_folder(folder.parent, "--save-context")
        with file_errors(f"--save-context {inputs.save_context} cannot be written"):
            # A name that is too long is known before the text is read.
            folder.with_name(f"{folder.name}.partial").exists()
    terminal = Terminal(as_json=as_json)
    sources = inputs.sources
    document = None if sources is None else read_documents(sources, terminal)
    compiling = Compiling(terminal)
    session = Session(inputs, answers, document, terminal, compiling)
    begin: dict[str, Any] = {"check": session.check, "sizes": session.sizes}
    if document is not None:
        begin["ahead"] = compiling.ahead(session.compile)
    if method.method in (None, options.AUTO):
        begin["choose"] = session.choose
    with compiling.watching():
        session.run(model.open(terminal, method, **begin))


class Session:
    """One document, its context, and the questions asked of it.

    `choose` and `compile` are called before the weights are there, `run` then. The first that is
    called encodes the texts for all.

    Attributes:
      chat: whether the prompt uses the chat template.
      prompt: the text up to the question; None where a saved context replaces it.
      text: its token ids.
      questions: token ids of each, up to its answer.
      looks: what the answers so far have read.
    """

    model: "LongContext"
    chat: bool
    prompt: Any
    text: list[int] | None
    questions: list[list[int]] | None = None

    def __init__(
        self,
        inputs: Inputs,
        answers: options.AnswerChoice,
        document: "Joined | None",
        terminal: Terminal,
        compiling: Compiling,
    ):
        self.inputs, self.answers, self.document = inputs, answers, document
        self.terminal, self.compiling = terminal, compiling
        self.unsaved: CheckpointError | InputError | None = None
        self.looks: list[Look] = []

    @property
    def rereads(self) -> bool:
        """Whether the text is prefilled for each question."""
        return self.model.engine.method.info.needs_question

    @property
    def reserve(self) -> int:
        """Tokens of the longest question and its answer."""
        return max(map(len, self.questions or ())) + self.answers.max_tokens

    def _take(self, model: "LongContext") -> list[list[int]]:
        """The questions of this model, which has one tokenizer under any method."""
        self.model = model
        if self.questions is None:
            # Imported late: it imports tokenizers and templates.
            from jax_longctx.text import chat_layout, plain_layout

            self.chat, encode = self._chosen_chat(model), model.tokenizer.encode
            stem = bool(self.inputs.completion)
            layout = chat_layout(model.tokenizer) if self.chat else plain_layout(stem=stem)
            self.questions = [encode(layout.question(asked)) for asked in self.inputs.questions]
            document = self.document
            self.prompt = None if document is None else layout.context(document.text)
            self.text = None if document is None else encode(self.prompt, bos=True)
        return self.questions

    def sizes(self, model: "LongContext") -> dict[str, Any]:
        """What a mesh is chosen for."""
        self._take(model)
        if self.text is not None:
            return {"reserve": self.reserve, "context": len(self.text)}
        from jax_longctx.engine.context_io import sizes_of

        assert self.inputs.load_context is not None
        return sizes_of(self.inputs.load_context, model.config.vocab_size)

    def check(self, model: "LongContext") -> None:
        """Raises an error where method, checkpoint and context do not fit; needs no weights."""
        self._chosen_chat(model)
        save, load = self.inputs.save_context, self.inputs.load_context
        if self.inputs.looks:
            from jax_longctx.engine.marks import check_where

            check_where(model.engine)
        if model.engine.method.info.needs_question and (save or load):
            name = settings_of(model.engine.method)["name"]
            raise InputError(
                f"{name} reads the text for each question: it has no context for "
                f"--{'save' if save else 'load'}-context; leave the option out, or take another "
                f"method"
            )
        if load is not None:
            from jax_longctx.engine.context_io import check_fits

            check_fits(model.engine, load)

    def _chosen_chat(self, model: "LongContext") -> bool:
        chat = False if self.inputs.completion else self.inputs.chat
        return chosen_chat(model, self.inputs.load_context, chat)

    def choose(self, model: "LongContext") -> Any:
        """The method for the document and the questions, or the saved context's."""
        asked, saving = self._take(model), self.inputs.save_context is not None
        if self.text is None:
            from jax_longctx.engine.context_io import method_of

            assert self.inputs.load_context is not None
            return method_of(self.inputs.load_context)
        how = {"reserve": self.reserve, "questions": len(asked), "saving": saving}
        return choose_method(self.terminal, model, len(self.text) + self.reserve, **how)

    def compile(self, model: "LongContext") -> "Compilation":
        """Begins to compile the programs for the document and the first question."""
        sizes = list(map(len, self._take(model)))
        assert self.text is not None
        tokens, how = len(self.text), {**self.answers.arguments(), "reserve": self.reserve}
        # A text that is read anew for each question is asked one at a time.
        alike = sizes[:1] if self.rereads else sizes
        return model.compile_all(tokens, alike, keep=len(alike) > 1, **how)

    def run(self, model: "LongContext") -> None:
        """Prefills the document, or loads its context, and answers every question."""
        questions = self._take(model)
        if self.rereads and len(questions) > 1:
            self.terminal.note(
                f"this method needs the question while it reads: the text is read "
                f"{len(questions)} times, once for each question"
            )
        context, seconds = None, None
        with self.terminal.warnings():
            if not self.rereads and model.together(len(questions)):
                self._answer_all(*self._context(None), questions)
                questions = []
            for number, question in enumerate(questions):
                if context is None or self.rereads:
                    context, seconds = self._context(question)
                self._answer(context, number, question, seconds)
                if not self.rereads:
                    seconds = None
        if self.inputs.picture is not None:
            from jax_longctx.cli.where import picture

            write_whole(picture(self.looks).png(), self.inputs.picture)
            self.terminal.note(f"{self.inputs.picture}: what each answer read of the text")
        if self.unsaved is not None:
            raise self.unsaved

    def _context(self, question: list[int] | None) -> tuple["Context", float | None]:
        """The context, and the seconds of its prefill; None for a loaded context."""
        if self.text is None:
            assert self.inputs.load_context is not None
            with self.terminal.waiting("loading the context"):
                return self.model.load_context(self.inputs.load_context), None
        folder, tokens = self.inputs.save_context, len(self.text)
        if folder is not None:
            check_space(self.model, folder, tokens, self.reserve, "--save-context")
        self.compiling.wait(prefill=True)
        asked = [question] if question is not None and self.rereads else None
        how = {"reserve": self.reserve, "questions": asked}
        context, seconds = prefilled(self.terminal, self.compiling, self.model, self.text, **how)
        if folder is not None:
            self._save(context, folder)
        return context, seconds

    def _save(self, context: "Context", folder: Path) -> None:
        """Saves the context. An error is raised only after all questions are answered."""
        try:
            save_read(self.terminal, self.model, context, folder, chat=self.chat)
        except (CheckpointError, InputError) as error:
            self.unsaved = error
        else:
            self.terminal.note(f"context saved to {folder}")

    def _answer_all(
        self, context: "Context", prefill: float | None, questions: list[list[int]]
    ) -> None:
        """Answers all questions together. The first one's text is shown as it comes."""
        shows, asked = not self.terminal.as_json, self.inputs.questions
        how = self.answers.arguments()
        self.compiling.wait()
        began = time.perf_counter()

        def on_text(number: int, text: str) -> None:
            if shows and number == 0:
                self.terminal.write(text)

        if shows:
            self.terminal.note(f"> {asked[0]}")
        try:
            with self.terminal.waiting("answering", when=not shows):
                kept = {"keep": self.inputs.looks}
                answers = self.model.ask_all(context, questions, on_text=on_text, **kept, **how)
        finally:
            if shows:
                self.terminal.write("\n")
        compiled = self.compiling.news()
        for number, answer in enumerate(answers):
            if shows and number:
                self.terminal.note(f"> {asked[number]}")
                self.terminal.write(answer.text + "\n")
            answer = self.compiling.apart(answer, began)
            self._close(context, number, answer, prefill, compiled)
            prefill, compiled = None, 0.0

    def _answer(
        self, context: "Context", number: int, question: list[int], prefill: float | None
    ) -> None:
        """Answers question `number`, of token ids `question`; its number decides its seed."""
        asked, how = self.inputs.questions[number], self.answers.arguments()
        more = number + 1 < len(self.inputs.questions) and not self.rereads
        how["keep"] = more or self.inputs.looks
        how["sampling"] = self.answers.sampling.at([(0, number)])
        if len(self.inputs.questions) > 1 and not self.terminal.as_json:
            self.terminal.note(f"> {asked}")
        self.compiling.wait()
        began = time.perf_counter()
        # Streamed text shows progress; JSON mode needs a spinner.
        with self.terminal.waiting("answering", when=self.terminal.as_json):
            answer = self.terminal.stream(
                lambda on_text: self.model.ask(context, [question], on_text=on_text, **how),
            )
        answer = self.compiling.apart(answer, began)
        self._close(context, number, answer, prefill, self.compiling.news())

    def _close(
        self,
        context: "Context",
        number: int,
        answer: "Answer",
        prefill: float | None,
        compiled: float,
    ) -> None:
        """What is told of an answer when it is complete."""
        asked, question = self.inputs.questions[number], self._take(self.model)[number]
        length, cache = context.lengths[0], context.answering_bytes
        memory = {"cache_bytes": cache}
        if self.model.engine.setup.offload is not None:
            memory["host_bytes"] = context.host_bytes
        self.terminal.note(closing_note(answer, length, prefill, cache, compiled))
        found = self._found(context, number, answer) if self.inputs.looks else {}
        if self.terminal.as_json:
            tokens = {"context": length, "question": len(question)}
            record = self.answers.record(
                self.model, answer, tokens, prefill or 0.0, memory, compiled
            )
            self.terminal.record({"question": asked, **record, **found})

    def _found(self, context: "Context", number: int, answer: "Answer") -> dict[str, Any]:
        """Says where the answer was found; that for its record."""
        from jax_longctx.cli.where import Look, passages
        from jax_longctx.sources import find_sources

        asked, question = self.inputs.questions[number], self._take(self.model)[number]
        with self.terminal.waiting("looking where it was found"):
            place = None if self.document is None else self.document.place
            given = [question], [answer], [self.prompt]
            (found,) = find_sources(self.model, context, *given, place)
        for line in passages(found):
            self.terminal.note(line)
        self.looks.append(Look(f"{asked}  {answer.text.strip()}", found))
        return {"sources": [source.record() for source in found.sources]}


def prefilled(
    terminal: Terminal,
    compiling: Compiling,
    model: "LongContext",
    text: list[int],
    tick: Callable[[], None] = lambda: None,
    **how: Any,
) -> tuple["Context", float]:
    """The context of a text, with progress, and the seconds of its prefill.

    `tick` is called after every chunk; an error that it raises gives the prefill up.
    """
    begun = time.perf_counter()
    with terminal.progress("reading") as update:

        def on_progress(now: "Progress") -> None:
            update(now.done, now.total)
            tick()

        context = model.prefill([text], progress=on_progress, **how)
    return context, time.perf_counter() - begun - compiling.clock.seconds(begun)


def check_space(model: "LongContext", folder: Path, tokens: int, reserve: int, option: str) -> None:
    """CheckpointError where the context will not fit on the disk, before it is prefilled."""
    footprint = model.footprint(tokens, reserve=reserve)
    needed = footprint.kept + footprint.host
    # The folder is made with the context.
    there = next(each for each in whole_path(folder).parents if each.exists())
    free = shutil.disk_usage(there).free
    if needed > free:
        raise CheckpointError(
            f"the context takes {shown_bytes(needed)}, the disk of {folder} has "
            f"{shown_bytes(free)} free; free some, or name another for {option}"
        )


def save_read(
    terminal: Terminal, model: "LongContext", context: "Context", folder: Path, *, chat: bool
) -> None:
    """Saves a context, and how its text was laid out."""
    with terminal.waiting("saving the context"):
        model.save_context(context, folder)
        prompt = {"chat": chat, "tokenizer": model.tokenizer_digest}
        save(seal(PROMPT_FORMAT, prompt), folder / PROMPT_FILE)


def chosen_chat(model: "LongContext", load: Path | None, chat: bool | None) -> bool:
    """Whether the prompt uses the chat template: as given, as saved, or where there is one.

    Raises:
      InputError, CheckpointError: a saved context has it otherwise, is damaged, or of another
        tokenizer.
    """
    prompt = None if load is None else _read_prompt(load)
    if load is None or prompt is None:
        return model.tokenizer.has_chat if chat is None else chat
    saved, ours = prompt["chat"], {"tokenizer": model.tokenizer_digest}
    # Earlier versions did not say.
    known = {"tokenizer": prompt.get("tokenizer") or ours["tokenizer"]}
    check_same(load, known, ours, "read the text again", kind=CheckpointError)
    if chat is not None and chat != saved:
        was = "in the chat template" if saved else "without chat template"
        raise InputError(f"{load} was read {was}; ask that way, or read the text again")
    return saved


def _read_prompt(folder: Path) -> dict[str, Any] | None:
    """Chat template and tokenizer of a saved context; None where it was saved from Python."""
    path = folder / PROMPT_FILE
    if not os.path.lexists(path):
        return None
    value = read_json(path)
    # Those of earlier versions have neither format nor digest.
    if value.keys() - {"chat", "tokenizer"}:
        value = read_sealed(path, PROMPT_FORMAT, "read the text again")
    if not isinstance(value.get("chat"), bool):
        raise CheckpointError(f"{path} does not say whether it is a chat")
    return value
