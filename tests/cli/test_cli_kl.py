"""`keel kl` as a user meets it: tables, data, a picture, and one line for every mistake."""

import json
import shutil
import sys

import pytest

import keel
from keel.cli import main
from keel.envs.registry import build_task
from keel.models.load import load_model
from trainer.small import small_config

SMALL = ["--samples", "2", "--max-tokens", "6"]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Two models of one vocabulary, one of another, and an adapter that names no base."""
    folder = tmp_path_factory.mktemp("models")
    for name, seed in (("a", 0), ("b", 1), ("other", 2)):
        loaded = load_model("trainer.small:small_model", seed=seed, device="cpu")
        if name == "other":
            loaded.tokenizer.add_tokens(["<extra>"])
            loaded.model.resize_token_embeddings(len(loaded.tokenizer))
        loaded.model.save_pretrained(folder / name)
        loaded.tokenizer.save_pretrained(folder / name)
    lora = load_model(str(folder / "a"), device="cpu", lora={"r": 2})
    lora.model.save_pretrained(folder / "adapter")
    config = folder / "adapter" / "adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "base_model_name_or_path": None}))
    (folder / "prompts.txt").write_text("2+3=\nsort 21 =\n")
    (folder / "empty.txt").write_text("\n")
    (folder / "long.txt").write_text("x" * 100 + "\n")
    return folder


@pytest.fixture
def here(models, monkeypatch):
    """Stand in the models' folder, with a wide terminal."""
    monkeypatch.chdir(models)
    monkeypatch.setenv("COLUMNS", "150")
    monkeypatch.setattr(sys, "path", [*sys.path])
    return models


