"""Answers in a form: JSON that is valid for a schema, or the text of any other grammar.

    sampling = Sampling(form=json_form({"type": "object", "properties": {"year": ...}}))
    model.ask(context, layout.question("When? Answer in JSON."), sampling=sampling)

llguidance (github.com/guidance-ai/llguidance) reads a form as a grammar over bytes. At each step it
walks the tree of the vocabulary's tokens and marks those that the grammar allows next. A token that
is part of a character is allowed where its bytes are. The answer ends where the form does: then
the tokens that end an answer are the only ones allowed.

To walk the tree takes about 0.1 ms a token for 50,000 tokens. Needs the extra `forms`.
"""

import dataclasses
import functools
import importlib.util
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import UInt32

from jax_longctx.errors import CheckpointError, InputError
from jax_longctx.files import file_errors, parse_json, read_bytes
from jax_longctx.text import Tokenizer
from jax_longctx.text.tokens import TokenNames

# Characters of a form, and states that one row's may take: a state is some kilobytes.
MOST_CHARACTERS, MOST_STATES = 1 << 16, 50_000
# White space between the parts of a JSON text: models go on with it for ever where they may.
WHITESPACE = r" |\n {0,40}"
# Forms that are kept for the next rows that have them.
MOST_KEPT = 64
# Longest part of the library's reason that an error shows.
SHOWN = 200
MISSING = "forms of answers need the package llguidance; pip install 'jax-longctx[forms]'"


def json_form(schema: Mapping[str, Any]) -> str:
    """The form of JSON texts that are valid for a JSON schema, for `Sampling.form`.

    Keys stand in the schema's order. `{"type": "object"}` is any object.
    """
    return json.dumps({"grammars": [{"json_schema": bounded_schema(schema)}]}, ensure_ascii=False)


def form_of_file(path: Path) -> str:
    """The form of the JSON schema in a file. InputError where it holds none."""
    if importlib.util.find_spec("llguidance") is None:
        raise InputError(MISSING)
    with file_errors(f"the schema {path} cannot be read"):
        raw = read_bytes(path)
    try:
        return json_form(parse_json(raw, f"{path} is no JSON schema"))
    except CheckpointError as error:
        raise InputError(str(error)) from error


def bounded_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema with the white space that forms allow, as llguidance takes it."""
    return {**schema, "x-guidance": {"whitespace_pattern": WHITESPACE}}


@dataclasses.dataclass(frozen=True, eq=False)
class Forms:
    """Makes forms over one tokenizer; any thread may call it.

    Attributes:
      vocabulary: tokens of the model; those beyond the tokenizer's are never allowed.
    """

    tokenizer: Tokenizer
    vocabulary: int

    def __call__(self, form: str) -> "TokenForm":
        """The form at its beginning.

        Raises:
          InputError: the library refuses it, it is too long, or the extra is missing.
        """
        return TokenForm(self._begun(form).deep_copy(), self.tokenizer.eos_ids)

    @functools.cached_property
    def _begun(self) -> Callable[[str], Any]:
        return functools.lru_cache(MOST_KEPT)(self._begin)

    @functools.cached_property
    def _table(self) -> Any:
        """The vocabulary as llguidance has it."""
        try:
            import llguidance
        except ModuleNotFoundError as error:
            raise InputError(MISSING) from error
        if not self.tokenizer.eos_ids:
            raise InputError("this tokenizer has no token that ends an answer, which a form needs")
        given = llguidance.TokenizerWrapper(_Vocabulary(self.tokenizer, self.vocabulary))
        return llguidance.LLTokenizer(given, eos_token=list(self.tokenizer.eos_ids))

    def _begin(self, form: str) -> Any:
        if len(form) > MOST_CHARACTERS:
            raise InputError(
                f"the form, or its JSON schema, has {len(form):,} characters; at most "
                f"{MOST_CHARACTERS:,} are taken"
            )
        table = self._table
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(max_lexer_states=MOST_STATES, verbose_errors=False)
        matcher = LLMatcher(table, form, limits=limits, log_level=0)
        # A form that is too complex may fail at its first tokens.
        TokenForm(matcher.deep_copy(), ()).allowed()
        return matcher


class TokenForm:
    """One row's form, as `engine.sampling.Form`."""

    def __init__(self, matcher: Any, ends: Sequence[int]):
        self._matcher, self._ends, self._ended = matcher, frozenset(ends), False

    def allowed(self) -> UInt32[np.ndarray, " U"]:
        """The tokens that may come next. InputError where the library gives up."""
        mask = np.frombuffer(self._matcher.compute_bitmask(), "<u4")
        if self._matcher.is_error():
            why = " ".join(self._matcher.get_error().split())
            raise InputError(f"the form, or its JSON schema, is refused: {why[:SHOWN]}")
        return mask

    def take(self, tokens: Sequence[int]) -> None:
        """Takes the row's next tokens, up to the one that ends the answer."""
        for token in tokens:
            if not self._ended:
                self._ended = token in self._ends
                self._matcher.consume_token(token)


class _Vocabulary:
    """What llguidance asks of a tokenizer: the bytes of each token, and which have none."""

    def __init__(self, tokenizer: Tokenizer, vocabulary: int):
        self._encode, names = tokenizer.encode, TokenNames(tokenizer)
        texts = [names.raw(token) for token in range(vocabulary)]
        hidden = tokenizer.special_ids | {*tokenizer.eos_ids}
        self.special_token_ids = [
            token for token, raw in enumerate(texts) if raw is None or token in hidden
        ]
        for token in self.special_token_ids:
            texts[token] = names.entry(token).encode()
        self.tokens, self.bos_token_id = texts, tokenizer.bos_id
        self.eos_token_id = tokenizer.eos_ids[0]

    def __call__(self, text: str) -> list[int]:
        return self._encode(text)
