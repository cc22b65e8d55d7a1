"""Machines, fabrics, storage tiers and prices fit together, and each can be named as people name it."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainshed.catalog import (
    fabric,
    fabric_names,
    find_gpu,
    find_machine,
    gpu,
    gpu_names,
    machine,
    machine_from_file,
    machine_names,
    machine_of_gpu,
    machines_with,
    price_of,
    priced_machines,
    storage_tier,
    tier_names,
)
from trainshed.catalog.storage_tiers import check_tier_size
from trainshed.errors import InputError, RecipeError
from trainshed.plan.training_shape import hardware_of, hardware_of_gpu

PROMISED = [
    *["a2-highgpu-8g", "a2-ultragpu-8g", "a3-highgpu-8g", "a3-megagpu-8g", "a3-ultragpu-8g", "a4-highgpu-8g"],
    *["a4x-highgpu-4g", "Standard_ND96asr_v4", "Standard_ND96amsr_A100_v4", "Standard_ND96isr_H100_v5"],
    *["Standard_ND96isr_H200_v5", "Standard_ND96isr_MI300X_v5", "Standard_ND128isr_NDR_GB200_v6", "p4d.24xlarge"],
    *["p4de.24xlarge", "p5.48xlarge", "p5e.48xlarge", "p5en.48xlarge", "p6-b200.48xlarge", "p6e-gb200.36xlarge"],
    *["p6-b300.48xlarge", "g5.48xlarge", "g6e.48xlarge", "dgx-a100", "dgx-h100", "dgx-h200", "dgx-b200", "dgx-b300"],
    *["gb200-nvl72", "gb300-nvl72", "mi300x-8", "mi325x-8", "mi355x-8", "soperator-h100"],
]


@pytest.mark.parametrize("name", PROMISED)
def test_the_catalog_has_every_machine_we_promised_under_the_name_people_use(name: str) -> None:
    assert machine(name).source


def test_every_machine_has_a_gpu_and_a_fabric_of_the_catalog_and_sane_figures() -> None:
    for found in map(machine, machine_names()):
        hardware = hardware_of(found)
        assert hardware.gpu is gpu(found.gpu)
        assert hardware.fabric == fabric(found.fabric).name
        # A NIC of 12.5 to 800 Gbit/s for each GPU (a P3 has 25 for eight), and links that are faster than the network.
        assert (0.3 if found.name == "p3.16xlarge" else 1.5) <= hardware.network_gb_per_s <= 100
        assert hardware.link_gb_per_s > hardware.network_gb_per_s
        assert found.watts is not None
        assert 200 <= found.watts / found.gpus <= 2000


def test_no_two_machines_share_a_name() -> None:
    names = [*machine_names(), *(other for name in machine_names() for other in machine(name).names if other != name)]
    assert len({name.lower() for name in names}) == len(names)


def test_every_gpu_has_a_machine_that_stands_for_it() -> None:
    for name in gpu_names():
        found = machine_of_gpu(name)
        assert found.gpu == name
        assert found in machines_with(name)
        hardware = hardware_of_gpu(name)
        assert (hardware.gpu_name, hardware.machine) == (name, None)


def test_links_are_told_per_direction_and_a_rack_is_one_domain() -> None:
    assert hardware_of(machine("a3-mega")).link_gb_per_s == 450.0
    assert hardware_of(machine("a3-mega")).network_gb_per_s == 25.0
    assert hardware_of(machine("g5.48xlarge")).link_gb_per_s == 32.0  # PCIe
    rack = hardware_of(machine("gb200-nvl72"))
    assert (rack.gpus_per_node, rack.link_domain) == (4, 72)


def test_machines_with_a_gpu_are_listed_by_any_name_of_it() -> None:
    assert [found.name for found in machines_with("h100")][:3] == ["a3-high", "a3-mega", "nd-h100-v5"]


def test_an_unknown_machine_gets_the_nearest_and_a_description_that_works(tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        machine("a3-megga")
    assert caught.value.what == "there is no machine `a3-megga` in the catalog"
    near, describing = (caught.value.hint or "").split("\n")
    assert near.startswith("did you mean a3-mega")
    file = tmp_path / "mynode.yaml"
    file.write_text(describing[describing.index("NAME:") :])
    found = find_machine(str(file))
    assert (found.name, hardware_of(found).gpu_name) == ("NAME", "h100-sxm")


NODE = "node: {source: me, gpu: ./card.yaml, gpus: 4, fabric: roce, network_gbps: 800.0, cpus: 8, memory_gib: 64.0}\n"
CARD = "card: {source: me, device_names: [C], memory_gib: 24.0, memory_gb_per_s: 900.0, link_gb_per_s: null,\n" \
       "       dense_tflops: {bf16: 90.0}}\n"  # fmt: skip


def test_a_described_machine_may_have_a_described_gpu_beside_it(tmp_path: Path) -> None:
    (tmp_path / "node.yaml").write_text(NODE)
    (tmp_path / "card.yaml").write_text(CARD)
    hardware = hardware_of(machine_from_file(tmp_path / "node.yaml"))
    assert (hardware.machine, hardware.gpu_name, hardware.link_gb_per_s) == ("node", "card", 32.0)
    with pytest.raises(InputError) as caught:
        machine_of_gpu(find_gpu(tmp_path / "card.yaml"))
    assert caught.value.what == "the GPU card does not say which machine it is in"


def test_a_described_gpu_takes_the_place_of_its_machines_own(tmp_path: Path) -> None:
    (tmp_path / "card.yaml").write_text(CARD.replace("source: me", "source: me, machine: dgx-h100"))
    hardware = hardware_of_gpu(tmp_path / "card.yaml")
    assert (hardware.gpu_name, hardware.gpus_per_node, hardware.network_gb_per_s) == ("card", 8, 50.0)


def test_a_link_domain_is_a_part_of_the_node_or_whole_nodes(tmp_path: Path) -> None:
    (tmp_path / "node.yaml").write_text(NODE.replace("gpus: 4", "gpus: 4, link_domain: 6"))
    with pytest.raises(RecipeError) as caught:
        machine_from_file(tmp_path / "node.yaml")
    assert caught.value.what == "6 is neither a part of 4 GPUs nor a multiple of them"


@pytest.mark.parametrize("name", fabric_names())
def test_every_fabric_is_whole_and_says_what_is_an_estimate(name: str) -> None:
    found = fabric(name)
    assert 1 <= found.latency_us <= 100
    assert 0.5 <= found.reached <= 1
    assert "estimate" in found.source


def test_prices_are_of_machines_dated_and_within_reason() -> None:
    for name in priced_machines():
        price = price_of(machine(name))
        assert price is not None
        assert price.as_of.startswith("202")
        if price.usd_per_hour is None:
            assert price.unknown_because
        else:
            assert 1 <= price.usd_per_hour / machine(name).gpus <= 30, name
    assert price_of(machine("dgx-h100")) is None


@pytest.mark.parametrize("name", tier_names())
def test_every_storage_tier_is_whole(name: str) -> None:
    tier = storage_tier(name)
    assert tier.as_of.startswith("202")
    assert tier.latency_ms < 100
    if tier.needs_size:
        assert tier.size_tib is not None
        assert tier.size_tib.fits(tier.size_tib.least)


@pytest.mark.parametrize(
    ("name", "size_tib", "what", "hint"),
    [
        (
            "amlfs-125",
            None,
            "the speed of amlfs-125 grows with its size, and no size is given",
            "write storage: {tier: amlfs-125, size_tib: 16}",
        ),
        ("amlfs-125", 20.0, "amlfs-125 cannot be bought in 20 TiB", "it is sold from 16 TiB in steps of 16 to 4096"),
        ("amlfs-40", 16.0, "amlfs-40 cannot be bought in 16 TiB", "it is sold from 48 TiB in steps of 48 to 12800"),
        (
            "minio-nvme",
            None,
            "the speed of minio-nvme grows with its servers, and no number is given",
            "write storage: {tier: minio-nvme, servers: 4}",
        ),
    ],
)
def test_what_cannot_be_bought_is_refused(name: str, size_tib: float | None, what: str, hint: str) -> None:
    with pytest.raises(InputError) as caught:
        check_tier_size(storage_tier(name), size_tib)
    assert (caught.value.what, caught.value.hint) == (what, hint)


def test_an_unknown_tier_gets_the_nearest() -> None:
    with pytest.raises(InputError) as caught:
        storage_tier("amlfs-251")
    assert (caught.value.hint or "").startswith("did you mean amlfs-250")
