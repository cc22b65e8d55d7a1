"""The GKE seed: its NeMo file key by key, and its job by a stand-in that reads the config, logs and dies once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from support.recipes.foreign_tasks import FILES, task_of
from support.runs.job_files import write_files
from trainshed.engines.keys import flatten
from trainshed.engines.launch import build_launch, launcher_script
from trainshed.launch.job import CodeArchive, Job
from trainshed.launch.ranks import free_port
from trainshed.recipe import load_cluster, load_recipe, parse_recipe
from trainshed.workflow.submit import build_job

CHECKPOINTS = "exp_manager.checkpoint_callback_params"
DIFFERENT = {
    f"{CHECKPOINTS}.filename": "none is written",
    f"{CHECKPOINTS}.mode": "none is written",
    f"{CHECKPOINTS}.monitor": "none is written",
    f"{CHECKPOINTS}.save_top_k": "none is written",
    f"{CHECKPOINTS}.model_parallel_size": "the product itself in place of an interpolation",
    "exp_manager.resume_if_exists": "a start after a failure goes on",
    "model.apply_query_key_layer_scaling": "is for fp16; NeMo switches it off in bf16 and fp8",
    "model.max_position_embeddings": "the value itself in place of an interpolation",
    "model.optim.sched.constant_steps": "the file's warm-up, decay and constant steps are longer than its max_steps",
}
"""Keys of the seed's file that we write otherwise, and why."""
ABSENT = {
    "exp_manager.explicit_log_dir": "on the command line",
    "exp_manager.name": "on the command line",
    "model.data.data_cache_gcs_dir": "Google's launcher copied the tokens; `data.stage: nvme` does",
    "model.data.data_cache_local_dir": "as above",
    "model.data.data_prefix": "on the command line, when the tokens are staged",
    "model.data.index_mapping_dir": "on the command line",
    "model.moe_aux_loss_coeff": "the model has no experts",
    "model.moe_grouped_gemm": "the model has no experts",
    "model.tokenizer.merge_file": "on the command line",
    "model.tokenizer.vocab_file": "on the command line",
    "run.name": "of NeMo's launcher",
    "run.time_limit": "of NeMo's launcher",
    "trainer.max_time": "`limits.hours` of the cluster file",
    **{f"model.nsys_profile.{key}": "`observe.profile`" for key in ("enabled", "end_step", "ranks", "start_step")},
}
"""Keys of the seed's file that ours lacks, and who has them."""


@pytest.fixture(scope="module")
def job() -> Job:
    code = CodeArchive("code.tar.xz", "0" * 64, b"code")
    return build_job(load_recipe("gke-llama3-70b"), load_cluster("gke-a3-mega"), offline=True, code=code)


def test_our_file_is_the_seeds_key_by_key_but_for_what_is_said(job: Job) -> None:
    ours = flatten(yaml.safe_load(job.files["nemo.yaml"]))
    seed = flatten(yaml.safe_load((FILES / "nemo-llama3-70b-fp8.yaml").read_text()))
    assert {key for key in seed if key not in ours} == set(ABSENT)
    assert {key for key in seed if key in ours and ours[key] != seed[key]} == set(DIFFERENT)
    assert ours["exp_manager.create_checkpoint_callback"] is seed["exp_manager.create_checkpoint_callback"] is False


def test_the_command_in_the_recipes_header_is_one_that_works(job: Job) -> None:
    lines = (Path(str(load_recipe("gke-llama3-70b").folder)) / "gke-llama3-70b.yaml").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith("#   trainshed submit")]
    _, _, recipe, _, cluster, *overrides = line.removeprefix("#").split()
    on = [word.removeprefix("cluster.").replace("BUCKET", "mine") for word in overrides]
    named = load_cluster(cluster, on)
    assert (named.image, named.volumes[0].bucket, named.volumes[0].mount) == ("IMAGE", "mine", "/gcs")
    assert build_job(load_recipe(recipe), named, offline=True, code=job.code).run.startswith("/gcs/runs/")


