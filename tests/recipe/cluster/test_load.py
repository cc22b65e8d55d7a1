"""The cluster file: found in order, strict, and never the home of a secret."""

from pathlib import Path

import pytest

from trainshed.errors import RecipeError
from trainshed.recipe import StoreEndpoint, known_clusters, load_cluster, to_yaml

MINIO = """\
trainshed: 1
name: minio
target: kubernetes
store: s3://bucket/trainshed
stores:
  s3: {endpoint: "http://minio:9000", region: us-east-1, addressing: path}
  s3://public.data: {anonymous: true}
secrets:
  HF_TOKEN: {k8s: hf-token/hf-token}
nodes: {default: 2, max: 4}
machine: laptop
storage: {tier: minio-nvme, size_tib: 16, servers: 4}
calibration: calibrations/minio.yaml
price_per_gpu_hour: 2.5
mtbf_hours: 6000
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    (tmp_path / "clusters").mkdir()
    (tmp_path / "config" / "trainshed" / "clusters").mkdir(parents=True)
    return tmp_path


def failure(project: Path, text: str) -> RecipeError:
    (project / "clusters" / "bad.yaml").write_text(text)
    with pytest.raises(RecipeError) as caught:
        load_cluster("bad")
    return caught.value


@pytest.mark.parametrize("name", known_clusters())
def test_every_shipped_cluster_loads(name: str) -> None:
    assert load_cluster(name).name == name


def test_local_is_the_default_and_keeps_its_store_here() -> None:
    cluster = load_cluster()
    assert (cluster.name, cluster.target, cluster.store_root) == ("local", "local", "./store")


def test_a_full_cluster_file_loads_and_loads_back_equal(project: Path) -> None:
    (project / "clusters" / "minio.yaml").write_text(MINIO)
    cluster = load_cluster("minio")
    assert cluster.stores["s3://public.data"] == StoreEndpoint(anonymous=True)
    assert cluster.secrets["HF_TOKEN"].k8s == "hf-token/hf-token"
    (project / "clusters" / "again.yaml").write_text(to_yaml(cluster))
    assert load_cluster("again") == cluster


def test_what_would_run_here_refuses_a_cluster_that_is_elsewhere_and_says_how_to_send_it(project: Path) -> None:
    file = project / "clusters" / "mine.yaml"
    file.write_text("name: mine\ntarget: slurm\nmachine: cpu\n")
    with pytest.raises(RecipeError) as caught:
        load_cluster("mine").check_runs_here()
    assert caught.value.exit_code == 2
    assert caught.value.where == "clusters/mine.yaml:2 (target)"
    assert caught.value.what == "mine is a slurm cluster: its jobs do not run on this machine"
    assert caught.value.hint == "`trainshed submit RECIPE --on mine` sends them there; leave --on out to run here"
    load_cluster("local").check_runs_here()
    load_cluster("mine").inside().check_runs_here()


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("target: ray\n", "is missing: which cluster takes the jobs?"),
        ("target: kubernetes\nvolumes: [{mount: /data}]\n", "needs exactly one of pvc, bucket, host and path"),
        ("target: kubernetes\nvolumes: [{mount: /d, host: /d, create: {kind: fsx, size: 1Ti}}]\n", "names none"),
        ("target: kubernetes\nkubernetes: {topology: {level: block}}\n", "is Kueue's work, and there is no queue"),
        ("target: slurm\ncapacity: {spot: true, reservation: r}\n", "these contradict each other"),
        ("target: slurm\nsharp: true\nfabric: efa-v2\n", "efa-v2 has no switches that sum"),
        ("target: slurm\nenvironment: {A B: x}\n", "A B"),
        ("target: slurm\nslurm: {gpus: 'gpu:h100:4'}\n", "4 is a number of GPUs, which the machine says"),
    ],
)
def test_launch_keys_that_contradict_each_other_are_named(project: Path, text: str, what: str) -> None:
    assert what in failure(project, "name: bad\n" + text).what


@pytest.mark.parametrize(
    "override",
    ["image=other", "kubernetes.queue=fast", 'kubernetes."queue"=fast', "kubernetes={queue: fast}", "locked=[]"],
)
def test_what_an_administrator_locks_cannot_be_overridden(project: Path, override: str) -> None:
    file = project / "clusters" / "shared.yaml"
    file.write_text("name: shared\ntarget: kubernetes\nmachine: p5\nimage: own\nlocked: [image, kubernetes.queue]\n")
    with pytest.raises(RecipeError, match="is locked by whoever runs this cluster"):
        load_cluster("shared", [override])
    assert load_cluster("shared", ["kubernetes.labels={team: x}"]).image == "own"


def test_the_project_wins_over_the_user_and_the_user_over_the_shipped(project: Path) -> None:
    assert load_cluster("local").machine is None
    user = project / "config" / "trainshed" / "clusters" / "local.yaml"
    user.write_text("name: local\ntarget: local\nmachine: users\n")
    assert load_cluster("local").machine == "users"
    (project / "clusters" / "local.yaml").write_text("name: local\ntarget: local\nmachine: projects\n")
    assert load_cluster("local").machine == "projects"
    assert load_cluster(user).machine == "users"


def test_overrides_are_written_over_the_file(project: Path) -> None:
    (project / "clusters" / "minio.yaml").write_text(MINIO)
    cluster = load_cluster("minio", ['stores."s3://public.data".region=eu', "nodes.max=null"])
    assert cluster.stores["s3://public.data"].region == "eu"
    assert cluster.nodes.max is None


def test_a_misspelt_cluster_gets_the_nearest(project: Path) -> None:
    with pytest.raises(RecipeError) as caught:
        load_cluster("locl")
    assert (caught.value.what, caught.value.hint) == ("there is no such cluster file", "did you mean local?")
    with pytest.raises(RecipeError) as caught:
        load_cluster("nowhere/else.yaml")
    assert caught.value.hint is not None
    assert caught.value.hint.startswith("known clusters: ")


@pytest.mark.parametrize(
    ("line", "where", "what", "hint"),
    [
        ("target: slum", "(target)", "`slum` is not one of local, slurm, kubernetes, ray", "did you mean slurm?"),
        (
            "target: k8s",
            "(target)",
            "`k8s` is not one of local, slurm, kubernetes, ray",
            "did you mean kubernetes?",
        ),
        (
            "target: local\nlimits: {shared_memory: a lot}",
            "(limits.shared_memory)",
            "`a lot` is not a size",
            "write a number and its unit, for example 250Gi",
        ),
        (
            "target: kubernetes\nvolumes: [{mount: data, pvc: x}]",
            "(volumes.0.mount)",
            "`data` is not an absolute path",
            "write for example /data, without a colon",
        ),
        (
            "target: kubernetes\nkubernetes: {resources: {ib: 1}}",
            "(kubernetes.resources.ib)",
            "`ib` is not a name of a device",
            "write what `kubectl get nodes -o yaml` lists below `allocatable`, for example rdma/ib",
        ),
        (
            "target: kubernetes\nkubernetes: {resources: {nvidia.com/gpu: 8}}",
            '(kubernetes.resources."nvidia.com/gpu")',
            "GPUs are asked for by the `machine`",
            "delete it",
        ),
        (
            "target: kubernetes\nkubernetes: {resources: {rdma/ib: 2Gi}}",
            "(kubernetes.resources.rdma/ib)",
            "devices are counted, and `2Gi` is not a number",
            "write for example 1",
        ),
        (
            "target: kubernetes\nkubernetes: {resources: {rdma/ib: 0}}",
            "(kubernetes.resources.rdma/ib)",
            "must be at least 1, and is 0",
            None,
        ),
        ("target: local\nenv: {A: x}", "(env)", "unknown key `env`", "did you mean environment?"),
        ("target: local\ntime: 24", "(time)", "unknown key `time`", "did you mean limits.hours?"),
        (
            "target: local\nstorage: {size_tib: 4}",
            "(storage.tier)",
            "is missing",
            "write for example `tier: amlfs-250`",
        ),
        ("target: local\nmtbf_hours: 0", "(mtbf_hours)", "must be more than 0, and is 0", None),
        (
            "target: slurm\nsecrets: {X;Y: {env: A}}",
            "(secrets.X;Y)",
            "`X;Y` is not a name of a variable",
            "use letters, digits and underscores, for example HF_HOME",
        ),
        ("target: slurm\nslurm: {port: 99999}", "(slurm.port)", "must be at most 65535, and is 99999", None),
        ("target: local\nqueue: x", "(queue)", "unknown key `queue`", None),
        (
            "target: local\nstores: {ftp: {}}",
            "(stores.ftp)",
            "`ftp` is neither a scheme nor a bucket",
            "write s3, or s3://bucket",
        ),
        (
            "target: local\nstores: {s3: {endpoint: minio}}",
            "(stores.s3.endpoint)",
            "`minio` has no scheme",
            "write https://minio",
        ),
        (
            "target: local\nstores: {s3: {endpont: x}}",
            "(stores.s3.endpont)",
            "unknown key `endpont`",
            "did you mean stores.s3.endpoint?",
        ),
        (
            "target: local\nsecrets: {A: {env: x, file: y}}",
            "(secrets.A)",
            "needs exactly one of env, file and k8s",
            "write for example {env: HF_TOKEN}",
        ),
        ("target: local\nsecrets: {A: {k8s: name}}", "(secrets.A.k8s)", "names no key of a secret", "write name/key"),
        (
            "target: local\nnodes: {default: 3, max: 2}",
            "(nodes.default)",
            "3 is more than max: 2",
            "write a smaller one",
        ),
    ],
)
def test_each_message(project: Path, line: str, where: str, what: str, hint: str | None) -> None:
    found = failure(project, f"name: bad\n{line}\n")
    assert found.where is not None
    assert found.where.startswith("clusters/bad.yaml:")
    assert found.where.endswith(where)
    assert found.what == what
    if hint:
        assert found.hint == hint


def test_a_secret_written_out_is_refused_and_not_repeated(project: Path) -> None:
    found = failure(project, "name: bad\ntarget: local\nsecrets:\n  HF_TOKEN: hf_hunter2\n")
    assert found.where == "clusters/bad.yaml:4 (secrets.HF_TOKEN)"
    assert found.what == "a secret is never written into a file: cluster files are shared and kept with every run"
    assert found.hint == "write where to find it: {env: NAME}, {file: PATH} or {k8s: name/key}"
    assert "hunter2" not in str(found)


def test_a_newer_format_is_refused(project: Path) -> None:
    assert failure(project, "trainshed: 9\nnew: 1\n").what == "the file has format 9, and this Trainshed reads up to 1"


def test_numbers_of_the_environment_are_text(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("name: mine\ntarget: slurm\nmachine: dgx-h100\nstore: /s\nenvironment: {A: 1, B: 0.5, C: '007'}\n")
    assert load_cluster(file, ["environment.X=2"]).environment == {"A": "1", "B": "0.5", "C": "007", "X": "2"}
    with pytest.raises(RecipeError, match="environment"):
        load_cluster(file, ["environment.X=true"])
