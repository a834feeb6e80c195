"""Figures that were there and not judged: unread weights, silent controllers, parts of noise, hot evaluations."""

from __future__ import annotations

import math
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from doctor.schooled import schooled_config
from keel.base.types import Problem, Reward
from keel.doctor import keel_subject as doctor_setup
from keel.doctor import preflight as preflight_module
from keel.doctor.keel_subject import build_subject
from keel.doctor.measure import Measure
from keel.doctor.preflight import preflight
from keel.doctor.probes import evaluation, misfit, model
from keel.doctor.probes.advantage import _amplified, _amplified_parts, amplification
from keel.doctor.probes.controller import steered as steered_findings
from keel.doctor.probes.damaged import damaged_weights
from keel.doctor.probes.evaluation import probe_evaluation
from keel.doctor.probes.misfit import foreign_findings
from keel.doctor.probes.model import _round_trip, run_together, unread
from keel.doctor.subject import Budget
from keel.doctor.thresholds import load_thresholds
from keel.envs import Task
from keel.envs.calls import TooManyHungCalls
from keel.kl.controllers import RuleController
from keel.models.tiny import character_tokenizer
from keel.run.build import build_policy

THRESHOLDS = load_thresholds()


def test_weights_of_a_kind_that_the_model_has_are_missed() -> None:
    layered = nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(2, 2, bias=False) for _ in range(2)])})
    layers = ["layers.2.weight", "layers.0.bias"]
    others = ["score.weight", "layers.0.rotary.inv_freq", "head.bias"]
    assert unread(layered, [*layers, *others]) == layers


def steered(controller: RuleController) -> list[str]:
    setup: Any = SimpleNamespace(
        config=schooled_config("kl.beta=0.04", "run.max_steps=400"), run=SimpleNamespace(controller=controller)
    )
    return [finding.code for finding in steered_findings(setup, {}, THRESHOLDS)]


def test_a_coefficient_that_falls_silent_at_once() -> None:
    assert steered(RuleController(0.04, schedule=lambda step: 0.04 if step < 3 else 0.0)) == ["kl/controller"]
    assert steered(RuleController(0.04, schedule=lambda step: 0.04 * max(0.0, 1 - step / 100))) == []


def test_a_floor_is_no_growth() -> None:
    assert steered(RuleController(500.0, bounds=(500.0, 1e9))) == []
    growing = RuleController(0.04, schedule=lambda step: 0.04 * 2**step)
    assert steered(growing) == ["kl/controller"]


@pytest.mark.parametrize(
    ("base", "unit", "codes"),
    [(0.5, 1e-4, ["advantage/amplified"]), (0.0, 1e-4, []), (0.5, 0.5, []), (300.0, 5.0, [])],
    ids=["noise beside its size", "small units", "a usual part", "a length"],
)
def test_parts_that_are_normalised_one_by_one(base: float, unit: float, codes: list[str]) -> None:
    rewards = [Reward(0.0, {"part": base + unit * i / 4}) for i in range(4)]
    groups = [SimpleNamespace(rewards=rewards, completions=rewards)] * 16
    judge = SimpleNamespace(parts=[SimpleNamespace(name="part", weight=1.0)], remote=False)
    built = SimpleNamespace(judge=judge, sampling=SimpleNamespace(num_generations=4))
    config = schooled_config("reward.aggregate=normalised_sum")
    setup: Any = SimpleNamespace(config=config, built=built, groups=groups, shared={}, budget=Budget(0.0))
    assert [finding.code for finding in _amplified_parts(setup, THRESHOLDS)] == codes


@pytest.mark.parametrize(
    ("base", "unit", "gold", "codes"),
    [
        (0.5, 1e-3, 1.0, ["advantage/amplified"]),
        (0.5, 1e-3, 0.501, ["advantage/amplified"]),
        (0.0, 1e-3, 1.0, ["advantage/amplified"]),
        (0.0, 0.01, 0.01, []),
    ],
    ids=["noise beside its size", "gold as well", "noise where nothing is right", "a reward in hundredths"],
)
def test_a_reward_in_small_units_is_no_noise(base: float, unit: float, gold: float, codes: list[str]) -> None:
    groups = [SimpleNamespace(rewards=[Reward(base + unit * i / 3) for i in range(4)]) for _ in range(16)]
    built = SimpleNamespace(judge=SimpleNamespace(remote=False), sampling=SimpleNamespace(num_generations=4))
    setup: Any = SimpleNamespace(groups=groups, shared={"gold size": gold}, built=built, budget=Budget(0.0))
    spread = torch.tensor([unit * 0.43] * 16, dtype=torch.float64)
    figures = amplification(spread, spread, "group")
    assert [finding.code for finding in _amplified(setup, figures, "group", THRESHOLDS)] == codes


