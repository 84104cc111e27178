"""The cuts of text before merging, against transformers' tokenizers and the `regex` library."""

import itertools
import pydoc_data.topics

import pytest
import regex

from checkpoints_convert.splits import SPLITS
from checkpoints_convert.vocabulary import Vocabulary, byte_level

TEXT = "\n".join(pydoc_data.topics.topics.values())[:20_000]
HARD = [
    "",
    "Hello, world! It's  12345 or 1 000\n\n  and\ttabs\r\n",
    "don't we'LL I'm THEY'RE x='y' (1+2)*3 # comment\n    return   None   ",
    "HelloWORLDfooBar's iPhone's X'S 'tis ISN'T '\u017f aB'v \U0001d400\U0001d41a",
    "1 12 123 1234 12345 1234567 1,234.5 \u0967\u0968\u0969\u096a Ⅻ ½ x²",
    "naïve e\u0301te\u0301 Straße Привет, мир! Ǆǅǆ ʰª",
    "你好世界。 これはテスト 한국어 ㄱㄴ ㄅㄆ Hello世界abc\uff0c漢字\u2018x\u2019 \uff01\uff41",
    "ภาษาไทย हिन्दी में বাংলা العربية، ۱۲۳۴ עברית",
    "🙂👍🏽 \u2581 \u00a0\u200b\ufeff ﬁ ① \r\r\n \n\t\n" + " " * 70 + "x" + " " * 9,
    "path/to//file\n/n [a](b) {x|y} ~!@#$%^&*()_+`-=<>?/.,;:'\"[]\\ <sentinel:1>",
]


def by_regex(patterns, text):
    """The pieces, by another engine."""
    pieces = [text]
    for pattern in patterns:
        cut = []
        for piece in pieces:
            spans = [found.span() for found in regex.finditer(pattern, piece, regex.V1)]
            edges = sorted({0, len(piece), *(edge for span in spans for edge in span)})
            cut += [piece[a:b] for a, b in itertools.pairwise(edges)]
        pieces = cut
    return pieces


def tokenizer_of(name):
    """A tokenizer that cuts as llama.cpp's `name` says."""
    return byte_level(Vocabulary(tokens=[], kinds=[], bos=None), [], SPLITS[name])


def cut(tokenizer, text):
    """Each piece's place in the text."""
    return [span for _, span in tokenizer.pre_tokenizer.pre_tokenize_str(text)]


@pytest.mark.parametrize("name", SPLITS)
def test_pieces_are_those_of_another_engine(name):
    tokenizer = tokenizer_of(name)
    for text in [TEXT, *HARD]:
        pieces = by_regex(SPLITS[name].patterns, text)
        assert [text[a:b] for a, b in cut(tokenizer, text)] == pieces
        assert "".join(pieces) == text


@pytest.mark.parametrize(
    ("name", "theirs"),
    [
        ("command-r", "CohereTokenizer"),
        ("olmo", "GPTNeoXTokenizer"),
        ("qwen2", "Qwen2Tokenizer"),
        ("qwen35", "Qwen3_5Tokenizer"),
    ],
)
def test_pieces_are_those_of_transformers(name, theirs):
    import transformers

    ours, theirs = tokenizer_of(name), getattr(transformers, theirs)()._tokenizer
    for text in [TEXT, *HARD]:
        normal = ours.normalizer.normalize_str(text)
        assert normal == theirs.normalizer.normalize_str(text)
        assert cut(ours, normal) == cut(theirs, normal)


@pytest.mark.parametrize(
    ("name", "pieces"),
    [
        ("gpt-2", "I|'ll| pay| 12345| to| HelloWorld|'s"),
        ("smollm", "I|'ll| pay| |1|2|3|4|5| to| HelloWorld|'s"),
        ("llama-bpe", "I|'ll| pay| |123|45| to| HelloWorld|'s"),
        ("qwen2", "I|'ll| pay| |1|2|3|4|5| to| HelloWorld|'s"),
        ("gpt-4o", "I'll| pay| |123|45| to| Hello|World's"),
        ("tekken", "I|'ll| pay| |1|2|3|4|5| to| Hello|World|'s"),
        ("kimi-k2", "I'll| pay| |123|45| to| Hello|World's"),
        ("tiny_aya", "I'll| pay| |12|345| to| Hello|World's"),
        ("superbpe", "I'll pay |12|345| to HelloWorld's"),
        ("ufakzeka", "I|'ll| pay| |1|2|3|4|5| to| HelloWorld|'s"),
        ("deepseek-v3", "I|'ll| pay| |123|45| to| HelloWorld|'s"),
        ("exaone-moe", "I|'ll| pay| |1|2|3|4|5| to HelloWorld|'s"),
        ("poro-chat", "I'll| pay| 12345| to| HelloWorld's"),
    ],
)
def test_pieces_by_name(name, pieces):
    text = pieces.replace("|", "")
    assert text == "I'll pay 12345 to HelloWorld's"
    assert [text[a:b] for a, b in cut(tokenizer_of(name), text)] == pieces.split("|")
