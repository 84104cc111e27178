"""Prompts: texts that a template wrote in part, and layouts around a document and a question.

A prompt is split in two (`PromptLayout`). The context is everything up to and including the
document, and prefilled once. The question is the rest: in a chat, the question and the tokens that
open the answer. The two are tokenised separately, so every method gets the same ids.
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jax_longctx.errors import ConfigError, InputError

if TYPE_CHECKING:
    from jax_longctx.text.tokenizer import Tokenizer

# Placeholders for document and question in the template, so that jinja never renders a document.
# No template contains or strips these private-use characters.
_DOCUMENT = "\ue000document\ue000"
_QUESTION = "\ue000question\ue000"

# Parts of a text: the first character of each, and the one behind it.
Spans = Sequence[tuple[int, int]]


@dataclasses.dataclass(frozen=True)
class PromptText:
    """A text that a template wrote in part.

    Attributes:
      plain: the user's parts. There special tokens are plain text.
      templated: a chat template wrote the beginning, with a beginning-of-text token or without.
    """

    text: str
    plain: Spans = ()
    templated: bool = False

    @classmethod
    def of(cls, *parts: str, templated: bool = False) -> "PromptText":
        """Parts of the template and of the user in turn."""
        ends = list(itertools.accumulate(map(len, parts)))
        spans = zip(ends[::2], ends[1::2], strict=False)
        return cls("".join(parts), tuple(spans), templated)

    def __str__(self) -> str:
        return self.text

    def after(self, mark: str) -> tuple[str, "PromptText"] | None:
        """The text before the first `mark`, and what follows it; None where there is none."""
        before, found, after = self.text.partition(mark)
        cut = len(self.text) - len(after)
        plain = tuple((max(a - cut, 0), b - cut) for a, b in self.plain if b > cut)
        return (before, PromptText(after, plain)) if found else None

    def until(self, mark: str) -> "PromptText | None":
        """The text before the last `mark`; None where there is none."""
        end = self.text.rfind(mark)
        if end < 0:
            return None
        plain = tuple((a, min(b, end)) for a, b in self.plain if a < end)
        return PromptText(self.text[:end], plain, self.templated)


@dataclasses.dataclass(frozen=True)
class PromptLayout:
    """Texts before the document, between document and question, and after the question.

    `templated`: they come from a chat template.
    """

    before: str
    between: str
    after: str
    templated: bool = False

    def context(self, document: str) -> PromptText:
        """The context's text. Raises InputError when the document is empty."""
        if not document.strip():
            raise InputError("the document is empty; give a text to ask about")
        return PromptText.of(self.before, document, templated=self.templated)

    def question(self, question: str) -> PromptText:
        """The text between the context and the answer. Raises InputError when it is empty."""
        if not question.strip():
            raise InputError("a question is empty; write what to ask of the document")
        return PromptText.of(self.between, question, self.after)


def plain_layout(stem: bool = False) -> PromptLayout:
    """Completion without a chat template: a question and "Answer:", or the answer's own `stem`."""
    if stem:
        return PromptLayout("", "\n\n", "")
    return PromptLayout("", "\n\nQuestion: ", "\nAnswer:")


def chat_layout(tokenizer: "Tokenizer", variables: Mapping[str, Any] | None = None) -> PromptLayout:
    """The checkpoint's chat template around document and question, in one user message.

    Args:
      variables: as for `Tokenizer.chat`.

    Raises:
      ConfigError: there is no template, or it does not contain the message exactly once.
    """
    content = f"{_DOCUMENT}\n\n{_QUESTION}"
    asked = [{"role": "user", "content": content}]
    text = tokenizer.chat(asked, variables=variables).text
    before, found_document, rest = text.partition(_DOCUMENT)
    between, found_question, after = rest.partition(_QUESTION)
    if not (found_document and found_question) or "\ue000" in before + between + after:
        raise ConfigError(
            "the chat template does not show a user's message exactly once; use --no-chat"
        )
    return PromptLayout(before, between, after, templated=True)
