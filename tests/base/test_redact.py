"""Secrets: nothing that is shown, logged or pushed has one, wherever it stood in the configuration."""

from __future__ import annotations

import json
import logging
import os
import random
import stat
import string
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from keel.base import redact
from keel.base.errors import KeelError
from keel.base.redact import MASK, expand_env, masked, redact_text, secrets_in
from keel.config import load_config
from keel.config.checks import advice
from keel.config.text import show_config
from keel.lab.report import write_report
from keel.lab.studies.grid import read_study
from keel.lab.studies.results import _record
from keel.loggers import RunDirectory, build_loggers
from keel.loggers.options import LogOptions
from keel.run.resume import check_same_run, write_config


def secret_of(place: str) -> str:
    """A random secret of 12 to 40 characters, another for each place."""
    draw, alphabet = random.Random(place), string.ascii_letters + string.digits
    inner = draw.choices(alphabet + "-_", k=draw.randint(10, 38))
    return "".join([draw.choice(alphabet), *inner, draw.choice(string.digits)])


def reward(**params: Any) -> dict[str, Any]:
    return {"rewards": [{"name": "http", "url": "https://judge.test/score", **params}]}


def tool(**params: Any) -> dict[str, Any]:
    inner = {"name": "arithmetic"}
    return {"task": {"name": "tools", "task": inner, "tools": [{"mcp": "server --stdio", **params}]}}


PLACES: dict[str, Callable[[str], dict[str, Any]]] = {
    "bearer": lambda s: reward(headers={"Authorization": f"Bearer {s}"}),
    "basic": lambda s: reward(headers={"authorization": f"Basic {s}"}),
    "own header": lambda s: reward(headers={"X-Judge": s}),
    "query": lambda s: reward(url=f"https://judge.test/score?api_key={s}"),
    "any query": lambda s: reward(url=f"https://judge.test/score?a=1&k={s}&b=2"),
    "fragment": lambda s: reward(url=f"https://judge.test/score#token={s}"),
    "password": lambda s: reward(url=f"https://me:{s}@judge.test/score"),
    "user": lambda s: reward(url=f"https://{s}@judge.test/score"),
    "env": lambda s: tool(env={"ANYTHING": s}),
    "env key": lambda s: tool(env={"SERVICE_API_KEY": s}),
    "command option": lambda s: tool(mcp=f"server --api-key {s} --stdio"),
    "command option with =": lambda s: tool(mcp=f"server --token={s}"),
    "command variable": lambda s: tool(mcp=f"env SERVICE_TOKEN={s} server"),
    "address": lambda s: tool(mcp=f"https://tools.test/mcp?key={s}"),
    "address headers": lambda s: tool(mcp="https://tools.test/mcp", headers={"X-Any": s}),
    "parameter of a task": lambda s: {"task": {"name": "mytasks:make", "hub_token": s}},
    "parameter of a reward": lambda s: {"rewards": [{"name": "myrewards:judge", "clientSecret": s}]},
    "nested": lambda s: {"rewards": [{"name": "myrewards:judge", "service": {"auth": {"password": s}}}]},
    "list": lambda s: {"rewards": [{"name": "myrewards:judge", "arguments": ["--token", s]}]},
    "logger": lambda s: {"log": {"extra": [{"name": "mylog:Log", "apiKey": s}]}},
    "data of a hub": lambda s: {"data": {"path": f"https://me:{s}@data.test/rows.jsonl"}, "task": {"name": "dataset"}},
}


