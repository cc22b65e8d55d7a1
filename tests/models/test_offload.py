"""Activations that wait in host memory change no number, and leave the device's memory in the meantime."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest
import torch

from support.models.one_process import gradients, one_process_model, token_rows
from support.models.tiny_models import tiny_config
from trainshed.engines.torch.model import RankModel
from trainshed.models.decoder import Regularization
from trainshed.models.offload import ActivationOffload, _LayerActivations, _SavedStorage

ROWS, LENGTH = 2, 16
LOSSES = Regularization(z_loss=0.01, moe_balance=0.02, moe_z=0.03, dropout=0.2, seed=5)


def build(variant: str, recompute: str, offload: str | None, *, precision: str = "fp32") -> RankModel:
    model = one_process_model(
        tiny_config(variant),
        length=LENGTH,
        precision=precision,
        regularization=LOSSES,
        recompute=recompute,
        micro_batch=ROWS,
        offload=offload,
    )
    model.normalization.tokens.fill_(1.0 / (ROWS * LENGTH))
    model.normalization.sequences.fill_(1.0 / ROWS)
    if (host := model.stages[0].spec.offload) is not None:
        host.min_bytes = 1
    return model


def forward(model: RankModel, *, packed: bool = False) -> torch.Tensor:
    tokens, labels = (token_rows(model.config, ROWS, LENGTH, seed=seed) for seed in (0, 1))
    columns = torch.arange(LENGTH)
    starts = torch.stack([torch.where(columns < 5, 0, 5), torch.zeros_like(columns)]) if packed else None
    return model.stages[0](tokens, labels, torch.tensor([3, 8]), starts)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("variant", ["qwen3", "gpt2", "mixtral"])
def test_gradients_are_the_same_to_the_last_bit(variant: str, recompute: str, packed: bool) -> None:
    kept, offloaded = build(variant, recompute, None), build(variant, recompute, "activations")
    losses = [forward(model, packed=packed) for model in (kept, offloaded)]
    for loss in losses:
        loss[0].backward()
    assert torch.equal(losses[0], losses[1])
    expected, got = gradients(kept), gradients(offloaded)
    assert all(bool(gradient.any()) for gradient in expected.values())
    for name, gradient in expected.items():
        assert torch.equal(got[name], gradient), name


@pytest.fixture
def saved() -> Iterator[list[_SavedStorage]]:
    """Every storage that a layer saves, in order."""
    storages: list[_SavedStorage] = []
    original = _SavedStorage.__init__

    def record(self: _SavedStorage, *arguments: object, **keywords: object) -> None:
        original(self, *arguments, **keywords)  # pyrefly: ignore
        storages.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_SavedStorage, "__init__", record)
        yield storages


def test_after_forward_only_the_last_layer_is_on_the_device(saved: list[_SavedStorage]) -> None:
    model = build("qwen3", "none", "activations")
    loss = forward(model)
    here = [storage.on_device is not None for storage in saved]
    gone, staying = here.index(True), len(here) - here.index(True)
    assert not any(here[:gone])
    assert all(here[gone:])
    assert staying <= len(saved) / model.config.layers + 1
    assert all((storage.on_host is not None) == (storage.on_device is None) for storage in saved)
    loss[0].backward()
    assert all(storage.on_host is None for storage in saved)


def test_weights_and_tables_stay_where_they_are() -> None:
    model, packed = build("qwen3", "none", "activations"), set()
    (stage,) = model.stages
    original = _LayerActivations.pack

    def pack(self: _LayerActivations, tensor: torch.Tensor) -> object:
        handle = original(self, tensor)
        if handle.storage is not None:
            packed.add(tensor.untyped_storage().data_ptr())
        return handle

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_LayerActivations, "pack", pack)
        loss = forward(model)
    assert packed
    rotary = stage.position_tables["rotary"]
    assert isinstance(rotary, tuple)
    staying = {tensor.untyped_storage().data_ptr() for tensor in (*stage.parameters(), *rotary)}
    assert not packed & staying
    loss[0].backward()


def test_host_memory_is_taken_once() -> None:
    model = build("qwen3", "none", "activations")
    host = model.stages[0].spec.offload
    assert host is not None
    forward(model)[0].backward()
    taken = host.host_bytes
    assert taken > 0
    for _ in range(3):
        forward(model)[0].backward()
    assert host.host_bytes == taken


def test_a_graph_that_is_never_walked_back_is_forgotten(saved: list[_SavedStorage]) -> None:
    model = build("qwen3", "none", "activations")
    gc.collect()
    gc.disable()
    try:
        loss = forward(model)
        references = [weakref.ref(storage) for storage in saved]
        saved.clear()
        assert any(reference() is not None for reference in references)
        del loss
        assert all(reference() is None for reference in references)
    finally:
        gc.enable()


def test_nothing_is_caught_without_gradients(saved: list[_SavedStorage]) -> None:
    model = build("qwen3", "none", "activations")
    with torch.no_grad():
        forward(model)
    assert not saved


@pytest.mark.filterwarnings("ignore")  # PyTorch's compiler warns of itself
def test_copies_of_weights_that_compiled_layers_save_stay() -> None:
    model = build("qwen3", "none", "activations", precision="bf16")
    for block in model.stages[0].layers.values():
        block.compile(backend="aot_eager_decomp_partition", fullgraph=True)
    packed: list[tuple[bool, tuple[int, ...]]] = []
    original = _LayerActivations.pack

    def pack(self: _LayerActivations, tensor: torch.Tensor) -> object:
        handle = original(self, tensor)
        packed.append((handle.storage is not None, tuple(tensor.shape)))
        return handle

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_LayerActivations, "pack", pack)
        forward(model)[0].backward()
    torch.compiler.reset()
    weights = {tuple(parameter.shape) for parameter in model.stages[0].layers.parameters() if parameter.dim() > 1}
    copies = [gone for gone, shape in packed if shape in weights or shape[::-1] in weights]
    assert copies, "else this shows nothing"
    assert not any(copies)
    assert any(gone for gone, _ in packed)


def test_views_of_one_storage_are_copied_once() -> None:
    offload = ActivationOffload(torch.device("cpu"), min_bytes=1)
    layer = _LayerActivations(offload, torch.nn.Identity(), set(), frozenset(), None)
    whole = torch.arange(24.0)
    packed = [layer.pack(view) for view in (whole, whole.view(4, 6).t(), whole[5:9])]
    layer.send()
    layer.release()
    assert offload.host_bytes == whole.untyped_storage().nbytes()
    for expected, handle in zip((whole, whole.view(4, 6).t(), whole[5:9]), packed, strict=True):
        assert torch.equal(layer.unpack(handle), expected)
        assert torch.equal(layer.unpack(handle), expected), "a second backward, as zero_bubble makes"
