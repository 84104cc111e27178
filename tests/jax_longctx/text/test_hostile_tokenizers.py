import json
import subprocess
import sys
import time

import pytest
import tokenizers

from jax_longctx.errors import CheckpointError, InputError
from jax_longctx.text import Tokenizer, child
from tests.patience import patience


@pytest.fixture
def loaded(tmp_path, byte_level, monkeypatch):
    """Loads the tokenizer with another step, under less than users have."""
    monkeypatch.setattr(child, "SECONDS", 0.4)
    monkeypatch.setattr(child, "MEMORY", 2**28)

    def load(place, step):
        described = json.loads(byte_level.to_str()) | {place: step}
        (tmp_path / "tokenizer.json").write_text(json.dumps(described))
        return Tokenizer.load(tmp_path)

    return load


def replaced(place, old, new, kind="String", times=40):
    step = {"type": "Replace", "pattern": {kind: old}, "content": new}
    return place, {"type": "Sequence", f"{place}s": [step] * times}


def split(pattern):
    cut = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return "pre_tokenizer", cut


LIMIT, TEXT = "takes (more than 0.4|too much)", "a" * 2000 + "c"
ENCODING = {
    "nested replacements": (replaced("normalizer", "a", "aa"), LIMIT),
    "nested replacements of others": (replaced("normalizer", "[^b]", "cd", "Regex"), LIMIT),
    "endless backtracking": (split("(a+)+$"), "fails: PanicException: .*retry-limit"),
    "cubes of the length": (split("a*?a*?[^abc]"), LIMIT),
}
LOADING = {
    "a decoder that doubles": (replaced("decoder", "a", "aa"), "1.1e\\+12 times as long"),
    "a decoder's pattern": (replaced("decoder", "(a+)+$", "", "Regex", 1), "inf times as long"),
    "a damaged map": (("normalizer", {"type": "Precompiled", "precompiled_charsmap": "A"}), "it "),
}


@pytest.mark.parametrize(("step", "words"), ENCODING.values(), ids=ENCODING)
def test_a_text_that_would_take_for_ever_is_one_line(loaded, byte_level, step, words):
    hostile = loaded(*step)
    with pytest.raises(InputError, match=f"tokenizer {words}.* on a text of 2,001 char") as caught:
        hostile.encode(TEXT)
    assert "\n" not in str(caught.value)
    # The process that was ended takes no other tokenizer with it.
    sound = Tokenizer(byte_level, {})
    assert sound.decode(sound.encode(TEXT)) == TEXT


@pytest.mark.parametrize(("step", "words"), LOADING.values(), ids=LOADING)
def test_a_tokenizer_that_fails_here_is_not_loaded(loaded, step, words):
    with pytest.raises(CheckpointError, match=rf"tokenizer\.json.* {words}"):
        loaded(*step)


def test_ids_and_offsets_are_those_of_the_package_and_one_process_serves_them(byte_level):
    bounded, text = child.BoundedTokenizer(byte_level.to_str()), "Größe \U0001f9ff <|end|>" * 99
    (whole,) = byte_level.encode_batch([text], add_special_tokens=False)
    bounded.encode(text)
    started = [each._process for each in child._idle[0].queue]
    for _ in range(20):
        assert bounded.encode(text, offsets=True) == (whole.ids, whole.offsets)
        assert [each._process for each in child._idle[0].queue] == started


BUSY = """
import sys, threading
from jax_longctx.text import child
child.SECONDS = float(sys.argv[1])
template = child.ChatTemplate("{{ 7 ** (10 ** 8) % 10 }}", {})
how = {"args": ([],), "kwargs": {"add_generation_prompt": True}, "daemon": True}
threading.Thread(target=template.render, **how).start()
while not any(each._process for each in child._own): pass
"""


def test_a_process_ends_at_once_though_a_child_is_busy():
    long = patience(20)
    words = [sys.executable, "-c", BUSY, str(3 * long)]
    subprocess.run(words, check=True, timeout=long)


FORK = """
import os, signal, sys
from jax_longctx.text import Tokenizer
tokenizer = Tokenizer.load(sys.argv[1])
signal.alarm(int(float(sys.argv[2])))
expected = tokenizer.encode("The pass key")
child = os.fork()
assert tokenizer.encode("The pass key") == expected
if child:
    assert os.waitpid(child, 0)[1] == 0
    assert tokenizer.encode("The pass key") == expected
"""


def test_a_forked_process_encodes_in_children_of_its_own(tmp_path, byte_level):
    byte_level.save(str(tmp_path / "tokenizer.json"))
    words = [sys.executable, "-c", FORK, str(tmp_path), str(patience(30))]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr, done.stderr


def test_files_of_older_forms_have_copies_too(byte_level):
    model = {
        "type": "BPE",
        "vocab": {"</s>": 0, "</": 1, "s>": 2, "\u2581": 3, "a": 4, "\u2581a": 5},
    }
    model |= {"merges": ["</ s>", "\u2581 a"], "unk_token": None}
    added = {"id": 0, "content": "</s>", "special": True, "single_word": False, "lstrip": False}
    described = {"version": "1.0", "added_tokens": [added | {"rstrip": False, "normalized": False}]}
    described |= {"model": model, "post_processor": None, "decoder": None}
    described["pre_tokenizer"] = {
        "type": "Metaspace",
        "replacement": "\u2581",
        "add_prefix_space": True,
    }
    file = json.dumps(described)
    tokenizer = Tokenizer(tokenizers.Tokenizer.from_str(file), {}, file=file)
    assert tokenizer.encode("a", bos=True) == [5] and tokenizer.encode("a") == [4]
    assert 0 not in tokenizer.encode("a</s>a") and 0 in tokenizer.encode("</s>", parse_special=True)


def test_special_tokens_in_a_long_message_take_no_time_of_their_own(byte_level):
    # 3,000 scans of 2 MB take seconds.
    byte_level.add_special_tokens([f"<|reserved_{number}|>" for number in range(3000)])
    encoder = Tokenizer(byte_level, {})._encoder
    begun = time.process_time()
    for text in ("a < b and reserved", "<|reserved_ 0"):
        assert encoder.special_in(text * 150_000) == []
    assert encoder.special_in("Größe <|end|> <|reserved_2999|>") == [6, 14]
    assert time.process_time() - begun < patience(1)
    template = "{{ messages[0].content }}"
    tokenizer = Tokenizer(byte_level, {}, chat_template=template)
    begun = time.process_time()
    for text in ("<|end|>" * 20_000, "\ufdd0" * 100_000):
        said = tokenizer.chat([{"role": "user", "content": text}])
        assert str(said) == text
        assert tokenizer.special_ids.isdisjoint(tokenizer.encode(said))
    assert time.process_time() - begun < patience(5)
