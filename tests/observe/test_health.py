"""Who is to blame, told from flight records: the cases that real ranks do not show on demand."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Literal

import pytest

from trainshed.errors import CorruptData
from trainshed.observe.health import (
    NCCL_DUMP,
    CollectiveRecord,
    FlightRecord,
    ProcessGroupRecord,
    RecordedError,
    diagnose,
    flight_record_name,
    format_ranks,
    read_flight_records,
    read_nccl_dump,
)

LOST = RecordedError("RuntimeError", "Connection closed by peer", collective=True)


def operation(
    group: str,
    seq: int,
    state: Literal["waiting", "started", "done"] = "done",
    *,
    op: str = "all_reduce",
    sizes: tuple[int, ...] = (4,),
    created: float = 0.0,
    backend: str = "nccl",
    peer: int | None = None,
) -> CollectiveRecord:
    return CollectiveRecord(backend, group, seq, op, [list(sizes)], "BFloat16", state, created, peer)


def rank(
    number: int, *operations: CollectiveRecord, error: RecordedError | None = None, **groups: list[int]
) -> FlightRecord:
    return FlightRecord(
        rank=number,
        time=100.0,
        reason="test",
        error=error,
        groups=[ProcessGroupRecord(name, name, ranks) for name, ranks in groups.items()],
        collectives=list(operations),
    )


def by_rank(*records: FlightRecord) -> dict[int, FlightRecord]:
    return {record.rank: record for record in records}


def test_blame_lies_at_the_end_of_a_chain_of_waits() -> None:
    """Rank 0 waits for 1 and 1 for 2 in another group; 2 waits for nobody."""
    records = by_rank(
        rank(0, operation("dp", 7, "waiting"), dp=[0, 1]),
        rank(1, operation("dp", 6), operation("tp", 3, "waiting"), dp=[0, 1], tp=[1, 2]),
        rank(2, operation("tp", 2), tp=[1, 2]),
    )
    found = diagnose(records, 3)
    assert found.ranks == [2]
    assert found.collective == "all_reduce #3 of group tp (ranks 1-2; 4 BFloat16)"
    assert found.sentence == f"rank 2 did not arrive; rank 1 waited in {found.collective}"


def test_a_rank_that_comes_after_the_others_have_given_up_did_not_come() -> None:
    records = by_rank(
        rank(0, operation("dp", 5, created=10.0), error=LOST, dp=[0, 1]),
        rank(1, operation("dp", 5, created=130.0), error=LOST, dp=[0, 1]),
    )
    assert diagnose(records, 2).ranks == [1]


def test_a_gpu_that_is_still_busy_is_the_one_waited_for() -> None:
    """All have launched the collective; on all GPUs but one it has begun."""
    busy = rank(1, operation("dp", 5, "waiting"), operation("dp", 6, "waiting"), dp=[0, 1, 2])
    others = [rank(number, operation("dp", 5, "started"), dp=[0, 1, 2]) for number in (0, 2)]
    found = diagnose(by_rank(busy, *others), 3)
    assert found.ranks == [1]
    assert "ranks 0, 2 waited in all_reduce #5" in found.sentence


def test_ranks_that_wait_for_each_other_are_named_together() -> None:
    records = by_rank(
        rank(0, operation("a", 2, "waiting"), operation("b", 1), a=[0, 1], b=[0, 1]),
        rank(1, operation("b", 2, "waiting"), operation("a", 1), a=[0, 1], b=[0, 1]),
    )
    found = diagnose(records, 2)
    assert found.ranks == [0, 1]
    assert found.sentence.startswith("ranks 0-1 wait for each other: rank 0 for rank 1 in all_reduce #2 of group a")


def test_tensors_of_different_sizes_are_a_disagreement_where_they_must_agree() -> None:
    def disagreeing(op: str) -> list[int]:
        sizes = {0: (4,), 1: (4,), 2: (8,)}
        ranks = [
            rank(number, operation("dp", 3, "waiting", op=op, sizes=size), dp=[0, 1, 2])
            for number, size in sizes.items()
        ]
        return diagnose(by_rank(*ranks), 3).ranks

    assert disagreeing("all_reduce") == [2]
    assert disagreeing("all_to_all") == []


def test_of_silent_ranks_those_that_ended_by_themselves_are_blamed() -> None:
    """Rank 3 died; rank 2 was still waiting, in something that nobody recorded, when it was killed by the launcher."""
    waiting = [rank(number, operation("dp", 3, "waiting"), dp=[0, 1, 2, 3]) for number in (0, 1)]
    assert diagnose(by_rank(*waiting), 4).ranks == [2, 3]
    found = diagnose(by_rank(*waiting), 4, exit_reasons={3: "was killed by SIGBUS"})
    assert found.ranks == [3]
    assert found.sentence.startswith("rank 3 was killed by SIGBUS; ranks 0-1 waited in ")


def test_an_error_of_its_own_outweighs_everything_else() -> None:
    broken = rank(1, operation("dp", 3), error=RecordedError("OSError", "disk gone", collective=False), dp=[0, 1, 2])
    records = by_rank(rank(0, operation("dp", 3), error=LOST, dp=[0, 1, 2]), broken)
    found = diagnose(records, 3)
    assert found.ranks == [1]
    assert found.sentence == "rank 1 failed with OSError: disk gone"


def test_gloo_and_nccl_of_one_group_count_apart() -> None:
    records = by_rank(
        rank(0, operation("0", 9, "waiting"), operation("0", 40, backend="gloo")),
        rank(1, operation("0", 8), operation("0", 40, backend="gloo")),
    )
    assert diagnose(records, 2).ranks == [1]


def test_a_receive_that_nobody_answers_names_the_peer() -> None:
    records = by_rank(
        rank(0, pp=[0, 1, 2]),
        rank(1, operation("pp", 0, "waiting", op="recv", peer=0), pp=[0, 1, 2]),
        rank(2, operation("pp", 0, "waiting", op="recv", peer=1), pp=[0, 1, 2]),
    )
    found = diagnose(records, 3)
    assert found.ranks == [0]
    assert found.collective == "recv of group pp (ranks 0-2; 4 BFloat16)"


def test_without_a_sign_nobody_is_blamed() -> None:
    nothing = [FlightRecord(number, 1.0, "asked", waiting="collective") for number in range(3)]
    assert diagnose(by_rank(*nothing), 3).ranks == []
    assert diagnose({}, 3).ranks == []
    assert diagnose({}, 3).sentence == "no rank has left a flight record"
    assert diagnose({}, 3, exit_reasons={1: "exited with 3"}).sentence == "rank 1 exited with 3"


@pytest.mark.parametrize(
    ("ranks", "text"),
    [([3], "rank 3"), ([0, 1, 2], "ranks 0-2"), ([9, 1, 0], "ranks 0-1, 9"), (range(0, 40, 2), "(20 in all)")],
)
def test_ranks_are_written_as_a_person_writes_them(ranks: list[int], text: str) -> None:
    assert format_ranks(ranks).endswith(text)


def trace(state: str, seq: int) -> dict[str, object]:
    """As NCCL's watchdog dumps it on PyTorch 2.11, less the keys we do not read."""
    entry = {
        "collective_seq_id": seq,
        "input_dtypes": ["Float"],
        "input_sizes": [[3, 4]],
        "is_p2p": False,
        "process_group": ("0", "default_pg"),
        "profiling_name": "nccl:all_reduce",
        "retired": True,
        "state": state,
        "time_created_ns": 1_700_000_000_000_000_000,
    }
    config = {"0": {"desc": "default_pg", "name": "0", "ranks": "[0, 1]"}}
    return {"version": "2.10", "entries": [entry], "pg_config": config}


