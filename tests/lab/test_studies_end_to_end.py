"""Studies end to end on a very small model: killed and started again, warm starts shared, guards, failures."""

import csv
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

import keel
import processes
from keel.base.errors import KeelError
from keel.config import load_config
from keel.lab.studies import point, read_study
from keel.lab.studies.report import write_study
from keel.lab.studies.results import jobs, open_folder, read_result
from keel.lab.studies.run import CONFIG, LocalPool, Process, open_pool, run_study
from keel.lab.studies.table import points_csv
from lab.studies.small_study import STUDY

pytestmark = pytest.mark.processes


TESTS = Path(__file__).parents[1]
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join(
        [str(TESTS), str(TESTS.parent / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    ),
    "OMP_NUM_THREADS": "1",
}
TIMED = ("time/", "speed/", "memory/", "wall")


@pytest.fixture(scope="module", autouse=True)
def children_find_the_tests():
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = ENVIRONMENT["PYTHONPATH"]
    yield
    if before is None:
        del os.environ["PYTHONPATH"]
    else:
        os.environ["PYTHONPATH"] = before


def finish(study, folder, parallel=2):
    outcomes = run_study(study, folder, parallel=parallel, say=lambda line: None)
    write_study(study, folder, outcomes)
    return outcomes


def run_forked(process, started):
    """A run of a study without the seconds of its imports."""
    config, *arguments = process.arguments
    process.started.parent.mkdir(parents=True, exist_ok=True)
    process.started.touch()
    return processes.run(point.main, arguments, env={**os.environ, CONFIG: config}).returncode


@pytest.fixture(scope="module")
def finished_study(tmp_path_factory):
    """A study left alone: two points, one seed."""
    folder = tmp_path_factory.mktemp("finished") / "study"
    study = read_study(STUDY)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("keel.lab.studies.run.run_process", run_forked)
        return study, folder, finish(study, folder)


def rows(folder):
    with (folder / "points.csv").open() as file:
        return list(csv.DictReader(file))


def test_every_run_is_in_the_table(finished_study):
    _, folder, outcomes = finished_study
    assert {outcome.state for outcome in outcomes.values()} == {"done"}
    table = rows(folder)
    assert [(row["point"], row["seed"]) for row in table] == [("beta=0", "0"), ("beta=0.5", "0")]
    for row in table:
        assert float(row["kl_policy_ref"]) > 0
        assert float(row["kl_ref_policy"]) > 0
        assert float(row["digits:kl_policy_ref"]) > 0
        assert 0 < float(row["reward"]) < 1
    for name in ("table.csv", "table.md", "report.html", "axis.png", "frontier.png", "curves.png", "forgetting.png"):
        assert (folder / name).stat().st_size > 100
    assert "http" not in (folder / "report.html").read_text().replace("http-equiv", "")


def test_the_figures_are_those_of_the_run_and_of_its_drift(finished_study):
    _, folder, _ = finished_study
    row = rows(folder)[1]
    run = folder / "points" / "01-beta=0.5-seed0"
    rewards = [json.loads(line)["reward/mean"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert float(row["reward"]) == pytest.approx(sum(rewards) / len(rewards))  # fewer than ten steps
    drift = json.loads((run / "drift.json").read_text())["tasks"]
    assert float(row["kl_k3"]) == pytest.approx(drift["letters"]["policy_ref"]["per_token"]["k3"]["mean"])
    assert float(row["kl_old_ref_policy"]) == pytest.approx(drift["digits"]["ref_policy"]["per_token"]["exact"]["mean"])
    assert float(row["wall_s"]) == json.loads((run / "summary.json").read_text())["wall_s"]


def test_what_the_band_was_held_against_is_named(finished_study):
    """The tiny study measures k3 only; the band is around its own figures, so they are inside."""
    study, folder, outcomes = finished_study
    job = jobs(folder, study)[1]
    line = json.loads((job.folder / "metrics.jsonl").read_text().splitlines()[-1])
    for unit, name in (("per_token", "k3"), ("per_sequence", "sequence")):
        measure = replace(study.measure, target=line[f"kl/policy_ref/{name}/mean"], target_unit=unit)
        row = read_result(job, outcomes[job.label], measure)
        assert row.band_by == name
        assert row.figures["share_in_band"] > 0
        assert f",{name},{row.wall_s:.10g}" in points_csv([row])
    assert row.figures["kl_reference_k3"] == pytest.approx(line["kl/policy_ref/k3/mean"])
    assert row.figures["kl_reference_exact"] is None


def test_a_point_is_the_run_that_keel_train_makes(finished_study, tmp_path):
    """The shared warm start changes nothing: every figure of every step is the same without it."""
    _, folder, _ = finished_study
    run = folder / "points" / "01-beta=0.5-seed0"
    alone = keel.train(load_config(run / "config.yaml"), overrides=[f"run.dir={tmp_path}"]).directory

    def lines(path):
        recorded = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
        return [{k: v for k, v in line.items() if not k.startswith(TIMED)} for line in recorded]

    assert lines(alone) == lines(run)
    starts = list((folder / "starts").rglob("model.safetensors"))
    assert len(starts) == 1  # for two points
    assert {p.stat().st_ino for p in starts} == {
        p.stat().st_ino for p in (folder / "points").rglob("warmstart/*/model.safetensors")
    }


def test_finished_runs_are_not_run_again(finished_study):
    study, folder, _ = finished_study
    before = {path: path.stat().st_mtime_ns for path in (folder / "points").rglob("*") if path.is_file()}
    table = (folder / "table.csv").read_bytes()
    messages = []
    run_study(study, folder, parallel=2, say=messages.append)
    assert messages == ["2 of 2 runs are finished already"]
    assert {path: path.stat().st_mtime_ns for path in (folder / "points").rglob("*") if path.is_file()} == before
    assert (folder / "table.csv").read_bytes() == table


def test_killed_half_way_and_started_again(finished_study, tmp_path, monkeypatch):
    """SIGKILL with one run finished and one in training, then the same study again: the same bytes."""
    study, folder, _ = finished_study
    shutil.copytree(folder, tmp_path / "out")
    run = tmp_path / "out" / "points" / "01-beta=0.5-seed0"
    shutil.rmtree(run)
    (tmp_path / "out" / "table.csv").unlink()
    (tmp_path / "s.yaml").write_text(yaml.safe_dump(STUDY))
    command = [sys.executable, "-m", "keel.cli", "ablate", "s.yaml", "--out", "out", "--jobs", "2"]
    process = subprocess.Popen(command, cwd=tmp_path, env=ENVIRONMENT, stderr=subprocess.DEVNULL)
    metrics = run / "metrics.jsonl"
    limit = time.monotonic() + 600
    while not (metrics.exists() and metrics.read_bytes().count(b"\n") >= 2) and time.monotonic() < limit:
        assert process.poll() is None
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (run / "outcome.json").exists()
    assert not (tmp_path / "out" / "table.csv").exists()
    monkeypatch.setattr("keel.lab.studies.run.run_process", run_forked)
    finish(study, tmp_path / "out")
    assert (tmp_path / "out" / "table.csv").read_bytes() == (folder / "table.csv").read_bytes()


def test_on_ray_it_is_the_same_table(finished_study, tmp_path, monkeypatch):
    """On a cluster that is started here."""
    study, folder, _ = finished_study
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_worker_niceness", "0")  # at Ray's 15 its processes hardly run beside other tests
    outcomes = run_study(study, tmp_path, parallel=2, on="ray", say=lambda line: None)
    assert {outcome.state for outcome in outcomes.values()} == {"done"}, outcomes
    write_study(study, tmp_path, outcomes)
    assert (tmp_path / "table.csv").read_bytes() == (folder / "table.csv").read_bytes()


def test_where_else():
    with pytest.raises(KeelError, match="--on mars is not known: use local, ray or ray:ADDRESS"), open_pool("mars", 1):
        pass


def processes_of(folder):
    """Ids of processes whose command line names the folder."""
    pids = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if str(folder).encode() in entry.read_bytes():
                pids.append(int(entry.parent.name))
        except OSError:  # it has just ended
            pass
    return pids


def test_terminated_in_the_background_it_leaves_no_run_behind(tmp_path):
    """SIGINT is ignored, as a shell has it for what runs in the background; the warm start would take minutes."""
    long = {**STUDY["config"], "warmstart": {**STUDY["config"]["warmstart"], "steps": 100_000}}
    (tmp_path / "s.yaml").write_text(yaml.safe_dump({**STUDY, "config": long}))
    process = subprocess.Popen(
        [sys.executable, "-m", "keel.cli", "ablate", "s.yaml", "--out", "out"],
        cwd=tmp_path, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
    )  # fmt: skip
    try:
        limit = time.monotonic() + 120
        while not processes_of(tmp_path) and time.monotonic() < limit:
            time.sleep(0.05)
        time.sleep(2)
        running = processes_of(tmp_path)
        assert len(running) == 1
        process.terminate()
        _, stderr = process.communicate(timeout=25)  # less than it takes to be killed
        assert process.returncode == 130
        assert "keel: interrupted; repeat the command" in stderr
        assert processes_of(tmp_path) == []
    finally:
        process.kill()


DEAF = "import signal, time; signal.signal(15, signal.SIG_IGN); print(flush=True); time.sleep(5)"


@pytest.mark.parametrize("names", [("early",), ("early", "late"), ("late",)])
def test_a_run_that_starts_while_its_study_ends_is_killed_too(names, tmp_path, monkeypatch):
    """None of them hears that it is asked to end; the late one becomes known when the others were asked."""
    ready, stopping = threading.Barrier(len(names) + 1), threading.Event()

    def starts(process, started):
        with subprocess.Popen([sys.executable, "-c", DEAF], stdout=subprocess.PIPE) as running:
            running.stdout.readline()
            if process.log.name == "late":
                ready.wait(20)
                stopping.wait(20)
                time.sleep(0.1)
                started(running)
            else:
                started(running)
                ready.wait(20)
            return running.wait()

    monkeypatch.setattr("keel.lab.studies.run.run_process", starts)
    monkeypatch.setattr("keel.lab.studies.run.GRACE_S", 0.3)
    pool = LocalPool(len(names))
    futures = [pool.submit(Process((), tmp_path / name, 1)) for name in names]
    ready.wait(20)
    stopping.set()
    pool.interrupt()
    assert [future.result(0) for future in futures] == [-signal.SIGKILL] * len(names)


def test_a_folder_that_holds_something_else_is_refused(finished_study, tmp_path):
    _, folder, _ = finished_study
    other = read_study({**STUDY, "grid": {"kl.beta": [0, 0.25]}})
    with pytest.raises(KeelError, match=r"contains another study \(its points are beta=0, beta=0.5\)"):
        run_study(other, folder)
    with pytest.raises(KeelError, match="its seeds are 0"):
        run_study(read_study(STUDY, seeds="3"), folder)
    with pytest.raises(KeelError, match="its configuration differs"):
        run_study(read_study(STUDY, ["optim.learning_rate=0.5"]), folder)
    (tmp_path / "letter.txt").write_text("dear")
    with pytest.raises(KeelError, match="is not empty and is not a study"):
        run_study(other, tmp_path)
    with open_folder(folder, read_study(STUDY), 1), pytest.raises(KeelError, match="already open"):
        run_study(read_study(STUDY), folder)


def test_a_guard_stops_one_point_and_another_fails(tmp_path, monkeypatch):
    """A budget that is spent at once, and a reward that breaks: both are in the table, the rest goes on."""
    monkeypatch.setattr("keel.lab.studies.run.run_process", run_forked)
    grid = {
        "case": {
            "fine": {"kl.beta": 0.1},
            "over budget": {"kl.budget": 1.0e-9},
            "broken": {
                "task": {"name": "trainer.small:letters"},
                "rewards": [{"name": "lab.studies.small_study:broken"}],
            },
        }
    }
    study = read_study({**STUDY, "grid": grid, "seeds": 1})
    outcomes = finish(study, tmp_path / "study", parallel=1)
    assert outcomes["fine seed=0"].state == "done"
    assert outcomes["over budget seed=0"].state == "stopped"
    assert "over kl.budget.max" in outcomes["over budget seed=0"].reason
    assert outcomes["broken seed=0"].state == "failed"
    assert "it broke" in outcomes["broken seed=0"].reason
    by_point = {row["point"]: row for row in rows(tmp_path / "study")}
    assert by_point["over budget"]["state"] == "stopped"
    assert float(by_point["over budget"]["steps"]) < 6
    assert float(by_point["over budget"]["kl_policy_ref"]) == 0  # the guard went back to the start
    assert by_point["over budget"]["accuracy_after"] == by_point["over budget"]["accuracy_before"] != ""
    assert "1 of 3 runs failed: broken." in (tmp_path / "study" / "table.md").read_text()
    assert "1 of 3 runs stopped by a guard: over budget." in (tmp_path / "study" / "table.md").read_text()
    shutil.rmtree(tmp_path / "study")
