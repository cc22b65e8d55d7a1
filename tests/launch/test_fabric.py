"""A fabric's setup: rendered the same every time, complete for every machine, and refused where it cannot be."""

from __future__ import annotations

import subprocess
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.recipes.golden_files import check_golden
from trainshed.catalog import machine_names
from trainshed.catalog.fabrics import fabric_setup_file, fabric_setup_names
from trainshed.errors import InputError, RecipeError
from trainshed.launch.fabric import SINGLE_NODE, UNKNOWN, FabricSetup, fabric_setup
from trainshed.recipe import Cluster, load_cluster

# The machine that stands for each setup where a version or an option is looked at.
USUAL = {
    "efa": "p5",
    "ethernet": "a2-ultragpu-8g",
    "gib": "a3-ultra",
    "infiniband": "dgx-h100",
    "roce": "mi300x-8",
    "slingshot": "dgx-a100",
    "tcpx": "a3-high",
    "tcpxo": "a3-mega",
}


def cluster(machine: str | None, target: str = "kubernetes", **keys: Any) -> Cluster:
    return Cluster.model_validate({"name": "c", "target": target, "machine": machine, **keys})


def in_words(setup: FabricSetup) -> str:
    """A setup as a golden file: what jobs get, without the rules about what they may not set."""
    plain = asdict(replace(setup, kubernetes=setup.kubernetes.for_job("run-1a2b"), refused={}, profile_sets=()))
    plain["pairs"] = setup.pairs.model_dump()
    plain["shell"] = list(setup.shell_prologue())
    return yaml.safe_dump(_lists(_kept(plain)), sort_keys=False, width=110, allow_unicode=True)


def _kept(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _kept(inner) for key, inner in value.items() if inner not in (None, (), {}, [], False)}
    return value


def _lists(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _lists(inner) for key, inner in value.items()}
    return [_lists(inner) for inner in value] if isinstance(value, list | tuple) else value


@pytest.mark.parametrize("name", [name for name in machine_names() if name != "p6e-gb200"])
def test_every_machine_gets_the_setup_it_had(name: str) -> None:
    check_golden(f"fabrics/{name}.yaml", in_words(fabric_setup(cluster(name), nodes=4)))


@pytest.mark.parametrize(
    ("setup", "version"), [(name, each) for name in fabric_setup_names() for each in fabric_setup_file(name).versions]
)
def test_every_version_of_every_setup_fills_in_all_it_needs(setup: str, version: str) -> None:
    names = {"efa": "efa-v2", "infiniband": "infiniband-ndr"}
    written = f"{names.get(setup, setup)}@{version}"
    found = fabric_setup(cluster(USUAL[setup], fabric=written), nodes=2)
    assert (found.name, found.version) == (setup, version)
    fills = {
        fill for part in (fabric_setup_file(setup), *fabric_setup_file(setup).versions.values()) for fill in part.fill
    }
    text = in_words(found)
    assert not [fill for fill in {*fills, "nics", "gpus", "nodes", "job"} if "{" + fill + "}" in text]


def test_the_seeds_version_of_tcpxo_is_the_one_its_recipe_names() -> None:
    pod = fabric_setup(cluster("a3-mega", fabric="tcpxo@v1.0.3"), nodes=16).kubernetes
    installer, daemon = pod.init_containers
    assert installer["image"].endswith("nccl-plugin-gpudirecttcpx-dev:v1.0.3")
    assert "install --install-nccl --nccl-buildtype=221" in installer["args"][0]
    assert daemon["image"].endswith("tcpgpudmarxd-dev:v1.0.9")
    assert daemon["restartPolicy"] == "Always"
    assert "--num_hops=2 --num_nics=8 --uid= --alsologtostderr" in daemon["args"][0]


