"""What a template writes too much, and ids that are off: found on models of known likelihoods."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from doctor.schooled import schooled_config
from keel.base.types import Problem
from keel.doctor.probes import renumbering
from keel.doctor.probes.fickle import fickle_findings
from keel.doctor.probes.frames import frame_findings, frame_of, matters
from keel.doctor.probes.gold_likelihood import Gold
from keel.doctor.probes.marks import mark_findings
from keel.doctor.probes.renumbering import shifted_findings
from keel.doctor.probes.repeats import contradiction_findings
from keel.doctor.thresholds import load_thresholds
from keel.envs import Task
from keel.models.tiny import CHAT_TEMPLATE, tiny_tokenizer
from keel.rollout.render import TEMPLATES, Renderer

HEADER = "{{ '<|assistant|>' }}"
THOUGHT = CHAT_TEMPLATE.replace(HEADER, "{{ '<|assistant|><think>' }}")
SYSTEM = CHAT_TEMPLATE.replace("{% for", "{{ '<|system|>Today is Friday.' + eos_token }}{% for", 1)
SURE = 12.0  # nats over any other token


class Triples(Task):
    """0 to 99, each once; the answer is the last digit of three times the number, and one more."""

    name = "triples"

    def sample(self, count: int, *, seed: int, step: int) -> list[Problem]:
        return [
            Problem(str(n), [{"role": "user", "content": f"{n} ="}], triple(n % 10)) for n in range(min(count, 100))
        ]

    def gold(self, problem: Problem) -> str:
        return str(problem.answer)


def triple(digit: int) -> str:
    return str((3 * digit + 1) % 10)


class Knowing(nn.Module):
    """Writes `answers[last digit read]`, unless a token that irritates it was read; elsewhere it expects nothing.

    After a token of `follows` it expects the token that is told there.
    """

    def __init__(self, size: int, answers: dict[int, int], irritating: set[int], follows: dict[int, int]) -> None:
        super().__init__()
        self.size, self.answers, self.irritating, self.follows = size, answers, irritating, follows

    def forward(self, input_ids: Any, **_: Any) -> Any:
        logits = torch.zeros(*input_ids.shape, self.size)
        for row, tokens in enumerate(input_ids.tolist()):
            for i, token in enumerate(tokens):
                digits = [self.answers[t] for t in tokens[: i + 1] if t in self.answers]
                if token in self.follows:
                    logits[row, i, self.follows[token]] = SURE
                elif digits and not self.irritating & set(tokens[: i + 1]):
                    logits[row, i, digits[-1]] = SURE
        return SimpleNamespace(logits=logits)


def setup_of(template: str, irritating: str = "", follows: tuple[str, ...] = (), *, off: int = 0) -> Any:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template

    def ids(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False))

    answers = {ids(str(d))[0] + off: ids(triple(d))[0] + off for d in range(10)}
    chain = [ids(text)[0] for text in follows]
    model = Knowing(len(tokenizer), answers, set(ids(irritating)), dict(pairwise(chain)))
    policy = SimpleNamespace(
        model=model, tokenizer=tokenizer, context_length=None, pad_id=tokenizer.pad_token_id, device="cpu"
    )
    config = schooled_config("data.chat_template=default")
    run = SimpleNamespace(task=Triples())
    return SimpleNamespace(config=config, policy=policy, run=run, shared={}, vocabulary=len(tokenizer))


def found(setup: Any) -> list[tuple[str, str]]:
    return [(finding.code, finding.evidence) for finding in frame_findings(setup, load_thresholds())]


def test_a_frame_is_cut_at_its_special_tokens() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = SYSTEM.replace(HEADER, "{{ '<|assistant|>So: ' }}")
    renderer = Renderer(tokenizer, chat_template="default")
    problem = Problem("a", "2 + 3 =")
    frame = frame_of(renderer, problem, renderer.prompt(problem))
    assert frame is not None
    texts = {name: "|".join(tokenizer.decode(list(frame.tokens[a:b])) for a, b in part) for name, part in frame.parts()}
    assert texts["under 1"].strip() == "So:"
    assert texts["words"].replace(" ", "") == "TodayisFriday.|So:"
    assert texts["after 0"] == "<eos>"
    whole = next(text for name, text in texts.items() if name == "before 0 to its end")
    assert whole.replace(" ", "") == "<|system|>TodayisFriday.<eos>"
    assert frame_of(renderer, Problem("a", "another question"), renderer.prompt(problem)) is None


def test_what_stands_between_messages_is_a_template_s_own_too() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE.replace("message['content']", "'So: ' + message['content']")
    renderer = Renderer(tokenizer, chat_template="default", system_prompt="Be brief.")
    problem = Problem("a", "2 + 3 =")
    frame = frame_of(renderer, problem, renderer.prompt(problem))
    assert frame is not None
    assert [tokenizer.decode(list(frame.tokens[a:b])).strip() for a, b in frame.words()] == ["So:", "So:"]


def test_what_irritates_the_model_and_surprises_it_is_found() -> None:
    for template in (THOUGHT, SYSTEM):
        text = "<think>" if template is THOUGHT else "Friday"
        ((code, evidence),) = found(setup_of(template, irritating=text[1] if template is THOUGHT else "F"))
        assert code == "prompt/format"
        assert text in evidence
    assert found(setup_of(CHAT_TEMPLATE, irritating="F")) == []


def test_a_thought_that_the_model_always_opens_is_its_own() -> None:
    """Answers are likelier without it all the same: after it the model would think first."""
    known = ("<|assistant|>", *"<think>")
    assert found(setup_of(THOUGHT, irritating="<", follows=known)) == []


def test_ids_that_are_off_by_one_are_found_and_right_ones_are_not() -> None:
    thresholds = load_thresholds()
    (finding,) = shifted_findings(setup_of(CHAT_TEMPLATE, off=1), thresholds)
    assert finding.code == "model/tokenizer"
    assert "1 higher" in finding.evidence
    assert [*shifted_findings(setup_of(CHAT_TEMPLATE), thresholds)] == []


class Twofold(Knowing):
    """Reads ids that are one higher as well, and is less sure of them; what irritates it is then another token."""

    blank: int

    def forward(self, input_ids: Any, **_: Any) -> Any:
        out = super().forward(input_ids)
        for row, tokens in enumerate(input_ids.tolist()):
            for i in range(len(tokens)) if self.blank + 1 in tokens else ():
                digits = [self.answers[t - 1] for t in tokens[: i + 1] if t - 1 in self.answers]
                out.logits[row, i] = 0.0
                if digits:
                    out.logits[row, i, digits[-1] + 1] = SURE / 2
        return out


def test_ids_that_help_less_than_another_template_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = setup_of(THOUGHT, irritating="<")
    own = setup.policy.model
    setup.policy.model = Twofold(own.size, own.answers, own.irritating, own.follows)
    setup.policy.model.blank = setup.policy.tokenizer.encode(" ", add_special_tokens=False)[0]
    assert [*shifted_findings(setup, load_thresholds())] == []
    assert found(setup)[0][0] == "prompt/format"
    monkeypatch.setattr(renumbering, "unframed_logp", lambda setup: -torch.inf)
    (finding,) = shifted_findings(setup, load_thresholds())
    assert "1 higher" in finding.evidence


def test_what_is_written_on_both_sides_of_a_message_is_found() -> None:
    quoted = CHAT_TEMPLATE.replace("message['content']", "'{' + message['content'] + '}'")
    ((code, evidence),) = found(setup_of(quoted, irritating="{}"))
    assert code == "prompt/format"
    assert "'{ … }'" in evidence


def test_a_gain_matters_by_its_size_or_by_what_it_leaves() -> None:
    """Eighteen tokens that lose two thirds of their surprise are e³ times as likely; one that does is not."""
    limits = load_thresholds()
    for length, before, after, expected in (
        (18, -0.27, -0.08, True),
        (2, -0.27, -0.08, False),
        (18, -1.0, -0.85, False),
        (1, -1.0, -0.7, True),
    ):
        assert matters([Gold((1,), (2,) * length)], [before], [after], limits) is expected


def marked(setup: Any) -> list[tuple[str, str]]:
    return [(finding.code, finding.evidence) for finding in mark_findings(setup, load_thresholds())]


def test_marks_that_are_spelled_in_letters_are_found() -> None:
    ((code, evidence),) = marked(setup_of(TEMPLATES["chatml"]))
    assert code == "prompt/format"
    assert "'<|im_start|>' becomes 12 tokens" in evidence
    assert marked(setup_of(CHAT_TEMPLATE)) == []


def test_a_pad_token_within_prompts_is_found() -> None:
    padded = CHAT_TEMPLATE.replace("eos_token", "'<pad>'")
    assert padded != CHAT_TEMPLATE
    ((code, evidence),) = marked(setup_of(padded))
    assert code == "prompt/format"
    assert "'<pad>', the pad token" in evidence


def test_marks_that_the_model_was_trained_on_are_its_own() -> None:
    """It answers behind them only: letters for marks, or padding for the end of a turn."""
    for template, needed in (
        (TEMPLATES["chatml"], "|"),
        (CHAT_TEMPLATE.replace("eos_token", "'<pad>'"), "<pad>"),
    ):
        setup = setup_of(template)
        (token,) = setup.policy.tokenizer.encode(needed, add_special_tokens=False)
        knowing = setup.policy.model.forward

        def needing(input_ids: Any, token: int = token, knowing: Any = knowing, **options: Any) -> Any:
            known = knowing(input_ids).logits * (input_ids == token).cumsum(-1).clamp_max(1)[..., None]
            return SimpleNamespace(logits=known)

        setup.policy.model.forward = needing
        assert marked(setup) == []


class Judge:
    """Pays a problem's own answer."""

    remote = False

    def judge(self, problem: Problem, answers: Any) -> list[Any]:
        return [SimpleNamespace(total=float(turns[-1] == problem.answer)) for turns in answers]

    def drain(self) -> None:
        pass


