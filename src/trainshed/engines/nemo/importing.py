"""A NeMo 24.07 file (`llama3-70b-fp8.yaml`) read as a recipe.

The architecture is compared with the models of that size that the catalog knows.
"""

from __future__ import annotations

import re
from typing import Any

from trainshed.catalog import model_preset, preset_names
from trainshed.engines.importing import ConfigImport, ImportedConfig
from trainshed.engines.nemo.hydra_keys import ACTIVATIONS, HYDRA_KEYS, fixed_settings
from trainshed.engines.nemo.launch import HYDRA_RELEASE, NEMO_IMAGES
from trainshed.recipe import ModelConfig
from trainshed.recipe.schema import MAX_NAME_LENGTH
from trainshed.recipe.yaml_io import parse_yaml

_LAYOUT_KEYS = {
    "model.tensor_model_parallel_size": "tp",
    "model.pipeline_model_parallel_size": "pp",
    "model.virtual_pipeline_model_parallel_size": "vp",
    "model.context_parallel_size": "cp",
    "model.expert_model_parallel_size": "ep",
    "model.micro_batch_size": "micro_batch",
}
_IMPLIED_KEYS = {
    "model.sequence_parallel": "on with tp",
    "model.overlap_p2p_comm": "on with vp",
    "model.batch_p2p_comm": "off with vp",
    "model.fp8_hybrid": "follows train.precision",
    "model.precision": "follows train.precision",
    "exp_manager.checkpoint_callback_params.model_parallel_size": "tp · pp",
    "model.activations_checkpoint_method": "follows layout.recompute",
    "model.activations_checkpoint_num_layers": "follows layout.recompute",
    "model.data.data_impl": "follows data",
}
_DROP_REASONS = {
    "run": "belongs to NeMo's launcher",
    "exp_manager.exp_dir": "places come from the cluster file",
    "exp_manager.explicit_log_dir": "places come from the cluster file",
    "exp_manager.name": "the run's name and id take its place",
    "exp_manager.checkpoint_callback_params.dirpath": "places come from the cluster file",
    "exp_manager.checkpoint_callback_params.filename": "Trainshed names checkpoints by step and samples",
    "exp_manager.checkpoint_callback_params.monitor": "the newest checkpoints are kept, not the best",
    "exp_manager.checkpoint_callback_params.mode": "the newest checkpoints are kept, not the best",
    "trainer.max_time": "the cluster's time limit takes its place",
    "trainer.num_nodes": "--nodes, or resources.nodes, say it",
    "trainer.limit_test_batches": "follows data.split",
    "model.nsys_profile": "the profiler is off",
    "name": "the recipe has a name of its own",
}

_TIME_LIMIT = re.compile(r"^(?:(\d+)-)?(\d+):(\d+):\d+$")
"""Slurm's `[days-]hours:minutes:seconds`."""


def read_nemo(text: str, name: str) -> ImportedConfig:
    """Read NeMo's YAML; `name` is how its lines are called."""
    settings = ConfigImport(parse_yaml(text, name))
    settings.write("name", _run_name(settings.get("run.name") or settings.get("name") or "imported"))
    settings.mapped("run.name", f"name: {settings.recipe['name']}")
    read_model(settings)
    read_tokenizer(settings)
    read_data(settings)
    _read_training(settings)
    _read_layout(settings)
    settings.write("engine.name", "nemo")
    settings.write("engine.version", HYDRA_RELEASE)
    _read_cluster(settings)
    _read_checkpoints(settings)
    for key, why in _IMPLIED_KEYS.items():
        settings.mapped(key, why)
    for key, why in _DROP_REASONS.items():
        settings.drop(key, why)
        settings.drop_section(key, why)
    settings.keep_rest(HYDRA_KEYS, fixed_settings())
    return settings.imported("nemo")


def _run_name(text: str) -> str:
    plain = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:MAX_NAME_LENGTH].strip("-")
    return plain if plain[:1].isalpha() else f"run-{plain}"[:MAX_NAME_LENGTH].strip("-")


