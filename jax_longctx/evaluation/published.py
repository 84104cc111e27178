"""What the papers report on tasks that are also here: their figures, never ours.

Their models, prompts and texts differ from a run's; a report sets them beside ours and says so.
Figures that were read from plots are left out.
"""

import dataclasses

__all__ = ["PUBLISHED", "PublishedTable"]

Values = tuple[float | None, ...]


@dataclasses.dataclass(frozen=True)
class PublishedTable:
    """One table of a paper.

    Attributes:
      paper: as suites name it.
      title: paper, table, model, length.
      note: how it was made.
      tasks: our names of its columns.
      rows: the paper's name of a method -> ours, as `Spec.parse` reads it, with the settings that
        it must have; and a value for each task, None where the paper has none.
    """

    paper: str
    title: str
    note: str
    tasks: tuple[str, ...]
    rows: dict[str, tuple[str, Values]]


_RULER = (
    "niah_single_1", "niah_single_2", "niah_single_3",
    "niah_multikey_1", "niah_multikey_2", "niah_multikey_3",
    "niah_multivalue", "niah_multiquery", "vt", "cwe", "fwe", "qa_1", "qa_2",
)  # fmt: skip
_RESA = (
    "niah_single_2", "niah_single_3", "niah_multikey_2", "niah_multikey_3",
    "niah_multivalue", "niah_multiquery", "qa_1",
)  # fmt: skip


def _star(length: str, full: Values, star: Values) -> PublishedTable:
    return PublishedTable(
        "star",
        f"Star Attention, Tables 9 and 10: RULER, Llama-3.1-8B-Instruct, {length}",
        "500 samples a task; blocks and anchors of a quarter of the length.",
        _RULER,
        {"Global attention": ("full", full), "Star": ("star", star)},
    )


