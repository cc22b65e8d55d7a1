"""One sentence for many nodes."""

from __future__ import annotations

from trainshed.catalog import machine
from trainshed.catalog.machines import expected_between_nodes
from trainshed.launch.preflight.coordinator import check_inside, judge_rate
from trainshed.launch.preflight.measurement import FabricProbeResult
from trainshed.launch.preflight.verdict import CheckResult, NodeCheckReport, PreflightVerdict, conclude

FINE = CheckResult("gpus", "pass", "8 x H100")
BAD = CheckResult("gpus", "fail", "7 of 8 GPUs are there", "look for Xids")


def reports(*checks: CheckResult) -> list[NodeCheckReport]:
    return [NodeCheckReport(node, f"host-{node}", (check,)) for node, check in enumerate(checks)]


def test_all_is_well() -> None:
    found = conclude(reports(FINE, FINE), [CheckResult("all-reduce", "pass", "all-reduce of 1 MiB reaches 5 GB/s")])
    assert (found.outcome, found.sentence) == ("pass", "2 nodes are ready: all-reduce of 1 MiB reaches 5 GB/s")


def test_a_bad_node_is_named_with_its_host() -> None:
    found = conclude(reports(FINE, BAD, FINE), [])
    assert (found.outcome, found.replace) == ("replace", (1,))
    assert found.sentence == "one node is to be replaced, of 3: node 1 (host-1): 7 of 8 GPUs are there"


def test_what_most_nodes_have_is_no_fault_of_theirs() -> None:
    found = conclude(reports(BAD, BAD, FINE), [])
    assert (found.outcome, found.replace) == ("fail", ())
    assert found.sentence == "2 of 3 nodes cannot train: 7 of 8 GPUs are there"


def test_what_is_wrong_between_nodes_replaces_none() -> None:
    found = conclude(reports(FINE, FINE), [CheckResult("fabric", "fail", "efa-v2 is not used")])
    assert (found.outcome, found.replace, found.sentence) == ("fail", (), "efa-v2 is not used")


def test_doubts_are_told_and_do_not_stop() -> None:
    found = conclude(
        reports(FINE, CheckResult("clock", "warn", "its clock is 3 s off")), [CheckResult("versions", "warn", "driver")]
    )
    assert (found.outcome, found.doubtful) == ("warn", (1,))
    assert found.sentence == "driver (and 1 more)"


def test_a_verdict_survives_its_file() -> None:
    found = conclude(reports(FINE, BAD, FINE), [FINE], fabric="gib", bus_gb_per_s=3.5, seconds=7.0)
    assert PreflightVerdict.from_plain(found.to_plain()) == found
    assert found.to_plain()["schema"] == "trainshed.preflight/1"


def test_a_rate_is_held_against_the_machine() -> None:
    expected = expected_between_nodes(machine("nd-h100-v5"), 4, "infiniband-ndr")
    assert judge_rate("all-reduce", 290.0, expected, 16384.0).verdict == "fail"
    alone = judge_rate("all-reduce", 0.5, None, 4.0)
    assert (alone.verdict, alone.what) == (
        "pass",
        "all-reduce of 4 MiB reaches 0.5 GB/s; measured, nothing to compare with",
    )


def test_what_gpus_of_a_node_reach_is_held_against_the_gpu() -> None:
    figures = {"tflops": [770.0, 700.0], "all_reduces": [{"mebibytes": 16384, "best_gb_per_s": 300.0}]}
    products, inside = check_inside(FabricProbeResult(figures), machine("nd-h100-v5"))
    assert (products.verdict, products.what) == (
        "warn",
        "its slowest GPU reaches 700 TFLOP/s in products, 769 are usual",
    )
    assert inside.verdict == "fail"
    (broken,) = check_inside(FabricProbeResult(error="a probe exited with 1"), None)
    assert broken.what == "its own GPUs do not get through: a probe exited with 1"
