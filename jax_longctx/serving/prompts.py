"""Requests as token ids: a text that may be known already, and a question about it.

A completion's prompt is split as `generate` splits it: its last token is the question, the tokens
before are the text. With a context the prompt follows directly on its text, as in
`LongContext.ask`. A chat is rendered by the checkpoint's template and split in the same way; with a
context it is laid out as by the command `ask`: the text stands at the start of the first message.

Where the method reads the tokens of text and question alike (full attention, and methods that
select in decode), a prompt that begins with a known text is split there, and a prompt that shares
its beginning with an earlier one is split where they part. The answer is the same. Other methods
use a text again only for the same text.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jax_longctx.api import LongContext
from jax_longctx.errors import InputError
from jax_longctx.serving.contexts import Contexts
from jax_longctx.serving.schema import ChatRequest, CompletionRequest, Message, RequestError
from jax_longctx.serving.texts import Entry, Text
from jax_longctx.serving.tools import ToolForm, tool_form
from jax_longctx.settings import at_least
from jax_longctx.sources import Placed
from jax_longctx.text import PromptText, chat_layout, plain_layout

# Stands for the text in the template; no text contains it.
_DOCUMENT = "\ue000document\ue000"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lengths:
    """Limits in tokens.

    Attributes:
      whole: of text, question and answer together.
      question: of a question about a context.
      answer: of an answer; a chat request that names no number gets this.
      keep_from: of a prompt's text that is kept for later prompts.
      share_from: of a text whose rows share its keys and values, if the method can.
    """

    whole: int
    question: int = 1024
    answer: int = 1024
    keep_from: int = 256
    share_from: int = 8192

    def __post_init__(self) -> None:
        at_least(1, self, "question", "answer", "keep_from", "share_from", error=InputError)
        if self.whole <= self.answer:
            raise InputError(
                f"text, question and answer together may have {self.whole:,} tokens, the answer "
                f"alone {self.answer:,}; allow longer texts (--length) or shorter answers "
                f"(--max-tokens)"
            )


@dataclasses.dataclass(frozen=True)
class Echo:
    """A prompt as the answer's text begins with it.

    Attributes:
      first: the prompt's first token.
      hidden: tokens before the text, which the server put there.
    """

    text: str
    first: int
    hidden: int


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A prompt, split into a text and a question; the text counts a ticket for it.

    Attributes:
      after: the tokens that the answer's text follows on, as in `generate` and `ask`.
      cached: tokens of the text that are prefilled, or will be for another request.
      max_tokens: most tokens of the answer; 0: prefill alone, and no answer.
      echo: what the answer's text begins with.
    """

    text: Text
    question: list[int]
    after: list[int]
    cached: int
    max_tokens: int
    echo: Echo | None = None


def prefills_alike(model: LongContext) -> bool:
    """Whether the answer is the same wherever a prompt is split into text and question."""
    info = model.engine.method.info
    # Where tokens leave at the end of the text, the question must not have been among them.
    leaves = not (info.keeps_all or info.answers_apart)
    alike = info.append_only and not (info.looks_ahead or leaves)
    alike = alike and info.phase in ("none", "decode")
    # The text's keys may depend on the whole prompt's length.
    return alike and not model.config.rope.by_length


