"""A teacher behind a server that answers as vLLM does: what is learned from it, and what it may get wrong."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from keel.base.errors import KeelError
from keel.kl import exact_kl, topk_kl, topk_kl_unbiased
from keel.reference.kinds import build_reference
from keel.reference.server import KnownTokens
from keel.run.build import build_policy, build_run
from keel.trainer.state import State, TrainingRun
from keel.trainer.step import Step, train_step
from reference.logprob_server import LogprobServer, serving
from reference.test_task_teachers import MIXTURE, wide_teacher
from trainer.small import other_model, small_config, small_model

K = 6
ALONE = ("loss.policy_weight=0", "kl.beta=1")
LOCAL = "reference.model=trainer.small:other_model"
TOPK = ("kl.estimator=topk", f"kl.topk={K}")
UNBIASED = ("kl.estimator=topk_unbiased", f"kl.topk={K}")
SAMPLED = ("kl.estimator=k1", "kl.placement=advantage")


@pytest.fixture
def server() -> Iterator[LogprobServer]:
    with serving(*other_model()) as served:
        yield served


def behind(server: LogprobServer, section: str = "reference") -> tuple[str, ...]:
    return (f"{section}.model={server.url}", f"{section}.chat_template=student")


def built(*overrides: str) -> TrainingRun:
    config = small_config(*ALONE, *overrides)
    return build_run(config, build_policy(config)).run


def step_of(*overrides: str) -> tuple[TrainingRun, Step]:
    run = built(*overrides)
    return run, train_step(run, State(kl=run.controller.init()))


def distributions(run: TrainingRun, step: Step, teacher: Any) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Policy and teacher over the vocabulary, and the tokens, of each completion of a step."""
    for group in step.batch.groups:
        for completion in group.completions:
            ids = torch.tensor([[*group.prompt_tokens, *completion.tokens]])
            first = len(group.prompt_tokens) - 1
            both = (model(ids).logits[0, first:-1].log_softmax(-1) for model in (run.policy.model, teacher))
            yield *both, torch.tensor(completion.tokens)


def bucketed(policy: Tensor, teacher: Tensor) -> Tensor:
    """KL over the teacher's top K tokens and one bucket for the rest, from its definition."""
    head = teacher.topk(K, dim=-1).indices
    parts = [torch.cat((p.gather(-1, head), 1 - p.gather(-1, head).sum(-1, True)), -1) for p in (policy, teacher)]
    return (parts[0] * (parts[0] / parts[1]).log()).sum(-1)


@pytest.mark.parametrize("budget", [8192, 30])
def test_tokens_are_scored_as_the_teacher_itself_scores_them(server: LogprobServer, budget: int) -> None:
    options = (*SAMPLED, f"optim.microbatch_tokens={budget}")
    metrics = [step_of(*options, *teacher)[1].metrics for teacher in (behind(server), (LOCAL,))]
    for name in ("kl/policy_ref/k1/mean", "kl/policy_ref/sequence/mean", "logp/ref_mean", "loss/kl", "grad/norm"):
        assert metrics[0][name] == pytest.approx(metrics[1][name], rel=1e-4)
    assert not any("exact" in name for name in metrics[0])


def test_the_bucket_is_that_of_the_teachers_top_tokens(server: LogprobServer) -> None:
    """Against full logits of both models, on the step's own tokens."""
    run, step = step_of(*TOPK, *behind(server), "optim.learning_rate=1e-12")
    with torch.no_grad():
        values = [bucketed(p.double().exp(), q.double().exp()) for p, q, _ in distributions(run, step, server.model)]
    assert step.metrics["loss/kl"] == pytest.approx(torch.cat(values).mean().item(), rel=1e-4)
    assert step.metrics["grad/norm"] > 0