def test_rows_that_contradict_each_other_are_found() -> None:
    for answers, codes in ((("1", "2"), ["data/misaligned"]), (("1", "1"), [])):
        setup = setup_of(CHAT_TEMPLATE)
        setup.built = SimpleNamespace(judge=Judge())
        rows = [(Problem(f"{n}/{a}", f"{n} =", a), (n,)) for n in range(10) for a in answers]
        setup.shared["steps"] = [rows]
        assert [finding.code for finding in contradiction_findings(setup, load_thresholds())] == codes


class Alternating(Judge):
    """Pays every second one that it is shown; the batch was judged before, and one more."""

    shown = 1

    def judge(self, problem: Problem, answers: Any) -> list[Any]:
        rewards = [SimpleNamespace(total=float((self.shown + i) % 2)) for i in range(len(answers))]
        self.shown += len(answers)
        return rewards


def test_a_judge_that_alternates_is_fickle_in_one_order_or_the_other() -> None:
    setup = setup_of(CHAT_TEMPLATE)
    setup.built = SimpleNamespace(judge=Alternating())
    setup.failures, setup.multi_turn, setup.judgements = (), False, 60
    completions = [SimpleNamespace(text=str(i)) for i in range(4)]
    rewards = [SimpleNamespace(total=float(i % 2)) for i in range(4)]
    setup.groups = [SimpleNamespace(problem=Problem("a", "1 ="), completions=completions, rewards=rewards)]
    assert [finding.code for finding in fickle_findings(setup, load_thresholds())] == ["reward/fickle"]
