"""Pods of a PyTorchJob agree on a name for their start, over real sockets."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from trainshed.errors import TrainshedError
from trainshed.launch.kubernetes.rendezvous import fetch_start, next_start, publish_start
from trainshed.launch.ranks import free_port


def test_every_pod_gets_the_name_that_node_zero_gives() -> None:
    port = free_port()
    with ThreadPoolExecutor(4) as pool:
        # The others may come long before node 0.
        others = [pool.submit(fetch_start, "127.0.0.1", port, rank, seconds=120) for rank in (1, 2, 3)]
        publish_start(port, 4, "uid-0", seconds=120)
        assert [other.result() for other in others] == ["uid-0"] * 3


def test_a_pod_that_comes_twice_gets_the_same_name_while_others_are_missing() -> None:
    port = free_port()
    server = threading.Thread(target=publish_start, args=(port, 3, "uid-1"), kwargs={"seconds": 120})
    server.start()
    assert fetch_start("127.0.0.1", port, 1, seconds=120) == "uid-1"
    assert fetch_start("127.0.0.1", port, 1, seconds=120) == "uid-1"
    assert fetch_start("127.0.0.1", port, 2, seconds=120) == "uid-1"
    server.join(120)
    assert not server.is_alive()


def test_who_comes_alone_waits_for_node_zero_and_says_so() -> None:
    with pytest.raises(TrainshedError, match=r"node 0 \(127.0.0.1:\d+\) did not say which start this is within 0.3 s"):
        fetch_start("127.0.0.1", free_port(), 1, seconds=0.3)


def test_node_zero_names_the_pods_that_did_not_come() -> None:
    with pytest.raises(TrainshedError, match=r"pods 1, 2 of 3 did not come within 0.2 s"):
        publish_start(free_port(), 3, "uid-0", seconds=0.2)


def test_each_start_of_a_container_has_another_name(tmp_path: Path) -> None:
    assert [next_start(tmp_path, "uid") for _ in range(3)] == ["uid-0", "uid-1", "uid-2"]
