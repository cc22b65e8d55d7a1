"""Chaos on the Slurm line: whatever is killed, cancelled, full, corrupted or late, it ends right or says why.

Right means bit for bit: the losses, the exported weights and every committed artefact are those of a run that nobody
disturbed. CHAOS_SEED chooses other victims; the moments hang on the machine.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from support import TESTS
from support.clusters.slurm_cluster import SlurmCluster
from support.clusters.slurm_runs import NO_CODE, SlurmRun, SlurmRuns
from support.recipes.text_recipes import write_script, write_small_recipe
from trainshed.cli import run_cli
from trainshed.launch.job import Job
from trainshed.observe.event_log import read_steps
from trainshed.recipe import load_recipe
from trainshed.storage import LocalStore, Manifest
from trainshed.storage.manifest import MANIFEST
from trainshed.workflow.submit import build_job

pytestmark = [pytest.mark.slurm, pytest.mark.full, pytest.mark.timeout(3600)]

SEED = int(os.environ.get("CHAOS_SEED", "19"))
BLOWS = {"tokenise": 4, "prepare": 4, "train": 8, "export": 3}
"""How often each stage is struck; the first one would have them all otherwise."""
MOST_SUBMISSIONS = 30
KEYS = ("layout.dp=2", "train.steps=40", "train.global_batch=4", "checkpoint.every=4", "data.shards=4", "export={}")


def make_job(runs: SlurmRuns, *overrides: str, **cluster: Any) -> Job:
    """A line with a stage of every kind: text by a script, two tokenising parts, two training nodes, an export."""
    write_script(runs.folder)
    recipe = load_recipe(str(write_small_recipe(runs.folder)), [*KEYS, *overrides])
    limits = {"grace_seconds": 60, "restarts": 2, "cpu_stage_cpus": 2, "cpu_stage_memory": "500Mi", "prepare_parts": 2}
    there = runs.cluster(limits=limits, **cluster)
    return build_job(recipe, there, code=NO_CODE)


def send(runs: SlurmRuns, job: Job) -> SlurmRun:
    return runs.submit(replace(job, code=None))


def ended(run: SlurmRun) -> bool:
    return all(state.state not in ("waiting", "running") for state in run.states().values())


def succeeded(run: SlurmRun) -> bool:
    return all(state.state == "done" for state in run.states().values())


def losses(folder: Path) -> list[float]:
    return [step["loss"] for step in read_steps(LocalStore(folder), "")]


def check_committed(store: Path) -> int:
    """Hold every byte of whatever has a manifest against it; returns how many artefacts there are."""
    count = 0
    for file in store.rglob(MANIFEST):
        folder = LocalStore(file.parent)
        Manifest.read(folder, MANIFEST).verify_files(folder, "files" if (file.parent / "files").is_dir() else "")
        count += 1
    return count


@pytest.fixture(scope="module")
def undisturbed(slurm_daemons: SlurmCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmRun]:
    """The same line, left alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_CONF", slurm_daemons.conf)
        runs = SlurmRuns(slurm_daemons, tmp_path_factory.mktemp("undisturbed"))
        run = send(runs, make_job(runs))
        run.until(lambda: ended(run), "the line to end", 1200)
        assert succeeded(run), run.all_logs()
        yield run
        runs.end()


def check_equal(run: SlurmRun, undisturbed: SlurmRun) -> None:
    """Hold what a disturbed line left against the other, bit for bit."""
    assert losses(run.folder) == losses(undisturbed.folder)
    ours, theirs = (load_file(folder / "export" / "model.safetensors") for folder in (run.folder, undisturbed.folder))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert check_committed(run.folder.parents[2]) >= 5
    assert run_cli(["checkpoints", str(run.folder), "--verify"]) == 0


