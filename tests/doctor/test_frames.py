"""The parts that a template adds, and rewards that contradict each other or themselves."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from doctor.asked import HEADER, SYSTEM, asked
from keel.base.types import Problem
from keel.doctor.probes.episodes import rejudged_findings
from keel.doctor.probes.problems import contradiction_findings
from keel.doctor.rendering import frame_of
from keel.models.tiny import CHAT_TEMPLATE, tiny_tokenizer
from keel.rollout.render import Renderer


def test_a_frame_is_cut_at_its_special_tokens() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = SYSTEM.replace(HEADER, "{{ '<|assistant|>So: ' }}")
    renderer = Renderer(tokenizer, chat_template="default")
    problem = Problem("a", "2 + 3 =")
    frame = frame_of(renderer, problem, renderer.prompt(problem))
    assert frame is not None
    texts = {}
    for name, part in frame.parts().items():
        texts[name] = "|".join(tokenizer.decode(list(frame.tokens[a:b])) for a, b in part)
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


class Judge:
    """A judge that pays a problem's own answer."""

    remote = False

    def judge(self, problem: Problem, answers: Any) -> list[Any]:
        return [SimpleNamespace(total=float(turns[-1] == problem.answer)) for turns in answers]

    def drain(self) -> None:
        pass


def test_rows_that_contradict_each_other_are_found() -> None:
    for answers, codes in ((("1", "2"), ["data/misaligned"]), (("1", "1"), [])):
        setup = asked().swapped(built=SimpleNamespace(judge=Judge(), run=asked().run))
        rows = [(Problem(f"{n}/{a}", f"{n} =", a), (n,)) for n in range(10) for a in answers]
        setup.shared["steps"] = [rows]
        assert [finding.code for finding in contradiction_findings(setup)] == codes


class Alternating(Judge):
    """A judge that pays every second completion, starting with the second one of the first call."""

    shown = 1

    def judge(self, problem: Problem, answers: Any) -> list[Any]:
        rewards = [SimpleNamespace(total=float((self.shown + i) % 2)) for i in range(len(answers))]
        self.shown += len(answers)
        return rewards


def test_a_judge_that_alternates_is_found_in_one_order_or_the_other() -> None:
    setup = asked().swapped(built=SimpleNamespace(judge=Alternating(), run=asked().run))
    completions = [SimpleNamespace(text=str(i)) for i in range(4)]
    rewards = [SimpleNamespace(total=float(i % 2)) for i in range(4)]
    group = SimpleNamespace(problem=Problem("a", "1 ="), completions=completions, rewards=rewards)
    setup = setup.swapped(batch=SimpleNamespace(groups=[group]))
    assert [finding.code for finding in rejudged_findings(setup)] == ["reward/nondeterministic"]
