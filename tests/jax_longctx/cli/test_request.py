"""The words and options of `ask` that do not go together are refused before any work."""

import pytest

from jax_longctx.cli.ask import Request
from jax_longctx.errors import InputError


def parse(words=(), stems=(), chat=None, save=None, load=None):
    return Request(
        words=list(words), completion=list(stems), chat=chat, save_context=save, load_context=load
    )


def test_file_and_questions():
    request = parse(["book.txt", "Who?", "Why?"])
    assert (request.file, request.questions) == ("book.txt", ["Who?", "Why?"])
    assert request.chat is None


def test_stems_take_the_place_of_questions():
    request = parse(["book.txt"], ["The key is"])
    assert (request.file, request.questions) == ("book.txt", ["The key is"])


def test_saved_context_takes_the_place_of_the_file(tmp_path):
    request = parse(["Who?"], load=tmp_path)
    assert (request.file, request.questions) == (None, ["Who?"])


def test_refusals(tmp_path):
    book = tmp_path / "book.txt"
    book.write_text("text")
    cases = [
        (lambda: parse(), "no FILE given"),
        (lambda: parse(["book.txt"]), "no question given"),
        (lambda: parse(["book.txt", "Who?", " "]), "a question is empty"),
        (lambda: parse(["book.txt"], [""]), "a question is empty"),
        (lambda: parse(["book.txt", "Who?"], ["The key is"]), "exclude each other"),
        (lambda: parse(["book.txt"], ["The key is"], chat=True), "leave out --chat"),
        (lambda: parse(["b", "q"], save=tmp_path / "new", load=tmp_path), "exclude each other"),
        (lambda: parse(["b", "q"], save=tmp_path), "exists; choose another name"),
        (lambda: parse([str(book), "q"], load=tmp_path), "is a file, but --load-context"),
        (lambda: parse(["book.txt", "Who\udcff?"]), "a question is not UTF-8"),
        (lambda: parse(load=tmp_path), "no question given"),
    ]
    for call, message in cases:
        with pytest.raises(InputError, match=message):
            call()


def test_a_question_too_long_for_a_file_name_is_a_question(tmp_path):
    assert parse(["why? " * 2000], load=tmp_path).file is None
