"""keel train, sft, report and --version as a user types them; what they call is tested elsewhere."""

from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import yaml

from keel import __version__
from keel.base.errors import KeelError
from keel.cli import main
from keel.cli.app import split
from keel.config import load_config
from keel.config.load import choose


@pytest.fixture
def config_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "mine.yaml"
    path.write_text("run: {name: mine, max_steps: 3}\nkl: {beta: 0.01}\n", encoding="utf-8")
    return path


@pytest.fixture
def called(monkeypatch):
    """What the commands call, recorded instead of run."""
    import keel.api

    calls = []

    def train(config, *, resume, dry_run):
        calls.append((config, resume, dry_run))
        return keel.api.TrainResult({}, Path(config.run.dir), 0, 7)

    monkeypatch.setattr(keel.api, "train", train)
    return calls


def test_words_of_the_command_line():
    words = ["--kl-beta", "0.1", "a.yaml", "kl.exact=true", "--max-steps=5", "--sync-ref-model", "--top-k", "-1"]
    assert split(words) == (
        ["a.yaml"],
        ["kl-beta=0.1", "kl.exact=true", "max-steps=5", "sync-ref-model=true", "top-k=-1"],
    )
    assert split(["--sync-ref-model", "kl.beta=1"]) == ([], ["sync-ref-model=true", "kl.beta=1"])
    with pytest.raises(KeelError, match="-x"):
        split(["-x"])


def test_which_configuration(tmp_path, monkeypatch):
    run = tmp_path / "runs" / "one"
    run.mkdir(parents=True)
    assert choose([]) == ("default", [])
    assert choose(["a.yaml"], resume=True) == ("a.yaml", [])
    with pytest.raises(KeelError, match="nothing to resume"):
        choose([str(run)], resume=True)
    (run / "config.yaml").write_text("{}")
    assert choose([str(run)], resume=True) == (str(run), [f"run.dir={run.parent}", "run.name=one"])
    (run / "sub").mkdir()
    link = tmp_path / "elsewhere" / "latest"
    link.parent.mkdir()
    link.symlink_to(run)
    for path, here in ((".", run), ("..", run / "sub"), (str(link), tmp_path)):
        monkeypatch.chdir(here)
        assert choose([path], resume=True) == (path, [f"run.dir={run.parent}", "run.name=one"])
    with pytest.raises(KeelError, match="second configuration"):
        choose(["a.yaml", "b.yaml"])


def test_train_calls_the_loop(config_file, called, capsys):
    assert main(["train", "--kl-coef", "0.05", "mine.yaml", "--dry-run", "rollout.num_generations=4"]) == 7
    [(config, resume, dry_run)] = called
    assert (config.kl.beta, config.rollout.num_generations, config.run.max_steps) == (0.05, 4, 3)
    assert (resume, dry_run) == (False, True)
    assert "keel: note: kl_coef became kl.beta=0.05" in capsys.readouterr().err


def test_resume_by_the_folder_of_a_run(config_file, called, tmp_path):
    run = tmp_path / "elsewhere" / "mine"
    run.mkdir(parents=True)
    config_file.rename(run / "config.yaml")
    assert main(["train", "--resume", "elsewhere/mine", "run.max_steps=9"]) == 7
    [(config, resume, _)] = called
    assert resume
    assert (config.run.dir, config.run.name, config.run.max_steps) == ("elsewhere", "mine", 9)


def test_print_config_loads_to_the_same(config_file, called, capsys, tmp_path):
    assert main(["train", "mine.yaml", "--print-config", "target_kl=0.1"]) == 0
    shown = capsys.readouterr()
    assert "# Coefficient of the KL penalty" in shown.out
    assert "Here: sg_rho*k2." in shown.out
    assert yaml.safe_load(shown.out)["kl"]["controller"] == {"name": "step", "target": 0.1}
    again = tmp_path / "again.yaml"
    again.write_text(shown.out, encoding="utf-8")
    assert load_config(again) == load_config("mine.yaml", ["target_kl=0.1"])
    assert called == []


def test_the_default_needs_no_path(called, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["train"]) == 7
    assert called[0][0].kl.beta == 0.01


def test_users_own_parts_of_the_working_folder(config_file, called, tmp_path):
    (tmp_path / "my_controller_part.py").write_text(
        "from keel.kl.controllers import RuleController\n"
        "def half(beta, after: int = 5):\n    return RuleController(beta / 2)\n"
    )
    assert main(["train", "mine.yaml", "kl.controller.name=my_controller_part:half", "kl.controller.after=3"]) == 7
    assert main(["train", "mine.yaml", "kl.controller.name=my_controller_part:half", "kl.controller.aftr=3"]) == 2


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["train", "mine.yaml", "kl.betta=1"], "did you mean kl.beta?"),
        (["train", "mine.yaml", "--nope", "1"], "unknown option nope"),
        (["train", "mine.yaml", "kl.beta=-1"], "at least 0"),
        (["train", "none.yaml"], "no configuration at none.yaml"),
        (["train", "mine.yaml", "mine.yaml"], "second configuration"),
        (["train", "mine.yaml", "--reward-weights", "3"], "has no counterpart"),
        (["sft", "mine.yaml"], "needs a warmstart section"),
        (["report", "no-such-run"], "no-such-run"),
        (["report"], "Missing argument"),
    ],
)
def test_mistakes_are_one_line_and_status_2(arguments, says, config_file, called, capsys):
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert says in error
    assert len(error.strip().splitlines()) == 1


@pytest.mark.parametrize("arguments", [["--version", "--verbose"], ["--verbose", "--version"]])
def test_the_version_with_what_a_bug_report_needs(arguments, capsys):
    assert main(arguments) == 0
    shown = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert shown["keel"] == __version__
    assert shown["torch"] == torch.__version__
    assert int(shown["threads"]) >= 1
    assert {"commit", "device", "cores", "memory_gib", "vllm"} <= set(shown)
    assert "packages" not in shown


def test_options_before_a_missing_command(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"keel {__version__}\n"
    for arguments, says in ((["--verbose"], "--version --verbose"), (["--"], "name a command")):
        assert main(arguments) == 2
        assert says in capsys.readouterr().err


def test_watch_serves_the_run_while_it_trains(config_file, called, monkeypatch):
    import keel.lab.watch.serve as serving

    served = []

    @contextmanager
    def serve_while(run, port, echo):
        served.append((str(run), port, len(called)))
        yield
        served.append(len(called))

    monkeypatch.setattr(serving, "serve_while", serve_while)
    assert main(["train", str(config_file)]) == 7
    assert served == []
    assert main(["train", str(config_file), "--watch"]) == 7
    assert main(["train", str(config_file), "--watch", "--watch-port", "0"]) == 7
    assert served == [("runs/mine", 5335, 1), 2, ("runs/mine", 0, 2), 3]
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    main(["train", str(config_file), "--watch"])  # of several processes the first one serves
    assert len(served) == 4
