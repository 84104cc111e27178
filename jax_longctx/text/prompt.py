"""Where a prompt is cut in two: the context, read once, and the questions asked of it.

Everything up to and including the document is context, the rest is question: in a chat, the
question and the words that open the answer. The two are tokenised separately, so that every method
sees the same ids whether it reads the context once, in pieces, or again for each question.
"""

import dataclasses

from jax_longctx.errors import ConfigError, InputError
from jax_longctx.text.tokenizer import Tokenizer

__all__ = ["PromptLayout", "chat_layout", "plain_layout"]

# Stand in for document and question while the template renders. Private-use characters: no template
# contains or strips them, and a document of any size is not pushed through jinja.
_DOCUMENT = "\ue000document\ue000"
_QUESTION = "\ue000question\ue000"


@dataclasses.dataclass(frozen=True)
class PromptLayout:
    """What stands before the document, between document and question, and after the question."""

    before: str
    between: str
    after: str

    def context(self, document: str) -> str:
        """The context's text. Raises InputError when the document is empty."""
        if not document.strip():
            raise InputError("the document is empty; give a text to ask about")
        return self.before + document

    def question(self, question: str) -> str:
        """The text after the context, up to where the answer starts."""
        if not question.strip():
            raise InputError("a question is empty; write what to ask of the document")
        return self.between + question + self.after


def plain_layout(stem: bool = False) -> PromptLayout:
    """Completion without a chat template: a question and "Answer:", or the answer's own `stem`."""
    if stem:
        return PromptLayout("", "\n\n", "")
    return PromptLayout("", "\n\nQuestion: ", "\nAnswer:")


def chat_layout(tokenizer: Tokenizer) -> PromptLayout:
    """The checkpoint's chat template around document and question, in one user message.

    Raises:
      ConfigError: there is no template, or it does not show the message once and whole.
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
