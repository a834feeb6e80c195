"""What a release rests on: one version, extras that agree, targets that install what they need, workflows."""

import importlib.util
import re
import tomllib
from pathlib import Path

import pytest
import yaml

import keel

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
TARGETS = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))

spec = importlib.util.spec_from_file_location("check_wheel", ROOT / "scripts/check_wheel.py")
check_wheel = importlib.util.module_from_spec(spec)
spec.loader.exec_module(check_wheel)


def packages(extra):
    """Names of an extra's requirements, with those of the extras that it names."""
    names = set()
    for requirement in EXTRAS[extra]:
        if own := re.fullmatch(r"keel-rl\[(.+)\]", requirement):
            names |= {name for part in own[1].split(",") for name in packages(part)}
        else:
            names.add(re.match(r"[A-Za-z0-9_.-]+", requirement)[0].lower())
    return names


def test_extras_name_each_other_and_the_tests_have_all_that_a_user_may_install():
    users = (
        set(EXTRAS) - {"test", "lint", "dev", "docs"} - {"gem", "openenv", "skyrl-gym", "textarena", "verifiers"}
    )  # those: tests_envs
    assert packages("test") >= set().union(*map(packages, users))
    assert packages("dev") == packages("test") | packages("lint")
    assert packages("tensorboard") == {"tensorboard"}


def test_every_extra_that_a_message_names_is_there():
    named = {
        name
        for path in (ROOT / "src/keel").rglob("*.py")
        for names in re.findall(r"keel-rl\[([a-z,]+)\]", path.read_text(encoding="utf-8"))
        for name in names.split(",")
    }
    assert {"tensorboard", "wandb", "chess"} <= named <= set(EXTRAS)


def test_the_version_is_said_in_one_place_and_the_citation_follows():
    assert check_wheel.version() == keel.__version__
    assert "version" in PROJECT["dynamic"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == keel.__version__
    assert citation["license"] == PROJECT["license"]


def test_the_badges_of_the_readme_are_true():
    claimed = [c.rpartition(" ")[2] for c in PROJECT["classifiers"] if c.startswith("Programming Language")]
    badges = {"version": keel.__version__, "license": PROJECT["license"], "python": " | ".join(claimed)}
    for name, value in badges.items():
        assert f"images/badge-{name}.svg" in (ROOT / "README.md").read_text(encoding="utf-8")
        assert f">{value}</text>" in (ROOT / f"docs/images/badge-{name}.svg").read_text(encoding="utf-8")


def release_of(folder, *, cited="1.2.3", heading="## 1.2.3 (2026-01-02)"):
    (folder / "src/keel").mkdir(parents=True)
    (folder / "src/keel/__init__.py").write_text('__version__ = "1.2.3"\n')
    (folder / "CITATION.cff").write_text(f"title: x\nversion: {cited}\nlicense: y\n")
    (folder / "CHANGELOG.md").write_text(f"# Changelog\n\n{heading}\n")
    return folder


@pytest.mark.parametrize(
    ("tag", "changes", "message"),
    [
        ("v1.2.4", {}, "the tag is v1.2.4, src/keel/__init__.py says 1.2.3"),
        ("1.2.3", {}, "tag v1.2.3"),
        ("v1.2.3", {"cited": "1.2.2"}, "CITATION.cff does not say version: 1.2.3"),
        ("v1.2.3", {"heading": "## Unreleased"}, "CHANGELOG.md has no heading ## 1.2.3"),
    ],
)
def test_a_tag_that_is_not_the_version_stops_a_release(tag, changes, message, tmp_path):
    check_wheel.check_tag("v1.2.3", release_of(tmp_path / "sound"))
    with pytest.raises(SystemExit, match=re.escape(message)):
        check_wheel.check_tag(tag, release_of(tmp_path / "broken", **changes))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_run_targets_that_are_there_with_least_permissions(path):
    workflow = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert workflow["permissions"] in ({}, {"contents": "read"})
    assert workflow["concurrency"]["group"]
    for name, job in workflow["jobs"].items():
        granted = {**workflow["permissions"], **job.get("permissions", {})}
        assert granted == ({"id-token": "write"} if name == "publish" else {"contents": "read"})
        assert job["timeout-minutes"] <= 90
        for step in job["steps"]:
            for target in re.findall(r"\bmake ([a-z-]+)", step.get("run", "")):
                assert target in TARGETS, f"{path.name}: make {target}"
            if "uses" in step:
                assert re.fullmatch(r"[\w.-]+/[\w.-]+@[0-9a-f]{40}", step["uses"]), step["uses"]


def test_the_tests_run_on_every_python_that_is_claimed():
    matrix = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]["test"]["strategy"]["matrix"]
    claimed = {word.rpartition(" ")[2] for word in PROJECT["classifiers"] if word.startswith("Programming Language")}
    assert claimed <= set(matrix["python"])
    assert PROJECT["requires-python"] == f">={min(claimed, key=lambda text: int(text.partition('.')[2]))}"


def test_images_are_built_of_files_that_their_context_holds():
    held = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    for path in (ROOT / "docker").glob("*.Dockerfile"):
        for line in re.findall(r"^COPY (?!--from)(.+)$", path.read_text(), re.M):
            for name in line.split()[:-1]:
                assert name in held, f"{path.name}: {name}"
                assert (ROOT / name).exists()
