"""One node of a preflight as a process of its own: `node_process.py NODE NODES PORT FOLDER KIND`."""

from __future__ import annotations

import sys

from trainshed.launch.fabric import UNKNOWN, FabricSetup
from trainshed.launch.preflight import Limits, PreflightJob, run_preflight
from trainshed.launch.preflight.worlds import PROBE
from trainshed.storage import LocalStore

# Each starts the real probe behind a change that stands for a fault of the node.
FAULTS = {
    "slow": "real = dist.all_reduce\ndist.all_reduce = lambda *a, **k: (time.sleep(0.3), real(*a, **k))[1]",
    "broken": "raise RuntimeError('the card is gone')",
}
FAULTY_PROBE = """
import sys, time
from pathlib import Path
import torch.distributed as dist
{fault}
from trainshed.engines.torch import fabric_probe
fabric_probe.probe(fabric_probe.ProbeRequest.from_text(sys.argv[1]), Path(sys.argv[2]))
"""


def main(node: int, nodes: int, port: int, folder: str, kind: str) -> None:
    fault = FAULTS.get(kind)
    probe = PROBE if fault is None else (sys.executable, "-c", FAULTY_PROBE.format(fault=fault))
    job = PreflightJob(
        LocalStore(folder),
        "",
        1,
        nodes,
        0,
        FabricSetup(UNKNOWN, None, ""),
        storage_bytes=2**20,
        limits=Limits(reports=30.0 if kind != "alone" else 0.5, world=60.0, measuring=0.1),
    )
    verdict = run_preflight(job, node_rank=node, board=("127.0.0.1", port), host=f"host-{node}", probe=probe)
    sys.stdout.write(f"{verdict.outcome}: {verdict.sentence}\n")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5])
