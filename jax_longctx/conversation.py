"""A conversation over one text: each question follows on the answers before it.

    talk = jax_longctx.Conversation(model, model.prefill(model.layout().context(text)))
    print(talk.ask("Who is the narrator?").text)
    print(talk.ask("And where does he live?").text)

Questions and answers stay in the KV cache behind the text (`Context.history`). So a question costs
the prefill of its own tokens, and of those that the cache does not hold yet: the answer's last one,
or the answer of a method whose answers have a cache of their own. The history is as the model read
and wrote it, also where the template would leave out parts of earlier answers (their thoughts).
"""

from collections.abc import Callable, Iterable
from typing import Unpack

from jax_longctx.answers import Answer, AnswerOptions, Asked
from jax_longctx.api import LongContext
from jax_longctx.engine import Context
from jax_longctx.errors import CapacityError
from jax_longctx.text import chat_layout, plain_layout, turn_layout

# Tokens of questions and answers that a cache gets room for at a time: a cache of another size has
# programs of its own, which take seconds to compile.
ROOM = 2048


class Conversation:
    """Questions and answers over a context of one text, which `context` was prefilled for.

    Args:
      chat: whether the text was laid out in the chat template; by default where there is one.
      turns, tokens: of an earlier conversation over the same text; its tokens are read with the
        next question.

    Attributes:
      turns: each question and its answer.
      tokens: ids of all that follows on the text, with what the layout puts around it.
      newest: those before the newest answer, and that; None where none was given here.

    Raises:
      ConfigError: there is no chat template, or it has no place for an earlier answer.
    """

    def __init__(
        self,
        model: LongContext,
        context: Context,
        *,
        chat: bool | None = None,
        turns: Iterable[tuple[str, str]] = (),
        tokens: Iterable[int] = (),
    ):
        tokenizer = model.tokenizer
        self.model, self.context = model, context
        self.chat = tokenizer.has_chat if chat is None else chat
        self._first = chat_layout(tokenizer) if self.chat else plain_layout()
        self._next = turn_layout(tokenizer) if self.chat else self._first
        self.turns, self.tokens = list(turns), list(tokens)
        self.newest: tuple[list[int], Answer] | None = None

    @property
    def held(self) -> int:
        """How many of the tokens the cache holds."""
        return len(self.context.joined[0]) if self.context.joined else 0

    def ask(
        self,
        question: str,
        *,
        until: Callable[[], bool] | None = None,
        **options: Unpack[AnswerOptions],
    ) -> Answer:
        """Answers a question about the text and all that was said; both join the conversation.

        An answer that `until` ends stays as far as it came. Where an error ends it, the
        conversation is as before, and its tokens are read again with the next question.

        Raises:
          InputError: the question is empty.
          CapacityError: there is no memory for more; `clear` makes room.
        """
        how, context = Asked.of(options), self.context
        layout = self._next if self.turns else self._first
        new = self.model.tokenizer.encode(layout.question(question))
        needed = len(self.tokens) + len(new) + how.max_tokens
        try:
            if needed > context.reserve:
                self.model.engine.ensure_reserve(context, max(needed, context.reserve + ROOM))
            asked = [*self.tokens[self.held :], *new]
            (answer,) = self.model.ask(context, [asked], keep="history", until=until, **options)
        except CapacityError as error:
            raise CapacityError(
                f"the conversation of {len(self.tokens):,} tokens cannot go on: {error}; or clear "
                f"the conversation (/clear)"
            ) from error
        except BaseException:
            context.forget()
            raise
        ends = self.model.end_ids(how.stop, how.stop_at_eos)
        ended = answer.finish == "stop" and answer.tokens[-1] in ends
        self.newest = [*self.tokens, *new], answer
        self.tokens += [*new, *answer.tokens[: -1 if ended else None]]
        self.turns.append((question, answer.text))
        if self.held > len(self.tokens):
            # What follows on a stop string was read too, and is no part of the answer.
            context.forget()
        return answer

    def clear(self) -> None:
        """Forgets all questions and answers; the text stays read."""
        self.turns, self.tokens, self.newest = [], [], None
        self.context.forget()

    def over(self, model: LongContext, context: Context) -> "Conversation":
        """This conversation over the same text as another method has read it."""
        how = {"chat": self.chat, "turns": self.turns, "tokens": self.tokens}
        made = Conversation(model, context, **how)
        made.newest = self.newest
        return made
