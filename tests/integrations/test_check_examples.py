"""Each example of a check finds its fault, exits with 1, and is silent on the sound twin."""

import subprocess
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
def test_an_example_finds_its_fault_alone(tmp_path, name):
    script = CHECKS / f"{name}.py"
    assert len(script.read_text().splitlines()) <= 40

    def run(kind):
        command = [sys.executable, str(script), kind]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    sound, faulty = run("sound"), run("faulty")
    assert (sound.returncode, faulty.returncode) == (0, 1), sound.stderr[-2000:] + faulty.stderr[-2000:]
    assert FOUND[name] in faulty.stdout
    assert FOUND[name] not in sound.stdout
