"""`module:attr`: found in the working folder, refused in one line that names the part and where it failed."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from keel.base.errors import KeelError
from keel.base.parts import import_object, is_import_path


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Writes a module of the working folder, which is not on the path yet; a name of its own for each test."""
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    monkeypatch.chdir(tmp_path)
    name = f"own_{re.sub(r'[^a-z0-9]', '_', tmp_path.name)}"

    def write(text: str) -> str:
        Path(f"{name}.py").write_text(text)
        return name

    yield write
    sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("name", "own"),
    [("a:b", True), ("a.b_1:C", True), ("tiny", False), ("a:", False), (":b", False), ("a..b:c", False), (3, False)]
    + [(name, False) for name in ("C:\\models", "a:b:c", "a/b:c", "1a:b", "a: b", None)],
)
def test_what_has_the_form(name, own):
    assert is_import_path(name) is own


def test_a_module_of_the_working_folder(module):
    name = module("def double(x):\n    return 2 * x\n")
    assert import_object(f"{name}:double", "reward")(4) == 8


def test_what_is_no_function_passes_where_it_may(module):
    name = module("recipe = {'a': 1}\n")
    assert import_object(f"{name}:recipe", "loss.loss_type", callable_only=False) == {"a": 1}
    with pytest.raises(KeelError, match=rf"^task '{name}:recipe' is of type dict: it must be a function or a class$"):
        import_object(f"{name}:recipe", "task")


def test_a_kind_and_an_option_are_named_as_the_user_writes_them(module):
    name = module("")
    cause = rf": module '{name}' has no attribute 'f'; check the spelling and PYTHONPATH$"
    with pytest.raises(KeelError, match=rf"^cannot import task '{name}:f'{cause}"):
        import_object(f"{name}:f", "task")
    with pytest.raises(KeelError, match=rf"^cannot import kl\.estimator={name}:f{cause}"):
        import_object(f"{name}:f", "kl.estimator")
    with pytest.raises(KeelError, match=r"^tool 'search' is not module:attr, such as my_module:my_part$"):
        import_object("search", "tool")


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("a = 1\nb = a / 0\n", "ZeroDivisionError: division by zero"),
        ("a = 1\n\nraise SystemExit(0)\n", "SystemExit: 0"),
    ],
)
def test_a_module_that_fails_says_where(module, text, cause):
    name = module(text)
    line = text.count("\n")
    with pytest.raises(KeelError, match=rf"^cannot import engine '{name}:f': {cause}, in .*{name}\.py, line {line}$"):
        import_object(f"{name}:f", "engine")


def test_a_refusal_by_keel_itself_stands_alone(module):
    name = module("from keel.envs.registry import build_task\n\nbuild_task('nothing')\n")
    with pytest.raises(KeelError, match=r"^unknown task 'nothing'"):
        import_object(f"{name}:f", "task")


def test_the_path_grows_once(module):
    name = module("def f(): pass\n")
    for _ in range(2):
        import_object(f"{name}:f", "task")
    assert sys.path.count("") == 1


def test_an_import_loads_no_framework():
    code = "import keel.base.parts, sys; print([m for m in ('torch', 'numpy', 'transformers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=os.environ)
    assert done.stdout.strip() == "[]", done.stderr
