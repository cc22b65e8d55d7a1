"""The server as a process: its port is there before its model, signals drain it, a failure ends it."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx2
import pytest

from support import TESTS
from support.models.served_letters import wait_until
from trainshed.errors import InputError
from trainshed.serve.http.server import bind_socket, listener_url

SCRIPT = TESTS / "support" / "models" / "letters_process.py"
ASK = {"model": "letters", "prompt": "say"}


class Process:
    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(SCRIPT), *arguments], stderr=subprocess.PIPE, text=True, bufsize=1
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as stream:
            for line in stream:
                self.lines.append(line)

    def url(self) -> str:
        wait_until(lambda: any("listening at" in line for line in self.lines) or self.process.poll() is not None)
        (found,) = re.findall(r"listening at (http://\S+);", "".join(self.lines))
        return found

    def end(self) -> tuple[int, str]:
        code = self.process.wait(240)
        self._reader.join()
        return code, "".join(self.lines)


@contextmanager
def process(*arguments: str) -> Iterator[tuple[Process, httpx2.Client]]:
    started = Process(*arguments)
    try:
        with httpx2.Client(base_url=started.url(), timeout=60) as client:
            yield started, client
    finally:
        started.process.kill()
        started.end()


def ready(client: httpx2.Client) -> bool:
    return client.get("/ready").status_code == 200


def in_background(client: httpx2.Client, **changes: Any) -> tuple[threading.Thread, list[httpx2.Response]]:
    found: list[httpx2.Response] = []
    thread = threading.Thread(target=lambda: found.append(client.post("/v1/completions", json=ASK | changes)))
    thread.start()
    return thread, found


def running(client: httpx2.Client) -> bool:
    return "trainshed_questions_running 1" in client.get("/metrics").text


def test_the_port_answers_while_the_model_loads_and_a_signal_ends_that_too() -> None:
    with process("30", "stuck") as (server, client):
        assert client.get("/health").json() == {"status": "loading"}
        wait_until(lambda: "step" in client.get("/ready").json())
        assert client.get("/ready").json()["step"]["done"] == 4
        server.process.send_signal(signal.SIGTERM)
        code, said = server.end()
    assert code == 0
    assert "stopped while the model was being loaded" in said


def test_a_model_that_cannot_be_loaded_ends_the_process_with_its_error() -> None:
    server = Process("30", "broken")
    code, said = server.end()
    assert code == 2
    assert "error: these are not weights" in said
    assert "Traceback" not in said


def test_term_finishes_running_answers_and_those_who_come_late() -> None:
    with process("4") as (server, client), httpx2.Client(base_url=client.base_url, timeout=60) as other:
        wait_until(lambda: ready(client))
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: not ready(client))
        assert other.post("/v1/completions", json=ASK).json()["choices"][0]["text"] == "hello world"
        code, said = server.end()
    assert code == 0
    assert "SIGTERM: finishing running answers, for at most 4 s" in said
    assert "cut short" not in said


def test_answers_that_outlast_the_grace_are_cut_short_and_told_so() -> None:
    with process("0.2", "held") as (server, client), httpx2.Client(base_url=client.base_url, timeout=60) as other:
        wait_until(lambda: ready(client))
        whole, answer = in_background(client)
        wait_until(lambda: running(other))
        server.process.send_signal(signal.SIGTERM)
        code, said = server.end()
        whole.join()
    assert code == 0
    assert "answers were cut short" in said
    assert (answer[0].status_code, answer[0].json()["error"]["code"]) == (503, "shutting_down")


def test_a_second_term_ends_it_at_once() -> None:
    with process("600", "held") as (server, client), httpx2.Client(base_url=client.base_url, timeout=60) as other:
        wait_until(lambda: ready(client))
        with client.stream("POST", "/v1/completions", json=ASK | {"stream": True}):
            wait_until(lambda: running(other))
            server.process.send_signal(signal.SIGTERM)
            wait_until(lambda: not ready(other))
            server.process.send_signal(signal.SIGTERM)
            code, _ = server.end()
    assert code == 128 + signal.SIGTERM


def test_ctrl_c_waits_for_answers_and_for_nobody_else() -> None:
    with process("600") as (server, client):
        wait_until(lambda: ready(client))
        server.process.send_signal(signal.SIGINT)
        code, said = server.end()
    assert code == 0
    assert "SIGINT: finishing" in said


def test_a_port_that_is_taken_says_what_to_write() -> None:
    with bind_socket("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        sentence = f"port {port}: Address already in use"
        with pytest.raises(InputError, match=sentence) as caught, bind_socket("127.0.0.1", port):
            pass
    assert "--port" in (caught.value.hint or "")


@pytest.mark.parametrize(("host", "port"), [("nowhere.invalid", 80), ("127.0.0.1", 70000)])
def test_an_address_that_cannot_be_is_wrong_input(host: str, port: int) -> None:
    with pytest.raises(InputError), bind_socket(host, port):
        pass


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no IPv6 here")
def test_an_ipv6_address_is_written_as_one() -> None:
    with bind_socket("::1", 0) as listener:
        assert re.fullmatch(r"http://\[::1\]:\d+", listener_url(listener))
