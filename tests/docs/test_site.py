"""The site: its reference holds all that the code has, every page has a way to it, links inside it lead somewhere."""

from __future__ import annotations

import re
import sys
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
import yaml

import keel
from keel.config import load_config
from keel.doctor.findings import CODES
from keel.doctor.thresholds import shipped_thresholds
from keel.kl import FACTS
from keel.loggers.rundir import METRICS

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

from pages import reference_pages  # noqa: E402
from pages.api import PAGES, lazy_attributes  # noqa: E402
from pages.commands import commands  # noqa: E402
from pages.metrics import metric_table, spelled_out  # noqa: E402

REPOSITORY = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
MADE = {"index.md", "changelog.md", "contributing.md", "security.md"}  # of these, by scripts/site_hook.py
LINK = re.compile(r"\]\(([^)\s]+)\)")


@pytest.fixture(scope="module")
def reference() -> dict[str, str]:
    return reference_pages()


def dotted(tree: dict, path: str = "") -> list[str]:
    names = []
    for key, value in tree.items():
        names += dotted(value, f"{path}{key}.") if isinstance(value, dict) else [path + key]
    return names


def test_every_option_of_a_configuration_has_its_row(reference):
    """Against what a configuration holds once all of its sections are there, not against the classes again."""
    config = load_config(
        {
            "task": {"name": "arithmetic"},
            "model": {"lora": {}},
            "warmstart": {},
            "ray": {},
            "kl": {"beta": 0.1, "budget": 0.2},
            "rollout": {"engine": "vllm"},
        }
    )
    names = dotted(config.to_dict())
    assert len(names) > 150
    assert [name for name in names if f"`{name}`{{ #{name} }}" not in reference["reference/options.md"]] == []


def test_every_finding_threshold_and_command_has_its_place(reference):
    findings, page = reference["reference/findings.md"], reference["reference/commands.md"]
    assert [code for code in CODES if f"\n## {code} {{ #{code} }}\n" not in findings] == []
    assert [name for name in shipped_thresholds() if f"`{name}`{{ #{name} }}" not in findings] == []
    listed = list(commands())
    assert {"keel train", "python -m keel.recipes.chess data", "python -m keel.recipes.multihop"} <= {
        name for name, _ in listed
    }
    for name, command in listed:
        section = page.split(f"\n## {name}\n")[1].split("\n## ")[0]
        flags = [flag for p in command.params if p.param_type_name == "option" for flag in p.opts]
        assert [flag for flag in flags if f"`{flag}" not in section] == [], name


def test_every_fact_has_its_row(reference):
    page = reference["reference/facts.md"].split("## What a gradient can be")[0]
    assert len(re.findall(r"^\| `", page, re.MULTILINE)) == len(
        {(fact.level, fact.placement, fact.estimator, fact.gradient) for fact in FACTS}
    )
    assert "| `k1` | `plain` | KL(policy‖ref); **zero** | –; **away** |" in page


def test_every_exported_name_is_on_a_page_of_the_api(reference):
    """mkdocstrings reads the code without importing it: a name that is not there would stop the build."""
    rooms = {path for _, modules in PAGES.values() for path, _ in map(lazy_attributes, modules)}
    assert {"keel.kl", "keel.losses", "keel.envs", "keel.rollout", "keel.reference", "keel.models"} <= rooms
    for _, modules in PAGES.values():
        for path, names in map(lazy_attributes, modules):
            module = __import__(path, fromlist=["_"])
            assert [name for name in names if not hasattr(module, name)] == []
    text = "\n".join(reference[f"reference/api/{page}.md"] for page in PAGES)
    assert all(f"- {name}\n" in text for name in keel.kl.__all__)


SMALL = {
    "run": {"max_steps": 2, "if_exists": "replace"},
    "rollout": {"prompts_per_step": 2, "num_generations": 2, "max_completion_length": 4, "top_p": 0.9},
    "eval": {"samples": 2, "k": [1], "every": 0},
    "log": {"tensorboard": False},
}
MULTIHOP = {"name": "keel.recipes.multihop.models:multihop_tiny"}
# stale samples; mixed precision in fp16; a task that counts
RARE = {"kl/policy_ref/prefix_gap/mean", "kl/policy_ref/prefix_gap/se", "guard/overflow", "task/*"}


