"""Each fault of models, scorers, engines, tasks and rewards is the preflight's first finding."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from doctor import faults
from doctor.followed import check_named_first, repeated
from doctor.schooled import schooled_config
from keel.doctor import gradient, scoring
from keel.doctor.findings import Diagnosis
from keel.doctor.keel_subject import build_subject
from keel.doctor.preflight import preflight
from keel.doctor.probes.sampler import noise_findings
from keel.doctor.scoring import measure_scoring

pytestmark = pytest.mark.doctor


HERE = "doctor.faults"
LORA = "model.lora={r: 4}"
COLD = "rollout.temperature=0.7"
GPT2 = f"model.name={HERE}:schooled_absolute"
TALK = [f"task={{name: '{HERE}:talking'}}", "rollout.max_turns=2", "rollout.max_completion_length=16"]


def scorer(name: str) -> str:
    return f"model.scorer={HERE}:{name}"


def engine(name: str) -> str:
    return f"rollout.engine={HERE}:{name}"


def reward(name: str) -> str:
    return f"rewards=[{{name: '{HERE}:{name}'}}]"


def task(name: str) -> str:
    return f"task={{name: '{HERE}:{name}'}}"


FAULTS = {
    "the model's own dropout": ("scoring/dropout", ["model.dropout=true", f"model.name={HERE}:with_dropout"]),
    "weights that are not finite": ("scoring/non-finite", [f"model.name={HERE}:not_finite"]),
    "dropout of LoRA": ("scoring/dropout", ["model.lora={r: 4, dropout: 0.2, adapter: null}"]),
    "the same without positions to tell": ("mask/attention", [GPT2, scorer("loss_mask_as_attention")]),
    "tool output trained": ("mask/not-actions", ["rollout.max_completion_length=16", engine("TrainsTools")]),
    "top-p by configuration": ("sampler/filter", ["rollout.top_p=0.5"]),
    "a reward that is NaN": ("reward/non-finite", [reward("never_a_number")]),
    "a reward that raises": ("reward/failed", [reward("raises")]),
    "random weights": ("output/random-weights", [f"model.name={HERE}:random_weights"]),
    "a cliff with random weights": ("output/random-weights", [f"model.name={HERE}:random_weights", reward("cliff")]),
    "a form that is never asked for, under a cliff": ("reward/gold", [task("Shouted"), reward("steep")]),
    "completions all truncated": ("output/truncated", ["rollout.max_completion_length=1"]),
    "a reward with its sign reversed": ("reward/gold", [reward("reversed_sign")]),
    "a reward that never differs": ("reward/constant", [reward("always_the_same")]),
    "a reward by the clock": ("reward/nondeterministic", [reward("by_the_clock")]),
    "nothing that can be read": ("output/unparseable", [reward("unreadable")]),
    "held-out problems in training": ("eval/leak", [task("leaking")]),
    "evaluation in another format": ("eval/train-gap", [task("another_format")]),
    "BOS twice": ("prompt/double-bos", [task("doubled_bos"), "data.allow_control_tokens=true"]),
}


@cache
def diagnosed(*overrides: str) -> Diagnosis:
    diagnosis = preflight(schooled_config(*overrides))
    assert not [line for line in diagnosis.unchecked if "Error" in line], diagnosis.unchecked
    return diagnosis


@pytest.mark.parametrize("fault", FAULTS)
def test_the_fault_is_named_first(fault: str) -> None:
    check_named_first(*FAULTS[fault], whole=not repeated(FAULTS, fault))


def test_rows_that_mix_are_not_called_padding() -> None:
    with closing((setup := build_subject(schooled_config(scorer("right")))).run):
        for score, code, phrase in (
            (faults.rolled, "scoring/mismatch", "are reordered"),
            (faults.by_length, "scoring/mismatch", "are reordered"),
            (faults.shared_between_rows, "scoring/mismatch", "scored alone"),
            (faults.left_padding_that_is_seen, "scoring/positions", "without padding"),
        ):
            broken = replace(setup, built=replace(setup.built, run=replace(setup.run, scorer=score)), of_batch={})
            (finding,) = measure_scoring(broken).findings
            assert finding.code == code, score
            assert phrase in finding.evidence


class Sizes(TorchDispatchMode):
    """Records the sizes of tensors that are created."""

    def __init__(self) -> None:
        super().__init__()
        self.made = set[int]()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        self.made |= {made.numel()} if isinstance(made, torch.Tensor) else set()
        return made


def test_a_model_of_16_bits_alone_is_tried_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some kernels and buffers refuse fp32 weights, which training never needs."""

    @contextmanager
    def refused(setup: object) -> Iterator[None]:
        raise RuntimeError("expected BFloat16 but found Float")
        yield

    monkeypatch.setattr(scoring, "in_float32", refused)
    for name, codes in ((scorer("detached"), ["scoring/gradient"]), (None, [])):
        setup = build_subject(schooled_config("model.dtype=bfloat16", *([name] if name else [])))
        with closing(setup.run):
            result = measure_scoring(setup)
        assert [finding.code for finding in result.findings] == codes
        assert "gradient_error" in result.figures
        assert [line for line in result.unchecked if "expected BFloat16" in line]


