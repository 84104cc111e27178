"""Perplexity of long texts under a method, by the protocols of the papers.

Perplexity is exp of the mean negative log-likelihood (nll, in nats) of the scored tokens, each
given the text before it under the method. The protocols differ in the scored tokens and in how they
are fed (`jax_longctx.engine.scoring`):

- P1 (RefreshKV, Table 1 and Fig. 3): of 16,384 tokens the last 256 are decoded one by one;
- P2 (RefreshKV, Table 5): the same with the last 50;
- P3 (CItruS, Figs. 7 and 9 to 12): a stream, every token scored during prefill in the
  method's chunks, perplexity over windows of 8,192 tokens;
- P4: the same with windows of 4,096, for ReAttention: flat beyond the trained length or not;
- P5: the last 256 tokens as one question behind the context, for Star Attention, whose phase 1
  takes the context alone.

In P1 and P2 the length includes the scored tokens. No prediction uses later tokens: methods in
which the tokens of a chunk select together (ReAttention, InfLLM) are decoded token by token also in
P3 and P4.

Intervals are of a bootstrap over texts, and differences are paired: every method reads the same
texts.

`eval perplexity --out` writes a JSON record for each run: `method`, `given` settings, `question`,
`score` (tokens), `text_hashes`, `means` (nll of every text), `windows` (first and last
position, nll of every text there), `read_seconds` and `score_seconds` of every batch, `batch`, and
with `--offload` `fetched`, what decode steps chose of the texts in the host's memory.
"""

import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from jax_longctx.engine import Engine
from jax_longctx.engine.capacity import Fetched
from jax_longctx.engine.scoring import States, Through, forced_states, gathered
from jax_longctx.errors import InputError
from jax_longctx.evaluation.intervals import bootstrap
from jax_longctx.settings import named_text


@dataclasses.dataclass(frozen=True)
class Scores:
    """Scores of texts under a method.

    Attributes:
      losses: nll in nats of every text's scored tokens.
      through: how they were fed.
      read_seconds, score_seconds: of each batch, up to its first scored states and after them.
      fetched: what decoding fetched of contexts in the host's memory; None without them.
    """

    losses: Float[np.ndarray, "n S"]
    through: Through
    read_seconds: list[float]
    score_seconds: list[float]
    fetched: Fetched | None = None


def score_texts(
    engine: Engine,
    texts: Int[np.ndarray, "n T"],
    *,
    through: Through,
    score: int | None = None,
    batch: int = 1,
    question: Sequence[int] = (),
    progress: Callable[[int, int], None] | None = None,
) -> Scores:
    """Losses of the last `score` tokens of every text (None: all but the first).

    Args:
      through: how they are fed; `decode` for methods that look ahead.
      batch: texts that are computed together.
      question: for methods that need one at prefill, with `through="context"`.
      progress: called with (scored tokens, scored tokens in all).

    Raises:
      InputError: no texts, or no tokens before the scored ones.
      CapacityError: the caches of a batch do not fit.
    """
    count, length = texts.shape
    scored = length - 1 if score is None else score
    if batch < 1:
        raise InputError(f"a batch has at least one text, got {batch}")
    if not count or not 1 <= scored < length:
        raise InputError(
            f"{count} texts of {length} tokens leave nothing to score the last {scored} tokens of; "
            f"give texts that are longer than these, and at least one of each"
        )
    through = "decode" if engine.method.info.looks_ahead else through
    found = Scores(np.zeros((count, scored), np.float32), through, [], [])
    fetched = Fetched(0, 0, 0, 0)
    asked = [list(question)] * batch if question and through == "context" else None
    for start, used, padded in batches(texts, batch):
        begun = time.perf_counter()
        states = forced_states(
            engine,
            padded[:, : length - scored].tolist(),
            padded[:, length - scored :].tolist(),
            through=through,
            questions=asked,
        )
        first = next(states)
        first.hidden.block_until_ready()
        read = time.perf_counter()
        pieces = itertools.chain([first], states)
        if progress is not None:
            pieces = _told(pieces, used, start * scored, count * scored, progress)
        likelihoods = gathered(engine, pieces, used)
        found.read_seconds.append(read - begun)
        found.score_seconds.append(time.perf_counter() - read)
        found.losses[start : start + used] = -np.stack([row.logprobs for row in likelihoods])
        fetched += engine.fetched or Fetched(0, 0, 0, 0)
    return dataclasses.replace(found, fetched=fetched) if fetched.steps else found


