"""Each fault of model, scorer, engine, task and reward is the first thing that the preflight names."""

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
from keel.doctor.diagnosis import Diagnosis
from keel.doctor.keel_subject import build_subject
from keel.doctor.preflight import preflight
from keel.doctor.probes.masks import are_rounded_away
from keel.doctor.probes.noise import noise_findings
from keel.doctor.scoring import measure_scoring
from keel.doctor.thresholds import load_thresholds

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


def drawing(name: str) -> str:
    return f"rollout.engine=doctor.faults_draws:{name}"


def reward(name: str) -> str:
    return f"rewards=[{{name: '{HERE}:{name}'}}]"


def task(name: str) -> str:
    return f"task={{name: '{HERE}:{name}'}}"


FAULTS = {
    "dropout that is always on": ("scoring/dropout", [f"model.name={HERE}:always_dropping"]),
    "a layer stuck in training mode": ("scoring/dropout", [f"model.name={HERE}:stubbornly_dropping"]),
    "the model's own dropout": ("scoring/dropout", ["model.dropout=true", f"model.name={HERE}:with_dropout"]),
    "a scorer in training mode": (
        "scoring/dropout",
        [f"model.name={HERE}:dropping_in_training", scorer("in_training_mode")],
    ),
    "weights that are not finite": ("scoring/non-finite", [f"model.name={HERE}:not_finite"]),
    "dropout of LoRA": ("scoring/dropout", ["model.lora={r: 4, dropout: 0.2, adapter: null}"]),
    "the loss mask as attention mask": ("mask/attention", [scorer("loss_mask_as_attention")]),
    "the same without positions to tell": ("mask/attention", [GPT2, scorer("loss_mask_as_attention")]),
    "half of the prompt hidden": ("mask/attention", [scorer("half_of_the_prompt_hidden")]),
    "tool output hidden": ("mask/attention", [*TALK, scorer("tools_hidden")]),
    "tool output trained": ("mask/not-actions", ["rollout.max_completion_length=16", engine("TrainsTools")]),
    "tool output scored and trained": (
        "mask/not-actions",
        ["rollout.max_completion_length=16", engine("TrainsScoredTools")],
    ),
    "left padding with wrong positions": ("scoring/positions", [GPT2, scorer("left_padding_with_wrong_positions")]),
    "left padding that is seen": ("scoring/positions", [scorer("left_padding_that_is_seen")]),
    "positions that begin at one": ("scoring/positions", [GPT2, scorer("positions_from_one")]),
    "positions all zero": ("scoring/positions", [scorer("all_at_position_zero")]),
    "logits one place late": ("scoring/shifted", [scorer("one_place_late")]),
    "logits one place early": ("scoring/shifted", [scorer("one_place_early")]),
    "the last token at zero": ("scoring/shifted", [scorer("last_token_zero")]),
    "a softmax in bfloat16": ("sampler/precision", [scorer("softmax_in_bfloat16")]),
    "no temperature without a gradient": ("scoring/temperature", [COLD, scorer("temperature_with_a_gradient_only")]),
    "twice the scores without a gradient": ("scoring/mismatch", [scorer("doubled_without_a_gradient")]),
    "late logits without a gradient": ("scoring/shifted", [scorer("one_place_late_without_a_gradient")]),
    "a scorer without the temperature": ("scoring/temperature", [COLD, scorer("without_temperature")]),
    "log-probabilities divided by length": ("scoring/mismatch", [scorer("divided_by_length")]),
    "sums in place of tokens": ("scoring/mismatch", [scorer("summed")]),
    "random numbers in the scorer": ("scoring/nondeterministic", [scorer("noisy")]),
    "a scorer without gradient": ("scoring/gradient", [scorer("detached")]),
    "a layer that reverses gradients": ("scoring/gradient", [f"model.name={HERE}:reversing"]),
    "a gap that only 16 bits would explain": (
        "scoring/mismatch",
        ["optim.precision=bfloat16", scorer("slightly_lower")],
    ),
    "the same with an adapter on 16 bits": (
        "scoring/gradient",
        [scorer("detached"), LORA, "model.dtype=bfloat16"],
    ),
    "rows without a gradient, with an adapter on 16 bits": (
        "scoring/gradient",
        [scorer("every_other_row_detached"), LORA, "model.dtype=bfloat16"],
    ),
    "a scorer with half the gradient": ("scoring/gradient", [scorer("half_detached")]),
    "a gradient in every other row": ("scoring/gradient", [scorer("every_other_row_detached")]),
    "no gradient where the model is sure": ("scoring/gradient", [scorer("likely_tokens_detached")]),
    "scores that are remembered": ("scoring/mismatch", [scorer("remembered")]),
    "a temperature not in the sampler's log-probabilities": (
        "sampler/temperature",
        [COLD, engine("TemperatureNotApplied")],
    ),
    "an engine at another temperature": ("sampler/temperature", [engine("AnotherTemperature")]),
    "top-p that nobody is told of": ("sampler/filter", [engine("HiddenTopP")]),
    "top-k that nobody is told of": ("sampler/filter", [engine("HiddenTopK")]),
    "min-p that nobody is told of": ("sampler/filter", [engine("HiddenMinP")]),
    "filtered log-probabilities": ("sampler/filter", [engine("ReportsFiltered")]),
    "top-p by configuration": ("sampler/filter", ["rollout.top_p=0.5"]),
    "an engine never synced": ("sampler/stale", [engine("NeverSynced")]),
    "an engine never synced, with LoRA": ("sampler/stale", [LORA, engine("NeverSynced")]),
    "an engine whose weights were never loaded": ("sampler/stale", [engine("NeverLoaded")]),
    "an engine synced once": ("sampler/stale", [engine("SyncedOnce")]),
    "an engine half synced": ("sampler/stale", [engine("HalfSynced")]),
    "stale draws under fresh log-probabilities": ("sampler/stale", [engine("StaleButReportsFresh")]),
    "log-probabilities of the next token": ("sampler/mismatch", [engine("ShiftedLogp")]),
    "logarithms to base two": ("sampler/mismatch", [engine("BaseTwo")]),
    "logarithms to base two, with LoRA": ("sampler/mismatch", [LORA, engine("BaseTwo")]),
    "rounded log-probabilities, with filters": ("sampler/mismatch", ["rollout.top_p=0.95", engine("Rounded")]),
    "a constant on every log-probability": ("sampler/mismatch", [engine("ConstantAdded")]),
    "log-probabilities of zero": ("sampler/mismatch", [engine("ZeroLogp")]),
    "a first log-probability of zero": ("sampler/mismatch", [engine("FirstLogpZero")]),
    "a token that is banned": ("sampler/filter", [drawing("BansAToken")]),
    "a token that is favoured": ("sampler/filter", [drawing("LikesAToken")]),
    "positions that stand still": ("sampler/mismatch", [drawing("ForgetsPositions")]),
    "other weights, reported as the policy's": ("sampler/mismatch", [drawing("OtherWeights")]),
    "attention at half its size": ("sampler/mismatch", [drawing("OtherAttention")]),
    "a temperature in every other request": ("sampler/temperature", [drawing("EveryOtherColder")]),
    "small changes that are not synced": ("sampler/stale", [drawing("SmallChangesLost")]),
    "the same noise at every step": ("sampler/noise", [engine("SameNoise")]),
    "completions of an earlier step": ("sampler/noise", [engine("Remembers")]),
    "a group of copies": ("sampler/noise", [engine("Copies")]),
    "a group without copies": ("sampler/noise", [engine("NoTwoAlike")]),
    "a reward that is NaN": ("reward/non-finite", [reward("never_a_number")]),
    "a reward that raises": ("reward/failed", [reward("raises")]),
    "random weights": ("output/random-weights", [f"model.name={HERE}:random_weights"]),
    "a cliff with random weights": ("output/random-weights", [f"model.name={HERE}:random_weights", reward("cliff")]),
    "a form that is never asked for, under a cliff": ("reward/gold", [task("Shouted"), reward("steep")]),
    "completions all truncated": ("output/truncated", ["rollout.max_completion_length=1"]),
    "a reward with its sign reversed": ("reward/gold", [reward("reversed_sign")]),
    "a reward that never differs": ("reward/constant", [reward("always_the_same")]),
    "a reward by the clock": ("reward/fickle", [reward("by_the_clock")]),
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
            (faults.rolled, "scoring/mismatch", "has the scores of another one"),
            (faults.by_length, "scoring/mismatch", "has the scores of another one"),
            (faults.shared_between_rows, "scoring/mismatch", "scored alone"),
            (faults.left_padding_that_is_seen, "scoring/positions", "without padding"),
        ):
            broken = replace(setup, built=replace(setup.built, run=replace(setup.run, scorer=score)), of_batch={})
            (finding,) = measure_scoring(broken).findings
            assert finding.code == code, score
            assert phrase in finding.evidence


