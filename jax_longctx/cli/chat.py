"""`jax-longctx chat`: a conversation over files.

The files are read once; questions and answers stay in the cache behind them (see `conversation`).
A line that begins with / is a command. Lines come from the terminal or from a pipe; in a pipe the
first error ends the program.
"""

import dataclasses
import importlib.util
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jax_longctx.cli import options, process
from jax_longctx.cli.ask import check_space, chosen_chat, prefilled, save_read
from jax_longctx.cli.options import argument, option
from jax_longctx.cli.terminal import (
    Compiling,
    Terminal,
    check_argument,
    choose_method,
    read_documents,
)
from jax_longctx.errors import CheckpointError, DamagedError, InputError, LongctxError
from jax_longctx.files import decoded, expanded, read_sealed, seal, whole_path, write_whole
from jax_longctx.memory import peak_memory, shown_bytes
from jax_longctx.methods import make_method, settings_of
from jax_longctx.origin import check_same, digest_of
from jax_longctx.settings import named_text

if TYPE_CHECKING:
    from jax_longctx.api import LongContext
    from jax_longctx.conversation import Conversation
    from jax_longctx.text.documents import Joined

# Written into the folder of a saved context.
FILE, FORMAT, REMEDY = "conversation.json", 1, "talk about the files again"
# Tokens of a question whose programs are compiled ahead.
QUESTION = 30
ANSWERS = {each.name: each for each in dataclasses.fields(options.AnswerChoice)}
ANSWERS["max_tokens"] = option("Longest answer in tokens.", default=512)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inputs:
    """What is talked about."""

    PANEL = "Context"

    files: list[str] | None = argument(
        "Texts, documents or folders to talk about.", metavar="FILE", show_default=False
    )
    load: Path | None = option(
        "Go on with a conversation that /save wrote, or talk about a context of [bold]ask "
        "--save-context[/bold]; give no FILE.",
        metavar="DIR",
        exists=True,
        file_okay=False,
    )
    chat: bool | None = options.chat_template()

    def __post_init__(self) -> None:
        if bool(self.files) == (self.load is not None):
            wrong = "FILE and --load exclude each other" if self.files else "no FILE given"
            raise InputError(f"{wrong}; give texts to talk about, or a saved one with --load DIR")
        if "-" in (self.files or ()):
            raise InputError("questions come from stdin; write the text to a file first")


@options.command
def chat(
    inputs: Inputs,
    model: options.ModelChoice,
    method: options.MethodChoice,
    answers: options.AnswerChoice = options.marked(**ANSWERS),
) -> None:
    """Talk about texts: each question follows on the answers before it.

    The texts are read once, and questions and answers stay in the cache. Ctrl-C stops an answer,
    /help lists the commands.

    [bold]Examples[/bold]

        jax-longctx chat book.txt notes/ -c llama3

        jax-longctx chat --load talk -c llama3

        printf 'Who tells it?\\nAnd why?\\n' | jax-longctx chat book.txt -c llama3
    """
    if process.number() is not None:
        raise InputError("chat is for one process; start a server for a job (jax-longctx serve)")
    terminal = Terminal()
    compiling = Compiling(terminal)
    talking = Talking(inputs, answers, terminal, compiling)
    begin: dict[str, Any] = {"check": talking.check, "sizes": talking.sizes}
    if inputs.load is None:
        begin["ahead"] = compiling.ahead(talking.compile)
    if method.method in (None, options.AUTO):
        begin["choose"] = talking.choose
    with compiling.watching(), terminal.warnings():
        talking.begin(model.open(terminal, method, **begin))
        at_terminal = sys.stdin is not None and sys.stdin.isatty()
        # From a pipe there is nobody to go on after Ctrl-C.
        with process.catching() if at_terminal else nullcontext(process.Caught()) as talking.caught:
            talking.run(at_terminal)


class Stopped(Exception):
    """Ctrl-C while texts were read anew."""


