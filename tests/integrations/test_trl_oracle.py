"""With TRL's own formula chosen, Keel inside TRL is TRL: the same weights after several steps of SGD."""

import math
from dataclasses import replace

import pytest
import torch
from peft import LoraConfig
from trl import GRPOTrainer

from integrations.small_trl import TRLS_OWN, arguments, build, gap, small_model, weights
from keel.base.types import Batch, Scores
from keel.integrations.trl import KeelGRPOTrainer, KeelRunCallback
from keel.integrations.trl.scoring import denominators, rows_of
from keel.integrations.trl.settings import REDUCTIONS, mismatch_of, pairing_of
from keel.kl import KLOptions
from keel.losses import LossOptions, MismatchOptions, kl_penalty, objective


def keel(kl=TRLS_OWN, **more):
    return {"kl": kl, "callbacks": [KeelRunCallback(report=False)], **more}


@pytest.mark.slow
@pytest.mark.parametrize("loss_type", REDUCTIONS)
def test_the_weights_are_trls(tmp_path, loss_type):
    """Two microbatches an update and two passes over each batch, so that samples are an older policy's."""
    shape = {"gradient_accumulation_steps": 2, "num_iterations": 2, "per_device_train_batch_size": 4}
    start = {name: tensor.clone() for name, tensor in small_model().state_dict().items()}
    theirs = build(GRPOTrainer, tmp_path / "trl", loss_type=loss_type, **shape)
    theirs.train()
    ours = build(KeelGRPOTrainer, tmp_path / "keel", loss_type=loss_type, keel=keel(), **shape)
    ours.train()
    assert gap(weights(theirs), start) > 1e-3
    assert gap(weights(theirs), weights(ours)) < 1e-6


AT_ANY_RATE = {
    "dapo": {"loss_type": "dapo", "learning_rate": 0.3, "gradient_accumulation_steps": 2, "num_iterations": 2},
    "vespo": {"loss_type": "vespo", "learning_rate": 0.05, "gradient_accumulation_steps": 2, "num_iterations": 2},
    "luspo": {"loss_type": "luspo", "learning_rate": 0.02, "steps_per_generation": 2},
    "lora": {"learning_rate": 1.0},
}


@pytest.mark.slow
@pytest.mark.parametrize("case", AT_ANY_RATE)
def test_what_is_left_in_fp32_is_rounding(tmp_path, monkeypatch, case):
    """At these rates fp32 ends 1e-6 to 3e-4 apart: TRL takes e^d - d - 1, Keel expm1(d) - d; steps amplify rounding.

    On the same log-probabilities in double the weights are the same.
    """
    scored = GRPOTrainer._get_per_token_logps_and_entropies

    def in_double(self, *args, **named):
        logp, entropy, aux = scored(self, *args, **named)
        return logp.double(), None if entropy is None else entropy.double(), aux

    monkeypatch.setattr(GRPOTrainer, "_get_per_token_logps_and_entropies", in_double)
    changes = {"per_device_train_batch_size": 8 if case == "lora" else 4, **AT_ANY_RATE[case]}
    adapter = LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    more = {"peft_config": adapter} if case == "lora" else {}
    theirs = build(GRPOTrainer, tmp_path / "trl", keel=more, **changes)
    theirs.train()
    ours = build(KeelGRPOTrainer, tmp_path / "keel", keel=keel(**more), **changes)
    ours.train()
    assert gap(weights(theirs), weights(ours)) < 1e-9


def test_the_kl_term_matters_in_that_comparison(tmp_path):
    """Without it the weights are others: the test above would see a term that is missing."""
    with_kl = build(KeelGRPOTrainer, tmp_path / "with", keel=keel())
    without = build(KeelGRPOTrainer, tmp_path / "without", beta=0.0, keel=keel(KLOptions(beta=0.0)))
    with_kl.train()
    without.train()
    assert gap(weights(with_kl), weights(without)) > 1e-4


class Recorded(KeelGRPOTrainer):
    """Keeps what goes into the last update's loss, and the loss."""

    def _compute_loss(self, model, inputs):
        loss = super()._compute_loss(model, inputs)
        self.seen = (self._passes[-1], loss.detach(), self.keel_state.beta)
        return loss


CHOICES = {
    "k3 auto": KLOptions(beta=0.3),
    "k2": KLOptions(beta=0.3, estimator="k2", reduction="loss"),
    "exact": KLOptions(beta=0.3, estimator="exact"),
    "exact_reverse": KLOptions(beta=0.3, estimator="exact_reverse"),
    "sequence": KLOptions(beta=0.3, estimator="exact", level="sequence"),
    "advantage": KLOptions(beta=0.3, estimator="k1", placement="advantage"),
    "advantage to go": KLOptions(beta=0.3, estimator="k1", placement="advantage", level="sequence"),
}


