"""Real gloo ranks that fail in several ways, each named afterwards from what the ranks wrote down."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from support.recipes.small_recipes import small_job, small_recipe
from trainshed.engines.torch import rank_health
from trainshed.engines.torch.rank import train_rank
from trainshed.engines.torch.rank_health import Watchdog
from trainshed.errors import TrainshedError
from trainshed.launch.ranks import free_port
from trainshed.observe.budgets import PhaseBudgets
from trainshed.observe.health import (
    STALLED_EXIT_CODE,
    FailureDiagnosis,
    FlightRecord,
    diagnose,
    health_folder,
    read_flight_records,
    read_hosts,
    read_nccl_dump,
    read_rank_error,
)

DRIVER = Path(__file__).parent / "flight_driver.py"
WORLD = 4


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folders of all scenarios, run at once."""
    folder = tmp_path_factory.mktemp("worlds")
    subprocess.run([sys.executable, str(DRIVER), str(folder)], check=True, timeout=120)
    return folder


def exit_codes(folder: Path) -> dict[int, int]:
    return {int(rank): code for rank, code in json.loads((folder / "ends.json").read_text()).items()}


def diagnosis(folder: Path) -> FailureDiagnosis:
    return diagnose(read_flight_records(folder), WORLD)


def test_a_killed_rank_is_named_with_the_collective_the_others_were_in(worlds: Path) -> None:
    found = diagnosis(worlds / "killed")
    assert found.ranks == [3]
    assert found.collective is not None
    assert "rank 3 left no flight record" in found.sentence
    assert "rank 2 waited in all_reduce #2 of group mesh_tp (ranks 2-3; 2×5 Float)" in found.sentence
    told = diagnose(read_flight_records(worlds / "killed"), WORLD, exit_reasons={3: "was killed by SIGKILL"})
    assert told.sentence.startswith("rank 3 was killed by SIGKILL; ")


def test_a_rank_that_sleeps_is_named_with_the_line_it_sleeps_in(worlds: Path) -> None:
    found = diagnosis(worlds / "sleeping")
    assert found.ranks == [1]
    assert "rank 1 did not arrive in step 2 and stood at " in found.sentence
    assert "in sleeping: time.sleep(600)" in found.sentence
    assert "rank 0 waited in all_reduce #2 of group mesh_tp (ranks 0-1; 2×5 Float)" in found.sentence


def test_a_rank_that_raises_is_named_with_its_error(worlds: Path) -> None:
    found = diagnosis(worlds / "raising")
    assert found.ranks == [2]
    assert found.sentence.startswith("rank 2 failed with KeyError: 'no such document'; ")
    assert "rank 3 waited in all_reduce #2 of group mesh_tp (ranks 2-3; 2×5 Float)" in found.sentence


def test_ranks_in_different_collectives_are_told_apart(worlds: Path) -> None:
    found = diagnosis(worlds / "disagreeing")
    assert found.ranks == [0, 1]
    assert "rank 0 in all_reduce #2 of group mesh_tp" in found.sentence
    assert "rank 1 in barrier #2 of group mesh_tp" in found.sentence


def test_a_stuck_pipeline_ends_though_gloo_knows_no_timeout_there(worlds: Path) -> None:
    found = diagnosis(worlds / "stuck_pipeline")
    assert found.ranks == [0]
    assert found.collective == "point-to-point communication"
    assert "ranks 1-3 waited in point-to-point communication" in found.sentence


def test_a_rank_without_progress_ends_with_a_code_of_its_own(worlds: Path) -> None:
    assert exit_codes(worlds / "sleeping") == {0: 1, 1: STALLED_EXIT_CODE, 2: 1, 3: 1}
    record = read_flight_records(worlds / "sleeping")[1]
    assert record.reason == "rank 1 has shown no progress for 6 seconds in step 2"
    advice = "where it was only slow, write `budgets: {step: 12s}`"
    assert record.advice == advice
    # A timeout of the others is about the same limit; what else ends a rank is not.
    assert read_flight_records(worlds / "sleeping")[0].advice == advice
    assert read_flight_records(worlds / "raising")[2].advice is None
    assert (record.step, record.phase, record.error) == (1, "step", None)
    assert "in sleeping" in record.threads
    assert "in _watch" in record.threads


def test_a_rank_that_holds_the_interpreter_ends_as_well(worlds: Path) -> None:
    folder = worlds / "holding_the_interpreter"
    assert exit_codes(folder) == {0: 1, 1: 1, 2: 1, 3: 1}
    assert diagnosis(folder).ranks == [2]
    assert "in holding_the_interpreter" in (folder / "rank-00002.log").read_text()


