"""Two anchors at once: a teacher and a frozen reference, each with its own KL term and controller."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import keel
from keel.base.errors import KeelError
from keel.base.types import Batch, Scores
from keel.config.checks import advice
from keel.envs.curriculum import Curriculum
from keel.kl import exact_kl
from keel.kl.options import KLOptions, KLTermOptions, TeacherOptions
from keel.losses import Counts, KLTerm, LossOptions, count_denominators, objective
from keel.models.head import causal_lm
from keel.run.build import build_policy, build_run
from keel.trainer.batch import pack_step, score_micro
from keel.trainer.sample import sample_groups
from keel.trainer.state import State, TrainingRun
from keel.trainer.step import Step, other_terms, score, train_step
from keel.trainer.summary import model_card
from run.test_resume import lines
from trainer.small import BASE, other_model, small_config, small_model

TEACHER = "kl.teacher.model=trainer.small:other_model"
ALONE = "loss.policy_weight=0"
MASK = torch.ones(1, 1, dtype=torch.bool)


def divergence(name: str, policy: Tensor, other: Tensor) -> Tensor:
    """What the estimator's expected gradient is that of, from its definition."""
    p, q = policy.exp(), other.exp()
    return (q * (other - policy)).sum() if name == "exact_reverse" else (p * (policy - other)).sum()


def against(policy: Tensor, other: Tensor, token: int, options: KLTermOptions, beta: float) -> tuple[Scores, Batch]:
    """Scores and batch of one drawn token, as an anchor sees it."""
    scores = Scores(
        policy[token].view(1, 1),
        exact_kl=exact_kl(policy, other).view(1, 1),
        ref_policy_kl=exact_kl(policy, other, "ref_policy").view(1, 1),
    )
    batch = Batch(MASK, advantages=torch.zeros(1), ref_logp=other[token].view(1, 1))
    if options.placement == "reward":
        batch = replace(batch, kl_advantages=-beta * (policy[token] - other[token]).detach().view(1))
    return scores, batch


@pytest.mark.parametrize(
    ("mine", "theirs"),
    list(
        product(
            [("exact", "loss"), ("k1", "advantage"), ("k3", "loss")],
            [("exact", "loss"), ("exact_reverse", "loss"), ("k1", "advantage"), ("k2", "loss"), ("k1", "reward")],
        )
    ),
    ids=str,
)
def test_the_expected_gradient_is_the_sum_of_both_by_enumeration(
    mine: tuple[str, str], theirs: tuple[str, str]
) -> None:
    """One token over a small vocabulary: the gradient of each draw, weighed by its probability."""
    torch.manual_seed(3)
    leaf = torch.randn(7, dtype=torch.float64, requires_grad=True)
    reference, teacher = torch.randn(2, 7, dtype=torch.float64).log_softmax(-1)
    kl = KLOptions(estimator=mine[0], placement=mine[1])
    own = TeacherOptions(model="t", estimator=theirs[0], placement=theirs[1])
    counts = Counts(count_denominators(MASK), count_denominators(MASK))
    expected = torch.zeros_like(leaf)
    for token, weight in enumerate(leaf.detach().softmax(-1)):
        policy = leaf.log_softmax(-1)
        scores, batch = against(policy, reference, token, kl, 0.3)
        more = KLTerm("teacher", own, 0.7, own.pairing(), *against(policy, teacher, token, own, 0.7))
        out = objective(scores, batch, LossOptions(policy_weight=0.0), kl, 0.3, counts, more=[more])
        expected += weight * torch.autograd.grad(out.loss, leaf)[0]
    policy = leaf.log_softmax(-1)
    both = 0.3 * divergence(mine[0], policy, reference) + 0.7 * divergence(theirs[0], policy, teacher)
    assert (expected - torch.autograd.grad(both, leaf)[0]).abs().max() < 1e-10


def leave_reference(policy: nn.Module) -> None:
    with torch.no_grad():
        for number, parameter in enumerate(policy.parameters()):
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number)), alpha=0.1)


