"""The stages on CPUs, done from a job's files alone, leave what training and foreign engines find."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from support.models.megatron_folders import assert_equal
from support.models.tiny_models import save_tiny_hf, tiny_config
from support.recipes.text_recipes import write_recipe, write_script
from support.runs.job_files import write_files
from trainshed.checkpoints.convert.convert import convert_weights
from trainshed.checkpoints.formats import TargetFormat, open_weights
from trainshed.data.tokens.indexed_dataset import IndexedDataset
from trainshed.errors import CorruptData, InputError
from trainshed.launch.job import CodeArchive
from trainshed.observe.event_log import read_events
from trainshed.observe.run_facts import EngineRun, run_facts
from trainshed.observe.stages import stage_records
from trainshed.recipe import Recipe, load_cluster, load_recipe
from trainshed.run_folder import MEGATRON_CHECKPOINTS
from trainshed.storage import LocalStore
from trainshed.workflow import open_run_folder
from trainshed.workflow.stages import check_resumable, run_stage, write_engine_data, write_engine_tokenizer
from trainshed.workflow.submit import build_job

CODE = CodeArchive("trainshed-0-0.tar.xz", "0" * 64, b"")


def job_folder(tmp_path: Path, *overrides: str, parts: int = 1) -> tuple[Path, Path]:
    """The folder of a job's files as a node has it, and the run's folder."""
    write_script(tmp_path)
    recipe = load_recipe(str(write_recipe(tmp_path, "{script: numbers.py}")), ["layout={dp: 2}", *overrides])
    return written_job(tmp_path, recipe, parts)


def written_job(tmp_path: Path, recipe: Recipe, parts: int = 1) -> tuple[Path, Path]:
    cluster = tmp_path / "cluster.yaml"
    cluster.write_text(
        f"name: c\ntarget: slurm\nmachine: cpu\nstore: {tmp_path}/shared\nnodes: {{default: 1}}\n"
        f"limits: {{prepare_parts: {parts}}}\n"
    )
    job = build_job(recipe, load_cluster(cluster), code=CODE)
    folder = tmp_path / "job"
    write_files(folder, job.files)
    return folder, Path(job.run)


def test_preparing_from_a_jobs_files_makes_the_run_that_its_ranks_open(tmp_path: Path) -> None:
    folder, run = job_folder(tmp_path)
    run_stage("prepare", folder)
    opened = open_run_folder(run)
    assert opened.id == run.name
    assert opened.sources[0].tokens > 0


@pytest.mark.parametrize(
    ("saved", "wrote"),
    [
        ("checkpoints/step-00000010/manifest.json", "torch"),
        ("checkpoints-megatron/iter_0000010/.metadata", "megatron"),
        ("checkpoints/epoch_0/model.safetensors", "torchtune"),
    ],
)
def test_a_run_whose_checkpoints_another_engine_wrote_is_not_begun_again(
    saved: str, wrote: str, tmp_path: Path
) -> None:
    folder, run = job_folder(tmp_path)
    (run / saved).parent.mkdir(parents=True)
    (run / saved).touch()
    if wrote == "torch":
        run_stage("prepare", folder)
        return
    with pytest.raises(InputError, match=f"are of the engine {wrote}, and torch would begin at step 0") as raised:
        run_stage("prepare", folder)
    assert raised.value.hint is not None
    assert "--id NAME" in raised.value.hint
    assert not (run / "prepared.json").exists()


def test_parts_share_the_shards_and_preparing_finds_them_all(tmp_path: Path) -> None:
    folder, run = job_folder(tmp_path, "data.shards=3", parts=2)
    for part in (1, 0):
        run_stage("tokenise", folder, part=part, parts=2)
    made = {path: path.stat().st_mtime_ns for path in (tmp_path / "shared").rglob("tokens.bin")}
    assert len(made) == 3
    run_stage("prepare", folder)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "shared").rglob("tokens.bin")} == made
    run_stage("tokenise", folder, part=1, parts=2)
    records = {record.name: record for record in stage_records(read_events(LocalStore(run), ""))}
    assert {name: record.state for name, record in records.items()} == {
        "tokenise 2/2": "skipped",
        "tokenise 1/2": "done",
        "prepare": "done",
    }
    assert records["tokenise 2/2"].what == "its shards were already there"
    assert "order of 3 steps" in (records["prepare"].what or "")
    assert len(open_run_folder(run).sources[0].prefixes) == 3


def test_a_foreign_engine_finds_tokens_and_tokenizer_under_fixed_names(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    from trainshed.workflow import prepare_run

    folder, run = job_folder(tmp_path, "data.shards=2")
    cluster = load_cluster(folder / "cluster.yaml").inside()
    prepared = prepare_run(load_recipe(str(folder / "recipe.yaml")), cluster, id=run.name)
    write_engine_data(prepared)
    assert prepared.tokenizer is not None
    write_engine_tokenizer(prepared.tokenizer, run)
    splits = json.loads((run / "engine" / "data.json").read_text())
    weights, prefixes = splits["train"][0::2], splits["train"][1::2]
    assert [float(weight) for weight in weights] == [0.5, 0.5]
    assert sum(_tokens(prefix) for prefix in prefixes) == prepared.sources[0].tokens
    tokenizer = AutoTokenizer.from_pretrained(run / "engine" / "tokenizer")
    assert tokenizer("one two")["input_ids"] == prepared.tokenizer.backend.encode("one two").ids
    hydra = (run / "engine" / "data_prefix.txt").read_text()
    assert hydra.startswith("['0.5','")


def _tokens(prefix: str) -> int:
    with IndexedDataset(prefix) as reader:
        return reader.tokens


def test_a_stage_that_is_none_is_refused_by_name(tmp_path: Path) -> None:
    folder, run = job_folder(tmp_path)
    with pytest.raises(InputError, match="there is no stage `serve` on CPUs"):
        run_stage("serve", folder)
    assert not (run / "events").exists()


def test_base_weights_go_to_megatron_and_what_it_trained_comes_back_as_transformers_reads_it(tmp_path: Path) -> None:
    base = tmp_path / "base"
    save_tiny_hf("llama", base)
    text = f"""
