"""How the nodes of a job find each other and tell each other things: by files in the run's folder, or by TCP.

`NodeEnv` is what the target's script says of a node: which one it is, where the first one is reached, which start of
the job this is. A start is one placement by the scheduler (job id and restart count). Several attempts may lie within
one: where a spare node steps in, the ranks start anew without a new placement.

`Rendezvous` is where agents meet: small files in the run's folder, each with one writer.

    <run>/starts/<start>/node-00001.json    who came (`JoinedNode`), written once by each agent
    <run>/starts/<start>/beat-00001         its heartbeats, counted: clocks of different machines are not compared
    <run>/starts/<start>/order.json         what the first agent has decided (`AgentOrder`): an attempt, or the end
    <run>/starts/<start>/exit-code          how it ends, for the target's script: a lost node does not decide
    <run>/starts/<start>/bad-nodes          hosts that were to blame, for the target's script: a new start avoids them
    <run>/starts/<start>/roll-call          there while ranks are ending: agents send a heartbeat with every look

`KeyValueServer` and `KeyValueClient` serve preflight, which needs answers in milliseconds. Node 0 keeps the values in
memory and serves them by TCP, one line of JSON for a request and one for its answer; nothing that is received is
executed. A request names the run and its attempt: another job's node that has the wrong port is turned away. Reading
waits for what is not there yet, so nobody polls.
"""

from __future__ import annotations

import os
import socket
import socketserver
import threading
import time
import uuid
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import orjson

from trainshed.errors import InputError, NotFound, StorageError, TrainshedError
from trainshed.launch.job import Stage
from trainshed.launch.ranks import free_port
from trainshed.storage import LocalStore

_NODE_VARIABLES = ("TRAINSHED_NODE_RANK", "SLURM_NODEID", "JOB_COMPLETION_INDEX")
_PART_VARIABLES = ("TRAINSHED_PART", "SLURM_ARRAY_TASK_ID", "JOB_COMPLETION_INDEX")


@dataclass(frozen=True)
class NodeEnv:
    """Where this agent stands: `slot` counts the nodes of the allocation, the spare ones included."""

    slot: int
    slots: int
    host: str
    """How others reach this node."""
    master: tuple[str, int]
    """Where rank 0 listens when it is on slot 0."""
    start: str
    """Names this start of the job, alike on all its nodes and never used again."""

    @property
    def leads(self) -> bool:
        """Whether this agent decides for all: the scheduler ends the whole job when the first node is lost."""
        return self.slot == 0

    @classmethod
    def from_environment(cls, stage: Stage, environment: Mapping[str, str] = os.environ) -> NodeEnv:
        """Read what the target's script has set; a node alone needs none of it."""
        slots = stage.nodes + stage.spares
        host = environment.get("TRAINSHED_HOST") or environment.get("SLURMD_NODENAME") or socket.gethostname()
        start = environment.get("TRAINSHED_START")
        if slots == 1:
            return cls(0, 1, host, ("127.0.0.1", free_port()), start or uuid.uuid4().hex)
        slot = _read_index(_NODE_VARIABLES, environment, slots, f"which of the {slots} nodes this is")
        master, port = environment.get("MASTER_ADDR"), environment.get("MASTER_PORT", "")
        if not master or not port.isdecimal():
            raise _missing_variable("MASTER_ADDR" if not master else "MASTER_PORT", "where rank 0 listens")
        if not start:
            raise _missing_variable("TRAINSHED_START", "which start of the job this is, alike on all its nodes")
        return cls(slot, slots, host, (master, int(port)), start)


