"""What Megatron-LM cannot do is refused before it would, by the recipe's own keys; `engine.args` is checked."""

from __future__ import annotations

import re
from typing import Any

import pytest

from support.recipes.megatron_tasks import RUN, megatron_recipe, megatron_task, task_of
from trainshed.catalog import model_preset
from trainshed.engines.megatron import megatron_launch
from trainshed.engines.megatron.arguments import KNOWN_VERSIONS
from trainshed.errors import InputError, RecipeError
from trainshed.recipe import RopeScaling, parse_recipe


def refusal(*overrides: str, preset: str = "llama3-8b", **options: Any) -> RecipeError:
    with pytest.raises(RecipeError) as raised:
        megatron_launch(megatron_task(preset, *overrides, **options))
    return raised.value


BASE = ("model.from=hf://org/base", "model.init=null")
CHAT = ("train.mode=finetune", *BASE)
VALID = "data.validation={tokens: /v}"


@pytest.mark.parametrize(
    ("overrides", "options", "where", "what"),
    [
        (CHAT, {}, "train.mode", "no chat data"),
        (("train.lora={rank: 8, alpha: 16}", *BASE), {}, "train.lora", "no adapters"),
        (("train.precision=fp64",), {}, "train.precision", "no fp64"),
        (("train.z_loss=0.1",), {}, "train.z_loss", "no z-loss"),
        (("train.non_finite=skip",), {}, "train.non_finite", "fp16's loss scale"),
        (("data.seed=7",), {}, "data.seed", "one seed"),
        (("data.skip=[[0, 5]]",), {}, "data.skip", "cannot leave out"),
        (("data.stage=nvme",), {}, "data.stage", "where they lie"),
        (("checkpoint.to=/b/c",), {}, "checkpoint.to", "into the run's folder"),
        (BASE, {"layout": {"shard": "full"}}, "layout.shard", "its own format only|of its own format"),
        ((), {"layout": {"shard": "full", "pp": 2}}, "layout.shard", "no pipeline"),
        ((), {"layout": {"tp": 3, "pp": 1}, "gpus_per_node": 3}, "layout.tp", "neither a divisor"),
        ((), {"layout": {"pp": 3}, "gpus_per_node": 3}, "layout.pp", "does not divide the 32 layers"),
        ((), {"layout": {"pp": 2, "schedule": "zero_bubble"}}, "layout.schedule", "no zero_bubble"),
        ((), {"layout": {"ep": 2}}, "layout.ep", "the model has none"),
        (("data.sequence_length=2047",), {"layout": {"cp": 2}}, "layout.cp", "2047"),
        (("train.precision=fp8", "data.sequence_length=1000"), {}, "train.precision", "multiples of 16"),
        (("train.global_batch=500",), {}, "layout.dp", "does not divide"),
        (("train.optimizer.states=bf16",), {"layout": {"shard": "none"}}, "train.optimizer.states", "shard is none"),
        ((VALID, "train.early_stop={patience: 2}"), {}, "train.early_stop", "does not end a run"),
        ((VALID, "checkpoint.best={}"), {}, "checkpoint.best", "does not keep the best"),
        ((VALID, "data.validation.prompts=[hello]"), {}, "data.validation.prompts", "answers no questions"),
        ((*BASE, "train.mode=dpo"), {}, "train.mode", "pairs of answers"),
        (("observe.profile={cycles: 2}",), {}, "observe.profile.cycles", "runs its profiler once"),
        (("observe.profile={warmup: 3}",), {}, "observe.profile.warmup", "warms its profiler up for one step"),
        (("observe.profile={memory: true}",), {}, "observe.profile.memory", "records memory during the whole run"),
    ],
)
def test_what_megatron_cannot_do_is_refused_by_name(
    overrides: tuple[str, ...], options: dict[str, Any], where: str, what: str
) -> None:
    with pytest.raises(InputError, match=what) as raised:
        megatron_launch(megatron_task("llama3-8b", *overrides, **options))
    assert where in str(raised.value)