def test_on_the_nodes_own_network_a_pod_needs_privileges_in_place_of_annotations() -> None:
    plain = fabric_setup(cluster("a3-mega"), nodes=2).kubernetes
    assert (plain.privileged, plain.host_network, len(plain.annotations)) == (False, False, 3)
    host = fabric_setup(cluster("a3-mega", kubernetes={"host_network": True}), nodes=2).kubernetes
    assert (host.privileged, host.host_network, dict(host.annotations)) == (True, True, {})
    daemon = host.init_containers[1]
    assert daemon["securityContext"] == {
        "capabilities": {"add": ["NET_ADMIN", "NET_BIND_SERVICE"]},
        "privileged": True,
    }


def test_efa_answers_to_the_name_of_its_plugins_version() -> None:
    """Tags of aws-ofi-nccl: "AWS Libfabric" up to 1.12.1, "Libfabric" since, which still answers to the old name."""
    names = {
        version: fabric_setup(cluster("p5", fabric=f"efa-v2@{version}"), nodes=2).environment["NCCL_NET"]
        for version in ("any", "1.12", "1.13")
    }
    assert names == {"any": "AWS Libfabric", "1.12": "AWS Libfabric", "1.13": "Libfabric"}


@pytest.mark.parametrize(
    ("version", "plugin"),
    [("nccl-2.20", "IBext_v8"), ("nccl-2.25", "IBext_v9"), ("nccl-2.26", "IBext_v10"), ("nccl-2.28", "IBext_v11")],
)
def test_with_sharp_the_network_is_the_plugins_own_and_never_ib(version: str, plugin: str) -> None:
    found = fabric_setup(cluster("nd-h100-v5", fabric=f"infiniband-ndr@{version}", sharp=True), nodes=2)
    assert found.environment["NCCL_NET"] == plugin
    assert found.environment["NCCL_COLLNET_ENABLE"] == "1"
    assert found.environment["SHARP_SMX_UCX_INTERFACE"] == "mlx5_ib0:1"
    assert found.selected[0] == f"Using network {plugin}"
    without = fabric_setup(cluster("nd-h100-v5", fabric=f"infiniband-ndr@{version}"), nodes=2)
    assert without.environment["NCCL_NET"] == "IB"
    assert not [name for name in without.environment if name.startswith(("SHARP_", "NCCL_COLLNET"))]


def test_amds_gpus_get_their_own_variables() -> None:
    assert fabric_setup(cluster("mi300x-8"), nodes=2).environment["HSA_NO_SCRATCH_RECLAIM"] == "1"
    assert "HSA_NO_SCRATCH_RECLAIM" not in fabric_setup(cluster("dgx-h100", fabric="roce"), nodes=2).environment


def test_one_node_needs_no_fabric_and_an_unnamed_one_is_said() -> None:
    alone = fabric_setup(cluster("a3-mega"), nodes=1)
    assert (alone.name, dict(alone.environment), alone.kubernetes.init_containers) == (SINGLE_NODE, {}, ())
    assert alone.shell_prologue() == ()
    unknown = fabric_setup(cluster(None, "slurm"), nodes=2)
    assert (unknown.name, len(unknown.notes)) == (UNKNOWN, 1)


def written(tmp_path: Path, text: str) -> Cluster:
    file = tmp_path / "mine.yaml"
    file.write_text(f"trainshed: 1\nname: mine\ntarget: kubernetes\n{text}")
    return load_cluster(file)


@pytest.mark.parametrize(
    ("text", "what", "where", "hint"),
    [
        (
            "fabric: ib\nmachine: p5\n",
            "there is no fabric `ib`",
            "mine.yaml:4 (fabric)",
            "did you mean infiniband-hdr or infiniband-ndr or infiniband-xdr?",
        ),
        ("fabric: efa-v9\nmachine: p5\n", "there is no fabric `efa-v9`", "mine.yaml:4 (fabric)", "did you mean efa-v4"),
        (
            "fabric: tcpxo@v9\nmachine: p5\n",
            "there is no version `v9` of the setup of tcpxo",
            "mine.yaml:4 (fabric)",
            "write one of tcpxo@v1.0.15, tcpxo@v1.0.8-1, tcpxo@v1.0.7, tcpxo@v1.0.3",
        ),
        (
            "machine: a3-megga\n",
            "there is no machine `a3-megga` in the catalog",
            "mine.yaml:4 (machine)",
            "did you mean",
        ),
        (
            "machine: p5\nsharp: true\n",
            "efa-v2 has no switches that sum",
            "mine.yaml:5 (sharp)",
            "delete it; SHARP is InfiniBand's",
        ),
        (
            "machine: p6e-gb200\n",
            "the machine p6e-gb200 does not say how many cards of efa-v4 a node has, and pods must ask for each",
            "mine.yaml:4 (machine)",
            "describe the machine in a file with `nics: N`",
        ),
    ],
)
def test_what_cannot_be_set_up_is_said_at_its_line(tmp_path: Path, text: str, what: str, where: str, hint: str) -> None:
    with pytest.raises(RecipeError) as caught:
        fabric_setup(written(tmp_path, text), nodes=2)
    assert caught.value.what == what
    assert (caught.value.where or "").endswith(where)
    assert (caught.value.hint or "").startswith(hint)


