"""Foreign files read as recipes: what is mapped, dropped and flagged, and that rendering gives their settings back."""

from __future__ import annotations

import json
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.recipes.foreign_tasks import FILES, loaded, task_of
from support.recipes.golden_files import check_golden
from trainshed.cli import run_cli
from trainshed.engines.importing import detect_engine, import_file, import_text, load_problem, recipe_text
from trainshed.engines.keys import flatten, nest, resolve_references
from trainshed.engines.launch import build_launch
from trainshed.errors import InputError
from trainshed.recipe import load_recipe

NEMO, FULL, LORA = (FILES / name for name in ("nemo-llama3-70b-fp8.yaml", "torchtune-full.yaml", "torchtune-lora.yaml"))
SEEDS = {"nemo-llama3-70b-fp8": 16, "nemo-mixtral-8x7b": 32, "torchtune-full": 2, "torchtune-lora": 2}
"""The files, and the nodes they ran on."""
# Keys of theirs that rendering writes otherwise on purpose, or not at all, and why.
OTHERWISE = {
    "nemo-llama3-70b-fp8": {
        "run": "NeMo's launcher reads it, NeMo does not",
        "trainer.max_time": "the cluster's limit",
        "exp_manager.explicit_log_dir": "places are given on the command line",
        "exp_manager.name": "places are given on the command line",
        "exp_manager.resume_if_exists": "a mistake: a restart began at 0",
        "exp_manager.create_checkpoint_callback": "a mistake: nothing was saved",
        "exp_manager.checkpoint_callback_params.monitor": "the newest are kept",
        "exp_manager.checkpoint_callback_params.mode": "the newest are kept",
        "exp_manager.checkpoint_callback_params.filename": "no validation loss in the name",
        "model.moe_grouped_gemm": "the model has no experts",
        "model.moe_aux_loss_coeff": "the model has no experts",
        "model.tokenizer.vocab_file": "places are given on the command line",
        "model.tokenizer.merge_file": "places are given on the command line",
        "model.nsys_profile": "off",
        "model.optim.sched.constant_steps": "a mistake: more than the run has",
        "model.data.index_mapping_dir": "places are given on the command line",
        "model.data.data_cache_gcs_dir": "NeMo does not read it",
        "model.data.data_cache_local_dir": "NeMo does not read it",
        "model.data.data_prefix": "read when the job starts",
    },
    "nemo-mixtral-8x7b": {
        "run": "NeMo's launcher reads it, NeMo does not",
        "exp_manager.resume_if_exists": "a mistake: a restart began at 0",
        "exp_manager.create_checkpoint_callback": "a mistake: nothing was saved",
        "model.tokenizer.vocab_file": "places are given on the command line",
        "model.tokenizer.merge_file": "places are given on the command line",
        "model.optim.sched.constant_steps": "said by max_steps, the step at which the decay ends",
        "model.data.splits_string": "mock data is not split",
    },
    "torchtune-full": {
        "root_dir": "a place",
        "output_dir": "a place",
        "tokenizer.path": "a place",
        "seed": "a mistake: drawn anew at every start",
        "dataset._component_": "alpaca_dataset, with the source that the other one stands for",
        "dataset_val": "nothing is validated",
        "batch_size_val": "nothing is validated",
        "checkpointer.checkpoint_dir": "a place",
        "checkpointer.checkpoint_files": "found when the job starts",
        "checkpointer.recipe_checkpoint": "found when the job starts",
        "checkpointer.output_dir": "a place",
        "resume_from_checkpoint": "found when the job starts",
        "data_parallel_shard_dim": "0.6.1, which is on PyPI, does not read it",
        "data_parallel_replicate_dim": "0.6.1 does not read it",
        "run_val_every_n_steps": "0.6.1 does not read it",
        "loss._component_": "0.6.1 has another",
        "log_level": "0.6.1 does not read it",
        "metric_logger.log_dir": "a place",
        "profiler": "off",
    },
}
OTHERWISE["torchtune-lora"] = {
    **{key: why for key, why in OTHERWISE["torchtune-full"].items() if not key.startswith("data_parallel")},
    "checkpoint_dir": "nobody reads it",
    "tokenizer.max_seq_len": "a recipe has a longest sequence",
}