class Sizes(TorchDispatchMode):
    """How large the tensors are that are made."""

    def __init__(self) -> None:
        super().__init__()
        self.made = set[int]()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        self.made |= {made.numel()} if isinstance(made, torch.Tensor) else set()
        return made


def test_a_model_of_16_bits_alone_is_tried_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some kernels, and buffers that are no parameters, refuse weights in fp32; training never asks for that."""

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
        (first, *_) = noise_findings(setup, load_thresholds())
    assert first.code == "sampler/noise"
    assert "two different steps" in first.evidence


@pytest.mark.parametrize(
    ("reported", "coarse"), [([0, 0, -1, -1, -3], True), ([0, -0.4, 0, -1.3, -2.9], False), ([0] * 5, False)]
)
def test_zeros_of_rounded_numbers_are_no_text_of_others(reported: list[float], coarse: bool) -> None:
    logp = torch.tensor([-0.1, -0.4, -0.6, -1.3, -2.9])
    assert are_rounded_away(torch.tensor(reported), logp, 1e-3) == coarse


@pytest.mark.parametrize(("name", "wrong"), [("FiltersUnsaid", True), ("OnlyAfterFilters", False)])
def test_log_probabilities_after_the_configured_filters_are_recomputed(name: str, wrong: bool) -> None:
    """The weights of filtered samples are taken from them: as wrong as they are, as wrong is the training."""
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


def test_completions_that_are_drawn_otherwise_beside_others_alone() -> None:
    found = diagnosed(drawing("HotterInGroups")).findings[0]
    assert found.code == "sampler/noise"
    assert "drawn alone" in found.evidence
