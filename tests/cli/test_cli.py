"""The command line as a user meets it: in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import keel
import processes
from keel.cli import main
from keel.kl import estimators
from keel.verify import SECTIONS
from keel.verify.values import gaussian, numerics


def run_keel(*arguments, cwd=None):
    return processes.run_keel(*arguments, cwd=cwd, env={**os.environ, "COLUMNS": "160", "NO_COLOR": "1"})


def test_version():
    assert run_keel("--version").stdout.strip() == f"keel {keel.__version__}"


def test_the_package_runs_as_the_command_does():
    for arguments, status in ((["--version"], 0), (["verify", "--estimator", "k4"], 2)):
        commands = [[sys.executable, "-m", module, *arguments] for module in ("keel", "keel.cli")]
        done, same = (subprocess.run(command, capture_output=True, text=True, timeout=60) for command in commands)
        for other in (same, run_keel(*arguments)):
            assert (done.returncode, done.stdout, done.stderr) == (status, other.stdout, other.stderr)
        assert "Traceback" not in done.stderr


@pytest.fixture(scope="module")
def proven():
    """The facts of two sections, proven once; tests/verify proves all."""
    facts = {title: prove() for title, prove in SECTIONS.items() if prove in (gaussian, numerics)}
    return {title: lambda rows=rows: rows for title, rows in facts.items()}


def test_verify_prints_tables_and_succeeds(proven, monkeypatch, capsys):
    monkeypatch.setattr("keel.verify.sections.SECTIONS", proven)
    assert main(["verify"]) == 0
    shown = capsys.readouterr().out
    assert "facts hold" in shown
    assert all(title in shown for title in proven)


def test_verify_json_is_the_same_as_data(proven, monkeypatch, capsys):
    monkeypatch.setattr("keel.verify.sections.SECTIONS", proven)
    assert main(["verify", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["ok"] is True
    assert len(data["facts"]) == sum(len(prove()) for prove in proven.values())
    assert set(data["facts"][0]) == {"section", "fact", "measured", "expected", "ok"}


def test_a_failing_fact_gives_status_1(proven, monkeypatch, capsys):
    """A fact made false by another estimator under its name fails the command."""
    (title,) = [title for title, prove in SECTIONS.items() if prove is gaussian]
    monkeypatch.setattr("keel.verify.sections.SECTIONS", {**proven, title: gaussian})
    monkeypatch.setattr(estimators, "ESTIMATORS", {**estimators.ESTIMATORS, "k2": lambda d: d * d})
    assert main(["verify", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["ok"] is False


def test_callable_from_the_working_folder(tmp_path):
    (tmp_path / "mine.py").write_text("def kl(logp, ref):\n    return logp - ref\n")
    done = run_keel("verify", "--callable", "mine:kl", "--json", cwd=tmp_path)
    assert json.loads(done.stdout)["in_loss"]["gradient"] == "zero"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["verrify"], "Did you mean 'verify'"),
        (["verify", "--nope"], "No such option"),
        (["verify", "--formula", "os.system(1)"], "may not be called"),
        (["verify", "--formula", "logp", "--callable", "a:b"], "exclude each other"),
        (["verify", "--callable", "nowhere:f"], "cannot import callable 'nowhere:f'"),
        (["verify", "--plot", "/nonexistent/folder/x.png", "--formula", "logp"], "cannot write the plot"),
        (["verify", "--plot", "x.notaformat", "--formula", "logp"], "cannot write the plot"),
        (["verify", "--plot", "noext", "--formula", "logp"], "end its name in .png"),
        (["verify", "--callable", "exits:f"], "cannot import callable 'exits:f': SystemExit"),
        (["verify", "--formula", "1if logp else 2"], "cannot be parsed"),
    ],
)
def test_mistakes_are_one_line_and_status_2(arguments, says, tmp_path):
    (tmp_path / "exits.py").write_text("import sys\nsys.exit(0)\n")
    done = run_keel(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert says in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_terminal_without_unicode_does_not_crash():
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-m", "keel.cli", "verify", "--formula", "logp - ref"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
    assert done.returncode == 0, done.stderr


def test_keel_alone_shows_its_help():
    done = run_keel()
    assert "verify" in done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert "error:" not in done.stderr


def test_console_script_is_installed():
    script = Path(sys.executable).with_name("keel")
    assert subprocess.run([script, "--version"], capture_output=True, timeout=60).returncode == 0
