"""Watches the ranks of a foreign engine on one node, in the place of our agent: its devices, and whether it stalls.

A job file: the launcher of an engine (`engines/launch.py`) starts it beside torchrun on every node, in the image of the
engine, and it ends with torchrun. It needs the standard library of Python 3.8 and nothing of Trainshed. It changes
nothing in the training: it reads, and writes events and what explains them.

    <run>/events/attempt-0001/000001.jsonl             `devices`, `alarm` and `stall` events
    <run>/health/attempt-0001/devices-00001.json       what the devices of a node other than the first report
    <run>/health/attempt-0001/network-00001.json       which network NCCL names on a node, and what is wrong with it
    <run>/health/attempt-0001/stall.json               the first node asks all nodes for the stacks of their ranks
    <run>/health/attempt-0001/stacks-00001.json        the answer of a node
    <run>/health/attempt-0001/nccl-rank-3              PyTorch's flight recorder of a rank, which NCCL's watchdog writes
                                                       too before it ends a rank

NCCL's logs are read until they have shown the fabric that `--network` describes; the first node names the nodes on
which they do not.

Nobody prints what an engine is doing but its log: when no node's log has grown for `--quiet-seconds`, the first node
asks for stacks and flight records, and says which ranks the others wait for. A rank that is stopped (SIGSTOP) is
reported by its own node at once.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import io
import json
import os
import pickle
import sys
import time
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import Any, Callable, Iterable, Mapping  # noqa: UP035 - Python 3.8

if __package__:
    from trainshed.observe.devices import DeviceWatch, NodeSample, open_gpus, read_node, unread_gpus_problem
    from trainshed.observe.nccl_log import ExpectedNetwork, NetworkWatch, network_alarm
    from trainshed.observe.process_stacks import RankStack, find_ranks, process_state, read_environment, read_stack
    from trainshed.observe.stall_advice import activity_of, short_frame
else:  # a file beside its helpers, in the image of a foreign engine
    sys.path.insert(0, str(Path(__file__).parent))
    from devices import (  # pyrefly: ignore
        DeviceWatch,
        NodeSample,
        open_gpus,
        read_node,
        unread_gpus_problem,
    )
    from nccl_log import ExpectedNetwork, NetworkWatch, network_alarm  # pyrefly: ignore
    from process_stacks import (  # pyrefly: ignore
        RankStack,
        find_ranks,
        process_state,
        read_environment,
        read_stack,
    )
    from stall_advice import activity_of, short_frame  # pyrefly: ignore

NCCL_DUMP = "nccl-rank-"
STALL_FILE = "stall.json"
PIPE_VARIABLE = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"
"""PyTorch reads a pipe of this name and the rank's number: a line in it makes NCCL's flight recorder write itself."""
_DUMP_VARIABLES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
_DUMP_SECONDS = 20.0  # PyTorch 2.11 takes five
_NAMED_RANKS = 8


class Options(argparse.Namespace):
    """What the launcher says, and how often to look: a limit that is short needs a close look."""

    run: str
    attempt: int
    node: int
    nodes: int
    ranks_per_node: int
    torchrun: int
    quiet_seconds: float
    network: str
    nccl_log: str
    look_seconds: float
    sample_seconds: float
    stopped_seconds: float


def read_options(arguments: list[str]) -> Options:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", required=True)
    for name in ("attempt", "node", "nodes", "ranks-per-node", "torchrun"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument(
        "--quiet-seconds", type=float, required=True, help="a log that does not grow for so long stalls"
    )
    parser.add_argument("--network", default="", help="a file that says what NCCL's log must show")
    parser.add_argument("--nccl-log", default="", help="how the paths of NCCL's logs on this node begin")
    options = parser.parse_args(arguments, namespace=Options())
    options.look_seconds = min(10.0, options.quiet_seconds / 4)
    options.sample_seconds = min(60.0, options.quiet_seconds)
    options.stopped_seconds = min(10.0, options.quiet_seconds)
    return options


class EventLog:
    """Appends events to a segment of its own in the run's event log (`observe/event_log.py` describes the files)."""

    def __init__(self, folder: Path, attempt: int) -> None:
        self._folder, self._attempt = folder, attempt
        self._descriptor: int | None = None

    def emit(self, kind: str, **values: Any) -> None:
        """Write one event."""
        if self._descriptor is None:
            self._descriptor = self._open_next()
        event = {"v": 1, "time": time.time(), "attempt": self._attempt, "rank": None, "kind": kind, "step": None}
        event.update((key, value) for key, value in values.items() if value is not None or key == "collective")
        os.write(self._descriptor, json.dumps(event).encode() + b"\n")

    def _open_next(self) -> int:
        self._folder.mkdir(parents=True, exist_ok=True)
        taken = [int(name[:-6]) for name in os.listdir(str(self._folder)) if name[:-6].isdecimal()]
        number = max(taken, default=0)
        while True:
            number += 1
            path = self._folder / f"{number:06d}.jsonl"
            try:
                return os.open(str(path), os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL, 0o666)
            except FileExistsError:
                continue


