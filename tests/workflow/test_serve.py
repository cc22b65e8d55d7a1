"""The stage that serves, from recipe and cluster; what could not serve there is refused before anything is sent."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.recipes.small_recipes import recipe_text
from trainshed.errors import RecipeError
from trainshed.launch.job import CodeArchive, Job, JobFile
from trainshed.plan.budget.storage import planned_storage
from trainshed.recipe import Serve, load_cluster, load_recipe
from trainshed.reporting import SILENT
from trainshed.storage import open_folder
from trainshed.workflow.serve import export_address, local_serve_command, startup_seconds
from trainshed.workflow.stages import publish_export
from trainshed.workflow.submit import build_job

CODE = CodeArchive("trainshed-0-0.tar.xz", "0" * 64, b"")
LARGE = ("train.precision=bf16", "model.config=null", "model.preset=llama3.1-70b", "train.global_batch=16")
LAPTOPS = "name: laptops\ntarget: slurm\nmachine: cpu\nstore: /shared\n"


def job_of(folder: Path, *overrides: str, cluster: str = LAPTOPS, on: tuple[str, ...] = ()) -> Job:
    (folder / "recipe.yaml").write_text(recipe_text("dense"))
    (folder / "cluster.yaml").write_text(cluster)
    recipe = load_recipe(str(folder / "recipe.yaml"), ["export={}", "tokenizer=hf://org/tiny", *overrides])
    where = load_cluster(folder / "cluster.yaml" if "\n" in cluster else cluster, on)
    return build_job(recipe, where, code=CODE, offline=True)


def test_serving_is_the_last_stage_and_says_what_it_runs(tmp_path: Path) -> None:
    job = job_of(tmp_path, "serve={gpus: 0, max_length: 24, max_sequences: 4}")
    assert [stage.name for stage in job.stages] == ["prepare", "train", "export", "serve"]
    stage = job.stages[-1]
    assert (stage.gpus_per_node, stage.cpus, stage.memory) == (0, 8, "32Gi")
    assert stage.serving is not None
    assert stage.serving.words == (
        *("serve", f"{job.run}/export", "--host", "0.0.0.0", "--name", "proof"),
        *("--max-length", "24", "--max-sequences", "4", "--grace", "120"),
    )
    (tmp_path / "job.json").write_text(job.files["job.json"])
    assert JobFile.read(tmp_path).stages == job.stages


@pytest.mark.s3
def test_a_bucket_gets_a_copy_of_what_is_served_also_after_more_training(s3_bucket: str, tmp_path: Path) -> None:
    to, run = f"s3://{s3_bucket}/trained", tmp_path / "runs" / "proof" / "1a2b"
    job = job_of(tmp_path, "serve={gpus: 0}", f"export.to={to}")
    serving = job.stages[-1].serving
    assert serving is not None
    assert serving.words[1] == f"{job.run}/export", "a server reads from a path that its node mounts"
    overrides = ["export={}", "tokenizer=hf://org/tiny", "serve={gpus: 0}", f"export.to={to}"]
    recipe = load_recipe(str(tmp_path / "recipe.yaml"), overrides)
    target = Path(export_address(recipe, str(run)))
    target.mkdir(parents=True)
    copy = open_folder(f"{to}/proof/1a2b")
    for weights in (b"trained", b"trained longer"):
        (target / "model.safetensors").write_bytes(weights)
        assert publish_export(recipe, run, str(target), None, SILENT) == str(target)
        assert copy.read("model.safetensors") == weights
        assert [found.path for found in copy.list() if found.path.endswith("manifest.json")]
    # Without a server the export is written there at once.
    alone = load_recipe(str(tmp_path / "recipe.yaml"), [*overrides, "serve=null"])
    assert export_address(alone, str(run)) == f"{to}/proof/1a2b"


def test_our_server_is_told_the_adapters(tmp_path: Path) -> None:
    job = job_of(tmp_path, "serve={gpus: 0, adapters: {one: /shared/one, two: 's3://bucket/two'}}")
    serving = job.stages[-1].serving
    assert serving is not None
    assert serving.words[4:10] == (
        *("--name", "proof", "--adapter", "one=/shared/one", "--adapter", "two=s3://bucket/two"),
    )


def test_vllm_is_started_by_a_script_of_the_job_in_its_own_image(tmp_path: Path) -> None:
    asked = "serve={engine: vllm, gpus: 4, image: vllm@sha256:1, replicas: 2, args: {seed: 3}, cpus: 16, memory: 64Gi}"
    job = job_of(tmp_path, asked, *LARGE, cluster="aks-nd-h100-v5", on=("image=a/b",))
    stage = job.stages[-1]
    assert (stage.script, stage.image, stage.gpus_per_node) == ("serve.sh", "vllm@sha256:1", 4)
    assert (stage.cpus, stage.memory) == (16, "64Gi")
    assert stage.serving is not None
    assert (stage.serving.replicas, stage.serving.ready) == (2, "/health")
    assert "--tensor-parallel-size 4" in job.files["serve.sh"]
    own = "--middleware megatron_api.MegatronApi"
    assert job.files["serve.sh"].endswith(f'--seed=3 {own} --port "${{TRAINSHED_PORT:-8000}}"\n')
    assert "class MegatronApi" in job.files["programs/megatron_api.py"]


GPUS = "serve={engine: vllm, gpus: 4, image: x}"


@pytest.mark.parametrize(
    ("overrides", "cluster", "key", "what", "hint"),
    [
        (
            ["serve={gpus: 0}"],
            "name: r\ntarget: ray\nmachine: cpu\nstore: /s\nray: {address: 'http://h:1'}\n",
            "serve",
            "a running Ray cluster takes jobs that end",
            "Kubernetes or Slurm",
        ),
        (["serve={}"], LAPTOPS, "serve.gpus", "have no GPUs", "write `gpus: 0`"),
        (["serve={gpus: 0, replicas: 2}"], LAPTOPS, "serve.replicas", "shares requests", "write `replicas: 1`"),
        (["serve={gpus: 0, image: x}"], LAPTOPS, "serve.image", "this cluster has no containers", "container: pyxis"),
        (["serve={gpus: 0, max_length: 64}"], LAPTOPS, "serve.max_length", "the 32 positions", "write 32 or less"),
        (["serve={gpus: 0, adapters: {a: b/c}}"], LAPTOPS, "serve.adapters.a", "is relative to", "an absolute path"),
        (["serve={gpus: 0, image: x}"], f"{LAPTOPS}locked: [image]\n", "serve.image", "`image` is locked", "delete it"),
        (["serve={engine: vllm}", *LARGE], "aks-nd-h100-v5", "serve", "in which image is vLLM?", "vllm/vllm-openai@"),
        (["serve={}", *LARGE], "aks-nd-h100-v5", "serve.gpus", "take 131 GiB of each GPU", "engine: vllm, gpus: 2"),
        ([GPUS.replace("4", "16"), *LARGE], "aks-nd-h100-v5", "serve.gpus", "has 8 GPUs", "write `gpus: 8` or less"),
        ([GPUS.replace("4", "3"), *LARGE], "aks-nd-h100-v5", "serve.gpus", "cannot be shared by 3", "divides 64"),
        ([GPUS[:-1] + ", args: {sede: 1}}", *LARGE], "aks-nd-h100-v5", "serve.args.sede", "none of the flags", "seed?"),
    ],
)  # fmt: skip
def test_what_could_not_serve_there_is_refused_where_it_is_written(
    overrides: list[str], cluster: str, key: str, what: str, hint: str, tmp_path: Path
) -> None:
    with pytest.raises(RecipeError) as caught:
        job_of(tmp_path, *overrides, cluster=cluster, on=() if "\n" in cluster else ("image=a/b",))
    assert what in caught.value.what
    assert hint in (caught.value.hint or "")
    assert key in (caught.value.where or "")


def test_the_time_to_start_follows_from_the_weights_and_where_they_lie() -> None:
    size = 140 * 10**9
    assert startup_seconds(Serve(), 10**6, None) == 120
    slow = planned_storage("fsx-lustre-250", 1.2)
    rate = slow.read_gb_per_s(1)
    assert startup_seconds(Serve(), size, slow) == pytest.approx(2 * 140 / rate + 60, abs=1)
    # All replicas read at once from a disk that is no faster for it, and vLLM compiles besides.
    assert startup_seconds(Serve(replicas=4), size, slow) == pytest.approx(2 * 140 / (rate / 4) + 60, abs=1)
    assert startup_seconds(Serve(engine="vllm"), size, slow) == pytest.approx(2 * 140 / rate + 660, abs=1)


def test_what_was_decided_about_a_server_is_said(tmp_path: Path) -> None:
    unknown = job_of(tmp_path, "serve={gpus: 0}").notes[-1]
    assert "at 0.2 GB/s (assumed, as the cluster file names no `storage`)" in unknown
    asked = "serve={engine: vllm, gpus: 4, image: vllm/vllm-openai:v1}"
    read, tag = job_of(tmp_path, asked, *LARGE, cluster="aks-nd-h100-v5", on=("image=a/b",)).notes[-2:]
    assert read.startswith("serve: 131 GiB of weights are read in ")
    assert tag == "serve.image is a tag, which may be another image tomorrow: write vllm/vllm-openai:v1@sha256:…"


EXPORTED = ["export={}", "tokenizer=hf://org/tiny", "serve={max_length: 8, port: 9000}"]


def test_here_the_command_is_said(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(recipe_text("dense"))
    recipe = load_recipe(str(tmp_path / "recipe.yaml"), EXPORTED)
    assert local_serve_command(recipe, "/my runs/export") == (
        "trainshed serve '/my runs/export' --name proof --max-length 8 --port 9000"
    )


def test_a_key_is_a_secret_of_the_cluster_and_travels_by_name(tmp_path: Path) -> None:
    with_key = LAPTOPS + "secrets: {SERVE_KEY: {env: MY_KEY}}\n"
    ours = job_of(tmp_path, "serve={gpus: 0, api_key: SERVE_KEY}", cluster=with_key).stages[-1].serving
    assert ours is not None
    assert ours.words[-4:-2] == ("--api-key-env", "SERVE_KEY")
    pods = ("gke-a3-mega", ("secrets={HF_TOKEN: {k8s: hf/token}, SERVE_KEY: {k8s: served/key}}",))
    vllm = "serve={engine: vllm, gpus: 4, image: vllm/vllm-openai@sha256:0, api_key: SERVE_KEY}"
    job = job_of(tmp_path, *LARGE, vllm, cluster=pods[0], on=pods[1])
    assert 'export VLLM_API_KEY="${SERVE_KEY:?}"' in job.files["serve.sh"].splitlines()
    with pytest.raises(RecipeError, match="has no secret `SERVE_KEY`") as caught:
        job_of(tmp_path, "serve={gpus: 0, api_key: SERVE_KEY}")
    assert "`SERVE_KEY: {env: SERVE_KEY}` below `secrets`" in (caught.value.hint or "")
    with pytest.raises(RecipeError, match=r"serve\.api_key"):
        job_of(tmp_path, "serve={gpus: 0, api_key: 'A;rm -rf /'}", cluster=with_key)
