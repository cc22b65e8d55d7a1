"""The node agents of a training: they meet, end together, and say who failed; a spare steps in for a bad node."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from support.clusters.small_agents import SmallAgents, wait_for
from trainshed.launch.attempt import read_plan
from trainshed.observe.event_log import read_events
from trainshed.storage import LocalStore

Start = Callable[..., SmallAgents]
WAIT = "say('up'); time.sleep(600)"


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[Start]:
    made: list[SmallAgents] = []

    def make(rank: str, *slots: int, environment: dict[str, str] | None = None, **job: Any) -> SmallAgents:
        made.append(SmallAgents(tmp_path, rank, **job))
        made[-1].start(*slots or (0, 1), **environment or {})
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_nodes_meet_find_their_ranks_and_leave_an_account(agents: Start) -> None:
    job = agents("print(rank, os.environ['WORLD_SIZE'], os.environ['MASTER_ADDR'])")
    codes, printed = job.ends()
    assert codes == [0, 0], printed
    assert "node 1: host-1, ranks 1" in printed
    hosts = orjson.loads((job.run / "health/attempt-0001/hosts.json").read_bytes())
    assert [(node["host"], node["ranks"]) for node in hosts["nodes"]] == [("host-0", [0]), ("host-1", [1])]
    assert [job.record(node).ended for node in (0, 1)] == ["finished", "finished"]
    assert (job.run / "logs/attempt-0001/rank-00001.log").read_text() == "1 2 127.0.0.1\n"
    assert read_plan(job.run, 1).dp == 2
    plan = orjson.loads((job.run / "plans/attempt-0001.json").read_bytes())
    assert (plan["reasons"], plan["predicted"]) == (["because"], {"mfu": 0.4})
    kinds = [(event["kind"], event.get("name")) for event in read_events(LocalStore(job.run), "")]
    assert ("phase", "meeting") in kinds
    assert "trainshed.report/1" in (job.run / "report.html").read_text()


def test_a_rank_that_fails_ends_all_nodes_and_only_its_own_is_blamed(agents: Start) -> None:
    job = agents(f"if rank == 1: print('no more'); sys.exit(3)\n{WAIT}")
    codes, printed = job.ends()
    assert codes == [1, 1], printed
    assert "rank 1 exited with 3" in printed
    assert "rank-00001.log" in printed
    assert (job.record(0).ended, job.record(1).ended) == ("peer", "failed")
    assert job.record(0).failed[0].killed
    assert "no more" in job.record(1).log_tail
    failures = [event for event in read_events(LocalStore(job.run), "") if event["kind"] == "failure"]
    assert failures[0]["what"] == "rank 1 exited with 3"
    assert '"state":"failed"' in (job.run / "report.html").read_text()


def test_an_input_that_is_wrong_ends_every_node_with_2(agents: Start) -> None:
    error = """
if rank == 1:
    os.makedirs(f"{run}/health/attempt-0001", exist_ok=True)
    with open(f"{run}/health/attempt-0001/error-00001.json", "w") as file:
        file.write('{"what": "no such tokens", "where": "recipe.yaml:3", "hint": null, "exit_code": 2}')
    sys.exit(2)
