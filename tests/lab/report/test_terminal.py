"""Rollouts in the terminal: the right ones, in the right colours, readable without any."""

from __future__ import annotations

import io
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from keel.api import train
from keel.base.errors import KeelError
from keel.cli import main
from keel.doctor.runs import RunRecord
from keel.envs.episode import SingleTurn
from keel.lab.report import write_report
from keel.lab.report.rollouts import choose, message_text, messages_of, read_step, tokens_of, turns_of
from keel.lab.report.samples import completion, section, tokens
from keel.lab.report.terminal import show_rollouts
from keel.models.tiny import word_tokenizer
from keel.trainer.records import token_texts
from lab.report.synthetic import make_run
from trainer.small import Letters, small_config


def record(**changes: Any) -> dict[str, Any]:
    """Two turns of the policy around a tool's answer."""
    return {
        "step": 5,
        "problem": "search/1",
        "group": 0,
        "tracked": False,
        "messages": [{"role": "system", "content": "Search."}, {"role": "user", "content": "Who [b]wrote[/b] it?"}],
        "prompt": "Search.\nWho [b]wrote[/b] it?",
        "completion": "call\nfound 1921\nanswer",
        "tokens": ["call", "<end>", "found", " 1921", "answer"],
        "action": [True, True, False, False, True],
        "kl": [1.0, 0.0, 0.0, 0.0, -1.0],
        "reward": 1.5,
        "parts": {"exact": 1.0, "format": 0.5},
        "advantage": -0.25,
        "stop_reason": "length",
        **changes,
    }


def shown(records: list[dict[str, Any]], **options: Any) -> str:
    out = io.StringIO()
    console = Console(file=out, width=120, highlight=False, **options)
    show_rollouts("runs/x", 5, records, console, recorded=len(records))
    return out.getvalue()


def test_what_the_judge_saw_is_shown_as_text() -> None:
    details = "```python\nprint('[b]<b>')\n```\n✗ input '1': printed '<b>', expected '2'"
    for line in details.splitlines():
        assert line in shown([record(details=details)], no_color=True)
    assert "judge" not in shown([record()])
    assert "expected &#x27;2&#x27;" in completion(record(details=details), 1.0)
    assert "<b>'" not in completion(record(details=details), 1.0)


def test_what_is_read_of_a_record() -> None:
    tokens = tokens_of(record())
    assert [token.sampled for token in tokens] == [True, True, False, False, True]
    assert [token.kl for token in tokens] == [1.0, 0.0, None, None, -1.0]
    turns = turns_of(tokens)
    assert [(sampled, "".join(t.text for t in turn)) for sampled, turn in turns] == [
        (True, "call<end>"),
        (False, "found 1921"),
        (True, "answer"),
    ]
    assert tokens_of(record(kl=[1.0])) == []
    assert tokens_of(record(tokens=None)) == []
    assert [token.kl for token in tokens_of(record(kl=None))] == [None] * 5


def test_lines_from_before_action_was_recorded() -> None:
    old = {name: value for name, value in record(kl=[1.0, 0.5, None, None, 0.1]).items() if name != "action"}
    assert [token.sampled for token in tokens_of(old)] == [True, True, False, False, True]
    unmeasured = {**old, "kl": None}
    assert all(token.sampled for token in tokens_of(unmeasured))


def test_messages_and_calls_of_tools() -> None:
    assert [m["role"] for m in messages_of(record())] == ["system", "user"]
    plain = record(messages=[{"role": "user", "content": "2+2="}], prompt="2+2=")
    assert messages_of(plain) == [{"role": "", "content": "2+2="}]
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "search", "arguments": "{}"}}]}
    assert message_text(call) == '→ {"name": "search", "arguments": "{}"}'


def test_without_colour_everything_can_still_be_told() -> None:
    text = shown([record()], no_color=True)
    assert "\x1b" not in text
    lines = ["runs/x, step 5", "system: Search.", "user: Who [b]wrote[/b] it?", "call<end>", "found 1921", "answer"]
    facts = [
        "reward 1.5 (exact 1, format 0.5)",
        "advantage -0.25",
        "stopped: length",
        "log-ratio +0 nats over 3 tokens (k1 sample)",
    ]
    for part in (*lines, *facts, "call +1.000", "answer -1.000", "context, not trained on"):
        assert part in " ".join(text.split()), part
    speakers = [line.split()[0] for line in text.splitlines() if line.strip().startswith(("policy", "context"))]
    assert speakers == ["policy", "context", "policy"]


def test_tools_speak_under_their_name_and_are_counted() -> None:
    counts = {"turn/count": 2.0, "tool/calls": 2.0, "tool/errors": 1.0, "tool/malformed": 1.0, "tool/timeout": 0.0}
    text = shown([record(counts=counts)], no_color=True)
    assert "2 turns · 2 tool calls (1 malformed)" in text
    speakers = [line.split()[0] for line in text.splitlines() if line.strip().startswith(("policy", "tools"))]
    assert speakers == ["policy", "tools", "policy"]
    page = tokens(record(counts=counts), 1.0)
    assert page.count("<span class='turn'><b>policy</b>") == 2
    assert page.count("<span class='turn heard'><b>tools</b>") == 1