@pytest.mark.parametrize(
    ("version", "precision", "shard", "is_written"),
    [
        ("0.14.0", "fp32", "zero1", False),
        ("0.16.1", "fp32", "zero1", True),
        ("0.16.1", "fp32", "none", False),
        ("0.16.1", "bf16", "zero1", False),
        ("0.19.0", "fp32", "zero1", True),
    ],
)
def test_states_of_fp32_weights_are_saved_in_the_format_that_loads_into_them(
    version: str, precision: str, shard: str, is_written: bool
) -> None:
    overrides = (f"engine.version={version}", f"train.precision={precision}")
    arguments = megatron_launch(megatron_task("llama3-8b", *overrides, layout={"shard": shard})).arguments
    assert ("--dist-ckpt-optim-fully-reshardable" in arguments) == is_written


@pytest.mark.parametrize(
    ("version", "implementation", "pp", "is_said"),
    [
        ("878d65f", "local", 2, True),
        ("0.12.3", "local", 2, True),
        ("0.14.0", "local", 2, False),
        ("878d65f", "transformer_engine", 2, False),
        ("878d65f", "local", 1, False),
    ],
)
def test_a_version_that_decays_other_weights_after_a_resume_is_named(
    version: str, implementation: str, pp: int, is_said: bool
) -> None:
    overrides = (f"engine.version={version}", f"engine.args={{transformer-impl: {implementation}}}")
    notes = megatron_launch(megatron_task("llama3-8b", *overrides, layout={"pp": pp})).notes
    assert any(f"after a resume Megatron-LM {version} decays" in note for note in notes) == is_said


def test_budgets_become_the_limits_before_and_after_the_first_step() -> None:
    minutes, seconds = "--distributed-timeout-minutes", "--distributed-timeout-seconds-after-init"

    def limits(*overrides: str) -> list[str | None]:
        arguments = megatron_launch(megatron_task("llama3-8b", *overrides)).arguments
        return [arguments[arguments.index(name) + 1] if name in arguments else None for name in (minutes, seconds)]

    assert limits() == ["30", None]
    assert limits("budgets={load: 2h, first_step: 50m}") == ["120", None]
    assert limits("budgets={first_step: 61s, step: 20m, checkpoint: 1h}") == ["2", "3600"]
    error = refusal("budgets={load: 2h}", 'engine.args={"--distributed-timeout-minutes": 10}')
    assert "contradicts `budgets`, which says --distributed-timeout-minutes 120" in str(error)


def test_experts_that_the_ranks_do_not_divide_are_refused() -> None:
    error = refusal(preset="mixtral-8x7b", layout={"ep": 3}, gpus_per_node=3)
    assert "8 experts" in str(error)


def test_a_layout_for_other_gpus_than_there_are_is_refused() -> None:
    task = megatron_task("llama3-8b", layout={"tp": 2, "dp": 4})
    from dataclasses import replace

    with pytest.raises(RecipeError, match="2 nodes of 8 = 16"):
        megatron_launch(replace(task, site=replace(task.site, nodes=2)))


def test_a_model_that_megatron_cannot_be_told_is_refused() -> None:
    config = model_preset("llama3.1-8b")
    assert config.rope is not None
    assert config.rope.scaling is not None
    scaling = config.rope.scaling.model_copy(update={"original_positions": 4096})
    other = config.model_copy(update={"rope": config.rope.model_copy(update={"scaling": scaling})})
    with pytest.raises(InputError, match="original_positions") as raised:
        megatron_launch(task_of(megatron_recipe("llama3.1-8b"), other))
    assert "model" in str(raised.value.where)


def test_an_unknown_version_names_those_that_are_known() -> None:
    with pytest.raises(InputError, match=r"0\.99.*not known") as raised:
        megatron_launch(megatron_task("llama3-8b", "engine.version=0.99.0"))
    assert "0.16.1" in str(raised.value.hint)
    assert "engine.version" in str(raised.value.where)


def words(*args: str, **options: Any) -> tuple[str, ...]:
    return megatron_launch(megatron_task("llama3-8b", *args, **options)).arguments


def test_arguments_of_the_escape_hatch_are_handed_on() -> None:
    said = words("engine.args={tp_comm_overlap: true, --num-workers: 4, recompute-modules: [core_attn, mlp]}",
                 layout={"tp": 2, "recompute": "selective"})  # fmt: skip
    assert "--tp-comm-overlap" in said
    assert said[said.index("--num-workers") + 1] == "4"
    place = said.index("--recompute-modules")
    assert said[place + 1 : place + 3] == ("core_attn", "mlp")
    # What was only chosen may be chosen otherwise, and nothing is said twice.
    assert said.count("--recompute-modules") == 1
    assert "--overlap-grad-reduce" in words()
    assert words("engine.args={log-interval: 10}").count("--log-interval") == 1