name: there-and-back
model: {{from: {base}}}
data: {{synthetic: true, sequence_length: 16}}
train: {{steps: 2, global_batch: 4, precision: bf16, optimizer: {{lr: 1.0e-3}}}}
layout: {{dp: 2}}
engine: megatron
export: {{dtype: fp32}}
"""
    folder, run = written_job(tmp_path, recipe_file(tmp_path, text))
    for stage in ("fetch", "convert", "prepare"):
        run_stage(stage, folder)
    placed = EngineRun.read(LocalStore(run), "")
    assert placed is not None
    assert (placed.engine, placed.world_size, placed.losses_rank) == ("megatron", 2, 1)
    facts = run_facts(LocalStore(run), "")
    assert (facts.global_batch, facts.gpus) == (4, 2)
    assert facts.config == tiny_config("llama"), "the weights bring it, and the recipe does not say it"
    verdict = json.loads((run / "engine" / "base" / "verdict.json").read_text())
    assert verdict["passed"] is True
    # Megatron itself would train from here; its checkpoint has the same form.
    shutil.copytree(run / "engine" / "base", run / MEGATRON_CHECKPOINTS)
    run_stage("export", folder)
    with open_weights(run / "export") as exported, open_weights(base) as source:
        assert_equal(exported, source)


def recipe_file(folder: Path, text: str) -> Recipe:
    (folder / "recipe.yaml").write_text(text)
    return load_recipe(str(folder / "recipe.yaml"))


def test_a_foreign_engine_is_not_let_go_on_from_a_checkpoint_that_is_damaged(tmp_path: Path) -> None:
    recipe = load_recipe("minio-llama3-1-70b-cpt")
    save_tiny_hf("llama", tmp_path / "hf", seed=1)
    made = tmp_path / "run" / MEGATRON_CHECKPOINTS
    convert_weights(str(tmp_path / "hf"), str(made), TargetFormat("megatron", "torch_dist"), logits=False)
    shutil.copytree(made / "release", made / "iter_0000005")
    (made / "release").rename(made / "iter_0000007")
    (made / "latest_checkpointed_iteration.txt").write_text("7")
    check_resumable(recipe, tmp_path / "run")
    file = next((made / "iter_0000007").glob("*.distcp"))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(CorruptData, match=r"the checkpoint of step 7 is damaged: .*checksum") as raised:
        check_resumable(recipe, tmp_path / "run")
    assert "write 5 into" in str(raised.value.hint)
    check_resumable(load_recipe("minio-llama3-1-70b-cpt", ["checkpoint.resume=fresh"]), tmp_path / "run")