PUBLISHED: tuple[PublishedTable, ...] = (
    PublishedTable(
        "reattention",
        "ReAttention, Table 4: RULER, Llama-3-8B (trained to 8K), 8K",
        "100 samples a task.",
        ("niah_single_3", "niah_multikey_3"),
        {
            "Dynamic NTK": ("dynamic-ntk", (100, 98)),
            "InfLLM": ("infllm", (45, 38)),
            "ReAttention": ("reattention", (95, 78)),
        },
    ),
    PublishedTable(
        "reattention",
        "ReAttention, Table 4: RULER, Llama-3-8B (trained to 8K), 16K",
        "100 samples a task. Many keys of one kind are where it fails (its section 4.3).",
        ("niah_single_3", "niah_multikey_3"),
        {
            "Dynamic NTK": ("dynamic-ntk", (91, 95)),
            "InfLLM": ("infllm", (18, 17)),
            "ReAttention": ("reattention", (94, 15)),
        },
    ),
    PublishedTable(
        "resa",
        "RESA, Table 1: RULER, Llama-3.1-8B, 8K, 2.5% of the keys",
        "Sparse in decode alone; the first 4 and last 64 tokens are always read.",
        _RESA,
        {
            "Quest": ("quest", (100, 99, 87, 24, 89.5, 97, 86)),
            "Quest + RESA": ("resa:selector=quest", (100, 100, 91, 40, 96, 98, 87)),
            "ArkVale": ("arkvale", (100, 100, 90, 27, 88, 97.25, 86)),
            "ArkVale + RESA": ("resa:selector=arkvale", (100, 100, 93, 43, 94, 99, 87)),
            "Ideal top-k": ("ideal-topk", (100, 100, 100, 98, 98.5, 99.25, 86)),
            "Ideal top-k + RESA": ("resa:selector=ideal", (100, 100, 100, 100, 99.75, 99.75, 87)),
        },
    ),
    PublishedTable(
        "resa",
        "RESA, Table 1: RULER, Llama-3.2-3B, 8K, 2.5% of the keys",
        "Sparse in decode alone; the first 4 and last 64 tokens are always read.",
        _RESA,
        {
            "Quest": ("quest", (91, 58, 74, 3, 71.75, 83.25, 59)),
            "Quest + RESA": ("resa:selector=quest", (92, 84, 82, 6, 84.25, 93, 62)),
            "ArkVale": ("arkvale", (89, 84, 78, 3, 77, 90.5, 62)),
            "ArkVale + RESA": ("resa:selector=arkvale", (89, 97, 79, 6, 88, 94, 62)),
            "Ideal top-k": ("ideal-topk", (95, 100, 99, 71, 92.75, 97.75, 63)),
            "Ideal top-k + RESA": ("resa:selector=ideal", (95, 100, 99, 92, 97, 98.5, 63)),
        },
    ),
    PublishedTable(
        "refreshkv",
        "RefreshKV, Table 14: RULER, Llama-3.1-8B, 32K, a budget of an eighth",
        "1,300 samples in all; of its columns those that are one task here.",
        ("niah_multiquery", "niah_multivalue", "fwe", "vt", "cwe"),
        {
            "Vanilla": ("full", (99, 99, 93, 99, 65)),
            "H2O": ("h2o", (6, 6, 78, 38, 39)),
            "StreamingLLM": ("streaming-llm", (13, 13, 93, 12, 4)),
            "SnapKV": ("snapkv", (98, 99, 83, 99, 44)),
            "RefreshKV, QC = 5": ("refreshkv:qc_stride=5", (98, 99, 81, 99, 44)),
            "RefreshKV, QC = 10": ("refreshkv:qc_stride=10", (97, 99, 81, 99, 44)),
        },
    ),
    PublishedTable(
        "refreshkv",
        "RefreshKV, Table 10: HTML to TSV, Llama-3.1-8B, answers of 0.5K tokens, row F1",
        "50 real pages; a budget of an eighth. Ours are pages made from a seed.",
        ("html_tsv_syn",),
        {
            "Vanilla": ("full", (43,)),
            "StreamingLLM": ("streaming-llm", (4,)),
            "H2O": ("h2o", (0,)),
            "SnapKV": ("snapkv", (0,)),
            "RefreshKV, QC = 5": ("refreshkv:qc_stride=5", (31,)),
            "RefreshKV, QC = 10": ("refreshkv:qc_stride=10", (16,)),
        },
    ),
    PublishedTable(
        "refreshkv",
        "RefreshKV, section 5: chain of keys, Llama-3.1-70B",
        "100 samples of some 22K tokens; a budget of an eighth.",
        ("chain_of_key",),
        {
            "Vanilla": ("full", (56,)),
            "StreamingLLM": ("streaming-llm", (2,)),
            "H2O": ("h2o", (10,)),
            "SnapKV": ("snapkv", (12,)),
            "RefreshKV, QC = 5": ("refreshkv:qc_stride=5", (25,)),
            "RefreshKV, QC = 10": ("refreshkv:qc_stride=10", (15,)),
        },
    ),
    PublishedTable(
        "citrus",
        "CItruS, section 5: passkeys, Llama-2-7B-Chat and Mistral-7B-Instruct, up to 1M tokens",
        "38 prompts; 768 tokens kept and chunks of 256.",
        ("passkey",),
        {
            "Individual cache": ("citrus-individual", (100,)),
            "Shared cache": ("citrus", (100,)),
        },
    ),
    _star(
        "16K",
        (100, 100, 100, 99.8, 100, 99, 99.9, 99.5, 99.56, 75, 88.87, 80.8, 56.4),
        (100, 99.4, 100, 98, 98.8, 99, 91.1, 98.25, 91.96, 85.72, 89.73, 80.2, 54.4),
    ),
    _star(
        "32K",
        (100, 100, 100, 99.8, 99.8, 99.6, 99, 99.05, 99.2, 14.7, 93.93, 78.8, 54),
        (100, 100, 100, 99.2, 99.4, 98.2, 94, 98.3, 92.68, 45.66, 95.27, 78.6, 51.8),
    ),
    _star(
        "64K",
        (100, 100, 100, 99.4, 99.2, 96.8, 95.15, 99.2, 95.44, 1.96, 85.13, 78.8, 51.2),
        (100, 100, 100, 99.2, 98, 90, 85.35, 97.9, 92.32, 5.78, 86.47, 78.4, 50.4),
    ),
    _star(
        "128K",
        (100, 99.6, 99.8, 97.6, 87.2, 66.8, 91.55, 97.8, 61.76, 0.04, 72.33, 76, 41.6),
        (100, 100, 99.6, 96.4, 84.8, 59, 82.7, 96.55, 62.8, 0.04, 75.87, 68, 41.6),
    ),
)