def test_an_argument_that_agrees_with_the_recipe_is_no_contradiction() -> None:
    assert words("engine.args={bf16: true, lr: 0.0003, no-save-optim: false}") == words()


@pytest.mark.parametrize(
    ("args", "what", "hint"),
    [
        ("{nmu-workers: 4}", "has no argument `--nmu-workers`", "num-workers"),
        ("{num-workers: many}", "`many` is not what --num-workers takes", "a whole number"),
        ("{num-workers: true}", "`True` is not what --num-workers takes", "a whole number"),
        ("{recompute-modules: mlp}", "is not what --recompute-modules takes", "a list"),
        ("{attention-backend: flashy}", "is not what --attention-backend takes", "flash"),
        ("{tp-comm-overlap: 1}", "is not what --tp-comm-overlap takes", "true or false"),
        ("{lr: 0.1}", "contradicts `train.optimizer.lr`", "train.optimizer.lr"),
        ("{tensor-model-parallel-size: 4}", "contradicts `layout.tp`", "layout.tp"),
        ("{no-save-optim: true}", "contradicts `checkpoint`", "checkpoint"),
        ("{mock-data: true}", "contradicts `data.synthetic`", "data.synthetic"),
        ("{finetune: true}", "contradicts `model.from`", "model.from"),
        ("{data-path: [a]}", "contradicts `data.train`", "data.train"),
        ("{trust-remote-code: true}", "contradicts `tokenizer`", "tokenizer"),
        ("{use-mcore-models: true}", "takes it and ignores it", "delete"),
        ("{batch-size: 4}", "stops with an error", "delete"),
        ("{use-custom-fsdp: true}", "have it no more", "delete"),
        ("{tp-comm-overlap: true}", "without layout.tp of 2 or more", "delete"),
        ("{fp8-param-gather: true}", "without train.precision: fp8", "delete"),
        ("{optimizer-cpu-offload: true}", "--use-precision-aware-optimizer", "delete"),
        ("{save-retain-interval: 700}", "a multiple of checkpoint.every", "delete"),
        ("{overlap-moe-expert-parallel-comm: true}", "layout.ep of 2 or more", "delete"),
    ],
)
def test_an_argument_that_is_unknown_mistyped_or_against_the_recipe_is_refused(args: str, what: str, hint: str) -> None:
    error = refusal(f"engine.args={args}")
    assert what in error.what
    assert hint in f"{error.hint} {error.what}"
    assert "engine.args" in str(error.where)


def test_gathering_weights_early_needs_a_shared_out_optimizer() -> None:
    error = refusal("engine.args={overlap-param-gather: true}", layout={"shard": "none"})
    assert "layout.shard: zero1" in error.what


def test_deterministic_runs_refuse_what_is_not() -> None:
    error = refusal("train.deterministic=true", "engine.args={cross-entropy-loss-fusion: true}")
    assert "train.deterministic: false" in error.what


def test_all_problems_are_told_at_once() -> None:
    error = refusal("engine.args={nmu-workers: 4, lr: 0.1}")
    assert error.what.startswith("2 problems")


def test_half_precision_is_for_engines_with_a_loss_scale() -> None:
    text = """
        name: half
        model: {preset: tiny, init: random}
        data: synthetic
        train: {steps: 1, global_batch: 1, precision: fp16, optimizer: {lr: 1.0e-3}}
    """
    with pytest.raises(RecipeError, match="no loss scale") as raised:
        parse_recipe(text)
    assert "engine: megatron" in str(raised.value.hint)
    assert parse_recipe(text, ["engine=megatron"]).train.precision == "fp16"


def test_our_own_engine_has_no_version() -> None:
    with pytest.raises(RecipeError, match="no version of its own"):
        megatron_recipe("llama3-8b", ["engine={name: torch, version: 0.16.1}"])