def rendered(name: str) -> dict[str, Any]:
    """What a file becomes when it is imported and rendered again, flat."""
    nodes = SEEDS[name]
    recipe = loaded(import_file(FILES / f"{name}.yaml", gpus=8 * nodes))
    files = build_launch(task_of(recipe, nodes=nodes)).files
    return flatten(yaml.safe_load(files.get("nemo.yaml") or files["torchtune.yaml"]))


@pytest.mark.parametrize("name", SEEDS)
def test_import_and_render_give_the_settings_of_the_seed_back(name: str) -> None:
    theirs = resolve_references(flatten(yaml.safe_load((FILES / f"{name}.yaml").read_text(encoding="utf-8"))))
    ours = rendered(name)
    wanted = {key: _number(value) for key, value in theirs.items() if not _otherwise(name, key)}
    assert {key: ours.get(key) for key in wanted} == wanted
    assert len(wanted) > 25


@pytest.mark.parametrize("name", SEEDS)
def test_what_is_rendered_otherwise_really_is(name: str) -> None:
    theirs = resolve_references(flatten(yaml.safe_load((FILES / f"{name}.yaml").read_text(encoding="utf-8"))))
    ours = rendered(name)
    for key in OTHERWISE[name]:
        below = [other for other in theirs if other == key or other.startswith(f"{key}.")]
        assert any(other not in ours or ours[other] != theirs[other] for other in below), key


def _otherwise(name: str, key: str) -> bool:
    return any(key == known or key.startswith(f"{known}.") for known in OTHERWISE[name])


def _number(value: Any) -> Any:
    """PyYAML reads 2e-5 as text; OmegaConf and we read a number."""
    try:
        return float(value) if isinstance(value, str) and "e-" in value else value
    except ValueError:
        return value


@pytest.mark.parametrize("name", SEEDS)
def test_the_recipe_reads_as_a_person_would_write_it(name: str) -> None:
    imported = import_file(FILES / f"{name}.yaml", gpus=8 * SEEDS[name])
    text = recipe_text(imported, f"{name}.yaml")
    assert load_problem(text) is None
    check_golden(f"engines/import/{name}.yaml", text)


@pytest.mark.parametrize("name", SEEDS)
def test_nothing_of_a_file_is_lost_in_silence(name: str) -> None:
    document = flatten(yaml.safe_load((FILES / f"{name}.yaml").read_text(encoding="utf-8")))
    imported = import_file(FILES / f"{name}.yaml")
    told = [each.theirs.partition(":")[0] for each in (*imported.mapped, *imported.dropped)]
    assert sorted(told) == sorted(document)


@pytest.mark.parametrize(
    ("file", "line", "what"),
    [
        (NEMO, "(model.tokenizer.type)", "GPT-2's vocabulary of 50257 on a model of llama3-70b's size"),
        (NEMO, "(model.rotary_base)", "the rotary base is 1e+06, and llama3-70b has 500000"),
        (NEMO, "(exp_manager.create_checkpoint_callback)", "no checkpoint is ever written"),
        (NEMO, "(exp_manager.resume_if_exists)", "begins at the first step again"),
        (NEMO, "(model.data.index_mapping_dir)", "while all GPUs wait"),
        (NEMO, "(model.optim.sched.warmup_steps)", "the learning rate reaches 1.18e-05 of 0.00015"),
        (NEMO, "(trainer.val_check_interval)", "400 is more than the 50 steps"),
        (FULL, "(seed)", "draws another seed for every start"),
        (FULL, "(dataset._component_)", "learns prompts too"),
        (FULL, "(resume_from_checkpoint)", "begins at the first step again"),
        (FULL, "(run_val_every_n_steps)", "never measured"),
        (LORA, "(checkpoint_dir)", "is read by nobody"),
    ],
)
def test_known_mistakes_are_flagged_at_their_line(file: Path, line: str, what: str) -> None:
    found = [each for each in import_file(file).mistakes if line in each.where]
    assert len(found) == 1
    assert what in found[0].what
    assert found[0].instead
    number = int(found[0].where.partition(":")[2].partition(" ")[0])
    key = line.strip("()").rpartition(".")[2]
    assert file.read_text(encoding="utf-8").splitlines()[number - 1].lstrip().startswith(f"{key}:")


def changed(file: Path, **keys: Any) -> str:
    """The text of a file with some dotted keys (dots as two underscores) changed."""
    flat = flatten(yaml.safe_load(file.read_text(encoding="utf-8")))
    flat.update({key.replace("__", "."): value for key, value in keys.items()})
    return yaml.safe_dump(nest(flat), sort_keys=False)


