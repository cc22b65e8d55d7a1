"""Every key of a cluster file, on every target: it changes what becomes of a job, or it is refused by name."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.recipes.small_recipes import recipe_text
from trainshed.cli import run_cli
from trainshed.errors import InputError, RecipeError
from trainshed.launch.job import CodeArchive, Job
from trainshed.launch.kubernetes.storage import storage_text
from trainshed.launch.target import target_of
from trainshed.recipe import Cluster, load_cluster, load_recipe
from trainshed.recipe.cluster.target_keys import KEY_SUPPORT, TARGET_NAMES
from trainshed.recipe.validation import known_keys
from trainshed.workflow.prepare import store_options
from trainshed.workflow.submit import build_job

CODE = CodeArchive("trainshed-0-0.tar.xz", "0" * 64, b"code")
SCHEMA = {".".join(str(step) for step in path): key for path, key in known_keys(Cluster).items()}
LEAVES = [name for name, key in SCHEMA.items() if not key.sections]
BASES: dict[str, dict[str, Any]] = {
    "local": {"name": "c", "target": "local"},
    "slurm": {"name": "c", "target": "slurm", "machine": "dgx-h100", "store": "/data", "nodes": {"default": 2}},
    "kubernetes": {
        "name": "c",
        "target": "kubernetes",
        "machine": "p5",
        "store": "/data",
        "nodes": {"default": 2},
        "image": "registry/x@sha256:0123",
        "volumes": [{"mount": "/data", "pvc": "shared"}],
    },
    "ray": {
        "name": "c",
        "target": "ray",
        "machine": "mi300x-8",
        "store": "/data",
        "nodes": {"default": 2},
        "ray": {"address": "http://head:8265"},
    },
}


def volume(**keys: Any) -> dict[str, Any]:
    return {"volumes": [{"mount": "/data", "pvc": "shared"}, {"mount": "/more"} | keys]}


def created(**keys: Any) -> dict[str, Any]:
    made = {"kind": "amlfs", "size": "16Ti", "zone": "1", "sku": "AMLFS-Durable-Premium-125"} | keys
    return {"volumes": [{"mount": "/data", "pvc": "shared", "create": made}]}


PYXIS = {"slurm": {"container": "pyxis"}, "image": "registry/x:1"}
QUEUE = {"kubernetes": {"queue": "gpus"}}
SHARED = {"volumes": [{"mount": "/corpus", "path": "/lustre"}]}
WRITTEN: dict[str, dict[str, Any]] = {
    "store": {"store": "/data/other"},
    "stores.*.endpoint": {"stores": {"s3": {"endpoint": "http://minio:9000"}}},
    "stores.*.region": {"stores": {"s3": {"region": "eu"}}},
    "stores.*.anonymous": {"stores": {"s3": {"anonymous": True}}},
    "stores.*.addressing": {"stores": {"s3": {"addressing": "virtual"}}},
    "secrets.*.env": {"secrets": {"TOKEN": {"env": "MINE"}}},
    "secrets.*.file": {"secrets": {"TOKEN": {"file": "/run/x"}}},
    "secrets.*.k8s": {"secrets": {"TOKEN": {"k8s": "name/key"}}},
    "nodes.default": {"nodes": {"default": 4}},
    "machine": {"machine": "mi300x-8"},
    "storage.tier": {"storage": {"tier": "s3"}},
    "storage.size_tib": {"storage": {"tier": "amlfs-125", "size_tib": 32.0}},
    "storage.servers": {"storage": {"tier": "minio-nvme", "servers": 8}},
    "price_per_gpu_hour": {"price_per_gpu_hour": 1e9},
    "mtbf_hours": {"mtbf_hours": 10.0},
    "calibration": {"calibration": "mine.yaml"},
    "image": {"image": "registry/other:2"},
    "local_disk": {"local_disk": "/ssd"},
    "python": {"python": "/opt/python"},
    "fabric": {"fabric": "ethernet"},
    "sharp": {"sharp": True},
    "preflight": {"preflight": False},
    "environment": {"environment": {"OMP_NUM_THREADS": "3"}},
    "setup": {"setup": ["module load cuda"]},
    "volumes.*.mount": {},
    "volumes.*.pvc": volume(pvc="more"),
    "volumes.*.create.kind": created(kind="lustre", sku=None, zone=None),
    "volumes.*.create.size": created(size="32Ti"),
    "volumes.*.create.storage_class": created(kind="claim", storage_class="fast", sku=None, zone=None),
    "volumes.*.create.sku": created(sku="AMLFS-Durable-Premium-250"),
    "volumes.*.create.zone": created(zone="2"),
    "volumes.*.create.parameters": created(parameters={"subnet": "mine"}),
    "volumes.*.bucket": volume(bucket="more"),
    "volumes.*.host": volume(host="/mnt/ssd"),
    "volumes.*.path": {"volumes": [{"mount": "/corpus", "path": "/elsewhere"}]},
    "volumes.*.read_only": volume(pvc="more", read_only=True),
    "volumes.*.options": volume(bucket="more", options=["implicit-dirs"]),
    "limits.hours": {"limits": {"hours": 4.0}},
    "limits.restarts": {"limits": {"restarts": 7}},
    "limits.grace_seconds": {"limits": {"grace_seconds": 91}},
    "limits.shared_memory": {"limits": {"shared_memory": "9Gi"}},
    "limits.cpu_stage_cpus": {"limits": {"cpu_stage_cpus": 3}},
    "limits.cpu_stage_memory": {"limits": {"cpu_stage_memory": "9Gi"}},
    "limits.stages.*.cpus": {"limits": {"stages": {"prepare": {"cpus": 3}}}},
    "limits.stages.*.memory": {"limits": {"stages": {"prepare": {"memory": "9Gi"}}}},
    "limits.prepare_parts": {"limits": {"prepare_parts": 3}},
    "capacity.reservation": {"capacity": {"reservation": "march"}},
    "capacity.spot": {"capacity": {"spot": True}},
    "capacity.flex_start_hours": {"capacity": {"flex_start_hours": 2.0}},
    "notify.*.command": {"notify": [{"command": ["page"]}]},
    "notify.*.webhook.secret": {"notify": [{"webhook": {"secret": "HOOK"}}]},
    "notify.*.on": {"notify": [{"command": ["page"], "on": ["end"]}]},
    "notify.*.every_minutes": {"notify": [{"command": ["page"], "every_minutes": 5.0}]},
    "notify.*.low_goodput": {"notify": [{"command": ["page"], "low_goodput": 0.25}]},
    "service_account": {"service_account": "trainer"},
    "kubernetes.kind": {"kubernetes": {"kind": "pytorchjob"}},
    "kubernetes.context": {"kubernetes": {"context": "prod"}},
    "kubernetes.namespace": {"kubernetes": {"namespace": "ml"}},
    "kubernetes.queue": {"kubernetes": {"queue": "gpus"}},
    "kubernetes.cpu_queue": {"kubernetes": {"cpu_queue": "cpus"}},
    "kubernetes.driver_account": {"kubernetes": {"driver_account": "drivers"}},
    "kubernetes.priority": {"kubernetes": {"priority": "high"}},
    "kubernetes.topology.level": {"kubernetes": {"queue": "gpus", "topology": {"level": "rack"}}},
    "kubernetes.topology.required": {"kubernetes": {"queue": "gpus", "topology": {"level": "block", "required": True}}},
    "kubernetes.runtime": {"kubernetes": {"runtime": "mine"}},
    "kubernetes.host_network": {"kubernetes": {"host_network": True}},
    "kubernetes.resources": {"kubernetes": {"resources": {"rdma/mine": 1}}},
    "kubernetes.requests": {"kubernetes": {"requests": "devices"}},
    "kubernetes.node_selector": {"kubernetes": {"node_selector": {"pool": "gpu"}}},
    "kubernetes.cpu_node_selector": {"kubernetes": {"cpu_node_selector": {"pool": "cpu"}}},
    "kubernetes.tolerations.*.key": {"kubernetes": {"tolerations": [{"key": "team"}]}},
    "kubernetes.tolerations.*.operator": {
        "kubernetes": {"tolerations": [{"key": "t", "operator": "Equal", "value": "a"}]}
    },
    "kubernetes.tolerations.*.value": {
        "kubernetes": {"tolerations": [{"key": "t", "operator": "Equal", "value": "b"}]}
    },
    "kubernetes.tolerations.*.effect": {"kubernetes": {"tolerations": [{"key": "t", "effect": "NoExecute"}]}},
    "kubernetes.avoid_nodes": {"kubernetes": {"avoid_nodes": ["bad"]}},
    "kubernetes.labels": {"kubernetes": {"labels": {"team": "ml"}}},
    "kubernetes.annotations": {"kubernetes": {"annotations": {"note": "1"}}},
    "kubernetes.image_pull_secrets": {"kubernetes": {"image_pull_secrets": ["registry"]}},
    "kubernetes.code": {"kubernetes": {"code": "configmaps"}},
    "kubernetes.pre_pull": {"kubernetes": {"pre_pull": True}},
    "slurm.partition": {"slurm": {"partition": "gpu"}},
    "slurm.cpu_partition": {"slurm": {"cpu_partition": "cpu"}},
    "slurm.account": {"slurm": {"account": "team"}},
    "slurm.qos": {"slurm": {"qos": "high"}},
    "slurm.constraint": {"slurm": {"constraint": "ib"}},
    "slurm.login": {"slurm": {"login": "me@login"}},
    "slurm.gpus": {"slurm": {"gpus": "gpu:h100"}},
    "slurm.container": PYXIS,
    "slurm.venv": {"slurm": {"venv": "/shared/venv"}},
    "slurm.exclusive": {"slurm": {"exclusive": False}},
    "slurm.port": {"slurm": {"port": 23456}},
    "slurm.options": {"slurm": {"options": ["--comment=x"]}},
    "ray.address": {"ray": {"address": "http://other:8265"}},
    "ray.gpu_resource": {"ray": {"address": "http://head:8265", "gpu_resource": "mine"}},
    "target_options": {"target_options": {"queue": "fast"}},
}
"""By key, something to write that is not its default."""
BESIDE: dict[tuple[str, str], dict[str, Any]] = {
    ("image", "slurm"): PYXIS,
    ("sharp", "kubernetes"): {"machine": "nd-h100-v5"},
    ("sharp", "ray"): {"machine": "dgx-h100"},
    ("machine", "kubernetes"): {"fabric": "ethernet"},
    ("volumes.*.mount", "slurm"): PYXIS | SHARED,
    ("volumes.*.path", "slurm"): PYXIS | SHARED,
    ("volumes.*.read_only", "slurm"): PYXIS | SHARED,
    ("volumes.*.options", "kubernetes"): volume(bucket="more"),
    ("capacity.flex_start_hours", "kubernetes"): QUEUE | {"machine": "a3-mega"},
    ("kubernetes.code", "kubernetes"): {"volumes": [{"mount": "/data", "bucket": "mine"}]},
    ("kubernetes.priority", "kubernetes"): QUEUE,
    ("kubernetes.topology.level", "kubernetes"): {"kubernetes": {"queue": "gpus", "topology": {"level": "block"}}},
    ("kubernetes.topology.required", "kubernetes"): {"kubernetes": {"queue": "gpus", "topology": {"level": "block"}}},
    ("kubernetes.requests", "kubernetes"): QUEUE,
    ("kubernetes.runtime", "kubernetes"): {"kubernetes": {"kind": "trainjob"}},
    ("storage.size_tib", "kubernetes"): {"storage": {"tier": "amlfs-125", "size_tib": 16.0}},
    ("storage.servers", "kubernetes"): {"storage": {"tier": "minio-nvme", "servers": 1}},
}
"""What must be written besides for a key to be read at all."""
OTHERWISE: dict[tuple[str, str], dict[str, Any]] = {
    ("machine", "ray"): {"machine": "p5"},
    ("volumes.*.mount", "slurm"): {"volumes": [{"mount": "/other", "path": "/lustre"}]},
    ("volumes.*.mount", "kubernetes"): {"volumes": [{"mount": "/data", "pvc": "shared"}, {"mount": "/o", "pvc": "x"}]},
    ("volumes.*.read_only", "slurm"): {"volumes": [{"mount": "/corpus", "path": "/lustre", "read_only": True}]},
}
"""Where a key is written otherwise on one target."""
ON_RAYS_NODES = ("secrets.*.env", "secrets.*.file", "setup")
"""What the driver on a Ray cluster reads from its copy of the cluster file (`tests/launch/ray`)."""


def merged(*bodies: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for body in bodies:
        for key, value in deepcopy(body).items():
            found[key] = merged(found.get(key, {}), value) if isinstance(value, dict) else value
    return found


def cases(*, read: bool, shown: str = "request") -> list[tuple[str, str]]:
    return [
        (name, target)
        for name, reader in KEY_SUPPORT.items()
        for target in TARGET_NAMES
        if name in WRITTEN and (target in reader.targets) is read and (not read or reader.shown == shown)
    ]


def loaded(folder: Path, body: dict[str, Any]) -> Cluster:
    file = folder / "mine.yaml"
    file.write_text(yaml.safe_dump(body, sort_keys=False))
    return load_cluster(file)


def job_of(folder: Path, cluster: Cluster) -> Job:
    text = recipe_text("dense").replace(
        "data:\n  synthetic: true\n", "tokenizer: /data/tiny\ndata:\n  train: [{path: /data/corpus/*.jsonl}]\n"
    )
    (folder / "recipe.yaml").write_text(text)
    ranks = cluster.nodes.default * 8
    asked = ["train.precision=bf16", f"layout={{dp: {ranks}}}", f"train.global_batch={ranks}"]
    return build_job(load_recipe(str(folder / "recipe.yaml"), asked), cluster, code=CODE)


def sent(folder: Path, body: dict[str, Any]) -> str:
    """What a cluster file leads to, without its own copy among the files of the job."""
    cluster = loaded(folder, body)
    job = job_of(folder, cluster)
    files = {name: text for name, text in job.files.items() if name != "cluster.yaml"}
    code = CODE if cluster.target == "kubernetes" else None
    return target_of(cluster).render(replace(job, files=files, code=code)).text()


def pair(name: str, target: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """A cluster file without a key and with it."""
    before = merged(BASES[target], BESIDE.get((name, target), {}))
    return before, merged(before, OTHERWISE.get((name, target), WRITTEN[name]))


def test_every_key_of_the_schema_says_who_reads_it() -> None:
    assert set(KEY_SUPPORT) == set(SCHEMA)
    # Below, in every file of these tests, or in tests/plugins.
    by_hand = {"trainshed", "name", "target", "nodes.max", "locked", "plugins"}
    assert {name for name in LEAVES if name not in WRITTEN} == by_hand


@pytest.mark.parametrize(("name", "target"), cases(read=False))
def test_a_key_that_a_target_does_not_read_is_refused_by_name(tmp_path: Path, name: str, target: str) -> None:
    body = merged(BASES[target], WRITTEN[name] or SHARED)
    with pytest.raises(RecipeError) as caught:
        loaded(tmp_path, body)
    above = [name.split(".*")[0], name.split(".")[0], name]
    assert any(f"`{part}" in caught.value.what for part in above), caught.value.what
    assert "is not read" in caught.value.what
    assert "mine.yaml:" in str(caught.value)
    assert caught.value.hint or ";" in caught.value.what


SENT = [case for case in cases(read=True) if case[1] != "local" and not (case[1] == "ray" and case[0] in ON_RAYS_NODES)]
"""What the driver reads on the nodes of a Ray cluster, and what is read here, is not sent."""


@pytest.mark.parametrize(("name", "target"), SENT)
def test_a_key_that_a_target_reads_changes_what_is_sent(tmp_path: Path, name: str, target: str) -> None:
    before, after = pair(name, target)
    assert sent(tmp_path, before) != sent(tmp_path, after)


OF_OTHER_TESTS = {"calibration": "tests/workflow/test_one_planner.py", "mtbf_hours": "tests/plan/budget"}


@pytest.mark.parametrize(
    "name", [name for name in LEAVES if KEY_SUPPORT[name].shown == "plan" and name not in OF_OTHER_TESTS]
)
def test_a_key_of_the_plan_changes_what_is_planned(tmp_path: Path, name: str) -> None:
    before, after = pair(name, "kubernetes")
    jobs = [job_of(tmp_path, loaded(tmp_path, body)) for body in (before, after)]
    plans = [(job.notes, job.files["plan.json"], job.grace_seconds) for job in jobs]
    assert plans[0] != plans[1]


@pytest.mark.parametrize("name", [name for name in LEAVES if ".create." in name])
def test_how_a_volume_is_made_changes_what_storage_up_applies(tmp_path: Path, name: str) -> None:
    before = loaded(tmp_path, merged(BASES["kubernetes"], created()))
    after = loaded(tmp_path, merged(BASES["kubernetes"], WRITTEN[name]))
    assert storage_text(before) != storage_text(after)


@pytest.mark.parametrize("name", [name for name in LEAVES if name.startswith("stores.")])
def test_endpoints_reach_whoever_opens_a_store(tmp_path: Path, name: str) -> None:
    for target in TARGET_NAMES:
        before, after = (loaded(tmp_path, body) for body in pair(name, target))
        assert store_options(before) != store_options(after)


@pytest.mark.parametrize(
    ("target", "written", "what", "hint"),
    [
        (
            "slurm",
            {"capacity": {"spot": True}},
            "`capacity.spot` is not read on Slurm: Slurm offers such nodes as a partition or a quality of service",
            "write slurm.partition or .qos",
        ),
        (
            "kubernetes",
            {"kubernetes": {"requests": "devices"}},
            "`kubernetes.requests` is not read: it is for pods with GPUs, in a queue that covers devices alone",
            "delete it, or write `queue: NAME` beside it",
        ),
        (
            "kubernetes",
            {"kubernetes": {"queue": "gpus", "requests": "devices"}, "limits": {"stages": {"train": {"cpus": 9}}}},
            "`limits.stages` is not read: pods with GPUs ask for devices alone (`kubernetes.requests`)",
            "delete what it says of `train` and `serve`",
        ),
        (
            "slurm",
            {"image": "registry/x:1"},
            "`image` is not read: jobs run on the nodes as they are (`slurm.container: none`)",
            "write `slurm: {container: pyxis}`, or delete it",
        ),
        (
            "slurm",
            {"secrets": {"HF_TOKEN": {"k8s": "a/b"}}},
            "`secrets.HF_TOKEN.k8s` is not read on Slurm: its nodes know no secrets of Kubernetes",
            "write {env: NAME} or {file: PATH}",
        ),
        (
            "slurm",
            {"service_account": "me"},
            "`service_account` is not read on Slurm: jobs run as whoever submits them",
            "write slurm.account for who is charged",
        ),
        (
            "slurm",
            {"kubernetes": {"namespace": "ml"}},
            "`kubernetes` is not read on Slurm: it is not its section",
            "delete it, or write `target: kubernetes`",
        ),
        (
            "slurm",
            merged(PYXIS, {"slurm": {"venv": "/x"}}),
            "`slurm.venv` is not read: jobs run in an image (`slurm.container: pyxis`)",
            "delete one of the two",
        ),
        (
            "slurm",
            merged(PYXIS, {"volumes": [{"mount": "/data", "pvc": "x"}]}),
            "`volumes.0.pvc` is not read on Slurm: Slurm's nodes mount disks themselves",
            "write {mount: …, path: …}, a folder of the shared disk",
        ),
        (
            "kubernetes",
            {"kubernetes": {"runtime": "mine"}},
            "`kubernetes.runtime` is not read: it is a TrainJob's, and `kind` is another",
            "write `kind: trainjob`, or delete it",
        ),
        (
            "kubernetes",
            {"kubernetes": {"priority": "high"}},
            "`kubernetes.priority` is not read: it is Kueue's, and there is no queue",
            "write `queue: NAME` beside it",
        ),
        (
            "kubernetes",
            {"kubernetes": {"kind": "trainjob"}, "limits": {"restarts": 9}},
            "`limits.restarts` is not read: how often a TrainJob is started again is the business of its runtime",
            "delete it, or write `kind: jobset` below `kubernetes`",
        ),
        (
            "local",
            {"environment": {"OMP_NUM_THREADS": "1"}},
            "`environment` is not read on this machine: the commands here use this machine's own environment",
            "export it before you run, and delete it here",
        ),
        (
            "ray",
            {"image": "registry/x:1"},
            "`image` is not read on a running Ray cluster: the image of a running cluster cannot be chosen",
            "delete it",
        ),
    ],
)
def test_each_message(tmp_path: Path, target: str, written: dict[str, Any], what: str, hint: str) -> None:
    with pytest.raises(RecipeError) as caught:
        loaded(tmp_path, merged(BASES[target], written))
    assert (caught.value.what, caught.value.hint) == (what, hint)


def test_a_cluster_without_a_machine_is_refused_and_processors_are_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for target in ("slurm", "kubernetes", "ray"):
        without = {key: value for key, value in BASES[target].items() if key != "machine"}
        with pytest.raises(RecipeError) as caught:
            loaded(tmp_path, without)
        assert caught.value.what == "is missing: what machines are its nodes?"
        assert "or `machine: cpu` for nodes without GPUs" in (caught.value.hint or "")
    (tmp_path / "recipe.yaml").write_text(recipe_text("dense"))
    (tmp_path / "mine.yaml").write_text("name: c\ntarget: slurm\nstore: /data\n")
    asked = ["render", str(tmp_path / "recipe.yaml"), "--on", str(tmp_path / "mine.yaml"), "--gpus", "32"]
    assert run_cli(asked) == 2
    assert "mine.yaml (machine): is missing: what machines are its nodes?" in capsys.readouterr().err
    assert run_cli([*asked, "cluster.machine=cpu"]) == 2
    assert "--gpus: 32 GPUs, and the nodes of c have none" in capsys.readouterr().err
    assert run_cli([*asked[:-2], "cluster.machine=cpu", "layout.dp=1"]) == 0
    assert "machine: cpu: nothing is predicted, and ranks run on processors" in capsys.readouterr().err


def test_more_nodes_than_there_are_is_what_max_refuses(tmp_path: Path) -> None:
    body = merged(BASES["slurm"], {"nodes": {"default": 1, "max": 1}})
    (tmp_path / "recipe.yaml").write_text(recipe_text("dense"))
    recipe = load_recipe(str(tmp_path / "recipe.yaml"), ["train.precision=bf16"])
    cluster = loaded(tmp_path, body)
    with pytest.raises(InputError, match="2 nodes, and the cluster c has 1 at most"):
        build_job(recipe, cluster, code=CODE, nodes=2)


def test_the_copy_that_an_older_version_kept_is_still_read(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text("name: c\ntarget: slurm\ncapacity: {spot: true}\n")
    assert load_cluster(file, checked=False).capacity.spot is True