class Monkey(threading.Thread):
    """Kills processes of some jobs, and cancels and requeues the jobs, at random moments until it has had enough."""

    def __init__(self, slurm: SlurmCluster, seed: int) -> None:
        super().__init__(daemon=True)
        self.slurm, self.random = slurm, random.Random(seed)
        self.stages: dict[str, str] = {}
        """Of the jobs, by their id."""
        self.done: Counter[str] = Counter()
        self.struck: Counter[str] = Counter()
        self.at_rest = threading.Event()
        self.submissions = 0

    def run(self) -> None:
        while not self.at_rest.wait(self.random.uniform(0.3, 3.0)):
            action = self.random.choices((self.kill, self.requeue, self.cancel), (8, 1, 1))[0]
            with suppress(AssertionError, OSError):  # a job that has just ended
                action()
            if all(self.struck[stage] >= blows for stage, blows in BLOWS.items()):
                self.at_rest.set()

    def aim(self, run: SlurmRun) -> None:
        """Go for the jobs of a line too."""
        self.stages |= {id: stage for stage, id in run.submitted.ids.items()}
        self.submissions += 1

    def strike(self, job: str, what: str) -> None:
        self.struck[self.stages[job]] += 1
        self.done[f"{what} of {self.stages[job]}"] += 1

    def targets(self) -> set[str]:
        """The jobs whose stage has not had its share."""
        return {job for job, stage in self.stages.items() if self.struck[stage] < BLOWS.get(stage, 0)}

    def processes(self) -> list[tuple[int, str, str]]:
        """Every process of the jobs, its kind and its job, whatever it is: shells, srun, agents, workers, ranks."""
        seen, targets = [], self.targets()
        for process in Path("/proc").iterdir():
            if not process.name.isdecimal():
                continue
            with suppress(OSError):
                variables = dict(
                    word.partition("=")[::2]
                    for word in (process / "environ").read_bytes().decode(errors="replace").split("\0")
                )
                names = (variables.get("SLURM_JOB_ID"), variables.get("SLURM_ARRAY_JOB_ID"))
                ours = [name for name in names if name in targets]
                if ours and variables.get("SLURM_CONF") == self.slurm.conf:
                    line = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    seen.append((int(process.name), kind_of(line), str(ours[0])))
        return seen

    def kill(self) -> None:
        victims = self.processes()
        if not victims:
            return
        # By kind first: there are more shells than ranks.
        kind = self.random.choice(sorted({kind for _, kind, _ in victims}))
        process, _, job = self.random.choice(sorted(victim for victim in victims if victim[1] == kind))
        os.kill(process, signal.SIGKILL)
        self.strike(job, f"kill -9 {kind}")

    def requeue(self) -> None:
        job = self.random.choice(self.running())
        self.slurm.run("scontrol", "requeue", job)
        self.strike(job, "requeue")

    def cancel(self) -> None:
        job = self.random.choice(self.running())
        self.slurm.run("scancel", job)
        self.strike(job, "scancel")

    def running(self) -> list[str]:
        names = self.slurm.run("squeue", "--noheader", "--states=running", "--format=%A").split()
        mine = sorted(set(names) & self.targets())
        assert mine, "nothing runs"
        return mine


def kind_of(line: str) -> str:
    """Return which part of the line a process is, by its command line."""
    for words in ("agent train", "agent", "worker train", "worker", "srun", "slurm_script", "bash"):
        if words in line:
            return words
    return "other"


def test_random_kills_cancels_and_requeues_change_no_bit(
    slurm_runs: SlurmRuns, undisturbed: SlurmRun, record_property: Any
) -> None:
    job = make_job(slurm_runs)
    monkey = Monkey(slurm_runs.slurm, SEED)
    monkey.start()
    try:
        for _ in range(MOST_SUBMISSIONS):
            run = send(slurm_runs, job)
            monkey.aim(run)
            run.until(lambda run=run: ended(run), "the line to end", 1200)
            check_committed(run.folder.parents[2])
            if succeeded(run) and monkey.at_rest.is_set():
                break
            bad = [state for state in run.states().values() if state.state in ("failed", "cancelled")]
            assert all(state.reason for state in bad), f"it stops without a reason: {bad}"
        else:
            pytest.fail(f"it never ends: {dict(monkey.done)}\n{run.all_logs()}")
    finally:
        monkey.at_rest.set()
        monkey.join()
    did = f"seed {SEED}: {dict(monkey.done)} in {monkey.submissions} submissions"
    record_property("chaos", did)
    sys.stderr.write(f"chaos with {did}\n")
    assert all(monkey.struck[stage] >= blows for stage, blows in BLOWS.items()), monkey.struck
    check_equal(run, undisturbed)


