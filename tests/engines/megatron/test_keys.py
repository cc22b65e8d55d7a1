"""What Megatron-LM is told: golden argument lists, and that its versions know every argument we can write."""

from __future__ import annotations

import warnings
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.recipes.golden_files import check_golden
from support.recipes.megatron_tasks import RUN, golden_tasks, megatron_task
from trainshed.catalog import model_preset
from trainshed.engines.launch import EngineLaunch, EngineTask
from trainshed.engines.megatron import megatron_launch
from trainshed.engines.megatron.arguments import KNOWN_VERSIONS, known_arguments, parse_arguments
from trainshed.errors import InputError, RecipeError

TASKS = golden_tasks()


def values(launch: EngineLaunch) -> dict[str, Any]:
    """The arguments as Megatron's parser reads them, by what they set."""
    return parse_arguments(launch.arguments, "launch").given


def with_version(task: EngineTask, version: str) -> EngineTask:
    engine = task.recipe.engine.model_copy(update={"version": version})
    return replace(task, recipe=task.recipe.model_copy(update={"engine": engine}))


def as_text(launch: EngineLaunch) -> str:
    lines: list[str] = []
    for word in launch.arguments:
        if word.startswith("--"):
            lines.append(word)
        else:
            lines[-1] += f" {word}"
    environment = [f"{name}={value}" for name, value in launch.environment.items()]
    parts = {"environment": environment, "wanted": launch.inputs, "notes": launch.notes}
    body = [launch.program, *lines]
    for title, each in parts.items():
        body += ["", f"{title}:", *each]
    return "\n".join(body) + "\n"


@pytest.mark.parametrize("name", TASKS)
def test_a_launch_is_as_it_was(name: str) -> None:
    check_golden(f"engines/megatron/{name}.txt", as_text(megatron_launch(TASKS[name])))


def test_the_index_job_is_as_it_was() -> None:
    launch = megatron_launch(TASKS["llama3.1-70b-cpt-amd"])
    check_golden("engines/megatron/index.json", launch.files["index.json"])
    assert launch.cpu_stages[0].argv == ("python3", f"{RUN}/job/programs/build_index.py", f"{RUN}/job/index.json")


PRESETS = ("llama3-8b", "llama3.1-8b", "qwen2.5-7b", "qwen3-8b", "gpt2-xl", "mistral-7b-v0.1", "mixtral-8x7b",
           "qwen3-30b-a3b", "moonlight-16b-a3b")  # fmt: skip
LAYOUTS = st.fixed_dictionaries(
    {},
    optional={
        "tp": st.sampled_from([2, 4]),
        "pp": st.sampled_from([2, 4]),
        "vp": st.just(2),
        "cp": st.just(2),
        "ep": st.sampled_from([2, 4]),
        "etp": st.just(2),
        "replicate": st.just(2),
        "micro_batch": st.sampled_from([1, 2]),
        "recompute": st.sampled_from(["none", "selective", "full"]),
        "shard": st.sampled_from(["none", "zero1", "zero2", "full"]),
    },
)
OVERRIDES = st.fixed_dictionaries(
    {},
    optional={
        "train.precision": st.sampled_from(["fp32", "bf16", "fp16", "fp8"]),
        "train.schedule": st.sampled_from(
            ["{name: constant, warmup: 3}", "{name: linear}", "{name: wsd, warmup: 5, decay: 20, min_lr: 1.0e-6}"]
        ),
        "train.batch_ramp": st.just("{start: 128, increment: 64, samples: 4000}"),
        "train.optimizer": st.just("{lr: 1.0e-3, clip: null, eps: 1.0e-6}"),
        "train.deterministic": st.just("true"),
        "train.dropout": st.just("0.1"),
        "checkpoint": st.sampled_from(["{every: null}", "{resume: must}", "{async: false, resume: fresh}"]),
        "data": st.sampled_from(
            [
                "{synthetic: true, sequence_length: 1024}",
                "{sequence_length: 1024, train: [{path: a}], split: {train: 0.99, validation: 0.01}}",
                "{sequence_length: 1024, train: [{tokens: a}], validation: {tokens: b, every: 7, batches: 3}}",
            ]
        ),
        "observe": st.sampled_from(["{tensorboard: false}", "{profile: {start: 3, ranks: [0, 1]}}"]),
        "tokenizer": st.just("hf://org/other"),
    },
)


def drawn_task(
    preset: str, layout: dict[str, Any], overrides: dict[str, str], vendor: str, sharp: bool
) -> EngineTask | None:
    """A task of random keys; None where the schema itself refuses them."""
    try:
        return megatron_task(
            preset,
            "data.sequence_length=1024",
            *(f"{key}={value}" for key, value in overrides.items()),
            nodes=2,
            layout=layout,
            vendor=vendor,
            sharp=sharp,
        )
    except (RecipeError, InputError):
        return None