def gradient_of(*overrides: str) -> tuple[Step, list[Tensor]]:
    """The first step of a run whose policy has left its reference, and the gradient of its loss."""
    run = built(TEACHER, "loss.scale_rewards=none", "optim.max_grad_norm=1e9", "guards.on_step0_kl=warn", *overrides)
    leave_reference(run.policy.model)
    run.engine.sync(run.policy.model, 0)
    gradients: list[Tensor] = []

    def keep(info: Any, **guard: Any) -> Any:
        gradients.extend(p.grad.clone() for p in run.optimizer.parameters if p.grad is not None)
        return step(info, **guard)

    step, run.optimizer.step = run.optimizer.step, keep  # type: ignore[method-assign]
    return train_step(run, State(kl=run.controller.init())), gradients


def test_the_steps_gradient_is_that_of_both_sums_over_the_vocabulary() -> None:
    """Against full logits of three models, on the step's own tokens; to 1e-10 above, here as fp32 has it."""
    step, gradients = gradient_of(
        ALONE, "kl.beta=0.2", "kl.estimator=exact", "kl.teacher.beta=0.5", "kl.teacher.estimator=exact_reverse"
    )
    policy, reference, teacher = small_model()[0], small_model()[0], other_model()[0]
    leave_reference(policy)
    total, count = torch.zeros(()), 0
    for group in step.batch.groups:
        for completion in group.completions:
            ids = torch.tensor([[*group.prompt_tokens, *completion.tokens]])
            first = len(group.prompt_tokens) - 1
            own, ref, other = (m(ids).logits[0, first:-1].log_softmax(-1) for m in (policy, reference, teacher))
            total = total + 0.2 * (own.exp() * (own - ref.detach())).sum()
            total = total + 0.5 * (other.detach().exp() * (other.detach() - own)).sum()
            count += len(completion.tokens)
    (total / count).backward()
    assert step.metrics["loss/total"] == pytest.approx(total.item() / count, rel=1e-5)
    for got, parameter in zip(gradients, policy.parameters(), strict=True):
        assert parameter.grad is not None
        assert (got - parameter.grad).abs().max() < 1e-5 * parameter.grad.abs().max()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mine", "theirs"),
    [
        (["estimator=k3"], ["estimator=exact"]),
        (["estimator=k1", "placement=reward"], ["estimator=k1", "placement=reward"]),
        (["estimator=exact", "level=sequence"], ["estimator=k1", "placement=advantage", "level=sequence"]),
        (["estimator=topk_unbiased", "topk=5"], ["estimator=jsd", "jsd_weight=0.3"]),
    ],
    ids=str,
)
def test_the_gradient_is_the_sum_of_each_alone(mine: list[str], theirs: list[str]) -> None:
    """Beside the policy term, which is in all of them."""
    terms = [*(f"kl.{option}" for option in mine), *(f"kl.teacher.{option}" for option in theirs)]
    betas = ((0.2, 0.5), (0.0, 0.0), (0.2, 0.0), (0.0, 0.5))
    runs = [gradient_of(*terms, f"kl.beta={beta}", f"kl.teacher.beta={other}") for beta, other in betas]
    together, neither, first, second = (gradients for _, gradients in runs)
    shares = [
        (step.metrics["loss/kl"] - step.metrics["loss/kl_teacher"], step.metrics["loss/kl_teacher"]) for step, _ in runs
    ]
    assert [[share != 0.0 for share in each] for each in shares] == [[beta > 0 for beta in each] for each in betas]
    for whole, base, one, other in zip(together, neither, first, second, strict=True):
        size = max(float(part.abs().max()) for part in (whole, base, one, other))
        assert (whole + base - one - other).abs().max() < 1e-5 * size
        assert (one - base).abs().max() > 1e-4 * size
        assert (other - base).abs().max() > 1e-4 * size


def metrics_of(*overrides: str) -> dict[str, float]:
    config = small_config(*overrides)
    run = build_run(config, build_policy(config)).run
    state = State(kl=run.controller.init())
    for _ in range(2):
        step = train_step(run, state)
        state = step.state
    timed = ("time/", "speed/", "memory/")
    return {name: value for name, value in step.metrics.items() if not name.startswith(timed)}


