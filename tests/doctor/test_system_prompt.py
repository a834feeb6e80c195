"""A system prompt that the model does not know, told from one that asks for another form, and from none."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from doctor.schooled import schooled_config
from doctor.test_frames import setup_of
from keel.base.types import Problem
from keel.doctor.probes import system_prompt as module
from keel.doctor.probes.earnings import Earned
from keel.doctor.probes.system_prompt import system_findings
from keel.doctor.thresholds import load_thresholds
from keel.models.tiny import CHAT_TEMPLATE
from keel.run.build import build_renderer

SURELY, PERHAPS, NOT = (Earned(0.1, 0.6, 64, chance, chance < 1e-4) for chance in (1e-9, 0.02, 0.3))
LESS = Earned(0.5, 0.1, 4, 1.0, False)


def asked(monkeypatch: pytest.MonkeyPatch, earned: Earned, irritating: str, *options: str, text: bool) -> list[Any]:
    """What is found of a model that a letter irritates; questions are texts, or messages."""
    setup = setup_of(CHAT_TEMPLATE, irritating=irritating)
    setup.config, setup.failures = schooled_config(*options), ()
    setup.built = SimpleNamespace(judge=SimpleNamespace(remote=False))
    sample = setup.run.task.sample

    def texts(count: int, *, seed: int, step: int) -> list[Problem]:
        return [Problem(p.key, p.prompt[0]["content"], p.answer) for p in sample(count, seed=seed, step=step)]

    if text:
        setup.run.task.sample = texts

    def judged(setup: Any, config: Any, thresholds: Any) -> Earned:
        (problem,) = setup.run.task.sample(1, seed=0, step=0)
        prompt = setup.policy.tokenizer.decode(list(build_renderer(config, setup.policy.tokenizer).prompt(problem)))
        # what is compared is the same template without the prompt, or none where that is what the model knows
        assert prompt == ("0 =" if "<" in irritating else "<bos><|user|>0 =<eos><|assistant|>")
        return earned

    monkeypatch.setattr(module, "earned_otherwise", judged)
    return [*system_findings(setup, load_thresholds())]


@pytest.mark.parametrize("text", [True, False])
@pytest.mark.parametrize(
    ("options", "irritating", "earned", "severity"),
    [
        (["data.system_prompt=Think first."], "T", SURELY, "error"),
        (["data.system_prompt=Think first."], "T", PERHAPS, "warning"),
        (["data.system_prompt=Think first."], "T", NOT, None),
        (["data.system_prompt=Think first."], "T", LESS, None),
        (["data.system_prompt=Be brief."], "T", SURELY, None),
        (["data.system_prompt=Be brief."], "=", SURELY, None),
        (["data.chat_template=default"], "T", SURELY, None),
    ],
    ids=["foreign", "likely", "chance", "asks for a form", "known", "no skill either way", "none"],
)
def test_a_system_prompt_that_the_model_does_not_know(
    monkeypatch: pytest.MonkeyPatch,
    options: list[str],
    irritating: str,
    earned: Earned,
    severity: str | None,
    text: bool,
) -> None:
    found = asked(monkeypatch, earned, irritating, *options, text=text)
    assert [(finding.code, finding.severity) for finding in found] == [("prompt/format", severity)] * bool(severity)
    for finding in found:
        assert ("nothing, if" in finding.advice) == (severity == "warning")
        assert finding.options == (("data.system_prompt=null", "data.chat_template=default"),)


def test_a_template_that_a_system_prompt_brings_is_what_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under `auto` a text is put into the template because of it: without both, answers are likelier."""
    for irritating in ("<|user|>", "<|assistant|>"):
        (found,) = asked(monkeypatch, SURELY, irritating, "data.system_prompt=Be brief.", text=True)
        assert (found.code, found.options) == ("prompt/format", (("data.system_prompt=null",),))
        assert "the chat template that it brings" in found.cause


def test_rewards_of_elsewhere_are_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = setup_of(CHAT_TEMPLATE, irritating="T")
    setup.config, setup.failures = schooled_config("data.system_prompt=Think first."), ()
    setup.built = SimpleNamespace(judge=SimpleNamespace(remote=True))
    assert [*system_findings(setup, load_thresholds())] == []
