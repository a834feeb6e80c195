"""A scorer of one's own takes the place of Keel's pass, for policy and reference, with gradient."""

import pytest
import torch

from keel.base.errors import KeelError
from keel.base.types import Completion, Group, Problem, Scores
from keel.config import load_config
from keel.models.scorer import ScoreRows, score_rows
from keel.run.build import build_policy, build_run
from keel.trainer.batch import pack_step, score_micro, score_reference
from keel.trainer.state import State
from keel.trainer.step import train_step

SEEN: list[bool] = []


def plain(model, rows, *, temperature):
    """What a user would write: the model's own forward, the next token's log-probability."""
    SEEN.append(torch.is_grad_enabled())
    inputs = {"attention_mask": rows.attention_mask, "position_ids": rows.position_ids}
    logits = model(input_ids=rows.tokens, **inputs).logits[:, :-1].float() / temperature
    logp = logits.log_softmax(-1)
    entropy = -(logp.exp() * logp).sum(-1)
    picked = logp.gather(-1, rows.tokens[:, 1:, None]).squeeze(-1)
    return Scores(rows.completion(picked), rows.completion(entropy))


def narrow(model, rows, *, temperature):
    return torch.zeros(rows.tokens.shape)


def lacks_temperature(model, rows):
    return torch.zeros(rows.action_mask.shape)


def options(*more: str):
    words = ["rollout.prompts_per_step=3", "rollout.num_generations=3", "rollout.max_completion_length=6"]
    return load_config({}, [*words, "rollout.temperature=0.7", "kl.beta=0.01", "optim.learning_rate=1e-3", *more])


def run_of(*more: str):
    config = options(*more)
    return build_run(config, build_policy(config)).run


def test_a_users_scorer_trains_as_keels_own_pass_does():
    own, native = run_of(f"model.scorer={__name__}:plain"), run_of()
    SEEN.clear()
    lines = [train_step(run, State(kl=run.controller.init())).metrics for run in (own, native)]
    assert SEEN == [False, True], "once for the reference without gradient, once for the policy with it"
    for name in ("loss/total", "loss/policy", "grad/norm", "kl/policy_ref/k3/mean", "logp/policy_mean", "entropy/mean"):
        assert lines[0][name] == pytest.approx(lines[1][name], rel=1e-4, abs=1e-6), name
    for mine, theirs in zip(own.policy.model.parameters(), native.policy.model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-2, atol=2e-3)


def test_rows_hold_every_token_and_pick_what_belongs_to_the_completion():
    def completion(*tokens: int) -> Completion:
        zeros = (0.0,) * len(tokens)
        return Completion(tokens, (True,) * len(tokens), zeros, zeros, "", "eos")

    groups = [
        Group(Problem("a", ""), (11, 12), (completion(21, 22, 23), completion(31))),
        Group(Problem("b", ""), (13, 14, 15), (completion(41, 42), completion())),
    ]
    run = run_of(f"model.scorer={__name__}:plain")
    (micro,) = pack_step(groups, run).micros
    rows: ScoreRows = score_rows(micro.packed)
    real = [row[mask.bool()].tolist() for row, mask in zip(rows.tokens, rows.attention_mask, strict=True)]
    assert real == [[11, 12, 21, 22, 23], [11, 12, 31], [13, 14, 15, 41, 42], [13, 14, 15]]
    assert rows.prompt_lengths.tolist() == [2, 2, 3, 3]
    assert rows.position_ids.tolist() == [[0, 1, 2, 3, 4]] * 4
    assert rows.completion(rows.tokens[:, 1:].float()).tolist() == [[21, 22, 23], [31, 0, 0], [41, 42, 0], [0, 0, 0]]


def test_the_reference_is_scored_by_it_too():
    run = run_of(f"model.scorer={__name__}:plain")
    batch = pack_step(run.collect(run.task.sample(2, seed=0, step=0), attempt=0, step=0), run)
    ref = score_reference(batch, run).rows.ref_logp
    with torch.no_grad():
        own = score_micro(batch.micros[0], batch, run).logp
    torch.testing.assert_close(ref, own)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["model.scorer=nowhere"], "model.scorer is 'nowhere'"),
        ([f"model.scorer={__name__}:lacks_temperature"], "cannot be called as scorer"),
        ([f"model.scorer={__name__}:plain", "kl.exact=true"], "reads hidden states"),
        ([f"model.scorer={__name__}:plain", "kl.estimator=exact"], "reads hidden states"),
    ],
)
def test_what_cannot_work_is_refused_before_a_model_loads(words, message):
    with pytest.raises(KeelError, match=message):
        options(*words)


def test_a_wrong_shape_is_one_line():
    run = run_of(f"model.scorer={__name__}:narrow")
    with pytest.raises(KeelError, match=r"one value per token of the completion"):
        train_step(run, State(kl=run.controller.init()))