def test_a_described_machine_may_say_its_cards(tmp_path: Path) -> None:
    (tmp_path / "node.yaml").write_text(
        "node: {source: me, gpu: h100, gpus: 8, fabric: efa-v2, network_gbps: 3200.0, nics: 16, cpus: 8,\n"
        "       memory_gib: 9.0}\n"
    )
    found = fabric_setup(written(tmp_path, f"machine: {tmp_path / 'node.yaml'}\n"), nodes=2)
    assert dict(found.kubernetes.resources) == {"vpc.amazonaws.com/efa": 16}


def test_a_node_sources_the_script_and_then_sets_its_own(tmp_path: Path) -> None:
    """Run by a real bash, with and without -u; the vendor's script reads what nobody set and sets what we set."""
    script = tmp_path / "pro file.sh"
    script.write_text('export SEEN="$NCCL_LIB_DIR:$NOBODY_SET_THIS"\nexport NCCL_NET=other NCCL_KEPT=1\n')
    setup = FabricSetup(
        "tcpxo",
        "tcpxo",
        "v",
        {"NCCL_NET": "it's $(me)", "NCCL_LIB_DIR": "/lib dir"},
        library_path=("/a", "/b"),
        profile_script=str(script),
    )
    for options in ("-eu", "-e"):
        lines = [*setup.shell_prologue(), 'printf "%s|" "$NCCL_NET" "$NCCL_KEPT" "$SEEN" "$LD_LIBRARY_PATH" "$-"']
        done = subprocess.run(
            ["bash", options, "-c", "\n".join(lines)],
            capture_output=True,
            text=True,
            env={"LD_LIBRARY_PATH": "/image"},
            check=True,
        )
        net, kept, seen, path, flags, _ = done.stdout.split("|")
        assert (net, kept, seen, path) == ("it's $(me)", "1", "/lib dir:", "/a:/b:/image")
        assert ("u" in flags) == ("u" in options)


def test_nodes_without_a_container_have_things_where_a_container_would_mount_them_from() -> None:
    inside = fabric_setup(cluster("nd-h100-v5", "slurm", slurm={"container": "pyxis"}), nodes=2)
    assert inside.environment["NCCL_TOPO_FILE"] == "/etc/ndv5-topo.xml"
    assert "/opt/microsoft/ndv5-topo.xml:/etc/ndv5-topo.xml:ro" in inside.slurm.mounts
    bare = fabric_setup(cluster("nd-h100-v5", "slurm"), nodes=2)
    assert bare.environment["NCCL_TOPO_FILE"] == "/opt/microsoft/ndv5-topo.xml"
    bare = fabric_setup(cluster("a3-mega", "slurm"), nodes=2)
    assert bare.profile_script == "/var/lib/tcpxo/lib64/nccl-env-profile.sh"
    assert bare.library_path[0] == bare.environment["NCCL_LIB_DIR"] == "/var/lib/tcpxo/lib64"


def test_a_cluster_that_names_an_unknown_fabric_is_input_that_is_wrong() -> None:
    with pytest.raises(InputError) as caught:
        fabric_setup(cluster(None, fabric="token-ring"), nodes=2)
    assert (caught.value.hint or "").startswith("known fabrics: infiniband-hdr")
