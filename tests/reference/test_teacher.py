"""A teacher: the reference is another model, and the KL to it may train alone."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from keel.base.errors import KeelError
from keel.config import load_config
from keel.kl import exact_kl
from keel.models.head import causal_lm
from keel.run.build import build_policy, build_run
from keel.trainer.state import State
from keel.trainer.step import train_step
from trainer.small import BASE, other_model, small_config, small_model

ALONE = ("loss.policy_weight=0", "kl.beta=1", "kl.exact=true")  # the KL alone


def of(name: str) -> str:
    return f"reference.model=reference.test_teacher:{name}"


DISTILLED = (*ALONE, "reference.model=trainer.small:other_model")


def padded_teacher() -> tuple[Any, Any]:
    """The same with 9 rows of padding, which give the largest logits."""
    model, tokenizer = small_model(5)
    tied = model.lm_head.weight.detach()
    head = nn.Linear(tied.shape[1], len(tied) + 9, bias=False)
    with torch.no_grad():
        head.weight.copy_(torch.cat((tied, 50 * tied[:9])))
    model.lm_head = head
    model.config.tie_word_embeddings = False
    return model, tokenizer


def narrow_teacher() -> tuple[Any, Any]:
    model, tokenizer = small_model(5)
    model.lm_head = nn.Linear(16, model.config.vocab_size - 1, bias=False)
    return model, tokenizer


def teacher_of_other_tokens() -> tuple[Any, Any]:
    model, tokenizer = small_model(5)
    tokenizer.add_tokens(["<more>"])
    model.resize_token_embeddings(len(tokenizer))
    return model, tokenizer


def teacher_of_another_template() -> tuple[Any, Any]:
    model, tokenizer = small_model(5)
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    return model, tokenizer


def step_of(*overrides: str) -> Any:
    config = small_config(*overrides)
    run = build_run(config, build_policy(config)).run
    return run, train_step(run, State(kl=run.controller.init()))


def test_the_kl_is_to_the_teacher() -> None:
    """Against full logits of both models, on the step's own tokens."""
    run, step = step_of(*DISTILLED, "optim.learning_rate=1e-12")
    policy, other = run.policy.model, other_model()[0].eval()
    total, count = 0.0, 0
    with torch.no_grad():
        for group in step.batch.groups:
            for completion in group.completions:
                ids = torch.tensor([[*group.prompt_tokens, *completion.tokens]])
                first = len(group.prompt_tokens) - 1
                mine, theirs = (model(ids).logits[0, first:-1].log_softmax(-1) for model in (policy, other))
                total += exact_kl(mine, theirs).sum().item()
                count += len(completion.tokens)
    assert step.metrics["kl/policy_ref/exact/mean"] == pytest.approx(total / count, rel=1e-4)
    assert step.metrics["loss/total"] == pytest.approx(step.metrics["loss/kl"])


@pytest.mark.parametrize("estimator", ["exact", "exact_reverse", "jsd", "topk", "topk_unbiased", "k3"])
def test_a_teacher_equal_to_the_student_gives_zero(estimator: str) -> None:
    same = "reference.model=trainer.small:small_model"
    _, step = step_of(*ALONE, same, f"kl.estimator={estimator}")
    assert step.metrics["kl/policy_ref/exact/mean"] == 0.0
    assert step.metrics["loss/total"] == pytest.approx(0.0, abs=1e-7)
    assert step.metrics["grad/norm"] < 1e-6


@pytest.mark.parametrize(
    "form",
    [
        ["kl.estimator=exact"],
        ["kl.estimator=exact_reverse"],
        ["kl.estimator=jsd", "kl.jsd_weight=0.3"],
        ["kl.estimator=topk", "kl.topk=20"],
        ["kl.estimator=topk_unbiased", "kl.topk=20"],
        ["kl.estimator=k1", "kl.placement=advantage"],
        ["kl.estimator=exact", "kl.level=sequence"],
    ],
    ids=" ".join,
)
def test_the_policy_comes_nearer(form: list[str]) -> None:
    config = small_config(*DISTILLED, *form, "rollout.prompts_per_step=8")
    run = build_run(config, build_policy(config)).run
    state, first, last = State(kl=run.controller.init()), None, None
    for _ in range(12):
        step = train_step(run, state)
        state, last = step.state, step.metrics["kl/policy_ref/exact/mean"]
        first = last if first is None else first
    assert first is not None
    assert last is not None
    assert last < 0.8 * first