def _read_training(settings: ConfigImport) -> None:
    steps = settings.get("trainer.max_steps")
    if steps is not None and steps > 0:
        settings.take("trainer.max_steps", "train.steps", steps)
    else:
        settings.write("train.steps", 1000)
        settings.ask("trainer.max_steps says no number of steps: train.steps is written as 1000")
    settings.take("model.global_batch_size", "train.global_batch", settings.get("model.global_batch_size", 1))
    if (ramp := settings.get("model.rampup_batch_size")) is not None:
        keys = dict(zip(("start", "increment", "samples"), ramp, strict=False))
        settings.take("model.rampup_batch_size", "train.batch_ramp", keys)
    precision = "fp8" if settings.get("model.fp8") else str(settings.get("trainer.precision", "bf16")).split("-")[0]
    precision = {"32": "fp32", "16": "fp16"}.get(precision, precision)
    settings.take("model.fp8", "train.precision", precision)
    settings.mapped("trainer.precision", f"train.precision: {precision}")
    _read_optimizer(settings)
    _read_schedule(settings, steps)
    dropout = settings.get("model.hidden_dropout", 0.0)
    if dropout:
        settings.write("train.dropout", float(dropout))
    settings.mapped("model.hidden_dropout", f"train.dropout: {dropout:g}")
    if settings.get("model.attention_dropout", dropout) == dropout:
        settings.mapped("model.attention_dropout", f"train.dropout: {dropout:g}")
    seed = settings.get("model.seed", 1234)
    settings.take("model.seed", "seed", seed)
    settings.write("data.seed", seed)


def _read_optimizer(settings: ConfigImport) -> None:
    name = settings.get("model.optim.name", "fused_adam")
    if "adam" not in name and name != "mcore_distributed_optim":
        settings.ask(f"model.optim.name is {name}: a recipe has AdamW only")
    settings.mapped("model.optim.name", "layout.shard: zero1" if _is_sharded(name) else "train.optimizer.name: adamw")
    for theirs, ours, usual in (
        ("model.optim.lr", "lr", 2e-4),
        ("model.optim.weight_decay", "weight_decay", 0.01),
        ("model.optim.betas", "betas", [0.9, 0.98]),
    ):
        settings.take(theirs, f"train.optimizer.{ours}", _to_float(settings.get(theirs, usual)))
    if name == "distributed_fused_adam":
        settings.mistake(
            "model.optim.name",
            "distributed_fused_adam is Apex's; its checkpoints only load onto the same dp",
            "mcore_distributed_optim, which the recipe's layout.shard: zero1 renders",
        )
    clip = settings.get("trainer.gradient_clip_val")
    settings.take("trainer.gradient_clip_val", "train.optimizer.clip", _to_float(clip) if clip else None)


def _read_schedule(settings: ConfigImport, steps: Any) -> None:
    sched = "model.optim.sched"
    name = settings.get(f"{sched}.name")
    shapes = {"CosineAnnealing": "cosine", "WarmupAnnealing": "linear", "WarmupPolicy": "constant", None: "constant"}
    if name not in shapes:
        settings.ask(f"{sched}.name is {name}, which a recipe has no word for: train.schedule.name is constant")
    shape = shapes.get(name, "constant")
    warmup, constant = settings.get(f"{sched}.warmup_steps", 0), settings.get(f"{sched}.constant_steps", 0)
    settings.take(f"{sched}.name", "train.schedule.name", shape)
    settings.take(f"{sched}.warmup_steps", "train.schedule.warmup", warmup)
    if shape != "constant":
        settings.take(f"{sched}.min_lr", "train.schedule.min_lr", _to_float(settings.get(f"{sched}.min_lr", 0.0)))
    settings.drop(f"{sched}.min_lr", "a constant schedule has no decay")
    end = settings.get(f"{sched}.max_steps") or steps
    if not isinstance(end, int):
        return
    if warmup + constant > end:
        peak = settings.get("model.optim.lr", 2e-4)
        reached = f"reaches {peak * min(1.0, end / warmup):.3g} of {peak:g}" if warmup else "is never decayed"
        settings.mistake(
            f"{sched}.warmup_steps",
            f"warm-up {warmup} + constant {constant} are more than the {end} steps: the learning rate {reached}",
            "a warm-up below trainer.max_steps, and constant_steps: 0 in a run this short",
        )
        settings.drop(f"{sched}.constant_steps", f"does not fit into {end} steps")
    elif constant and shape == "cosine":
        settings.take(f"{sched}.constant_steps", "train.schedule.decay", end - constant)
    elif end != steps and shape != "constant":
        settings.write("train.schedule.decay", end)
    settings.mapped(f"{sched}.max_steps", f"train.schedule.decay: {end}")
    settings.mapped(f"{sched}.constant_steps", "none")