class NodeWatcher:
    """One node's watch; `look` is called from time to time."""

    def __init__(self, options: Options, clock: Callable[[], float] = time.monotonic) -> None:
        self._options, self._clock = options, clock
        attempt = f"attempt-{options.attempt:04d}"
        run = Path(options.run)
        self._health, self._logs = run / "health" / attempt, run / "logs" / attempt
        self._events = EventLog(run / "events" / attempt, options.attempt)
        self._is_first = options.node == 0
        self._gpus = open_gpus()
        self._gpu_problem = unread_gpus_problem() if self._gpus is None else None
        self._devices = DeviceWatch(options.nodes, options.ranks_per_node)
        self._sampled_at = self._ranks_at = self._stall_looked_at = float("-inf")
        self._ranks: dict[int, int] = {}
        self._network = _network_watch(options)
        self._has_told_network = False
        self._networks: dict[str, dict[str, Any]] = {}
        """What the nodes have said of their networks, by host."""
        self._stopped_since: dict[int, float] = {}
        self._reported_stops: set[int] = set()
        self._log_sizes: dict[str, int] = {}
        self._grown_at = clock()
        self._stall_number = self._answered_number = 0
        self._asked_at = float("-inf")
        self._is_waiting = False
        """For the answers of the other nodes."""
        self._last_report: str | None = None

    def look(self) -> None:
        """Look once at everything that is due."""
        now = self._clock()
        if now - self._ranks_at >= 6 * self._options.look_seconds or not self._ranks:
            self._ranks_at, self._ranks = now, find_ranks(self._options.run)
        if now - self._sampled_at >= self._options.sample_seconds:
            self._sampled_at = now
            self._sample_devices()
            self._look_at_network(now)
        self._look_for_stopped_ranks(now)
        if self._is_first:
            self._look_at_logs(now)
        self._answer_stall(now)

    def _sample_devices(self) -> None:
        if self._gpus is None and self._gpu_problem is None:
            return
        sample = read_node(self._gpus, _host(), self._gpu_problem)
        if not self._is_first:
            _write_json(self._health / f"devices-{self._options.node:05d}.json", sample.to_plain())
            return
        samples = {0: sample}
        for node in range(1, self._options.nodes):
            body = _read_json(self._health / f"devices-{node:05d}.json")
            if body is not None:
                samples[node] = NodeSample.from_plain(body)
        for kind, values in self._devices.update(samples):
            self._events.emit(kind, **values)

    def _look_at_network(self, now: float) -> None:
        """Say once of every node whose log does not show the fabric that it does not."""
        if self._network is None:
            return
        expected, watch = self._network
        watch.look(now)
        if watch.verdict is not None and not self._has_told_network:
            self._has_told_network = True
            own = self._health / f"network-{self._options.node:05d}.json"
            _write_json(own, {"host": _host(), **watch.verdict})
        if not self._is_first or len(self._networks) == self._options.nodes:
            return
        bodies = [_read_json(self._health / f"network-{node:05d}.json") for node in range(self._options.nodes)]
        answers = {body["host"]: body for body in bodies if body is not None and body["host"] not in self._networks}
        self._networks.update(answers)
        alarm = network_alarm(expected, answers)
        if alarm is not None:
            sys.stderr.write(f"trainshed: {alarm['what']}\n")
            self._events.emit("alarm", **alarm)

    def _look_for_stopped_ranks(self, now: float) -> None:
        stopped = {rank: pid for rank, pid in self._ranks.items() if process_state(pid) in ("T", "t")}
        self._stopped_since = {rank: self._stopped_since.get(rank, now) for rank in stopped}
        self._reported_stops &= set(stopped)
        for rank, pid in stopped.items():
            if rank in self._reported_stops or now - self._stopped_since[rank] < self._options.stopped_seconds:
                continue
            self._reported_stops.add(rank)
            self._report(
                [rank],
                None,
                f"rank {rank} on {_host()} is stopped (SIGSTOP), and training waits for it: `kill -CONT {pid}` lets it "
                "go on",
            )

    def _look_at_logs(self, now: float) -> None:
        """Ask all nodes for stacks when no log has grown for long; say what they show when they have answered."""
        sizes = {}
        if self._logs.is_dir():
            with os.scandir(str(self._logs)) as entries:
                sizes = {entry.name: entry.stat().st_size for entry in entries if entry.name.startswith("node-")}
        if self._is_waiting:  # a rank whose flight recorder is asked prints a line about it
            self._log_sizes = sizes
        elif sizes != self._log_sizes:
            self._log_sizes, self._grown_at = sizes, now
            if self._stall_number:
                self._forget_stall()
            return
        # Again after the same time: the reason may be another one by then.
        if not self._is_waiting and now - max(self._grown_at, self._asked_at) >= self._options.quiet_seconds:
            self._stall_number, self._asked_at = max(self._stall_number + 1, int(time.time())), now
            self._is_waiting = True
            _write_json(self._health / STALL_FILE, {"number": self._stall_number})
        # The other nodes look for the question once a minute.
        if self._is_waiting and (
            self._all_answered() or now - self._asked_at >= 2 * self._options.sample_seconds + _DUMP_SECONDS
        ):
            self._is_waiting = False
            self._explain_stall()

    def _forget_stall(self) -> None:
        """The log grows again: what was written down about the stall would explain another failure wrongly."""
        self._stall_number, self._is_waiting, self._last_report = 0, False, None
        for name in [STALL_FILE, *(f"stacks-{node:05d}.json" for node in range(self._options.nodes))]:
            _remove(self._health / name)
        for path in self._health.glob(f"{NCCL_DUMP}*"):
            _remove(path)

    def _answer_stall(self, now: float) -> None:
        """Write the stacks of this node's ranks where the first node asks for them."""
        if not self._is_first and now - self._stall_looked_at < self._options.sample_seconds:
            return
        self._stall_looked_at = now
        body = _read_json(self._health / STALL_FILE) if not self._is_first else {"number": self._stall_number}
        number = body["number"] if body is not None else 0
        if number in (0, self._answered_number):
            return
        self._answered_number = number
        self._ranks = find_ranks(self._options.run)
        ask_flight_recorders(self._ranks)
        stacks = [asdict(read_stack(rank, pid)) for rank, pid in sorted(self._ranks.items())]
        _write_json(self._health / f"stacks-{self._options.node:05d}.json", {"number": number, "ranks": stacks})

    def _answers(self) -> dict[int, list[RankStack]]:
        answers = {}
        for node in range(self._options.nodes):
            body = _read_json(self._health / f"stacks-{node:05d}.json")
            if body is not None and body["number"] == self._stall_number:
                answers[node] = [RankStack(**stack) for stack in body["ranks"]]
        return answers

    def _all_answered(self) -> bool:
        return len(self._answers()) == self._options.nodes

    def _explain_stall(self) -> None:
        answers = self._answers()
        stacks = {stack.rank: stack for ranks in answers.values() for stack in ranks}
        silent = [node for node in range(self._options.nodes) if node not in answers]
        ranks, collective, text = explain_stall(
            stacks,
            read_dumps(self._health),
            self._options.nodes * self._options.ranks_per_node,
            f"no log has grown for {self._options.quiet_seconds:.0f} s",
        )
        if silent:
            text += f"; {len(silent)} nodes have not answered (first of all node {silent[0]})"
        if text != self._last_report:
            self._last_report = text
            self._report(ranks, collective, text)

    def _report(self, ranks: list[int], collective: str | None, what: str) -> None:
        sys.stderr.write(f"trainshed: {what}\n")
        self._events.emit("stall", ranks=ranks, collective=collective, what=what)


