"""Starting a run's processes: the ranks of one node. Targets and the node agent join here."""

from __future__ import annotations

from trainshed.launch.ranks import RankFailure, RanksResult, run_ranks

__all__ = ["RankFailure", "RanksResult", "run_ranks"]