def stage_part(stage: Stage, written: str | None, environment: Mapping[str, str] = os.environ) -> str | None:
    """Return which part of a stage this node does, as `3/8` with parts counted from 0; None for a stage in one."""
    if stage.parts == 1:
        return None
    if written is not None:
        number, _, parts = written.partition("/")
        if not number.isdecimal() or parts != str(stage.parts) or int(number) >= stage.parts:
            raise InputError(
                f"`{written}` is no part of {stage.name}, which has {stage.parts}",
                where="--part",
                hint=f"write 0/{stage.parts} to {stage.parts - 1}/{stage.parts}",
            )
        return written
    number = _read_index(_PART_VARIABLES, environment, stage.parts, f"which of the {stage.parts} parts this is")
    return f"{number}/{stage.parts}"


@dataclass(frozen=True)
class AgentTimeouts:
    """How long agents wait for each other; `TRAINSHED_LOST_SECONDS=60` and so on change them."""

    beat_seconds: float = 30.0
    """Between two signs of life."""
    look_seconds: float = 2.0
    """Between two looks at what others have written."""
    lost_seconds: float = 150.0
    """Without a sign of life for so long a node is lost."""
    roll_call_seconds: float = 20.0
    """The same once ranks have ended somewhere: all agents beat with every look then."""
    meet_seconds: float = 600.0
    """How long the first node waits for the others to start."""
    failure_grace_seconds: float = 20.0
    """How long ranks may take to write down where they stood when another has failed."""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> AgentTimeouts:
        """Read what the environment changes."""
        changed = {}
        for field in fields(cls):
            name = f"TRAINSHED_{field.name.upper()}"
            if name in environment:
                try:
                    changed[field.name] = float(environment[name])
                except ValueError:
                    raise InputError(
                        f"{name} is `{environment[name]}`, which is no number of seconds", where="the environment"
                    ) from None
        return cls(**changed)


def startup_phases(environment: Mapping[str, str] = os.environ) -> dict[str, float]:
    """Return how long it took before this agent ran, as the target's script has noted it: our code, then the image."""
    try:
        began, installed = float(environment["TRAINSHED_BEGAN"]), float(environment["TRAINSHED_INSTALLED"])
    except (KeyError, ValueError):
        return {}
    return {"install": max(0.0, installed - began), "image": max(0.0, time.time() - installed)}


def _read_index(names: tuple[str, ...], environment: Mapping[str, str], count: int, meaning: str) -> int:
    for name in names:
        text = environment.get(name)
        if text is None:
            continue
        if not text.isdecimal() or int(text) >= count:
            raise InputError(f"{name} is `{text}`, and there are {count}", where="the environment")
        return int(text)
    raise _missing_variable(names[0], meaning)


def _missing_variable(name: str, meaning: str) -> InputError:
    return InputError(
        f"{name} is not set: nothing says {meaning}",
        where="the environment",
        hint="the scripts that `trainshed render` prints set it",
    )


@dataclass(frozen=True)
class JoinedNode:
    """One agent that came; `problem` says why its node cannot take part."""

    slot: int
    host: str
    version: str
    problem: str | None = None


@dataclass(frozen=True)
class AgentOrder:
    """What all agents do next; those later in time have larger numbers."""

    number: int
    attempt: int | None = None
    slots: tuple[int, ...] = ()
    """The slot of each node rank; whoever is not among them waits as a spare."""
    master: tuple[str, int] = ("", 0)
    exit_code: int | None = None
    """Set when it is over: every agent ends with this."""
    what: str = ""
    """Why it is over, in a sentence."""


