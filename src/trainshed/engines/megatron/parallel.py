"""The layout on Megatron's command line."""

from __future__ import annotations

from trainshed.engines.foreign import EngineTask
from trainshed.engines.megatron.settings import Settings
from trainshed.plan.layout import RankLayout

_FSDP = {"zero2": "optim_grads", "full": "optim_grads_params"}


def uses_fsdp(layout: RankLayout) -> bool:
    """Tell whether gradients or weights are shared out, which is Megatron's FSDP."""
    return layout.shard in _FSDP


def put_layout(settings: Settings, task: EngineTask) -> None:
    """Decide which rank does what."""
    layout, config = task.layout, task.config
    settings.put("layout.tp", tensor_model_parallel_size=layout.tp, sequence_parallel=layout.tp > 1)
    settings.put("layout.pp", pipeline_model_parallel_size=layout.pp)
    _put_chunks(settings, layout)
    settings.put("layout.cp", context_parallel_size=layout.cp)
    if layout.cp > 1 and config.sliding_window is not None:
        # The ring (p2p) of TransformerEngine has no window.
        settings.choose(cp_comm_type="all_gather")
    if config.moe is not None:
        # Said outright: left alone it is tp.
        settings.put("layout.etp", expert_tensor_parallel_size=layout.etp)
        settings.put("layout.ep", expert_model_parallel_size=layout.ep)
    _put_sharding(settings, layout)
    _put_recompute(settings, layout)
    settings.put("the fabric of the cluster file", use_sharp=task.place.sharp)


def _put_chunks(settings: Settings, layout: RankLayout) -> None:
    even = len(set(layout.stages)) == 1
    settings.put("layout.vp", num_layers_per_virtual_pipeline_stage=None)
    settings.put("layout.vp", num_virtual_stages_per_pipeline_rank=layout.vp if even and layout.vp > 1 else None)
    settings.put(
        "layout.stages",
        pipeline_model_parallel_layout=None if even else pipeline_layout(layout.stages),
        decoder_first_pipeline_num_layers=None,
        decoder_last_pipeline_num_layers=None,
        account_for_embedding_in_pipeline_split=False,
        account_for_loss_in_pipeline_split=False,
    )


def pipeline_layout(stages: tuple[int, ...]) -> str:
    """Write uneven chunks in Megatron's words: E the embedding, t a layer, L the loss."""
    chunks = "|".join(f"t*{layers}" for layers in stages)
    return f"E{chunks}L"


def _put_sharding(settings: Settings, layout: RankLayout) -> None:
    fsdp = uses_fsdp(layout)
    settings.put(
        "layout.shard",
        use_distributed_optimizer=layout.shard != "none",
        use_megatron_fsdp=fsdp,
        use_torch_fsdp2=False,
        data_parallel_sharding_strategy=_FSDP.get(layout.shard),
    )
    settings.put("layout.replicate", num_distributed_optimizer_instances=layout.replicate)
    settings.choose(overlap_grad_reduce=True, overlap_param_gather=layout.shard != "none")
    if fsdp:
        settings.choose(gradient_accumulation_fusion=False)


def _put_recompute(settings: Settings, layout: RankLayout) -> None:
    full = layout.recompute == "full"
    settings.put(
        "layout.recompute",
        recompute_granularity=None if layout.recompute == "none" else layout.recompute,
        recompute_activations=False,
        recompute_method="uniform" if full else None,
        recompute_num_layers=1 if full else None,
    )
    if layout.recompute == "selective":
        settings.choose(recompute_modules=("core_attn",))
