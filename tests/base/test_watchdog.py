"""Ranks end together: whoever failed first is named once, and nobody is left behind."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from datetime import timedelta

import pytest

from keel.base import watchdog
from keel.base.errors import KeelError
from keel.base.world import open_world
from ranks import run_ranks

pytestmark = pytest.mark.processes


RESUME = "keel train --resume runs/x"


def meet_twice() -> None:
    for _ in range(2):
        with open_world("cpu") as world:
            assert world.all_gather(world.rank) == [0, 1, 2]
    assert threading.active_count() == 1


def test_a_world_can_be_opened_and_left_again() -> None:
    assert [(ended.status, ended.err) for ended in run_ranks(meet_twice, size=3)] == [(0, "")] * 3


def fail_on(rank: int, how: str, hang: bool) -> None:
    """The others wait in a collective, or in something that no broken connection ends."""
    with open_world("cpu", resume=RESUME) as world:
        world.barrier()
        if world.rank == rank:
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise KeelError("the sandbox is gone: start it") if how == "refused" else ZeroDivisionError("oops")
        if hang:
            time.sleep(60)
        world.barrier()


@pytest.mark.parametrize(("rank", "hang"), [(0, False), (0, True), (1, True), (2, False)])
def test_an_error_on_one_rank_is_named_there_and_ends_the_others(rank: int, hang: bool) -> None:
    ended = run_ranks(fail_on, rank, "raised", hang, size=3)
    failed = ended.pop(rank)
    assert "ZeroDivisionError: oops" in failed.err
    assert f"rank {rank} of 3; the others exited; resume with: {RESUME}" in failed.err
    assert [(other.status, other.err) for other in ended] == [(1, "")] * 2


def test_a_refusal_gives_all_ranks_its_exit_status() -> None:
    ended = run_ranks(fail_on, 1, "refused", True)
    assert (ended[0].status, ended[0].err) == (2, "")
    assert "the sandbox is gone" in ended[1].err


@pytest.mark.parametrize(("rank", "hang"), [(0, False), (0, True), (1, True), (2, False)])
def test_a_killed_rank_is_named_once(rank: int, hang: bool) -> None:
    ended = run_ranks(fail_on, rank, "killed", hang, size=3)
    assert ended.pop(rank).status == -signal.SIGKILL
    assert {other.status for other in ended} == {watchdog.KILLED_STATUS}
    (line,) = "".join(other.err for other in ended).splitlines()
    assert line.startswith(f"keel: error: rank {rank} of 3 has died")
    assert line.endswith(RESUME)


def fail_alike() -> None:
    with open_world("cpu"):
        raise KeelError("no such file")


def test_what_all_ranks_run_into_is_said_by_the_first() -> None:
    first, second = run_ranks(fail_alike)
    assert "no such file" in first.err
    assert second.err == ""


def differ(name: str) -> None:
    rank = int(os.environ["RANK"])
    with open_world("cpu", settings={"torch": "2.13", "kl.beta": 0.1, name: rank}):
        raise AssertionError("ranks that differ must not begin")


@pytest.mark.parametrize("name", ["kl.beta", "data.path"])
def test_ranks_with_other_settings_are_refused(name: str) -> None:
    first, second = run_ranks(differ, name)
    assert f"rank 1 of 2 has {name} 1, rank 0 has 0: start all ranks with the same command" in first.err
    assert second.err == ""


def meet() -> None:
    with open_world("cpu") as world:
        world.barrier()


def test_a_port_in_use_is_named() -> None:
    with socket.socket() as listener:
        listener.bind(("", 0))
        listener.listen()
        port = str(listener.getsockname()[1])
        (first,) = run_ranks(meet, only=0, env={"MASTER_PORT": port})
    assert f"port {port} is in use: set MASTER_PORT to a free one" in first.err


def meet_soon() -> None:
    watchdog.RENDEZVOUS_TIMEOUT = timedelta(seconds=1)
    meet()


def test_ranks_that_do_not_arrive_are_named() -> None:
    (first,) = run_ranks(meet_soon, size=3, only=0)
    assert "2 of 3 processes have not started" in first.err
    assert "(rank 1, 2)" in first.err


def test_a_world_without_an_address_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(KeelError, match="MASTER_ADDR or MASTER_PORT"), open_world("cpu"):
        pass