def test_a_teacher_that_is_only_measured_changes_no_number() -> None:
    without, beside = metrics_of("kl.exact=true"), metrics_of("kl.exact=true", TEACHER, "kl.teacher.beta=0")
    own = {name for name in beside if "teacher" in name}
    assert {name: value for name, value in beside.items() if name not in own} == without
    assert {name for name in own if name.startswith("kl/policy_teacher/k3")} == {
        f"kl/policy_teacher/k3/{part}" for part in ("mean", "se", "min", "max", "p95")
    }
    assert {"kl/beta_teacher", "loss/kl_teacher", "logp/teacher_mean"} <= own
    assert beside["kl/beta_teacher"] == beside["loss/kl_teacher"] == 0.0


def test_the_teachers_numbers_are_those_it_has_as_the_reference() -> None:
    """With the same weights at work: β = 0 on both."""
    beside = metrics_of("kl.beta=0", TEACHER, "kl.teacher.beta=0", "kl.teacher.exact=true")
    alone = metrics_of("kl.beta=0", "reference.model=trainer.small:other_model", "kl.exact=true")
    for name, value in alone.items():
        if name.startswith(("kl/policy_ref", "kl/ref_policy", "logp/ref")):
            assert beside[name.replace("ref", "teacher", 1)] == value


def test_one_pass_serves_all_microbatches_of_both() -> None:
    """Scores of a microbatch hold each anchor's own, of the same log-probabilities."""
    config = small_config(TEACHER, "kl.teacher.estimator=exact", "optim.microbatch_tokens=24")
    run = build_run(config, build_policy(config)).run
    state = State(kl=run.controller.init())
    groups = sample_groups(run, run.collect, 0, 0, Curriculum()).groups
    batch = score(pack_step(groups, run), run, state)
    assert len(batch.micros) > 1
    for micro in batch.micros:
        scores = score_micro(micro, batch, run)
        (term,) = other_terms(scores, batch, micro, run, state)
        assert scores.exact_kl is None
        assert term.scores.exact_kl is not None
        assert term.scores.logp is scores.logp
        assert term.batch.ref_logp is not None
        assert not torch.equal(term.batch.ref_logp, batch.view(micro).ref_logp)


def built(*overrides: str) -> TrainingRun:
    config = small_config(*overrides)
    return build_run(config, build_policy(config)).run


STEERED = (
    TEACHER,
    "kl.controller={name: pid, target: 0.02}",
    "kl.teacher.controller={name: dual, target: 0.1, high: 5}",
    "kl.teacher.estimator=exact",
)


@pytest.mark.slow
def test_each_controller_follows_its_own_kl_and_resume_is_exact(tmp_path: Path) -> None:
    def options(name: str, steps: int) -> list[str]:
        return [*STEERED, f"run.dir={tmp_path}", f"run.name={name}", f"run.max_steps={steps}", "checkpoint.every=2"]

    whole = keel.train(BASE, overrides=options("whole", 4)).directory
    begun = keel.train(BASE, overrides=options("begun", 2)).directory
    keel.train(BASE, overrides=options("begun", 4), resume=True)
    assert lines(begun, "metrics.jsonl") == lines(whole, "metrics.jsonl")
    betas = [[line[name] for line in lines(whole, "metrics.jsonl")] for name in ("kl/beta", "kl/beta_teacher")]
    assert all(len(set(values)) > 1 for values in betas)
    assert betas[1] == sorted(betas[1])  # far from the teacher: it pulls harder
    record = (begun / "checkpoints" / "step-2" / "trainer" / "state.json").read_text()
    assert '"teacher"' in record
    with pytest.raises(KeelError, match=r"kl\.teacher\.model"):
        keel.train(BASE, overrides=[*options("begun", 6), "kl.teacher.model=trainer.small:small_model"], resume=True)


@pytest.mark.slow
def test_a_damaged_teacher_file_costs_one_checkpoint(tmp_path: Path) -> None:
    def options(steps: int) -> list[str]:
        return [TEACHER, f"run.dir={tmp_path}", f"run.max_steps={steps}", "checkpoint.every=1"]

    folder = keel.train(BASE, overrides=options(2)).directory
    (folder / "checkpoints" / "step-2" / "trainer" / "teacher.pt").write_bytes(b"damaged")
    keel.train(BASE, overrides=options(3), resume=True)
    assert [line["step"] for line in lines(folder, "metrics.jsonl")] == [1, 2, 3]