class Rendezvous:
    """The files of one start."""

    def __init__(self, run_folder: Path, start: str) -> None:
        self.folder = run_folder / "starts" / start
        self._store = LocalStore(self.folder)

    def join(self, joined: JoinedNode) -> None:
        """Say that this agent is here."""
        self._put(f"node-{joined.slot:05d}.json", asdict(joined))

    def joined(self) -> dict[int, JoinedNode]:
        """Return who is here, by slot."""
        found = [JoinedNode(**self._get(path.name) or {}) for path in sorted(self.folder.glob("node-*.json"))]
        return {each.slot: each for each in found}

    def beat(self, slot: int, count: int) -> None:
        """Give a sign of life."""
        self._store.put(f"beat-{slot:05d}", str(count).encode())

    def beats(self, slots: tuple[int, ...]) -> dict[int, int]:
        """Return how many signs of life each slot has given."""
        found: dict[int, int] = {}
        for slot in slots:
            try:
                found[slot] = int(self._store.read(f"beat-{slot:05d}") or b"0")
            except NotFound:
                found[slot] = 0
        return found

    def call_the_roll(self) -> None:
        """Have all agents beat with every look."""
        self._store.put("roll-call", b"")

    def end_the_roll_call(self) -> None:
        """Have them beat slowly again."""
        self._store.delete("roll-call")

    @property
    def roll_is_called(self) -> bool:
        """Whether agents beat with every look."""
        return (self.folder / "roll-call").exists()

    def give(self, order: AgentOrder) -> None:
        """Tell all agents what to do; only the first agent does."""
        if order.exit_code is not None:
            self._store.put("exit-code", f"{order.exit_code}\n".encode())
        self._put("order.json", asdict(order))

    def blame(self, hosts: Sequence[str]) -> None:
        """Say which hosts were to blame for the end."""
        if hosts:
            self._store.put("bad-nodes", "".join(f"{host}\n" for host in hosts).encode())

    def order(self) -> AgentOrder | None:
        """Return what the first agent has decided last."""
        body = self._get("order.json")
        if body is None:
            return None
        return AgentOrder(**body | {"slots": tuple(body["slots"]), "master": tuple(body["master"])})

    def _put(self, name: str, body: dict[str, Any]) -> None:
        self._store.put(name, orjson.dumps(body, option=orjson.OPT_INDENT_2) + b"\n")

    def _get(self, name: str) -> dict[str, Any] | None:
        try:
            return orjson.loads(self._store.read(name))
        except NotFound:
            return None


@contextmanager
def send_heartbeats(meeting: Rendezvous, slot: int, times: AgentTimeouts) -> Generator[None]:
    """Give signs of life for as long as the block runs, more often while the roll is called."""
    count, due = 0, 0.0

    def beat() -> None:
        nonlocal count, due
        if time.monotonic() >= due or meeting.roll_is_called:
            count, due = count + 1, time.monotonic() + times.beat_seconds
            try:
                meeting.beat(slot, count)
            except StorageError:
                due = 0.0  # once more at the next look
                raise

    with repeat_in_thread(min(times.look_seconds, times.beat_seconds), beat):
        yield


@contextmanager
def repeat_in_thread(seconds: float, do: Callable[[], None]) -> Generator[None]:
    """Do something now and then in a thread of its own, so that a hanging driver or disk holds nothing up."""
    over = threading.Event()

    def repeat() -> None:
        while True:
            with suppress(Exception):  # one that fails is followed by the next
                do()
            if over.wait(seconds):
                return

    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(timeout=1.0)


class HeartbeatMonitor:
    """Who has beaten since when, by this machine's clock alone."""

    def __init__(self, meeting: Rendezvous) -> None:
        self._meeting = meeting
        self._seen: dict[int, tuple[int, float]] = {}
        self._began = time.monotonic()

    def begin(self) -> None:
        """Wait for everybody anew: agents have just been told to beat at another pace."""
        self._began = time.monotonic()

    def silent(self, slots: tuple[int, ...], seconds: float) -> list[int]:
        """Return who has given no sign of life for so long."""
        now = time.monotonic()
        for slot, count in self._meeting.beats(slots).items():
            if slot not in self._seen or self._seen[slot][0] != count:
                self._seen[slot] = (count, now)
        return [slot for slot in slots if now - max(self._began, self._seen[slot][1]) >= seconds]


_MAX_LINE_BYTES = 16 * 2**20
_RETRY_SECONDS = 0.2
_ANSWER_SECONDS = 30.0  # for a line to come back, besides what was asked to be waited for