@pytest.mark.parametrize(
    ("file", "keys", "mistake"),
    [
        (NEMO, {"model__global_batch_size": 1023, "model__micro_batch_size": 2}, "1023 is not a multiple"),
        (NEMO, {"model__optim__name": "distributed_fused_adam"}, "Apex's"),
        (NEMO, {"model__data__data_prefix": [0.5, "/a", 0.2, "/b"]}, "the weights sum to 0.7"),
        (FULL, {"optimizer__fused": True}, "fused AdamW does not work with tensor parallel"),
        (FULL, {"epochs": 2, "max_steps_per_epoch": 10}, "each of the 2 epochs stops after 10 steps"),
        (FULL, {"optimizer_in_bwd": True, "gradient_accumulation_steps": 2}, "do not work with gradient accumulation"),
    ],
)
def test_other_mistakes_are_flagged_too(file: Path, keys: dict[str, Any], mistake: str) -> None:
    imported = import_text(changed(file, **keys), file.name)
    assert any(mistake in each.what for each in imported.mistakes)


def test_constant_steps_after_the_decay_become_the_step_at_which_it_ends() -> None:
    text = changed(NEMO, trainer__max_steps=20000)
    schedule = import_text(text, "nemo.yaml").recipe["train"]["schedule"]
    assert schedule == {"name": "cosine", "warmup": 636, "min_lr": 1e-5, "decay": 20000 - 11873}


def test_the_global_batch_of_torchtune_needs_the_number_of_gpus() -> None:
    without = import_file(FULL)
    assert without.recipe["train"]["global_batch"] == 4
    assert any("--gpus N" in question for question in without.open_questions)
    assert import_file(FULL, gpus=16).recipe["train"]["global_batch"] == 8


def test_prefixes_by_split_become_validation_documents() -> None:
    prefixes = {"train": [1.0, "/a"], "validation": ["/b"], "test": ["/c"]}
    data = import_text(changed(NEMO, model__data__data_prefix=prefixes), "nemo.yaml").recipe["data"]
    assert data["train"] == [{"tokens": "/a", "weight": 1.0}]
    assert data["validation"] == {"tokens": ["/b"], "every": 400, "batches": 5}
    assert "split" not in data


def test_a_file_that_names_no_data_says_what_to_write() -> None:
    imported = import_text(changed(NEMO, model__data__data_prefix=None), "nemo.yaml")
    assert any("data.train: [{tokens: PREFIX}]" in question for question in imported.open_questions)
    assert load_problem(recipe_text(imported, "nemo.yaml")) is None


