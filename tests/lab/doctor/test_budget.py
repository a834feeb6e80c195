"""A large model is tried on less of the batch: what is left is the policy's own, and what it earned stays."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from itertools import count
from types import SimpleNamespace

import pytest

from keel.lab.doctor import budget
from keel.lab.doctor.budget import LEAST_TOKENS, budget_note, token_budget, within_budget
from keel.lab.doctor.preflight import LEFT_OUT, preflight
from keel.lab.doctor.probes import PROBES, evidence
from keel.lab.doctor.setup import ProbeSetup, build_setup
from lab.doctor.schooled import schooled_config

LONG = ("model.name=lab.doctor.schooled:fresh_model", "rollout.max_completion_length=40")  # noise seldom ends


@pytest.fixture(scope="module")
def setup() -> Iterator[ProbeSetup]:
    built = build_setup(schooled_config(*LONG))
    with closing(built.run):
        yield built


def test_a_small_model_has_the_whole_batch(setup):
    assert within_budget(setup) is setup
    assert token_budget(setup, quick=True) < token_budget(setup, quick=False)


def test_a_large_one_has_fewer_and_shorter_completions_with_their_rewards(setup, monkeypatch):
    size = sum(p.numel() for p in setup.policy.model.parameters())
    monkeypatch.setattr(budget, "PASS_FLOP", 2 * size * 250)  # a batch of 250 tokens
    less = within_budget(setup)
    assert less.sampled == setup.groups
    assert less.shared is setup.shared
    assert less.of_batch is not setup.of_batch
    assert 2 <= len(less.groups) < len(setup.groups)
    whole = {group.problem.key: group for group in setup.groups}
    longest = max(len(c.tokens) for group in less.groups for c in group.completions)
    assert LEAST_TOKENS <= longest < 40
    assert less.sampling.max_completion_length == longest
    for group in less.groups:
        before = whole[group.problem.key]
        assert group.rewards == before.rewards
        for cut, completion in zip(group.completions, before.completions, strict=True):
            length = len(cut.tokens)
            assert cut.tokens == completion.tokens[:length]
            assert cut.sample_logp == completion.sample_logp[:length]
            assert cut.stop_reason == (completion.stop_reason if length == len(completion.tokens) else "length")
    assert budget_note(less, setup).startswith(f"passes over the model were tried on {4 * len(less.groups)} of 16 comp")


def test_a_healthy_configuration_is_healthy_on_less(monkeypatch):
    monkeypatch.setattr(budget, "PASS_FLOP", 1.0)
    diagnosis = preflight(schooled_config())
    assert diagnosis.healthy, diagnosis.findings
    assert any(note.startswith("passes over the model") for note in diagnosis.notes)


def test_quick_leaves_experiments_out_and_says_so():
    tried: list[str] = []
    diagnosis = preflight(schooled_config(), on_probe=lambda outcome, _: tried.append(outcome.name), quick=True)
    assert tried == [name for name, _ in PROBES if name not in LEFT_OUT]
    assert diagnosis.healthy
    for name in LEFT_OUT:
        assert any(name in line and "--quick" in line for line in diagnosis.unchecked)
        assert name not in diagnosis.sound
    (stale,) = [row for row in diagnosis.hypotheses if row.name == "H06"]
    assert stale.verdict == "not testable here"


def test_what_a_slow_model_leaves_undecided_is_said_and_not_called_sound(monkeypatch):
    """As where every group takes longer than all doubts may: one more look, and no level is reached."""
    seconds = count(0, 1000)
    monkeypatch.setattr(evidence, "time", SimpleNamespace(monotonic=lambda: next(seconds)))
    seen = {}
    config = schooled_config("model.name=lab.doctor.schooled:fresh_model")
    diagnosis = preflight(config, on_probe=lambda outcome, _: seen.setdefault(outcome.name, outcome))
    assert "collection" not in diagnosis.sound
    (line,) = [line for line in diagnosis.unchecked if line.startswith("output/unparseable: ")]
    assert line.endswith("(120 s are up)")
    (finding,) = [f for f in seen["collection"].findings if f.code == "output/unparseable"]
    assert finding.severity == "warning"
    assert finding.evidence.startswith("none of ")
