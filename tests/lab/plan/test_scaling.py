"""The model of cost: figures by hand, and the page's table as the command prints it."""

from pathlib import Path

import pytest

from keel.lab.plan.hardware import KNOWN
from keel.lab.plan.scaling import Links, Work, best, cost, dense, main, models
from keel.run.footprint import Layout

PAGE = Path(__file__).resolve().parents[3] / "docs" / "scaling.md"


def test_the_pages_table_is_the_commands(capsys):
    main([])
    assert capsys.readouterr().out.strip() in PAGE.read_text()


def test_the_shapes_have_their_names_sizes():
    sizes = {model.name: (round(model.parameters / 1e9, 1), round(model.active / 1e9, 1)) for model in models()}
    assert sizes == {"7B": (7.6, 7.1), "70B": (70.6, 69.5), "MoE 30B, 3B active": (30.5, 3.0)}


SMALL = {"vocab_size": 100, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}


def test_a_step_by_hand():
    """Two devices that hold everything: operations over speed, gradients over the link."""
    model = dense("small", **SMALL, num_attention_heads=4, num_key_value_heads=2)
    n = 2 * 100 * 64 + 64 + 2 * (64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 128 + 2 * 64)
    assert (model.parameters, model.active, model.queries, model.keys) == (n, n - 100 * 64, 64, 32)
    work, hardware = Work(prompts=4, group=2, prompt=8, completion=16, microbatch=64), KNOWN["h200"]
    one = cost(model, Layout(2), work, hardware, Links())
    assert work.scored == 4 * (8 + 2 * 16)
    forward = (2 * model.active + 2 * 2 * 64 * (8 + 16)) * work.scored / 2 / 480e12
    assert one.seconds["passes"] == pytest.approx(5 * forward)
    assert one.seconds["wire"] == pytest.approx(2 * 4 * n / 2 / 360e9 + 2 * 5e-6)
    row = 2 * 2 * 2 * 32 * (16 + 8 / 2)
    decoding = 16 * max((2 * n + 4 * row / 2) / 3.8e12, 2 * model.active * 4 / 480e12)
    assert one.seconds["rollout"] == pytest.approx(decoding + 2 * model.active * 2 * 8 / 480e12)
    assert one.seconds["sync"] == 0.0
    assert (one.rows, one.fits) == (4, True)


def test_the_shortest_step_that_fits_is_taken():
    model = dense("small", **SMALL, num_attention_heads=4, num_key_value_heads=2)
    work, links = Work(prompts=64, group=2, prompt=8, completion=16, microbatch=64), Links()
    assert best(model, 16, work, KNOWN["h200"], links).layout == Layout(16)
