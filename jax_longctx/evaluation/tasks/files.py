"""LongBench, L-Eval and InfiniteBench from the files that their authors publish.

Nothing is fetched: the files are the user's. Prompts come in the file's order, each as long as it
is. One that is longer than the tokens asked for is given all the same, its length says so, and
whoever runs it refuses it: no text is cut.
"""

import dataclasses
from collections.abc import Iterator

from jax_longctx.evaluation.haystack import source_name
from jax_longctx.evaluation.tasks.file_formats import FORMATS, read_records
from jax_longctx.evaluation.tasks.file_scores import score_file_answer
from jax_longctx.evaluation.tasks.task import Count, PlainTask, Sample, at_least, fixed, make_sample

__all__ = ["FileTask", "file_tasks"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class FileTask(PlainTask):
    """A published benchmark's own file: its prompts, its metric.

    Attributes:
      file: the path of a file in the format.
      answer_tokens: most tokens of an answer; None for the authors' own of the data set.
    """

    name: str = fixed("longbench")
    metric: str = fixed("the data set's own")

    file: str = ""
    answer_tokens: int | None = None

    def __post_init__(self):
        if self.answer_tokens is not None:
            at_least(1, answer_tokens=self.answer_tokens)

    @property
    def label(self) -> str:
        """With the file's name."""
        return f"{self.name}@{source_name(self.file)}" if self.file else self.name

    @property
    def max_new(self) -> int:
        """What was asked for, or the most that the authors grant an answer of the file."""
        if self.answer_tokens is not None:
            return self.answer_tokens
        return max(record.max_new for record in read_records(self.name, self.file))

    def samples(self, count: Count, *, tokens: int, trials: int, seed: int) -> Iterator[Sample]:
        """The file's first prompts, whatever the seed and as long as they are. See `Task`."""
        prefix = "\n\nAnswer:"
        for index, record in enumerate(read_records(self.name, self.file)[:trials]):
            yield make_sample(
                count,
                index=index,
                context=record.context,
                tokens=count(record.context),
                query=record.query,
                answer_prefix=prefix,
                outputs=record.outputs,
                max_new=self.max_new,
                meta={
                    "dataset": record.dataset,
                    "metric": record.metric,
                    "choices": list(record.choices),
                },
            )

    def score(self, answer: str, sample: Sample) -> float:
        """By the metric of the prompt's data set, named in its facts."""
        metric, choices = sample.meta["metric"], sample.meta["choices"]
        return score_file_answer(metric, answer, sample.outputs, choices)

    def parts(self, answer: str, sample: Sample) -> dict[str, float]:
        """The score under its metric's name."""
        return {sample.meta["metric"]: self.score(answer, sample)}


def file_tasks() -> tuple[FileTask, ...]:
    """One for every format."""
    return tuple(FileTask(name=name) for name in FORMATS)