def test_shapes_and_stacks_are_asked_for_where_a_version_can_be() -> None:
    asked = ("observe.profile={start: 5, steps: 2, ranks: [0, 1], shapes: true, stacks: true}",)
    newest = words(*asked, "engine.version=head")
    assert {"--pytorch-profiler-collect-shapes", "--pytorch-profiler-collect-callstack"} <= set(newest)
    start = newest.index("--profile-step-start")
    assert newest[start : start + 4] == ("--profile-step-start", "4", "--profile-step-end", "6")
    older = megatron_launch(megatron_task("llama3-8b", "observe.profile={}", "engine.version=0.16.1"))
    assert "Megatron-LM 0.16.1 records shapes and stacks in every profile" in older.notes
    refused = str(refusal(*asked, "engine.version=0.16.1"))
    assert "Megatron-LM 0.16.1 records shapes in every profile" in refused
    assert "observe.profile.stacks" in refused


def test_old_checkpoints_are_removed_by_a_program_of_the_job() -> None:
    launch = megatron_launch(megatron_task("llama3-8b", "checkpoint.keep=2"))
    program = "programs/keep_checkpoints.py"
    assert launch.companion == ("python3", f"{RUN}/job/{program}", f"{RUN}/checkpoints-megatron", "2")
    assert "remove_old" in launch.files[program]
    assert any("removes all but the newest 2" in note for note in launch.notes)
    all_kept = megatron_launch(megatron_task("llama3-8b", "checkpoint.keep=null"))
    assert (all_kept.companion, program in all_kept.files) == ((), False)


@pytest.mark.parametrize("version", KNOWN_VERSIONS)
def test_a_benchmark_saves_nothing(version: str) -> None:
    launch = megatron_launch(megatron_task("llama3-8b", "checkpoint=off", f"engine.version={version}"))
    assert not [word for word in launch.arguments if "save" in word or "async" in word or "ckpt-worker" in word]
    assert (launch.companion, launch.last_checkpoint) == ((), None)
    assert "programs/keep_checkpoints.py" not in launch.files
    assert any("saves nothing" in note for note in launch.notes)
    assert "--save" in words(f"engine.version={version}")


def test_nothing_of_the_run_lies_outside_its_folder() -> None:
    paths = [word for word in words() if word.startswith("/")]
    assert paths
    assert all(path.startswith(RUN) for path in paths)


ROPE = "pretrain_gpt.py of Megatron-LM {} does not read the factor of linear rope scaling"


def test_rope_scaling_that_the_program_does_not_read_is_refused() -> None:
    # Every version computes with a factor of 8, whatever it is told.
    with pytest.raises(InputError, match=r"rope.scaling.factor: 32.0.*has no argument"):
        megatron_launch(megatron_task("llama3.2-1b"))
    assert "--use-rope-scaling" in megatron_launch(megatron_task("llama3.1-8b")).arguments
    plain = model_preset("llama3-8b")
    assert plain.rope is not None
    rope = plain.rope.model_copy(update={"scaling": RopeScaling(kind="linear", factor=4.0)})
    stretched = plain.model_copy(update={"rope": rope})
    for version in ("0.12.3", "878d65f", "0.14.0", "0.16.1"):
        with pytest.raises(InputError, match=ROPE.format(version)):
            megatron_launch(task_of(megatron_recipe("llama3-8b", [f"engine.version={version}"]), stretched))
    for version in ("0.19.0", "head"):
        launch = megatron_launch(task_of(megatron_recipe("llama3-8b", [f"engine.version={version}"]), stretched))
        place = launch.arguments.index("--rotary-seq-len-interpolation-factor")
        assert launch.arguments[place + 1] == "4"


def test_latent_attention_is_written_by_what_each_version_has() -> None:
    def words_of(preset: str, version: str, *overrides: str) -> tuple[str, ...]:
        return megatron_launch(megatron_task(preset, f"engine.version={version}", *overrides)).arguments

    newer, older = words_of("moonlight-16b-a3b", "0.16.1"), words_of("moonlight-16b-a3b", "0.12.3")
    assert newer[newer.index("--rope-type") + 1] == "rope"
    assert "--rope-type" not in older
    assert older[older.index("--rotary-scaling-factor") + 1] == "1.0"
    assert "--q-lora-rank" not in newer
    assert "--no-rope-fusion" in set(newer) & set(older)
    assert newer[newer.index("--moe-layer-freq") + 1] == "([0]*1+[1]*26)"
    with pytest.raises(InputError, match=r"0\.12\.3 stretches positions from --max-position-embeddings on"):
        words_of("deepseek-v3", "0.12.3")
    held = words_of("moonlight-16b-a3b", "0.16.1", "train.moe={bias_update: 0.0}")
    assert held[held.index("--moe-router-bias-update-rate") + 1] == "0.0"
    assert "--moe-router-bias-update-rate" not in words_of("mixtral-8x7b", "0.16.1")
    with pytest.raises(RecipeError, match="refuses --multi-latent-attention without TransformerEngine"):
        words_of("moonlight-16b-a3b", "0.16.1", "engine.args={transformer-impl: local}")
    with pytest.raises(RecipeError, match="`--kv-lora-rank` contradicts `model`"):
        words_of("mixtral-8x7b", "0.16.1", "engine.args={kv-lora-rank: 512}")


