"""Evaluation tasks: prompts drawn offline from a seed, and their scores."""

import dataclasses
import typing
from collections.abc import Mapping

from jax_longctx.evaluation.tasks.babilong import RANGES, Babilong
from jax_longctx.evaluation.tasks.chain_of_key import ChainOfKey
from jax_longctx.evaluation.tasks.files import FORMATS, FileTask
from jax_longctx.evaluation.tasks.html_tsv import HtmlTsv
from jax_longctx.evaluation.tasks.leval import LEval
from jax_longctx.evaluation.tasks.longproc import LongProc
from jax_longctx.evaluation.tasks.niah import NiahMulti, NiahSingle
from jax_longctx.evaluation.tasks.passkey import Passkey
from jax_longctx.evaluation.tasks.questions import Questions
from jax_longctx.evaluation.tasks.ruler import (
    CommonWords,
    FrequentWords,
    VariableTracking,
    ruler_niah_tasks,
)
from jax_longctx.evaluation.tasks.ruler_qa import RulerQA
from jax_longctx.evaluation.tasks.stars import CountingStars
from jax_longctx.evaluation.tasks.task import Count, Sample, Task
from jax_longctx.settings import look_up, parse_settings, type_name

__all__ = ["TASKS", "Count", "Sample", "Task", "describe", "make_task"]

_ALL: tuple[Task, ...] = (
    Passkey(),
    NiahSingle(),
    NiahMulti(),
    *ruler_niah_tasks(),
    VariableTracking(),
    CommonWords(),
    FrequentWords(),
    RulerQA(),
    RulerQA(name="qa_2", hops=2),
    ChainOfKey(),
    HtmlTsv(),
    CountingStars(),
    CountingStars(name="stars_reasoning", reasoning=True),
    # The five kinds of Star Attention's evaluation.
    *(Babilong(name=f"babilong_{kind}", kind=kind) for kind in RANGES),
    *(FileTask(name=name) for name in FORMATS),
    LEval(),
    LongProc(),
    Questions(),
)

# Every task with its default settings, the published ones where such exist.
TASKS = {task.name: task for task in _ALL}


def make_task(name: str, settings: Mapping[str, object] | None = None) -> Task:
    """The task of that name with `key=value` settings, typed and validated.

    Raises:
      ConfigError: unknown task, unknown setting, or a value of the wrong type or range.
    """
    task: typing.Any = look_up(TASKS, name, "task")
    values = parse_settings(
        type(task), settings or {}, noun="task", name=name, names=_setting_names(task)
    )
    return dataclasses.replace(task, **values)


def describe(name: str) -> dict[str, object]:
    """Description of a task, and type and default of each setting; JSON values."""
    task = look_up(TASKS, name, "task")
    hints = typing.get_type_hints(type(task))
    settings = {
        key: {"type": type_name(hints[key]), "default": getattr(task, key)}
        for key in _setting_names(task)
    }
    about = (type(task).__doc__ or "").partition("\n")[0]
    shown = {"name": name, "label": task.label, "about": about, "metric": task.metric}
    return {**shown, "settings": settings}


def _setting_names(task: typing.Any) -> list[str]:
    """Fields that a user may set: those that are not `fixed`."""
    return [field.name for field in dataclasses.fields(task) if not field.metadata.get("fixed")]