class KeyValueServer:
    """The board on node 0; a context manager."""

    def __init__(self, port: int, token: str) -> None:
        self._values: dict[str, Any] = {}
        self._changed = threading.Condition()
        board = self

        class Handler(socketserver.StreamRequestHandler):
            timeout = _ANSWER_SECONDS

            def handle(self) -> None:
                try:
                    request = orjson.loads(self.rfile.readline(_MAX_LINE_BYTES))
                    answer = board._answer(request, self.client_address[0], token)
                except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError, TimeoutError):
                    return  # not one of ours
                self.wfile.write(orjson.dumps(answer) + b"\n")

        self._server = _DualStackServer(port, Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)

    @property
    def port(self) -> int:
        """Where it listens."""
        return self._server.socket.getsockname()[1]

    def __enter__(self) -> KeyValueServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _answer(self, request: dict[str, Any], peer: str, token: str) -> dict[str, Any]:
        if request["token"] != token:
            return {"error": "this board belongs to another run or attempt"}
        if "put" in request:
            with self._changed:
                self._values[request["put"]] = request["value"]
                self._changed.notify_all()
        keys = request.get("get", [])
        deadline = time.monotonic() + float(request.get("seconds", 0))
        with self._changed:
            while not all(key in self._values for key in keys):
                left = deadline - time.monotonic()
                if left <= 0:
                    break
                self._changed.wait(left)
            found = {key: self._values[key] for key in keys if key in self._values}
        return {"found": found, "time": time.time(), "peer": peer.removeprefix("::ffff:")}


class _DualStackServer(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 1024

    def __init__(self, port: int, handler: type[socketserver.BaseRequestHandler]) -> None:
        if socket.has_dualstack_ipv6():
            self.address_family = socket.AF_INET6
        super().__init__(("", port), handler)

    def server_bind(self) -> None:
        """Take IPv4 too."""
        if self.address_family == socket.AF_INET6:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        super().server_bind()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A node that went away in the middle is missed where it is waited for."""


@dataclass(frozen=True)
class KeyValueClient:
    """A node's view of the board; `address` is node 0's."""

    address: tuple[str, int]
    token: str
    connect_seconds: float = 120.0

    def put(self, key: str, value: Any) -> None:
        """Write."""
        self._ask({"put": key, "value": value})

    def get(self, keys: Iterable[str], seconds: float) -> dict[str, Any]:
        """Wait until all keys are there, at most so long; return those that are."""
        return self._ask({"get": list(keys), "seconds": seconds}, seconds)["found"]

    def own_address(self) -> str:
        """Return the address that node 0 sees this node under."""
        return self._ask({})["peer"]

    def clock_offset_seconds(self) -> float:
        """Return how far node 0's clock is ahead of ours, from the quickest of a few answers."""
        tries = []
        for _ in range(3):
            before = time.time()
            theirs = self._ask({})["time"]
            after = time.time()
            tries.append((after - before, theirs - (before + after) / 2))
        return min(tries)[1]

    def _ask(self, request: dict[str, Any], seconds: float = 0.0) -> dict[str, Any]:
        line = orjson.dumps({"token": self.token, **request}) + b"\n"
        deadline = time.monotonic() + self.connect_seconds
        while True:
            try:
                # Names of pods are known a little after the pods are.
                with socket.create_connection(self.address, timeout=_ANSWER_SECONDS) as connection:
                    connection.settimeout(seconds + _ANSWER_SECONDS)
                    connection.sendall(line)
                    answer = connection.makefile("rb").readline(_MAX_LINE_BYTES)
                if answer:
                    break
            except OSError:
                pass
            if time.monotonic() > deadline:
                host, port = self.address
                raise TrainshedError(
                    f"node 0 did not answer for {self.connect_seconds:.0f} s",
                    where=f"{host}:{port}",
                    hint="is it running, and may nodes reach each other on this port?",
                )
            time.sleep(_RETRY_SECONDS)
        found = orjson.loads(answer)
        if "error" in found:
            raise TrainshedError(found["error"], where=f"{self.address[0]}:{self.address[1]}")
        return found
