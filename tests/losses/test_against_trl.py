"""The objective against TRL's own `GRPOTrainer._compute_loss` on the same tensors: loss and gradients.

TRL's method runs unbound on a stand-in that offers what it reads and refuses everything else.
"""

import math
from collections import defaultdict
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from trl import GRPOTrainer

from keel.base.types import Batch, Scores
from keel.kl import KLOptions
from keel.losses import LossOptions, MismatchOptions, mismatch_weights, objective

BETA = 0.04
PLAIN = KLOptions(estimator="k3", gradient="plain", reduction="loss")
NONE = MismatchOptions(kind="none")
MAX_LENGTH = 11
NAMES = ["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "gspo"]
CLIPPED = ["grpo", "bnpo", "dr_grpo", "dapo", "gspo"]
# name: TRL's loss_type, level and clip limits; Keel's arguments for the same
EPSILONS = {"cispo": (0.2, 1.3), "gspo": (0.03, 0.04), "dapo": (0.2, 0.28)}


def tensors(seed=0, batch=6, length=9, dtype=torch.float64, spread=0.4):
    """Ragged right-padded rows, one of them empty, with old ≠ logp and random advantages of both signs."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    logp = -normal(batch, length).abs() - 0.1
    lengths = torch.randint(1, length + 1, (batch,), generator=g)
    lengths[0], lengths[1] = length, 0
    data = SimpleNamespace(
        logp=logp,
        old=logp + spread * normal(batch, length),
        ref=logp + spread * normal(batch, length),
        sample=logp + spread * normal(batch, length),
        entropy=normal(batch, length).abs(),
        advantages=normal(batch),
        mask=torch.arange(length)[None] < lengths[:, None],
    )
    data.mask[0, 3] = False  # a tool's token inside a row
    for name in ("logp", "old", "ref", "sample", "entropy", "advantages"):
        setattr(data, name, getattr(data, name).to(dtype))
    return data


def trl_loss(name, data, *, beta=BETA, delta=None, bias_correction=False, old=True, weights=None, entropy_coef=0.0):
    low, high = EPSILONS.get(name, (0.2, 0.2))
    logp = data.logp.clone().requires_grad_()

    class StandIn:
        loss_type = {"gspo": "grpo"}.get(name, name)
        importance_sampling_level = "sequence" if name == "gspo" else "token"
        epsilon_low, epsilon_high = low, high
        top_entropy_quantile = 1.0
        off_policy_mask_threshold = None
        current_gradient_accumulation_steps = 1
        max_completion_length = MAX_LENGTH
        aux_loss_enabled = False
        use_adaptive_entropy = False
        use_vllm = weights is not None
        vllm_importance_sampling_correction = weights is not None
        model = SimpleNamespace(training=True)
        args = SimpleNamespace(
            use_bias_correction_kl=bias_correction,
            delta=delta,
            sapo_temperature_pos=1.0,
            sapo_temperature_neg=1.05,
            steps_per_generation=1,
        )
        accelerator = SimpleNamespace(
            gather=lambda x: x, reduce=lambda x, reduction: x, num_processes=1, sync_gradients=True
        )

        def __init__(self):
            self.beta = beta
            self.entropy_coef = entropy_coef
            self._entropy_bonus_enabled = entropy_coef != 0
            self._metrics = {"train": defaultdict(list)}

        def _get_per_token_logps_and_entropies(self, *args, **kwargs):
            return logp, data.entropy, None

    ids = torch.zeros_like(data.mask, dtype=torch.long)
    inputs = {
        "prompt_ids": ids[:, :1],
        "prompt_mask": torch.ones_like(ids[:, :1]),
        "completion_ids": ids,
        "completion_mask": data.mask.to(data.logp.dtype),
        "advantages": data.advantages,
        "old_per_token_logps": data.old if old else None,
        "ref_per_token_logps": data.ref,
        "num_items_in_batch": data.mask.sum(),
        "importance_sampling_ratio": weights,
    }
    trainer = StandIn()
    loss = GRPOTrainer._compute_loss(trainer, None, inputs)
    loss.backward()
    return loss.item(), logp.grad.numpy(), trainer._metrics["train"]


def keel_loss(name, data, *, beta=BETA, delta=None, kl=PLAIN, old=True, mismatch=NONE, entropy_coef=0.0, **sampler):
    low, high = EPSILONS.get(name, (0.2, 0.2))
    limits = {"cispo": {"epsilon_high": high}, "sapo": {}}.get(name, {"epsilon": low, "epsilon_high": high})
    spec = LossOptions(loss_type=name, delta=delta, entropy_coef=entropy_coef, mismatch=mismatch, **limits)
    logp = data.logp.clone().requires_grad_()
    batch = Batch(
        action_mask=data.mask,
        advantages=data.advantages,
        old_logp=data.old if old else None,
        ref_logp=data.ref,
        **{"sample_logp": data.sample, **sampler},
    )
    scores = Scores(logp, entropy=data.entropy)
    result = objective(scores, batch, spec, kl, beta, max_completion_length=MAX_LENGTH)
    result.loss.backward()
    return result.loss.item(), logp.grad.numpy(), {name: metric.value for name, metric in result.metrics.items()}


def same(ours, theirs, atol=1e-10):
    assert ours[0] == pytest.approx(theirs[0], abs=atol)
    np.testing.assert_allclose(ours[1], theirs[1], rtol=0, atol=atol)
    assert np.abs(theirs[1]).max() > 1e-4


@pytest.mark.parametrize("beta", [0.0, BETA])
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("name", NAMES)
def test_loss_and_gradients(name, seed, beta):
    data = tensors(seed)
    same(keel_loss(name, data, beta=beta), trl_loss(name, data, beta=beta))


@pytest.mark.parametrize("name", NAMES)
def test_loss_and_gradients_in_fp32(name):
    data = tensors(4, dtype=torch.float32)
    same(keel_loss(name, data), trl_loss(name, data), atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_first_update_without_old_log_probabilities(name):
    data = tensors(5)
    same(keel_loss(name, data, old=False), trl_loss(name, data, old=False))


@pytest.mark.parametrize("name", CLIPPED)
def test_two_sided_clip(name):
    data = tensors(6, batch=24, spread=1.0)
    delta = 1.06 if name == "gspo" else 1.5
    ours = keel_loss(name, data, delta=delta)
    same(ours, trl_loss(name, data, delta=delta))
    assert ours[0] != pytest.approx(keel_loss(name, data)[0], abs=1e-6)


@pytest.mark.parametrize("name", [n for n in NAMES if n != "gspo"])
def test_bias_correction_is_the_rho_form(name):
    data = tensors(7)
    rho = KLOptions(estimator="k3", gradient="rho", reduction="loss")
    same(keel_loss(name, data, kl=rho), trl_loss(name, data, bias_correction=True))


@pytest.mark.parametrize("name", NAMES)
def test_entropy_bonus(name):
    data = tensors(8)
    same(keel_loss(name, data, entropy_coef=0.1), trl_loss(name, data, entropy_coef=0.1))


def trl_weights(data, mode, cap, floor=None):
    """TRL's vLLM correction, transcribed: the trainer computes it inside generation, out of reach of a stand-in."""
    difference = torch.nan_to_num((data.old - data.sample) * data.mask, nan=0.0)
    if mode.startswith("sequence"):
        difference = difference.sum(-1, keepdim=True)
    ratio = difference.exp()
    if mode.endswith("truncate"):
        return ratio.clamp(min=floor, max=cap)
    return ratio.masked_fill((ratio < (floor or -np.inf)) | (ratio > cap), 0.0)


MODES = [
    ("token_truncate", MismatchOptions(kind="truncate", cap=1.2), 1.2, None),
    ("token_mask", MismatchOptions(kind="mask", cap=1.2), 1.2, None),
    ("token_mask", MismatchOptions(kind="icepop", cap=1.4, floor=0.7), 1.4, 0.7),
    ("sequence_truncate", MismatchOptions(kind="truncate", cap=1.2, level="sequence"), 1.2, None),
    ("sequence_mask", MismatchOptions(kind="mask", cap=1.2, level="sequence"), 1.2, None),
    ("sequence_mask", MismatchOptions(kind="icepop", cap=1.9, floor=0.4, level="sequence"), 1.9, 0.4),
]


@pytest.mark.parametrize(("mode", "spec", "cap", "floor"), MODES)
@pytest.mark.parametrize("name", NAMES)
def test_sampler_mismatch(name, mode, spec, cap, floor):
    data = tensors(9)
    data.sample[0, 1] = torch.nan  # the engine reported none
    theirs = trl_weights(data, mode, cap, floor)
    ours = mismatch_weights(data.old, data.sample, data.mask, spec)
    np.testing.assert_allclose(ours[data.mask], theirs.expand_as(ours)[data.mask], rtol=0, atol=1e-12)
    same(keel_loss(name, data, mismatch=spec), trl_loss(name, data, weights=theirs))


@pytest.mark.parametrize("name", NAMES)
def test_filtered_samples_are_weighed_as_processed_logprobs_are(name):
    """vLLM hands TRL the log-probabilities after filters (`processed_logprobs`): what the tokens were drawn from."""
    data, spec = tensors(5), MismatchOptions(cap=2.0)
    theirs = trl_loss(name, data, beta=0.0, weights=trl_weights(data, "token_truncate", 2.0))
    unknown = torch.full_like(data.sample, math.nan)
    same(keel_loss(name, data, beta=0.0, mismatch=spec, sample_logp=unknown, filtered_logp=data.sample), theirs)
    same(keel_loss(name, data, beta=0.0, mismatch=spec, filtered_logp=data.sample, sample_logp=data.sample - 1), theirs)


@pytest.mark.parametrize("name", CLIPPED)
def test_clip_fractions(name):
    data = tensors(10, batch=24)
    data.mask[1, 0] = True  # TRL averages the sequence level over rows, Keel over tokens: compare equal lengths
    if name == "gspo":
        data.mask[:] = True
    ours, theirs = keel_loss(name, data)[2], trl_loss(name, data)[2]
    assert ours["ratio/clip_low_fraction"] == pytest.approx(theirs["clip_ratio/low_mean"][0], abs=1e-6)
    assert ours["ratio/clip_high_fraction"] == pytest.approx(theirs["clip_ratio/high_mean"][0], abs=1e-6)
    assert ours["ratio/clip_high_fraction"] > 0


@given(st.integers(0, 100_000), st.sampled_from(NAMES), st.integers(2, 7), st.integers(1, 8))
def test_any_batch(seed, name, batch, length):
    data = tensors(seed, batch, max(length, 4))
    ours, theirs = keel_loss(name, data), trl_loss(name, data)
    assert ours[0] == pytest.approx(theirs[0], abs=1e-9)
    np.testing.assert_allclose(ours[1], theirs[1], rtol=0, atol=1e-9)
