"""What is asked of what: the words and options of `jax-longctx ask`, checked before any work."""

import dataclasses
import os
from pathlib import Path

from jax_longctx.cli.inputs import check_argument
from jax_longctx.errors import InputError

__all__ = ["Request"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """What is asked of what.

    Attributes:
      file: the document; None where a saved context stands for it.
      questions: questions, or stems to be continued.
      stems: which of the two they are.
      chat: the chat template, a plain layout, or None for whichever there is.
    """

    file: str | None
    questions: list[str]
    stems: bool
    chat: bool | None
    save: Path | None
    load: Path | None

    @classmethod
    def parse(
        cls,
        words: list[str],
        stems: list[str],
        chat: bool | None,
        save: Path | None,
        load: Path | None,
    ) -> "Request":
        """Raises InputError where the words and options do not go together."""
        if load is not None and save is not None:
            raise InputError("--save-context and --load-context exclude each other; give one")
        if load is not None and words and os.path.isfile(words[0]):
            raise InputError(
                f"{words[0]} is a file, but --load-context stands for the text; give questions only"
            )
        if load is None and not words:
            raise InputError("no FILE given; expected FILE QUESTION... (- reads stdin)")
        if save is not None and save.exists():
            raise InputError(f"{save} exists; choose another name for --save-context")
        file, questions = (None, words) if load is not None else (words[0], words[1:])
        if stems and questions:
            raise InputError(
                f"question {questions[0]!r} and --completion exclude each other; give one of them"
            )
        if stems and chat:
            raise InputError("--completion is without chat template; leave out --chat")
        questions = stems or questions
        if not questions:
            raise InputError("no question given; add QUESTION, or --completion STEM")
        if not all(question.strip() for question in questions):
            raise InputError("a question is empty; write what to ask of the text")
        for question in questions:
            check_argument("a question", question)
        return cls(
            file=file,
            questions=questions,
            stems=bool(stems),
            chat=False if stems else chat,
            save=save,
            load=load,
        )