def score_piece(
    engine: Engine, texts: Int[np.ndarray, "n T"], *, batch: int, **how: Any
) -> dict[str, Any]:
    """`score_texts` of at most one batch, as JSON values for `joined`."""
    found = score_texts(engine, texts, batch=batch, **how)
    (read,), (scored,) = found.read_seconds, found.score_seconds
    fetched = None if found.fetched is None else dataclasses.asdict(found.fetched)
    about = {"through": found.through, "read": read, "scored": scored, "fetched": fetched}
    return {"losses": found.losses.tolist(), **about}


def joined(pieces: Sequence[Mapping[str, Any]], length: int, window: int) -> dict[str, Any]:
    """The fields of a record that come from the scores of its texts, of `length` tokens."""
    losses = np.array([row for piece in pieces for row in piece["losses"]], np.float32)
    count, scored = losses.shape
    fetched = [Fetched(**piece["fetched"]) for piece in pieces if piece["fetched"]]
    return {
        "length": length,
        "score": scored,
        "texts": count,
        "through": pieces[0]["through"],
        "means": losses.mean(1, dtype="float64").tolist(),
        "windows": windows(losses, first=length - scored, window=window),
        "read_seconds": [piece["read"] for piece in pieces],
        "score_seconds": [piece["scored"] for piece in pieces],
        **({"fetched": sum(fetched, Fetched(0, 0, 0, 0)).record()} if fetched else {}),
    }


def batches(
    texts: Int[np.ndarray, "n T"], size: int
) -> Iterator[tuple[int, int, Int[np.ndarray, "B T"]]]:
    """Batches of one shape: (index of the first text, number of texts, `size` rows).

    The last batch repeats its last text.
    """
    for start in range(0, len(texts), size):
        rows = texts[start : start + size]
        yield start, len(rows), np.pad(rows, ((0, size - len(rows)), (0, 0)), mode="edge")


def _told(
    states: Iterator[States], rows: int, done: int, total: int, progress: Callable[[int, int], None]
) -> Iterator[States]:
    """The pieces; progress is reported when the next one is requested."""
    for piece in states:
        yield piece
        done += int(np.sum(piece.targets[:rows] >= 0))
        progress(done, total)


def perplexity(losses: Sequence[float] | np.ndarray) -> float:
    """exp of the mean loss."""
    return float(np.exp(np.mean(losses)))


def windows(
    losses: Float[np.ndarray, "n S"], *, first: int, window: int
) -> list[tuple[int, int, list[float]]]:
    """Mean losses over windows of positions: (first position, last position, one a text).

    Windows begin at multiples of `window` behind `first`, the position of the first scored token.
    """
    ends = range(0, losses.shape[1], window)
    parts = [losses[:, at : at + window] for at in ends]
    return [
        (first + at, first + at + part.shape[1] - 1, part.mean(1, dtype=np.float64).tolist())
        for at, part in zip(ends, parts, strict=True)
    ]