class Talking:
    """A conversation at the terminal; its methods `do_NAME` are the commands.

    Attributes:
      talk: the conversation.
      caught: Ctrl-C.
      documents: of the files; None where a saved context replaces them.
      text: their token ids in the layout, once they are known.
    """

    talk: "Conversation"
    caught = process.Caught()
    text: list[int] | None = None
    files: list[str]
    documents: "Joined | None" = None

    def __init__(
        self,
        inputs: Inputs,
        answers: options.AnswerChoice,
        terminal: Terminal,
        compiling: Compiling,
    ):
        self.inputs, self.answers, self.terminal = inputs, answers, terminal
        self.compiling, self.seconds = compiling, {"reading": 0.0, "answering": 0.0}
        if inputs.files:
            self.documents = read_documents(inputs.files, terminal)
            self.files = list(dict.fromkeys(name for _, name, _ in self.documents.places))

    def check(self, model: "LongContext") -> None:
        """Raises an error where method, checkpoint and context do not fit; needs no weights."""
        self.chat = chosen_chat(model, self.inputs.load, self.inputs.chat)
        _check_method(model.engine.method)
        if self.inputs.load is not None:
            from jax_longctx.engine.context_io import check_fits

            check_fits(model.engine, self.inputs.load)

    def _encoded(self, model: "LongContext") -> list[int]:
        if self.text is None:
            assert self.documents is not None
            layout = model.layout(chosen_chat(model, None, self.inputs.chat))
            self.text = model.tokenizer.encode(layout.context(self.documents.text), bos=True)
        return self.text

    def sizes(self, model: "LongContext") -> dict[str, Any]:
        """What a mesh is chosen for."""
        from jax_longctx.conversation import ROOM
        from jax_longctx.engine.context_io import sizes_of

        if self.inputs.load is not None:
            return sizes_of(self.inputs.load, model.config.vocab_size)
        return {"reserve": ROOM, "context": len(self._encoded(model))}

    def choose(self, model: "LongContext") -> Any:
        """The method for the texts, or the saved context's."""
        from jax_longctx.conversation import ROOM
        from jax_longctx.engine.context_io import method_of

        if self.inputs.load is not None:
            return method_of(self.inputs.load)
        # One that is saved reads no text for each question.
        how: dict[str, Any] = {"reserve": ROOM, "saving": True}
        return choose_method(self.terminal, model, len(self._encoded(model)) + ROOM, **how)

    def compile(self, model: "LongContext") -> Any:
        """Begins to compile the programs for the texts and a short question."""
        from jax_longctx.conversation import ROOM

        how = {**self.answers.arguments(), "reserve": ROOM}
        return model.compile_all(len(self._encoded(model)), [QUESTION], **how)

    def begin(self, model: "LongContext") -> None:
        """Reads the texts, or loads what was saved."""
        from jax_longctx.conversation import Conversation

        if self.inputs.load is not None:
            return self._load(model, self.inputs.load)
        self.compiling.wait(prefill=True)
        context = self._read(model, self._encoded(model))
        self.talk = Conversation(model, context, chat=self.chat)
        self.compiling.wait()

    def _read(self, model: "LongContext", text: list[int]) -> Any:
        """The context of the texts."""
        from jax_longctx.conversation import ROOM

        def tick() -> None:
            if self.caught.pressed is not None:
                raise Stopped

        how = {"reserve": ROOM, "tick": tick}
        context, seconds = prefilled(self.terminal, self.compiling, model, text, **how)
        self.seconds["reading"] += seconds
        self.terminal.note(f"{len(text):,} tokens read in {seconds:.1f} s")
        return context

    def _load(self, model: "LongContext", folder: Path) -> None:
        """Goes on with a saved conversation, under the method of its context."""
        from jax_longctx.conversation import Conversation
        from jax_longctx.engine.context_io import method_of

        made, said = method_of(folder), _read_saved(folder)
        if made != model.engine.method:
            model = model.with_method(made)
        chat = chosen_chat(model, folder, self.inputs.chat)
        with self.terminal.waiting("loading the context"):
            context = model.load_context(folder)
        known, ours = {"text": said.pop("text")}, {"text": digest_of(context.rows[0])}
        if known["text"] is not None:
            check_same(whole_path(folder) / FILE, known, ours, REMEDY, kind=CheckpointError)
        files = said.pop("files")
        self.talk = Conversation(model, context, chat=chat, **said)
        self.files, self.documents = files, None
        questions = len(self.talk.turns)
        self.terminal.note(f"{len(context.rows[0]):,} tokens and {questions} questions loaded")

    def run(self, at_terminal: bool) -> None:
        """Answers lines until they end, or /quit."""
        if at_terminal:
            self.terminal.note("/help lists the commands, Ctrl-C stops an answer, Ctrl-D ends")
        for line in _typed(self.caught) if at_terminal else _piped():
            self.caught.begin()
            name, _, rest = line[1:].partition(" ")
            try:
                if line.rstrip() == "/quit":
                    return
                if not line.startswith("/"):
                    self.answer(line)
                elif (command := COMMANDS.get(name)) is not None:
                    command(self, rest.strip())
                else:
                    asks = "a space before it asks it instead"
                    raise InputError(f"/{name} is no command; /help lists them, {asks}")
            except Stopped:
                self.terminal.note("stopped; nothing has changed")
            except LongctxError as error:
                if not at_terminal:
                    raise
                self.terminal.note(f"error: {error}")

    def answer(self, question: str) -> None:
        """Streams the answer."""
        check_argument("a question", question)
        talk, how, note = self.talk, self.answers.arguments(), self.terminal.note
        how["sampling"] = self.answers.sampling.at([(0, len(talk.turns))])
        how["until"] = lambda: self.caught.pressed is not None
        began = time.perf_counter()
        answer = self.terminal.stream(lambda told: [talk.ask(question, on_text=told, **how)])
        answer = self.compiling.apart(answer, began)
        self.seconds["answering"] += answer.first_token_seconds + answer.decode_seconds
        if answer.finish == "interrupted":
            note("stopped; what is shown stays in the conversation")
        elif answer.finish == "length":
            note(f"the answer was cut at {how['max_tokens']:,} tokens (--max-tokens)")
        if answer.warning:
            note(f"warning: {answer.warning}")

    # The commands; their docstrings are the help.

    def do_help(self, rest: str) -> None:
        """list the commands"""
        rows = {f"/{name}": each.__doc__ for name, each in COMMANDS.items()}
        rows["/quit"] = "end, as Ctrl-D does"
        self.terminal.note("\n".join(f"{name:9}{about}" for name, about in rows.items()))

    def do_method(self, rest: str) -> None:
        """[NAME:KEY=VALUE,...]  read the texts anew under another method"""
        model, row = self.talk.model, self.talk.context.rows[0]
        if rest:
            made = make_method(rest)
            _check_method(made)
            model = model.with_method(made)
            self.talk = self.talk.over(model, self._read(model, row))
        chosen = settings_of(model.engine.method)
        self.terminal.note(f"method {named_text(chosen['name'], chosen['settings'])}")

    def do_files(self, rest: str) -> None:
        """what is talked about"""
        self.terminal.note("\n".join(self.files) or "a context whose files are not known")

    def do_where(self, rest: str) -> None:
        """the passages that the last answer was found in"""
        from jax_longctx.cli.where import passages
        from jax_longctx.sources import find_sources

        talk = self.talk
        if talk.newest is None:
            raise InputError("/where is about an answer that was given here; ask something first")
        if self.documents is None:
            raise InputError("/where needs the files")
        prompt = talk.model.layout(talk.chat).context(self.documents.text)
        with self.terminal.waiting("looking where it was found"):
            (asked, answer), place = talk.newest, self.documents.place
            given = [asked], [answer], [prompt]
            (found,) = find_sources(talk.model, talk.context, *given, place)
        for line in passages(found):
            self.terminal.note(line)

    def do_save(self, rest: str) -> None:
        """DIR  save the texts as they were read, and the conversation"""
        if not rest:
            raise InputError("/save takes the name of a new folder")
        folder, talk = expanded(rest), self.talk
        row, saved = talk.context.rows[0], (self.terminal, talk.model, talk.context, folder)
        check_space(talk.model, folder, len(row), talk.context.reserve, "/save")
        save_read(*saved, chat=talk.chat)
        said = {"text": digest_of(row), "files": self.files}
        sealed = seal(FORMAT, {**said, "turns": talk.turns, "tokens": talk.tokens})
        write_whole(json.dumps(sealed).encode(), whole_path(folder) / FILE)
        self.terminal.note(f"saved; --load {folder} goes on with it")

    def do_load(self, rest: str) -> None:
        """DIR  go on with what was saved"""
        if not rest:
            raise InputError("/load takes the folder of a saved conversation")
        self._load(self.talk.model, expanded(rest))

    def do_clear(self, rest: str) -> None:
        """forget questions and answers; the texts stay read"""
        self.talk.clear()
        self.terminal.note("forgotten; the texts stay read")

    def do_cost(self, rest: str) -> None:
        """tokens, memory and seconds"""
        context, said = self.talk.context, len(self.talk.tokens)
        cache = context.answering_bytes or context.resident_bytes
        spent = ", ".join(f"{what} {seconds:.1f} s" for what, seconds in self.seconds.items())
        self.terminal.note(
            f"{len(context.rows[0]):,} tokens of texts, {said:,} of {len(self.talk.turns)} "
            f"questions and answers, room for {max(context.reserve - said, 0):,} more before the "
            f"cache grows; cache {shown_bytes(cache)}; peak memory {shown_bytes(peak_memory())}; "
            f"{spent}"
        )


