"""The network of a foreign engine's run is read from NCCL's own logs, and a node that is not on the fabric is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trainshed.launch.fabric import fabric_setup
from trainshed.observe.event_log import read_events
from trainshed.observe.events import encode_event
from trainshed.observe.nccl_log import SHOWN_SECONDS, ExpectedNetwork, NetworkWatch
from trainshed.observe.watch_node import NodeWatcher, read_options
from trainshed.recipe import Cluster
from trainshed.storage import LocalStore

EFA = ["NET/OFI Selected provider is efa, fabric is efa-direct (found 16 nics)", "Using network AWS Libfabric"]
SOCKETS = ["NET/Socket : Using [0]eth0:192.0.2.2<0>", "Using network Socket"]
SHARP = ["Using network IBext_v9", "Channel 00/0 : 0[0] -> 1 [send] via COLLNET/SHARP/0"]


def expected(fabric: str, **keys: Any) -> ExpectedNetwork:
    return fabric_setup(Cluster(name="c", target="slurm", fabric=fabric, **keys), nodes=2).expected_network


def write_log(prefix: Path, process: int, *lines: str) -> None:
    Path(f"{prefix}{process}.log").write_text("".join(f"n:{process}:1 [0] NCCL INFO {line}\n" for line in lines))


@pytest.mark.parametrize(
    ("network", "logs", "problem"),
    [
        (expected("efa-v1"), (EFA, EFA), None),
        (expected("efa-v1"), (EFA, SOCKETS), "NCCL says `NET/Socket : Using [0]eth0:192.0.2.2<0>`"),
        (
            expected("infiniband-ndr"),
            (["Could not open XML topology file /etc/ndv5-topo.xml : No such file", "Using network IB"],),
            "NCCL says `Could not open XML topology file /etc/ndv5-topo.xml : No such file`",
        ),
        # A group of ranks inside a node has no SHARP, and says so.
        (
            expected("infiniband-ndr@nccl-2.25", sharp=True),
            (SHARP, ["Cannot initialize CollNet, using point-to-point network instead"]),
            None,
        ),
    ],
)
def test_the_logs_of_a_nodes_ranks_tell_at_once(
    network: ExpectedNetwork, logs: tuple[list[str], ...], problem: str | None, tmp_path: Path
) -> None:
    watch = NetworkWatch(network, str(tmp_path / "nccl-"))
    watch.look(0)
    assert watch.verdict is None, "there is no log yet"
    for process, lines in enumerate(logs):
        write_log(tmp_path / "nccl-", process, *lines)
    watch.look(1)
    assert watch.verdict is not None
    assert watch.verdict["problem"] == problem


def test_sharp_that_never_shows_is_a_problem_when_its_groups_have_had_time(tmp_path: Path) -> None:
    watch = NetworkWatch(expected("infiniband-ndr@nccl-2.25", sharp=True), str(tmp_path / "nccl-"))
    write_log(tmp_path / "nccl-", 1, SHARP[0])
    watch.look(100)
    watch.look(100 + SHOWN_SECONDS - 1)
    assert watch.verdict is None
    watch.look(100 + SHOWN_SECONDS)
    assert watch.verdict is not None
    assert str(watch.verdict["problem"]).startswith("NCCL's log does not show /via COLLNET/SHARP|")
    assert watch.verdict["network"] == "IBext_v9"


def test_the_first_node_names_the_hosts_that_are_not_on_the_fabric_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "network.json").write_text(json.dumps(expected("efa-v1")._asdict()))
    clock, watchers = iter(range(0, 10**6, 30)), []
    for node, lines in enumerate((EFA, SOCKETS, EFA)):
        prefix = tmp_path / f"node{node}-"
        words = ["--run", str(tmp_path / "run"), "--attempt", "1", "--node", str(node), "--nodes", "3"]
        words += ["--ranks-per-node", "1", "--torchrun", "1", "--quiet-seconds", "600"]
        words += ["--network", str(tmp_path / "network.json"), "--nccl-log", str(prefix)]
        watchers.append(NodeWatcher(read_options(words), clock=lambda: float(next(clock))))
        write_log(prefix, node, *lines)
    for _ in range(3):
        for node in (1, 2, 0):
            monkeypatch.setenv("TRAINSHED_HOST", f"host-{node}")
            watchers[node].look()
    alarms = [event for event in read_events(LocalStore(tmp_path / "run"), "") if event["kind"] == "alarm"]
    (alarm,) = alarms
    assert (alarm["name"], alarm["hosts"]) == ("fabric", ["host-1"])
    assert alarm["what"] == (
        "efa-v1 is not used as it should be on host-1: NCCL says `NET/Socket : Using [0]eth0:192.0.2.2<0>`; is the "
        "plugin of efa any in the image (NCCL_NET=AWS Libfabric), and are its devices there?"
    )
    assert alarm["what"] in capsys.readouterr().err
    encode_event("alarm", None, {key: alarm[key] for key in ("name", "what", "hosts")}, attempt=1, rank=None)
    kept = json.loads((tmp_path / "run/health/attempt-0001/network-00002.json").read_text())
    assert kept == {"host": "host-2", "network": "AWS Libfabric", "problem": None}


def test_a_watch_without_a_fabric_reads_no_logs(tmp_path: Path) -> None:
    words = ["--run", str(tmp_path), "--attempt", "1", "--node", "0", "--nodes", "1", "--ranks-per-node", "1"]
    words += ["--torchrun", "1", "--quiet-seconds", "600", "--network", str(tmp_path / "network.json")]
    write_log(tmp_path / "nccl-", 1, *SOCKETS)
    NodeWatcher(read_options([*words, "--nccl-log", str(tmp_path / "nccl-")])).look()
    assert not list(tmp_path.glob("health/*/network-*"))