def test_ranks_that_nccls_watchdog_ended_are_read_from_its_dumps(tmp_path: Path) -> None:
    (tmp_path / f"{NCCL_DUMP}0").write_bytes(pickle.dumps(trace("scheduled", 2)))
    (tmp_path / f"{NCCL_DUMP}1").write_bytes(pickle.dumps(trace("completed", 1)))
    (tmp_path / f"{NCCL_DUMP}2").write_bytes(b"\x80\x02}")  # cut short
    found = diagnose(read_flight_records(tmp_path), 2)
    assert found.ranks == [1]
    assert found.collective == "all_reduce #2 of group default_pg (ranks 0-1; 3×4 Float)"


def test_a_dump_that_asks_for_code_is_refused() -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, ...]:
            return os.system, ("true",)

    with pytest.raises(CorruptData, match=r"dump:.* it asks for (posix|nt)\.system"):
        read_nccl_dump(pickle.dumps({"entries": [], "pg_config": Evil()}), "dump")


def test_a_record_survives_its_file(tmp_path: Path) -> None:
    record = rank(3, operation("dp", 5, "started", peer=2), error=LOST, dp=[2, 3])
    (tmp_path / flight_record_name(3)).write_bytes(record.to_json())
    assert read_flight_records(tmp_path) == {3: record}