@pytest.mark.slow
@pytest.mark.parametrize("loss_type", ["grpo", "dr_grpo"])
@pytest.mark.parametrize("choice", ["k3 auto", "sequence", "advantage to go"])
def test_an_update_in_microbatches_is_the_same_update(tmp_path, choice, loss_type):
    """Keel's own reduction, a mean over all tokens of the update: eight rows at once, and twice four."""
    ended, kls = [], []
    for rows in (8, 4):
        shape = {"per_device_train_batch_size": rows, "gradient_accumulation_steps": 8 // rows, "max_steps": 2}
        trainer = build(
            KeelGRPOTrainer, tmp_path / str(rows), loss_type=loss_type, beta=0.0, keel=keel(CHOICES[choice]), **shape
        )
        trainer.train()
        ended.append(weights(trainer))
        kls.append([line["loss/kl"] for line in trainer.state.log_history if "loss/kl" in line])
    assert gap(*ended) < 1e-6
    assert kls[0] == pytest.approx(kls[1], abs=1e-6)
    assert abs(kls[0][-1]) > 1e-5


@pytest.mark.parametrize("choice", CHOICES)
def test_the_loss_is_that_of_keels_objective(tmp_path, choice):
    """The tensors of an update through `keel.losses.objective`: grpo on both sides, one microbatch."""
    kl = CHOICES[choice]
    trainer = build(Recorded, tmp_path, loss_type="grpo", beta=0.0, max_steps=2, learning_rate=0.1, keel=keel(kl))
    trainer.train()
    done, loss, beta = trainer.seen
    rows = done.batch
    batch = Batch(rows.action_mask, advantages=rows.advantages, ref_logp=rows.ref_logp)
    options = LossOptions(loss_type="grpo", epsilon=0.2, mismatch=MismatchOptions(kind="none"))
    expected = objective(done.scores, batch, options, kl, beta, pairing=trainer.keel_pairing)
    assert loss.item() == pytest.approx(expected.loss.item(), abs=1e-6)
    assert abs(float(done.kl_loss)) > 1e-4


def test_the_exact_kl_is_that_of_the_logits(tmp_path):
    kl = KLOptions(beta=0.3, estimator="exact")
    trainer = build(Recorded, tmp_path, beta=0.0, max_steps=2, temperature=0.7, learning_rate=0.1, keel=keel(kl))
    before = []
    original = trainer._compute_loss

    def look(model, inputs):
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
        mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
        with torch.no_grad():
            policy = (model(input_ids=ids, attention_mask=mask).logits / 0.7).log_softmax(-1)
            fresh = (small_model()(input_ids=ids, attention_mask=mask).logits / 0.7).log_softmax(-1)
        kl = (policy.exp() * (policy - fresh)).sum(-1)[:, -inputs["completion_ids"].size(1) - 1 : -1]
        before.append(kl[inputs["completion_mask"].bool()])
        return original(model, inputs)

    trainer._compute_loss = look
    trainer.train()
    scores, mask = trainer.seen[0].scores, trainer.seen[0].batch.action_mask
    assert before[0].abs().max() < 1e-6  # the reference is the start
    torch.testing.assert_close(scores.exact_kl[mask], before[-1], atol=1e-5, rtol=1e-4)
    assert before[-1].mean() > 1e-3


def test_the_exact_kl_in_mixed_precision(tmp_path):
    """bf16 by accelerate and recomputed activations: both models are computed alike, so that the KL begins at 0."""
    kl = KLOptions(beta=0.3, estimator="exact")
    changes = {"bf16": True, "gradient_checkpointing": True, "learning_rate": 0.1, "max_steps": 2}
    trainer = build(Recorded, tmp_path, beta=0.0, keel=keel(kl), **changes)
    trainer.train()
    first, last = (line["kl/policy_ref/exact/mean"] for line in trainer.state.log_history[:2])
    assert first == 0.0
    assert last > 1e-3


def vllm_rows(seed=0):
    """A microbatch as TRL hands it on with vLLM's log-probabilities."""
    g = torch.Generator().manual_seed(seed)
    logp = -torch.rand(4, 6, generator=g)
    mask = (torch.arange(6)[None] < torch.tensor([6, 3, 5, 1])[:, None]).long()
    noise = [0.3 * torch.randn(4, 6, generator=g) for _ in range(3)]
    return logp, {
        "completion_mask": mask,
        "tool_mask": (torch.rand(4, 6, generator=g) > 0.2).long(),
        "advantages": torch.randn(4, generator=g),
        "num_items_in_batch": mask.sum(),
        "old_per_token_logps": logp + noise[0],
        "ref_per_token_logps": logp + noise[1],
        "sampling_per_token_logps": logp + noise[2],
    }


@pytest.mark.parametrize("filtered", [False, True])
def test_a_kl_in_the_advantage_on_vllms_samples(tmp_path, filtered):
    """Weighed by what vLLM drew with, limited as TRL limits the policy term: Keel's objective with `loss.mismatch`."""
    logp, inputs = vllm_rows()
    args = arguments(tmp_path, use_vllm=True, loss_type="grpo", vllm_importance_sampling_mode="token_truncate")
    kl = KLOptions(beta=0.3, estimator="k1", placement="advantage")
    batch, by = rows_of(inputs, filtered=filtered), denominators(args, kl, inputs, 1)
    mismatch = mismatch_of(args)
    assert mismatch.cap == args.vllm_importance_sampling_clip_max
    term, _ = kl_penalty(kl, pairing_of(kl, args), "sequence_mean", 0.3, Scores(logp), batch, by, mismatch)
    silent = replace(batch, advantages=torch.zeros(4))
    options = LossOptions(loss_type="grpo", mismatch=mismatch)
    expected = objective(Scores(logp), silent, options, kl, 0.3)
    assert term.item() == pytest.approx(expected.loss.item(), abs=1e-6)
    assert abs(term.item()) > 1e-4


def test_scores_carry_no_graph_beyond_the_pass(tmp_path):
    trainer = build(Recorded, tmp_path, max_steps=1, keel=keel())
    trainer.train()
    assert isinstance(trainer.seen[0].scores, Scores)
    assert not trainer.seen[0].scores.logp.requires_grad
    assert math.isfinite(trainer.seen[1].item())