def test_states_saved_before_there_were_two_anchors_are_read() -> None:
    saved = State(kl=built(TEACHER).controller.init(), step=3).to_dict()
    assert State.from_dict(saved).to_dict() == saved
    del saved["other_kl"]
    assert State.from_dict(saved).other_kl == {}


def test_the_card_names_both_terms() -> None:
    run = built(TEACHER, "kl.teacher.estimator=exact")
    card = model_card(run, State(kl=run.controller.init()), {})
    for line in (
        "β = 0.01, k3 in the loss; β = 1, exact in the loss (teacher)",
        "frozen, teacher trainer.small:other_model",
    ):
        assert line in card


def test_a_warm_up_of_the_teachers_that_outlasts_the_run_is_noted() -> None:
    config = small_config(TEACHER, "kl.teacher.controller={name: warmup, steps: 9}", "run.max_steps=3")
    assert any("kl.teacher.controller.steps is 9" in note for note in advice(config))


def test_lora_keeps_the_base_as_teacher_and_its_adapter_as_reference() -> None:
    """Three policies on one set of weights; the base is another policy than the adapter with a past."""
    config = small_config(
        "model.lora={r: 4}", "kl.teacher.model=trainer.small:small_model", "kl.teacher.estimator=exact", ALONE
    )
    loaded = build_policy(config)
    with torch.no_grad():
        for name, parameter in loaded.model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(generator=torch.Generator().manual_seed(0), std=0.3)
    run = build_run(config, loaded).run
    step = train_step(run, State(kl=run.controller.init()))
    assert run.teacher is not None
    assert run.teacher.reference is not None
    with run.teacher.reference.model() as model:
        assert causal_lm(model) is causal_lm(loaded.model)
    assert step.metrics["kl/policy_ref/k3/mean"] == pytest.approx(0.0, abs=1e-9)
    assert step.metrics["kl/policy_teacher/exact/mean"] > 1e-3


@pytest.mark.parametrize(
    ("overrides", "names"),
    [
        ([TEACHER, "reference.model=trainer.small:small_model"], r"kl\.teacher.*reference\.model"),
        ([TEACHER, "kl.teacher.estimator=k1", "kl.teacher.gradient=plain"], r"kl\.teacher: .*zero"),
        ([TEACHER, "kl.teacher.estimator=k3", "kl.teacher.placement=reward"], r"kl\.teacher: .*(wrong|no divergence)"),
        ([TEACHER, "kl.teacher.dtyp=float32"], "dtyp"),
        ([TEACHER, "kl.teacher.offload=3"], r"kl\.teacher\.offload"),
        ([TEACHER, "kl.teacher.topk=3"], r"kl\.teacher\.topk"),
        ([TEACHER, "kl.teacher.estimator=topk", "kl.teacher.topk=9999"], r"kl\.teacher\.topk"),
        (["kl.teacher.beta=1"], r"kl\.teacher\.model"),
        ([TEACHER, "kl.teacher.controller={name: pid}"], "target"),
        ([TEACHER, ALONE, "kl.teacher.beta=0", "kl.beta=0"], r"kl\.teacher\.beta"),
        ([TEACHER, ALONE, "kl.teacher.beta=0"], r"reference\.model"),
        (["kl.teacher.model=reference.test_teacher:narrow_teacher"], r"kl\.teacher\.model=.*logits"),
        (
            ["kl.teacher.model=reference.test_teacher:teacher_of_another_template"],
            r"kl\.teacher\.chat_template=student",
        ),
        (
            [TEACHER, "kl.teacher.controller={name: pid, target: 1}", "kl.measure_every=0", "kl.beta=0"],
            r"kl\.teacher: .*measure_every",
        ),
    ],
)
def test_what_two_anchors_cannot_be_is_refused(overrides: list[str], names: str) -> None:
    with pytest.raises(KeelError, match=names) as error:
        built(*overrides)
    assert "\n" not in str(error.value)