PLACES |= {
    "one-word variable": lambda s: tool(mcp=f"env TOKEN={s} npx server"),
    "mapping of a secret's name": lambda s: {"rewards": [{"name": "myrewards:judge", "token": {"value": s}}]},
    "other headers": lambda s: {"rewards": [{"name": "myrewards:judge", "extra_headers": {"X-Any": s}}]},
    "environment": lambda s: {"rewards": [{"name": "myrewards:judge", "environment": {"ANY": s}}]},
    "joined word": lambda s: {"rewards": [{"name": "myrewards:judge", "accesstoken": s}]},
}


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A W&B that keeps what it is given."""
    calls: dict[str, Any] = {}
    run = types.SimpleNamespace(define_metric=lambda *a, **k: None, log=lambda *a, **k: None, finish=lambda: None)

    def init(**kwargs: Any) -> Any:
        calls.update(kwargs)
        return run

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    return calls


@pytest.fixture(autouse=True)
def _forget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redact, "_remembered", set())


def loaded(tree: dict[str, Any]) -> Any:
    """Without the checks against installed parts: the parts of these configurations do not exist."""
    from keel.config.load import validate

    redact.register_secrets(tree)
    return validate(tree)


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
def test_a_secret_is_nowhere_to_be_seen(tmp_path: Path, wandb: dict[str, Any], place: str) -> None:
    secret = secret_of(place)
    config = loaded(PLACES[place](secret))
    shown = [show_config(config), json.dumps(masked(config.to_dict())), *advice(config)]
    with RunDirectory.create(tmp_path / "run") as directory:
        write_config(directory, config)
        assert load_config_text(directory.path) == config.to_dict()  # it can be resumed
        log = LogOptions(console="none", tensorboard=False, wandb="p")
        loggers = build_loggers(log, directory, total_steps=1, config=config.to_dict())
        loggers.event("reward/failed", message=f"the server said: bad login {secret}", more={"text": [secret]})
        loggers.step(1, {"reward/mean": 0.0})
        loggers.close()
        directory.write_json("findings.json", [{"code": "x", "severity": "note", "evidence": f"saw {secret}"}])
        # as a version that masked nothing left it
        directory.append("events.jsonl", {"step": 1, "kind": "note", "time": 0, "message": f"old: {secret}"})
    write_report([tmp_path / "run"], tmp_path / "report.html")
    shown += [(tmp_path / "report.html").read_text(), repr(wandb["config"])]
    shown += [(tmp_path / "run" / "findings.json").read_text(), str(KeelError(f"cannot do it with {secret}"))]
    shown += [(tmp_path / "run" / "events.jsonl").read_text().splitlines()[0]]
    other = loaded({**PLACES[place]("another-1234567"), "run": {"seed": 5}})
    with pytest.raises(KeelError) as refused:
        check_same_run(tmp_path / "run", other)
    shown += [str(refused.value)]
    assert [number for number, text in enumerate(shown) if secret in text] == []
    mode = stat.S_IMODE((tmp_path / "run" / "config.yaml").stat().st_mode)
    assert mode == 0o600


def load_config_text(run: Path) -> dict[str, Any]:
    tree = yaml.safe_load((run / "config.yaml").read_text())
    return {**tree, "run": {**tree["run"]}}


@given(
    place=st.sampled_from(sorted(set(PLACES))),
    name=st.from_regex(r"[A-Z][A-Z_]{2,9}", fullmatch=True),
)
def test_a_reference_to_the_environment_is_shown_as_it_is(place: str, name: str) -> None:
    for reference in (f"${name}", f"${{{name}}}"):
        tree = PLACES[place](reference)
        assert masked(tree) == tree
        assert secrets_in(tree) == []


def test_masking_is_done_once() -> None:
    for make in PLACES.values():
        once = masked(make("s3cr3t-s3cr3t-s3"))
        assert masked(once) == once
        assert MASK in json.dumps(once)
        assert redact_text(json.dumps(once)) == json.dumps(once)


@pytest.mark.parametrize(
    "text",
    [
        "optim.decay_steps was 6 and is 12: the learning rate goes from 0.1 at step 6 to 0.5 at step 7",
        "nats per token: 0.0512 ± 0.0004",
        "two problems of a batch have the key 'sort/0/49/3': they would get the same noise",
        "kl.level=token, kl.reduction=token_mean, microbatch_tokens=8192, max_tokens: 512",
        "set HF_TOKEN, or log in with `hf auth login`",
        "hf_checkpoint became model.name=some/model",
        "see http://127.0.0.1:8000/v1/chat/completions and docs/rewards.md",
        "write $JUDGE_TOKEN, such as {Authorization: Bearer $JUDGE_TOKEN}",
    ],
)
def test_ordinary_sentences_stay(text: str) -> None:
    assert redact_text(text) == text


def test_the_default_configuration_has_no_secrets() -> None:
    for path in (Path(__file__).parents[2] / "configs").rglob("*.yaml"):
        tree = yaml.safe_load(path.read_text())
        assert masked(tree) == tree, path


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://me:pass@host:8/p?api_key=abc&x=$X", f"https://{MASK}:{MASK}@host:8/p?api_key={MASK}&x=$X"),
        ("Authorization: Bearer abcdef123456", f"Authorization: Bearer {MASK}"),
        ("server --api-key abc123 --port 8000", f"server --api-key {MASK} --port 8000"),
        ("ghp_abcdefgh12345678 and AKIAABCDEFGHIJKLMNOP", f"{MASK} and {MASK}"),
        ("eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.abc", MASK),
        ("Say hf_abcdEFGH1234 first.", f"Say {MASK} first."),
        ("hf_" + "abcdefgh" * 4, MASK),
        ("password=hunter2, user=me", f"password={MASK}, user=me"),
    ],
)
def test_what_looks_like_a_secret_by_hand(text: str, shown: str) -> None:
    assert redact_text(text) == shown


@pytest.mark.parametrize("name", ["input_key", "label_key", "data.prompt_key", "reward_fn_key", "ground_truths_key"])
def test_the_name_of_a_column_is_no_secret(name: str) -> None:
    tree = {name: "question_column_1234"}
    redact.register_secrets(tree)
    assert masked(tree) == tree
    assert redact_text(f"{name} became data.columns.prompt=question_column_1234").endswith("=question_column_1234")


@pytest.mark.parametrize("name", ["key", "api_key", "prompt_api_key", "secret_input_key", "SERVICE_KEY", "judge_key"])
def test_a_key_is_a_secret_otherwise(name: str) -> None:
    assert masked({name: "question_column_1234"}) == {name: MASK}


def test_filling_reads_the_environment_and_covers_what_it_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "word-of-many-letters\n")
    assert expand_env("?k=$JUDGE_KEY&c=$$5") == "?k=word-of-many-letters&c=$5"
    assert redact_text("it answered: word-of-many-letters is not known") == f"it answered: {MASK} is not known"
    monkeypatch.delenv("JUDGE_KEY")
    with pytest.raises(redact.UnsetVariable, match=r"names \$JUDGE_KEY, which is not set"):
        expand_env("$JUDGE_KEY")


def test_a_masked_configuration_is_not_taken_for_one() -> None:
    tree = masked(reward(headers={"Authorization": "Bearer abc-def-1"}))
    with pytest.raises(KeelError, match=r"mask of a secret .* write \$NAME"):
        load_config(tree)


def test_messages_of_loading_are_masked(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(KeelError) as caught:
        load_config(reward(headers="my-own-secret-77"))
    assert "my-own-secret-77" not in str(caught.value)
    with pytest.raises(KeelError) as caught:
        load_config({}, ["log.extra=[{name: 5, api_key: my-own-secret-77}]"])
    assert "my-own-secret-77" not in str(caught.value)
    with caplog.at_level(logging.WARNING, "keel"):
        load_config({"kl_coef": 0.5})
    assert "kl_coef became" in caplog.text


def test_a_configuration_without_secrets_is_readable_as_before(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        with RunDirectory.create(tmp_path / "run") as directory:
            write_config(directory, load_config(reward(headers={"Authorization": "Bearer $JUDGE_TOKEN"})))
    finally:
        os.umask(before)
    path = tmp_path / "run" / "config.yaml"
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    assert "Bearer $JUDGE_TOKEN" in path.read_text()


def test_a_studys_labels_and_record_have_no_secrets(tmp_path: Path) -> None:
    urls = [f"https://judge.test/{n}?api_key=secret-number-{n}" for n in (1, 2)]
    study = tmp_path / "study.yaml"
    grid = {"rewards": [[{"name": "http", "url": url}] for url in urls]}
    study.write_text(yaml.safe_dump({"config": "default", "seeds": 1, "grid": grid}))
    read = read_study(study)
    assert len({point.label for point in read.points}) == 2
    assert "secret-number" not in json.dumps([_record(read, "", 1), [point.label for point in read.points]])
    assert [point.config.rewards[0].params["url"] for point in read.points] == urls


def test_a_studys_processes_do_not_show_their_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command line can be read by every user of the machine."""
    from keel.lab.studies import run as module

    started: list[tuple[list[str], dict[str, str]]] = []

    def popen(command: list[str], *, env: dict[str, str], **_: Any) -> Any:
        started.append((command, env))
        return types.SimpleNamespace(wait=lambda: 0)

    monkeypatch.setattr(module.subprocess, "Popen", popen)
    config = json.dumps(reward(headers={"X-Judge": "my-own-secret-77"}))
    assert module.run_process(module.Process((config, "--shared", "x"), tmp_path / "log", 1)) == 0
    ((command, env),) = started
    assert "my-own-secret-77" not in " ".join(command)
    assert json.loads(env[module.CONFIG]) == json.loads(config)