def test_a_gradient_without_room_is_all_that_is_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    with closing((setup := build_subject(schooled_config(scorer("remembered")))).run):
        trained = sum(p.numel() for p in setup.policy.model.parameters() if p.requires_grad)
        with Sizes() as sizes:
            error, size = gradient._gradient_error(setup)
        assert (error, size) == pytest.approx((0.0, 1.0), abs=1e-4)
        assert sizes.made
        assert trained not in sizes.made  # no copy of all weights in one

        def full(*_: Any) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory.")

        monkeypatch.setattr(gradient, "_gradient_error", full)
        outcome = measure_scoring(setup)
    assert [finding.code for finding in outcome.findings] == ["scoring/mismatch"]
    assert [line.partition(":")[0] for line in outcome.unchecked] == ["scoring/gradient"]
    assert "gap_max" in outcome.figures


SURE = "rollout.temperature=0.05"  # at which the policy is certain of what it writes


def test_scores_are_tried_on_text_that_is_not_certain() -> None:
    setup = build_subject(schooled_config(SURE, scorer("last_token_zero")))
    with closing(setup.run):
        outcome = measure_scoring(setup)
    assert outcome.figures["gap_max"] < 1e-3  # the end's own log-probability is as near to 0
    assert [finding.code for finding in outcome.findings] == ["scoring/shifted"]


def test_noise_is_tried_where_the_policy_is_not_certain() -> None:
    setup = build_subject(schooled_config("rollout.temperature=0.3", engine("SameNoise")))
    with closing(setup.run):
        (first, *_) = noise_findings(setup)
    assert first.code == "sampler/noise"
    assert "two different steps" in first.evidence


@pytest.mark.parametrize(("name", "wrong"), [("FiltersUnsaid", True), ("OnlyAfterFilters", False)])
def test_log_probabilities_after_the_configured_filters_are_recomputed(name: str, wrong: bool) -> None:
    """Importance weights use these log-probabilities, so errors in them change the training."""
    (finding,) = [f for f in diagnosed("rollout.top_p=0.8", engine(name)).findings if f.code == "sampler/filter"]
    assert ("filtered_logp is off by up to" in finding.evidence) == wrong
    assert ("cut off" in finding.evidence) != wrong


HEALTHY = {  # and those of test_healthy.py
    "LoRA through a copy": [LORA, engine("Wrapped")],
    "left padding done right, cold, learned positions": [GPT2, COLD, scorer("left_padding_done_right")],
    "several turns": TALK,
    "learned positions, an engine without log-probabilities": [GPT2, engine("NoLogp")],
    "an engine in bfloat16": [engine("InBfloat16")],
}


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_configuration_gives_no_alarm(name: str) -> None:
    diagnosis = diagnosed(*HEALTHY[name])
    assert diagnosis.healthy, diagnosis.findings


def test_trained_tokens_are_shown_in_colour_and_tool_output_is_not_among_them() -> None:
    shown = "\n".join(diagnosed(*TALK).notes)
    assert "\x1b[32m" in shown
    assert "\x1b[2m'max " in shown


def test_experiments_with_masks_are_padded_where_attention_kernels_need_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A column of padding, as on a GPU, must not change the scores; unpadded ones are the model's own forward."""
    positions = [*scoring.POSITIONS.values(), lambda given, written: torch.arange(given + written)]
    subject, scores = build_subject(schooled_config()), list[torch.Tensor]()
    with closing(subject.run):
        for columns in (0, 1):
            monkeypatch.setattr(scoring, "padding_columns", lambda ids, columns=columns: columns)
            scores.append(torch.stack([scoring._at_positions(subject, places) for places in positions]))
        torch.testing.assert_close(scores[0][-1], subject.forward_logp(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(scores[1], scores[0], rtol=1e-5, atol=1e-5)