def test_what_megatron_computes_otherwise_with_latents_and_biases_of_scores_is_told() -> None:
    launch = megatron_launch(megatron_task("moonlight-16b-a3b"))
    assert any("norms of latents have the epsilon 1e-05 in Megatron" in note for note in launch.notes)
    assert not any("latents" in note for note in megatron_launch(megatron_task("deepseek-v3")).notes)
    older = megatron_launch(megatron_task("moonlight-16b-a3b", "engine.version=878d65f")).notes
    assert any("878d65f rounds the biases of experts' scores" in note for note in older)
    assert not any("rounds" in note for note in launch.notes)


def test_a_recipe_without_a_version_gets_the_arguments_of_a_stated_one() -> None:
    launch = megatron_launch(megatron_task("llama3-8b"))
    assert launch.arguments == megatron_launch(megatron_task("llama3-8b", "engine.version=0.16.1")).arguments
    assert any("Megatron-LM 0.16.1, as engine.version is not written" in note for note in launch.notes)
    azure = "ghcr.io/azure/ai-infrastructure-on-azure/megatron-lm:latest"
    launch = megatron_launch(megatron_task("gpt-375m", f"engine.image={azure}"))
    assert launch.program == "/megatron-lm/pretrain_gpt.py"
    assert any("Megatron-LM 878d65f, which ghcr.io/azure" in note for note in launch.notes)
    assert not {"--padded-vocab-size", "--async-strategy"} & set(launch.arguments)


def test_rows_of_the_vocabulary_are_the_same_where_a_version_cannot_be_told_them() -> None:
    def word(version: str, option: str) -> str | None:
        words = megatron_launch(megatron_task("qwen2.5-7b", f"engine.version={version}", layout={"tp": 2})).arguments
        return words[words.index(option) + 1] if option in words else None

    rows = int(word("0.16.1", "--padded-vocab-size") or 0)
    assert word("878d65f", "--padded-vocab-size") is None
    multiple = int(word("878d65f", "--make-vocab-size-divisible-by") or 0) * 2
    # Qwen's tokenizer has 151,665 tokens, and its model 152,064 rows.
    assert -(-151_665 // multiple) * multiple == rows == 152_064


@pytest.mark.parametrize("version", ["0.16.1", "0.19.0", "head"])
def test_validation_takes_the_full_batch_beside_a_ramp(version: str) -> None:
    ramp = "train.batch_ramp={start: 128, increment: 64, samples: 4000}"
    words = megatron_launch(megatron_task("llama3-8b", ramp, f"engine.version={version}")).arguments
    option = "--global-batch-size" if version == "0.16.1" else "--eval-global-batch-size"
    assert words[words.index(option) + 1] == "512"
    # Newer versions refuse a stepped schedule beside it.
    assert ("--global-batch-size" in words) == (version == "0.16.1")


def test_uneven_stages_that_the_planner_chose_are_written_out() -> None:
    recipe = megatron_recipe("qwen3-235b-a22b", ["layout=auto", "train.global_batch=1024"])
    config = model_preset("qwen3-235b-a22b")
    task = task_of(recipe, config, nodes=8, layout={"tp": 4, "pp": 8, "vp": 6, "ep": 8})
    words = megatron_launch(task).arguments
    stages = words[words.index("--pipeline-model-parallel-layout") + 1]
    assert sum(int(count) for count in re.findall(r"t\*(\d+)", stages)) == 94
    assert stages.count("|") == 8 * 6 - 1
