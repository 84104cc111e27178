import pytest

from jax_longctx.contract import Feed
from jax_longctx.errors import ConfigError, InputError
from jax_longctx.methods import make_method
from jax_longctx.models.rope import RopeConfig
from tests.support import random_rows, tiny_config

UNITS = "n_init=4 n_local=16 block_size=4 topk=2 repr_topk=2 chunk=8"
SCOPE = "global_size=2 local_size=8 span=4 count=2 kept=3 chunk=8"
PAGES = "page_size=8 sink=4 local=32 span=12 budget=24 count=1 chunk=16"

BAD = [
    ("h2o", "recent=-1", "recent must be at least 0, got -1"),
    ("h2o", "budget=8 recent=9", "budget 8 leaves 8 tokens, but the method always keeps 9"),
    ("h2o", "budget=0 recent=0", "budget 0 leaves 0 tokens, but the method always keeps 1"),
    ("h2o", "chunk=0", "chunk must be at least 1, got 0"),
    (
        *("h2o", "budget=20 chunk=16 recent=5 protocol=citrus"),
        "budget 20 less chunk 16 leaves 4 tokens, but the method always keeps 5",
    ),
    ("h2o-shared", "budget=9 chunk=9", "budget 9 less chunk 9 leaves 0 tokens"),
    ("tova", "chunk=0", "chunk must be at least 1, got 0"),
    ("tova", "budget=0", "budget 0 leaves 0 tokens, but the method always keeps 1"),
    ("tova", "budget=16 chunk=16 protocol=citrus", "16 leaves 0 tokens"),
    ("roco", "sink=-1", "sink must be at least 0, got -1"),
    ("roco", "protected_last=-2", "protected_last must be at least 0, got -2"),
    ("roco", "recent_ratio=1.0", "recent_ratio must be at least 0 and below 1, got 1.0"),
    ("roco", "decode_recent_ratio=-0.1", "decode_recent_ratio must be at least 0"),
    ("roco", "budget=13", "budget 13 leaves 13 tokens, but the method always keeps 14"),
    (
        *("roco", "budget=32 chunk=19 protocol=citrus"),
        "budget 32 less chunk 19 leaves 13 tokens, but the method always keeps 14",
    ),
    ("streaming-llm", "chunk=0", "chunk must be at least 1, got 0"),
    ("streaming-llm", "sink=-1", "sink must be at least 0, got -1"),
    ("streaming-llm", "budget=4 sink=5", "budget 4 leaves 4 tokens, but the method always keeps 5"),
    (
        *("streaming-llm", "budget=16 chunk=13 protocol=citrus"),
        "budget 16 less chunk 13 leaves 3 tokens, but the method always keeps 4",
    ),
    *(
        (name, settings, said)
        for name in ("citrus", "citrus-standard", "citrus-individual")
        for settings, said in [
            ("chunk=0", "chunk must be at least 1, got 0"),
            ("sink=-1", "sink must be at least 0, got -1"),
            ("budget=8 chunk=9", "budget 8 less chunk 9 leaves -1 tokens"),
            ("budget=12 chunk=9 sink=4", "leaves 3 tokens, but the method always keeps 4"),
        ]
    ),
    ("snapkv", "budget=32", "budget 32 must exceed window 32; raise budget"),
    ("snapkv", "window=0", "window must be at least 1, got 0"),
    ("snapkv", "kernel=4", "kernel must be odd and at least 1, got 4"),
    ("snapkv", "kernel=-1", "kernel must be odd and at least 1, got -1"),
    ("refreshkv", "stride=0", "stride must be at least 1, got 0"),
    ("refreshkv", "qc_stride=-2", "qc_stride must be at least 1, got -2"),
    ("refreshkv", "budget=0", "budget must be at least 1, got 0"),
    ("refreshkv", "ratio=0", "ratio must be above 0 and at most 1, got 0.0"),
    ("refreshkv", "ratio=1.5", "ratio must be above 0 and at most 1, got 1.5"),
    ("refreshkv", "threshold=1.1", "threshold is a cosine from -1 to 1, got 1.1"),
    ("refreshkv", "threshold=nan", "threshold is a cosine from -1 to 1, got nan"),
    ("refreshkv", "kernel=2", "kernel must be odd and at least 1, got 2"),
    ("infllm", f"{UNITS} chunk=17", "n_local 16 must hold a chunk of 17"),
    ("infllm", f"{UNITS} repr_topk=5", "repr_topk 5 tokens cannot be chosen of block_size 4"),
    ("infllm", "n_init=-1", "n_init must be at least 0, got -1"),
    ("infllm", "topk=-1", "topk must be at least 0, got -1"),
    ("infllm", "repr_topk=0", "repr_topk must be at least 1, got 0"),
    ("infllm", "block_size=0", "block_size must be at least 1, got 0"),
    ("infllm", "chunk=0", "chunk must be at least 1, got 0"),
    ("reattention", "global_size=-1", "global_size must be at least 0, got -1"),
    ("reattention", "span=0", "span must be at least 1, got 0"),
    ("reattention", "kept=0", "kept must be at least 1, got 0"),
    ("reattention", "chunk=0", "chunk must be at least 1, got 0"),
    ("reattention", "count=17", "count must be from 0 to 16, got 17"),
    ("reattention", "local_size=511", "local_size 511 must hold a chunk of 512 tokens; raise"),
    ("free-pages", "page_size=24", "must divide 128"),
    ("free-pages", "span=4 page_size=8", "must hold a page of 8"),
    ("free-pages", "budget=8 span=16", "must hold a span of 16"),
    ("free-pages", "local=16 chunk=32", "must hold a chunk of 32"),
    ("free-pages", "count=17", "count must be from 1 to 16"),
    ("free-pages", "lam=1.5", "lam must be from 0 to 1"),
    ("quest", "budget=0", "budget must be at least 1, got 0"),
    ("quest", "sink=-1", "sink must be at least 0, got -1"),
    ("quest", "page_size=48", "page_size must divide 128, got 48"),
    ("quest", "ratio=1.5", "ratio must be above 0 and at most 1, got 1.5"),
    ("quest", "allocation=ada-floor", "needs granularity kv_head, got query_head"),
    ("ideal-topk", "epsilon=0", "epsilon must be above 0 and at most 1, got 0.0"),
    ("arkvale", "allocation=psa-oracle", "needs granularity query_head, got layer"),
    ("arkvale", "page_size=128", "local 64 must cover the page of 128 tokens"),
    ("resa", "lam=1.5", "lam must be from 0 to 1, got 1.5"),
    ("resa", "selector=ideal page_size=16", "page_size 16 is for quest and arkvale"),
    ("resa", "budget=0", "budget must be at least 1, got 0"),
    ("ring", "order=spiral", "expected one of contiguous, zigzag"),
    ("star", "block=0", "block must be at least 1, got 0"),
    ("star", "block=8 anchor=9", "from 0 to the block's 8 tokens, got 9"),
    ("star", "decode=snapkv", "SnapKV cannot decode over blocks read elsewhere"),
    ("star", "decode=qest", "unknown method 'qest'"),
    ("star", "decode=quest decode.budget=x", "expected a whole number"),
    ("star", "decode=resa block=40", "block 40 must be whole pages of 16 tokens"),
    ("star", "decode=quest block=40", "block 40 must be whole pages of 16 tokens"),
    ("dynamic-ntk", "factor=0.5", "factor must be at least 1, got 0.5"),
    ("dynamic-ntk", "factor=nan", "factor must be at least 1, got nan"),
]


