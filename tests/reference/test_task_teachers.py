"""Several teachers, one a task: each row is scored by the teacher of its problem's task."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from keel.base.errors import KeelError
from keel.kl import exact_kl
from keel.reference.kinds import build_reference
from keel.run.build import build_policy, build_run
from keel.trainer.state import State, TrainingRun
from keel.trainer.step import Step, train_step
from trainer.small import Letters, other_model, small_config, small_model

HERE = "reference.test_task_teachers"
MIXTURE = f"task={{name: mixture, tasks: [{{name: '{HERE}:a'}}, {{name: '{HERE}:b'}}]}}"
EXACT = ("loss.policy_weight=0", "kl.beta=1", "kl.estimator=exact", "rollout.prompts_per_step=6")
TEACHERS = {"a": "trainer.small:other_model", "b": f"{HERE}:wide_teacher"}


def named(teachers: dict[str, str], section: str = "reference") -> str:
    return f"{section}.model={{{', '.join(f'{task}: {name!r}' for task, name in teachers.items())}}}"


@dataclass(frozen=True)
class Named(Letters):
    name: str = "a"


def a() -> Named:
    return Named("a")


def b() -> Named:
    return Named("b")


def wide_teacher() -> tuple[Any, Any]:
    """Of another width than the policy, so that hidden states of both teachers differ in length."""
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = small_model()[1]
    config = LlamaConfig(**{**small_model()[0].config.to_dict(), "hidden_size": 24, "head_dim": 12})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(9)
        return LlamaForCausalLM(config), tokenizer


def step_of(*overrides: str) -> tuple[TrainingRun, Step]:
    config = small_config(*overrides)
    run = build_run(config, build_policy(config)).run
    return run, train_step(run, State(kl=run.controller.init()))


@pytest.mark.parametrize("budget", [8192, 30])
def test_each_row_is_scored_by_its_tasks_teacher(budget: int) -> None:
    """Against full logits of the policy and both teachers, on the step's own tokens."""
    still = (f"optim.microbatch_tokens={budget}", "optim.learning_rate=1e-12")
    run, step = step_of(MIXTURE, *EXACT, named(TEACHERS), *still)
    teachers = {"a": other_model()[0].eval(), "b": wide_teacher()[0].eval()}
    total, count, seen, row = 0.0, 0, set(), 0
    rows = step.batch.rows
    assert rows.ref_logp is not None
    with torch.no_grad():
        for group in step.batch.groups:
            task = run.task.label(group.problem)
            seen.add(task)
            for completion in group.completions:
                ids = torch.tensor([[*group.prompt_tokens, *completion.tokens]])
                first, length = len(group.prompt_tokens) - 1, len(completion.tokens)
                mine, theirs = (m(ids).logits[0, first:-1].log_softmax(-1) for m in (run.policy.model, teachers[task]))
                expected = theirs.gather(1, torch.tensor(completion.tokens)[:, None]).squeeze(1)
                assert rows.ref_logp[row, :length].tolist() == pytest.approx(expected.tolist(), abs=1e-5)
                total, count, row = total + exact_kl(mine, theirs).sum().item(), count + length, row + 1
    assert seen == {"a", "b"}
    assert step.metrics["kl/policy_ref/exact/mean"] == pytest.approx(total / count, rel=1e-4)
    assert step.metrics["grad/norm"] > 0


@pytest.mark.parametrize("form", [["estimator=exact"], ["estimator=k1", "placement=advantage"]], ids=str)
def test_one_teacher_for_all_tasks_is_that_teacher(form: list[str]) -> None:
    batch = ("loss.policy_weight=0", "rollout.prompts_per_step=6", MIXTURE)
    model, first = "trainer.small:other_model", [f"kl.{option}" for option in form]
    alone = step_of(*batch, "kl.beta=1", *first, f"reference.model={model}")[1].metrics
    same = dict.fromkeys(("a", "b"), model)
    beside = [f"kl.teacher.{option}" for option in form]
    for options in (["kl.beta=1", *first, named(same)], ["kl.beta=0", *beside, named(same, "kl.teacher")]):
        by_task = step_of(*batch, *options)[1].metrics
        assert by_task["loss/kl"] == pytest.approx(alone["loss/kl"], rel=1e-6)
        assert by_task["grad/norm"] == pytest.approx(alone["grad/norm"], rel=1e-5)


def test_a_checkpoint_knows_both_teachers() -> None:
    (first, _), (other, _) = (step_of(MIXTURE, *EXACT, named({**TEACHERS, "b": name})) for name in TEACHERS.values())
    assert first.reference is not None
    assert other.reference is not None
    saved = other.reference.state_dict()
    other.reference.load_state_dict(saved)
    assert saved["weights"] == {}
    with pytest.raises(KeelError, match="fingerprint"):
        first.reference.load_state_dict(saved)


def test_the_fingerprint_says_who_teaches_what_in_any_order() -> None:
    loaded = build_policy(small_config())
    swapped = dict(zip(TEACHERS, reversed(TEACHERS.values()), strict=True))
    one, same, other = (
        build_reference("frozen", loaded, model=models).fingerprint()
        for models in (TEACHERS, dict(reversed(TEACHERS.items())), swapped)
    )
    assert one == same != other


@pytest.mark.parametrize(
    ("teachers", "names"),
    [({"a": TEACHERS["a"]}, "task b"), ({**TEACHERS, "c": TEACHERS["a"]}, r"reference\.model.*'?c'?")],
)
def test_teachers_and_tasks_that_do_not_match_are_refused(teachers: dict[str, str], names: str) -> None:
    with pytest.raises(KeelError, match=names) as error:
        step_of(MIXTURE, *EXACT, named(teachers))
    assert "\n" not in str(error.value)