def _network_watch(options: Options) -> tuple[ExpectedNetwork, NetworkWatch] | None:
    """Return what NCCL's logs must show and who looks for it; None where nothing is expected."""
    body = _read_json(Path(options.network)) if options.network and options.nccl_log else None
    if body is None:
        return None
    expected = ExpectedNetwork.from_plain(body)
    return expected, NetworkWatch(expected, options.nccl_log)


def explain_stall(
    stacks: Mapping[int, RankStack], dumps: Mapping[int, Any], world_size: int, reason: str
) -> tuple[list[int], str | None, str]:
    """Return the ranks that the others wait for, the collective in which they do, and a sentence about both."""
    if not stacks:
        return [], None, f"{reason}: no rank has a process; the log says how far the start has come"
    activities = {rank: activity_of(stack.stack, stack.state) for rank, stack in stacks.items()}
    late, collective = compare_dumps(dumps)
    waiting = [rank for rank, activity in activities.items() if activity.name in ("collective", "rendezvous", "gpu")]
    busy = [rank for rank in activities if rank not in waiting and activities[rank].name != "unknown"]
    missing = [rank for rank in range(world_size) if rank not in stacks]
    blamed = missing or (late if late and len(late) < world_size else []) or (busy if waiting else [])
    if collective is None:
        named = [activity.text for activity in activities.values() if activity.name == "collective"]
        collective = max(sorted(set(named)), key=named.count).rpartition(" ")[2] if named else None
    texts = []
    for rank in blamed[:_NAMED_RANKS]:
        stack = stacks.get(rank)
        if stack is None:
            texts.append(f"rank {rank} has no process any more")
            continue
        activity = activities[rank]
        at = f" at {short_frame(stack.stack[-1])}" if stack.stack and activity.name != "code" else ""
        unread = f" (no stack: {stack.problem})" if not stack.stack and stack.problem else ""
        texts.append(f"rank {rank} on {stack.host} {activity.text}{at}{unread}")
    others = [rank for rank in waiting if rank not in blamed]
    if not blamed:
        problems = sorted({stack.problem for stack in stacks.values() if stack.problem})
        texts.append("no rank stands out" + (f": {problems[0]}" if problems else ""))
    elif others:
        texts.append(f"{len(others)} ranks wait{f' in {collective}' if collective else ' for other ranks'}")
    advice = next((activities[rank].advice for rank in blamed if rank in activities and activities[rank].advice), None)
    return blamed, collective, f"{reason}: {'; '.join(texts)}" + (f". {advice}" if advice else "")