def test_tokens_of_words_keep_the_spaces_between_them() -> None:
    tokenizer = word_tokenizer(["<retrieve>", "</retrieve>", "Dunford", "."])
    text = "<retrieve> Dunford </retrieve>\nDunford ."
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert token_texts(tokenizer, ids) == ["<retrieve>", " Dunford", " </retrieve>", "\n", "Dunford", " ."]
    assert "".join(token_texts(tokenizer, ids)) == text


def test_heat_is_orange_above_blue_below_and_none_at_zero() -> None:
    text = shown([record()], force_terminal=True, color_system="truecolor")
    assert "48;2;214;96;18mcall" in text
    assert "48;2;37;99;195manswer" in text
    assert "call\x1b[0m<end> " in text  # no move, no colour
    assert "\x1b[2;3mfound" in text  # context: dim and italic
    assert "\x1b[31madvantage -0.25" in text


def test_a_log_ratio_is_not_called_kl() -> None:
    """The sum of k1 over one completion: below 0 where the policy makes it less likely."""
    text = " ".join(shown([record(kl=[-1.0, 0.25, None, None, -1.0])], no_color=True).split())
    assert "log-ratio -1.75 nats over 3 tokens (k1 sample)" in text
    assert "k1 sample, may be negative" in text
    page = section(RunRecord(Path("r"), "r", rollouts=(record(kl=[-1.0, 0.25, None, None, -1.0]),)))
    assert "k1 sample, may be negative" in page
    assert "KL -" not in text + page


def test_unmeasured_kl_is_said() -> None:
    assert "KL was not measured" in shown([record(kl=None)], no_color=True)


def test_which_ones() -> None:
    records = [record(problem=p, group=g, reward=r) for p, g, r in (("a", 0, 0.0), ("a", 0, 2.0), ("b", 1, 1.0))]
    assert [r["reward"] for r in choose(records)] == [0.0, 2.0, 1.0]
    assert [r["reward"] for r in choose(records, order="best", limit=2)] == [2.0, 1.0]
    assert [r["reward"] for r in choose(records, order="worst")] == [0.0, 1.0, 2.0]
    assert [r["reward"] for r in choose(records, problem="a")] == [0.0, 2.0]
    assert [r["reward"] for r in choose(records, group=1)] == [1.0]
    with pytest.raises(KeelError, match="there are a, b"):
        choose(records, problem="c")
    with pytest.raises(KeelError, match="there are 0, 1"):
        choose(records, group=7)


def test_the_step_that_is_asked_for(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", total=20)  # rollouts at 1, 10 and 20
    step, records = read_step(run)
    assert (step, len(records)) == (20, 10)
    assert {r["step"] for r in read_step(run, 10)[1]} == {10}
    for step, near in ((4, "1 and 10"), (25, "20"), (0, "1")):
        with pytest.raises(KeelError, match=f"nearest steps with rollouts are {near}$"):
            read_step(run, step)
    with (run / "rollouts.jsonl").open("a") as file:
        file.write('{"step": 21, "problem": "torn')
    assert read_step(run)[0] == 20
    with pytest.raises(KeelError, match="no run directory"):
        read_step(tmp_path / "none")
    (run / "rollouts.jsonl").unlink()
    with pytest.raises(KeelError, match=r"log\.rollouts_every"):
        read_step(run)


def test_what_a_task_replies_is_recorded_as_context(tmp_path: Path, capsys: Any) -> None:
    class Going(SingleTurn):
        async def step(self, text: str) -> str | None:  # type: ignore[override]
            await super().step(text)
            return "go on" if len(self.turns) == 1 else None

    class Replying(Letters):
        def start(self, problem: Any) -> Going:
            return Going(partial(self.reward, problem))

    settings = ["run.max_steps=1", "rollout.max_turns=2", "rollout.max_completion_length=24", f"run.dir={tmp_path}"]
    run = train(small_config(*settings, "rollout.stop=[a,e,i,o,s]"), task=Replying()).directory
    both = [r for r in read_step(run, 1)[1] if not all(r["action"])]
    assert both
    for each in both:
        turns = turns_of(tokens_of(each))
        assert [sampled for sampled, _ in turns] == [True, False, True]
        assert "".join(token.text for token in turns[1][1]) == "go on"
        assert all(token.kl is None for token in turns[1][1])
        assert all(token.kl is not None for token in turns[2][1])
    capsys.readouterr()
    assert main(["show", str(run), "--problem", both[0]["problem"], "--no-color"]) == 0
    assert "context go on" in capsys.readouterr().out


def test_the_command_on_a_real_run(tmp_path: Path, capsys: Any) -> None:
    """Training writes what showing reads: as many flags as tokens, and the page is made of the same."""
    run = train(small_config("run.max_steps=1", f"run.dir={tmp_path}")).directory
    capsys.readouterr()
    assert main(["show", str(run), "--best", "--limit", "2", "--json"]) == 0
    records = json.loads(capsys.readouterr().out)
    assert len(records) == 2
    assert records[0]["reward"] >= records[1]["reward"]
    for each in records:
        assert len(each["action"]) == len(each["tokens"]) == len(each["kl"])
        assert all(each["action"])
    assert main(["show", str(run), "--no-color"]) == 0
    text = capsys.readouterr().out
    assert "policy" in text
    assert "reward" in text
    assert write_report([run]).is_file()
    assert main(["show", str(run), "--step", "9"]) == 2
    assert "nearest steps with rollouts are 1" in capsys.readouterr().err
    assert main(["show", str(run), "--best", "--worst"]) == 2
    assert "exclude each other" in capsys.readouterr().err