def test_kinds_are_told_apart() -> None:
    assert detect_engine(NEMO.read_text(), "a.yaml") == "nemo"
    assert detect_engine(LORA.read_text(), "a.yaml") == "torchtune"
    assert detect_engine("torchrun pretrain_gpt.py \\\n  --num-layers 2 \\\n", "a.sh") == "megatron"
    assert detect_engine("GPT_ARGS='\n --tensor-model-parallel-size 2\n'", "a.sh") == "megatron"


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("just words", "is not a configuration that Trainshed reads"),
        ("a: 1\nb: [2]\n", "is not a configuration that Trainshed reads"),
        ("", "is not a configuration that Trainshed reads"),
        ("trainshed: 1\nname: x\n", "is already a recipe"),
        ("name: x\nmodel: {}\ndata: {}\ntrain: {}\n", "is already a recipe"),
    ],
)
def test_a_file_of_none_of_the_kinds_is_refused(
    text: str, what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file.yaml"
    file.write_text(text)
    assert run_cli(["import", str(file)]) == 2
    assert f"error: {file}: {what}" in capsys.readouterr().err


ODD_VALUES = [None, 0, -1, 1.5, "text", "1e-5", [], [None], {}, {"a": 1}, True]


@pytest.mark.parametrize("name", sorted(file.name for file in FILES.glob("*.yaml")))
def test_a_file_with_any_value_anywhere_is_read_or_refused_by_name(name: str) -> None:
    flat = flatten(yaml.safe_load((FILES / name).read_text()))
    for key, value in product(flat, ODD_VALUES):
        changed = {other: kept for other, kept in flat.items() if not other.startswith(f"{key}.")} | {key: value}
        with suppress(InputError):  # anything else is a fault of ours
            recipe_text(import_text(json.dumps(nest(changed)), name, gpus=16), name)


def test_a_torchtune_model_that_the_catalog_has_not_is_refused_by_name() -> None:
    with pytest.raises(InputError, match="gemma_2b"):
        import_text(changed(FULL, model___component_="torchtune.models.gemma.gemma_2b"), "a.yaml")


def test_import_prints_the_recipe_and_tells_the_rest_beside_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_cli(["import", str(NEMO)]) == 0
    shown = capsys.readouterr()
    written = tmp_path / "recipe.yaml"
    written.write_text(shown.out)
    recipe = load_recipe(written)
    assert (recipe.name, recipe.engine.name, recipe.engine.version) == ("llama3-70b-fp8", "nemo", "24.07")
    assert "# open: the file does not say how many nodes" in shown.out
    assert "#   image: nvcr.io/nvidia/nemo:24.07" in shown.out
    for heading in ("mapped", "dropped", "mistakes in the file", "open"):
        assert f"\n{heading}" in shown.err


def test_import_writes_files_and_overwrites_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe, cluster = tmp_path / "recipe.yaml", tmp_path / "cluster.yaml"
    command = ["import", str(LORA), "--gpus", "16", "--out", str(recipe), "--cluster-out", str(cluster)]
    assert run_cli(command) == 0
    assert f"wrote {recipe}" in capsys.readouterr().out
    assert load_recipe(recipe).train.global_batch == 32
    assert cluster.exists()
    before = recipe.read_text()
    assert run_cli(command) == 2
    assert "nothing is overwritten" in capsys.readouterr().err
    assert recipe.read_text() == before


def test_import_tells_programs_everything(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(["import", str(FULL), "-o", "json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["schema"] == "trainshed.import/1"
    assert told["kind"] == "torchtune"
    assert told["problem"] is None
    assert told["recipe"]["layout"]["tp"] == 8
    assert {"where", "what", "instead"} == set(told["mistakes"][0])


def test_a_megatron_script_is_read_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.sh"
    script.write_text(
        "torchrun pretrain_gpt.py --num-layers 12 --hidden-size 768 --num-attention-heads 12 --seq-length 1024 \\\n"
        "  --max-position-embeddings 1024 --micro-batch-size 4 --global-batch-size 64 --lr 1e-4 --train-iters 100 \\\n"
        "  --mock-data --bf16 --vocab-size 50257\n"
    )
    assert run_cli(["import", str(script), "-o", "json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["kind"] == "megatron"
    assert told["recipe"]["train"]["global_batch"] == 64
    assert run_cli(["import", str(script), "--out", str(tmp_path / "recipe.yaml")]) == 0
    said = capsys.readouterr().out
    assert "--num-layers 12, --hidden-size 768" in said
    assert "does not load" not in said
    assert load_recipe(str(tmp_path / "recipe.yaml")).train.steps == 100


def test_a_missing_file_is_the_users_mistake(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(["import", str(tmp_path / "nothing.yaml")]) == 2
    assert "cannot be read" in capsys.readouterr().err


LLAMA_8B = """pretrain_gpt.py --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 \\
--group-query-attention --num-query-groups 8 --swiglu --normalization RMSNorm --use-rotary-position-embeddings \\
--rotary-base 500000 --untie-embeddings-and-output-weights --disable-bias-linear --seq-length 4096 \\
--micro-batch-size 1 --global-batch-size 8 --train-iters 10 --lr 1e-4 --bf16 \\
--tokenizer-type HuggingFaceTokenizer --tokenizer-model {tokenizer}
"""


@pytest.mark.parametrize(
    ("tokenizer", "size"),
    [("meta-llama/Llama-3.1-8B", 128256), ("/models/Meta-Llama-3-8B", 128256), ("mistralai/Mistral-7B-v0.1", 32000)],
)
def test_models_of_the_same_sizes_have_the_vocabulary_of_their_tokenizer(tokenizer: str, size: int) -> None:
    """Llama 3.1 8B and Mistral 7B differ in nothing that these arguments say."""
    imported = import_text(LLAMA_8B.format(tokenizer=tokenizer), "args.sh")
    assert imported.recipe["model"]["config"]["vocab_size"] == size


def test_a_vocabulary_that_nothing_says_is_asked_for() -> None:
    with pytest.raises(InputError, match="do not say how many tokens /data/tokenizer has"):
        import_text(LLAMA_8B.format(tokenizer="/data/tokenizer"), "args.sh")