COMMANDS: dict[str, Callable[[Talking, str], None]] = {
    name.removeprefix("do_"): each for name, each in vars(Talking).items() if name[:3] == "do_"
}


def _check_method(method: Any) -> None:
    if method.info.needs_question:
        raise InputError(
            f"{settings_of(method)['name']} reads the text for each question, so that no "
            f"conversation follows on it; take another method"
        )


def _read_saved(folder: Path) -> dict[str, Any]:
    """What /save wrote of a conversation; an empty one beside a context that `ask` saved."""
    path = whole_path(folder) / FILE
    try:
        said = read_sealed(path, FORMAT, REMEDY)
    except FileNotFoundError:
        return {"text": None, "files": [], "turns": [], "tokens": []}
    if sorted(said) != ["files", "text", "tokens", "turns"]:
        raise DamagedError(f"{path} is damaged: it holds {', '.join(sorted(said))}; {REMEDY}")
    return said | {"turns": [(question, answer) for question, answer in said["turns"]]}


def _piped() -> Iterator[str]:
    """The lines of stdin, but empty ones."""
    if sys.stdin is None:
        raise InputError("stdin is closed; type questions, or pipe them in")
    for raw in sys.stdin.buffer:
        if (line := decoded(raw, "stdin").rstrip("\r\n")).strip():
            yield line


def _typed(caught: process.Caught) -> Iterator[str]:
    """The lines that the user types, but empty ones."""
    prompt = _prompt()
    while True:
        try:
            caught.prompting = True
            line = prompt()
        except KeyboardInterrupt:
            print("(/quit or Ctrl-D ends)", file=sys.stderr, flush=True)
            continue
        except EOFError:
            return print(file=sys.stderr)
        finally:
            caught.prompting = False
        if line.strip():
            yield line


def _prompt() -> Callable[[], str]:
    """Asks for a line: with prompt_toolkit where it is installed, else as Python does."""
    out = sys.stdout if sys.stdout.isatty() else sys.stderr
    if importlib.util.find_spec("prompt_toolkit") is None:
        with suppress(ImportError):
            # Editing and history of `input`.
            importlib.import_module("readline")
        return lambda: input("> ")
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import WordCompleter
    from prompt_toolkit.output import create_output

    words = WordCompleter([f"/{name}" for name in (*COMMANDS, "quit")], sentence=True)
    how: dict[str, Any] = {"completer": words, "complete_while_typing": False}
    session = PromptSession(output=create_output(out), **how)
    # Its own handler would take the pipe of ours.
    return lambda: session.prompt("> ", handle_sigint=False)
