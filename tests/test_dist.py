"""Two processes over gloo: data-parallel training of compiled models."""

import logging
import os

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from moe_inductor.report import log, report
from tests import models

RANKS = 2


def on_every_rank(rank: int, work, store: str, *args) -> None:
    """Entry of a spawned process."""
    torch.set_num_threads(1)
    os.environ["RANK"] = str(rank)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    try:
        work(rank, *args)
    finally:
        dist.destroy_process_group()


def spawn(work, tmp_path, *args) -> None:
    """Run ``work(rank, *args)`` on every rank; an assertion there fails the test."""
    torch.multiprocessing.spawn(on_every_rank, (work, str(tmp_path / "store"), *args), nprocs=RANKS)


def train(call, model, rank: int, steps: int, hidden: int) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for i in range(steps):
        x = models.rows(1, 7, hidden, seed=RANKS * i + rank).detach()
        optimizer.zero_grad()
        loss = call(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def data_parallel(rank: int, how: str, hidden: int) -> None:
    # a layer of width 128 has 1.5 MiB of gradients, so that buckets of 1 MiB split the graph between the two
    model = models.Residual(2, hidden=hidden, inter=hidden, experts=8)
    twin = models.eager_twin(model)
    theirs = train(DistributedDataParallel(twin, bucket_cap_mb=1), twin, rank, 4, hidden)
    if how == "wrapper compiled":
        call = torch.compile(DistributedDataParallel(model, bucket_cap_mb=1), backend=models.aot_eager())
    else:
        model.compile(backend=models.aot_eager())
        call = DistributedDataParallel(model, bucket_cap_mb=1)
    mine = train(call, model, rank, 4, hidden)
    assert mine == pytest.approx(theirs, rel=1e-4)
    models.assert_equal(dict(model.state_dict()), dict(twin.state_dict()))
    assert (models.matched(), report().compiles) == (2, 1), str(report())
    for p in model.parameters():
        seen = [torch.empty_like(p) for _ in range(RANKS)]
        dist.all_gather(seen, p.detach())
        assert torch.equal(seen[0], seen[1]), "replicas drifted apart"


WIDE = 128


@pytest.mark.dist
@pytest.mark.parametrize(
    ("how", "hidden"), [("wrapper compiled", 32), ("wrapper compiled", WIDE), ("model compiled", WIDE)]
)
def test_data_parallel(tmp_path, how, hidden):
    spawn(data_parallel, tmp_path, how, hidden)


def one_log_line(rank: int) -> None:
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.levelname)
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    model = models.Residual()
    models.pull(torch.compile(model, backend=models.aot_eager()), model, models.rows(1, 7, models.HIDDEN))
    assert lines == (["INFO"] if rank == 0 else [])


@pytest.mark.dist
def test_rank_zero_alone_logs(tmp_path):
    spawn(one_log_line, tmp_path)


def uneven(rank: int) -> None:
    model = models.Residual()
    twin = models.eager_twin(model)
    model.compile(backend=models.aot_eager(), dynamic=True)
    for tokens in ((0, 7), (7, 0), (1, 3)):
        x = models.rows(1, tokens[rank], models.HIDDEN, seed=rank).detach()
        grads = []
        for m in (model, twin):
            m.zero_grad()
            wrapped = m if isinstance(m, DistributedDataParallel) else DistributedDataParallel(m)
            wrapped(x).square().sum().backward()
            grads.append({name: p.grad.clone() for name, p in m.named_parameters()})
        models.assert_equal(*grads)


@pytest.mark.dist
def test_a_rank_without_tokens(tmp_path):
    spawn(uneven, tmp_path)