@settings(max_examples=60, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
@given(
    preset=st.sampled_from(PRESETS),
    layout=LAYOUTS,
    overrides=OVERRIDES,
    vendor=st.sampled_from(["nvidia", "amd"]),
    sharp=st.booleans(),
    version=st.sampled_from(KNOWN_VERSIONS),
)
def test_every_argument_is_one_that_the_version_knows_with_a_value_of_its_type(
    preset: str, layout: dict[str, Any], overrides: dict[str, str], vendor: str, sharp: bool, version: str
) -> None:
    task = drawn_task(preset, layout, overrides, vendor, sharp)
    if task is None:
        return
    try:
        launch = megatron_launch(with_version(task, version))
    except RecipeError:
        return  # refused by name, which other tests hold
    check_words(launch.arguments, version)


def check_words(words: tuple[str, ...], version: str) -> None:
    """Walk over the words as argparse does, with the version's own list and nothing of the adapter."""
    known, left, seen = known_arguments(version), list(words), set()
    while left:
        option = left.pop(0)
        argument = known.option(option)
        assert argument is not None, f"{version} has no {option}"
        assert argument.dest not in seen, f"{option} sets {argument.dest} again"
        seen.add(argument.dest)
        taken: list[str] = []
        while left and not left[0].startswith("--"):
            taken.append(left.pop(0))
        assert bool(taken) == argument.takes_value, option
        if argument.nargs is None:
            assert len(taken) <= 1, option
        elif isinstance(argument.nargs, int):
            assert len(taken) == argument.nargs, option
        for word in taken:
            if argument.kind == "int":
                int(word)
            elif argument.kind == "float":
                float(word)
            elif argument.kind == "ints":
                [int(part) for part in word.split(",")]
            if argument.choices is not None:
                assert word in map(str, argument.choices), (option, word)


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("version", KNOWN_VERSIONS)
def test_the_golden_launches_are_known_to_every_version(name: str, version: str) -> None:
    task = with_version(TASKS[name], version)
    if name == "deepseek-v3" and version in ("0.12.3", "878d65f"):
        with pytest.raises(InputError, match=f"{version} stretches positions from --max-position-embeddings on"):
            megatron_launch(task)
        return
    if task.site.sharp and version == "0.12.3":
        with pytest.raises(InputError, match=r"Megatron-LM 0\.12\.3 has no argument for it \(--use-sharp\)"):
            megatron_launch(task)
        return
    check_words(megatron_launch(task).arguments, version)


@pytest.mark.parametrize("name", TASKS)
def test_megatron_cores_own_configuration_takes_the_architecture_and_the_layout(name: str) -> None:
    """TransformerConfig of megatron-core 0.16.1 checks far more than a parser does."""
    with warnings.catch_warnings(action="ignore"):
        from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
    said = values(megatron_launch(with_version(TASKS[name], "0.16.1")))
    kind = MLATransformerConfig if said.get("multi_latent_attention") else TransformerConfig
    has = {each.name for each in fields(kind)}
    renamed = {"num_experts": "num_moe_experts", "rotary_interleaved": "rotary_interleaved"}
    config = {renamed.get(dest, dest): value for dest, value in said.items() if renamed.get(dest, dest) in has}
    config["layernorm_epsilon"] = said["layernorm_epsilon"]
    if "moe_router_load_balancing_type" in config:
        config["moe_router_load_balancing_type"] = said["moe_router_load_balancing_type"][0]
        config["moe_aux_loss_coeff"] = said["moe_aux_loss_coeff"][0]
    if "num_virtual_stages_per_pipeline_rank" in said:
        config["virtual_pipeline_model_parallel_size"] = said["num_virtual_stages_per_pipeline_rank"]
    config["pipeline_dtype"] = "bf16"
    with warnings.catch_warnings(action="ignore"):
        built = kind(**config)
    task = TASKS[name]
    assert (built.num_layers, built.hidden_size) == (task.config.layers, task.config.hidden)
    assert (built.kv_channels, built.layernorm_epsilon) == (task.config.value_dim, task.config.norm_eps)
    assert (built.tensor_model_parallel_size, built.sequence_parallel) == (task.layout.tp, task.layout.tp > 1)


def test_base_weights_are_read_where_the_run_has_none_of_its_own() -> None:
    base = ("model.from=hf://org/base", "model.init=null")
    launch = megatron_launch(megatron_task("llama3-8b", *base))
    assert values(launch)["load"] == values(launch)["save"] == f"{RUN}/checkpoints-megatron"
    assert values(launch)["pretrained_checkpoint"] == f"{RUN}/engine/base"
    assert "base-megatron" in launch.inputs
    # --finetune would make a restart begin again from step 0.
    assert "finetune" not in values(launch)
    must = megatron_launch(megatron_task("llama3-8b", *base, "checkpoint.resume=must"))
    assert values(must)["exit_on_missing_checkpoint"]
    assert "pretrained_checkpoint" not in values(must)
    assert "base-megatron" not in must.inputs


def test_what_checkpoint_args_do_not_restore_is_said() -> None:
    said = values(megatron_launch(megatron_task("llama3.1-8b")))
    assert (said["layernorm_epsilon"], said["use_rope_scaling"], said["rope_scaling_factor"]) == (1e-5, True, 8.0)
    assert values(megatron_launch(megatron_task("qwen3-8b")))["qk_layernorm"]
    assert values(megatron_launch(megatron_task("mistral-7b-v0.1")))["window_size"] == (4095, 0)
    gpt = values(megatron_launch(megatron_task("gpt2-xl", "data.sequence_length=1024")))
    assert "add_bias_linear" not in gpt
    assert gpt["position_embedding_type"] == "learned_absolute"


def test_rows_of_the_embedding_follow_the_model_and_not_the_tokenizer() -> None:
    said = values(megatron_launch(megatron_task("qwen2.5-7b", layout={"tp": 4})))
    assert model_preset("qwen2.5-7b").vocab_size == said["vocab_size"] == 152064
    assert said["padded_vocab_size"] == 152064
    assert said["padded_vocab_size"] % (128 * 4) == 0
    assert values(megatron_launch(megatron_task("gpt2-xl", "data.sequence_length=1024")))["padded_vocab_size"] == 50304


def test_synthetic_data_alone_is_mocked() -> None:
    synthetic = megatron_task("llama3-8b", "data={synthetic: true, sequence_length: 128}", "engine.version=0.16.1")
    launch = megatron_launch(synthetic)
    assert values(launch)["mock_data"]
    assert launch.inputs == ()
    # Until 0.18 its end-of-document token came on top.
    assert values(launch)["vocab_size"] == 128255
    newest = megatron_launch(with_version(synthetic, "head"))
    assert values(newest)["vocab_size"] == 128256
    for task in TASKS.values():
        assert "mock_data" not in values(megatron_launch(task))


def test_uneven_stages_are_written_out_as_megatron_unrolls_them() -> None:
    with warnings.catch_warnings(action="ignore"):
        from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
    stages = [7, 9, 9, 7]
    said = values(megatron_launch(megatron_task("llama3-8b", layout={"pp": 2, "vp": 2, "stages": stages})))
    chunks = PipelineParallelLayerLayout.parse_str_to_list(said["pipeline_model_parallel_layout"])
    assert [sum(each.name == "decoder" for each in chunk) for chunk in chunks] == stages
    assert [chunks[0][0].name, chunks[-1][-1].name] == ["embedding", "loss"]
    assert "num_virtual_stages_per_pipeline_rank" not in said


def test_sharded_weights_are_megatrons_fsdp_with_what_that_wants() -> None:
    launch = megatron_launch(megatron_task("llama3-8b", layout={"shard": "full", "tp": 2}))
    said = values(launch)
    assert (said["use_megatron_fsdp"], said["data_parallel_sharding_strategy"]) == (True, "optim_grads_params")
    assert said["ckpt_format"] == "fsdp_dtensor"
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in launch.environment


def test_one_connection_is_asked_for_where_megatron_stops_without() -> None:
    assert (
        megatron_launch(megatron_task("llama3-8b", layout={"tp": 2})).environment["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    )
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in megatron_launch(megatron_task("llama3-8b")).environment


@pytest.mark.parametrize(
    ("image", "program"),
    [
        ("nvcr.io/nvidia/nemo:25.09@sha256:0123", "/opt/megatron-lm/pretrain_gpt.py"),
        ("ghcr.io/azure/ai-infrastructure-on-azure/megatron-lm:latest", "/megatron-lm/pretrain_gpt.py"),
        ("rocm/megatron-lm:v25.4", "pretrain_gpt.py"),
        ("rocm/megatron-lm-of-mine", "/opt/megatron-lm/pretrain_gpt.py"),
    ],
)
def test_the_program_is_where_the_image_has_it(image: str, program: str) -> None:
    launch = megatron_launch(megatron_task("llama3-8b", f"engine.image={image}"))
    assert launch.program == program
    assert f'"program": "{program}"' in launch.files["index.json"]


def test_bitwise_repeats_set_what_megatron_asks_for() -> None:
    launch = megatron_launch(megatron_task("llama3-8b", "train.deterministic=true"))
    assert values(launch)["deterministic_mode"]
    assert launch.environment["NCCL_ALGO"] == "Ring"


def test_asynchronous_saving_keeps_its_worker() -> None:
    said = values(megatron_launch(megatron_task("llama3-8b")))
    assert said["async_save"]
    assert said["use_persistent_ckpt_worker"]
    assert "use_persistent_ckpt_worker" not in values(
        megatron_launch(megatron_task("llama3-8b", "checkpoint.async=false"))
    )


def test_the_same_task_gives_the_same_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    first = megatron_launch(TASKS["mixtral-8x7b-ep8"])
    monkeypatch.setenv("HOME", "/elsewhere")
    assert megatron_launch(golden_tasks()["mixtral-8x7b-ep8"]) == first


def test_rendering_needs_no_torch() -> None:
    import subprocess
    import sys

    code = "import sys, trainshed.engines.megatron, trainshed.engines.launch; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"