def compare_dumps(dumps: Mapping[int, Any]) -> tuple[list[int], str | None]:
    """Return the ranks that have begun fewer collectives of a group than others, and the one that they have not begun.

    `observe/health.py` does this in full; here are only the figures that a first report needs.
    """
    begun: dict[str, dict[int, int]] = {}
    unfinished: dict[tuple[str, int], str] = {}
    members: dict[str, list[int]] = {}
    for rank, dump in dumps.items():
        for name, config in dump["pg_config"].items():
            members[name] = json.loads(config["ranks"])
        for entry in dump["entries"]:
            if entry["is_p2p"]:
                continue
            group, number = entry["process_group"][0], entry["collective_seq_id"]
            begun.setdefault(group, {})[rank] = max(number, begun.get(group, {}).get(rank, 0))
            if entry["state"] != "completed":
                op, description = entry["profiling_name"].rpartition(":")[2], entry["process_group"][1] or group
                unfinished[group, number] = f"{op} #{number} of group {description}"
    for group, last in begun.items():
        late = [rank for rank in members.get(group, last) if last.get(rank, 0) < max(last.values())]
        waits = [text for (name, number), text in sorted(unfinished.items()) if name == group]
        if late and waits:
            return late, waits[0]
    return [], next((text for _, text in sorted(unfinished.items())), None)


