"""How the nodes of a job meet: who they are, where they exchange what, and which ports they use.

`NodeEnv` is what the target says about a node: which one it is, where the first one is reached, which start of the job
this is. A start is one placement by the scheduler (job id and restart count). One start can hold several attempts: when
a spare node steps in, the ranks start again without a new placement.

Nodes meet in three ways, each for one reason:

- Files in the run folder (`Rendezvous`), between agents: they outlive processes and nodes, so that a target's script,
  the next start and a person with `ls` read the same.
- A TCP key-value store (`KeyValueServer`, `KeyValueClient`), before ranks start: preflight checks the shared disk
  itself and measures clocks and addresses, and the pods of a PyTorchJob need an answer from a live node 0, not a file
  of an earlier start.
- PyTorch's TCPStore (`engines/torch`), between ranks: `init_process_group` needs one, also under torchrun, where no
  agent runs.

Each file of `Rendezvous` has one writer:

    <run>/starts/<start>/node-00001.json    an agent that has joined (`JoinedNode`), written once by it
    <run>/starts/<start>/beat-00001         its heartbeats, counted: clocks of different machines are not compared;
                                            what its devices report may follow, as a line of JSON
    <run>/starts/<start>/order.json         what the first agent has decided (`AgentOrder`): an attempt, or the end
    <run>/starts/<start>/exit-code          how it ends, for the target's script: a lost node does not decide
    <run>/starts/<start>/bad-nodes          hosts that caused the end, for the target's script: a new start avoids them
    <run>/starts/<start>/roll-call          exists while ranks are ending: agents send a heartbeat with every look

The key-value store is held in memory by node 0. A request is one line of JSON, and so is its answer; nothing that is
received is executed. A request carries a token, so that a node of another job with the wrong port is turned away.
Reading waits for keys that are not set yet, so nobody polls.
"""

from __future__ import annotations

import errno
import os
import socket
import socketserver
import threading
import time
import uuid
import zlib
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import orjson

from trainshed.errors import InputError, NotFound, StorageError, TrainshedError, error_with_exit_code
from trainshed.launch.job import Stage
from trainshed.launch.ranks import FAILURE_GRACE_SECONDS, free_port
from trainshed.run_folder import STARTS, node_name
from trainshed.storage import LocalStore

FIRST_PORT, PORTS = 20000, 12000
"""The range of `MASTER_PORT`: below the ports that Linux hands out itself (32768 and up), above those of services."""
START_PORT_OFFSET = 1
"""From `MASTER_PORT` to the port where the pods of a PyTorchJob agree on a start. It is closed before ranks start."""
PREFLIGHT_PORT_OFFSET = 100
"""From an attempt's port to that of its preflight; the attempt's own port must be free when the ranks start."""
_NODE_VARIABLES = ("TRAINSHED_NODE_RANK", "SLURM_NODEID", "JOB_COMPLETION_INDEX")
_PART_VARIABLES = ("TRAINSHED_PART", "SLURM_ARRAY_TASK_ID", "JOB_COMPLETION_INDEX")


def port_of_start(start: str) -> int:
    """Return `MASTER_PORT` for a start; starts on the same node seldom share one."""
    return FIRST_PORT + zlib.crc32(start.encode()) % PORTS


