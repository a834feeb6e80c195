"""Grids: what is read from words and files, and everything that is refused before a run starts."""

import pytest
import yaml

from keel.base.errors import KeelError
from keel.cli import main
from keel.lab.studies import parse_axis, read_study
from trainer.small import BASE


def study(**changes):
    return {"config": BASE, "grid": {"kl.beta": [0, 0.01]}, "seeds": 2, **changes}


def test_values_are_yaml():
    axis = parse_axis("kl.beta=0, 1e-3,0.01")
    assert [value.settings for value in axis.values] == [{"kl.beta": 0}, {"kl.beta": 0.001}, {"kl.beta": 0.01}]
    assert [value.label for value in axis.values] == ["beta=0", "beta=0.001", "beta=0.01"]


def test_a_section_is_one_axis_of_several_options():
    parsed = read_study(BASE, grid=["kl={estimator: k1, placement: reward},{estimator: k3}", "kl.level=token,sequence"])
    assert len(parsed.points) == 4
    assert [p.config.kl.placement for p in parsed.points] == ["reward", "reward", "loss", "loss"]
    assert parsed.points[0].label == "estimator=k1,placement=reward level=token"


def test_the_product_then_the_listed_points():
    parsed = read_study(
        study(
            grid={
                "penalty": {
                    "k1 in reward": {"kl.estimator": "k1", "kl.placement": "reward"},
                    "k2": {"kl.estimator": "k2"},
                },
                "kl.beta": [0.1, 0.2],
            },
            points=[{"name": "none", "kl.beta": 0}],
            baseline="none",
        )
    )
    assert [point.label for point in parsed.points] == [
        "k1 in reward beta=0.1",
        "k1 in reward beta=0.2",
        "k2 beta=0.1",
        "k2 beta=0.2",
        "none",
    ]
    assert parsed.baseline == "none"
    assert parsed.points[-1].values == {"penalty": "", "kl.beta": "0"}
    assert parsed.points[2].values == {"penalty": "k2", "kl.beta": "0.1"}


def test_a_value_that_sets_more_is_not_the_one_that_sets_less():
    """`k1` sets a part of what `k1 in reward` sets; every point of the product has its own value's label."""
    penalty = {"k1": {"kl.estimator": "k1"}, "k1 in reward": {"kl.estimator": "k1", "kl.placement": "reward"}}
    parsed = read_study(study(grid={"penalty": penalty, "kl.beta": [0.1, 0.2]}))
    assert [point.values["penalty"] for point in parsed.points] == ["k1", "k1", "k1 in reward", "k1 in reward"]
    shipped = read_study("estimators")
    assert len({tuple(point.values.values()) for point in shipped.points}) == len(shipped.points)


def test_seeds_and_baseline():
    assert read_study(study()).seeds == (0, 1)
    assert read_study(study(), ["run.seed=7"]).seeds == (7, 8)
    assert read_study(study(seeds=[4, 2])).seeds == (4, 2)
    assert read_study(study(), seeds="5,3").seeds == (5, 3)
    assert read_study(study(), seeds="1").seeds == (0,)
    assert read_study(study()).baseline == "beta=0"
    assert read_study(study(baseline={"kl.beta": 0.01})).baseline == "beta=0.01"
    assert read_study(study(), baseline="kl.beta=0.01").baseline == "beta=0.01"


def test_a_wrong_pairing_needs_leave():
    wrong = {"k3": {"kl.estimator": "k3", "kl.placement": "reward"}}
    with pytest.raises(KeelError, match=r"the point k3 beta=0.1: .*allow_biased"):
        read_study(study(grid={"penalty": wrong, "kl.beta": [0.1]}))
    wrong["k3"]["kl.allow_biased"] = True
    assert len(read_study(study(grid={"penalty": wrong, "kl.beta": [0.1]})).points) == 1


def test_the_command_line_overrides_the_file():
    read = read_study(study(set={"run.max_steps": 9}), ["run.max_steps=4"])
    assert {point.config.run.max_steps for point in read.points} == {4}