def test_answers_of_another_column() -> None:
    reward, problem = Reward(0.0), SimpleNamespace(answer="1026")
    task = SimpleNamespace(multi_turn=False)
    group = SimpleNamespace(rewards=[reward], problem=problem)
    config = SimpleNamespace(data=SimpleNamespace(path="rows.jsonl"))
    setup: Any = SimpleNamespace(config=config, failures=(), run=SimpleNamespace(task=task), shared={}, groups=[group])
    sure = {"gold_share": 1.7, "entropy_share": 0.1, "parse_rate": 1.0}
    (finding,) = foreign_findings(setup, sure, [1.0], THRESHOLDS)
    assert finding.code == "data/misaligned"
    for healthy in ({"gold_share": 0.5}, {"entropy_share": 0.9}, {"parse_rate": 0.1}):
        assert [*foreign_findings(setup, {**sure, **healthy}, [1.0], THRESHOLDS)] == []
    group.rewards = [Reward(0.6)]
    assert [*foreign_findings(setup, sure, [1.0], THRESHOLDS)] == []
    group.rewards, config.data.path = [reward], None  # answers that the task computes are only hard
    assert [*foreign_findings(setup, sure, [1.0], THRESHOLDS)] == []


@pytest.mark.parametrize(
    ("units", "back", "severity"),
    [
        ("7 units", "7units", "warning"),
        ("7 units", "7 unit", "error"),
        ("\u200b7", "7", None),
        ("\ufeff7", "77", "error"),
    ],
    ids=["spaces", "a letter", "a sign that nobody sees", "more than that"],
)
def test_gold_answers_that_lose_only_their_spaces(units: str, back: str, severity: str | None) -> None:
    class Units(Task):
        name = "units"

        def sample(self, count: int, *, seed: int, step: int) -> list[Problem]:
            return [Problem("a", "how many", units)]

        def gold(self, problem: Problem) -> str:
            return str(problem.answer)

    texts = ["how many", units, "how", "many", "howmany"]
    tokenizer = SimpleNamespace(
        encode=lambda text, **_: [texts.index(text)],
        decode=lambda ids, **_: " ".join(back if texts[i] == units else texts[i] for i in ids),
    )
    judge = SimpleNamespace(judge=lambda problem, answers: [Reward(float(answers[0] == [units]))], drain=lambda: None)
    setup: Any = SimpleNamespace(
        run=SimpleNamespace(task=Units()),
        policy=SimpleNamespace(tokenizer=tokenizer),
        config=schooled_config("reward.aggregate=sum"),
        built=SimpleNamespace(judge=judge),
    )
    found = [(finding.code, finding.severity) for finding in _round_trip(setup, THRESHOLDS)]
    assert found == [("model/tokenizer", severity)] * (severity is not None)


def blanks(kind: str) -> Any:
    """A tokenizer of characters that does something to blanks."""
    from tokenizers import Regex, normalizers

    tokenizer: Any = character_tokenizer("abcdefghijklmnopqrstuvwxyz0123456789? \n")
    core = tokenizer.backend_tokenizer
    if kind == "takes them away":
        core.normalizer = normalizers.Replace(Regex(r"\s"), "")
    elif kind == "takes spaces away":
        core.normalizer = normalizers.Replace(" ", "")
    elif kind == "takes words together":
        core.normalizer = normalizers.Replace(Regex(r"\s+(?=\w)"), "")
    elif kind == "one for many":
        core.normalizer = normalizers.Sequence([normalizers.Strip(), normalizers.Replace(Regex(r"\s+"), " ")])
    return tokenizer


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        ("takes them away", True),
        ("takes words together", True),
        ("keeps them", False),
        ("one for many", False),
    ],
)
def test_words_that_run_together_on_their_way_into_tokens(kind: str, named: bool) -> None:
    evidence = run_together(blanks(kind), ["min 4 1?", "how  many\nare 7 and 8?", "alone"])
    assert (evidence is not None) == named
    assert evidence is None or "'min41?'" in evidence