ORDINARY = [
    "unknown reduction 'token_men': did you mean 'token_mean'?",
    "counts of task 'weather' raised KeyError: 'x'",
    "pad_token: <|endoftext|> is not in the vocabulary",
    "eos_token=</s>",
    "api_key: missing",
    "authorization: required",
    "HF_TOKEN: set it",
    "the option --hub-token takes a value",
    "give --key NAME",
    "group_key=gsm8k-0001",
    "install sk-learn-something",
]


@pytest.mark.parametrize("text", ORDINARY)
def test_ordinary_texts_stay_as_they_are(text: str) -> None:
    assert redact_text(text) == text


SECRET_TEXTS = ["token=abcdef0123456789abcdef", '{"token": "s3cr3tvalue99"}', "cookie=abc123def456", "password: hunter"]


@pytest.mark.parametrize("text", SECRET_TEXTS)
def test_texts_that_name_a_secret_lose_it(text: str) -> None:
    assert MASK in redact_text(text)


def test_words_paths_and_names_of_models_are_not_remembered() -> None:
    """They stand where a secret may stand, and are masked there alone."""
    env = {"MODEL": "Qwen/Qwen2.5-0.5B", "MODE": "accuracy", "PYTHONPATH": "/some/project"}
    tree = {**tool(env=env), **reward(url="https://judge.test/score?split=validation")}
    redact.register_secrets(tree)
    for text in ("model Qwen/Qwen2.5-0.5B not found", "reward/accuracy fell", "/some/project/a", "validation accuracy"):
        assert redact_text(text) == text


def test_a_long_word_is_read_a_few_times_and_not_from_each_of_its_letters() -> None:
    """Matching may not start inside a word: as many attempts as there are words, however long they are."""
    for pattern in (redact._SETTING, redact._OPTION, redact._URL):
        assert len(list(pattern.finditer("a" * 4096))) == 0
        assert pattern.match("a" * 4096, 1) is None
