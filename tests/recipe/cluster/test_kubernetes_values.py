"""Values that Kubernetes' API server would refuse when the data is prepared are refused when the file is read."""

from __future__ import annotations

import pytest

from trainshed.errors import InputError
from trainshed.recipe import Cluster, load_cluster
from trainshed.recipe.cluster.load import known_clusters

CLAIM = "volumes=[{mount: /shared, pvc: data}]"


def cluster(*overrides: str) -> Cluster:
    return load_cluster("aks-nd-h100-v5", (CLAIM, "store=/shared", *overrides))


@pytest.mark.parametrize(
    ("override", "what"),
    [
        ("kubernetes.namespace=Team_A", "`Team_A` is not a namespace of Kubernetes"),
        ("kubernetes.namespace=a.b", "`a.b` is not a namespace of Kubernetes"),
        (f"kubernetes.namespace={'x' * 64}", "is not a namespace of Kubernetes"),
        ("kubernetes.queue=GPUs", "`GPUs` is not a name of Kubernetes"),
        ("kubernetes.cpu_queue=my queue", "`my queue` is not a name of Kubernetes"),
        ("kubernetes={queue: q, priority: High}", "`High` is not a name of Kubernetes"),
        ("kubernetes={kind: trainjob, runtime: a b}", "`a b` is not a name of Kubernetes"),
        ("kubernetes={queue: q, topology: {level: a b}}", "`a b` is not a label of Kubernetes"),
        ("kubernetes.labels={team: ML Team}", "`ML Team` is not a value of a label of Kubernetes"),
        ("kubernetes.labels={a b: x}", "`a b` is not a label of Kubernetes"),
        ("kubernetes.labels={app.kubernetes.io/instance: x}", "`app.kubernetes.io/instance` is set by Trainshed"),
        ("kubernetes.labels={trainshed.io/code: x}", "`trainshed.io/code` is set by Trainshed"),
        ("kubernetes.annotations={a b: x}", "`a b` is not an annotation of Kubernetes"),
        ("kubernetes.node_selector={pool: -gpu}", "`-gpu` is not a value of a label of Kubernetes"),
        ("kubernetes.cpu_node_selector={pool: a/b}", "`a/b` is not a value of a label of Kubernetes"),
        ("kubernetes.avoid_nodes=[node 1]", "`node 1` is not a hostname of Kubernetes"),
        ("kubernetes.image_pull_secrets=[My_Secret]", "`My_Secret` is not a name of Kubernetes"),
        ("kubernetes.driver_account=Driver", "`Driver` is not a name of Kubernetes"),
        ("service_account=my account", "`my account` is not a name of Kubernetes"),
        ("volumes.0.pvc=Shared_1", "`Shared_1` is not a name of Kubernetes"),
        ("secrets={HF_TOKEN: {k8s: My_Secret/token}}", "`My_Secret/token` is not a secret with its key of Kubernetes"),
        ("secrets={HF TOKEN: {k8s: hf/token}}", "`HF TOKEN` is not a name of a variable"),
        ("kubernetes.tolerations=[{key: t, value: x}]", "`operator: Exists` compares no value"),
        ("kubernetes.tolerations=[{operator: Equal, value: x}]", "is missing: the value of which taint?"),
        ("kubernetes.tolerations=[{key: a b}]", "`a b` is not a key of a taint"),
        ("kubernetes.tolerations=[{key: t, operator: Equal, value: a b}]", "`a b` is not a value of a taint"),
        ("volumes.1={mount: /shared/, pvc: more}", "/shared is where another volume is mounted (volumes.0)"),
        ("volumes.1={mount: /dev/shm, pvc: more}", "/dev/shm is taken in every pod"),
        ("limits.shared_memory=0", "is 0, which Kubernetes takes for no limit"),
        ("limits.cpu_stage_memory=0Gi", "is 0, which Kubernetes takes for no limit"),
        ("limits.hours=0.0001", "0.0001 hours are less than a minute"),
        ("limits.hours=1e9", "must be at most 8760"),
    ],
)
def test_what_the_api_server_would_refuse_is_refused_at_once(override: str, what: str) -> None:
    key, _, value = override.partition("=")
    if key == "limits.shared_memory":
        value = '"0"'
    with pytest.raises(InputError) as caught:
        cluster(f"{key}={value}")
    assert what in str(caught.value)
    assert key.split(".")[0] in str(caught.value)
    assert "[key]" not in str(caught.value)


def test_what_clusters_are_called_is_taken() -> None:
    cluster(
        "kubernetes.namespace=ml-1",
        "kubernetes.queue=a.b-c",
        "kubernetes.labels={example.com/team: A_b.c-1, empty: ''}",
        "kubernetes.annotations={note: any text}",
        "kubernetes.node_selector={node.kubernetes.io/instance-type: p5.48xlarge}",
        "kubernetes.tolerations=[{}, {key: nvidia.com/gpu}, {key: t, operator: Equal, value: x}]",
        "kubernetes.avoid_nodes=[ip-10-0-0-1.ec2.internal]",
        "secrets={HF_TOKEN: {k8s: hf.token/my_Key.1}}",
        "volumes.1={mount: /shared/inside, pvc: data}",
    )
    assert all(load_cluster(name) for name in known_clusters())
