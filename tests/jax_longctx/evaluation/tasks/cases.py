"""One case a task: settings, a length, and who answers it from the prompt alone.

The answerers read prompts by regular expressions, as written here, and share nothing with the
generators.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping

from jax_longctx.evaluation.tasks import Sample


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """How a task is checked.

    Attributes:
      answer: the right answer, read from the prompt.
      slack: most words that may be missing to the length asked for.
      tokens: words of a prompt.
      settings: the task's.
      hidden: whether the right answers stand in the context, that many times each, and neither
        in the query nor in the answer prefix; 0 where they need not.
    """

    answer: Callable[[Sample], str]
    slack: int
    tokens: int = 600
    settings: Mapping[str, object] = dataclasses.field(default_factory=dict)
    hidden: int = 1


def passkey(sample: Sample) -> str:
    (key,) = set(re.findall(r"\d{5}", sample.context))
    return f" {key}."


CASES: dict[str, Case] = {
    "passkey": Case(answer=passkey, slack=5, hidden=2),
}
