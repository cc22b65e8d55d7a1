"""Argument lists of others as recipes: what is mapped, what is dropped and why, which mistakes they make."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.recipes.megatron_tasks import golden_tasks, megatron_task, task_of
from trainshed.catalog import model_preset
from trainshed.catalog.models import architecture
from trainshed.engines.importing import ImportedConfig
from trainshed.engines.launch import EngineTask
from trainshed.engines.megatron import megatron_launch, read_megatron
from trainshed.engines.megatron.arguments import KNOWN_VERSIONS, parse_arguments
from trainshed.engines.megatron.script import find_arguments
from trainshed.errors import InputError
from trainshed.recipe import Layout, Recipe, parse_recipe, to_plain

DATA = Path(__file__).parent / "data"
LLAMA = (
    "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention "
    "--num-query-groups 8 --seq-length 8192 --max-position-embeddings 8192 --position-embedding-type rope "
    "--rotary-base 500000 --swiglu --normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights "
    "--attention-dropout 0 --hidden-dropout 0 --micro-batch-size 1 --global-batch-size 64 --train-iters 100 --lr 1e-4 "
    "--bf16 --tokenizer-type HuggingFaceTokenizer --tokenizer-model meta-llama/Meta-Llama-3-8B --vocab-size 128256 "
)

# As NVIDIA's scripts write it: the longest text is the one before the stretch, and the model predicts one token more.
DEEPSEEK = (
    "--num-layers 61 --hidden-size 7168 --ffn-hidden-size 18432 --num-attention-heads 128 --kv-channels 128 "
    "--seq-length 4096 --max-position-embeddings 4096 --position-embedding-type rope --rotary-base 10000 --swiglu "
    "--normalization RMSNorm --norm-epsilon 1e-6 --disable-bias-linear --untie-embeddings-and-output-weights "
    "--multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64 "
    "--v-head-dim 128 --qk-layernorm --rotary-scaling-factor 40 --mscale 1.0 --mscale-all-dim 1.0 --num-experts 256 "
    "--moe-layer-freq ([0]*3+[1]*58) --moe-ffn-hidden-size 2048 --moe-shared-expert-intermediate-size 2048 "
    "--moe-router-topk 8 --moe-router-pre-softmax --moe-router-score-function sigmoid --moe-router-enable-expert-bias "
    "--moe-router-bias-update-rate 1e-4 --moe-router-num-groups 8 --moe-router-group-topk 4 "
    "--moe-router-topk-scaling-factor 2.5 --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-4 "
    "--mtp-num-layers 1 --mtp-loss-scaling-factor 0.1 --attention-dropout 0 --hidden-dropout 0 --micro-batch-size 1 "
    "--global-batch-size 64 --train-iters 100 --lr 1e-4 --bf16 --tokenizer-type HuggingFaceTokenizer "
    "--tokenizer-model deepseek-ai/DeepSeek-V3 --vocab-size 129280 "
)


def imported(name: str) -> ImportedConfig:
    return read_megatron((DATA / name).read_text(), name)


def as_recipe(found: ImportedConfig, *overrides: str) -> Recipe:
    return parse_recipe(yaml.safe_dump(found.recipe), overrides)


def whats(found: ImportedConfig) -> str:
    return "\n".join(f"{each.where}: {each.what} ({each.instead})" for each in found.mistakes)


SAME = ("train", "seed", "observe")


def settings_of(recipe: Recipe) -> dict[str, Any]:
    """What a round trip through arguments must keep: everything but addresses."""
    kept = recipe.model_dump(include=set(SAME))
    kept["layout"] = Layout() if isinstance(recipe.layout, str) else recipe.layout
    kept["architecture"] = architecture(recipe)
    kept["data"] = (recipe.data.sequence_length, recipe.data.seed, recipe.data.split, recipe.data.synthetic)
    validation = recipe.data.validation
    kept["validation"] = validation and (validation.every, validation.batches)
    saving = recipe.checkpoint
    kept["checkpoint"] = (saving.every, saving.async_, saving.resume, saving.save)
    return kept


def round_trip_tasks() -> dict[str, EngineTask]:
    return golden_tasks() | {
        "experts and tp": megatron_task("qwen3-30b-a3b", "train.moe={balance_loss: 0.001}",
                                        layout={"tp": 2, "ep": 4, "etp": 2, "recompute": "full"}),
        "latent attention": megatron_task("moonlight-16b-a3b", "train.moe={balance_loss: 0.001}",
                                          layout={"tp": 2, "ep": 4, "etp": 1}),
        "uneven stages": megatron_task("llama3-8b", layout={"pp": 2, "vp": 2, "stages": [7, 9, 9, 7]}),
        "a window": megatron_task("mistral-7b-v0.1", layout={"cp": 2}),
        "biases": megatron_task("qwen2.5-7b", "train.schedule={name: wsd, warmup: 5, decay: 20, min_lr: 1.0e-6}"),
        "gpt": megatron_task("gpt2-xl", "data.sequence_length=1024", "train.precision=fp32"),
        "sharded": megatron_task("llama3-8b", layout={"shard": "full"}),
        "a ramp": megatron_task("llama3-8b", "train.batch_ramp={start: 128, increment: 64, samples: 4000}",
                                "train.schedule={name: constant}"),
        "synthetic": megatron_task("llama3-8b", "data={synthetic: true, sequence_length: 512}",
                                   "train.optimizer={lr: 1.0e-4, clip: null}", "checkpoint.resume=must"),
        "a benchmark": megatron_task("llama3-8b", "checkpoint=off"),
    }  # fmt: skip


# What older versions lack of these tasks: from which version on it is there.
LACKING = {
    "gpt-175b-fp16": ("has no argument for it (--use-sharp)", "878d65f"),
    "uneven stages": ("has no argument for it (--pipeline-model-parallel-layout)", "878d65f"),
    "sharded": ("has no argument for it (--use-megatron-fsdp)", "0.14.0"),
    "a window": ("has no argument for it (--window-size)", "0.16.1"),
    "deepseek-v3": ("stretches positions from --max-position-embeddings on (163840)", "0.14.0"),
}


@pytest.mark.parametrize("version", KNOWN_VERSIONS)
@pytest.mark.parametrize("name", round_trip_tasks())
def test_what_we_render_reads_back_as_the_same_recipe(name: str, version: str) -> None:
    task = round_trip_tasks()[name]
    recipe = parse_recipe(yaml.safe_dump(to_plain(task.recipe)), [f"engine.version={version}"])
    lacking, since = LACKING.get(name, ("", KNOWN_VERSIONS[0]))
    if KNOWN_VERSIONS.index(version) < KNOWN_VERSIONS.index(since):
        with pytest.raises(InputError) as refused:
            megatron_launch(EngineTask(recipe, task.config, task.layout, task.steps, task.site))
        assert f"{version} {lacking}" in str(refused.value)
        assert f"engine.version: {since}" in str(refused.value)
        return
    launch = megatron_launch(EngineTask(recipe, task.config, task.layout, task.steps, task.site))
    again = as_recipe(read_megatron(shlex.join(launch.arguments), "again.txt"))
    before, after = settings_of(recipe), settings_of(again)
    if recipe.model.from_ is not None:
        before["checkpoint"], after["checkpoint"] = before["checkpoint"][:2], after["checkpoint"][:2]
    assert after == before


# What a seed says and our launch of its recipe does not say as it does, with the reason.
EXCEPTIONS = {
    "save": "the run's own folder",
    "load": "the run's own folder; base weights are --pretrained-checkpoint",
    "tensorboard_dir": "the run's own folder",
    "data_cache_path": "the run's own folder",
    "tokenizer_model": "the run's own folder",
    "ckpt_format": "torch_dist loads on any layout",
    "use_checkpoint_args": "every fact of the architecture is said",
    "exit_on_missing_checkpoint": "base weights must be there in any case",
    "no_load_optim": "an own checkpoint is loaded whole",
    "no_load_rng": "an own checkpoint is loaded whole",
    "no_save_optim": "the run could not resume",
    "no_save_rng": "the run could not resume",
    "dataloader_type": "samples come in the order of the index",
    "recompute_activations": "called --recompute-granularity selective today",
    "log_interval": "every step is logged",
    "use_persistent_ckpt_worker": "it comes with asynchronous saving only",
    "lr_warmup_fraction": "the same in steps: --lr-warmup-iters",
    "vocab_file": "the tokenizer's folder",
    "merge_file": "the tokenizer's folder",
    "train_data_path": "data.json",
    "valid_data_path": "data.json",
    "test_data_path": "a recipe has none",
    "async_tensor_model_parallel_allreduce": "gone",
    "sequence_parallel": "with tp of 2 or more only, as Megatron itself decides",
}


@pytest.mark.parametrize(
    ("file", "preset", "nodes", "place"),
    [
        ("minio-llama-70b-cpt.txt", "llama3.1-70b", 2, {"vendor": "amd"}),
        ("aks-train-375m.sh", "gpt-375m", 2, {"sharp": True}),
        ("aks-train-175b.sh", "gpt-175b", 16, {"sharp": True}),
    ],
)
def test_a_seed_imported_and_rendered_says_what_the_seed_says(
    file: str, preset: str, nodes: int, place: dict[str, Any]
) -> None:
    recipe = as_recipe(imported(file))
    launch = megatron_launch(task_of(recipe, model_preset(preset), nodes=nodes, **place))
    theirs = parse_arguments(find_arguments((DATA / file).read_text(), file).words, file)
    ours = parse_arguments(launch.arguments, "launch")
    differing = {dest for dest, value in theirs.given.items() if ours[dest] != value}
    if recipe.layout.tp > 1:
        assert "sequence_parallel" not in differing
    unexplained = differing - set(EXCEPTIONS)
    assert not unexplained, {dest: (theirs.given[dest], ours[dest]) for dest in unexplained}


def test_the_seed_of_minio_becomes_a_continued_training_of_its_checkpoint() -> None:
    found = imported("minio-llama-70b-cpt.txt")
    assert found.recipe["model"] == {"from": "/local_resources/basemodel"}
    assert found.recipe["layout"] == {"tp": 8, "micro_batch": 11, "recompute": "selective"}
    assert found.recipe["engine"]["args"]["no-gradient-accumulation-fusion"]
    assert found.cluster == {"nodes": {"default": 2}}
    assert any("data.train" in question for question in found.open_questions)
    dropped = {each.theirs.split()[0] for each in found.dropped}
    assert {"--no-save-optim", "--dataloader-type", "--save", "--use-checkpoint-args"} <= dropped
    assert all(each.why for each in found.dropped)


@pytest.mark.parametrize(
    ("more", "checkpoint"),
    [
        ("", {"save": False}),
        (
            "--load /x --exit-on-missing-checkpoint --save-interval 50 --async-save --use-persistent-ckpt-worker",
            {"save": False},
        ),
        ("--save $PLACE --save-interval 50", {"every": 50, "async": False}),
    ],
)
def test_without_a_place_to_save_in_there_are_no_checkpoints(more: str, checkpoint: Any) -> None:
    """The imported recipe saved at its end, 18 bytes of every parameter that the benchmark did not."""
    found = read_megatron(f"{LLAMA} --mock-data {more}", "llama.txt")
    assert found.recipe["checkpoint"] == checkpoint
    assert as_recipe(found).checkpoint.save is ("every" in checkpoint)
    assert found.recipe.get("engine", {}).get("args", {}).keys() <= {"vocab-size"}
    accounted = [each.theirs for each in (*found.mapped, *found.dropped)]
    assert all(accounted.count(word) == 1 for word in ("--save-interval 50", "--async-save") if word in more)


def test_every_argument_of_a_file_is_accounted_for_once() -> None:
    for file in DATA.glob("*"):
        found = imported(file.name)
        theirs = parse_arguments(find_arguments(file.read_text(), file.name).words, file.name)
        told = [each.theirs for each in (*found.mapped, *found.dropped)]
        assert sorted(told) == sorted(theirs.written.values()), file.name


MISTAKES = {
    "an end of the decay far beyond the run": ("minio-llama-70b-cpt.txt", "at step 320,000, and the run ends at 20"),
    "the same on Azure": ("aks-train-375m.sh", "at step 430,000, and the run ends at 1,500"),
    "a checkpoint that cannot be resumed": ("minio-llama-70b-cpt.txt", "--no-save-optim: a checkpoint without"),
    "facts that no checkpoint restores": (
        "minio-llama-70b-cpt.txt",
        "restores none of --norm-epsilon",
    ),
    "an argument that is gone": ("minio-llama-70b-cpt.txt", "--no-async-tensor-model-parallel-allreduce: newer"),
    "a name that says another size": ("aks-train-375m.sh", "called 375m and has 65M"),
    "a model on too few nodes, by memory": ("aks-train-175b.sh", "174.6B parameters take 3,143 GB"),
    "a model on too few nodes, by its layout": ("aks-train-175b.sh", "cut for 128 GPUs, and there are 16"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_of_the_seeds_are_named(name: str) -> None:
    file, said = MISTAKES[name]
    assert said in whats(imported(file))


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("--tokenizer-type GPT2BPETokenizer --vocab-size 50257", "put together like a Llama"),
        ("--async-save", "switches it off"),
        ("--fp8-interval 1", "takes it and ignores it"),
        ("--use-mcore-models", "takes it and ignores it"),
        ("--batch-size 4", "stops with an error"),
        ("--seq-length 16384", "refuses sequences of 16384 with 8192 positions"),
        ("--hidden-dropout 0.1 --lr-warmup-iters 100", "a warm-up of 100 steps, and the run has 100"),
        ("--rampup-batch-size 16 16 1000", "0.18 and later take it and ignore it"),
        ("--vocab-file a --merge-file a", "merges and vocabulary are one file"),
        ("--data-path x --split 100,0,0", "nothing is left to measure the loss on"),
        ("--save /x", "without --save-interval"),
        ("--nmu-workers 4", "no version of Megatron-LM known here has this argument (--num-workers)"),
        ("--nnodes 1 --nproc_per_node 6", "micro batch · dp = 1 · 6 does not divide 64"),
    ],
)
def test_a_mistake_is_named_with_what_to_write(more: str, said: str) -> None:
    assert said not in whats(read_megatron(LLAMA, "llama.txt"))
    assert said in whats(read_megatron(f"{LLAMA} {more}", "llama.txt"))


def test_dropout_that_nobody_asked_for_is_named() -> None:
    text = LLAMA.replace("--attention-dropout 0 --hidden-dropout 0 ", "")
    found = read_megatron(text, "llama.txt")
    assert "Megatron's default of 0.1 applies" in whats(found)
    assert found.recipe["train"]["dropout"] == 0.1


def test_text_prepared_without_an_end_of_document_is_named() -> None:
    script = f"python tools/preprocess_data.py --input a.jsonl --workers 8\npython pretrain_gpt.py {LLAMA}"
    assert "--append-eod" in whats(read_megatron(script, "all.sh"))
    assert "--append-eod" not in whats(read_megatron(script.replace("--workers 8", "--append-eod"), "all.sh"))


def test_a_list_without_mistakes_has_none() -> None:
    found = read_megatron(LLAMA, "llama.txt")
    assert found.mistakes == ()
    assert found.recipe["model"] == {"preset": "llama3-8b", "init": "random"}
    assert found.recipe["tokenizer"] == "hf://meta-llama/Meta-Llama-3-8B"


def test_defaults_are_megatrons_and_not_ours() -> None:
    train = read_megatron(LLAMA, "llama.txt").recipe["train"]
    assert train["optimizer"]["betas"] == [0.9, 0.999]
    assert train["optimizer"]["weight_decay"] == 0.01
    assert train["schedule"]["name"] == "linear"


def test_data_becomes_sources_with_their_weights() -> None:
    found = read_megatron(
        f"{LLAMA} --data-path 0.7 /a 0.3 /b --split 98,2,0 --eval-interval 50 --eval-iters 5", "x.txt"
    )
    assert found.recipe["data"]["train"] == [{"tokens": "/a", "weight": 0.7}, {"tokens": "/b", "weight": 0.3}]
    assert found.recipe["data"]["split"] == {"train": 0.98, "validation": 0.02}
    assert found.recipe["data"]["validation"] == {"every": 50, "batches": 5}
    assert as_recipe(found).data.validation is not None


def test_a_vocabulary_that_nobody_says_is_that_of_the_preset_with_these_sizes() -> None:
    text = LLAMA.replace("--vocab-size 128256 ", "")
    assert read_megatron(text, "x.txt").recipe["model"]["preset"] == "llama3-8b"
    with pytest.raises(InputError, match="how many tokens") as raised:
        read_megatron(text.replace("--num-layers 32", "--num-layers 31"), "x.txt")
    assert "--vocab-size" in str(raised.value.hint)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("--num-layers two", "takes a whole number"),
        (f"{LLAMA} --attention-backend flashy", "takes one of flash"),
        (f"{LLAMA} --bf16 yes", "takes no value"),
        (LLAMA.replace("--lr 1e-4", ""), "no learning rate"),
        ("--lr 1e-4", "names no architecture"),
        (
            f"{LLAMA} --multi-latent-attention",
            "nothing for `qk_layernorm: False`, `moe_router_score_function: softmax`",
        ),
        (f"{DEEPSEEK} --mla-down-proj-fusion", "nothing for `mla_down_proj_fusion: True`"),
    ],
)
def test_what_megatron_would_refuse_is_refused(text: str, match: str) -> None:
    with pytest.raises(InputError, match=match) as raised:
        read_megatron(text, "wrong.txt")
    assert "wrong.txt" in str(raised.value)


def test_a_command_with_latent_attention_is_the_model_that_it_trains() -> None:
    found = read_megatron(DEEPSEEK, "deepseek.sh")
    assert architecture(as_recipe(found)) == model_preset("deepseek-v3").model_copy(update={"max_positions": 4096})
    assert found.recipe["train"]["moe"] == {"balance_loss": 1e-4, "z_loss": 0.0, "bias_update": 1e-4}
    dropped = {each.theirs: each.why for each in found.dropped}
    for option in ("--mtp-num-layers 1", "--mtp-loss-scaling-factor 0.1"):
        assert "without multi-token prediction" in dropped[option]


def test_values_that_only_a_running_shell_knows_are_asked_for() -> None:
    found = read_megatron(f"{LLAMA} --data-path $1 --num-workers $(nproc)", "x.sh")
    assert any("--num-workers" in each for each in found.open_questions)
    assert any("--data-path $1" in each for each in found.open_questions)