def test_padding_of_the_teachers_head_is_cut_off() -> None:
    plain, padded = (step_of(*ALONE, of(name))[1].metrics for name in ("other_model", "padded_teacher"))
    assert padded["kl/policy_ref/exact/mean"] == plain["kl/policy_ref/exact/mean"]
    assert padded["loss/total"] == plain["loss/total"]


def test_lora_with_the_base_as_teacher_holds_no_second_copy() -> None:
    """The adapter has a past, so that the base is another policy."""
    base = "reference.model=trainer.small:small_model"
    config = small_config(*ALONE, base, "model.lora={r: 4}")
    loaded = build_policy(config)
    with torch.no_grad():
        for name, parameter in loaded.model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(generator=torch.Generator().manual_seed(0), std=0.3)
    run = build_run(config, loaded).run
    step = train_step(run, State(kl=run.controller.init()))
    assert run.reference is not None
    with run.reference.model() as model:
        assert causal_lm(model) is causal_lm(loaded.model)
        ids, plain = torch.arange(9).unsqueeze(0), small_model()[0].eval()
        assert torch.equal(model(ids).logits, plain(ids).logits)
    assert run.reference.state_dict()["weights"] == {}
    assert step.metrics["kl/policy_ref/exact/mean"] > 1e-3


@pytest.mark.parametrize(
    ("name", "names"),
    [
        ("teacher_of_other_tokens", "<more>"),
        ("narrow_teacher", "logits"),
        ("teacher_of_another_template", r"reference\.chat_template=student"),
    ],
)
def test_a_teacher_that_does_not_fit_is_refused(name: str, names: str) -> None:
    config = small_config(*ALONE, of(name))
    with pytest.raises(KeelError, match=names):
        build_run(config, build_policy(config))


def test_another_template_by_name() -> None:
    step_of(*ALONE, of("teacher_of_another_template"), "reference.chat_template=student")


@pytest.mark.parametrize(
    ("overrides", "names"),
    [
        (["loss.policy_weight=0", "kl.beta=1"], r"reference\.model"),
        (["loss.policy_weight=0", "kl.beta=0", DISTILLED[-1]], r"kl\.beta=1"),
        (["reference.dtype=float32"], r"reference\.dtype.*reference\.model"),
    ],
)
def test_what_would_train_nothing_is_refused(overrides: list[str], names: str) -> None:
    with pytest.raises(KeelError, match=names):
        step_of(*overrides)


def test_prompts_alone_are_enough(tmp_path: Path) -> None:
    rows = tmp_path / "prompts.jsonl"
    rows.write_text("".join(f'{{"prompt": "ask {i}"}}\n' for i in range(12)))
    without_rewards = {name: section for name, section in BASE.items() if name != "rewards"}
    config = load_config(without_rewards, [*DISTILLED, "task={name: dataset}", f"data.path={rows}"])
    run = build_run(config, build_policy(config)).run
    step = train_step(run, State(kl=run.controller.init()))
    assert step.metrics["reward/mean"] == 0.0
    assert step.metrics["grad/norm"] > 0


def test_a_checkpoint_holds_the_teachers_fingerprint_alone() -> None:
    config = small_config(*DISTILLED)
    reference = build_run(config, build_policy(config)).run.reference
    assert reference is not None
    saved = reference.state_dict()
    assert saved["weights"] == {}
    reference.load_state_dict(saved)
    with reference.model() as model, torch.no_grad():
        next(causal_lm(model).parameters()).add_(1e-3)
    with pytest.raises(KeelError, match="fingerprint"):
        reference.load_state_dict(saved)


@pytest.mark.parametrize("section", ["reference", "kl.teacher"])
def test_a_teacher_that_is_not_there_is_refused_before_the_policy_loads(section: str) -> None:
    config = small_config(f"{section}.model=runs/none/checkpoints/step-9", "model.name=no/such:loader")
    with pytest.raises(KeelError, match=rf"{re.escape(section)}\.model: .*runs/none/checkpoints/step-9"):
        build_policy(config)
