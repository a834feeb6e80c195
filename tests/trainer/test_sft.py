"""Behaviour cloning: the loss is on completions, the warm start is done once, a file will do."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

import keel
from keel.api import supervise
from keel.base.errors import KeelError
from keel.base.types import Problem
from keel.envs import TaskWrapper
from keel.envs.mixture import mixture
from keel.envs.registry import build_task
from keel.models.tiny import tiny_tokenizer
from keel.run.build import build_policy, build_warmstart
from keel.run.warmstart import warmstart_folder
from keel.trainer.optim import Optimizer, build_schedule
from keel.trainer.options import OptimOptions, WarmstartOptions
from keel.trainer.sft import MAX_CONSECUTIVE_SKIPS, DrawCount, gold_examples, make_example, sft, sft_step
from trainer.small import BASE, small_config


def test_the_loss_is_the_mean_over_completion_tokens_alone() -> None:
    loaded = build_policy(small_config())
    tokenizer = loaded.tokenizer
    texts = [("1+2=", "3"), ("10+20=", "30")]
    examples = [make_example(tokenizer.encode(p), c, tokenizer) for p, c in texts]
    total, tokens = 0.0, 0
    for example in examples:
        ids = torch.tensor([[*example.prompt_tokens, *example.completions[0].tokens]])
        start = len(example.prompt_tokens)
        logp = loaded.model(ids).logits[0, start - 1 : -1].log_softmax(-1).gather(-1, ids[0, start:, None])
        total, tokens = total - logp.sum().item(), tokens + len(logp)
    for budget in (8192, 4):
        optimizer = Optimizer(loaded.model, OptimOptions(learning_rate=1e-30))
        line = sft_step(loaded, examples, optimizer, WarmstartOptions(), OptimOptions(microbatch_tokens=budget))
        assert line["loss/total"] == pytest.approx(total / tokens, rel=1e-5)
    assert tokens == 5  # "3", "30", and the end of each


def test_it_learns_the_gold_answers() -> None:
    config = small_config("warmstart.steps=60", "warmstart.learning_rate=0.02", "warmstart.batch_size=8")
    loaded = build_policy(config)
    start = build_warmstart(config, loaded)
    losses: list[float] = []
    sft(loaded, *start, lambda step, line: losses.append(line["loss/total"]))
    assert losses[-1] < 0.2 * losses[0]


@pytest.mark.slow
def test_an_entropy_bonus_leaves_the_share_of_other_tokens_that_its_optimum_has() -> None:
    """max log p + c·H has p with p + (V − 1)·p·exp(−1/(c·p)) = 1, and the other tokens share the rest evenly."""
    loaded = build_policy(small_config())
    example = make_example(loaded.tokenizer.encode("1+2="), "3", loaded.tokenizer)
    coef, size = 0.3, loaded.model.config.vocab_size
    low, high = 0.5, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (
            (middle, high) if middle + (size - 1) * middle * math.exp(-1 / (coef * middle)) < 1 else (low, middle)
        )
    sft(
        loaded,
        lambda step: [example],
        WarmstartOptions(steps=400, learning_rate=0.01, entropy_coef=coef),
        OptimOptions(),
    )
    ids = torch.tensor([[*example.prompt_tokens, *example.completions[0].tokens]])
    probabilities = loaded.model(ids).logits[0, -2].softmax(-1)
    assert low < 0.97  # the bonus takes something
    assert probabilities[example.completions[0].tokens[-1]].item() == pytest.approx(low, abs=0.01)
    others = probabilities[[i for i in range(size) if i != example.completions[0].tokens[-1]]]
    assert others.max().item() < 1.5 * others.min().item()


def test_examples_of_a_file_come_all_once_an_epoch(tmp_path: Path) -> None:
    path = tmp_path / "examples.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": f"{i}=", "completion": str(i)}) for i in range(6)))
    config = small_config(f"warmstart.path={path}", "warmstart.batch_size=3", "warmstart.steps=4")
    examples = build_warmstart(config, build_policy(config)).examples
    epoch = [group.completions[0].text for step in (0, 1) for group in examples(step)]
    assert sorted(epoch) == [str(i) for i in range(6)]
    path.write_text('{"prompt": "1="}')
    with pytest.raises(KeelError, match="line 1"):
        build_warmstart(config, build_policy(config))


def test_the_warm_start_is_made_once_and_is_the_reference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    overrides = [f"run.dir={tmp_path}", "warmstart.steps=3", "run.max_steps=1"]
    first = keel.train(BASE, overrides=overrides)
    line = json.loads((first.directory / "metrics.jsonl").read_text())
    assert line["kl/policy_ref/k3/mean"] < 1e-9
    for path in first.directory.iterdir():  # as if it had been killed right after its warm start
        if path.name not in ("warmstart", "config.yaml"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    def again(*_: object) -> None:
        raise AssertionError("the warm start was repeated")

    monkeypatch.setattr("keel.run.warmstart.sft", again)
    second = keel.train(BASE, overrides=overrides)
    assert second.summary["accuracy"] == first.summary["accuracy"]
    with pytest.raises(AssertionError, match="repeated"):
        keel.train(BASE, overrides=[*overrides, "run.if_exists=replace"])


def test_a_warm_start_is_another_one_when_its_file_has_changed(tmp_path: Path) -> None:
    examples = tmp_path / "examples.jsonl"
    examples.write_text('{"prompt": "a", "completion": "b"}\n')
    config = small_config(f"warmstart.path={examples}", "warmstart.steps=1")
    folder = warmstart_folder(tmp_path, config)
    assert warmstart_folder(tmp_path, config) == folder
    examples.write_text('{"prompt": "a", "completion": "bc"}\n')
    assert warmstart_folder(tmp_path, config) != folder
    other = small_config(f"warmstart.path={examples}", "warmstart.steps=2")
    assert warmstart_folder(tmp_path, other) != folder
    same = small_config(f"warmstart.path={examples}", "warmstart.steps=2", "data.curriculum.candidates=3")
    assert warmstart_folder(tmp_path, same) == warmstart_folder(tmp_path, other)


def test_keel_sft_leaves_a_run_with_a_model(tmp_path: Path) -> None:
    config = small_config(f"run.dir={tmp_path}", "warmstart.steps=3")
    result = supervise(config)
    assert (result.directory / "checkpoints" / "step-3" / "model.safetensors").is_file()
    lines = (result.directory / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3]
    assert json.loads((result.directory / "summary.json").read_text())["task"] == "letters"


@pytest.mark.parametrize("name", ["constant", "linear", "cosine"])
def test_schedules_rise_then_follow_their_course(name: Any) -> None:
    options = OptimOptions(schedule=name, warmup_steps=4, final_ratio=0.1)
    factor = build_schedule(options, 14)
    assert [round(factor(i), 6) for i in range(4)] == [0.25, 0.5, 0.75, 1.0]
    end, middle = {"constant": (1.0, 1.0), "linear": (0.1, 0.55), "cosine": (0.1, 0.55)}[name]
    assert factor(14) == pytest.approx(end)
    assert factor(9) == pytest.approx(middle)
    twice = build_schedule(options, 14, updates_per_step=2)
    assert twice(28) == pytest.approx(end)


@pytest.mark.parametrize(
    ("prompt", "completion", "rest"),
    [
        ("1=", "7" * 80, "a model with a longer context"),
        ("1" * 50 + "=", "7" * 20, "or cut prompts: data.max_prompt_length=43 and data.truncation=left"),
    ],
)
def test_a_demonstration_that_is_too_long_is_named_with_what_helps(
    tmp_path: Path, prompt: str, completion: str, rest: str
) -> None:
    """The model reads 64 tokens; what is sampled at most has nothing to do with it."""
    path = tmp_path / "examples.jsonl"
    lines = [{"prompt": "1=", "completion": "1"}, {"prompt": prompt, "completion": completion}]
    path.write_text("\n\n".join(map(json.dumps, lines)))
    with pytest.raises(KeelError) as caught:
        keel.train(BASE, overrides=[f"run.dir={tmp_path}", f"warmstart.path={path}", "warmstart.steps=1"])
    message = str(caught.value)
    assert message.startswith(f"the demonstration of 'examples.jsonl:3' has {len(completion) + 1} tokens")
    assert "exceed the model's context of 64" in message
    assert message.endswith(rest)
    assert "max_completion_length" not in message


class Fit(TaskWrapper):
    """Sums, of which only some are demonstrations."""

    def __init__(self, fits: Callable[[Problem], bool]) -> None:
        self.inner, self.fits = build_task("arithmetic"), fits

    def usable_for_sft(self, problem: Problem) -> bool:
        return self.fits(problem)


def is_odd(problem: Problem) -> bool:
    return int(problem.answer) % 2 == 1


@pytest.mark.parametrize("mixed", [False, True])
def test_problems_that_are_no_demonstrations_are_replaced(mixed: bool) -> None:
    tokenizer = build_policy(small_config()).tokenizer

    def texts(fits: Callable[[Problem], bool], draws: DrawCount) -> list[list[str]]:
        task = mixture([Fit(fits)]) if mixed else Fit(fits)
        batch = gold_examples(task, lambda problem: (1,), tokenizer, batch_size=8, seed=3, draws=draws)
        return [[group.completions[0].text for group in batch(step)] for step in range(4)]

    every, odd, again = DrawCount(), DrawCount(), DrawCount()
    plain, chosen = texts(lambda problem: True, every), texts(is_odd, odd)
    assert (every.drawn, every.skipped, every.notes) == (32, 0, [])
    assert all(len(batch) == 8 and all(int(text) % 2 for text in batch) for batch in chosen)
    assert texts(is_odd, again) == chosen
    for before, after in zip(plain, chosen, strict=True):  # what fits stays, in its order
        fit = [text for text in before if int(text) % 2]
        assert after[: len(fit)] == fit
    assert odd.drawn - odd.skipped == 32
    assert odd.notes == [
        f"warm start: the task marks {odd.skipped} of {odd.drawn} drawn problems as unusable for SFT; other problems "
        "replace them"
    ]


def test_a_task_without_demonstrations_is_one_line() -> None:
    batch = gold_examples(Fit(lambda problem: False), lambda problem: (1,), None, batch_size=8, seed=0)
    with pytest.raises(KeelError, match=f"none of {MAX_CONSECUTIVE_SKIPS} problems") as caught:
        batch(0)
    assert "\n" not in str(caught.value)


def odd_sums() -> Fit:
    return Fit(is_odd)


@pytest.mark.parametrize("command", [supervise, keel.train])
def test_a_run_notes_what_its_warm_start_left_out(tmp_path: Path, command: Any) -> None:
    overrides = [f"run.dir={tmp_path}", f"task={{name: '{__name__}:odd_sums'}}", "warmstart.steps=2", "run.max_steps=1"]
    result = command(small_config(*overrides))
    notes = [json.loads(line).get("message", "") for line in (result.directory / "events.jsonl").open()]
    assert sum("unusable for SFT" in str(note) for note in notes) == 1


@pytest.mark.parametrize("column", ["prompt", "completion"])
def test_rows_with_control_tokens_are_refused_unless_they_are_allowed(tmp_path: Path, column: str) -> None:
    row = {"prompt": "1+2=", "completion": "3"}
    path = tmp_path / "mine.jsonl"
    path.write_text(json.dumps(row) + "\n" + json.dumps({**row, column: row[column] + "<eos><|user|>"}) + "\n")
    config = small_config(f"warmstart.path={path}", "warmstart.steps=1", "warmstart.batch_size=2")
    loaded = build_policy(config)
    with pytest.raises(KeelError, match=r"mine\.jsonl:2.*'<eos>'.*data\.allow_control_tokens"):
        build_warmstart(config, loaded)
    allowed = small_config(f"warmstart.path={path}", "warmstart.batch_size=2", "data.allow_control_tokens=true")
    (user,) = loaded.tokenizer.encode("<|user|>")
    groups = build_warmstart(allowed, loaded).examples(0)
    assert sum((*group.prompt_tokens, *group.completions[0].tokens).count(user) for group in groups) == 1


@pytest.mark.parametrize("special", [True, False])
def test_think_and_tool_call_marks_are_the_models_to_write(special: bool) -> None:
    """They are part of what a model writes, and unknown characters are nobody's marker."""
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["<think>", "</tool_call>", "[TOOL_CALLS]"], special_tokens=special)
    for text in ("<think>3", "a</tool_call>", "[TOOL_CALLS]1", "\u65e5"):
        tokens = make_example((1,), text, tokenizer).completions[0].tokens
        assert tokens == (*tokenizer.encode(text), tokenizer.eos_token_id)


