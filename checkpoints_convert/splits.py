"""How byte-level tokenizers cut text before merging, by llama.cpp's names (`tokenizer.ggml.pre`).

The names are those of llama.cpp (`src/llama-vocab.cpp`), the expressions those of the models' own
tokenizers where llama.cpp only comes near them. Left out, and so refused: names of encoders, those
whose text is not cut into bytes (`gemma4`), or is cut by code (`afmoe`) or by a list of letters
(`deepseek-llm`).
"""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Split:
    """How a byte-level tokenizer cuts text before merging.

    Attributes:
      patterns: applied one after another; matches, and the text between them, become pieces.
      whole: a piece in the vocabulary is one token, without merges.
      bos: texts begin with the beginning-of-text token by default.
      nfc: text is normalised to Unicode's composed form (NFC) first.
    """

    patterns: tuple[str, ...]
    whole: bool = False
    bos: bool = False
    nfc: bool = False


_GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_BEFORE = r"[^\r\n\p{L}\p{N}]?"
_SPACES = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*" + _SPACES
_LLAMA3 = rf"{_ENDINGS}|{_BEFORE}\p{{L}}+|\p{{N}}{{1,3}}{_REST}"
_PLAIN = rf"{_BEFORE}\p{{L}}+|\p{{N}}{_REST}"
_QWEN2 = f"{_ENDINGS}|{_PLAIN}"


def _by_case(ending: str, digits: str, after: str = r"[\r\n/]*", but: str = "") -> str:
    """Words end where a capital follows; `but` takes letters out."""
    upper, lower = (
        rf"[{kinds}\p{{Lm}}\p{{Lo}}\p{{M}}{but}]" for kinds in (r"\p{Lu}\p{Lt}", r"\p{Ll}")
    )
    words = rf"{_BEFORE}{upper}*{lower}+{ending}|{_BEFORE}{upper}+{lower}*{ending}"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+{after}{_SPACES}"


_GPT4O = _by_case(f"{_ENDINGS}?", r"\p{N}{1,3}")
_EAST_ASIAN = r"[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_MARKED = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+"
)
_BLOOM = r" ?[^(\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
_JAIS_SPACES = "".join(rf"\s{{{n}}}(?!\S)|" for n in (512, 256, 128, 64, 32, 16, 8, 4, "1,2"))

_SPLITS = {
    "gpt-2 phi-2 gigachat a.x-4.0 mellum exaone4 jais trillion granite-docling": Split(
        patterns=(_GPT2,)
    ),
    # The tokenizer of GPT-NeoX.
    "olmo mpt": Split(patterns=(_GPT2,), nfc=True),
    "smollm refact starcoder codeshell exaone minerva-7b mellum2": Split(
        patterns=(r"\p{N}", _GPT2)
    ),
    "command-r": Split(patterns=(r"\p{N}", _GPT2), nfc=True),
    "default": Split(patterns=(r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "falcon": Split(patterns=(r"[\p{P}$+<=>^~|`]+", _GPT2, "[0-9][0-9][0-9]")),
    "dbrx smaug-bpe glm4 chatglm-bpe": Split(patterns=(_LLAMA3,)),
    "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2": Split(
        patterns=(_LLAMA3,), whole=True, bos=True
    ),
    "minicpm5": Split(patterns=(r"\p{N}{1,3}", _LLAMA3.replace("{1,3}", "+")), whole=True),
    "jais-2": Split(patterns=(_LLAMA3.removesuffix(r"\s+(?!\S)|\s+") + _JAIS_SPACES + r"\s",)),
    "qwen2 deepseek-r1-qwen megrez kormo": Split(patterns=(_QWEN2,), nfc=True),
    "qwen35": Split(
        patterns=(
            _QWEN2.replace(r"\p{L}+", r"[\p{L}\p{M}]+").replace(r"\s\p{L}", r"\s\p{L}\p{M}"),
        ),
        nfc=True,
    ),
    "stablelm2 hunyuan solar-open grok-2": Split(patterns=(_QWEN2,)),
    "ufakzeka": Split(patterns=(_PLAIN,)),
    "laguna": Split(patterns=(r"[^\n]+|[\n]+", _QWEN2)),
    "bailingmoe bailingmoe2 llada-moe": Split(
        patterns=(_QWEN2.replace(r"\s*[\r\n]+", r"\s*[\r\n]"),)
    ),
    "seed-coder": Split(
        patterns=(_QWEN2.replace(r"[^\s\p{L}\p{N}]+[\r\n]*", r"[^\s\p{L}\p{N}\r\n]+"),)
    ),
    "exaone-moe": Split(
        patterns=(
            rf"{_ENDINGS}|{_BEFORE}(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
            r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
        )
    ),
    "tekken": Split(patterns=(_by_case("", r"\p{N}"),), whole=True, bos=True),
    "gpt-4o llama4 kanana2 talkie minimax-m2": Split(patterns=(_GPT4O,)),
    "tiny_aya cohere2moe": Split(patterns=(r"\d{1,3}(?=(?:\d{3})*\b)", _GPT4O)),
    "kimi-k2": Split(
        patterns=(
            r"\p{Han}+|" + _by_case(f"{_ENDINGS}?", r"\p{N}{1,3}", r"[\r\n]*", r"&&[^\p{Han}]"),
        )
    ),
    "youtu": Split(
        patterns=(
            r"[\uac00-\ud7a3\u3131-\u318e]+|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b"
            rf"\uff0c\u3001-\u303f\ufe30-\ufe4f]+|[\u3105-\u312f]+|{_EAST_ASIAN}",
            _by_case(f"{_ENDINGS}?", r"\p{N}"),
        ),
        whole=True,
    ),
    "deepseek-v3 hunyuan-dense joyai-llm hy_v4": Split(
        patterns=(r"\p{N}{1,3}", _EAST_ASIAN, rf"{_MARKED}[\r\n]*{_SPACES}")
    ),
    "spark2_5": Split(
        patterns=(
            *(r"\p{N}{1,3}", _EAST_ASIAN, rf"{_MARKED}|[\r\n]|\s+(?!\S)|\s+"),
            r"\p{N}",
        )
    ),
    "deepseek-coder": Split(
        patterns=(
            *(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[\u0800-\u9fa5\uac00-\ud7ff]+"),
            r"\p{N}",
        )
    ),
    "superbpe": Split(patterns=(r"\p{N}+", r"(?=(\d{3})+(?!\d))")),
    "poro-chat bloom gpt3-finnish": Split(patterns=(_BLOOM,)),
    "viking": Split(patterns=(_BLOOM, r"\p{N}")),
}
SPLITS = {name: split for names, split in _SPLITS.items() for name in names.split()}