def test_a_disk_that_is_full_stops_the_line_with_a_reason_and_with_room_it_goes_on(
    slurm_runs: SlurmRuns, undisturbed: SlurmRun
) -> None:
    # A file system in memory on the one node that all stages run on; another node would not see it.
    store = slurm_runs.folder / "store"
    artefacts = store / "artefacts"
    mounted = f"mkdir -p {artefacts} && (mountpoint -q {artefacts} || mount -t tmpfs -o size=64k tmpfs {artefacts})"
    slurm = {"options": ["--nodelist=n3"]}
    alone = {"nodes": {"default": 1}, "slurm": slurm}
    full = send(slurm_runs, make_job(slurm_runs, setup=[mounted], **alone))
    full.until(lambda: ended(full), "the line to end", 1200)
    try:
        assert not succeeded(full), "64 KiB hold no tokens"
        assert "disk is full" in full.all_logs(), full.all_logs()
        wider = f"mount -o remount,size=64m {artefacts}"
        run = send(slurm_runs, make_job(slurm_runs, setup=[wider], **alone))
        run.until(lambda: ended(run), "the line to end", 1200)
        assert succeeded(run), run.all_logs()
        assert losses(run.folder) == losses(undisturbed.folder)
        assert run_cli(["checkpoints", str(run.folder), "--verify"]) == 0
    finally:
        daemon = Path(slurm_runs.slurm.folder, "slurmd-n3.pid").read_text().strip()
        subprocess.run(["nsenter", "--target", daemon, "--mount", "umount", "-l", artefacts], check=True)


@pytest.mark.parametrize("damage", ["flipped", "cut"])
def test_a_shard_that_is_corrupted_is_named_or_made_again(
    slurm_runs: SlurmRuns, undisturbed: SlurmRun, damage: str
) -> None:
    job = make_job(slurm_runs)
    run = send(slurm_runs, job)
    run.wait("prepare", 1200)
    for id in run.submitted.ids.values():
        slurm_runs.slurm.run("scancel", "--quiet", id)
    run.until(lambda: ended(run), "the jobs to end")
    shard = max((run.folder.parents[2] / "artefacts").rglob("*.bin"), key=lambda file: file.stat().st_size)
    content = bytearray(shard.read_bytes())
    if damage == "flipped":
        content[len(content) // 2] ^= 1
        shard.write_bytes(content)
    else:
        shard.write_bytes(content[:-8])
    again = send(slurm_runs, job)
    again.until(lambda: ended(again), "the line to end", 1200)
    if succeeded(again):
        check_equal(again, undisturbed)
    else:
        bad = [state for state in again.states().values() if state.state == "failed"]
        assert bad, again.states()
        assert shard.name in again.all_logs() or shard.parent.name in again.all_logs(), again.all_logs()


def test_clocks_that_jump_change_no_bit(slurm_runs: SlurmRuns, undisturbed: SlurmRun) -> None:
    clock = str(TESTS / "support" / "clusters" / "jumping_clock")
    run = send(slurm_runs, make_job(slurm_runs, environment={"PYTHONPATH": clock}))
    run.until(lambda: ended(run), "the line to end", 1200)
    assert succeeded(run), run.all_logs()
    check_equal(run, undisturbed)
    assert run_cli(["status", str(run.folder)]) == 0
    assert run_cli(["metrics", str(run.folder)]) == 0
