"""How verl finds Keel: by its entry point, late, and in a tested version only."""

import subprocess
import sys

import pytest

from keel.base.errors import KeelError
from keel.integrations import versions
from keel.integrations.versions import VERL, VERL_WORKER_METHODS

pytestmark = pytest.mark.peers


def run(code, **environment):
    import os

    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    return done.stdout + done.stderr


ASK = "from verl.trainer.ppo.v1 import get_trainer_cls; print('got', get_trainer_cls('keel_sync').__module__)"


def test_verl_knows_the_trainer_by_itself():
    """Installed is enough: nothing of Keel's is imported by hand. `import verl` alone loads no trainer for it."""
    light = "import sys, verl; print('light', 'verl.trainer.ppo.v1' not in sys.modules); "
    output = run(light + ASK)
    assert "light True" in output
    assert "got keel.integrations.verl.trainer" in output


def test_without_plugins_verl_refuses_the_mode():
    assert "Unknown trainer 'keel_sync'" in run(ASK, VERL_USE_EXTERNAL_PLUGINS="none")


def test_another_version_is_said_and_verl_refuses_the_mode():
    """verl swallows what a plugin raises, so that the line goes to the log, too."""
    other = "import importlib.metadata as m; v = m.version; m.version = lambda n: '0.10.2' if n == 'verl' else v(n); "
    output = run(other + ASK)
    assert "verl 0.10.2" in output
    assert "pip install 'verl==0.9.*'" in output
    assert "Unknown trainer 'keel_sync'" in output


def test_a_tested_version_is_taken():
    assert VERL.check_version().startswith("0.9.")


def test_another_version_is_refused_in_one_line(monkeypatch):
    monkeypatch.setattr(versions, "version", lambda name: "0.8.0")
    with pytest.raises(KeelError, match=r"verl 0.8.0 .*0\.9.*: pip install 'verl==0\.9\.\*'$"):
        VERL.check_version()


def test_no_verl_is_refused_in_one_line(monkeypatch):
    def absent(name):
        raise versions.PackageNotFoundError(name)

    monkeypatch.setattr(versions, "version", absent)
    with pytest.raises(KeelError, match="needs verl: pip install"):
        VERL.check_version()


@pytest.mark.parametrize("missing", VERL.overridden)
def test_a_verl_without_what_is_overridden_is_refused(missing):
    names = {name: None for name in VERL.overridden if name != missing}
    with pytest.raises(KeelError, match=rf"^Trainer has no {missing} .*verl 0\.9\."):
        VERL.check_names(type("Trainer", (), names))


@pytest.mark.parametrize("missing", VERL_WORKER_METHODS)
def test_workers_without_what_is_called_are_refused(missing):
    names = {name: None for name in VERL_WORKER_METHODS if name != missing}
    with pytest.raises(KeelError, match=f"^Worker has no {missing}"):
        VERL.check_names(type("Worker", (), names), VERL_WORKER_METHODS)


def test_a_run_of_plain_verl_outlives_what_keeps_keel_out():
    """A package that Keel's trainer needs and that is not there is said in the log; verl's trainers are as ever."""
    absent = "import sys; sys.modules['keel.integrations.verl.trainer'] = None; "
    plain = "from verl.trainer.ppo.v1 import get_trainer_cls; print('plain', get_trainer_cls('sync').__name__); "
    output = run(absent + plain + ASK)
    assert "keel_sync (ModuleNotFoundError" in output
    assert "plain PPOTrainerSync" in output
    assert "Unknown trainer 'keel_sync'" in output