def cut_texts(
    documents: Sequence[Sequence[int]], *, count: int, length: int, lead: Sequence[int] = ()
) -> Int[np.ndarray, "n T"]:
    """`count` texts of `length` tokens, evenly spaced, none across two documents.

    Args:
      documents: token ids, without special tokens.
      lead: first tokens of every text, part of its length: a beginning-of-text token.

    Raises:
      InputError: the documents hold fewer such texts.
    """
    width = length - len(lead)
    if width < 1:
        raise InputError(f"a text of {length} tokens has no room beside its first {len(lead)}")
    pieces = []
    for document in documents:
        held = len(document) // width
        pieces += [document[i * (len(document) // held) :][:width] for i in range(held)]
    if not 1 <= count <= len(pieces):
        longest = max(map(len, documents), default=0)
        raise InputError(
            f"{count} texts of {length:,} tokens were asked for; the {len(documents)} documents, "
            f"the longest of {longest:,} tokens, hold {len(pieces)}: ask for fewer or shorter ones "
            f"(at least one), or give longer documents"
        )
    chosen = [pieces[i * len(pieces) // count] for i in range(count)]
    return np.array([[*lead, *piece] for piece in chosen], np.int32)


def label(run: Mapping[str, Any]) -> str:
    """Name of a run: the method, its given settings, and its question.

    An asterisk marks runs of earlier versions that scored chunks which had chosen together.
    """
    parts = [named_text(run["method"], run["given"], " ", " ")]
    if run.get("question"):
        parts.append(f"({run['question']})")
    return " ".join(parts) + "*" * bool(run.get("ahead"))


def markdown(runs: Sequence[dict[str, Any]]) -> str:
    """A Markdown table with one line a run: perplexity, difference from full attention, and times.

    Differences are from the first run of full attention on the same texts; "-" without one.
    """
    head = ["method", "perplexity", "mean of texts", "of full attention's", "nats a token more"]
    head += ["read, s", "scored, ms a token"]
    offloaded = any("fetched" in run for run in runs)
    head += ["chosen pages on the device"] * offloaded
    lines = []
    base = next((run for run in runs if run["method"] == "full"), None)
    for run in runs:
        means = np.array(run["means"])
        pooled, low, high = map(np.exp, bootstrap(means))
        cells = [
            f"`{label(run)}`",
            shown_interval(pooled, low, high, ".3f"),
            f"{np.exp(means).mean():.3f}",
        ]
        if base is None or run is base:
            cells += ["-", "-"]
        else:
            more = bootstrap(means - np.array(base["means"]))
            ratio, least, most = map(np.exp, more)
            cells += [shown_interval(ratio, least, most, ".4f"), shown_interval(*more, "+.4f")]
        tokens = run["batch"] * run["score"]
        cells += [f"{_typical(run['read_seconds']):.1f}"]
        cells += [f"{1000 * _typical(run['score_seconds']) / tokens:.2f}"]
        if offloaded:
            rate = run.get("fetched", {}).get("hit_rate")
            cells += ["-" if rate is None else f"{rate:.1%}"]
        lines.append(cells)
    return f"{pipe_table(head, lines)}\n{_scope(runs[0])}\n"


def pipe_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def shown_interval(value: float, low: float, high: float, form: str) -> str:
    """`1.5 [1.2, 1.8]` in a number format; the value alone where the ends are NaN."""
    if math.isnan(low):
        return f"{value:{form}}"
    return f"{value:{form}} [{low:{form}}, {high:{form}}]"


def _typical(seconds: Sequence[float]) -> float:
    """The median over batches, without the first, which compiles, if there are others."""
    return float(np.median(seconds[1:] or seconds))


def _scope(run: dict[str, Any]) -> str:
    texts = len(run["means"])
    kind = "95% by a paired bootstrap over texts" if texts > 1 else "one text has no interval"
    return (
        f"{run['protocol']}: {run['score']:,} of {run['length']:,} tokens scored, n = {texts} "
        f"texts; {kind}. Times are medians of batches of {run['batch']}."
    )


def perplexity_rows(run: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rows of one run; methods are paired by the number of the text.

    Raises:
      KeyError, TypeError: `run` is not a record of `eval perplexity`.
    """
    common = {
        "label": label(run),
        "task_label": f"perplexity {run['protocol']}",
        "length": run["length"],
        "method": {"name": run["method"], "settings": run["settings"]},
        "task": {"name": "perplexity", "settings": {"protocol": run["protocol"]}},
        "metric": f"nats a token of {run['score']:,}",
        "rows": run["batch"],
        **{key: run[key] for key in ("device", "mesh", "versions")},
    }
    return [
        common
        | {
            "index": index,
            # Earlier versions wrote no hashes: all runs of a file have the same texts.
            "prompt_sha256": run["text_hashes"][index] if "text_hashes" in run else f"text {index}",
            "measures": {"nats a token": mean},
            "curves": {
                "perplexity": [
                    [(first + last) / 2, losses[index], last - first + 1]
                    for first, last, losses in run["windows"]
                ]
            },
        }
        for index, mean in enumerate(run["means"])
    ]
