"""The page with the simplex: its numbers against formulas by hand, the claims of its table, the page in a browser."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from chromium import needs_chromium, tab

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

from pages.simplex import (  # noqa: E402
    BETAS,
    REFERENCE,
    REWARDS,
    SAMPLER,
    choices,
    kl_gradient,
    lattice,
    optimum,
    pairing,
    reward_gradient,
    simplex_script,
)

P, MU, R = (torch.tensor(x, dtype=torch.float64)[:, None] for x in (REFERENCE, SAMPLER, REWARDS))
PI = lattice()
U = (PI / P).log()
REVERSE = PI * (U - (PI * U).sum(0))  # ∇KL(policy‖ref) in the logits
FORWARD = PI - P
TRUE = dict.fromkeys(("auto", "rho"), REVERSE)
BY_HAND: dict[tuple[str, str, str, str], torch.Tensor] = {
    **{(e, "loss", "auto", s): REVERSE for e in ("k1", "k2", "k3", "abs", "exact") for s in ("on", "off")},
    **{("k1", where, "auto", s): REVERSE for where in ("reward", "advantage") for s in ("on", "off")},
    ("k1", "loss", "plain", "on"): 0 * PI,
    ("k1", "loss", "plain", "off"): MU - PI,
    ("k1", "loss", "rho", "off"): REVERSE,
    ("k2", "loss", "plain", "on"): REVERSE,
    ("k2", "loss", "plain", "off"): MU * U - PI * (MU * U).sum(0),
    ("k3", "loss", "plain", "on"): FORWARD,
    ("k3", "loss", "rho", "off"): REVERSE,
    ("k3", "reward", "auto", "on"): REVERSE - FORWARD,
    ("k3", "advantage", "auto", "off"): REVERSE - FORWARD,
    ("exact", "reward", "auto", "on"): 0 * PI,
}


@pytest.mark.parametrize("choice", BY_HAND, ids="-".join)
def test_gradients_are_those_of_the_formulas(choice: tuple[str, str, str, str]) -> None:
    torch.testing.assert_close(kl_gradient(pairing(*choice)[0], PI), BY_HAND[choice], atol=1e-12, rtol=1e-9)


def test_k3_in_the_reward_points_away_far_from_the_reference() -> None:
    kl, along = (PI * U).sum(0), (kl_gradient(pairing("k3", "reward", "auto", "on")[0], PI) * REVERSE).sum(0)
    assert bool((along[kl > 0.54] < 0).all())
    assert bool((along[kl > 0.54] < 0).any())


def test_the_gradient_of_the_reward_and_the_optimum() -> None:
    torch.testing.assert_close(reward_gradient(PI), -PI * (R - (PI * R).sum(0)), atol=1e-12, rtol=1e-9)
    a, b, c = REFERENCE
    odds = a * math.exp(2.0)
    assert optimum(0.5).tolist() == pytest.approx([odds / (odds + b + c), b / (odds + b + c), c / (odds + b + c)])
    assert optimum(0.0).tolist() == [1.0, 0.0, 0.0]


def test_what_is_refused_is_what_keel_refuses() -> None:
    refused = {choice for choice in choices() if pairing(*choice)[1]}
    assert ("k1", "loss", "plain", "on") in refused
    assert ("k3", "reward", "auto", "off") in refused
    assert not any(choice[2] == "auto" and choice[1] == "loss" for choice in refused)


@pytest.fixture(scope="module")
def script() -> str:
    return simplex_script()


def ends(data: dict[str, Any], *choice: str) -> list[list[float]]:
    """Where descent ends, by β, as (A, B)."""
    return [path[-2:] for path in data["fields"][data["pairings"]["|".join(choice)]["field"]]["paths"]]


@pytest.mark.slow
def test_descents_end_where_the_page_says(script: str) -> None:
    assert len(script) < 64_000
    name, _, text = script.partition(" = ")
    assert name == "window.simplexData"
    data = json.loads(text)
    assert set(data["pairings"]) == {"|".join(choice) for choice in choices()}
    for sampling in ("on", "off"):
        for end, best in zip(ends(data, "k3", "loss", "auto", sampling), data["optimum"], strict=True):
            assert end == pytest.approx(best[:2], abs=5e-3)
        assert all(end[0] > 0.99 for end in ends(data, "k3", "reward", "auto", sampling))
        assert all(end[0] > 0.99 for end in ends(data, "exact", "reward", "auto", sampling))
    assert all(end[0] > 0.99 for end in ends(data, "k1", "loss", "plain", "on"))
    assert ends(data, "k1", "loss", "plain", "off")[-1] == pytest.approx([0.0, 1.0], abs=0.01)
    half, fifth = BETAS.index(0.5), BETAS.index(0.2)
    for wrong in (("k3", "loss", "plain", "on"), ("k2", "loss", "plain", "off")):
        assert data["optimum"][fifth][0] - ends(data, *wrong)[fifth][0] > 0.1
    stalled = ends(data, "abs", "loss", "plain", "on")
    assert all(end == pytest.approx([0.2, 0.5], abs=0.01) for end in stalled[half + 1 :])
    assert all(end[0] > 0.99 for end in stalled[:half])


PAGE = """<!doctype html><meta charset="utf-8"><script>window.failed = []; onerror = (m) => failed.push(m)</script>
<link rel="stylesheet" href="site.css"><body data-md-color-scheme="{scheme}"><div id="simplex" class="simplex"></div>
<script src="simplex-data.js"></script><script src="simplex.js"></script>"""
SELECTS = "document.querySelectorAll('#simplex select')"
WORDS = "[...document.querySelectorAll('#simplex .words p')].map((p) => p.textContent)"


@needs_chromium
@pytest.mark.slow
def test_the_page_is_used_by_keyboard_and_loads_nothing_else(tmp_path: Path, script: str) -> None:
    data = json.loads(script.partition(" = ")[2])
    (tmp_path / "simplex-data.js").write_text(script)
    for name in ("simplex.js", "site.css"):
        (tmp_path / name).symlink_to(ROOT / "docs" / name)
    for scheme in ("default", "slate"):
        (tmp_path / f"{scheme}.html").write_text(PAGE.format(scheme=scheme))
    with tab(tmp_path / "profile") as page:
        colours = set()
        for scheme, width in (("slate", 400), ("default", 1400)):
            page.open(f"file://{tmp_path}/{scheme}.html", width=width)
            assert page.run("document.documentElement.scrollWidth") <= width
            colours.add(page.run("getComputedStyle(document.querySelector('#simplex path.away')).stroke"))
        assert len(colours) == 2
        words = page.run(WORDS)
        assert "k3 in the reward, on-policy" in words[0]
        assert "Keel refuses this pairing" in words[0]
        assert "(1.00, 0.00, 0.00), reward 1.00" in words[2]
        assert f"The optimum is ({', '.join(f'{p:.2f}' for p in data['optimum'][BETAS.index(0.5)])})" in words[2]

        page.press("Tab", "ArrowUp", "ArrowUp")  # the estimator: k3, k2, k1
        assert "k1 in the reward" in page.run(WORDS)[0]
        assert "That is the optimum" in page.run(WORDS)[2]
        page.press("Tab", "ArrowUp")  # the placement; now the gradient's form can be chosen
        page.press("Tab", "ArrowDown")
        assert page.run(WORDS)[0].startswith(
            "k1 in the loss, gradient plain, on-policy. Expected gradient of the KL term: zero"
        )
        page.press("Tab", "ArrowDown")  # samples
        assert "off-policy" in page.run(WORDS)[0]
        assert page.run("document.querySelectorAll('#simplex path.sampler').length") == 1
        page.press("Tab", "End")  # β
        assert page.run(WORDS)[2].startswith(f"At β = {BETAS[-1]:g}, ")
        page.press("Tab", "ArrowDown")  # the KL term alone: β does not matter
        drawn = page.run("[...document.querySelectorAll('#simplex svg .away')].map((arrow) => arrow.outerHTML)")
        assert drawn
        assert f"{len(drawn)} more than 90° off" in page.run(WORDS)[1]
        page.run(f"{SELECTS}[3].value = 'on'; {SELECTS}[3].dispatchEvent(new Event('change'))")
        assert page.run("document.querySelectorAll('#simplex circle.none').length") == len(data["policies"]) // 2
        page.press("Tab")
        assert page.run("document.activeElement.tagName") == "svg"
        before = page.run(WORDS)[3]
        page.press("ArrowUp")
        higher = page.run(WORDS)[3]
        assert float(higher.split("(")[1].split(",")[0]) > float(before.split("(")[1].split(",")[0])
        page.press("ArrowDown")
        assert page.run(WORDS)[3] == before
        page.press(*["ArrowLeft"] * 20)  # as far as there are policies
        assert page.run("document.querySelector('#simplex .cursor').getAttribute('cx') > 30")

        box = page.run(
            "(({x, y, width}) => [x, y, width])(document.querySelector('#simplex svg').getBoundingClientRect())"
        )
        page.click(box[0] + box[2] / 2, box[1] + 80 * box[2] / 520)  # near the corner that pays
        assert page.run(WORDS)[3].startswith("Policy (0.87, 0.07, 0.07)")

        said = page.run(
            f"(() => {{ const boxes = {SELECTS}, found = {{}}; for (const key in simplexData.pairings) {{"
            "const values = key.split('|'); values.forEach((value, n) => { boxes[n].value = value });"
            f"boxes[0].dispatchEvent(new Event('change')); found[key] = {WORDS}[0]; }} return found }})()"
        )
        for key, shown in said.items():
            assert data["pairings"][key]["means"] in shown
            assert ("Keel refuses" in shown) == data["pairings"][key]["refused"]
        assert page.run("failed") == []
        loaded = page.run("performance.getEntriesByType('resource').map((entry) => entry.name)")
        assert {name.rpartition("/")[2] for name in loaded} <= {"simplex-data.js", "simplex.js", "site.css"}
        assert all(name.startswith("file:") for name in loaded)
