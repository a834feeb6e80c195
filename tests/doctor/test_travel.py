"""Prompts, texts, weights, tokenizers and the prompts that an engine continues, each against the correct one."""

from __future__ import annotations

import copy
from contextlib import closing
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from doctor.followed import check_named_first, repeated
from doctor.schooled import schooled_config, schooled_model
from keel.doctor.findings import Finding, ranked
from keel.doctor.gap import in_float32
from keel.doctor.keel_subject import build_subject
from keel.doctor.measure import examine
from keel.doctor.preflight import MEASURES

pytestmark = pytest.mark.doctor


HERE = "doctor.faults_travel"
FILLED = "data.chat_template=default"  # plain prompts go into the tokenizer's template too
MARKED = "data.allow_control_tokens=true"  # prompts with marks of their own
TALK = ["task={name: 'doctor.faults:talking'}", "rollout.max_turns=2", "rollout.max_completion_length=40"]


def model(name: str) -> str:
    return f"model.name={HERE}:{name}"


def task(name: str) -> str:
    return f"task={{name: '{HERE}:{name}'}}"


def engine(name: str) -> str:
    return f"rollout.engine={HERE}:{name}"


FAULTS = {
    "a layer that was not loaded": ("model/missing-weights", [model("forgotten_layer")]),
    "a tokenizer with other ids": ("model/tokenizer", [model("other_ids")]),
    "an end that nobody stops at": ("model/end-token", [model("another_end")]),
    "a template without the question": ("prompt/no-question", [FILLED, model("loses_the_question")]),
    "a template that cuts the question": ("prompt/no-question", [FILLED, model("cuts_the_question")]),
    "a template without the system prompt": (
        "prompt/no-question",
        [model("loses_the_system_prompt"), "data.system_prompt=Answer with one digit."],
    ),
    "a template without the header": ("prompt/no-header", [FILLED, model("loses_the_header")]),
    "marks written by hand, without the header": ("prompt/no-header", [task("marks_without_header"), MARKED]),
    "a tokenizer that cuts": ("prompt/no-question", [model("cutting_tokenizer")]),
    "the answer in the prompt": ("prompt/answer-leak", [task("leaking_answers")]),
    "prompts cut in the engine": ("sampler/other-prompt", [engine("CutReported")]),
    "texts of neighbours": ("output/text", [engine("OthersText")]),
    "texts with special tokens": ("output/text", [engine("SpecialTokens")]),
    "texts with special tokens, several turns": ("output/text", [*TALK, engine("SpecialTokens")]),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_fault_is_named_first(fault: str) -> None:
    check_named_first(*FAULTS[fault], whole=not repeated(FAULTS, fault))


def probed(*overrides: str) -> list[Finding]:
    """The findings of the probes of the model, of prompts and of travel only."""
    subject = build_subject(schooled_config(*overrides))
    with closing(subject.run):
        outcomes = examine([m for m in MEASURES if m.name in TRAVEL], subject)
    return [finding for outcome in outcomes for finding in outcome.findings]


TRAVEL = ("model", "prompts", "prompt format", "loading", "travel")
FOUND = {
    "a tokenizer without digits": ("model/tokenizer", [model("without_digits")]),
    "a vocabulary filled up with its own rows": ("model/tokenizer", [model("filled_up")]),
    "words added that were never trained": ("model/tokenizer", [model("grown"), MARKED]),
    "ordinary tokens as ends": ("model/end-token", [model("ends_at_digits")]),
    "a model that misses BOS": ("prompt/no-bos", [model("on_bos")]),
    "prompts cut, learned positions": (
        "sampler/other-prompt",
        ["model.name=doctor.faults:schooled_absolute", engine("CutReported")],
    ),
    "prompts cut in silence": ("sampler/other-prompt", [engine("CutSilent")]),
    "prompts cut, reported whole": ("sampler/other-prompt", [engine("RescoredCut")]),
    "a second BOS in the engine": ("sampler/other-prompt", [engine("SecondBosReported")]),
    "prompts without their end": ("sampler/other-prompt", [engine("WithoutEndReported")]),
    "prompts without their end, in silence": ("sampler/other-prompt", [engine("WithoutEndSilent")]),
    "a space after the prompts": ("sampler/other-prompt", [engine("SpacedReported")]),
    "a text of its own before the prompts": ("sampler/other-prompt", [engine("PrefixedReported")]),
    "prompts that have lost their spaces": ("sampler/other-prompt", [engine("SpacelessReported")]),
    "first turns left out": ("sampler/other-prompt", [*TALK, engine("FirstTurnLeftOutReported")]),
    "replies cut in the engine": ("sampler/other-prompt", [*TALK, engine("RepliesCutReported")]),
    "one prompt for all": ("sampler/other-prompt", [engine("FirstPromptForAll")]),
    "completions rotated": ("sampler/swapped", [engine("Rotated")]),
    "completions rotated, in silence": ("sampler/swapped", [engine("RotatedSilent")]),
    "completions transposed": ("sampler/swapped", [engine("Transposed")]),
    "an empty thought before answers, no header": ("prompt/no-header", [FILLED, model("empty_thought_headless")]),
    "blanks between two BOS": ("prompt/double-bos", [task("blank_between_bos"), MARKED]),
    "a step of copies": ("task/repeats", [task("copies"), "rollout.prompts_per_step=8"]),
}


@pytest.mark.parametrize("fault", FOUND)
def test_the_fault_is_found(fault: str) -> None:
    code, overrides = FOUND[fault]
    assert ranked(probed(*overrides))[0].code == code


def test_a_range_without_held_out_problems_is_one_of_few_problems() -> None:
    few = "task={name: arithmetic, skill: max, low: 5, high: 6}"
    assert "task/repeats" in [found.code for found in probed(few, "rollout.prompts_per_step=4", "run.max_steps=100")]


def test_weights_of_16_bits_are_read_in_fp32_and_come_back() -> None:
    setup = build_subject(schooled_config("model.dtype=bfloat16"))
    model = setup.policy.model.eval()
    ids = torch.tensor([setup.groups[0].prompt_tokens])
    with closing(setup.run), torch.no_grad():
        expected, rounded = copy.deepcopy(model).float()(input_ids=ids).logits, model(input_ids=ids).logits
        with in_float32(setup):
            exact = model(input_ids=ids).logits
        assert torch.equal(exact, expected)
        assert not torch.equal(exact, rounded.float())
        assert torch.equal(model(input_ids=ids).logits, rounded)


def test_weights_that_the_checkpoint_lacks_are_named(tmp_path: Path) -> None:
    policy, tokenizer = schooled_model()
    policy.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    whole = load_file(tmp_path / "model.safetensors")
    folder = f"model.name={tmp_path}"
    assert probed(folder) == []
    others = {name.replace("layers.1.mlp", "layers.1.feed_forward"): tensor for name, tensor in whole.items()}
    save_file(others, tmp_path / "model.safetensors", {"format": "pt"})
    (first, *_) = probed(folder)
    assert first.code == "model/missing-weights"
    assert first.evidence.startswith("3 of 21 weights are not in the checkpoint, such as model.layers.1.mlp.down_proj")
    assert "3 weights of the checkpoint are not part of the model" in first.evidence
    fewer = {name: tensor for name, tensor in whole.items() if "layers.1." not in name}
    save_file(fewer, tmp_path / "model.safetensors", {"format": "pt"})
    (first, *_) = probed(folder)
    assert first.code == "model/missing-weights"
    assert first.evidence.startswith("9 of 21 weights are not in the checkpoint")


def test_as_many_problems_as_a_step_asks_for_are_too_few_for_a_long_run_alone() -> None:
    stuck = ["task={name: 'doctor.faults_objective:same_every_step'}", "rollout.prompts_per_step=16"]
    assert [finding.code for finding in probed(*stuck, "run.max_steps=100")] == ["task/repeats"]
    assert probed(*stuck, "run.max_steps=5") == []


def test_a_small_pool_that_each_step_exhausts_is_no_batch_that_stays() -> None:
    pool = ["task={name: arithmetic, skill: max, low: 0, high: 2}", "rollout.prompts_per_step=16", "run.max_steps=5"]
    assert "task/repeats" not in [finding.code for finding in probed(*pool)]


HEALTHY = {
    "plain text": [],
    "another seed": ["run.seed=2"],
    "the template of the tiny model": [FILLED],
    "a system prompt": ["data.system_prompt=Answer with one digit."],
    "brackets around the user": [FILLED, model("inst")],
    "a thought after the header": [FILLED, model("thinking")],
    "a thought after the header, with a system prompt": [model("thinking"), "data.system_prompt=Write\n\na digit."],
    "an empty thought before answers": [FILLED, model("empty_thought")],
    "an empty thought before answers, always opened": [FILLED, model("empty_thought_always_opened")],
    "answers in a channel": [FILLED, model("channels")],
    "questions as JSON": [FILLED, model("always_opened")],
    "markers that are ordinary text": ["data.chat_template=chatml"],
    "examples before the question": [task("few_shots")],
    "marks written by hand": [task("marks_with_header"), MARKED],
    "the answer among its operands": [task("choices")],
    "a tokenizer without BOS": [model("without_bos")],
    "spaces around texts": [engine("Stripped")],
    "several turns": TALK,
    "episodes that begin alike": [*TALK[1:], task("alike")],
    "several turns in a template": [*TALK, FILLED],
    "log-probabilities after filters": ["rollout.top_p=0.8", "rollout.engine=doctor.faults:OnlyAfterFilters"],
    "LoRA": ["model.lora={r: 4}"],
    "a stop string": ["rollout.stop=['5']"],
    "a repeated digit": ["task={name: arithmetic, skill: copy, digits: 2}"],
    "a question in words": ["task={name: arithmetic, skill: max, style: words, low: 0, high: 9}"],
}


# Templates that this model was never taught, which is a finding of its own: what they write does travel.
UNTAUGHT = (
    "brackets around the user",
    "answers in a channel",
    "questions as JSON",
    "markers that are ordinary text",
    "marks written by hand",  # without which completions earn twice as much
    "a system prompt",  # without which they earn ten times as much
    "a thought after the header, with a system prompt",
)


@pytest.mark.parametrize("name", HEALTHY)
def test_nothing_is_found_on_what_travels_well(name: str) -> None:
    found = {finding.code for finding in probed(*HEALTHY[name]) if finding.severity != "note"}
    assert found == ({"prompt/format"} if name in UNTAUGHT else set())
