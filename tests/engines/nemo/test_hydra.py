"""NeMo 24.07: what is rendered, what the escape hatch takes, what is refused before NeMo would."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from support.recipes.foreign_tasks import FILES, loaded, shown, task_of, written
from support.recipes.golden_files import check_golden
from trainshed.catalog import gpu
from trainshed.engines.importing import import_file
from trainshed.engines.keys import KnownKeys, flatten
from trainshed.engines.launch import EngineTask, build_launch
from trainshed.engines.nemo.hydra_keys import HYDRA_KEYS, HYDRA_PLACES, HYDRA_TABLE
from trainshed.errors import InputError

RECIPE = """
name: pretraining
model:
  config: {family: llama, layers: 16, hidden: 2048, heads: 16, kv_heads: 8, ffn: 8192, vocab_size: 32000,
    max_positions: 4096, rope: {base: 10000.0}}
  init: random
tokenizer: hf://org/tokens@abc
data: {sequence_length: 4096, train: [{tokens: corpus_text_document}]}
train:
  steps: 1000
  global_batch: 512
  optimizer: {lr: 3.0e-4}
  schedule: {name: cosine, warmup: 100, min_lr: 3.0e-5}
layout: {tp: 2, pp: 2, micro_batch: 2}
engine: {name: nemo, version: "24.07"}
checkpoint: {every: 25, keep: 10}
"""
MOE = (
    "model.config={family: mixtral, layers: 32, hidden: 4096, heads: 32, kv_heads: 8, vocab_size: 32000, "
    "max_positions: 32768, rope: {base: 1000000.0}, moe: {experts: 8, top_k: 2, ffn: 14336}}"
)


def task(*overrides: str, nodes: int = 2, **place: Any) -> EngineTask:
    return task_of(written(RECIPE, overrides), nodes=nodes, steps=1000, **place)


def config(given: EngineTask) -> dict[str, Any]:
    """The rendered file, flat."""
    return flatten(yaml.safe_load(build_launch(given).files["nemo.yaml"]))


def test_the_seed_renders_as_it_was_measured() -> None:
    recipe = loaded(import_file(FILES / "nemo-llama3-70b-fp8.yaml"))
    check_golden("engines/nemo/llama3-70b-fp8.txt", shown(build_launch(task_of(recipe, nodes=16))))


def test_a_mixture_of_experts_renders() -> None:
    recipe = loaded(import_file(FILES / "nemo-mixtral-8x7b.yaml"))
    check_golden("engines/nemo/mixtral-8x7b.txt", shown(build_launch(task_of(recipe, nodes=32))))


def test_a_run_with_checkpoints_and_a_tokenizer_of_the_hub_renders() -> None:
    check_golden("engines/nemo/checkpoints.txt", shown(build_launch(task(sharp=True))))


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ((), {"name": "CosineAnnealing", "warmup_steps": 100, "min_lr": 3e-5, "constant_steps": 0}),
        (("train.schedule.decay=800",), {"name": "CosineAnnealing", "max_steps": 800}),
        (("train.schedule.name=linear",), {"name": "WarmupAnnealing", "min_lr": 3e-5}),
        (
            ("train.schedule.name=wsd", "train.schedule.decay=200"),
            {"name": "PolynomialHoldDecayAnnealing", "hold_steps": 700, "power": 1.0},
        ),
        (("train.schedule={warmup: 7}",), {"name": "WarmupPolicy", "warmup_steps": 7}),
    ],
)
def test_schedules_are_named_as_nemo_names_them(overrides: tuple[str, ...], expected: dict[str, Any]) -> None:
    found = config(task(*overrides))
    assert {key: found[f"model.optim.sched.{key}"] for key in expected} == expected


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (("layout.recompute=full",), {"model.activations_checkpoint_method": "uniform"}),
        (("layout.recompute=selective",), {"model.activations_checkpoint_granularity": "selective"}),
        (("layout.vp=4",), {"model.overlap_p2p_comm": True, "model.batch_p2p_comm": False}),
        (("train.optimizer.clip=null",), {"trainer.gradient_clip_val": 0.0}),
        (("train.precision=fp8",), {"model.fp8": True, "model.fp8_hybrid": True, "trainer.precision": "bf16"}),
        (("checkpoint.resume=must",), {"exp_manager.resume_ignore_no_checkpoint": False}),
        (("checkpoint.resume=fresh",), {"exp_manager.resume_if_exists": False}),
        (("checkpoint.keep=null",), {"exp_manager.checkpoint_callback_params.save_top_k": -1}),
        (("data.split={train: 0.98, validation: 0.02}",), {"model.data.splits_string": "98,2,0"}),
        (("data.validation={tokens: other, every: 50}",), {"model.data.splits_string": None}),
        (
            ("train.batch_ramp={start: 64, increment: 64, samples: 1000}",),
            {"model.rampup_batch_size": [64, 64, 1000]},
        ),
        (
            ("observe.profile={start: 10, steps: 3}",),
            {
                "model.nsys_profile.start_step": 9,
                "model.nsys_profile.end_step": 11,
                "model.nsys_profile.gen_shape": False,
            },
        ),
        (("observe.profile={shapes: true}",), {"model.nsys_profile.gen_shape": True}),
        (
            (MOE, "layout={tp: 1, pp: 4, ep: 4}", "train.moe={balance_loss: 0.02, z_loss: 0.001}"),
            {"model.num_moe_experts": 8, "model.moe_aux_loss_coeff": 0.02, "model.moe_z_loss_coeff": 0.001},
        ),
    ],
)
def test_keys_of_the_recipe_become_nemos(overrides: tuple[str, ...], expected: dict[str, Any]) -> None:
    found = config(task(*overrides))
    assert {key: found[key] for key in expected} == expected


def test_every_key_we_can_write_is_one_that_nemo_reads() -> None:
    given = task(MOE, "layout={tp: 1, pp: 4, ep: 4}", "observe.profile={}", sharp=True)
    settings = [*HYDRA_TABLE.render(given), *HYDRA_PLACES.render(given)]
    assert [setting.key for setting in settings if not HYDRA_KEYS.knows(setting.key)] == []


def test_arguments_reach_the_file() -> None:
    found = config(task("engine.args={model.gc_interval: 18, model.ub_tp_comm_overlap: true}"))
    assert (found["model.gc_interval"], found["model.ub_tp_comm_overlap"]) == (18, True)


@pytest.mark.parametrize(
    ("argument", "what"),
    [
        ("model.global_batch_size: 64", "contradicts `train.global_batch`, which makes it 512"),
        ("exp_manager.explicit_log_dir: /tmp", "contradicts `the cluster's store`"),
        ("model.gc_intervall: 18", "NeMo 24.07 reads no `model.gc_intervall`"),
    ],
)
def test_arguments_that_contradict_or_that_nobody_reads_are_refused(argument: str, what: str) -> None:
    with pytest.raises(InputError) as caught:
        build_launch(task(f"engine.args={{{argument}}}"))
    assert what in caught.value.what
    assert "engine.args" in str(caught.value.where)
    assert caught.value.hint


def test_an_argument_that_says_what_the_recipe_says_is_no_contradiction() -> None:
    build_launch(task("engine.args={model.global_batch_size: 512}"))


def test_a_misspelt_argument_is_answered_with_the_key_that_was_meant() -> None:
    assert HYDRA_KEYS.nearest("model.optim.overlap_grad_sink") == "model.optim.overlap_grad_sync"
    assert HYDRA_KEYS.nearest("rotary_base") == "model.rotary_base"
    assert isinstance(HYDRA_KEYS, KnownKeys)


@pytest.mark.parametrize(
    ("overrides", "what"),
    [
        (("train.precision=fp32",), "bf16 and fp8, not for fp32"),
        (("train.z_loss=0.1",), "no z-loss"),
        (("train.non_finite=skip",), "cannot skip it"),
        (("train.deterministic=true",), "no deterministic mode"),
        (("train.optimizer.eps=1e-6",), "does not hand an epsilon on"),
        (("layout.shard=none",), "distributed optimizer, and shard is none"),
        (("layout.stages=[9, 7]",), "uneven stages"),
        (("layout.tp=3", "layout.pp=1"), "ranks are not a multiple"),
        (("data.seed=7",), "one seed"),
        (("data.skip=[[0, 5]]",), "order of its own"),
        (("checkpoint.to=/elsewhere/x",), "into the run's folder"),
        (("tokenizer=null",), "size of the vocabulary"),
        (("model={preset: llama3.1-8b, init: random}",), "Llama 3.1's stretched rotary"),
        (("model={preset: qwen3-8b, init: random}",), "normalised queries"),
        (("model={preset: llama3-8b, from: hf://org/base}",), ".nemo archives only"),
        ((MOE, "layout={tp: 2, pp: 2, ep: 4}"), "cuts experts by tp: 2"),
        (("train.mode=finetune", "model={preset: llama3-8b, from: hf://org/base}"), "pretraining only"),
        (("train.mode=dpo", "model={preset: llama3-8b, from: hf://org/base}"), "pairs of answers"),
        (("train.optimizer.states=bf16",), "states in fp32"),
        (("observe.profile={cycles: 2}",), "marks the profiled steps once"),
        (("observe.profile={warmup: 1}",), "has no warm-up"),
        (("data.validation={tokens: v}", "train.early_stop={patience: 2}"), "does not end a run"),
        (("budgets={step: 20m}",), "NeMo 24.07 takes no limit for its collectives"),
    ],
)
def test_wrong_combinations_fail_by_name(overrides: tuple[str, ...], what: str) -> None:
    with pytest.raises(InputError) as caught:
        build_launch(task(*overrides))
    assert what in str(caught.value)


def test_fp8_on_a_gpu_without_it_fails_by_name() -> None:
    with pytest.raises(InputError, match="needs GPUs that have it, and a100-80gb has not"):
        build_launch(task("train.precision=fp8"), gpu=gpu("a100-80gb"))
    build_launch(task("train.precision=fp8"), gpu=gpu("h100-sxm"))


def test_amd_gpus_fail_by_name() -> None:
    with pytest.raises(InputError, match="NVIDIA GPUs only"):
        build_launch(task(vendor="amd"))


def test_a_path_that_hydra_would_take_apart_is_refused() -> None:
    with pytest.raises(InputError, match="Hydra would not read"):
        build_launch(task(run_folder="/store/${oc.env:HOME}/run"))


def test_a_path_with_spaces_and_commas_is_quoted_for_hydra() -> None:
    launch = build_launch(task(run_folder="/my store/a,b"))
    assert "++exp_manager.explicit_log_dir='/my store/a,b/nemo'" in launch.arguments


def test_every_node_has_a_dllogger_file_of_its_own() -> None:
    """Each rank of NeMo opens the file anew, which empties it: 16 nodes must not share one."""
    wanted = "++exp_manager.dllogger_logger_kwargs.json_file=/store/runs/r/1/dllogger/rank-{node}/dllogger.json"
    assert build_launch(task()).node_arguments == (wanted,)
    assert build_launch(task("observe.dllogger=true")).node_arguments == (wanted,)
    without = build_launch(task("observe.dllogger=false"))
    assert without.node_arguments == ()
    assert "create_dllogger_logger: false" in without.files["nemo.yaml"]


def test_the_data_prefix_is_read_when_the_job_starts() -> None:
    launch = build_launch(task())
    assert launch.late_arguments == {"++model.data.data_prefix=": "/store/runs/r/1/engine/data_prefix.txt"}
    assert "data-prefix" in launch.inputs
    mock = build_launch(task("data={synthetic: true, sequence_length: 4096}"))
    assert mock.late_arguments == {}
    assert mock.inputs == ("tokenizer",)


def test_a_profile_is_recorded_by_nsys() -> None:
    launch = build_launch(task("observe.profile={ranks: [0, 9], memory: true, stacks: true}"))
    assert launch.rank_script == "nsys_rank.sh"
    script = launch.files["nsys_rank.sh"]
    assert 'case " 0 9 " in' in script
    assert "--cuda-memory-usage=true --python-backtrace=cuda -o" in script
    assert [stage.name for stage in launch.cpu_stages] == ["nsys"]
    plain = build_launch(task())
    assert (plain.rank_script, plain.cpu_stages) == (None, ())


def test_the_release_is_chosen_by_version_or_image() -> None:
    by_image = build_launch(task("engine.version=null", image="registry/nemo_workload:24.07"))
    assert by_image.program.endswith("megatron_gpt_pretraining.py")
    assert "the release of the image" in by_image.notes[0]
    newest = build_launch(task("engine.version=null"))
    assert newest.program.endswith("pretrain.py")
    with pytest.raises(InputError, match=r"is release 24\.07, and engine.version is 26\.06"):
        build_launch(task('engine.version="26.06"', image="nvcr.io/nvidia/nemo:24.07"))
    with pytest.raises(InputError, match=r"NeMo 25\.02 is not known here"):
        build_launch(task('engine.version="25.02"'))
