"""Chaos on the Ray line: kills, a full disk, a failing bucket, a corrupted shard, a clock that jumps.

Each line ends as the undisturbed one does, bit by bit, or it stops with a reason and is started again, as a person
would. Whatever is committed, is right at every moment. All choices follow from a seed.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest

from support import TESTS
from support.runs.minio_seed import (
    CHECKPOINTS,
    MinioSeed,
    RayLine,
    check_committed,
    fill_bucket,
    losses,
    megatron_sources,
    processes_of,
    role_of,
    same_weights,
)
from support.servers.faulty_proxy import FaultyProxy, faulty
from support.servers.s3_server import S3Server
from trainshed.cli import run_cli
from trainshed.errors import InputError
from trainshed.observe.event_log import read_events
from trainshed.storage import LocalStore

pytestmark = [pytest.mark.ray, pytest.mark.s3, pytest.mark.full, pytest.mark.timeout(3600)]
STEPS = 12
AIMED = {"torch": ("rank", "rank", "agent", "actor"), "megatron": ("rank", "rank", "uploader", "uploader", "script")}
"""Whom kills are aimed at, by engine: they live for seconds, and kills at random moments seldom meet them."""
CLOCK = TESTS / "support" / "clusters" / "jumping_clock"
KILLS = int(os.environ.get("TRAINSHED_CHAOS_KILLS", "8"))
SEEDS = [int(word) for word in os.environ.get("TRAINSHED_CHAOS_SEEDS", "1,2").split(",")]
AWAY_SECONDS = 60.0
FULL_SECONDS = 5.0


@dataclass
class Tally:
    """What happened to a line."""

    kills: Counter[str] = field(default_factory=Counter)
    others: Counter[str] = field(default_factory=Counter)
    starts: int = 0
    reasons: list[str] = field(default_factory=list)

    def text(self, proxy: FaultyProxy) -> str:
        return json.dumps(
            {
                "kills": dict(self.kills),
                "others": dict(self.others),
                "starts": self.starts,
                "requests": proxy.requests,
                "faults": dict(proxy.faults),
                "reasons": self.reasons,
            },
            indent=1,
        )


@contextmanager
def small_disk(folder: Path, megabytes: int) -> Iterator[Path]:
    """A disk of its own for the store."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(folder)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("only root may mount a tmpfs")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


class Chaos:
    """One line, disturbed until it has had its share, and started again whenever it has stopped."""

    def __init__(self, seed: MinioSeed, proxy: FaultyProxy, random: Random) -> None:
        self.seed, self.proxy, self.random, self.tally = seed, proxy, random, Tally()
        self.pending = ["kill"] * KILLS + ["bucket away", "full disk", "corrupted shard"]
        self.aimed = list(AIMED["torch" if seed.megatron is None else "megatron"])
        for waiting in (self.pending, self.aimed):
            random.shuffle(waiting)
        self.line = self._start()

    def run(self) -> RayLine:
        """Go on until the line has ended well."""
        while True:
            pause = time.monotonic() + self.random.uniform(1, 25)
            while time.monotonic() < pause and not self.line.has_ended():
                time.sleep(0.2)
                if self.aimed and self._killed(self.aimed[-1]):
                    self.aimed.pop()
            if self.line.has_ended():
                states = self.line.ended()
                check_committed(self.seed)
                if {state.state for state in states.values()} == {"done"}:
                    return self.line
                self._note_reason()
                self.line = self._start()
            elif self.pending:
                self._disturb(self.pending.pop())

    def _start(self) -> RayLine:
        self.tally.starts += 1
        assert self.tally.starts < 40, self.tally.reasons
        while True:
            try:
                return RayLine(self.seed.job(f"train.steps={STEPS}"))
            except InputError as error:  # its driver was killed a moment ago
                if "already on the cluster" not in error.what:
                    raise
                time.sleep(1)

    def _note_reason(self) -> None:
        failed = [state for state in self.line.states().values() if state.state == "failed"]
        assert failed, self.line.states()
        assert all(state.reason.strip() for state in failed), "nothing ends in silence"
        self.tally.reasons += [f"{state.stage}: {state.reason.splitlines()[0][:160]}" for state in failed]

    def _disturb(self, what: str) -> None:
        if what == "kill":
            self._kill()
        elif what == "bucket away":
            self.proxy.is_away.set()
            time.sleep(AWAY_SECONDS)
            self.proxy.is_away.clear()
            self.tally.others[what] += 1
        elif what == "full disk":
            self._fill_disk()
        elif self._corrupt():
            self.tally.others[what] += 1
        else:
            self.pending.insert(0, what)  # there is none yet

    def _roles(self) -> dict[str, list[int]]:
        roles: dict[str, list[int]] = {}
        for id, words in processes_of(self.line).items():
            roles.setdefault(role_of(words), []).append(id)
        return roles

    def _kill(self) -> None:
        """Kill somebody at random; the driver seldom, and not in a start in which it is alone."""
        roles = self._roles()
        others = sorted(set(roles) - {"driver"})
        if not others or not self._killed(self.random.choice(others if self.random.random() < 0.8 else sorted(roles))):
            self.pending.append("kill")

    def _killed(self, role: str) -> bool:
        """Kill one of a role, some moment after it is seen; False if there is none."""
        if not self._roles().get(role):
            return False
        time.sleep(self.random.uniform(0, 2))
        ids = sorted(self._roles().get(role, ()))
        with suppress(ProcessLookupError):
            if ids:
                os.kill(self.random.choice(ids), signal.SIGKILL)
                self.tally.kills[role] += 1
                return True
        return False

    def _fill_disk(self) -> None:
        ballast = self.seed.store / "ballast"
        with suppress(OSError), ballast.open("wb") as file:
            while True:
                file.write(bytes(2**20))
                file.flush()
        time.sleep(FULL_SECONDS)
        ballast.unlink()
        self.tally.others["full disk"] += 1

    def _corrupt(self) -> bool:
        """Change a byte of a token shard while nobody trains, and put it back when it was noticed."""
        shards = sorted(self.seed.store.glob("artefacts/tokens/**/*.bin"))
        if not shards:
            return False
        for id, words in processes_of(self.line).items():
            if role_of(words) == "driver":
                with suppress(ProcessLookupError):
                    os.kill(id, signal.SIGKILL)
        self.line.ended()
        if {state.state for state in self.line.states().values()} == {"done"}:
            return False
        self._note_reason()
        shard = self.random.choice(shards)
        good = shard.read_bytes()
        position = self.random.randrange(len(good))
        shard.write_bytes(good[:position] + bytes([good[position] ^ 1]) + good[position + 1 :])
        self.line = self._start()
        states = self.line.ended()
        # Found before a step was trained on it, or made anew.
        if any(state.state == "failed" for state in states.values()):
            self._note_reason()
            assert not any(state.stage == "train" and state.state == "done" for state in states.values())
        if shard.exists():
            shard.write_bytes(good)
        self.line = self._start()
        return True