class _PlainUnpickler(pickle.Unpickler):
    """Loads no class and calls nothing: the recorder writes numbers, strings and containers."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        raise pickle.UnpicklingError(f"it asks for {module_name}.{global_name}")


def read_dumps(folder: Path) -> dict[int, Any]:
    """Return the dumps of PyTorch's flight recorder in a folder, by rank; those that are not whole are left out."""
    dumps = {}
    for path in sorted(folder.glob(f"{NCCL_DUMP}*")):
        number = path.name[len(NCCL_DUMP) :]
        if not number.isdecimal():
            continue
        try:
            dump = _PlainUnpickler(io.BytesIO(path.read_bytes())).load()
            dumps[int(number)] = {"pg_config": dump["pg_config"], "entries": dump["entries"]}
        except (OSError, pickle.UnpicklingError, EOFError, KeyError, TypeError, AttributeError, ValueError):
            continue
    return dumps


def ask_flight_recorders(ranks: Mapping[int, int], seconds: float = _DUMP_SECONDS) -> None:
    """Make NCCL's flight recorder of each rank write itself, and wait for that; ranks without NCCL have no pipe."""
    dumps: dict[Path, float] = {}
    for rank, pid in ranks.items():
        environment = read_environment(pid)
        pipe, dump = environment.get(PIPE_VARIABLE), next(filter(None, map(environment.get, _DUMP_VARIABLES)), None)
        if not pipe or not dump:
            continue
        file = Path(f"{dump}{rank}")
        before = _changed_at(file)
        try:
            descriptor = os.open(f"{pipe}{rank}.pipe", os.O_WRONLY | os.O_NONBLOCK)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENXIO):
                sys.stderr.write(f"trainshed: the flight recorder of rank {rank} cannot be asked: {error}\n")
            continue
        with contextlib.suppress(OSError):
            os.write(descriptor, b"1\n")
            dumps[file] = before
        os.close(descriptor)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and any(_changed_at(file) == before for file, before in dumps.items()):
        time.sleep(0.2)


def _changed_at(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except OSError:
        return 0.0


def _host() -> str:
    return os.environ.get("TRAINSHED_HOST") or os.environ.get("SLURMD_NODENAME") or os.uname().nodename


def _write_json(path: Path, body: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".part")
    partial.write_text(json.dumps(body))
    os.replace(str(partial), str(path))


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()


_SHIPPED = ("watch_node.py", "devices.py", "nccl_log.py", "process_stacks.py", "stall_advice.py")


def shipped_files() -> Iterable[Path]:
    """Return this file and its helpers, which lie beside it."""
    folder = Path(__file__).parent
    return [folder / name for name in _SHIPPED]


def main(arguments: list[str]) -> None:
    """Watch until torchrun has ended."""
    options = read_options(arguments)
    watcher = NodeWatcher(options)
    while process_state(options.torchrun) not in ("", "Z"):
        try:
            watcher.look()
        except Exception:  # it must go on, and must not disturb training
            traceback.print_exc()
        time.sleep(options.look_seconds)


if __name__ == "__main__":
    main(sys.argv[1:])