def made(name, settings):
    return make_method(name, dict(each.split("=") for each in settings.split()))


@pytest.mark.parametrize(("name", "settings", "said"), BAD)
def test_bad_settings(name, settings, said):
    with pytest.raises(ConfigError) as error:
        made(name, settings)
    assert said in str(error.value) and "\n" not in str(error.value)
    # Of the method that Star decodes by, that method says what is wrong.
    assert str(error.value).startswith(f"{name}: ") or "decode=q" in settings


def window(tokens):
    return {"windows": (None, tokens)}


def scaled(kind):
    low_high = {"low_freq_factor": 1.0, "high_freq_factor": 4.0} if kind == "llama3" else {}
    rope = RopeConfig(kind=kind, theta=1e4, trained_length=64, factor=8.0, **low_high)
    return {"rope": rope}


# Method, settings, what the model has, what is said of it; None: nothing.
MODELS = [
    ("full", "", scaled("yarn"), None),
    *(
        ("dynamic-ntk", "", scaled(kind), f"own rope scaling '{kind}'; use --method full")
        for kind in ("llama3", "linear", "yarn", "dynamic")
    ),
    ("dynamic-ntk", "factor=1", scaled("default"), None),
    ("citrus", "budget=8 chunk=8", {}, None),
    ("roco", "recent_ratio=0 decode_recent_ratio=0", {}, None),
    *((name, "", {"windows": (16, 30)}, "of 30 tokens at most") for name in ("h2o", "quest")),
    ("full", "", {"windows": (16, 30)}, None),
    ("h2o", "", window(7), None),
    (
        *("streaming-llm", "budget=125 chunk=4", {}),
        "budget 125 + chunk 4 = 129 positions, more than the 128 that the model was trained to",
    ),
    ("streaming-llm", "budget=124 chunk=4", {}, None),
    ("streaming-llm", "budget=125 chunk=4 positions=true", {}, None),
    *((name, "", window(16), "window of 16 tokens, and it reads") for name in ("ring", "star")),
    ("infllm", "", {}, "n_local 4096 reaches beyond the 128"),
    (
        *("reattention", "", {}),
        "global_size 32 + kept 127 * span 32 + local_size 4096 = 8192 positions",
    ),
    ("reattention", "count=0", {}, "32 + local_size 4096 = 4128 positions"),
    ("free-pages", PAGES, {"max_position": 48}, "= 60 positions, the model was trained to 48"),
]


@pytest.mark.parametrize(("name", "settings", "model", "said"), MODELS)
def test_models_that_do_not_fit(name, settings, model, said):
    method, config = made(name, settings), tiny_config(**model)
    if said is None:
        method.check_model(config)
        return
    with pytest.raises(ConfigError) as error:
        method.check_model(config)
    assert said in str(error.value) and "\n" not in str(error.value)
    assert str(error.value).startswith(f"{name}: ")


EIGHT = "budget=24 chunk=8"
LONG = [
    *((name, EIGHT) for name in ("citrus", "citrus-individual", "citrus-standard", "h2o-shared")),
    ("tova", f"{EIGHT} protocol=citrus"),
]


@pytest.mark.parametrize(("name", "settings"), LONG)
def test_a_question_longer_than_the_cache_is_refused(name, settings):
    method, (question,) = made(name, settings), random_rows([25], seed=1)
    stage = "context" if method.info.needs_question else "question"
    said = f"{name}: the question has 25 tokens, more than the cache's"
    with pytest.raises(InputError, match=said):
        list(method.segments(Feed(stage, 8, random_rows([9]), question=[question])))
