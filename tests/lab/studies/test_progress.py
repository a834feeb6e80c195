"""What a person sees of a running study, from files as its processes write them."""

import json

import pytest

from keel.lab.studies import read_study
from keel.lab.studies.progress import LINE_S, Progress, last_step, supervised_lines
from keel.lab.studies.results import JobOutcome, jobs
from lab.studies.small_study import STUDY


@pytest.fixture
def planned(tmp_path):
    return jobs(tmp_path, read_study(STUDY))


def write(folder, name, *steps):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text("".join(json.dumps({"step": step}) + "\n" for step in steps))


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
    """A warm start of 3 steps, then two runs of 6 steps: the first is new, the second resumes at its fourth step."""
    clock, lines = Clock(), []
    first, second = planned
    warm, started = tmp_path / "starts" / "abc", tmp_path / "abc.started"
    with Progress(planned, {}, lines.append, clock=clock) as progress:

        def look(seconds):
            clock.now += seconds
            progress.refresh()
            return progress.phases(), progress.time_left()

        progress.watch_warmstart(warm, first, started)
        assert look(5) == ([], "")  # submitted, not started
        started.touch()
        assert look(2) == (["seed=0: warm start, starting"], "")
        write(warm.parent, supervised_lines(warm).name, 0, 1)
        assert look(10) == (["seed=0: warm start, step 1/3"], "")
        progress.finish_warmstart(warm)
        assert progress.fraction() == 0
        for job in planned:
            progress.watch_job(job, job.folder / "log.started")
        write(first.folder, "log.started")
        assert look(10) == (["beta=0 seed=0: starting"], "")
        write(first.folder, "metrics.jsonl", 1, 2)
        assert look(10) == (["beta=0 seed=0: step 2/6"], "about 2 min left")  # 2 of 12 steps in 20 s
        assert progress.fraction() == pytest.approx(2 / 12)
        write(second.folder, "log.started")
        write(second.folder, "metrics.jsonl", 1, 2, 3, 4)
        assert look(10)[1] == "about 2 min left"  # 2 of 8 steps in 30 s
        assert progress.fraction() == pytest.approx(6 / 12)
        clock.now += LINE_S
        progress.refresh()
        phases = "beta=0 seed=0: step 2/6; beta=0.5 seed=0: step 4/6"
        assert lines[-1] == f"0/2 runs; {phases}; {progress.time_left()}"
        write(first.folder, "summary.json", 6)
        assert look(10)[0][0] == "beta=0 seed=0: measuring the drift"
        progress.finish(first.label, JobOutcome("done"))
        assert lines[-1] == "1/2 beta=0 seed=0: done; about 33 s left"  # 6 of 8 steps in 100 s
        progress.finish(second.label, JobOutcome("failed", "no luck"))
        assert lines[-1] == "2/2 beta=0.5 seed=0: failed (no luck)"
        assert progress.fraction() == 1