def _read_layout(settings: ConfigImport) -> None:
    for theirs, ours in _LAYOUT_KEYS.items():
        settings.take(theirs, f"layout.{ours}", settings.get(theirs, 1))
    if "moe" in settings.recipe["model"]["config"]:
        # NeMo 24.07 cuts experts by tp.
        settings.write("layout.etp", settings.recipe["layout"]["tp"])
    granularity = settings.get("model.activations_checkpoint_granularity", "none")
    settings.take("model.activations_checkpoint_granularity", "layout.recompute", granularity)
    settings.write("layout.shard", "zero1")
    settings.mapped("trainer.devices", "cluster file, machine: one with as many GPUs")
    layout, batch = settings.recipe["layout"], settings.recipe["train"]["global_batch"]
    if batch % layout["micro_batch"]:
        settings.mistake(
            "model.global_batch_size",
            f"{batch} is no multiple of micro_batch_size {layout['micro_batch']}: no number of ranks can share it",
            f"a multiple of {layout['micro_batch']}",
        )
    if settings.get("trainer.num_nodes") is None:
        ranks = layout["tp"] * layout["pp"] * layout["cp"]
        settings.ask(
            f"the file does not say how many nodes: resources.nodes, a multiple of {ranks} GPUs "
            f"(tp {layout['tp']} · pp {layout['pp']} · cp {layout['cp']}) whose quotient divides {batch}"
        )
    else:
        settings.take("trainer.num_nodes", "resources.nodes", settings.get("trainer.num_nodes"))


def _read_cluster(settings: ConfigImport) -> None:
    settings.cluster["image"] = NEMO_IMAGES[HYDRA_RELEASE]
    limit = _TIME_LIMIT.match(str(settings.get("run.time_limit", "")))
    if limit:
        days, hours, minutes = (int(part or 0) for part in limit.groups())
        settings.hint("run.time_limit", "limits.hours", 24.0 * days + hours + round(minutes / 60, 3))


def _read_checkpoints(settings: ConfigImport) -> None:
    callback = "exp_manager.checkpoint_callback_params"
    every = settings.get(f"{callback}.every_n_train_steps")
    if settings.get("exp_manager.create_checkpoint_callback") is False:
        settings.mistake(
            "exp_manager.create_checkpoint_callback",
            "no checkpoint is ever written: a lost node loses the run, and nothing is left of it",
            "checkpoint.every; without it the recipe saves once, at the end",
        )
        every = None
    settings.take(f"{callback}.every_n_train_steps", "checkpoint.every", every)
    settings.mapped("exp_manager.create_checkpoint_callback", f"checkpoint.every: {every or 'null'}")
    settings.mapped("trainer.enable_checkpointing", "Lightning's own checkpoints, which NeMo replaces")
    keep = settings.get(f"{callback}.save_top_k", 3)
    settings.take(f"{callback}.save_top_k", "checkpoint.keep", keep if keep > 0 else None)
    settings.take(f"{callback}.async_save", "checkpoint.async", bool(settings.get(f"{callback}.async_save", False)))
    resume = "auto"
    if settings.get("exp_manager.resume_if_exists") is False:
        settings.mistake(
            "exp_manager.resume_if_exists",
            "a restart begins at the first step again, whatever checkpoints there are",
            "checkpoint.resume: auto, which the recipe has",
        )
    elif settings.get("exp_manager.resume_ignore_no_checkpoint") is False:
        resume = "must"
    settings.take("exp_manager.resume_if_exists", "checkpoint.resume", resume)
    settings.mapped("exp_manager.resume_ignore_no_checkpoint", f"checkpoint.resume: {resume}")
    for logger in ("tensorboard", "dllogger"):
        key = f"exp_manager.create_{logger}_logger"
        usual = logger == "tensorboard"
        settings.take(key, f"observe.{logger}", bool(settings.get(key, usual)))
    if settings.get("model.nsys_profile.enabled"):
        start, end = settings.get("model.nsys_profile.start_step", 10), settings.get("model.nsys_profile.end_step", 10)
        ranks = settings.get("model.nsys_profile.ranks", [0])
        settings.take(
            "model.nsys_profile.enabled",
            "observe.profile",
            {"start": start + 1, "steps": max(1, end - start + 1), "ranks": ranks},
        )
        for key in ("start_step", "end_step", "ranks"):
            settings.mapped(f"model.nsys_profile.{key}", "observe.profile")