@pytest.mark.parametrize(
    ("texts", "entropy", "written"),
    [
        (["is 7", "it 8"], 0.1, True),
        (["is 7", "it8"], 0.1, True),
        (["is7", "it8"], 0.1, False),  # trained on texts that were run together
        (["is 7", "it 8"], 5.0, False),  # noise holds blanks too
    ],
)
def test_a_model_that_was_trained_on_blanks_writes_them(
    monkeypatch: pytest.MonkeyPatch, texts: list[str], entropy: float, written: bool
) -> None:
    tokenizer = blanks("keeps them")
    completions = [SimpleNamespace(tokens=tuple(tokenizer.encode(text, add_special_tokens=False))) for text in texts]
    setup: Any = SimpleNamespace(
        groups=[SimpleNamespace(completions=completions)] * 16,
        policy=SimpleNamespace(tokenizer=tokenizer),
        vocabulary=len(tokenizer),
    )
    monkeypatch.setattr(model, "more_groups", lambda setup, code, undecided: setup.groups)
    monkeypatch.setattr(model, "golds", lambda setup: [None])
    monkeypatch.setattr(model, "read_golds", lambda setup: SimpleNamespace(entropy=entropy))
    assert model.writes_blanks(setup, THRESHOLDS) == written


def test_single_words_tell_nothing_of_blanks() -> None:
    assert run_together(blanks("takes spaces away"), ["alone", "min 4\n1?"]) is not None  # lines may be kept
    assert run_together(blanks("takes them away"), ["alone", "4+1?"]) is None


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        ("rows", "one and the same row"),
        ("bits", "3 different values"),
        ("cut", "at the largest value"),
        ("pruned", "that are zero"),
        ("half pruned", None),
        ("none", None),
    ],
)
def test_weights_that_cannot_be_what_was_trained(damage: str, named: str | None) -> None:
    setup = build_subject(schooled_config("rollout.max_staleness=1"))
    with closing(setup.run):
        tokenizer = setup.policy.tokenizer
        if damage == "rows":
            digits = [tokenizer.convert_tokens_to_ids(digit) for digit in "0123456789"]
            setup.policy.model.get_input_embeddings().weight.data[digits] = 0.0
        elif damage == "bits":
            for parameter in (p for p in setup.policy.model.parameters() if p.dim() == 2):
                step = parameter.abs().max()
                parameter.data = (parameter / step).round() * step
        layers = (p for name, p in setup.policy.model.named_parameters() if p.dim() == 2 and "proj" in name)
        for parameter in layers:
            if damage == "cut":
                parameter.data = parameter.clamp(-0.5 * parameter.std(), 0.5 * parameter.std())
            elif "pruned" in damage:
                left = 0.5 if damage == "half pruned" else 0.1
                parameter.data *= parameter.abs() >= parameter.abs().quantile(1 - left)
        found = damaged_weights(setup)
        assert (found is None) == (named is None)
        assert found is None or str(named) in found[0]


@pytest.mark.parametrize(
    ("tokens", "stopped", "gold", "temperature", "filtered", "meant", "severity"),
    [
        ((3, 7, 7, 7, 7, 7), "length", "8", 1.0, False, True, "error"),
        ((3, 7, 7, 7, 7, 7), "eos", "8", 1.0, False, True, None),
        ((7, 3, 7, 4, 7, 5, 7, 6, 7), "length", "8", 1.0, False, True, None),
        ((3, 7, 7, 7, 7, 1), "length", "8", 1.0, False, True, None),
        ((3, 7, 7, 7, 7, 7), "length", "77777", 1.0, False, True, None),
        ((3, 7, 7, 7, 7, 7), "length", "8", 0.3, False, True, None),
        ((3, 7, 7, 7, 7, 7), "length", "8", 1.0, True, True, None),
        ((3, 7, 7, 7, 7, 7), "length", None, 1.0, False, True, None),
        ((3, 7, 7, 7, 7, 7), "length", "8", 1.0, False, False, None),
    ],
    ids=[
        "a loop",
        "that ends",
        "a list",
        "beyond an end",
        "as it is asked for",
        "of cold draws",
        "of a filter",
        "of unknown answers",
        "of the engine's",
    ],
)
def test_a_model_that_is_caught_in_loops(
    monkeypatch: pytest.MonkeyPatch,
    tokens: tuple[int, ...],
    stopped: str,
    gold: str | None,
    temperature: float,
    filtered: bool,
    meant: bool,
    severity: str | None,
) -> None:
    completion = SimpleNamespace(tokens=tokens, action=(True,) * len(tokens), stop_reason=stopped, text="377777")
    logits = torch.zeros(len(tokens), 10)
    logits[torch.arange(len(tokens)), torch.tensor(tokens)] = 5.0 if meant else -5.0
    setup: Any = SimpleNamespace(
        groups=[SimpleNamespace(problem=Problem("1", "?"), completions=[completion] * 4)] * 16,
        batch=SimpleNamespace(completions=[completion]),
        each_logits=lambda: [(0, logits)],
        run=SimpleNamespace(task=SimpleNamespace(gold_turns=lambda problem: [gold] if gold else [])),
        policy=SimpleNamespace(
            eos_ids=(1,), tokenizer=SimpleNamespace(encode=lambda text, **_: [int(sign) for sign in text])
        ),
        sampling=SimpleNamespace(temperature=temperature, filtered=filtered),
    )
    monkeypatch.setattr(misfit, "more_groups", lambda setup, code, undecided: setup.groups)
    found = [*misfit.looping_findings(setup, THRESHOLDS)]
    assert [(f.code, f.severity) for f in found] == [("output/random-weights", severity)] * bool(severity)