def states_of(teacher: Tensor, token: int) -> Tensor:
    """What a server tells of a distribution."""
    top = teacher.topk(K).indices.tolist()
    ids = [*top, len(teacher) if token in top else token]
    return torch.tensor([*map(float, ids), *(teacher[each].item() for each in (*top, token))], dtype=torch.float64)


def test_gradients_from_known_tokens_by_enumeration() -> None:
    """The bucket's, and in expectation over the sampled token that of KL(policy‖teacher), to 1e-10."""
    torch.manual_seed(0)
    for scale in (0.3, 1.0, 3.0):
        teacher = (scale * torch.randn(23, dtype=torch.float64)).log_softmax(-1)
        leaf = torch.randn(23, dtype=torch.float64, requires_grad=True)
        policy = leaf.log_softmax(-1)
        told = KnownTokens(23)(torch.stack([states_of(teacher, token) for token in range(23)]))
        assert told.exp().sum(-1).tolist() == pytest.approx([1.0] * 23, abs=1e-12)
        rows, tokens = policy.expand(23, -1), torch.arange(23)
        weights = policy.detach().exp()
        sums = {
            "bucket": (bucketed(policy.exp(), teacher.exp()), topk_kl(rows, told, K, of="reference")),
            "unbiased": (exact_kl(policy, teacher), topk_kl_unbiased(rows, told, tokens, K, of="reference")),
        }
        for expected, got in sums.values():
            mean = (weights * got).sum()
            assert mean.item() == pytest.approx(expected.item(), abs=1e-10)
            wanted, found = (torch.autograd.grad(each, leaf, retain_graph=True)[0] for each in (expected, mean))
            assert (wanted - found).abs().max() < 1e-10


def test_padding_of_the_teachers_head_belongs_to_the_rest() -> None:
    ids, logps = [3.0, 5.0, 5.0, 1.0], [-1.0, -1.5, -2.0, -3.0]  # of 5 tokens: two entries are of no token
    (row,) = KnownTokens(5)(torch.tensor([[*ids, *logps]], dtype=torch.float64)).exp()
    assert row[[1, 3]].tolist() == pytest.approx([math.exp(-3), math.exp(-1)])
    assert row[[0, 2, 4]].tolist() == pytest.approx([(1 - math.exp(-3) - math.exp(-1)) / 3] * 3)


def test_a_teacher_equal_to_the_student_gives_zero() -> None:
    with serving(*small_model()) as same:
        for form in (TOPK, UNBIASED):
            _, step = step_of(*form, *behind(same))
            assert step.metrics["loss/kl"] == pytest.approx(0.0, abs=1e-5)
            assert step.metrics["grad/norm"] < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("form", [(*TOPK[:1], "kl.topk=20"), UNBIASED, SAMPLED], ids=str)
def test_the_policy_comes_nearer(server: LogprobServer, form: tuple[str, ...]) -> None:
    run = built(*form, *behind(server), "rollout.prompts_per_step=8", "optim.learning_rate=3e-2")
    state, seen = State(kl=run.controller.init()), []
    for _ in range(5):
        step = train_step(run, state)
        state = step.state
        with torch.no_grad():
            seen.append(torch.cat([exact_kl(p, q) for p, q, _ in distributions(run, step, server.model)]).mean().item())
    assert seen[-1] < 0.8 * seen[0]