def unused_port(first: int) -> int:
    """Return the first port from `first` on that nobody on this machine listens on; `first` where all are taken."""
    for port in range(first, first + PREFLIGHT_PORT_OFFSET // 2):
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with suppress(OSError):
                listener.bind(("", port))
                listener.listen()
                return port
    return first


@dataclass(frozen=True)
class NodeEnv:
    """Which node this is, as the target's script says in the environment."""

    slot: int
    """Its number among the nodes of the allocation, spares included."""
    slots: int
    host: str
    """How others reach this node."""
    master: tuple[str, int]
    """Where rank 0 listens when it is on slot 0."""
    start: str
    """Name of this start of the job: the same on all its nodes, and never used again."""

    @property
    def is_leader(self) -> bool:
        """Whether this agent decides for all: the target ends the whole start when the first node is lost."""
        return self.slot == 0

    @classmethod
    def from_environment(cls, stage: Stage, environment: Mapping[str, str] = os.environ) -> NodeEnv:
        """Read what the target's script has set; a job on one node needs none of it."""
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
    """Return which part of a stage this node does, as `3/8` counted from 0; None if the stage has one part."""
    if stage.parts == 1:
        return None
    if written is not None:
        number, _, parts = written.partition("/")
        if not number.isdecimal() or parts != str(stage.parts) or int(number) >= stage.parts:
            raise InputError(
                f"`{written}` is not a part of {stage.name}, which has {stage.parts}",
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
    """Between two heartbeats."""
    look_seconds: float = 2.0
    """Between two looks at what others have written."""
    lost_seconds: float = 150.0
    """A node that sends no heartbeat for this long is lost."""
    roll_call_seconds: float = 20.0
    """The same once ranks have ended somewhere: all agents then send a heartbeat with every look."""
    meet_seconds: float = 600.0
    """How long the first node waits for the others to start."""
    failure_grace_seconds: float = FAILURE_GRACE_SECONDS
    """How long ranks have to write their flight records after another has failed."""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> AgentTimeouts:
        """Read the changes that the environment makes."""
        changed = {}
        for field in fields(cls):
            name = f"TRAINSHED_{field.name.upper()}"
            if name in environment:
                try:
                    changed[field.name] = float(environment[name])
                except ValueError:
                    raise InputError(
                        f"{name} is `{environment[name]}`, which is not a number of seconds", where="the environment"
                    ) from None
        return cls(**changed)


def startup_phases(environment: Mapping[str, str] = os.environ) -> dict[str, float]:
    """Return how long each step before this agent took, from the times that the target's script has noted."""
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
    """An agent that has joined."""

    slot: int
    host: str
    version: str
    problem: str | None = None
    """Why its node cannot take part."""


@dataclass(frozen=True)
class AgentOrder:
    """What all agents do next. A later order has a larger number."""

    number: int
    attempt: int | None = None
    slots: tuple[int, ...] = ()
    """The slot of each node rank; the other slots are spares."""
    master: tuple[str, int] = ("", 0)
    exit_code: int | None = None
    """Set when the start is over: every agent exits with this."""
    what: str = ""
    """Why it is over, in a sentence."""
    where: str | None = None
    """The file to look at, where it failed."""
    hint: str | None = None

    @classmethod
    def failed(cls, number: int, error: TrainshedError) -> AgentOrder:
        """Return the order that ends a start with an error."""
        return cls(number, exit_code=error.exit_code, what=error.what, where=error.where, hint=error.hint)

    def error(self) -> TrainshedError:
        """Return the error that ended the start."""
        return error_with_exit_code(self.exit_code, self.what, where=self.where, hint=self.hint)


@dataclass(frozen=True)
class Heartbeat:
    """How many heartbeats an agent has sent, and what came with the last one."""

    count: int
    devices: bytes = b""
    """What its devices report, as JSON (`observe/devices.py`)."""


class Rendezvous:
    """The files of one start, through which its agents meet."""

    def __init__(self, run_folder: Path, start: str) -> None:
        self.folder = run_folder / STARTS / start
        self._store = LocalStore(self.folder)

    def join(self, joined: JoinedNode) -> None:
        """Announce this agent."""
        self._put(f"{node_name(joined.slot)}.json", asdict(joined))

    def joined(self) -> dict[int, JoinedNode]:
        """Return the agents that have joined, by slot."""
        nodes = [JoinedNode(**self._get(path.name) or {}) for path in sorted(self.folder.glob("node-*.json"))]
        return {node.slot: node for node in nodes}

    def send_heartbeat(self, slot: int, count: int, devices: bytes = b"") -> None:
        """Write this agent's count of heartbeats, and what its devices report: it costs no request of its own."""
        self._store.put(f"beat-{slot:05d}", str(count).encode() + (b"\n" + devices if devices else b""))

    def heartbeats(self, slots: tuple[int, ...]) -> dict[int, Heartbeat]:
        """Return the last heartbeat of each slot."""
        last: dict[int, Heartbeat] = {}
        for slot in slots:
            try:
                count, _, devices = self._store.read(f"beat-{slot:05d}").partition(b"\n")
                last[slot] = Heartbeat(int(count or b"0"), devices)
            except NotFound:
                last[slot] = Heartbeat(0)
        return last

    def request_fast_heartbeats(self) -> None:
        """Make all agents send a heartbeat with every look."""
        self._store.put("roll-call", b"")

    def end_fast_heartbeats(self) -> None:
        """Make all agents send heartbeats slowly again."""
        self._store.delete("roll-call")

    @property
    def wants_fast_heartbeats(self) -> bool:
        """Whether agents send a heartbeat with every look."""
        return (self.folder / "roll-call").exists()

    def publish(self, order: AgentOrder) -> None:
        """Tell all agents what to do next; only the first agent does."""
        if order.exit_code is not None:
            self._store.put("exit-code", f"{order.exit_code}\n".encode())
        self._put("order.json", asdict(order))

    def write_bad_nodes(self, hosts: Sequence[str]) -> None:
        """Write which hosts caused the end."""
        if hosts:
            self._store.put("bad-nodes", "".join(f"{host}\n" for host in hosts).encode())

    def bad_nodes(self) -> list[str]:
        """Return the hosts that caused the end."""
        try:
            return self._store.read("bad-nodes").decode().split()
        except NotFound:
            return []

    def latest_order(self) -> AgentOrder | None:
        """Return the latest order of the first agent; None before its first."""
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
def send_heartbeats(
    rendezvous: Rendezvous, slot: int, timeouts: AgentTimeouts, devices: Callable[[], bytes] = bytes
) -> Generator[None]:
    """Send heartbeats as long as the block runs, with what `devices` returns at the time."""
    count, due = 0, 0.0

    def send() -> None:
        nonlocal count, due
        if time.monotonic() >= due or rendezvous.wants_fast_heartbeats:
            count, due = count + 1, time.monotonic() + timeouts.beat_seconds
            try:
                rendezvous.send_heartbeat(slot, count, devices())
            except StorageError:
                due = 0.0  # again at the next look
                raise

    with repeat_in_thread(min(timeouts.look_seconds, timeouts.beat_seconds), send):
        yield


@contextmanager
def repeat_in_thread(seconds: float, action: Callable[[], None]) -> Generator[None]:
    """Repeat an action in a thread of its own, so that a hanging driver or disk blocks nothing else."""
    over = threading.Event()

    def repeat() -> None:
        while True:
            with suppress(Exception):  # the next one may succeed
                action()
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
    """Notices slots that send no heartbeats, by this machine's clock alone."""

    def __init__(self, rendezvous: Rendezvous) -> None:
        self._rendezvous = rendezvous
        self._seen: dict[int, tuple[int, float]] = {}
        self._began = time.monotonic()
        self.devices: dict[int, bytes] = {}
        """What the devices of each slot report, as JSON, where its last heartbeat had it."""

    def reset(self) -> None:
        """Start waiting again: agents have just been told to send heartbeats at another pace."""
        self._began = time.monotonic()

    def silent_slots(self, slots: tuple[int, ...], seconds: float) -> list[int]:
        """Return the slots that have sent no heartbeat for this long."""
        now = time.monotonic()
        for slot, heartbeat in self._rendezvous.heartbeats(slots).items():
            if slot not in self._seen or self._seen[slot][0] != heartbeat.count:
                self._seen[slot] = (heartbeat.count, now)
                self.devices[slot] = heartbeat.devices
        return [slot for slot in slots if now - max(self._began, self._seen[slot][1]) >= seconds]


_MAX_LINE_BYTES = 16 * 2**20
_FIRST_RETRY_SECONDS = 0.2
_LAST_RETRY_SECONDS = 2.0  # a thousand nodes may be trying
_ANSWER_SECONDS = 30.0  # for a line to come back, besides the time that a read waits


class KeyValueServer:
    """The key-value store on node 0; a context manager. It ends once every request that it has read is answered."""

    def __init__(self, port: int, token: str) -> None:
        self._values: dict[str, Any] = {}
        self._changed = threading.Condition()
        self._open_requests = 0
        self._closing = False
        server = self

        class Handler(socketserver.StreamRequestHandler):
            timeout = _ANSWER_SECONDS

            def handle(self) -> None:
                try:
                    request = orjson.loads(self.rfile.readline(_MAX_LINE_BYTES))
                except (orjson.JSONDecodeError, TimeoutError):
                    return  # not one of ours
                with server._answering(), suppress(KeyError, TypeError, AttributeError):
                    answer = server._handle(request, self.client_address[0], token)
                    self.wfile.write(orjson.dumps(answer) + b"\n")

        try:
            self._server = _DualStackServer(port, Handler)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            raise TrainshedError(
                f"another program listens on port {port} of node 0, where the nodes of this job meet",
                hint="`ss -ltnp` on that node names it: end it, or give the job a node of its own",
            ) from None
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
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._open_requests, _ANSWER_SECONDS)

    @contextmanager
    def _answering(self) -> Generator[None]:
        with self._changed:
            self._open_requests += 1
        try:
            yield
        finally:
            with self._changed:
                self._open_requests -= 1
                self._changed.notify_all()

    def _handle(self, request: dict[str, Any], peer: str, token: str) -> dict[str, Any]:
        if request["token"] != token:
            return {"error": "the nodes of another run or attempt meet here"}
        if "put" in request:
            with self._changed:
                self._values[request["put"]] = request["value"]
                self._changed.notify_all()
        keys = request.get("get", [])
        with self._changed:
            self._changed.wait_for(
                lambda: self._closing or all(key in self._values for key in keys), float(request.get("seconds", 0))
            )
            values = {key: self._values[key] for key in keys if key in self._values}
        return {"values": values, "time": time.time(), "peer": peer.removeprefix("::ffff:")}


class _DualStackServer(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 1024

    def __init__(self, port: int, handler: type[socketserver.BaseRequestHandler]) -> None:
        if socket.has_dualstack_ipv6():
            self.address_family = socket.AF_INET6
        super().__init__(("", port), handler)

    def server_bind(self) -> None:
        """Accept IPv4 too."""
        if self.address_family == socket.AF_INET6:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        super().server_bind()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a connection that breaks: whoever waits for that node notices."""


@dataclass(frozen=True)
class KeyValueClient:
    """A node's access to the key-value store on node 0."""

    address: tuple[str, int]
    """Of node 0."""
    token: str
    connect_seconds: float = 120.0

    def put(self, key: str, value: Any) -> None:
        """Set a key."""
        self._request({"put": key, "value": value})

    def get(self, keys: Iterable[str], seconds: float) -> dict[str, Any]:
        """Wait until all keys are set, at most `seconds`; return those that are."""
        return self._request({"get": list(keys), "seconds": seconds}, seconds)["values"]

    def put_and_get(self, key: str, value: Any, keys: Iterable[str], seconds: float) -> dict[str, Any]:
        """Set a key, then `get` others, in one request: both reach the same server."""
        return self._request({"put": key, "value": value, "get": list(keys), "seconds": seconds}, seconds)["values"]

    def own_address(self) -> str:
        """Return the address that node 0 sees this node under."""
        return self._request({})["peer"]

    def clock_offset_seconds(self) -> float:
        """Return how far node 0's clock is ahead of ours, from the quickest of a few answers."""
        tries = []
        for _ in range(3):
            before = time.time()
            theirs = self._request({})["time"]
            after = time.time()
            tries.append((after - before, theirs - (before + after) / 2))
        return min(tries)[1]

    def _request(self, request: dict[str, Any], seconds: float = 0.0) -> dict[str, Any]:
        line = orjson.dumps({"token": self.token, **request}) + b"\n"
        deadline = time.monotonic() + self.connect_seconds
        pause = _FIRST_RETRY_SECONDS
        while True:
            try:
                # The name of a pod is known only some time after the pod runs.
                with socket.create_connection(self.address, timeout=_ANSWER_SECONDS) as connection:
                    connection.settimeout(seconds + _ANSWER_SECONDS)
                    connection.sendall(line)
                    answer = connection.makefile("rb").readline(_MAX_LINE_BYTES)
                if answer:
                    body = orjson.loads(answer)
                    break
                heard = "did not answer"
            except OSError:
                heard = "did not answer"
            except orjson.JSONDecodeError:
                heard = "answered something else than an agent does"
            if time.monotonic() > deadline:
                host, port = self.address
                raise TrainshedError(
                    f"node 0 {heard} for {self.connect_seconds:.0f} s",
                    where=f"{host}:{port}",
                    hint="is it running, may nodes reach each other on this port, and does nothing else listen there?",
                )
            time.sleep(pause)
            pause = min(_LAST_RETRY_SECONDS, 1.5 * pause)
        if "error" in body:
            raise TrainshedError(body["error"], where=f"{self.address[0]}:{self.address[1]}")
        return body