def test_the_dump_of_ncclS_watchdog_reads_like_our_own_record(worlds: Path) -> None:
    for rank in (0, 2):
        pickled = worlds / "sleeping" / f"pickled-{rank}"
        operations, _ = read_nccl_dump(pickled.read_bytes(), str(pickled))
        recorded = read_flight_records(worlds / "sleeping")[rank].collectives
        # The two were written one after the other, and the last collective may have ended between them.
        *before, last = operations
        assert before == recorded[:-1]
        assert replace(last, state="") == replace(recorded[-1], state="")
        assert len(operations) >= 4


@pytest.fixture
def alone(tmp_path: Path) -> object:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def written(folder: Path) -> FlightRecord:
    return FlightRecord.from_json(rank_health.write_flight_record(folder, 0).read_bytes())


def test_where_nothing_is_recorded_the_record_says_why(
    alone: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dist.barrier()
    assert [each.op for each in written(tmp_path).collectives] == ["barrier"]
    monkeypatch.setitem(rank_health._RECORDERS, "gloo", "_dump_of_a_later_torch")
    record = written(tmp_path)
    assert record.missing is not None
    assert record.missing.endswith("has no flight recorder for gloo")
    assert record.collectives == []
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "0")
    assert written(tmp_path).missing == "TORCH_FR_BUFFER_SIZE=0 turns the recorder off"


def test_a_record_needs_no_process_group(tmp_path: Path) -> None:
    record = written(tmp_path / "health" / "attempt-0001")
    assert record.missing == "there is no process group"
    assert "test_a_record_needs_no_process_group" in record.threads


def test_an_error_stays_recorded_when_the_watchdog_comes_later(tmp_path: Path) -> None:
    rank_health.write_flight_record(tmp_path, 0, reason="an error", error=ValueError("bad batch"))
    record = written(tmp_path)
    assert record.error is not None
    assert record.error.text == "bad batch"


def test_the_watchdog_knows_the_phases_of_the_budgets_and_stops(tmp_path: Path) -> None:
    with Watchdog(tmp_path, 0, budgets=PhaseBudgets({"step": 0.02}), poll_seconds=0.01) as watchdog:
        time.sleep(0.05)  # before the first beat nothing is watched
        watchdog.heartbeat(3, "step")
        with pytest.raises(ValueError, match="no budget for the phase 'stop'"):
            watchdog.heartbeat(3, "stop")
        watchdog.stop()
        time.sleep(0.05)
    assert list(tmp_path.iterdir()) == []


def test_collectives_wait_as_long_as_their_phase_may_take(alone: None, tmp_path: Path) -> None:
    world = dist.distributed_c10d._get_default_group()

    def timeout_seconds() -> float:
        return world._get_backend(torch.device("cpu")).options._timeout.total_seconds()

    with Watchdog(tmp_path, 0, budgets=PhaseBudgets({"load": 7200, "first_step": 90})) as watchdog:
        watchdog.heartbeat(None, "load")
        assert timeout_seconds() == 7200
        watchdog.heartbeat(0, "first_step")
        assert timeout_seconds() == 90
        watchdog.heartbeat(1, "step")
        assert timeout_seconds() == 300
        for step in range(1, 4):  # a large model: steps of five minutes
            watchdog.add_step(300)
            watchdog.heartbeat(step + 1, "step")
        assert timeout_seconds() == 1500


def test_a_rank_that_does_not_reach_rank_0_says_where_and_which_key_allows_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = free_port()
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}.items():
        monkeypatch.setenv(name, value)
    recipe = small_recipe("dense", ["budgets={rendezvous: 1s}"])
    with pytest.raises(TrainshedError, match=f"rank 1 did not reach rank 0 at 127.0.0.1:{port} within 1 s") as error:
        train_rank(small_job(tmp_path, recipe, "dp=2,micro_batch=2"), run_folder=tmp_path, attempt=1)
    assert error.value.hint == "where it was only slow, write `budgets: {rendezvous: 2s}`"
    stored = read_rank_error(health_folder(tmp_path, 1))
    assert stored is not None
    assert stored.what == error.value.what, "its launcher says the same"


def test_rank_0_says_that_its_port_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        place = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        for name, value in place.items():
            monkeypatch.setenv(name, value)
        job = small_job(tmp_path, small_recipe("dense", ["budgets={rendezvous: 1s}"]), "dp=2,micro_batch=2")
        with pytest.raises(TrainshedError, match=f"rank 0 cannot listen at 127.0.0.1:{port}: another process"):
            train_rank(job, run_folder=tmp_path, attempt=1)


def test_the_hosts_of_a_job_are_those_that_its_agents_wrote(tmp_path: Path) -> None:
    assert read_hosts(tmp_path) is None
    nodes = [
        {"node": 0, "slot": 1, "host": "one", "ranks": [0, 1]},
        {"node": 1, "slot": 0, "host": "two", "ranks": [2]},
    ]
    (tmp_path / "hosts.json").write_text(json.dumps({"nodes": nodes, "spares": []}))
    assert read_hosts(tmp_path) == ["one", "two"]
