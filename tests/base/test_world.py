"""Processes that tell each other what they have: the same everywhere, and nothing where there is one."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from keel.base import world as module
from keel.base.errors import KeelError
from keel.base.metrics import EffectiveSampleSize, Max, Mean, Quantile, Sum, values
from keel.base.world import SINGLE_PROCESS, World
from processes import spawn

SIZE = 2


def test_one_alone_gets_its_own_back():
    tensor, metrics = torch.ones(2), {"a": Sum(1.0)}
    SINGLE_PROCESS.all_reduce_([tensor])
    SINGLE_PROCESS.barrier()
    assert SINGLE_PROCESS.new_group() is SINGLE_PROCESS
    assert tensor.tolist() == [1.0, 1.0]
    assert SINGLE_PROCESS.reduce(metrics) == metrics
    assert (
        SINGLE_PROCESS.shard([1, 2]),
        SINGLE_PROCESS.all_gather(3),
        SINGLE_PROCESS.broadcast(4),
        SINGLE_PROCESS.any(False),
        SINGLE_PROCESS.is_main,
    ) == (
        [1, 2],
        [3],
        4,
        False,
        True,
    )


@pytest.mark.parametrize(("count", "size"), [(7, 3), (2, 4), (0, 2)])
def test_shares_are_disjoint_and_complete(count, size):
    shares = [World(rank, size).shard(range(count)) for rank in range(size)]
    assert sorted(item for share in shares for item in share) == list(range(count))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_rows_that_do_not_divide_the_processes_are_refused():
    with pytest.raises(KeelError, match="4 processes cannot be divided into groups of 3"):
        World(0, 4).mesh(torch.device("cpu"), 3)


def _process(rank, folder):
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=SIZE)
    try:
        world, module.BUCKET_ELEMENTS = World(rank, SIZE), 5  # numbers: the sum below takes several
        metrics = {
            "sum": Sum(1.0 + rank),
            "mean": Mean(10.0 * rank, 1 + 2 * rank),
            "max": Max(float(-rank)),
            "ess": EffectiveSampleSize(*((1.0, 1.0, 1.0) if rank == 0 else (6.0, 18.0, 2.0))),
            "median": Quantile(0.5, (1.0, 2.0) if rank == 0 else (9.0,)),
            **({"only": Sum(torch.tensor(7.0))} if rank == 1 else {}),
        }
        tensors = [torch.full((2, 3), 1.0 + rank), torch.tensor(rank + 0.5), torch.full((4,), 0.1 * rank).bfloat16()]
        world.all_reduce_(tensors)
        told = (world.all_gather(f"rank {rank}"), world.broadcast(rank + 5), world.any(rank == 1), world.any(False))
        apart = world.new_group()
        collected = (world.gather_to_main(f"rank {rank}"), apart.gather_to_main(rank))
        with ThreadPoolExecutor() as pool:  # the two take turns as they come, another way on each rank
            thread = pool.submit(lambda: [apart.all_gather(("thread", rank, i)) for i in range(50)])
            main = [world.all_gather(("main", rank, i)) for i in range(50)]
        results = (values(world.reduce(metrics)), told, tensors, main, thread.result(), collected)
        torch.save(results, f"{folder}/rank-{rank}.pt")
        world.barrier()
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_two_processes_agree(tmp_path):
    spawn(_process, (str(tmp_path),), SIZE)
    expected = {"sum": 3.0, "mean": 2.5, "max": 0.0, "ess": 7**2 / (3 * 19), "median": 2.0, "only": 7.0}
    for rank in range(SIZE):
        results = torch.load(tmp_path / f"rank-{rank}.pt", weights_only=False)
        metrics, told, tensors, main, thread, collected = results
        assert collected == ((["rank 0", "rank 1"], [0, 1]) if rank == 0 else (None, None))
        assert metrics == pytest.approx(expected)
        assert told == (["rank 0", "rank 1"], 5, True, False)
        assert [t.flatten().tolist() for t in tensors[:2]] == [[3.0] * 6, [2.0]]
        assert torch.equal(tensors[2], torch.full((4,), 0.1).bfloat16())
        assert main == [[("main", 0, i), ("main", 1, i)] for i in range(50)]
        assert thread == [[("thread", 0, i), ("thread", 1, i)] for i in range(50)]
