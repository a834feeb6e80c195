"""A teacher: another model as the reference, from which the policy is distilled."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from hashlib import sha256
from typing import Any, Literal

import torch
from torch import nn

from keel.base.errors import KeelError
from keel.models.fingerprint import fingerprint
from keel.models.head import causal_lm, evaluating
from keel.models.load import load_model
from keel.models.options import LoadedModel
from keel.reference.base import RuleReference
from keel.reference.weights import FrozenWeights, NoSingleModel, OffloadedTensors, Sharder, movable


class TeacherWeights(FrozenWeights):
    """Another model's weights."""

    def __init__(self, teacher: LoadedModel, *, elsewhere: torch.device | None = None, offload: bool = False) -> None:
        self._model = teacher.model.eval().requires_grad_(False)
        self._elsewhere = elsewhere
        self._offloaded = OffloadedTensors(movable(self._model)) if offload else None

    @contextmanager
    def model(self) -> Iterator[nn.Module]:
        with self._offloaded.on_device() if self._offloaded else nullcontext(), evaluating(self._model):
            yield self._model

    def fingerprint(self) -> str:
        return fingerprint(self._model)

    def shard(self, sharder: Sharder) -> None:
        if self._elsewhere is not None:
            raise KeelError(
                f"the teacher's device is {self._elsewhere}, but its weights would be sharded like the policy's: "
                "set parallel.sharding=none, or leave the teacher's device out"
            )
        offloaded, self._offloaded = self._offloaded, None
        if offloaded is not None:
            offloaded.restore()
        sharder(self._model, offload=offloaded is not None)


class TaskTeachers(FrozenWeights):
    """The weights of several teachers, each for the problems of one task."""

    def __init__(self, by_task: Mapping[str, RuleReference]) -> None:
        self._by_task = by_task
        self._teachers = tuple({id(teacher): teacher for teacher in by_task.values()}.values())

    def model(self) -> AbstractContextManager[nn.Module]:
        raise NoSingleModel(
            "one model is needed here, but each task has its own teacher: name one teacher for all tasks"
        )

    def fingerprint(self) -> str:
        """A digest that does not depend on the order of the tasks."""
        digests = {id(teacher): teacher.fingerprint() for teacher in self._teachers}
        lines = sorted(f"{task}={digests[id(teacher)]}" for task, teacher in self._by_task.items())
        return sha256("\n".join(lines).encode()).hexdigest()

    def shard(self, sharder: Sharder) -> None:
        for teacher in self._teachers:
            teacher.shard(sharder)


def load_teacher(
    policy: LoadedModel,
    name: str,
    *,
    dtype: str = "auto",
    device: str = "auto",
    quantization: Literal["4bit", "8bit"] | None = None,
    chat_template: str = "same",
    trust_remote_code: bool = False,
    section: str = "reference",
) -> LoadedModel:
    """Load the model `name` as a teacher, by default on the policy's device. Refuse it if the KL would be undefined.

    `section` is the section of its options, for errors.
    """
    own = next(policy.model.parameters()).dtype
    wanted = str(own).removeprefix("torch.") if dtype == "auto" else dtype
    attention = getattr(causal_lm(policy.model).config, "_attn_implementation", None) or "sdpa"
    teacher = load_model(
        name,
        section=section,
        frozen=True,
        dtype=wanted,
        device=str(policy.device) if device == "auto" else device,
        quantization=quantization,
        attn_implementation=attention,
        trust_remote_code=trust_remote_code,
    )
    check_tokens(policy, teacher, section)
    if chat_template == "same" and template_of(teacher) != template_of(policy):
        raise KeelError(
            f"{section}.model={name} has another chat template than {policy.name}, which renders the prompts: set "
            f"{section}.chat_template=student if the teacher was trained on that template, or use another teacher"
        )
    return teacher


def template_of(loaded: LoadedModel) -> Any:
    """The tokenizer's chat template, or None."""
    return getattr(loaded.tokenizer, "chat_template", None)


def check_tokens(policy: LoadedModel, teacher: LoadedModel, section: str = "reference") -> None:
    """Refuse a vocabulary other than the policy's. Remove rows of the teacher's head beyond the policy's."""
    mine, theirs = policy.tokenizer.get_vocab(), teacher.tokenizer.get_vocab()
    if mine != theirs:
        differ = min((t for t in {*mine, *theirs} if mine.get(t) != theirs.get(t)), key=str)
        raise KeelError(
            f"{section}.model={teacher.name} has another vocabulary than {policy.name}: {differ!r} has id "
            f"{theirs.get(differ)} there and {mine.get(differ)} here; use a teacher with the policy's tokenizer"
        )
    rows, own = (causal_lm(each.model).get_output_embeddings().weight.shape[0] for each in (teacher, policy))
    if rows < own:
        raise KeelError(
            f"{section}.model={teacher.name} gives {rows} logits and the policy gives {own}: the KL is undefined on "
            f"the policy's last {own - rows}; use a teacher whose head is at least as large"
        )
    if rows > own:
        _cut_head(teacher, own, section)


def _cut_head(teacher: LoadedModel, rows: int, section: str) -> None:
    """Keep the first `rows` rows of the head. The others belong to no token."""
    model = causal_lm(teacher.model)
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear:
        raise KeelError(
            f"{section}.model={teacher.name} has a head of {head.weight.shape[0]} rows where the policy's has {rows}, "
            f"and it is a {type(head).__name__}, which cannot be cut: use a teacher whose head has {rows} rows"
        )
    with torch.no_grad():
        cut = nn.Linear(head.in_features, rows, bias=head.bias is not None, device="meta")
        cut.weight = nn.Parameter(head.weight[:rows], requires_grad=False)
        if head.bias is not None:
            cut.bias = nn.Parameter(head.bias[:rows], requires_grad=False)
    model.set_output_embeddings(cut)