def test_data_and_tables_say_the_same(here, capsys):
    command = ["kl", "./a", "./b", "--prompts", "prompts.txt", *SMALL, "--temperature", "0.7"]
    assert main([*command, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["temperature"] == 0.7
    assert set(data["policy_ref"]["per_token"]) == {"k1", "k2", "k3", "abs", "exact"}
    assert data["policy_ref"]["per_token"]["exact"]["mean"] > 0.01
    assert data["ref_policy"]["sampler"] == "./b"
    assert main(command) == 0
    page = capsys.readouterr().out
    assert "temperature 0.7" in page
    assert "standard error over prompts" in page
    for title in (
        "KL(policy‖reference), samples",
        "KL(reference‖policy), samples",
        "Tokens with the largest KL",
        "Positions",
    ):
        assert title in page
    exact = data["policy_ref"]["per_sequence"]["exact"]
    assert f"{exact['mean']:.2f}"[:3] in page


def test_the_reference_need_not_answer(here, capsys):
    assert main(["kl", "./a", "./b", "--prompts", "prompts.txt", *SMALL, "--json", "--no-reverse-samples"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["ref_policy"] is None
    assert data["policy_ref"]["other_way"]["mean"] > 0


def test_a_model_against_its_copy_is_zero_on_a_task(here, capsys):
    shutil.copytree("a", "copy", dirs_exist_ok=True)
    words = ["kl", "./a", "./copy", "--task", "arithmetic", "skill=sort", "digits=3", "--num-prompts", "3"]
    assert main([*words, *SMALL, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["prompts"] == 3
    for direction in (data["policy_ref"], data["ref_policy"]):
        for level in ("per_token", "per_sequence"):
            assert {(e["mean"], e["se"]) for e in direction[level].values()} == {(0.0, 0.0)}


def test_a_run_needs_no_more_than_its_name(tmp_path, monkeypatch, capsys):
    """Its task, its rendering, and what it started from; an adapter run is compared with its base."""
    config = small_config(f"run.dir={tmp_path}", "run.max_steps=1", "checkpoint.every=1", "model.lora.r=2")
    run = keel.train(config).directory
    monkeypatch.setattr(sys, "path", [*sys.path])
    capsys.readouterr()
    assert main(["kl", str(run), "--num-prompts", "2", *SMALL, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["policy"], data["reference"], data["prompts"]) == (f"{run}@1", f"{run}@start", 2)
    assert data["policy_ref"]["largest"]["prompt"].startswith("h")  # held-out prompts of the run's task


def test_held_out_rows_of_ones_own_file(here, capsys):
    rows = [{"prompt": f"{a}+1=", "solution": str(a + 1)} for a in range(40)]
    (here / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["./a", "./b", "--task", "dataset", "data.path=rows.jsonl", "held_out=3", "--trust-remote-code"]
    assert main(["kl", *words, *SMALL, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["prompts"] == 3
    held = {p.prompt for p in build_task("dataset", data={"path": "rows.jsonl"}, held_out=3).held_out(9)}
    assert data["policy_ref"]["largest"]["prompt"] in held


MISTAKES = [
    (["./a", "./other", "--prompts", "prompts.txt"], "different vocabularies"),
    (["./a", "./missing", "--prompts", "prompts.txt"], "no model folder at './missing'"),
    (["./adapter", "./a", "--prompts", "prompts.txt"], "does not name its base model: give it with --base"),
    (["./a", "./b"], "give --prompts FILE or --task NAME"),
    (["./a", "./b", "--prompts", "empty.txt"], "has no prompts"),
    (["./a", "./b", "--prompts", "missing.txt"], "cannot read --prompts missing.txt"),
    (["./a", "./b", "--prompts", "long.txt"], "context of 64"),
    (["./a", "./b", "--prompts", "prompts.txt", "--temperature", "0"], "--temperature is 0"),
    (["./a", "--prompts", "prompts.txt"], "give a REFERENCE"),
    (["./a", "./b", "./a", "--prompts", "prompts.txt"], "not 3 models"),
    (["./a", "./b", "--prompts", "prompts.txt", "--task", "arithmetic"], "exclude each other"),
    (["./a", "./b", "--prompts", "prompts.txt", "skill=sort"], "parameter of a task"),
    (["./a", "./b", "--prompts", "./a/config.yml"], "use one of .txt, .jsonl"),
    (["./a", "./b", "--task", "dataset"], "task dataset needs data.path"),
    (["./a", "./b", "--task", "dataset", "data.path=rows.csv", "data.truncation=left"], "is not a parameter of a task"),
    (["./a", "./b", "--task", "arithmetik"], "did you mean 'arithmetic'"),
    (["./a", "./b", "--prompts", "prompts.txt", "--base", "./a"], "--base ./a needs an adapter"),
    (["./a", "./b", "--prompts", "prompts.txt", "--plot", "drift.doc"], "end its name in"),
    (["./a", "./b", "--prompts", "prompts.txt", "--chat-template", "chatlm"], "did you mean 'chatml'"),
    (["./a", "./b", "--prompts", "prompts.txt", "--dtype", "float8"], "float8"),
    (["./a", "./b", "--prompts", "prompts.txt", "--device", "cpuu"], "unknown model.device 'cpuu'"),
    (["./a", "./b", "--prompts", "prompts.txt", "--device", "cuda:99"], "model.device is cuda:99"),
    (["./a", "./b", "--prompts", "prompts.txt", "--temperature", "inf"], "--temperature is inf"),
    (["./a", "./b", "--prompts", "prompts.txt", "--samples", "0"], "samples"),
    (["nowhere@start", "./b", "--prompts", "prompts.txt"], "no run at 'nowhere'"),
    (["./a", "./b", "--prompts", "prompts.txt", "--engine", "nativ"], "unknown --engine 'nativ': did you mean"),
    (["./a", "./b", "--prompts", "prompts.txt", "--engine", "builtins:dict"], "=builtins:dict does not derive from"),
]


@pytest.mark.parametrize(("words", "message"), MISTAKES, ids=[" ".join(words) for words, _ in MISTAKES])
def test_a_mistake_is_one_line(here, capsys, words, message):
    assert main(["kl", *words]) == 2
    captured = capsys.readouterr()
    line = captured.err.strip().splitlines()[-1]
    assert line.startswith("keel: error: ")
    assert message in line
    assert "Traceback" not in captured.err
    assert captured.out == ""