def logged(folder: Path, **sections: dict) -> set[str]:
    """The metrics of a small run."""
    sections = {name: {**SMALL.get(name, {}), **sections.get(name, {})} for name in {*SMALL, *sections}}
    sections["run"] = {**sections["run"], "dir": str(folder), "name": "run"}
    path = keel.train(sections).directory
    lines = [yaml.safe_load(line) for line in (path / METRICS).read_text().splitlines()]
    return {name for line in lines for name in line} - {"step"}


def test_the_table_of_metrics_is_what_runs_write(tmp_path):
    """Both ways: nothing is logged without a row, and no row is of a metric that nothing logs."""
    single = logged(tmp_path / "a", task={"name": "arithmetic"}, kl={"beta": 0.1, "exact": True})
    turns = {**SMALL["rollout"], "max_turns": 2, "max_completion_length": 24, "top_p": 1.0}
    several = logged(tmp_path / "b", data={"curriculum": {}}, task={"name": "multihop"}, model=MULTIHOP, rollout=turns)
    names = {name for group in metric_table().values() for entry in group for name in spelled_out(entry)}
    fixed, open_ended = {name for name in names if "*" not in name}, [n for n in names if "*" in n]
    written = single | several
    unknown = {n for n in written - fixed if not any(fnmatchcase(n, o) for o in open_ended)}
    assert unknown == set()
    assert fixed - written - RARE == set()


class Nav(yaml.SafeLoader):
    """mkdocs.yml names a function of Python's, which is not needed here."""


Nav.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: None)


def pages_of(nav) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    entries = nav.values() if isinstance(nav, dict) else nav
    return [page for entry in entries for page in pages_of(entry)]


def test_no_page_is_without_a_way_to_it(reference):
    settings = yaml.load((ROOT / "mkdocs.yml").read_text(), Loader=Nav)
    listed = pages_of(settings["nav"])
    there = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")} | set(reference) | MADE
    assert len(listed) == len(set(listed))
    assert set(listed) == there
    strict = settings["validation"]
    assert {*strict["nav"].values(), *strict["links"].values()} == {"warn"}  # which strict makes errors
    assert settings["strict"]


def anchors_of(text: str) -> set[str]:
    """Headings as the repository's page and the site's make anchors of them, and those that are given."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+?)(?: \{ #\S+ \})?$", text, re.MULTILINE)
    plain = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "") for heading in headings)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in plain} | set(
        re.findall(r"\{ #(\S+) \}", text)
    )


def broken_links(pages: dict[Path, str], files: Path) -> list[str]:
    """Relative links that lead to no page, file or anchor."""
    broken = []
    for page, text in pages.items():
        for link in LINK.findall(re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)):
            if re.match(r"[a-z]+:", link):
                continue
            target, _, anchor = link.partition("#")
            place = Path(*_normal(page.parent / target)) if target else page
            known = place in pages or (files / place).is_file()
            if not known or (anchor and place in pages and anchor not in anchors_of(pages[place])):
                broken.append(f"{page}: {link}")
    return broken


def _normal(path: Path) -> list[str]:
    parts: list[str] = []
    for part in path.parts:
        parts = parts[:-1] if part == ".." else [*parts, part]
    return parts


@pytest.mark.slow
def test_links_inside_lead_somewhere(reference):
    pages = {Path("docs") / name: text for name, text in reference.items()}
    for file in (*(ROOT / "docs").rglob("*.md"), *(ROOT / name for name in REPOSITORY)):
        pages[file.relative_to(ROOT)] = file.read_text()
    assert sum(len(LINK.findall(text)) for text in pages.values()) > 300
    assert broken_links(pages, ROOT) == []


def test_a_link_that_leads_nowhere_is_found(tmp_path):
    (tmp_path / "picture.png").touch()
    pages = {
        Path("a.md"): "# A\n[b](b/c.md#said-so) [p](picture.png) [here](#a) [gone](gone.md) [no](b/c.md#nowhere)",
        Path(
            "b/c.md"
        ): "## Said, so!\n[up](../a.md#a) [out](https://example.org/x) [bad](a.md) [row](#x.y)\n`x.y`{ #x.y }",
    }
    assert broken_links(pages, tmp_path) == ["a.md: gone.md", "a.md: b/c.md#nowhere", "b/c.md: a.md"]
