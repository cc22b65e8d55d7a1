"""A save killed by a real SIGKILL before each single change it makes to the store, and the run started again."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from support.runs.checkpoint_parts import FOLDER, RUN, Ranks, by_rows, loaded, same, some_state
from trainshed.checkpoints.native.folder import latest_complete, list_checkpoints
from trainshed.storage import LocalStore
from trainshed.storage.attempts import take_attempt

# One process loads torch. A first child tells all the changes that a save makes; then one child for each is killed.
DRIVER = """
import os, signal, sys
sys.path.insert(0, sys.argv[2])
import torch.distributed.checkpoint
from support.runs.checkpoint_parts import RUN, HookedStore, Ranks, by_rows, some_state
from trainshed.storage import LocalStore
from trainshed.storage.attempts import take_attempt

def saves(folder, before):
    store = LocalStore(folder)
    attempt = take_attempt(store, RUN)
    assert Ranks(attempt, 2, keep=1).save(100, by_rows(some_state(1), 2)) == [None, None]
    hooked = HookedStore(store, lambda what, path: before(f"{what} {path.rpartition('/')[2]}"))
    assert Ranks(attempt, 2, {0: hooked, 1: hooked}, keep=1).save(200, by_rows(some_state(2), 2)) == [None, None]

def in_a_child(*arguments):
    child = os.fork()
    if child == 0:
        saves(*arguments)
        os._exit(0)
    return os.waitpid(child, 0)[1]

reading, writing = os.pipe()
assert in_a_child(f"{sys.argv[1]}/untouched", lambda place: os.write(writing, f"{place}\\n".encode())) == 0
os.close(writing)
for number, place in enumerate(sorted(set(os.fdopen(reading).read().splitlines()))):
    def kill(now):
        if now == place:
            os.kill(os.getpid(), signal.SIGKILL)
    assert in_a_child(f"{sys.argv[1]}/{number}", kill) == signal.SIGKILL
    print(number, place)
"""


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, str]:
    """A store for each place where a save of step 200 was killed, after step 100 had been committed."""
    folder = tmp_path_factory.mktemp("killed")
    command = [sys.executable, "-c", DRIVER, str(folder), str(Path(__file__).parents[2])]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    told = [line.split(" ", 1) for line in done.stdout.splitlines()]
    return {folder / number: place for number, place in told}


def test_every_phase_was_killed_once(places: dict[Path, str]) -> None:
    told = set(places.values())
    for rank in (0, 1):
        assert {f"{what} __{rank}_1.distcp" for what in ("open", "write", "publish")} <= told
    assert {"put pieces-0001.bin", "put .metadata", "put manifest.json", "put latest"} <= told
    deleted = {"manifest.json", "pieces-0001.bin", ".metadata", "__0_1.distcp", "__1_1.distcp"}
    assert {f"delete {name}" for name in deleted} <= told


def test_wherever_it_is_killed_a_whole_checkpoint_is_found_and_the_run_goes_on(places: dict[Path, str]) -> None:
    resumed = set()
    for folder, place in places.items():
        store = LocalStore(folder)
        before = list_checkpoints(store, FOLDER)
        for found in before.complete:
            found.manifest.verify_files(store, found.path)
        attempt = take_attempt(store, RUN)
        found = latest_complete(store, FOLDER, attempt=attempt)
        assert found is not None, place
        assert same(loaded(store, found, some_state()), some_state(found.step // 100)), place
        committed = place.startswith("delete") or place == "put latest"
        assert found.step == (200 if committed else 100), place
        resumed.add(found.step)
        ranks = Ranks(attempt, 2, keep=1, resumed_step=found.step)
        for step in (200, 300):
            assert ranks.save(step, by_rows(some_state(step // 100), 2)) == [None, None], place
        after = list_checkpoints(store, FOLDER)
        assert ([each.step for each in after.complete], after.incomplete) == ([300], ()), place
        assert same(loaded(store, after.complete[0], some_state()), some_state(3)), place
        # Nothing is left of what was killed, not even what no listing shows.
        assert sorted(path.name for path in (folder / FOLDER).iterdir()) == [
            ".trainshed.lock",
            "latest",
            "step-00000300",
        ], place
        assert not list((folder / FOLDER).rglob(".trainshed-*")), place
    assert resumed == {100, 200}
