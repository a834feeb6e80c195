"""Each example of a check finds its fault, exits with 1, and is silent on the sound twin."""

import runpy
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.peers
CHECKS = Path(__file__).parents[2] / "examples" / "checks"
FOUND = {
    "formula": "gradient zero",
    "tokens": "tokens/encoded-again",
    "depth": "sampler/depth",
    "drawn": "sampler/stale",
}


@pytest.mark.parametrize("name", FOUND)
def test_an_example_finds_its_fault_alone(tmp_path, monkeypatch, capsys, name):
    """In this process: a new one would import TRL first."""
    script = CHECKS / f"{name}.py"
    assert len(script.read_text().splitlines()) <= 40
    monkeypatch.chdir(tmp_path)

    def run(kind):
        monkeypatch.setattr(sys, "argv", [str(script), kind])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(script), run_name="__main__")
        return int(ended.value.code), capsys.readouterr().out

    sound, faulty = run("sound"), run("faulty")
    assert (sound[0], faulty[0]) == (0, 1), (sound, faulty)
    assert FOUND[name] in faulty[1]
    assert FOUND[name] not in sound[1]
