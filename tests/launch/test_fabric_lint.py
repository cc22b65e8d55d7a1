"""Variables that do not belong are refused with the reason, at their line."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainshed.catalog import machine_names
from trainshed.errors import InputError
from trainshed.launch.fabric import FabricSetup, fabric_setup, lint_environment
from trainshed.recipe import Cluster, load_cluster


def setup(machine: str, fabric: str | None = None) -> FabricSetup:
    return fabric_setup(Cluster(name="c", target="slurm", machine=machine, fabric=fabric), nodes=2)


@pytest.mark.parametrize(
    ("machine", "name", "value", "because"),
    [
        ("p5", "NCCL_SOCKET_IFNAME", "eth0", "EFA's nodes do not call their interface eth0"),
        ("p5", "NCCL_PROTO", "Simple", "NCCL and the fabric's tuner choose per message"),
        ("p5", "NCCL_ALGO", "Ring", "NCCL and the fabric's tuner choose per message"),
        ("p5", "RDMAV_FORK_SAFE", "1", "huge pages and forks are the provider's business"),
        ("p5", "FI_EFA_FORK_SAFE", "1", "kernels since 5.15 make it needless"),
        ("p5", "FI_PROVIDER", "tcp", "any other provider than efa is TCP"),
        ("p5", "NCCL_IB_DISABLE", "1", "it is a variable of infiniband and roce and gib, and this fabric is efa-v2"),
        ("p5", "NCCL_FASTRAK_NUM_FLOWS", "2", "it is a variable of tcpxo, and this fabric is efa-v2"),
        ("dgx-h100", "NCCL_IB_DISABLE", "1", "it takes the InfiniBand away and leaves sockets"),
        ("dgx-h100", "NCCL_COLLNET_ENABLE", "1", "SHARP is asked for in the cluster file"),
        ("dgx-h100", "FI_EFA_USE_HUGE_PAGE", "0", "it is a variable of efa, and this fabric is infiniband-ndr"),
        ("dgx-h100", "CUDA_LAUNCH_BLOCKING", "1", "every kernel would wait for the one before it"),
        ("dgx-h100", "NCCL_P2P_DISABLE", "1", "GPUs of a node would talk through the host"),
        ("dgx-h100", "NCCL_NET", "Socket", "the fabric's setup names its network"),
        ("dgx-h100", "NCCL_TIMEOUT", "1800", "neither NCCL nor PyTorch reads it"),
        ("dgx-h100", "RANK", "0", "the node agent sets every rank's place"),
        ("a3-mega", "NCCL_MIN_NCHANNELS", "4", "/var/lib/tcpxo/lib64/nccl-env-profile.sh sets it"),
        ("a3-ultra", "NCCL_IB_TC", "52", "/usr/local/gib/scripts/set_nccl_env.sh sets it"),
        ("a3-mega", "UCX_TLS", "rc", "it is a variable of infiniband and roce, and this fabric is tcpxo"),
        ("mi300x-8", "SHARP_COLL_ENABLE_SAT", "1", "it is a variable of infiniband, and this fabric is roce"),
    ],
)
def test_what_never_belongs_is_refused_with_its_reason(machine: str, name: str, value: str, because: str) -> None:
    with pytest.raises(InputError) as caught:
        lint_environment(setup(machine), {name: value})
    assert caught.value.what.startswith(f"{name} does not belong here: {because}")
    assert caught.value.where == name


@pytest.mark.parametrize(
    ("machine", "environment"),
    [
        ("p5", {"NCCL_SOCKET_IFNAME": "^docker,lo,veth", "NCCL_DEBUG": "WARN", "NCCL_NVLS_ENABLE": "0"}),
        ("p5", {"FI_PROVIDER": "efa", "NCCL_BUFFSIZE": "8388608"}),
        ("dgx-h100", {"NCCL_IB_DISABLE": "0", "NCCL_IB_HCA": "mlx5", "CUDA_LAUNCH_BLOCKING": "0"}),
        ("mi300x-8", {"NCCL_IB_GID_INDEX": "1", "NCCL_IB_HCA": "rdma0,rdma1", "NCCL_SOCKET_IFNAME": "eth0"}),
        ("a3-ultra", {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "HF_HOME": "/data"}),
    ],
)
def test_what_belongs_is_left_alone(machine: str, environment: dict[str, str]) -> None:
    assert lint_environment(setup(machine), environment) == []


def test_what_is_only_needless_is_said() -> None:
    assert lint_environment(setup("p5"), {"FI_EFA_USE_DEVICE_RDMA": "1"}) == [
        "FI_EFA_USE_DEVICE_RDMA is not needed: libfabric since 1.18 finds out by itself"
    ]


def test_all_that_is_wrong_is_said_at_once_at_the_first_ones_line(tmp_path: Path) -> None:
    file = tmp_path / "aws.yaml"
    file.write_text(
        "trainshed: 1\nname: aws\ntarget: slurm\nmachine: p5\nenvironment:\n  NCCL_DEBUG: INFO\n"
        "  NCCL_SOCKET_IFNAME: eth0\n  NCCL_PROTO: Simple\n"
    )
    cluster = load_cluster(file)
    with pytest.raises(InputError) as caught:
        lint_environment(fabric_setup(cluster, nodes=2), cluster.environment, cluster.where)
    assert caught.value.where == f"{file}:7 (environment.NCCL_SOCKET_IFNAME)"
    first, second = (caught.value.hint or "").split("\n")
    assert first == "leave it out, or write ^docker,lo,veth"
    assert second.startswith("nor does NCCL_PROTO: ")
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("name", [name for name in machine_names() if name != "p6e-gb200"])
def test_one_node_alone_still_may_not_disable_its_links(name: str) -> None:
    alone = fabric_setup(Cluster(name="c", target="slurm", machine=name), nodes=1)
    assert lint_environment(alone, {"NCCL_IB_DISABLE": "1", "UCX_TLS": "rc"}) == []
    with pytest.raises(InputError):
        lint_environment(alone, {"NCCL_P2P_DISABLE": "1"})