"""
    codes, printed = agents(error + WAIT).ends()
    assert codes == [2, 2]
    assert "recipe.yaml:3: no such tokens" in printed


def test_a_requested_stop_reaches_the_ranks_and_is_what_all_agents_report(agents: Start) -> None:
    # A step is done, so that the next start has something to go on from.
    event = '{"v": 1, "time": 0, "attempt": 1, "rank": 0, "kind": "step", "step": 0}'
    step = f"open(f'{{run}}/events/attempt-0001/000009.jsonl', 'w').write('{event}' + chr(10))\n"
    job = agents(f"if rank == 0: {step}{WAIT}")
    job.until("up-0", "up-1")
    for agent in job.agents.values():
        agent.send_signal(signal.SIGUSR1)
    assert job.ends()[0] == [138, 138]
    assert [job.record(node).ended for node in (0, 1)] == ["stopped", "stopped"]


def test_a_time_limit_before_the_first_step_is_a_failure_and_not_tried_for_ever(agents: Start) -> None:
    job = agents(WAIT)
    job.until("up-0", "up-1")
    for agent in job.agents.values():
        agent.send_signal(signal.SIGUSR1)
    codes, printed = job.ends()
    assert codes == [1, 1]
    assert "the time limit came before the first step was done" in printed


def test_an_end_while_a_node_is_missing_is_no_requested_stop(agents: Start) -> None:
    job = agents(WAIT, 0)
    job.until("starts/start-1/beat-00000")
    # What srun does when the agent of another node could not even start.
    job.agents[0].send_signal(signal.SIGTERM)
    codes, printed = job.ends()
    assert codes == [1]
    assert "asked to stop while node 1 had not started" in printed
    assert not (job.run / "attempts").exists()


def test_a_node_that_never_comes_is_named(agents: Start) -> None:
    codes, printed = agents(WAIT, 0, environment={"TRAINSHED_MEET_SECONDS": "0.3"}).ends()
    assert codes == [1]
    assert "node 1 did not start within 0 s" in printed


def test_an_agent_that_vanishes_takes_its_ranks_along_and_is_missed_by_the_others(agents: Start) -> None:
    job = agents(WAIT)
    job.until("up-0", "up-1")
    rank = int((job.run / "up-1").read_text())
    job.agents[1].kill()
    wait_for(lambda: not os.path.exists(f"/proc/{rank}"), "the rank to go")
    codes, printed = job.ends()
    assert codes == [1, -signal.SIGKILL]
    assert "host-1, which shows no sign of life" in printed
    assert (job.record(0).ended, job.record(1).ended) == ("peer", "lost")


def test_without_the_first_node_nobody_takes_it_for_a_requested_stop(agents: Start) -> None:
    job = agents(WAIT)
    job.until("up-0", "up-1")
    job.agents[0].kill()
    # What srun does to the other tasks then.
    job.agents[1].send_signal(signal.SIGTERM)
    codes, printed = job.ends()
    assert codes == [-signal.SIGKILL, 76]
    assert "the first node shows no sign of life" in printed


def test_another_version_is_refused_before_any_work(agents: Start) -> None:
    codes, printed = agents(WAIT, version="9.9.9").ends()
    assert codes == [2, 2]
    assert "and the job was written by 9.9.9" in printed


def test_a_spare_steps_in_for_a_node_whose_rank_was_killed(agents: Start) -> None:
    killed = f"if attempt == 1 and rank == 0: os.kill(os.getpid(), 9)\nif attempt == 1: {WAIT}"
    job = agents(killed, 0, 1, 2, spares=1)
    codes, printed = job.ends()
    assert codes == [0, 0, 0], printed
    assert "host-0: rank 0 was killed by SIGKILL from outside: a spare node steps in" in printed
    hosts = orjson.loads((job.run / "health/attempt-0002/hosts.json").read_bytes())
    # Whoever is well keeps its place, and rank 0 is now elsewhere.
    assert [node["host"] for node in hosts["nodes"]] == ["host-2", "host-1"]
    assert hosts["master"][0] == "host-2"
    assert hosts["spares"] == []


def test_a_failure_of_the_program_is_not_tried_again_on_a_spare(agents: Start) -> None:
    codes, printed = agents("sys.exit(3)", 0, 1, 2, spares=1).ends()
    assert codes == [1, 1, 1]
    assert "a spare node steps in" not in printed


def test_too_few_nodes_for_the_layout_end_the_start_with_the_reason(agents: Start) -> None:
    codes, printed = agents("os.kill(os.getpid(), 9) if rank else time.sleep(600)", 0, 1, min_nodes=2).ends()
    assert codes == [1, 1]
    assert "1 of 2 nodes are left, and elastic.min_nodes asks for 2" in printed


def test_the_devices_of_all_nodes_are_events_of_the_run(agents: Start, tmp_path: Path) -> None:
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    # 0x40 is a clock that is held down by heat; host-1 has a GPU with an error of its memory.
    errors = '[ "$TRAINSHED_HOST" = host-1 ] && e=2 || e=0'
    program.write_text(f'#!/bin/sh\n{errors}\necho "0, GPU-a, 91, [N/A], 99, 1024, 900, $e, 2, 0x40"\n')
    program.chmod(0o755)
    path = f"{program.parent}:{os.environ['PATH']}"
    job = agents(WAIT, environment={"PATH": path, "TRAINSHED_BEAT_SECONDS": "0.05"})

    def alarms() -> list[dict[str, Any]]:
        return [event for event in read_events(LocalStore(job.run), "") if event["kind"] == "alarm"]

    def whole() -> list[dict[str, Any]]:
        """What was read while both nodes were there."""
        devices = [event for event in read_events(LocalStore(job.run), "") if event["kind"] == "devices"]
        return [event for event in devices if None not in event["temperature_celsius"]]

    wait_for(lambda: {event["name"] for event in alarms()} == {"throttling", "gpu_error"}, "two alarms")
    wait_for(whole, "figures of both nodes")
    for agent in job.agents.values():
        agent.send_signal(signal.SIGTERM)
    job.ends()
    devices = whole()
    assert devices[-1]["temperature_celsius"] == [91, 91]
    assert devices[-1]["memory_gib"] == [1.0, 1.0]
    assert devices[-1]["power_watts"] == [None, None]
    assert devices[-1]["throttled"] == ["temperature", "temperature"]
    (broken,) = [event for event in alarms() if event["name"] == "gpu_error"]
    assert broken["what"].startswith("GPU 0 of host-1 (rank 1) has 2 new ECC errors that cannot be corrected")
    assert (broken["ranks"], broken["hosts"]) == ([1], ["host-1"])
