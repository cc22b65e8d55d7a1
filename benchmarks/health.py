"""What watching costs a step of one rank: measured waits, alarms, and the garbage collector with and without freeze.

    python benchmarks/health.py [--step-seconds 0.1] [--waits 200]

Each part is timed alone, many times, and the best counts. The share is of a step of `--step-seconds` with `--waits`
waits for other ranks. A window's table (one all_reduce of 3 numbers a rank in 30 seconds or more) is not listed: it
costs what one all_reduce costs.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from measure import table
from trainshed.catalog import model_preset
from trainshed.engines.torch.garbage_collection import COLLECT_EVERY_STEPS
from trainshed.engines.torch.model import build_model
from trainshed.engines.torch.parallel import single_rank_mesh
from trainshed.engines.torch.rank_timing import MEASURED_EVERY, measured_waits
from trainshed.models.decoder import Regularization
from trainshed.observe.alarms import AlarmWatcher
from trainshed.plan.layout import resolve_layout
from trainshed.recipe import Layout

DEVICE = torch.device("cpu")


def best_seconds(work: Callable[[], object], times: int) -> float:
    """Return the shortest of some rounds: other processes only ever make one longer."""
    seconds = []
    for _ in range(times):
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return min(seconds)


def wait_seconds(rounds: int) -> tuple[float, float]:
    """Return what measuring costs once a step, and for each wait."""
    numbers, count = torch.ones(16), 100

    def collectives() -> None:
        for _ in range(count):
            dist.all_reduce(numbers)

    def measured() -> None:
        with measured_waits(DEVICE):
            collectives()

    def nothing() -> None:
        with measured_waits(DEVICE):
            pass

    once = best_seconds(nothing, rounds)
    return once, max(0.0, best_seconds(measured, rounds) - once - best_seconds(collectives, rounds)) / count


def alarm_seconds(rounds: int) -> float:
    """Return what the alarms cost for each step."""
    watcher, steps = AlarmWatcher(), iter(range(10**9))

    def steps_of_a_run() -> None:
        for _ in range(100):
            step = next(steps)
            list(watcher.alarms({"kind": "step", "step": step, "loss": 2.0 + 0.01 * (step % 7)}))

    return best_seconds(steps_of_a_run, rounds) / 100


def collect_seconds() -> tuple[float, float]:
    """Return what a collection of a rank's objects costs: all of them, and after they were frozen."""
    config = model_preset("tiny")
    mesh = single_rank_mesh(resolve_layout(Layout(), config), DEVICE)
    model = build_model(
        config, mesh, sequence_length=256, precision="fp32", regularization=Regularization(), compile_blocks=False
    )
    gc.collect()
    whole = best_seconds(gc.collect, 5)
    gc.freeze()
    frozen = best_seconds(gc.collect, 5)
    gc.unfreeze()
    assert model.stages
    return whole, frozen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--step-seconds", type=float, default=0.1)
    parser.add_argument("--waits", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=50)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=0, world_size=1)
        once, each = wait_seconds(options.rounds)
        dist.destroy_process_group()
    whole, frozen = collect_seconds()
    every = MEASURED_EVERY["cpu"]
    costs = {
        f"waits measured in every {every}th step: {once * 1e6:.1f} µs, {each * 1e6:.2f} µs a wait": (
            once + each * options.waits
        )
        / every,
        "alarms of the loss": alarm_seconds(options.rounds),
        f"garbage, frozen, every {COLLECT_EVERY_STEPS} steps: {frozen * 1e3:.2f} ms": frozen / COLLECT_EVERY_STEPS,
        "garbage, not frozen: one full collection, at another step on every rank": whole,
    }
    rows = [[name, f"{cost * 1e6:,.1f}", f"{cost / options.step_seconds:.3%}"] for name, cost in costs.items()]
    table("What watching costs", ["what", "µs", f"of a step of {options.step_seconds:g} s"], rows)


if __name__ == "__main__":
    main()
