"""Run by the flight tests: several small worlds of gloo ranks, each with one rank that fails in its own way.

PyTorch is imported once and the ranks are forked: a world costs no more than its waiting. Writes the flight records
to `<folder>/<scenario>/` and how each rank ended to `<folder>/<scenario>/ends.json`.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from trainshed.engines.torch import rank_health as watchdog_module
from trainshed.engines.torch.rank_health import Watchdog, enable_flight_recorder, write_flight_record
from trainshed.observe.budgets import PhaseBudgets

RANKS = 4
BUDGETS = {"first_step": 60.0, "step": 6.0}  # so that ranks wait 3 seconds for each other


class World:
    """What a rank of a scenario has: its number, and the groups of a 2×2 mesh."""

    def __init__(self, folder: Path, rank: int) -> None:
        enable_flight_recorder(folder)
        dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=RANKS)
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        self.rank, self.dp, self.tp = rank, mesh.get_group("dp"), mesh.get_group("tp")
        for group in (None, self.dp, self.tp):
            dist.all_reduce(torch.ones(3), group=group)

    def step(self) -> None:
        """What ranks do in a step: tensor-parallel ranks first, then data-parallel ones."""
        dist.all_reduce(torch.ones(2, 5), group=self.tp)
        dist.all_reduce(torch.ones(7), group=self.dp)


def killed(world: World) -> None:
    if world.rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    world.step()


def sleeping(world: World) -> None:
    if world.rank == 1:
        time.sleep(600)
    world.step()


def raising(world: World) -> None:
    if world.rank == 2:
        raise KeyError("no such document")
    world.step()


def disagreeing(world: World) -> None:
    if world.rank == 1:
        dist.barrier(group=world.tp)
    world.step()


def stuck_pipeline(world: World) -> None:
    """Each rank hears from the one before it, and the first does not speak: no timeout ends such a wait on gloo."""
    if world.rank == 0:
        time.sleep(600)
    heard = torch.zeros(4)
    for work in dist.batch_isend_irecv([dist.P2POp(dist.irecv, heard, world.rank - 1)]):
        work.wait()


def holding_the_interpreter(world: World) -> None:
    """No thread of rank 2 runs any more, the watchdog's neither."""
    if world.rank == 2:
        ctypes.PyDLL(None).sleep(600)
    world.step()


SCENARIOS: list[Callable[[World], None]] = [
    killed,
    sleeping,
    raising,
    disagreeing,
    stuck_pipeline,
    holding_the_interpreter,
]


def run_rank(scenario: Callable[[World], None], folder: Path, rank: int) -> None:
    """One rank, as the engine runs it: a watchdog beside it, and a flight record of the error that ends it."""
    os.dup2(os.open(folder / f"rank-{rank:05d}.log", os.O_WRONLY | os.O_CREAT), 2)
    watchdog_module._GRACE_SECONDS = 1.0
    with Watchdog(folder, rank, budgets=PhaseBudgets(BUDGETS), poll_seconds=0.1) as watchdog:
        watchdog.heartbeat(0, "first_step")
        world = World(folder, rank)
        watchdog.heartbeat(1, "step")
        try:
            scenario(world)
        except Exception as error:
            advice = watchdog.advice
            write_flight_record(folder, rank, reason="an error", error=error, step=1, phase="step", advice=advice)
            (folder / f"pickled-{rank}").write_bytes(torch._C._distributed_c10d._dump_fr_trace(True, False, False))
            os._exit(1)
    os._exit(0)


def main(folder: Path) -> None:
    running: dict[int, tuple[str, int]] = {}
    ends: dict[str, dict[int, int]] = {}
    for scenario in SCENARIOS:
        (folder / scenario.__name__).mkdir(parents=True)
        for rank in range(RANKS):
            child = os.fork()
            if child == 0:
                run_rank(scenario, folder / scenario.__name__, rank)
            running[child] = scenario.__name__, rank
    while running:
        child, status = os.wait()
        name, rank = running.pop(child)
        ends.setdefault(name, {})[rank] = os.waitstatus_to_exitcode(status)
    for name, codes in ends.items():
        (folder / name / "ends.json").write_text(json.dumps(codes))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