STAND_IN = """
import ast, json, os, sys, time, pathlib
import yaml
words = dict(word.split("=", 1) for word in sys.argv[1:])
config = yaml.safe_load(open(os.path.join(words["--config-path"], words["--config-name"])))
rank, attempt = int(os.environ["RANK"]), os.environ["TRAINSHED_ATTEMPT"]
place = {key.lstrip("+"): value for key, value in words.items() if key.startswith("++")}
weight, prefix = ast.literal_eval(place["model.data.data_prefix"])
assert os.path.exists(prefix + ".bin") and "/ssd/" in prefix, prefix
assert config["exp_manager"]["create_checkpoint_callback"] is False
log = pathlib.Path(place["exp_manager.dllogger_logger_kwargs.json_file"])
log.parent.mkdir(parents=True, exist_ok=True)
with log.open("w") as file:  # every rank opens it, as NeMo does
    def write(step, data):
        if rank == 0:
            line = {"timestamp": time.time(), "elapsedtime": 1, "type": "LOG", "step": step, "data": data}
            file.write("DLLL" + json.dumps(line) + "\\n")
            file.flush()
    write("PARAMETER", {"cfg/trainer/max_steps": config["trainer"]["max_steps"]})
    for step in range(1, config["trainer"]["max_steps"] + 1):
        write(step, {"train_step_timing in s": 0.5, "reduced_train_loss": 9.0 - step, "global_step": float(step)})
        if attempt == "1" and step == 2 and rank == 1:
            os._exit(9)
        if attempt == "1" and step == 3:
            time.sleep(600)
"""
SMALL = """
name: gke-small
model:
  init: random
  config: {family: llama, layers: 4, hidden: 64, ffn: 128, heads: 4, kv_heads: 2, vocab_size: 50257,
    max_positions: 64, rope: {base: 10000.0}}
tokenizer: hf://openai-community/gpt2@abc
data: {sequence_length: 64, stage: nvme, train: [{tokens: corpus}]}
train: {steps: 4, global_batch: 4, precision: bf16, optimizer: {lr: 1.0e-4}}
layout: {tp: 2, micro_batch: 1}
engine: {name: nemo, version: "24.07"}
checkpoint: off
"""


def test_the_job_reads_its_config_stages_its_tokens_logs_by_node_and_is_started_again(tmp_path: Path) -> None:
    run, files = tmp_path / "run", tmp_path / "job"
    (run / "engine").mkdir(parents=True)
    files.mkdir()
    for suffix in (".bin", ".idx"):
        (tmp_path / f"corpus{suffix}").write_bytes(b"tokens")
    (run / "engine" / "data_prefix.txt").write_text(f"['1.0','{tmp_path}/corpus']")
    places = {"run_folder": str(run), "job_folder": str(files), "node_disk": str(tmp_path / "ssd")}
    task = task_of(parse_recipe(SMALL), nodes=2, steps=4, gpus_per_node=1, **places)
    launch = replace(build_launch(task), program=str(tmp_path / "standin.py"))
    (tmp_path / "standin.py").write_text(STAND_IN)
    write_files(files, launch.files)
    (files / "train.sh").write_text(launcher_script(launch, task.site, python=sys.executable))

    def start(attempt: int) -> list[int]:
        """Both nodes; when one fails the other is ended, as a JobSet does."""
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "TRAINSHED_ATTEMPT": str(attempt)}
        nodes = [
            subprocess.Popen(
                ["bash", files / "train.sh"],
                env=os.environ | shared | {"NODE_RANK": str(node)},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            for node in range(2)
        ]
        if nodes[1].wait(300):
            nodes[0].terminate()
        return [node.wait(300) for node in nodes]

    def steps(node: int) -> list[object]:
        lines = (run / f"dllogger/rank-{node}/dllogger.json").read_text().splitlines()
        return [json.loads(line.removeprefix("DLLL"))["step"] for line in lines]

    assert start(1)[1] != 0
    assert start(2) == [0, 0]
    assert steps(0) == ["PARAMETER", 1, 2, 3, 4]
    assert steps(1) == [], "only the first rank writes, and each node has its own file"
    assert sorted(path.name for path in (run / "logs").iterdir()) == ["attempt-0001", "attempt-0002"]
    assert not (run / "checkpoints").exists()
