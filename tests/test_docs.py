"""The documents' own code is run: Python, configurations, commands, notebooks, in an empty folder, as a reader would.

Training is shortened (`SHORT`) and models that a reader fetches are replaced by the tiny one; nothing else is changed.
A block that cannot run here is preceded by `<!-- not run: reason -->`.
"""

import ast
import json
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

import keel
from keel.cli import main
from keel.config import load_config

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
LANGUAGES = {"python", "bash", "yaml", "text", "json"}
SHORT = {
    "run.max_steps": 2,
    "warmstart.steps": 2,
    "warmstart.batch_size": 4,
    "warmstart.warmup_steps": 0,
    "rollout.prompts_per_step": 2,
    "rollout.num_generations": 2,
    "rollout.max_completion_length": 4,
    "optim.warmup_steps": 0,
    "eval.samples": 2,
    "eval.k": [1, 2],
    "eval.every": 0,
}
STANDS_IN = {"HuggingFaceTB/SmolLM2-135M-Instruct": "tiny"}


@dataclass(frozen=True)
class Block:
    page: str
    line: int
    language: str
    text: str
    not_run: str | None

    def __str__(self):
        return f"{self.page}:{self.line}"


def transformer_blocks(page):
    found, lines = [], page.read_text().splitlines()
    number = 0
    while number < len(lines):
        opening = re.fullmatch(r"```(\w*)", lines[number])
        number += 1
        if opening is None:
            continue
        end = next(i for i in range(number, len(lines)) if lines[i] == "```")
        before = lines[number - 2] if number > 1 else ""
        reason = re.fullmatch(r"<!-- not run: (.+) -->", before)
        text = "\n".join(lines[number:end])
        found.append(Block(page.name, number, opening[1], text, reason[1] if reason else None))
        number = end + 1
    return found


BLOCKS = {page: transformer_blocks(page) for page in PAGES}


def test_every_block_says_what_it_is():
    for block in (block for blocks in BLOCKS.values() for block in blocks):
        assert block.language in LANGUAGES, f"{block}: name the block's language, one of {sorted(LANGUAGES)}"


def test_few_blocks_are_excused():
    """Excuses are counted: raising this number is a decision, not an accident."""
    excused = [str(block) for blocks in BLOCKS.values() for block in blocks if block.not_run]
    assert len(excused) <= 16, excused


@pytest.fixture
def reader(tmp_path, monkeypatch):
    """An empty folder with the configs in it, short runs, and the tiny model for those that are fetched."""
    monkeypatch.chdir(tmp_path)
    for name in ("configs", "examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.syspath_prepend(str(tmp_path))

    import keel.api as api
    import keel.config

    def shortened(source, overrides=()):
        config, _ = keel.config.read_config(source, overrides)
        own = {name: value for name, value in SHORT.items() if not name.startswith("warmstart") or config.warmstart}
        tree = config.to_dict()
        for name, value in own.items():
            section, _, option = name.partition(".")
            tree[section][option] = value
        tree["optim"]["minibatches"] = min(tree["optim"]["minibatches"], 2)
        tree["model"]["name"] = STANDS_IN.get(tree["model"]["name"], tree["model"]["name"])
        tree["run"]["if_exists"] = "resume" if tree["run"]["if_exists"] == "resume" else "replace"
        return keel.config.load_config(tree)

    monkeypatch.setattr(api, "load_config", shortened)
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_pages_code_runs(page, reader, capsys):
    """From top to bottom, so that a later block finds the files and runs of an earlier one."""
    names = {"keel": keel}
    for block in BLOCKS[page]:
        if block.not_run:
            continue
        if block.language == "python":
            exec(compile(block.text, str(block), "exec"), names)
        elif block.language == "yaml":
            assert load_config(yaml.safe_load(block.text)), block
        elif block.language == "bash":
            run_commands(block, capsys)


def run_commands(block, capsys):
    for line in block.text.replace("\\\n", " ").splitlines():
        words = [STANDS_IN.get(word, word) for word in shlex.split(line, comments=True)]
        words = [re.sub(r"^model\.name=(.+)$", lambda m: f"model.name={STANDS_IN.get(m[1], m[1])}", w) for w in words]
        if not words:
            continue
        if words[0] == "keel":
            status = main(words[1:])
            said = capsys.readouterr()
            assert status in (0, 1), f"{block}: {line}\n{said.err[-2000:]}"
            assert status == 0 or words[1] in ("doctor",), f"{block}: {line}\n{said.out[-2000:]}{said.err[-1000:]}"
        elif words[0] == "make":
            targets = (ROOT / "Makefile").read_text()
            assert all(f"\n{target}:" in targets for target in words[1:]), f"{block}: {line}"
        else:
            assert words[0] in ("git", "pip", "python", "cd", "python3"), f"{block}: what is {words[0]}?"
            scripts = [word for word in words[1:] if word.endswith(".py")]
            assert all((ROOT / script).is_file() for script in scripts), f"{block}: {line}"


NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_the_notebooks_cells_run(path, reader):
    """In order and in this process, which needs no kernel; what a cell ends with is shown as a notebook would."""
    names = {}
    for cell in code_cells(path):
        *before, last = ast.parse("".join(cell["source"])).body
        exec(compile(ast.Module(before, []), f"{path.name} {cell['id']}", "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), f"{path.name} {cell['id']}", "eval"), names)
            shown = [getattr(value, form)() for form in ("_repr_html_", "_repr_png_") if hasattr(value, form)]
            assert not shown or any(shown), cell["id"]  # a figure has no HTML
            assert repr(value)
        else:
            exec(compile(ast.Module([last], []), f"{path.name} {cell['id']}", "exec"), names)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_notebooks_are_kept_with_the_outputs_of_one_run(path):
    notebook = json.loads(path.read_text())
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
    assert [cell["execution_count"] for cell in code_cells(path)] == list(range(1, len(code_cells(path)) + 1))
    for cell in code_cells(path):
        shows = isinstance(ast.parse("".join(cell["source"])).body[-1], ast.Expr)
        kinds = [output["output_type"] for output in cell["outputs"]]
        assert kinds == ["execute_result"] * shows, cell["id"]
    assert not re.search(r"/(home|root|tmp|work|Users)/", path.read_text())
    assert path.stat().st_size < 500_000


def code_cells(path):
    return [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