def test_beside_the_reference_and_by_task(server: LogprobServer) -> None:
    wide = wide_teacher()
    with serving(*wide) as second:
        options = [f"kl.teacher.model={{a: '{server.url}', b: '{second.url}'}}"]
        options += [
            "loss.policy_weight=0",
            "kl.beta=0.1",
            "kl.teacher.chat_template=student",
            "kl.teacher.estimator=topk",
            f"kl.teacher.topk={K}",
        ]
        config = small_config(MIXTURE, *options, "rollout.prompts_per_step=6", "optim.learning_rate=1e-12")
        run = build_run(config, build_policy(config)).run
        step = train_step(run, State(kl=run.controller.init()))
    (view,), teachers, values = step.batch.others, {"a": server.model, "b": wide[0]}, []
    groups = [run.task.label(group.problem) for group in step.batch.groups for _ in group.completions]
    assert set(groups) == {"a", "b"}
    both = [list(distributions(run, step, teachers[task])) for task in ("a", "b")]
    with torch.no_grad():
        for row, task in enumerate(groups):
            policy, teacher, tokens = both["ab".index(task)][row]
            values.append(bucketed(policy.double().exp(), teacher.double().exp()))
            assert view.rows.ref_logp is not None
            got = view.rows.ref_logp[row, : len(tokens)]
            assert got.tolist() == pytest.approx(teacher.gather(1, tokens[:, None])[:, 0].tolist(), abs=1e-5)
    assert step.metrics["loss/kl_teacher"] == pytest.approx(torch.cat(values).mean().item(), rel=1e-4)


def test_equal_completions_are_asked_once(server: LogprobServer) -> None:
    run = built(*TOPK, *behind(server))
    teacher = run.reference.server  # type: ignore[union-attr]
    server.asked.clear()
    first, again, other = teacher.score([([3, 4], [5, 6]), ([3, 4], [5, 6]), ([3], [4])], K)
    assert len(server.asked) == 2
    assert torch.equal(first, again)
    assert (first.shape, other.shape) == ((2, 2 * (K + 1)), (1, 2 * (K + 1)))


