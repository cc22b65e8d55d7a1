"""The nodes of an attempt proven before its ranks start: GPUs, fabric, storage (`launch/preflight`)."""

from __future__ import annotations

from pathlib import Path

from trainshed.errors import TrainshedError
from trainshed.launch.agent.meeting import Order
from trainshed.launch.agent.place import NodePlace
from trainshed.launch.agent.records import NodeRecord
from trainshed.launch.job import Stage
from trainshed.launch.preflight import preflight_job, run_preflight
from trainshed.recipe import load_cluster
from trainshed.reporting import Reporter
from trainshed.storage import LocalStore

_BOARD_PORT = 100
"""How far preflight's own port is from that of rank 0, which must be free when the ranks start."""


def prove_node(
    run: Path, stage: Stage, folder: Path, order: Order, node: int, place: NodePlace, reporter: Reporter
) -> NodeRecord | None:
    """Take part in the checks of all nodes of an attempt; returns how that ended for this node, None: it trains."""
    assert order.attempt is not None
    cluster = load_cluster(folder / "cluster.yaml")
    checks = preflight_job(
        cluster,
        store=LocalStore(run),
        run_folder="",
        attempt=order.attempt,
        nodes=len(order.slots),
        gpus=stage.gpus_per_node,
        full=stage.full_preflight,
    )
    board = (order.master[0], order.master[1] + _BOARD_PORT)
    try:
        verdict = run_preflight(checks, node_rank=node, board=board, host=place.host, reporter=reporter)
    except TrainshedError as error:
        return NodeRecord(node, place.slot, place.host, "failed", 1, what=f"preflight: {error.what}")
    if verdict.outcome in ("pass", "warn"):
        (reporter.note if verdict.outcome == "pass" else reporter.warn)(f"preflight: {verdict.sentence}")
        return None
    what = f"preflight: {verdict.sentence}"
    if verdict.outcome == "fail":
        return NodeRecord(node, place.slot, place.host, "failed", 1, what=what)
    if node in verdict.replace:
        return NodeRecord(node, place.slot, place.host, "failed", 1, bad_node="preflight says to replace it", what=what)
    return NodeRecord(node, place.slot, place.host, "peer", 1)
