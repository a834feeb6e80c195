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
from keel.lab.report.samples import completion, section
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
    assert [(turn.sampled, turn.text) for turn in turns_of(record())] == [
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
    page = completion(record(counts=counts), 1.0)
    assert page.count("<div class='turn'><p><b>policy</b>") == 2
    assert page.count("<div class='turn heard'><p><b>tools</b>") == 1


def described(*turns: tuple[int, int, str]) -> list[dict[str, Any]]:
    """Turns as they are recorded: sampled tokens, tokens of the reply, note."""
    return [{"tokens": t, "reply": r, "stop_reason": "eos", "note": note} for t, r, note in turns]


def test_turns_are_cut_as_they_were_taken() -> None:
    """A turn without a reply ends where the next begins; lengths that are not the tokens' own are not used."""
    taken = record(turns=described((1, 0, "first"), (1, 2, "second"), (1, 0, "")), kl=[1.0, 0.5, None, None, -1.0])
    assert [(t.speaker, t.text, t.note) for t in turns_of(taken)] == [
        ("policy", "call", "first"),
        ("policy", "<end>", "second"),
        ("environment", "found 1921", ""),
        ("policy", "answer", ""),
    ]
    assert [turn.caption.partition(" · stopped")[0] for turn in turns_of(taken)[:2]] == [
        "turn 1 · 1 token · log-ratio +1 nats",
        "turn 2 · 1 token · log-ratio +0.5 nats",
    ]
    for wrong in ([(2, 1, ""), (1, 0, "")], [(2, 2, "")], [(1, 3, ""), (1, 0, "")], [(5, 0, "")], [("x", 2, "")]):
        texts = [turn.text for turn in turns_of(record(turns=described(*wrong)))]
        assert texts == ["call<end>", "found 1921", "answer"]
    assert turns_of(record(turns="x"))[0].text == "call<end>"


def test_one_turn_of_one_is_shown_as_before() -> None:
    alone = record(tokens=["an", "swer"], action=[True, True], kl=[0.1, -0.1])
    assert turns_of(alone)[0].caption == ""
    assert "class='turn" not in completion(alone, 1.0)
    assert "turn 1" not in shown([alone], no_color=True)
    assert "class='turn" in completion({**alone, "turns": described((2, 0, "→ end()"))}, 1.0)


def long_episode(turns: int = 20, lines: int = 30) -> dict[str, Any]:
    """Each turn says its number and is answered by many lines."""
    tokens = [
        part for number in range(turns) for part in (f"say{number}.", "\n".join(f"{number}:{i}" for i in range(lines)))
    ]
    notes = described(*((1, 1, f"note{number}.") for number in range(turns)))
    kl = [0.5, None] * turns
    return record(tokens=tokens, action=[True, False] * turns, kl=kl, turns=notes, completion="")


def test_long_episodes_are_folded_and_can_be_had_whole() -> None:
    episode = long_episode()
    short = " ".join(shown([episode], no_color=True).split())
    assert [number for number in range(20) if f"note{number}." in short] == [0, 1, 18, 19]
    assert "16 turns more, 32 tokens, log-ratio +8 nats: keel show --full" in short
    assert "0:11" in short
    assert "0:12" not in short
    assert "18 lines more" in short
    out = io.StringIO()
    show_rollouts("r", 1, [episode], Console(file=out, no_color=True, width=120), recorded=1, full=True)
    whole = out.getvalue()
    assert all(f"say{n}." in whole and f"note{n}." in whole and f" {n}:29" in whole for n in range(20))
    page = completion(episode, 1.0)
    before, fold = page.split("<details>")
    fold, after = fold.split("</details>")
    assert [n for n in range(20) if f"say{n}." in before + after] == [0, 1, 18, 19]
    assert [n for n in range(20) if f"say{n}." in fold] == list(range(2, 18))
    assert "16 turns more" in fold
    assert "<details>" not in completion(long_episode(turns=6), 1.0)


def test_what_a_policy_writes_does_not_steer_the_terminal() -> None:
    """Escapes of colours, titles and cursors, reversed text and halves of characters are printed as text."""
    attack = "\x1b]0;title\x07\x1b[2J\x9b1A\u202etxt.exe\ud83d\r"
    texts = {"tokens": [attack] * 5, "completion": attack, "parts": {attack: 1.0}, "stop_reason": attack}
    hostile = record(**texts, details=attack, problem=attack, turns=described((2, 2, attack), (1, 0, attack)))
    unsplit = record(**{**texts, "tokens": None})
    text = shown([hostile, unsplit, record(messages=[{"role": attack, "content": attack}])], no_color=True)
    assert text.encode("utf-8").decode() == text
    assert not set(text) & set("\x1b\x07\x9b\u202e\r")
    assert text.count(r"\x1b[2J") > 8


def test_a_completion_outside_the_policy_term_is_marked() -> None:
    assert "not in the policy term" in " ".join(shown([record(policy_term=False)], no_color=True).split())
    assert "not in the policy term" not in shown([record()], no_color=True)


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
        turns = turns_of(each)
        assert [turn.sampled for turn in turns] == [True, False, True]
        assert [turn["tokens"] for turn in each["turns"]] == [len(turn.tokens) for turn in turns[::2]]
        assert turns[1].text == "go on"
        assert all(token.kl is None for token in turns[1].tokens)
        assert all(token.kl is not None for token in turns[2].tokens)
    capsys.readouterr()
    assert main(["show", str(run), "--problem", both[0]["problem"], "--no-color"]) == 0
    assert "environment go on" in capsys.readouterr().out


def test_the_command_on_a_real_run(tmp_path: Path, capsys: Any) -> None:
    """Training writes what showing reads: as many flags as tokens, and the page is made of the same."""
    rollout = ["rollout.max_completion_length=24", "rollout.stop=[a,e,i]", "loss.mask_truncated_completions=true"]
    run = train(small_config("run.max_steps=1", *rollout, f"run.dir={tmp_path}")).directory
    trained = {(r["stop_reason"], r.get("policy_term", True)) for r in read_step(run, 1)[1] if not r["tracked"]}
    assert trained == {("length", False), ("stop", True), ("eos", True)}
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
