"""What a person sees of a running study, from files as its processes write them."""

import json

import pytest

from keel.lab.studies import read_study
from keel.lab.studies.folder import Outcome, jobs
from keel.lab.studies.position import job_phase, job_pieces, job_plan, last_step, supervised_lines
from keel.lab.studies.progress import LINE_S, Progress
from lab.studies.small_study import STUDY


@pytest.fixture
def planned(tmp_path):
    return jobs(tmp_path, read_study(STUDY, ["eval.every=4"]))


def write(folder, name, *steps):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text("".join(json.dumps({"step": step}) + "\n" for step in steps))


def test_every_phase_of_a_run(planned):
    """start, evaluation, 4 steps, evaluation, 2 steps, evaluation, drift: 11 pieces."""
    job = planned[0]
    plan = job_plan(job)
    assert len(plan.pieces) == 11

    def seen():
        done = job_pieces(job, plan)
        return done, job_phase(plan, done)

    assert seen() == (0, "starting")
    write(job.folder, "config.yaml")
    assert seen() == (1, "evaluation at step 0/6")
    write(job.folder, "eval.jsonl", 0, 0)
    assert seen() == (2, "step 1/6")
    write(job.folder, "metrics.jsonl", 1, 2, 3)
    assert seen() == (5, "step 4/6")
    write(job.folder, "metrics.jsonl", 1, 2, 3, 4)
    assert seen() == (6, "evaluation at step 4/6")
    write(job.folder, "eval.jsonl", 0, 0, 4, 4)
    assert seen() == (7, "step 5/6")
    write(job.folder, "metrics.jsonl", *range(1, 7))
    assert seen() == (9, "evaluation at step 6/6")
    write(job.folder, "eval.jsonl", 0, 0, 4, 4, 6, 6)
    write(job.folder, "summary.json", 6)
    assert seen() == (10, "measuring the drift")
    write(job.folder, "outcome.json", 6)
    assert seen()[0] == 11


def test_a_torn_line_is_no_step(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert last_step(path) is None
    path.write_text('{"step": 7}\n{"step": 8')
    assert last_step(path) == 7
    path.write_text("{}\n")
    assert last_step(path) is None


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def test_a_study_as_it_is_watched(planned, tmp_path):
    """A warm start of 3 steps in 30 s, then two runs of 100 s, one after another: 10 s each step and evaluation."""
    clock, lines = Clock(), []
    first, second = planned
    warm, started = tmp_path / "starts" / "abc", tmp_path / "abc.started"
    with Progress(planned, {}, lines.append, workers=1, clock=clock) as progress:

        def look(seconds):
            clock.now += seconds
            progress.refresh()
            return progress.phases(), progress.time_left()

        progress.watch_warmstart(warm, first, started)
        assert look(5) == ([], "")  # submitted, not started
        started.touch()
        assert look(2) == (["seed=0: warm start, starting"], "")
        write(warm.parent, supervised_lines(warm).name, 0, 1)
        assert look(10) == (["seed=0: warm start, step 2/3"], "")
        assert 0 < progress.fraction() < 1 / 3
        progress.finish_warmstart(warm)
        assert progress.fraction() == pytest.approx(1 / 3)
        for job in planned:
            progress.watch_job(job, job.folder / "log.started")
        write(first.folder, "log.started")
        assert look(2) == (["beta=0 seed=0: starting"], "")
        write(first.folder, "config.yaml")
        look(10)
        write(first.folder, "eval.jsonl", 0)
        look(10)
        write(first.folder, "metrics.jsonl", 1)
        assert look(10) == (["beta=0 seed=0: step 2/6"], "")  # the first step is no measure of the others
        write(first.folder, "metrics.jsonl", 1, 2)
        phases, left = look(10)
        assert phases == ["beta=0 seed=0: step 3/6"]
        # 2 steps, evaluation, 2 steps, evaluation, the drift (as start and evaluation); the whole of the other run
        assert left == f"about {(6 * 10 + 20 + 10 + 9 * 10 + 20) / 60:.0f} min left"
        clock.now += LINE_S
        progress.refresh()
        assert lines[-1] == f"0/2 runs; beta=0 seed=0: step 3/6; {progress.time_left()}"
        progress.finish(first.label, Outcome("done"))
        assert lines[-1].startswith("1/2 beta=0 seed=0: done; about ")
        progress.finish(second.label, Outcome("failed", "no luck"))
        assert lines[-1] == "2/2 beta=0.5 seed=0: failed (no luck)"
        assert progress.fraction() == 1
