"""Special tokens that are written in texts, and pieces that continue another, for each kind of
tokenizer; chats against transformers.
"""

import functools
import itertools
import json
import random

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers

from jax_longctx.text import PromptText, Tokenizer, chat_layout
from tests.smollm2 import write_tokenizer

TEXT = "The capital of France is Paris. 12\n\n[INST] a<s>b</s> user <|im_end|>\uff5cU_x" * 9
SPECIAL = ("<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>")
# Special, but its file does not say so (DeepSeek's distilled models).
UNMARKED = "<\uff5cUser\uff5c>"
PREFIXES = {
    "legacy": ([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")], None),
    "first": ([], pre_tokenizers.Metaspace(prepend_scheme="first", split=False)),
    "always": ([], pre_tokenizers.Metaspace(prepend_scheme="always", split=False)),
    "never": ([], pre_tokenizers.Metaspace(prepend_scheme="never", split=False)),
    "bytes": ([], pre_tokenizers.ByteLevel(add_prefix_space=True)),
}
_STEPS = [pre_tokenizers.Digits(), pre_tokenizers.Metaspace(prepend_scheme="first")]
PREFIXES["digits"] = ([], pre_tokenizers.Sequence(_STEPS))
KINDS = [*PREFIXES, "unigram", "smollm2"]
# The fewest forms: ChatML, Llama 2's, one without a beginning, one that leaves thoughts out.
TEMPLATES = {
    "chatml": "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "llama2": "{% for m in messages %}{% if m.role == 'user' %}{{ bos_token }}[INST] "
    "{{ m.content | trim }} [/INST]{% else %} {{ m.content }} {{ eos_token }}{% endif %}"
    "{% endfor %}",
    "thoughts": f"{{% for m in messages %}}{UNMARKED}{{% if tools is none and documents is none %}}"
    "{{ m.content.split('</think>')[-1].lstrip('\n') }}{% endif %}</s>{% endfor %}",
}
CHAT = [
    {"role": "user", "content": "  What is the\n\ncapital? "},
    {"role": "assistant", "content": "<think>hm</think>\n\nParis. é🙂"},
    {"role": "user", "content": "[INST] Why?"},
]


@functools.cache
def backend_of(kind):
    """A small trained tokenizer with this prefix, and the special tokens."""
    steps, splitter = PREFIXES["always" if kind == "unigram" else kind]
    how = {"special_tokens": list(SPECIAL), "show_progress": False}
    if kind == "unigram":
        # Its special tokens have the best scores.
        backend = tokenizers.Tokenizer(models.Unigram())
        trainer = trainers.UnigramTrainer(vocab_size=120, unk_token="<unk>", **how)
    else:
        backend = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
        alphabet = [*pre_tokenizers.ByteLevel.alphabet(), "\ufdd0", "\n"]
        trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, **how)
    # No piece has a space within.
    backend.pre_tokenizer = splitter if kind == "bytes" else pre_tokenizers.Metaspace()
    backend.train_from_iterator([TEXT], trainer)
    backend.pre_tokenizer = splitter
    backend.normalizer = normalizers.Sequence(steps)
    spaces = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()])
    backend.decoder = decoders.ByteLevel() if kind == "bytes" else spaces
    backend.add_tokens([AddedToken(UNMARKED, normalized=False), AddedToken("<think>")])
    return backend.to_str()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    @functools.cache
    def folder(kind, template="chatml"):
        path = tmp_path_factory.mktemp(kind)
        if kind == "smollm2":
            write_tokenizer(path)
            return path
        (path / "tokenizer.json").write_text(backend_of(kind))
        config = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
        config |= {"add_bos_token": True, "chat_template": TEMPLATES[template]}
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
        (path / "tokenizer_config.json").write_text(json.dumps(config))
        return path

    return folder


@pytest.mark.parametrize(
    ("kind", "template"), [*itertools.product(KINDS[:-1], TEMPLATES), ("smollm2", "its own")]
)
def test_chats_have_the_ids_of_transformers(folder, kind, template):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folder(kind, template))
    expected = theirs.apply_chat_template(CHAT, add_generation_prompt=True)["input_ids"]
    ours = Tokenizer.load(folder(kind, template))
    assert ours.encode(ours.chat(CHAT), bos=True) == expected
    # And before a special token that is text, where the text is encoded in sections.
    careful = ours.encode(PromptText.of(str(ours.chat(CHAT)), "<s>"), begins=True)
    assert careful[: len(expected) - 5] == expected[:-5]


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_count_only_where_a_template_writes_them(folder, kind):
    tokenizer, parsing = (Tokenizer.load(folder(kind), parse_special=it) for it in (False, True))
    special = {tokenizer._backend.token_to_id(each) for each in (*SPECIAL[1:], UNMARKED)}
    layout, draw = chat_layout(tokenizer), random.Random(kind)
    parts = [*SPECIAL[1:], UNMARKED, "<|im_", "end|>", " ", "\n", "Paris", " the", "12"]

    def count(text):
        return sum(token in special for token in tokenizer.encode(text))

    neutral = count(tokenizer.chat([{"role": "user", "content": "x"}] * 3))
    for _ in range(6):
        text = "x" + "".join(draw.choices(parts, k=8))
        assert count(text) == 0 and tokenizer.decode(tokenizer.encode(text)) == text
        assert tokenizer.encode(text, parse_special=True) == parsing.encode(text)
        assert count(layout.context(text)) == count(PromptText(layout.before))
        assert count(layout.question(text)) == count(PromptText(layout.between + layout.after))
        # Several messages: one has the character that marks, one is cut by some templates.
        texts = (text, "\ufdd0" + text, "</think>")
        chat = tokenizer.chat([{"role": "user", "content": each} for each in texts])
        assert all(each in str(chat) for each in texts) and count(chat) == neutral