@pytest.mark.parametrize(
    ("entropy", "gold", "parsed", "severity"),
    [
        (0.9, 0.9, 1.0, "error"),
        (0.6, 0.6, 0.2, "warning"),
        (0.6, 0.6, 0.9, None),
        (0.6, 0.3, 0.2, None),
        (math.nan, 0.9, 0.2, None),
    ],
)
def test_noise_is_random_weights_and_half_of_it_damage(
    entropy: float, gold: float, parsed: float, severity: str | None
) -> None:
    figures = {"entropy_share": entropy, "gold_share": gold, "parse_rate": parsed}
    assert [f.severity for f in misfit.random_findings(figures, 100, THRESHOLDS)] == [severity] * bool(severity)
    mild = severity == "warning"  # of sixteen tokens most may be answers
    assert [*misfit.random_findings(figures, 16, THRESHOLDS)] == [] or not mild


def test_weights_that_are_no_numbers_are_named_where_samples_may_be_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(config: Any, weights: Any = None) -> Any:
        loaded: Any = build_policy(config)
        loaded.model.model.layers[0].mlp.down_proj.weight.data[0, 0] = torch.nan
        return loaded, ()

    monkeypatch.setattr(doctor_setup, "_load", load)
    with pytest.warns(RuntimeWarning, match="not finite"):
        diagnosis = preflight(schooled_config("rollout.max_staleness=1"))
    assert diagnosis.findings[0].code == "scoring/non-finite"


@pytest.mark.parametrize(
    ("held_out", "paid", "codes"),
    [("{} apples", "{} apples", ["eval/train-gap"]), ("{} apples", "{}", []), ("{}", "{}", []), ("p{}q", "", [])],
    ids=["with a unit, as a text", "with a unit, by its value", "alike", "no number"],
)
def test_held_out_answers_in_another_form(
    monkeypatch: pytest.MonkeyPatch, held_out: str, paid: str, codes: list[str]
) -> None:
    trained, kept = ([Problem(f"{n}", "?", form.format(n)) for n in range(9)] for form in ("{}", held_out))
    task = SimpleNamespace(
        prompts_only=False,
        multi_turn=False,
        sample=lambda count, **_: trained,
        held_out=lambda count: kept,
        gold_turns=lambda problem: [problem.answer],
    )
    setup: Any = SimpleNamespace(
        run=SimpleNamespace(task=task),
        built=SimpleNamespace(judge=SimpleNamespace(remote=False)),
        config=schooled_config(),
        failures=(),
    )

    def totals(setup: Any, problem: Problem, episodes: Any) -> list[float]:
        right = {str(problem.answer), paid.format(problem.key)} if problem in kept else {str(problem.answer)}
        return [float(turns[-1] in right) for turns in episodes]

    monkeypatch.setattr(evaluation, "totals_of", totals)
    assert [finding.code for finding in evaluation.form_findings(setup)] == codes


def test_an_evaluation_of_noise() -> None:
    for temperature, codes in ((10.0, ["eval/train-gap"]), (0.6, []), (1.2, [])):
        setup = build_subject(schooled_config("eval.every=1", f"eval.temperature={temperature}"))
        assert [finding.code for finding in probe_evaluation(setup, THRESHOLDS).findings] == codes
        setup.run.close()


def test_rewards_that_hang_while_a_probe_asks_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def asks(*_: Any) -> Any:
        raise TooManyHungCalls("reward slow: did not return within 0.01 s (reward.timeout_s)")

    monkeypatch.setattr(preflight_module, "MEASURES", [Measure("collection", asks, "")])
    (finding,) = preflight(schooled_config()).findings
    assert (finding.code, finding.severity) == ("reward/failed", "error")
    assert "reward.timeout_s" in finding.evidence
