"""Setups of fabrics and expected rates are whole, and fit the rest of the catalog."""

from __future__ import annotations

import re

import pytest

from trainshed.catalog import fabric, fabric_names, gpu_names, machine, machine_names
from trainshed.catalog.fabrics import FabricSetupPart, fabric_setup_file, fabric_setup_names, refused_variables
from trainshed.catalog.machines import ExpectedRate, expected_between_nodes, expected_in_node, expected_rates


def test_every_fabric_has_a_setup_and_every_setup_a_fabric() -> None:
    assert {fabric(name).setup for name in fabric_names()} == set(fabric_setup_names())


@pytest.mark.parametrize("name", fabric_setup_names())
def test_a_setup_names_its_network_and_what_nccl_must_say_of_it(name: str) -> None:
    file = fabric_setup_file(name)
    assert file.environment["NCCL_NET"]
    assert file.selected
    assert name == "ethernet" or any(re.search(pattern, "NET/Socket : Using [0]eth0") for pattern in file.rejected)
    assert file.default in file.versions
    assert all(version.source for version in file.versions.values())
    assert set(file.machines) <= set(machine_names())
    assert 0 < file.pairs.warn < file.pairs.replace
    parts: list[FabricSetupPart] = [file, file.amd, *file.versions.values(), *([file.sharp] if file.sharp else [])]
    for pattern in (pattern for part in parts for pattern in (*part.selected, *part.rejected)):
        re.compile(pattern)
    for rule in file.refused.values():
        re.compile(rule.value or "")


def test_what_a_setup_sets_itself_is_not_refused_to_people_by_its_family() -> None:
    families = refused_variables().families
    for owners in families.values():
        assert set(owners) <= set(fabric_setup_names())
    for name in fabric_setup_names():
        for variable in fabric_setup_file(name).environment:
            wrong = [
                family
                for family, owners in families.items()
                if re.fullmatch(family.replace("*", ".*"), variable) and name not in owners
            ]
            assert not wrong, (name, variable, wrong)


def test_cards_of_a_machine_share_its_line_rate_evenly() -> None:
    known = {name: machine(name).nics for name in machine_names() if machine(name).nics is not None}
    assert known["p5"] == 32
    assert known["p4d"] == 4
    for name, cards in known.items():
        rate = machine(name).network_gbps / cards
        assert rate in (100.0, 200.0, 400.0, 800.0), name


def test_rates_are_of_known_machines_and_gpus_and_fall_from_expected_to_bad() -> None:
    rates = expected_rates()
    assert set(rates.machines) <= set(machine_names())
    assert set(rates.gpus) <= set(gpu_names())
    for found in rates.machines.values():
        for rate in filter(None, (found.inside, found.rack, found.network)):
            assert rate.expected >= rate.warn > rate.replace
    for of_gpu in rates.gpus.values():
        assert of_gpu.tflops.expected > of_gpu.tflops.warn > of_gpu.tflops.replace


def found(name: str, nodes: int, network: str | None = None) -> ExpectedRate:
    expected = expected_between_nodes(machine(name), nodes, network or machine(name).fabric)
    assert expected is not None
    return expected


def test_a_published_figure_judges_and_an_estimate_only_warns() -> None:
    azure = found("nd-h100-v5", 16)
    assert [azure.verdict(rate) for rate in (455.0, 399.0, 299.0)] == ["pass", "warn", "fail"]
    assert found("p5", 2).gb_per_s == 444.0
    more = found("p5", 8)  # what two nodes reach says nothing about eight
    assert (more.gb_per_s, more.replace, more.mebibytes) == (340.0, None, None)
    assert [more.verdict(rate) for rate in (300.0, 200.0, 1.0)] == ["pass", "warn", "warn"]


def test_nodes_of_one_rack_are_held_to_nvlink_and_others_to_the_network() -> None:
    assert found("gb300-nvl72", 18).gb_per_s == 937.0
    assert found("gb300-nvl72", 36).gb_per_s == 200.0


def test_a_figure_of_a_machine_does_not_hold_on_another_network() -> None:
    assert found("nd-h100-v5", 2, "ethernet").source == "estimate, line rate x 0.6"
    assert expected_between_nodes(None, 2, "roce") is None
    assert expected_in_node(machine("a3-mega")) is None
