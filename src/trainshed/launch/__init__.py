"""Jobs on a cluster and training on this machine: what is submitted, to whom, and the processes that run on each node.

A `Job` (`job.py`) is rendered and submitted by a `Target` (`target.py`, `slurm/`, `kubernetes/`, `ray/`). On every
node `agent/` starts the ranks (`ranks.py`); agents find each other by `rendezvous.py`. `preflight/` checks nodes and
network first. `local.py` trains on this machine.
"""

from __future__ import annotations

from trainshed.launch.ranks import RankFailure, RanksResult, run_ranks

__all__ = ["RankFailure", "RanksResult", "run_ranks"]
