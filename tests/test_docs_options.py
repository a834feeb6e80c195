"""What the pages propose in their prose: options that load, commands that parse, and figures that the code has."""

import re
import shlex

import pytest

from keel.base.errors import KeelError
from keel.cli.app import app, configuration
from keel.config import load_config
from keel.config.schema import Config
from keel.recipes.chess.__main__ import app as chess
from test_docs import BLOCKS, PAGES, ROOT

SECTIONS = "|".join(Config.model_fields)
OVERRIDE = re.compile(rf"(?:{SECTIONS})(?:\.\w+)*=.+")
RECIPE = "python -m keel.recipes.chess "
VARIABLE = re.compile(r"\b(B|S|VALUE|NAME|X|N|…)$|…")  # `kl.beta=B`: what a reader fills in
# An option is proposed where it has a meaning: each of these is a configuration that a page speaks of.
CONTEXTS = {
    "default": (),
    "at β = 0": ("kl.beta=0",),
    "per token": ("kl.level=token", "kl.estimator=k3"),
    "k1": ("kl.estimator=k1",),
    "LoRA": ("model.lora.r=4",),
    "a moving reference": ("reference.kind=ema",),
    "the step rule": ("kl.controller.name=step",),
    "own data": ("task={name: dataset}", "data.path=rows.jsonl"),
    "limited prompts": ("data.max_prompt_length=64",),
    "a teacher": ("reference.model=teacher", "kl.beta=1"),
    "chess": ("task={name: chess}",),
    "a vLLM server": ("rollout.engine=vllm", "rollout.vllm.mode=server", "rollout.vllm.url=http://127.0.0.1:8000"),
}


def prose(page):
    """Every `…` outside the code blocks, on one line each, with the page's name."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", text)]


def words_of(span):
    try:
        return shlex.split(span.replace("={", "='{").replace("}", "}'") if "={" in span else span)
    except ValueError:
        return []


SPANS = sorted({(page.name, span) for page in PAGES for span in prose(page)})
PROPOSED = [
    (page, words)
    for page, span in SPANS
    if (words := tuple(w for w in words_of(span) if OVERRIDE.fullmatch(w) and not VARIABLE.search(w)))
    and not span.startswith(("python", "keel "))  # commands are tried as such
]


def loads(words):
    said = {}
    for name, context in CONTEXTS.items():
        try:
            return load_config(ROOT / "configs" / "default.yaml", [*context, *words])
        except KeelError as error:
            said[name] = str(error)
    raise AssertionError(f"{' '.join(words)} loads nowhere: {said}")


@pytest.mark.parametrize(("page", "words"), PROPOSED, ids=[f"{page}: {' '.join(words)}" for page, words in PROPOSED])
def test_an_option_that_a_page_proposes_loads(page, words):
    if any("my_module" in word for word in words):
        return  # the reader's own
    assert loads(words)


def commands():
    """`keel …` of the prose, and of the blocks that are excused from being run; a recipe's commands too."""
    for page, span in SPANS:
        if span.startswith(("keel ", RECIPE)):
            yield page, span
    for page, blocks in BLOCKS.items():
        for block in blocks:
            if block.not_run and block.language == "bash":
                lines = block.text.replace("\\\n", " ").splitlines()
                yield from ((page.name, line) for line in lines if line.startswith(("keel ", RECIPE)))


@pytest.mark.slow
@pytest.mark.parametrize(("page", "line"), sorted(set(commands())))
def test_a_command_that_a_page_names_is_one(page, line, monkeypatch):
    """Commands exist with their flags; the options that they are given load over the configuration that is named."""
    import typer

    words = shlex.split(line, comments=True)
    if line.startswith(RECIPE):
        words = ["chess", *words[3:]]
    known = typer.main.get_command(chess if words[0] == "chess" else app).commands
    assert words[1] in known or words[1].startswith("-"), line
    command, rest = known.get(words[1]), words[2:]
    if command is None:
        return
    taken = {flag for parameter in command.params for flag in parameter.opts} | {"--help"}
    assert {word.partition("=")[0] for word in rest if word.startswith("--")} <= taken, line
    given = [re.sub(r"^\[(.+)\]$", r"\1", w) for w in rest if not w.startswith("-") and not VARIABLE.search(w)]
    if words[1] in ("train", "doctor") and any(map(OVERRIDE.fullmatch, given)):
        monkeypatch.chdir(ROOT)
        assert configuration(given)


# (page, what the page says of an option's default, the option): the figure is read from the page.
DEFAULTS = [
    ("other-trainers.md", r"`rollout\.max_completion_length` is (\d+)", "rollout.max_completion_length"),
    ("other-trainers.md", r"Keel's `loss\.loss_type` is `(\w+)` where TRL", "loss.loss_type"),
    ("environments.md", r"`rollout\.kv_cache_gib` \(default (\d+)\)", "rollout.kv_cache_gib"),
    ("rewards.md", r"`reward\.on_error`: `(\w+)` \(default\)", "reward.on_error"),
    ("cases.md", r"Keel's default is (\d+)\. With `model\.lora\.dropout", "model.lora.dropout"),
]


@pytest.mark.parametrize(("page", "said", "option"), DEFAULTS, ids=[f"{page} {option}" for page, _, option in DEFAULTS])
def test_a_default_that_a_page_restates_is_the_schemas(page, said, option):
    text = " ".join((ROOT / "docs" / page).read_text().split())
    (figure,) = set(re.findall(said, text))
    value = load_config({"task": {"name": "arithmetic", "skill": "max"}, "model": {"lora": {}}}).to_dict()
    for part in option.split("."):
        value = value[part]
    assert type(value)(figure) == value


def test_no_default_is_restated_unseen():
    """Sentences that give an option's default are in the list above, or are about something that is no option."""
    found = []
    for page in PAGES:
        for line in page.read_text().splitlines():
            if re.search(rf"Keel's (default )?is `?[\d.]|`(?:{SECTIONS})\.[\w.]+` \(default", line):
                found.append((page.name, line))
    known = {page for page, _, _ in DEFAULTS}
    assert {page for page, _ in found} <= known, found