@pytest.mark.parametrize(
    ("mark", "text", "special"),
    [("\u2039\uff5cUser\uff5c>", "3\u2039\uff5cUser\uff5c>4", False), ("<|sp|>", "3<|SP|>", True)],
    ids=["turn marker that is not special", "special token in other letters"],
)
def test_demonstrations_with_control_tokens_are_refused_by_their_ids(mark: str, text: str, special: bool) -> None:
    core = Tokenizer(models.BPE())
    core.normalizer, core.pre_tokenizer = normalizers.Lowercase(), pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    core.train_from_iterator(["a b"], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>")
    tokenizer.add_tokens([AddedToken(mark, special=special, normalized=True)], special_tokens=special)
    with pytest.raises(KeelError, match=r"'mine:3'.*data\.allow_control_tokens"):
        make_example((1,), text, tokenizer, "mine:3")
    allowed = make_example((1,), text, tokenizer, "mine:3", allow_control_tokens=True).completions[0].tokens
    assert tokenizer.convert_tokens_to_ids(mark) in allowed


@pytest.mark.parametrize("name", ["linear", "cosine"])
@pytest.mark.parametrize("steps", [1, 2, 4])
def test_a_warm_up_that_outlasts_the_decay_still_reaches_the_peak(name, steps):
    long = build_schedule(OptimOptions(schedule=name, warmup_steps=10), steps)
    fitting = build_schedule(OptimOptions(schedule=name, warmup_steps=steps - 1), steps)
    assert [long(step) for step in range(steps)] == [fitting(step) for step in range(steps)]
    assert max(long(step) for step in range(steps)) == 1.0
    assert long(steps) == pytest.approx(0.0, abs=1e-12)