@pytest.mark.parametrize(
    ("changes", "overrides", "message"),
    [
        ({"grid": {"kl.betta": [0, 1]}}, [], "unknown option kl.betta in the grid: did you mean kl.beta"),
        ({"grid": {"kl.beta": [0, "high"]}}, [], "the point beta=high: kl.beta is the text high"),
        ({"grid": {"kl.beta": [-1]}}, [], "the point beta=-1: kl.beta is -1: it must be at least 0"),
        ({"grid": {"kl.beta": [0.1, 0.1]}}, [], "beta=0.1 is listed twice"),
        ({"points": [{"kl.beta": 0.0, "name": "zero"}]}, [], "zero equals"),
        ({"grid": {"kl.beta": []}}, [], "needs a list of values"),
        ({"grid": {"kl.beta": 3}}, [], "needs a list of values"),
        ({"grid": {"run.seed": [1, 2]}}, [], "run.seed cannot be in the grid: give the seeds with --seeds"),
        ({"grid": {"run.name": ["a"]}}, [], "run.name cannot be in the grid"),
        ({"points": [{"run.seed": 3}]}, [], "run.seed cannot be in a point"),
        (
            {"grid": {"a": {"x": {"kl.beta": 1}}, "kl.beta": [0]}},
            [],
            "kl.beta is in the grid twice, by the axes a and kl.beta",
        ),
        ({}, ["kl.beta=0.1"], "kl.beta is in the grid and among the options for all points"),
        ({"set": {"kl": {"beta": 1}}}, [], "kl.beta is in the grid and among the options for all points"),
        ({}, ["run.dir=x"], "run.dir cannot be set in a study"),
        ({"grid": {"penalty": {"a": 3}}}, [], "the axis penalty must map labels to options"),
        ({"seeds": 0}, [], "seeds is 0"),
        ({"seeds": [1, 1]}, [], "seeds is [1, 1]"),
        ({"seeds": "many"}, [], "seeds is 'many'"),
        ({"baseline": {"kl.beta": 7}}, [], " matches no point"),
        ({"baseline": "beta=7"}, [], " matches no point"),
        ({"grid": {}, "points": []}, [], "the study has no grid"),
        ({"points": [3]}, [], "list of mappings such as {kl.beta: 0}"),
        ({"metric": "loss"}, [], "unknown metric 'loss'"),
        ({"drift": {"prompts": 0}}, [], "drift.prompts of a study is 0"),
        ({"drift": {"tokens": 1}}, [], "unknown key 'tokens'"),
        ({"target": {"kl": -1}}, [], "target.kl of a study is -1"),
        ({"text": "yes"}, [], "text of a study is 'yes'"),
        ({"gird": {}}, [], "unknown key of a study 'gird': did you mean 'grid'"),
        ({"config": 3}, [], "config of a study is 3"),
        ({"config": "nosuch"}, [], "no configuration at nosuch"),
    ],
)
def test_refused(changes, overrides, message):
    with pytest.raises(KeelError) as error:
        read_study(study(**changes), overrides)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("grid", "overrides", "message"),
    [
        ("task.digits=4,abc", [], "the point digits=abc: "),
        ("task.skill=sort,nonsense", [], "the point skill=nonsense: "),
        (
            "warmstart.task=[arithmetic],[{name: arithmetic, skill: nonsense}]",
            [],
            "the point task=[{name: arithmetic, skill: nonsense}]: ",
        ),
        (
            "kl={estimator: k1},{estimator: exact_reverse, placement: reward}",
            [],
            "kl.estimator=exact_reverse in the reward (level=sequence",
        ),
        ("kl.beta=0,1", ["kl_beta=0.5"], "kl.beta is in the grid and among the options for all points"),
        ("kl_beta=0,1", ["kl.beta=0.5"], "kl.beta is in the grid and among the options for all points"),
        ("kl.beta=0,1", ["beta=0.5"], "kl.beta is in the grid and among the options for all points"),
    ],
)
def test_refused_before_anything_runs(grid, overrides, message):
    with pytest.raises(KeelError) as error:
        read_study("default", overrides, grid=[grid])
    assert message in str(error.value)


def test_an_option_by_another_trainers_name_is_an_axis():
    parsed = read_study("default", grid=["kl_beta=0,0.25"])
    assert [point.config.kl.beta for point in parsed.points] == [0, 0.25]
    with pytest.raises(KeelError, match="is in the grid twice"):
        read_study("default", grid=["kl_beta=0,1", "kl.beta=0,1"])


def test_an_unknown_place_is_refused_before_there_is_a_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(BASE))
    assert main(["ablate", "c.yaml", "--grid", "kl.beta=0,1", "--on", "mars"]) == 2
    assert capsys.readouterr().err == "keel: error: --on mars is not known: use local, ray or ray:ADDRESS\n"
    assert [path.name for path in tmp_path.iterdir()] == ["c.yaml"]


def test_an_axis_that_cannot_be_read():
    for item in ("kl.beta", "kl.beta=", "=1", "kl.beta=[1"):
        with pytest.raises(KeelError):
            parse_axis(item)


def test_refused_on_the_command_line_before_anything_is_written(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(BASE))
    assert main(["ablate", "c.yaml", "--grid", "kl.betta=0,1"]) == 2
    stderr = capsys.readouterr().err
    assert stderr.startswith("keel: error: unknown option kl.betta")
    assert stderr.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["c.yaml"]


def test_list_shows_the_points(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s.yaml").write_text(yaml.safe_dump(study()))
    assert main(["ablate", "s.yaml", "--list"]) == 0
    assert capsys.readouterr().out.splitlines() == ["beta=0  (baseline)", "beta=0.01", "2 points × 2 seeds"]
    assert not (tmp_path / "runs").exists()


SHIPPED = ["beta", "estimators", "estimators_exact", "controllers", "references", "losses", "smollm2"]


@pytest.mark.parametrize("name", SHIPPED)
def test_the_studies_that_come_with_keel_are_whole(name):
    parsed = read_study(name)
    assert parsed.name == name
    assert len(parsed.points) >= 4
    assert len(parsed.seeds) >= 2


def test_the_two_studies_of_estimators_can_be_read_side_by_side():
    """The same seeds, the same configuration and β, the same point without a penalty; no other point in common."""
    first, second = read_study("estimators"), read_study("estimators_exact")
    assert (first.config, first.seeds, first.baseline) == (second.config, second.seeds, second.baseline)
    assert first.measure == second.measure
    shared = [point.label for point in second.points if point.config in [other.config for other in first.points]]
    assert shared == ["no penalty"]
    behind = {(p.config.kl.estimator, p.config.kl.placement, p.config.kl.level) for p in second.points} - {
        (p.config.kl.estimator, p.config.kl.placement, p.config.kl.level) for p in first.points
    }
    assert behind == {("exact", "reward", "token"), ("exact", "advantage", "token"), ("exact", "advantage", "sequence")}