def _is_sharded(optimizer: str) -> bool:
    return "distributed" in optimizer


def _to_float(value: Any) -> Any:
    return [float(item) for item in value] if isinstance(value, list) else float(value)


_SIZE_KEYS = {
    "model.num_layers": "layers",
    "model.hidden_size": "hidden",
    "model.num_attention_heads": "heads",
    "model.num_query_groups": "kv_heads",
    "model.max_position_embeddings": "max_positions",
    "model.init_method_std": "init_std",
    "model.layernorm_epsilon": "norm_eps",
}
_DECIDED_BY_FAMILY = (
    "model.normalization",
    "model.bias",
    "model.qkv_bias",
    "model.activation",
    "model.openai_gelu",
    "model.bias_activation_fusion",
    "model.position_embedding_type",
    "model.apply_rope_fusion",
)
GPT2_VOCABULARY = 50257
_GPT2_NAMES = ("GPT2BPETokenizer", "gpt2")
_NEMO_DEFAULTS = {"heads": 12, "layers": 12, "hidden": 768, "init_std": 0.02, "norm_eps": 1e-5}
"""megatron_gpt_config.yaml's, for files that leave them out."""


def read_model(settings: ConfigImport) -> None:
    """Write `model` from the sizes of the file."""
    config: dict[str, Any] = {"family": _family(settings)}
    for theirs, ours in _SIZE_KEYS.items():
        value = settings.get(theirs, _NEMO_DEFAULTS.get(ours))
        if value is None:
            value = config["heads"] if ours == "kv_heads" else settings.get("model.encoder_seq_length", 512)
        config[ours] = float(value) if ours in ("init_std", "norm_eps") else value
        settings.mapped(theirs, f"model.config.{ours}: {value}")
    config["head_dim"] = settings.get("model.kv_channels", config["hidden"] // config["heads"])
    settings.mapped("model.kv_channels", f"model.config.head_dim: {config['head_dim']}")
    _read_feed_forward(settings, config)
    config["vocab_size"] = GPT2_VOCABULARY
    tied = settings.get("model.share_embeddings_and_output_weights", True)
    config["tied_embeddings"] = tied
    settings.mapped("model.share_embeddings_and_output_weights", f"model.config.tied_embeddings: {str(tied).lower()}")
    if config["family"] != "gpt2":
        base = float(settings.get("model.rotary_base", 10000))
        rope: dict[str, Any] = {"base": base}
        settings.mapped("model.rotary_base", f"model.config.rope.base: {base:g}")
        if factor := settings.get("model.seq_len_interpolation_factor"):
            rope["scaling"] = {"kind": "linear", "factor": float(factor)}
        config["rope"] = rope
        settings.mapped("model.seq_len_interpolation_factor", "model.config.rope.scaling")
    for key in _DECIDED_BY_FAMILY:
        settings.mapped(key, f"model.config.family: {config['family']}")
    settings.write("model.config", config)
    settings.write("model.init", "random")
    if settings.get("model.restore_from_path") or settings.get("model.restore_from_ckpt"):
        settings.ask(
            "the file starts from weights (model.restore_from_path): write model.from: hf://org/name instead of "
            'init: random, with engine.version: "26.06"'
        )
        settings.drop_section("model.restore_from_path", "NeMo archives are not read")
    if settings.get("model.num_moe_experts") is None:
        for key in settings.left():
            if key.startswith("model.moe_"):
                settings.drop(key, "the model has no experts")
    _compare_with_published(settings, config)


def _family(settings: ConfigImport) -> str:
    rope = settings.get("model.position_embedding_type", "learned_absolute") == "rope"
    if not rope:
        return "gpt2"
    activation = settings.get("model.activation", "gelu")
    if activation not in ("swiglu", *{name for (ours, _), name in ACTIVATIONS.items() if ours == "silu"}):
        settings.ask(f"model.activation is {activation}; model.config.family is a family with SwiGLU")
    if settings.get("model.num_moe_experts") is not None:
        return "mixtral"
    return "qwen2" if settings.get("model.qkv_bias") else "llama"


def _read_feed_forward(settings: ConfigImport, config: dict[str, Any]) -> None:
    width = settings.get("model.ffn_hidden_size", 4 * config["hidden"])
    experts = settings.get("model.num_moe_experts")
    if experts is None:
        config["ffn"] = width
        settings.mapped("model.ffn_hidden_size", f"model.config.ffn: {width}")
        return
    top_k = settings.get("model.moe_router_topk", 2)
    config["moe"] = {"experts": experts, "top_k": top_k, "ffn": width}
    settings.mapped("model.ffn_hidden_size", f"model.config.moe.ffn: {width}")
    settings.mapped("model.num_moe_experts", f"model.config.moe.experts: {experts}")
    settings.mapped("model.moe_router_topk", f"model.config.moe.top_k: {top_k}")
    balance = float(settings.get("model.moe_aux_loss_coeff", 0.0))
    settings.take("model.moe_aux_loss_coeff", "train.moe.balance_loss", balance)
    if (z_loss := settings.get("model.moe_z_loss_coeff")) is not None:
        settings.take("model.moe_z_loss_coeff", "train.moe.z_loss", float(z_loss))
    for key in ("moe_grouped_gemm", "moe_token_dispatcher_type", "moe_router_load_balancing_type"):
        settings.mapped(f"model.{key}", "written by Trainshed in any case")


def _compare_with_published(settings: ConfigImport, config: dict[str, Any]) -> None:
    """Say where a model of a published size differs from the published one."""
    known = _published_model(config, settings.recipe["name"])
    if known is None:
        return
    name, published = known
    gpt2 = settings.get("model.tokenizer.type") in _GPT2_NAMES
    if gpt2 and published.vocab_size != GPT2_VOCABULARY:
        settings.mistake(
            "model.tokenizer.type",
            f"GPT-2's vocabulary of {GPT2_VOCABULARY} on a model of {name}'s size, which has {published.vocab_size}: "
            "its weights fit neither, and its speed is not that model's",
            f"tokenizer: the model's own, and model.preset: {name}",
        )
    elif not gpt2:
        config["vocab_size"] = published.vocab_size
    base = config.get("rope", {}).get("base")
    if published.rope is not None and base is not None and base != published.rope.base:
        settings.mistake(
            "model.rotary_base",
            f"the rotary base is {base:g}, and {name} has {published.rope.base:g}",
            f"model.config.rope.base: {published.rope.base:g}, where this is to be {name}",
        )


def _published_model(config: dict[str, Any], run: str) -> tuple[str, ModelConfig] | None:
    """Return the catalog's model of this size, the one the run is named after where there are several."""
    width = config.get("ffn") or config["moe"]["ffn"]
    sizes = (config["layers"], config["hidden"], config["heads"], config["kv_heads"], width)
    found: list[tuple[str, ModelConfig]] = []
    for name in preset_names():
        known = model_preset(name)
        known_width = known.ffn if known.moe is None else known.moe.ffn
        if (known.layers, known.hidden, known.heads, known.kv_heads, known_width) == sizes:
            found.append((name, known))
    plain = run.replace("-", "")
    named = [(name, known) for name, known in found if name.replace("-", "").replace(".", "") in plain]
    return next(iter([*named, *found]), None)


_GPT2_TOKENIZER = "hf://openai-community/gpt2"
_DATA_SECTION = "model.data"


def read_tokenizer(settings: ConfigImport) -> None:
    """Write `tokenizer`, and the vocabulary where only the tokenizer tells it."""
    library, kind = settings.get("model.tokenizer.library"), settings.get("model.tokenizer.type")
    model = settings.get("model.tokenizer.model")
    config = settings.recipe["model"]["config"]
    if library == "huggingface" and kind:
        address = kind if "://" in kind or kind.startswith(("/", ".")) else f"hf://{kind}"
        settings.take("model.tokenizer.type", "tokenizer", address)
        if "/" not in kind:
            settings.ask(f"model.tokenizer.type is {kind}: write the organisation too, tokenizer: hf://org/{kind}")
        if config["vocab_size"] == GPT2_VOCABULARY:
            settings.ask("the file does not say the size of the vocabulary: write model.config.vocab_size")
    elif kind == "GPT2BPETokenizer":
        settings.take("model.tokenizer.type", "tokenizer", _GPT2_TOKENIZER)
    else:
        settings.write("tokenizer", _GPT2_TOKENIZER)
        said = f"{library} {kind or model or ''}".strip()
        settings.ask(f"the tokenizer is {said}: write its address as `tokenizer`, and model.config.vocab_size")
    settings.mapped("model.tokenizer.library", "tokenizer")
    for key in ("vocab_file", "merge_file", "model", "delimiter", "use_fast", "sentencepiece_legacy"):
        settings.drop(f"model.tokenizer.{key}", "files come with the tokenizer's address")
    unpinned = str(settings.recipe["tokenizer"])
    if unpinned.startswith("hf://") and "@" not in unpinned:
        settings.ask(f"no revision is named: pin it, tokenizer: {unpinned}@<commit>")


def read_data(settings: ConfigImport) -> None:
    """Write `data`: sources, split and validation."""
    length = settings.get(f"{_DATA_SECTION}.seq_length") or settings.get("model.encoder_seq_length", 512)
    settings.take("model.encoder_seq_length", "data.sequence_length", length)
    settings.mapped(f"{_DATA_SECTION}.seq_length", f"data.sequence_length: {length}")
    settings.drop(f"{_DATA_SECTION}.index_mapping_dir", "the index is an artefact of the store")
    if settings.get(f"{_DATA_SECTION}.data_impl") == "mock":
        settings.write("data.synthetic", True)
        settings.drop(f"{_DATA_SECTION}.data_prefix", "mock data has no files")
        settings.drop(f"{_DATA_SECTION}.splits_string", "mock data is not split")
        for key in ("val_check_interval", "limit_val_batches"):
            settings.drop(f"trainer.{key}", "mock data is not validated on")
        return
    _read_prefixes(settings)
    _read_validation(settings)
    if settings.get(f"{_DATA_SECTION}.index_mapping_dir"):
        settings.mistake(
            f"{_DATA_SECTION}.index_mapping_dir",
            "the sample index is built by the first rank while all GPUs wait, on a file system that all must see",
            "nothing to write: Trainshed keeps it in the run",
        )


def _read_prefixes(settings: ConfigImport) -> None:
    # A list, which `splits_string` cuts, or a list for each of train, validation and test.
    key = f"{_DATA_SECTION}.data_prefix"
    key = f"{key}.train" if f"{key}.train" in settings else key
    prefixes = settings.get(key)
    if not isinstance(prefixes, list) or not prefixes:
        settings.write("data.train", [{"tokens": "corpus_text_document"}])
        settings.ask("the file names no data: write data.train: [{tokens: PREFIX}] or [{path: corpus/*.jsonl}]")
        settings.drop(key, "names no data")
        return
    sources: list[dict[str, Any]] = []
    for weight, prefix in _weights_and_prefixes(prefixes):
        source: dict[str, Any] = {"tokens": _source_address(settings, str(prefix))}
        sources.append(source if weight is None else source | {"weight": float(weight)})
    total = sum(source.get("weight", 0.0) for source in sources)
    if total and abs(total - 1.0) > 1e-3:
        settings.mistake(key, f"the weights sum to {total:g}", "weights that sum to 1; Trainshed scales them")
    settings.take(key, "data.train", sources)


def _weights_and_prefixes(prefixes: list[Any]) -> list[tuple[Any, Any]]:
    """Return weights and prefixes; None for the weights of a list that has prefixes only."""
    if len(prefixes) % 2 == 0 and _is_number(prefixes[0]):
        return list(zip(prefixes[::2], prefixes[1::2], strict=False))
    return [(None, prefix) for prefix in prefixes]


def _source_address(settings: ConfigImport, prefix: str) -> str:
    """Return the address that a local copy of the tokens comes from, where the file says it."""
    cache, local = (
        settings.get(f"{_DATA_SECTION}.data_cache_gcs_dir"),
        settings.get(f"{_DATA_SECTION}.data_cache_local_dir"),
    )
    if not cache or not local or not prefix.startswith(f"{local.rstrip('/')}/"):
        return prefix
    settings.mapped(f"{_DATA_SECTION}.data_cache_gcs_dir", "data.train")
    settings.drop(
        f"{_DATA_SECTION}.data_cache_local_dir", "no copy is made on local disks: tokens are read from the store"
    )
    return f"{cache.rstrip('/')}/{prefix.removeprefix(local.rstrip('/')).lstrip('/')}"


def _read_validation(settings: ConfigImport) -> None:
    every, batches = settings.get("trainer.val_check_interval"), settings.get("trainer.limit_val_batches")
    steps = settings.get("trainer.max_steps", 0)
    own = settings.get(f"{_DATA_SECTION}.data_prefix.validation")
    if own:
        tokens = [_source_address(settings, str(prefix)) for _, prefix in _weights_and_prefixes(own)]
        settings.take(f"{_DATA_SECTION}.data_prefix.validation", "data.validation.tokens", tokens)
        settings.drop(f"{_DATA_SECTION}.data_prefix.test", "nothing is tested during training")
        settings.drop(f"{_DATA_SECTION}.splits_string", "validation has documents of its own")
    split = None if own else _split(settings.get(f"{_DATA_SECTION}.splits_string"))
    documents = bool(own) or (split is not None and split["validation"] > 0)
    validated = documents and isinstance(every, int) and isinstance(batches, int)
    if split is not None:
        settings.take(f"{_DATA_SECTION}.splits_string", "data.split", split)
    if not validated:
        if split is not None and split["validation"] > 0:
            # `split` alone would validate at Trainshed's own interval: keep the documents apart, as the file does.
            test = split["test"] + split["validation"]
            settings.write("data.split", {"train": split["train"], "test": round(test, 6)})
        settings.drop("trainer.val_check_interval", "nothing is validated")
        settings.drop("trainer.limit_val_batches", "nothing is validated")
        return
    settings.take("trainer.val_check_interval", "data.validation.every", every)
    settings.take("trainer.limit_val_batches", "data.validation.batches", batches)
    if steps and every > steps:
        settings.mistake(
            "trainer.val_check_interval",
            f"{every} is more than the {steps} steps of the run: the loss is never measured on other documents",
            "a smaller data.validation.every",
        )


def _split(text: Any) -> dict[str, float] | None:
    try:
        parts = [float(part) for part in str(text).split(",")]
    except ValueError:
        return None
    total = sum(parts)
    if len(parts) != 3 or total <= 0 or parts[0] <= 0:
        return None
    return {name: round(part / total, 6) for name, part in zip(("train", "validation", "test"), parts, strict=True)}


def _is_number(value: Any) -> bool:
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return True