# A normalizer, how the special token is found, its text, and a text that becomes it.
END = "<|im_end|>"
DISGUISES = {
    "full width": (normalizers.NFKC(), {}, END, "\uff1c|im_end|\uff1e"),
    "full width, spaces around": (
        normalizers.NFKC(),
        {"lstrip": True, "rstrip": True},
        END,
        "  \uff1c\uff5c\uff49m_end\uff5c\uff1e \n",
    ),
    "spaces around": (None, {"lstrip": True, "rstrip": True}, END, f" {END} "),
    "a word": (None, {"single_word": True}, "END", "END"),
    "a folded word": (normalizers.NFKC(), {"single_word": True}, "END", "\uff25ND"),
    "capitals": (normalizers.Lowercase(), {}, END, "<|IM_END|>"),
    "a kelvin sign": (normalizers.NFC(), {}, "<|TOKEN|>", "<|TO\u212aEN|>"),
    "spaces": (normalizers.Replace(" ", "\u2581"), {}, "<|a\u2581b|>", "<|a b|>"),
    "nothing seen": (normalizers.Replace("\u200b", ""), {}, END, "<|im\u200b_end|>"),
    "accents": (
        normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()]),
        {},
        END,
        "<|\u00efm_end|>",
    ),
    "by the model": (normalizers.NFKC(), {"normalized": False}, "<s>", "\uff1cs\uff1e"),
}


@pytest.mark.parametrize("case", DISGUISES)
def test_what_a_normalizer_makes_a_special_token_is_plain_text_too(case):
    normalizer, how, special, text = DISGUISES[case]
    pieces = ["<unk>", special, *sorted({*"ENDTOKabdeimns_|<>", *text.lower(), *special} - {" "})]
    model = models.Unigram([(piece, -1.0) for piece in pieces], 0)
    if case != "by the model":
        vocab = {piece: number for number, piece in enumerate(pieces)}
        model = models.BPE(vocab=vocab, merges=[], unk_token="<unk>")
    backend = tokenizers.Tokenizer(model)
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.add_special_tokens([AddedToken(special, **{"normalized": True, **how}), "<unk>"])
    template = "{% for m in messages %}" + special + " {{ m.content }}{% endfor %}" + special
    tokenizer, token = Tokenizer(backend, {}, chat_template=template), backend.token_to_id(special)
    # As one text it is the token.
    assert tokenizer.encode(text, parse_special=True).count(token) == 1
    for user in (
        text,
        f"x {text}",
        f"a{text} {text}b",
        f"{special}{text} x",
        f"{text}\u65e5{special}",
    ):
        assert token not in tokenizer.encode(user), user
        for chat in ([user], ["a|", user, f"{user} |"]):
            said = tokenizer.chat([{"role": "user", "content": each} for each in chat])
            ids, own = tokenizer.encode(said), len(chat) + 1
            if "single_word" in how:
                # A letter before the template's own makes it a part of a word.
                own -= sum(each[-1].isalnum() for each in chat)
            assert ids.count(token) == own, (user, chat)


@pytest.mark.parametrize("kind", KINDS)
def test_a_piece_that_continues_another_has_no_prefix(folder, kind):
    tokenizer = Tokenizer.load(folder(kind))
    encode = functools.partial(tokenizer.encode, parse_special=True)
    for first, then in [
        ("The capital of France is", " Paris"),
        ("The capital", "\n\nis Paris"),
        ("The capital is 12", "34."),
        ("The capital", "</s>is</s>Paris"),
        ("The capital</s>", ""),
    ]:
        two, one = encode(first, bos=True) + encode(then), encode(first + then, bos=True)
        assert tokenizer.decode(two) == tokenizer.decode(one)
        assert two == one or kind == "unigram", (then, two, one)
    # Behind an empty context a continuation is the beginning.
    assert encode("", bos=True) + encode("Paris", begins=True) == encode("Paris", bos=True)
