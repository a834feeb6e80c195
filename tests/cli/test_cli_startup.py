"""What a command answers without torch: help, the configuration, and every mistake in it that Keel's own parts find."""

import json
import shlex
import subprocess
import sys

import pytest

HEAVY = ("torch", "transformers", "tokenizers", "numpy", "scipy", "pandas", "peft", "accelerate", "matplotlib")
# Each command's words, its exit status, and what it has to name.
COMMANDS = [
    ("--help", 0, "train"),
    ("--version", 0, "keel"),
    ("train --help", 0, "--resume"),
    ("verify --help", 0, "--formula"),
    ("kl --help", 0, "RUN@start"),
    ("train --print-config", 0, "log_ratio_clamp"),
    ("train kl.bta=0.1", 2, "kl.beta"),
    ("train bta=0.1", 2, "bta"),
    ("train kl.beta=-1", 2, "kl.beta is -1"),
    ("train broken.yaml", 2, "broken.yaml"),
    ("train typo.yaml", 2, "rollout.temperature"),
    ("train nosuch.yaml", 2, "nosuch.yaml"),
    ("train task.name=countdwn", 2, "countdown"),
    ("train task='{name: countdown, nosuch: 1}'", 2, "nosuch"),
    ("train task='{name: dataset}'", 2, "data.path"),
    ("train rewards='[{name: exct}]'", 2, "exact"),
    ("train loss.epsilonn=0.1", 2, "loss.epsilon"),
    ("train loss.loss_type=grop", 2, "grpo"),
    ("train loss.loss_type=sapo loss.epsilon=0.1", 2, "loss.epsilon"),
    ("train kl.estimator=k1 kl.gradient=plain kl.level=token", 2, "kl.estimator=k1"),
    ("train kl.controller.name=pidd", 2, "pid"),
    ("train reference.kind=emma", 2, "ema"),
    ("train reference.kind=ema reference.alpha=2", 2, "reference.alpha"),
    ("train rollout.engine=vlm", 2, "vllm"),
    ("train rollout.engine=vllm rollout.vllm.mode=server", 2, "rollout.vllm.url"),
    ("train optim.optimizer=adam", 2, "adamw"),
    ("sft kl.bta=1", 2, "kl.beta"),
    ("train --plan kl.bta=1", 2, "kl.beta"),
    ("doctor typo.yaml", 2, "rollout.temperature"),
    ("doctor kl.bta=1", 2, "kl.beta"),
    ("eval typo.yaml", 2, "rollout.temperature"),
    ("eval default kl.bta=1", 2, "kl.beta"),
    ("migrate grpo.yaml", 0, "rollout:"),
]
FILES = {
    "broken.yaml": "kl: [",
    "typo.yaml": "rollout: {temprature: 1.0}",
    "grpo.yaml": "{model_name_or_path: some/model, dataset_name: some/data, beta: 0.04, use_vllm: true}",
}
SCRIPT = """
import contextlib, io, json, sys
from keel.cli import main
results = []
for words in json.loads(sys.argv[1]):
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        before = set(sys.modules)
        status = main(words)
    results.append([status, output.getvalue(), sorted(set(sys.argv[2].split()) & sys.modules.keys() - before)])
print(json.dumps(results))
"""


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """Each command's status, output and the heavy modules that it loads, all in one process."""
    folder = tmp_path_factory.mktemp("startup")
    for name, content in FILES.items():
        (folder / name).write_text(content)
    # a mistake that is not found shows the configuration rather than training it
    shown = [["--print-config"] if status == 2 else [] for _, status, _ in COMMANDS]
    words = [shlex.split(command) + show for (command, _, _), show in zip(COMMANDS, shown, strict=True)]
    call = [sys.executable, "-c", SCRIPT, json.dumps(words), " ".join(HEAVY)]
    done = subprocess.run(call, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return dict(zip((command for command, _, _ in COMMANDS), json.loads(done.stdout), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(("command", "status", "named"), COMMANDS)
def test_the_answer_needs_no_torch(answers, command, status, named):
    got, output, heavy = answers[command]
    assert (got, heavy) == (status, []), output[-300:]
    assert named in output
    assert status == 0 or output.count("\n") == 1


@pytest.mark.slow
def test_python_has_the_names_of_the_rooms():
    """Public names come when they are asked for; one that is called like a submodule is never that submodule."""
    code = """
import importlib, types
for room in ("envs", "kl", "losses", "models", "reference", "rollout", "verify"):
    package = importlib.import_module(f"keel.{room}")
    for name in package.__all__:
        assert not isinstance(getattr(package, name), types.ModuleType), name
import keel.losses.objective, keel.losses.advantages, keel.models.fingerprint, keel.verify.audit
from keel.losses import advantages, objective
from keel.models import fingerprint
from keel.verify import audit
assert all(map(callable, (advantages, objective, fingerprint, audit, keel.train, keel.evaluate)))
assert keel.kl.ratios.DEFAULT_CLAMP == keel.kl.DEFAULT_CLAMP
assert {"k3", "KLOptions"} <= set(dir(keel.kl)) and keel.rollout.native.engine and keel.kl.exact
assert not hasattr(keel.kl, "nosuch") and not hasattr(keel.rollout, "batch")
from unittest import mock
with mock.patch("keel.kl.estimators.k3", len):
    assert keel.kl.k3 is len
assert keel.kl.k3 is keel.kl.estimators.k3 is not len
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