def test_secrets_come_from_the_environment(server: LogprobServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEACHER_KEY", "k-1234567")
    built(*TOPK, *behind(server), "reference.headers={Authorization: Bearer $TEACHER_KEY}")
    assert server.headers[-1]["Authorization"] == "Bearer k-1234567"
    monkeypatch.delenv("TEACHER_KEY")
    with pytest.raises(KeelError, match=r"reference\.headers names \$TEACHER_KEY"):
        built(*TOPK, *behind(server), "reference.headers={Authorization: Bearer $TEACHER_KEY}")


def test_a_resume_refuses_another_model_behind_the_same_name(server: LogprobServer) -> None:
    loaded = build_policy(small_config())

    def reference() -> Any:
        return build_reference("auto", loaded, model=server.url, chat_template="student")

    saved = reference().state_dict()
    reference().load_state_dict(saved)
    server.model = small_model(6)[0].eval()
    with pytest.raises(KeelError, match="nats per token"):
        reference().load_state_dict(saved)
    server.name = "another"
    with pytest.raises(KeelError, match="fingerprint"):
        reference().load_state_dict(reference().state_dict() | {"fingerprint": saved["fingerprint"]})


def entries(change: Any) -> Any:
    """Change the entry of each token of an answer."""

    def changed(answer: dict[str, Any]) -> tuple[int, Any]:
        listed = answer["choices"][0]["prompt_logprobs"]
        answer["choices"][0]["prompt_logprobs"] = [None if each is None else change(each) for each in listed]
        return 200, answer

    return changed


def without(key: str) -> Any:
    return entries(lambda each: {token: {k: v for k, v in of.items() if k != key} for token, of in each.items()})


WRONG = {
    "fewer than asked for": (entries(lambda each: dict(list(each.items())[:3])), f"{K}.*--max-logprobs {K}.*kl.topk"),
    "of another kind": (lambda answer: (200, {**answer, "choices": [{"text": ""}]}), "prompt_logprobs"),
    "no choice": (lambda answer: (200, {"choices": []}), "prompt_logprobs"),
    "no numbers": (without("logprob"), "log-probabilities"),
    "not a number": (
        entries(lambda each: {token: {**of, "logprob": float("nan")} for token, of in each.items()}),
        "no log-probability",
    ),
    "logits": (
        entries(lambda each: {token: {**of, "logprob": of["logprob"] + 3} for token, of in each.items()}),
        "more than 1",
    ),
    "not of the token": (entries(lambda each: dict(list(each.items())[1:])), "no log-probability of token"),
    "of fewer tokens": (
        lambda answer: (
            200,
            {"choices": [{"prompt_logprobs": answer["choices"][0]["prompt_logprobs"][:-1]}]},
        ),
        "tokens for",
    ),
    "no JSON": (lambda answer: (200, "?"), "prompt_logprobs"),
    "an error": (lambda answer: (401, {"error": {"message": "no such key"}}), "401: no such key"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_answer_ends_the_run_with_a_line(server: LogprobServer, name: str) -> None:
    run = built(*TOPK, *behind(server))
    server.change, says = WRONG[name]
    with pytest.raises(KeelError, match=says) as error:
        train_step(run, State(kl=run.controller.init()))
    assert "\n" not in str(error.value)
    assert server.url in str(error.value)


def renamed(answer: dict[str, Any]) -> tuple[int, Any]:
    return entries(lambda each: {token: {**of, "decoded_token": f"{token}!"} for token, of in each.items()})(answer)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("change", "names"),
    [(renamed, "another vocabulary"), (without("decoded_token"), "decoded_token")],
    ids=("other tokens", "no text"),
)
def test_the_vocabulary_is_checked_token_by_token(server: LogprobServer, change: Any, names: str) -> None:
    asked = len(small_model()[1])
    built(*TOPK, *behind(server))
    assert sum(len(body["prompt"]) - 1 for body in server.asked) >= asked
    server.change = change
    with pytest.raises(KeelError, match=names):
        built(*TOPK, *behind(server))


@pytest.mark.parametrize(
    ("overrides", "names"),
    [
        (["kl.estimator=exact"], r"kl\.estimator=exact.*topk"),
        (["kl.estimator=jsd"], r"kl\.estimator=jsd"),
        ([*TOPK, "kl.exact=true"], r"kl\.exact"),
        ([*TOPK, "rollout.temperature=0.7"], r"rollout\.temperature"),
        ([*TOPK, "reference.dtype=float32"], "dtype"),
        ([*TOPK, "reference.served_model_name=others"], r"served_model_name.*teacher"),
        ([*TOPK, "reference.concurrency=0"], r"reference\.concurrency"),
        (["kl.estimator=topk", "kl.topk=30"], "max allowed: 20"),
        ([*TOPK, "rollout.max_completion_length=90"], "context"),
    ],
    ids=str,
)
def test_what_a_server_cannot_do_is_refused(server: LogprobServer, overrides: list[str], names: str) -> None:
    with pytest.raises(KeelError, match=names) as error:
        step_of(*behind(server), *overrides)
    assert "\n" not in str(error.value)


def test_what_its_section_lacks_is_named(server: LogprobServer) -> None:
    with pytest.raises(KeelError, match=r"reference\.chat_template=student"):
        built(*TOPK, f"reference.model={server.url}")
    with pytest.raises(KeelError, match=r"reference\.model.*servers"):
        built(MIXTURE, *TOPK, f"reference.model={{a: '{server.url}', b: tiny}}")


@pytest.mark.parametrize("section", ["reference", "kl.teacher"])
def test_a_server_that_is_down_is_found_before_the_policy_loads(section: str) -> None:
    options = [
        f"{section}.model=http://127.0.0.1:1/v1",
        f"{section}.chat_template=student",
        "model.name=no/such:loader",
    ]
    with pytest.raises(KeelError, match=rf"the teacher at http://127.0.0.1:1/v1 is down: .*{section}\.model"):
        build_policy(small_config(*options, "model.name=no/such:loader"))


def test_the_served_model_is_named(server: LogprobServer) -> None:
    run, _ = step_of(*TOPK, *behind(server), "reference.served_model_name=an-adapter")
    assert {body["model"] for body in server.asked} == {"an-adapter"}
    assert run.reference.teacher == f"an-adapter at {server.url}"  # type: ignore[union-attr]
