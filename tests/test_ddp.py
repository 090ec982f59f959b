"""Training in two processes: each writes its own rows, together they are one exact store."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import dualstore

PROGRAM = textwrap.dedent(
    """
    import sys, time
    from pathlib import Path
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.utils.data import DataLoader, DistributedSampler
    import dualstore

    rank, folder, mode = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    ddp = nn.parallel.DistributedDataParallel(model)
    make = torch.optim.AdamW if mode == "adamw" else lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9, weight_decay=1e-3)
    optimizer = make(ddp.parameters(), lr=0.05)
    X = torch.linspace(-2, 2, 21 * 4, dtype=torch.float64).reshape(21, 4).sin()
    Y = torch.arange(21) % 3
    sampler = DistributedSampler(range(21), 2, rank, shuffle=True, seed=3)
    store = folder / ("store" if mode != "apart" else f"store-{rank}")
    micro = 2 if mode == "accumulate" else 1
    with dualstore.record(ddp, optimizer, store, dtype="float64", sampler=sampler, audit_every=1) as rec:
        for epoch in range(3):
            sampler.set_epoch(epoch)
            for number, ids in enumerate(DataLoader(list(sampler), batch_size=4, collate_fn=list)):
                sync = ddp.no_sync() if micro == 2 and number % 2 == 0 else torch.enable_grad()
                with sync, rec.batch(ids, Y[ids], task="even" if (ids[0] + rank) % 2 else "odd", epoch=epoch):
                    (nn.functional.cross_entropy(ddp(X[ids]), Y[ids]) / micro).backward()
                if micro == 1 or number % 2:
                    nn.utils.clip_grad_norm_(ddp.parameters(), 0.3)
                    optimizer.step()
                    optimizer.zero_grad()
                if mode == "killed" and epoch == 1:
                    rec.flush()
                    if rank == 1 and number == 1:
                        print("ready", flush=True)
                        time.sleep(600)
                    if rank == 0 and number == 1:
                        print("ready", flush=True)
            optimizer.zero_grad()
        if rank == 0:
            model.eval()
            with rec.probe([1, 2], Y[1:3]):
                model(X[1:3])
    if mode != "killed":
        dist.destroy_process_group()
    """
)


RESUMING = textwrap.dedent(
    """
    import sys
    from pathlib import Path
    import torch
    import torch.distributed as dist
    from torch import nn
    import dualstore

    rank, folder, mode = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting-{mode}", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    ddp = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.05)
    X = torch.linspace(-2, 2, 84, dtype=torch.float64).reshape(21, 4).sin()
    Y = torch.arange(21) % 3
    again = mode == "second"
    if again:
        weights, state = torch.load(folder / "checkpoint")
        model.load_state_dict(weights)
        optimizer.load_state_dict(state)
    with dualstore.record(ddp, optimizer, folder / "store", dtype="float64", resume=again) as rec:
        for step in range(4, 10) if again else range(7):
            ids = [(step * 4 + rank * 2 + k) % 21 for k in range(2)]
            with rec.batch(ids, Y[ids], epoch=0):
                nn.functional.cross_entropy(ddp(X[ids]), Y[ids]).backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 3:
                rec.flush()
                if rank == 0:
                    torch.save((model.state_dict(), optimizer.state_dict()), folder / "checkpoint")
    dist.barrier()
    dist.destroy_process_group()
    """
)


def start(folder: Path, rank: int, mode: str, program: str = PROGRAM) -> subprocess.Popen[str]:
    folder.mkdir(exist_ok=True)
    arguments = [sys.executable, "-c", program, str(rank), str(folder), mode]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def run(folder: Path, mode: str, program: str = PROGRAM) -> None:
    with start(folder, 0, mode, program) as first, start(folder, 1, mode, program) as second:
        ranks = (first, second)
        try:
            said = [process.communicate(timeout=300)[1] for process in ranks]
        finally:
            for process in ranks:
                process.kill()
    assert [process.returncode for process in ranks] == [0, 0], said
    assert "Warning" not in "".join(said), said


@pytest.mark.parametrize("mode", ["sgd", "adamw", "accumulate"])
def test_two_ranks_write_one_exact_store(tmp_path: Path, mode: str) -> None:
    run(tmp_path, mode)
    store = dualstore.open(tmp_path / "store")
    found = store.verify()
    assert found.problems == []
    for check in found.layers:
        assert check.weight_residual is not None
        assert check.weight_residual < 1e-12
        assert check.output_residual is not None
        assert check.output_residual < 1e-12
    steps = 9 if mode != "accumulate" else 3
    assert store.steps.numbers.tolist() == list(range(steps))
    ids = store.sql(
        "SELECT epoch, sample_id, count(*) AS n, sum(duplicate) AS again FROM patterns WHERE layer = 0 GROUP BY ALL"
    ).to_dicts()
    if mode != "accumulate":  # which leaves out the last batch of an epoch
        assert len(ids) == 3 * 21
        assert [(row["n"], row["again"]) for row in ids if row["n"] > 1] == [(2, 1)] * 3
        assert sum(row["again"] for row in ids) == 3


def test_ranks_on_disks_of_their_own_are_merged(tmp_path: Path) -> None:
    run(tmp_path, "sgd")
    (tmp_path / "meeting").unlink(missing_ok=True)
    run(tmp_path, "apart")
    command = ["merge", str(tmp_path / "merged"), str(tmp_path / "store-0"), str(tmp_path / "store-1")]
    code = "import sys; from dualstore.cli import main; sys.argv = ['dualstore', *sys.argv[1:]]; main()"
    subprocess.run([sys.executable, "-c", code, *command], check=True, capture_output=True)
    merged, together = dualstore.open(tmp_path / "merged"), dualstore.open(tmp_path / "store")
    assert merged.verify().problems == []
    text = "SELECT layer, step, epoch, sample_id, label, task, duplicate, x, e FROM patterns ORDER BY ALL"
    assert merged.sql(text).to_dicts() == together.sql(text).to_dicts()
    query = np.linspace(-1, 1, 4)
    assert merged.query(query, layer=0, top=30).to_dicts() == together.query(query, layer=0, top=30).to_dicts()


def test_ranks_go_on_from_a_checkpoint_together(tmp_path: Path) -> None:
    run(tmp_path, "first", RESUMING)
    assert dualstore.open(tmp_path / "store").last_step == 6
    run(tmp_path, "second", RESUMING)
    store = dualstore.open(tmp_path / "store")
    found = store.verify()
    assert found.problems == []
    assert max(check.weight_residual or 0 for check in found.layers) < 1e-12
    rows = store.sql(
        "SELECT step, count(*) AS n, count(DISTINCT sample_id) AS ids FROM patterns WHERE layer = 0 GROUP BY ALL"
    ).to_dicts()
    assert sorted((row["step"], row["n"], row["ids"]) for row in rows) == [(step, 4, 4) for step in range(10)]


def test_where_a_rank_is_killed_the_rest_stays_readable(tmp_path: Path) -> None:
    ranks = [start(tmp_path, rank, "killed") for rank in range(2)]
    try:
        for process in ranks:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        ranks[1].send_signal(signal.SIGKILL)
        ranks[1].wait()
    finally:
        time.sleep(0.1)
        for process in ranks:
            process.kill()
            process.communicate()
    with pytest.warns(dualstore.DualstoreWarning, match="rank 1"):
        store = dualstore.open(tmp_path / "store")
    assert store.last_step == 4
    rows = store.sql("SELECT DISTINCT step FROM patterns ORDER BY step").to_dicts()
    assert [row["step"] for row in rows] == list(range(5))
    assert len(store.query(np.ones(4), layer=0, top=3).to_dicts()) == 3


def test_processes_whose_model_is_not_wrapped_are_refused(tmp_path: Path) -> None:
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=torch.distributed.PrefixStore("x", store), rank=0, world_size=1)
    try:
        model = nn.Linear(4, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        dualstore.record(model, optimizer, tmp_path / "one").close()  # one process alone is none of several
        with pytest.raises(dualstore.RecordError, match="found DataParallel, which copies it"):
            dualstore.record(nn.DataParallel(model), optimizer, tmp_path / "copies")
    finally:
        torch.distributed.destroy_process_group()
