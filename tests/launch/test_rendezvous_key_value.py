"""The key-value store: what one node writes, another reads, over real sockets."""

from __future__ import annotations

import socket
import threading
import time

import pytest

from trainshed.errors import TrainshedError
from trainshed.launch.ranks import free_port
from trainshed.launch.rendezvous import KeyValueClient, KeyValueServer


def client(server: KeyValueServer, token: str = "run#1", seconds: float = 60.0) -> KeyValueClient:
    return KeyValueClient(("127.0.0.1", server.port), token, seconds)


def test_a_reader_waits_for_whoever_has_not_written_yet() -> None:
    with KeyValueServer(0, "run#1") as server:
        writer = threading.Timer(0.2, lambda: client(server).put("b", [1, {"x": None}]))
        writer.start()
        client(server).put("a", 1)
        assert client(server).get(["a", "b"], seconds=30) == {"a": 1, "b": [1, {"x": None}]}
        writer.join()


def test_a_reader_gets_what_is_there_when_its_time_is_up() -> None:
    with KeyValueServer(0, "run#1") as server:
        client(server).put("a", 1)
        assert client(server).get(["a", "never"], seconds=0.1) == {"a": 1}


def test_whoever_waits_is_answered_before_the_store_closes() -> None:
    answers: list[object] = []
    with KeyValueServer(0, "run#1") as server:
        reader = threading.Thread(target=lambda: answers.append(client(server).get(["a", "never"], seconds=600)))
        reader.start()
        client(server).put("a", 1)
        while not server._open_requests:
            time.sleep(0.01)
    reader.join(60)
    assert answers == [{"a": 1}]


def test_a_node_may_come_before_the_store_does() -> None:
    port = free_port()
    answers: list[object] = []
    early = threading.Thread(
        target=lambda: answers.append(KeyValueClient(("127.0.0.1", port), "run#1").get(["a"], seconds=30))
    )
    early.start()
    time.sleep(0.3)
    with KeyValueServer(port, "run#1") as server:
        client(server).put("a", "here")
        early.join()
    assert answers == [{"a": "here"}]


def test_another_runs_node_is_turned_away() -> None:
    with KeyValueServer(0, "run#2") as server:
        with pytest.raises(TrainshedError) as caught:
            client(server, "run#1").put("a", 1)
        assert caught.value.what == "the nodes of another run or attempt meet here"
        assert client(server, "run#2").get(["a"], seconds=0) == {}


def test_nobody_answers_where_nobody_is() -> None:
    with pytest.raises(TrainshedError) as caught:
        KeyValueClient(("127.0.0.1", free_port()), "t", connect_seconds=0.1).put("a", 1)
    assert caught.value.what.startswith("node 0 did not answer for 0 s")


def test_a_port_that_is_taken_is_named_on_node_0_and_on_the_others() -> None:
    with socket.create_server(("", 0)) as stranger:
        port = stranger.getsockname()[1]
        with pytest.raises(TrainshedError, match=f"another program listens on port {port} of node 0"):
            KeyValueServer(port, "run#1")

        def answer() -> None:
            connection, _ = stranger.accept()
            with connection:
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        answering = threading.Thread(target=answer)
        answering.start()
        with pytest.raises(TrainshedError, match="node 0 answered something else than an agent does"):
            KeyValueClient(("127.0.0.1", port), "run#1", connect_seconds=0.0).put("a", 1)
        answering.join()


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\n\r\n", b"[]\n", b'{"get": 3}\n', b'"x"\n', b"\xff\n"])
def test_what_is_not_ours_neither_answers_nor_breaks_it(sent: bytes) -> None:
    with KeyValueServer(0, "run#1") as server:
        with socket.create_connection(("127.0.0.1", server.port)) as stranger:
            stranger.sendall(sent)
            stranger.shutdown(socket.SHUT_WR)
            assert stranger.recv(100) == b""
        client(server).put("a", 1)
        assert client(server).get(["a"], seconds=0) == {"a": 1}


def test_clocks_are_compared_and_addresses_told() -> None:
    with KeyValueServer(0, "run#1") as server:
        assert abs(client(server).clock_offset_seconds()) < 5
        assert client(server).own_address() == "127.0.0.1"
