"""What the verdict of preflight means for each node."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainshed.errors import TrainshedError
from trainshed.launch.agent import training
from trainshed.launch.agent.records import NodeRecord
from trainshed.launch.job import Stage
from trainshed.launch.preflight import PreflightVerdict
from trainshed.launch.rendezvous import AgentOrder, NodeEnv
from trainshed.reporting import SILENT

ORDER = AgentOrder(1, 1, (0, 2), ("first", 29500))


@pytest.fixture(autouse=True)
def cluster(tmp_path: Path) -> None:
    (tmp_path / "cluster.yaml").write_text("name: c\ntarget: slurm\nmachine: cpu\nstore: /shared\n")


def proven(folder: Path, node: int, monkeypatch: pytest.MonkeyPatch, verdict: PreflightVerdict) -> NodeRecord | None:
    monkeypatch.setattr(training, "run_preflight", lambda *_, **__: verdict)
    node_env = NodeEnv(ORDER.slots[node], 3, f"host-{node}", ("first", 29500), "s")
    return training.preflight_node(folder, Stage("train", nodes=2, spares=1), folder, ORDER, node, node_env, SILENT)


@pytest.mark.parametrize("outcome", ["pass", "warn"])
def test_a_node_that_is_fit_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, outcome: str) -> None:
    assert proven(tmp_path, 0, monkeypatch, PreflightVerdict(outcome, "two nodes are ready")) is None  # type: ignore[arg-type]


def test_a_bad_node_is_replaced_and_the_others_only_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    verdict = PreflightVerdict("replace", "node 1 (host-1): a GPU is missing", replace=(1,))
    good, bad = (proven(tmp_path, node, monkeypatch, verdict) for node in (0, 1))
    assert good is not None
    assert (good.ended, good.bad_node) == ("peer", None)
    assert bad is not None
    assert (bad.ended, bad.slot, bad.bad_node) == ("failed", 2, "preflight says to replace it")
    assert bad.what == "preflight: node 1 (host-1): a GPU is missing"


def test_what_is_wrong_with_all_of_them_is_no_nodes_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = proven(tmp_path, 1, monkeypatch, PreflightVerdict("fail", "NCCL uses sockets"))
    assert found is not None
    assert (found.ended, found.bad_node, found.what) == ("failed", None, "preflight: NCCL uses sockets")


def test_a_preflight_that_breaks_off_is_a_failure_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def break_off(*_: object, **__: object) -> PreflightVerdict:
        raise TrainshedError("node 0 did not answer")

    monkeypatch.setattr(training, "run_preflight", break_off)
    node_env = NodeEnv(2, 3, "host-1", ("first", 29500), "s")
    found = training.preflight_node(tmp_path, Stage("train", nodes=2), tmp_path, ORDER, 1, node_env, SILENT)
    assert found is not None
    assert found.what == "preflight: node 0 did not answer"