@pytest.fixture
def seed(address: str, s3_server: S3Server, s3_bucket: str, tmp_path: Path) -> Iterator[MinioSeed]:
    fill_bucket(s3_bucket, tmp_path)
    variables = s3_server.environment()
    endpoint = variables.pop("AWS_ENDPOINT_URL_S3")
    with small_disk(tmp_path / "disk", 400) as disk:
        yield MinioSeed(s3_bucket, endpoint, address, tmp_path, variables, store=disk)


@pytest.mark.parametrize("engine", ["torch", "megatron"])
def test_a_line_in_chaos_ends_as_if_nothing_had_happened(engine: str, seed: MinioSeed, tmp_path: Path) -> None:
    if engine == "megatron":
        seed = replace(seed, megatron=megatron_sources(tmp_path))
    undisturbed = RayLine(seed.job(f"train.steps={STEPS}", id="undisturbed"))
    states = undisturbed.ended()
    assert {state.state for state in states.values()} == {"done"}, undisturbed.log()[-6000:]
    expected, export = losses(undisturbed.run), tmp_path / "expected"
    shutil.copytree(undisturbed.run / "export", export)
    shutil.rmtree(seed.store / "artefacts")
    shutil.rmtree(seed.store / "runs")
    for number in SEEDS:
        with faulty(seed.endpoint, rate=0.05, seed=number) as proxy:
            chaos = Chaos(replace(seed, endpoint=proxy.url), proxy, Random(number))
            line = chaos.run()
            sys.stderr.write(f"{engine}, seed {number}: {chaos.tally.text(proxy)}\n")
            assert set(AIMED[engine]) <= set(chaos.tally.kills), "a line that ends too soon proves little"
            got = losses(line.run)
            if engine == "torch":
                assert got == {step: loss for step, loss in expected.items() if step in got}
            assert max(got) == max(expected)
            assert same_weights(export, line.run / "export")
        shutil.rmtree(seed.store / "artefacts")
        shutil.rmtree(seed.store / "runs")
        seed = replace(seed, checkpoints=f"{CHECKPOINTS}-{number}")


def test_clocks_that_jump_and_a_killed_rank_change_no_bit(seed: MinioSeed) -> None:
    undisturbed = RayLine(seed.job(f"train.steps={STEPS}", id="undisturbed"))
    assert {state.state for state in undisturbed.ended().values()} == {"done"}, undisturbed.log()[-6000:]
    line, is_killed = RayLine(seed.job(f"train.steps={STEPS}", f"cluster.environment.PYTHONPATH={CLOCK}")), False
    while not line.has_ended():
        ranks = [id for id, words in processes_of(line).items() if role_of(words) == "rank"]
        if ranks and not is_killed and losses(line.run):
            os.kill(ranks[0], signal.SIGKILL)
            is_killed = True
        time.sleep(0.1)
    assert {state.state for state in line.ended().values()} == {"done"}, line.log()[-6000:]
    assert is_killed, "it has ended before anybody was killed"
    check_committed(seed)
    assert losses(line.run) == losses(undisturbed.run)
    assert same_weights(undisturbed.run / "export", line.run / "export")
    # The clocks did lie. (The node that is a day ahead writes no events.)
    times = [event["time"] for event in read_events(LocalStore(line.run), "")]
    assert any(later < earlier - 3000 for earlier, later in pairwise(times))
    assert run_cli(["status", str(line.run)]) == 0
    assert run_cli(["metrics", str(line.run)]) == 0