class Prompts:
    """Splits prompts; any thread may call it.

    Args:
      reserve: tokens of question and answer that a context keeps room for.
      most: prompts of one request.
    """

    def __init__(
        self, model: LongContext, contexts: Contexts, lengths: Lengths, reserve: int, most: int
    ):
        self.model, self.contexts, self.lengths = model, contexts, lengths
        self.reserve, self.most = reserve, most
        self.alike = prefills_alike(model)
        self.tools = tool_form(model.tokenizer.chat_template)
        # Of contexts with and without the chat template.
        self._layouts = {False: plain_layout()}
        if model.tokenizer.has_chat:
            self._layouts[True] = chat_layout(model.tokenizer)

    def completion(self, asked: CompletionRequest, entry: Entry | None) -> list[Prompt]:
        """Each prompt, once for each of its answers.

        Raises:
          RequestError or LongctxError: one cannot be answered.
        """
        self._check_answers(asked, len(asked.prompts))
        scored, info = asked.scored, self.model.engine.method.info
        if scored is not None and (info.needs_question or info.looks_ahead):
            raise RequestError(
                "this server's method reads tokens of a text for later ones, so that a prompt's "
                "tokens have no log-probabilities; leave out echo or logprobs",
                param="echo",
            )
        if scored is not None and entry is not None:
            raise RequestError(
                "echo with logprobs is for whole prompts; leave out context", param="echo"
            )
        rows, most = list[list[int]](), list[int]()
        # All are checked before one counts as a ticket of its text.
        for number, each in enumerate(asked.prompts):
            param = f"prompt.{number}" if len(asked.prompts) > 1 else "prompt"
            rows.append(self._row(each, entry, param))
            most.append(self._check(rows[-1], entry, asked.wanted_tokens, param))
        echoes = map(self._echo, asked.prompts, rows) if asked.echo else [None] * len(rows)
        return [
            dataclasses.replace(self._prompt(row, entry, tokens, scored), echo=echo)
            for row, tokens, echo in zip(rows, most, echoes, strict=True)
            for _ in range(asked.n)
        ]

    def form(self, asked: ChatRequest | CompletionRequest) -> str | None:
        """What the answers follow, as `Sampling.form`."""
        if not (self.tools and isinstance(asked, ChatRequest) and asked.called):
            return asked.form
        return self.tools.grammar(asked.called, self.model.tokenizer)

    def calling(self, asked: ChatRequest | CompletionRequest) -> ToolForm | None:
        """How calls are written in the answers; None where they make none."""
        return self.tools if isinstance(asked, ChatRequest) and asked.offered else None

    def _check_answers(self, asked: ChatRequest | CompletionRequest, prompts: int) -> None:
        """Refuses more answers than are given at a time, and a form that cannot be followed."""
        form = self.form(asked)
        if form is not None:
            try:
                self.model.forms(form)
            except InputError as error:
                param = "tools" if asked.form is None else "response_format"
                raise RequestError(str(error), param=param) from None
        n = asked.n
        if prompts * n > self.most:
            answers = f" with {n} answers each" if n > 1 else ""
            raise RequestError(
                f"the request has {prompts:,} prompts{answers}, this server takes {self.most:,} at "
                f"a time; send fewer in one request",
                param="prompt" if prompts > self.most else "n",
            )

    def _row(self, given: str | list[int], entry: Entry | None, param: str) -> list[int]:
        """A completion's prompt as token ids."""
        if not isinstance(given, str):
            vocabulary = self.model.config.vocab_size
            if (largest := max(given)) >= vocabulary:
                raise RequestError(
                    f"{param} holds token id {largest}, the model's vocabulary is "
                    f"0..{vocabulary - 1}; take the checkpoint's tokenizer",
                    param=param,
                )
            return given
        self._check_characters(len(given), param)
        # Clients send rendered templates.
        row = self.model.tokenizer.encode(given, bos=entry is None, parse_special=True)
        if not row:
            raise RequestError("the prompt has no tokens", param=param)
        return row

    def _echo(self, given: str | list[int], row: list[int]) -> Echo:
        tokenizer = self.model.tokenizer
        if not isinstance(given, str):
            return Echo(tokenizer.decode(row, special=True), row[0], 0)
        begins = tokenizer.piece(row[0]) or ""
        added = row[0] == tokenizer.bos_id and not given.startswith(begins)
        return Echo(given, row[0], int(added))

    def chat(self, asked: ChatRequest, entry: Entry | None) -> list[Prompt]:
        """The prompt of a chat, once for each answer; raises as `completion`."""
        tokenizer = self.model.tokenizer
        tools, messages = asked.offered, [message.for_template() for message in asked.messages]
        if tools and (self.tools is None or entry is not None):
            raise RequestError(
                "the template defines no form of calls that this server reads, those of Qwen, "
                "Llama 3 and Mistral"
                if entry is None
                else "a context was read without tools; leave out tools, or context",
                param="tools",
                code="unsupported",
            )
        self._check_answers(asked, 1)
        written = sum(len(each["content"]) for each in messages) + len(json.dumps(tools))
        self._check_characters(written, "messages")
        if entry is None and not tokenizer.has_chat:
            raise RequestError(
                "this checkpoint has no chat template; send a prompt to /v1/completions",
                param="messages",
            )
        variables = asked.chat_template_kwargs
        if entry is None:
            opens = asked.add_generation_prompt and not asked.continue_final_message
            if asked.continue_final_message:
                messages[-1]["content"] = messages[-1]["content"].rstrip() + _DOCUMENT
            text = tokenizer.chat(messages, answer=opens, variables=variables, tools=tools)
            if asked.continue_final_message:
                text = text.until(_DOCUMENT)
            if text is None:
                raise RequestError(
                    "the chat template does not show the last message as it is, so that it cannot "
                    "be continued",
                    param="continue_final_message",
                )
            row = tokenizer.encode(text, bos=True)
        elif asked.continue_final_message or not asked.add_generation_prompt:
            raise RequestError(
                "an answer about a context is a new message; leave out continue_final_message and "
                "add_generation_prompt",
                param="context",
            )
        else:
            row = tokenizer.encode(self._question(entry, asked.messages, variables))
        most = self._check(row, entry, asked.wanted_tokens, "messages")
        return [self._prompt(row, entry, most) for _ in range(asked.n)]

    def placed(self, entry: Entry) -> Placed:
        """The context's text, and where its tokens stand in it."""
        return Placed.of(
            self.model.tokenizer, entry.text.tokens.tolist(), entry.prompt, entry.place
        )

    def context(self, text: str, chat: bool | None) -> tuple[Text, bool, PromptText]:
        """The text to read, whether it was laid out for the chat template, and its layout.

        Raises:
          RequestError, InputError, ConfigError: the text cannot be read, or not for itself.
        """
        if self.model.engine.method.info.needs_question:
            raise RequestError(
                "this server's method reads a text for each question, so that there are no "
                "contexts; send the text with the question"
            )
        chat = self.model.tokenizer.has_chat if chat is None else chat
        if chat not in self._layouts:
            raise RequestError("this checkpoint has no chat template", param="chat")
        self._check_characters(len(text), "text")
        prompt = self._layouts[chat].context(text)
        row = self.model.tokenizer.encode(prompt, bos=True)
        self._check_whole(len(row), 1, "text")
        return self.contexts.text(row, len(row)), chat, prompt

    def _question(
        self, entry: Entry, messages: Sequence[Message], variables: Mapping[str, Any]
    ) -> PromptText:
        """The text between the context's and the answer."""
        first, *more = messages
        content = first.for_template()["content"]
        roles = [message.role for message in messages]
        expected = ["user" if turn % 2 == 0 else "assistant" for turn in range(len(roles))]
        if roles != expected or len(roles) % 2 == 0:
            raise RequestError(
                f"the messages about a context begin and end with the user's and take turns with "
                f"the assistant's, got {', '.join(roles)}; the context was read without a system "
                f"message, so put what it says into the first question",
                param="messages",
            )
        layout = self._layouts[entry.chat]
        if variables and entry.chat:
            layout = chat_layout(self.model.tokenizer, variables)
            if layout.before != self._layouts[True].before:
                raise RequestError(
                    "with these variables the chat template puts something else before the text",
                    param="chat_template_kwargs",
                )
        if not more:
            return layout.question(content)
        if not entry.chat:
            raise RequestError(
                "this context was read without chat template, so that it takes one message",
                param="messages",
            )
        rest = [message.for_template() for message in more]
        if not content.strip():
            raise RequestError("the first message is empty", param="messages")
        opened = {"role": "user", "content": f"{_DOCUMENT}\n\n{content}"}
        tokenizer = self.model.tokenizer
        found = tokenizer.chat([opened, *rest], variables=variables).after(_DOCUMENT)
        if found is None or found[0] != self._layouts[True].before:
            raise RequestError(
                "the chat template puts something else before the text when there are several "
                "messages; ask one question a request",
                param="messages",
            )
        return found[1]

    def _check(self, row: list[int], entry: Entry | None, wanted: int | None, param: str) -> int:
        """Tokens of the answer to a prompt, or to a question about a context."""
        if entry is None:
            return self._check_whole(len(row), wanted, param)
        limit = self.lengths.question
        if len(row) > limit:
            raise RequestError(
                f"the question has {len(row):,} tokens, this server takes {limit:,} about a "
                f"context; shorten it, or put it into the context",
                code="context_length_exceeded",
            )
        return self._check_whole(len(entry.text.tokens) + len(row), wanted, param)

    def _prompt(
        self, row: list[int], entry: Entry | None, most: int, scored: int | None = None
    ) -> Prompt:
        """The prompt of these tokens, for an answer of `most` tokens.

        Args:
          entry: what names the context that they are about; None for a prompt of its own.
          scored: the best tokens at each token of the prompt that are wanted; None: no scores.
        """
        if entry is not None:
            self.contexts.touch(entry)
            return Prompt(self.contexts.use(entry.text), row, row, len(entry.text.tokens), most)
        last, asks = row[-1:], self.model.engine.method.info.needs_question
        if asks or scored is not None:
            how: Any = {"question": last if asks else None}
            how["scored"] = None if scored is None else (row[-1], scored)
            return Prompt(self.contexts.text(row[:-1], len(row), **how), last, last, 0, most)
        size, total = len(row) - 1, len(row)
        if self.alike:
            # Where prefill is alike the total changes nothing: prompts that begin alike share it.
            size = total = self._known(row, most) or size
        # As `generate` reads it.
        text = self.contexts.text(row[:size], total)
        text.keep = text.keep or size >= self.lengths.keep_from
        return Prompt(text, row[size:], last, size if text.begun else 0, most)

    def _known(self, row: list[int], most: int) -> int:
        """Tokens at the prompt's beginning that a text has too, if at least half of it."""
        question = min(self.lengths.question, self.reserve - most)
        shortest = max(self.lengths.keep_from, len(row) // 2, len(row) - question)
        return self.contexts.shared(np.asarray(row, np.int32), shortest)

    def _check_characters(self, given: int, param: str) -> None:
        """Refuses a text that cannot be short enough, before the time for its tokens is spent."""
        most = self.lengths.whole * self.model.tokenizer.longest_piece
        if given > most:
            raise RequestError(
                f"a text of {given:,} characters is longer than the {self.lengths.whole:,} tokens "
                f"that this server takes; shorten it",
                param=param,
                code="context_length_exceeded",
            )

    def _check_whole(self, given: int, wanted: int | None, param: str) -> int:
        """Tokens of the answer: as many as asked, or as there is room for."""
        whole, answer = self.lengths.whole, self.lengths.answer
        if wanted is not None and wanted > answer:
            raise RequestError(
                f"max_tokens is {wanted:,}, this server gives at most {answer:,}",
                param="max_tokens",
            )
        room, least = whole - given, 1 if wanted is None else wanted
        if room < least:
            raise RequestError(
                f"a prompt of {given:,} tokens and an answer of {least:,} are longer than "
                f"the {whole:,} tokens that this server takes; shorten the prompt or the answer",
                param=param,
                code="context_length_exceeded",
            )
        return min(answer, room) if wanted is None else wanted
