"""Build a configuration's reference and teachers, and check teachers before anything is trained."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from keel.base.errors import KeelError, unknown
from keel.config import Config, kl_pairing, kl_terms
from keel.envs import Task
from keel.kl import controller_from_options
from keel.models.head import causal_lm
from keel.models.load import find_loader
from keel.models.loaded import LoadedModel
from keel.reference import Reference
from keel.reference.base import is_server
from keel.reference.kinds import build_reference, build_teacher
from keel.reference.server import check_server
from keel.trainer.integrity import check_model
from keel.trainer.state import Anchor


def check_teachers(config: Config) -> None:
    """Refuse a teacher (such as another run's checkpoint) that is missing, or was damaged after it was saved."""
    for section, (model, params) in config.teachers.items():
        for name in [model] if isinstance(model, str) else model.values():
            if is_server(name):
                check_server(name, params.get("headers"), f"{section}.model")
                continue
            try:
                find_loader(name)
                check_model(Path(name).expanduser())
            except KeelError as error:
                raise KeelError(f"{section}.model: {error}") from None


def check_task_teachers(section: str, model: str | Mapping[str, str], task: Task) -> None:
    """Refuse teachers by task if a task has none, or if there is no such task."""
    if isinstance(model, str):
        return
    labels = task.labels()
    for label in labels:
        if label not in model:
            raise KeelError(
                f"{section}.model has no teacher for the task {label}: give one for each of {', '.join(labels)}"
            )
    for label in model:
        if label not in labels:
            raise unknown(f"task of {section}.model", label, labels)


def teacher_of(config: Config, loaded: LoadedModel) -> Reference | None:
    """The teacher of `kl.teacher`; None if none is configured, or its KL is neither used nor measured."""
    term = config.kl.teacher
    if term is None or not (term.penalizes or config.kl.measure_every > 0):
        return None
    return build_teacher("kl.teacher", loaded, term.model, **term.params)


def reference_of(config: Config, loaded: LoadedModel) -> Any:
    """The configured reference of the current policy; None if no KL is used or measured."""
    needed = config.needs_reference or config.kl.collect_max is not None
    rows = causal_lm(loaded.model).get_output_embeddings().weight.shape[0]
    for option, term in kl_terms(config.kl).items():
        if term.estimator.startswith("topk") and term.topk >= rows:
            raise KeelError(
                f"{option}.topk is {term.topk} and the model has {rows} tokens: set it below that, or use exact"
            )
    return build_reference(config.reference.kind, loaded, **config.reference.params) if needed else None


def teacher_anchor(config: Config, teacher: Reference | None, off_policy: bool) -> Anchor | None:
    """The teacher beside the reference, with its own KL term."""
    term = config.kl.teacher
    if term is None or teacher is None:
        return None
    pairing = kl_pairing(config, term, off_policy=off_policy)
    return Anchor("teacher", teacher, term, pairing, controller_from_options(term, config.episodes_per_step))
