"""Activations in host memory between forward and backward (`layout.offload: activations`).

While a layer runs forward, the activations that the layer before it saved are copied to pinned host memory; while it
runs backward, those of the layer before it come back. One side stream does both. So a stage holds the activations of
about two layers, whatever its depth, and no more host memory is used than was once needed.

What a layer saves is caught by autograd's hooks for saved tensors, also in compiled blocks. Weights, their copies in
the dtype of the products, buffers, and what all layers read alike (rotary tables) stay where they are. A storage is
copied once, however many views of it are saved. On a CPU the same copies are made without a stream; nothing is won
there, and nothing changes.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor

MIN_BYTES = 1 << 12
"""What is smaller stays on the device: a copy of it costs more than its memory is worth."""


class ActivationOffload:
    """The side stream and the host memory of one rank, for all its stages and micro-batches."""

    def __init__(self, device: torch.device, *, min_bytes: int = MIN_BYTES) -> None:
        self.device, self.min_bytes = device, min_bytes
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.host_bytes = 0
        """Host memory taken so far."""
        self._free_buffers: dict[int, list[torch.Tensor]] = defaultdict(list)

    def forward_pass(
        self, shared: Iterable[torch.Tensor | None], *, token_counts: Iterable[int] = (), keep_last: bool
    ) -> OffloadedPass:
        """Begin the forward pass of a micro-batch through a stage.

        `shared` are tensors that all layers read. `token_counts` are how many tokens this rank has: what is as long is
        taken for an activation even where a weight has the same shape. `keep_last` leaves the last layer's activations
        on the device: its backward comes next.
        """
        addresses = {_address(tensor) for tensor in shared if tensor is not None}
        return OffloadedPass(self, addresses, frozenset(token_counts), keep_last=keep_last)

    def take_buffer(self, size: int) -> torch.Tensor:
        """Return `size` bytes of host memory."""
        if free := self._free_buffers[size]:
            return free.pop()
        self.host_bytes += size
        return torch.empty(size, dtype=torch.uint8, pin_memory=self.stream is not None)

    def return_buffer(self, buffer: torch.Tensor) -> None:
        """Take host memory back; the side stream writes and reads it in order, so it may still be read from now."""
        self._free_buffers[buffer.numel()].append(buffer)


class OffloadedPass:
    """The layers of one forward pass, in order."""

    def __init__(
        self, offload: ActivationOffload, shared: set[int], token_counts: frozenset[int], *, keep_last: bool
    ) -> None:
        self._offload, self._shared, self._token_counts = offload, shared, token_counts
        self._keep_last = keep_last
        self._previous: _LayerActivations | None = None

    @contextmanager
    def layer(self, module: nn.Module, *, last: bool) -> Iterator[None]:
        """Send away what `module` saves in this context, and give up the memory of the layer before it."""
        activations = _LayerActivations(self._offload, module, self._shared, self._token_counts, self._previous)
        with saved_tensors_hooks(activations.pack, activations.unpack):
            yield
        if self._previous is not None:
            self._previous.release()
        self._previous = activations
        if not (last and self._keep_last):
            activations.send()
        if last:
            activations.release()


@dataclass(eq=False)
class _SavedStorage:
    """Bytes that a layer saved: on the device, in host memory, or both."""

    size: int
    on_device: torch.UntypedStorage | None
    on_host: torch.Tensor | None = None


@dataclass(frozen=True)
class _SavedTensor:
    """What autograd keeps in place of a tensor: a tensor that has stayed, or a view of a storage that may have gone."""

    layer: _LayerActivations
    tensor: torch.Tensor | None = None
    storage: _SavedStorage | None = None
    dtype: torch.dtype | None = None
    shape: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    offset: int = 0


class _LayerActivations:
    """What one layer saved in one forward pass. Only autograd holds the storages, so they end with its graph."""

    def __init__(
        self,
        offload: ActivationOffload,
        module: nn.Module,
        shared: set[int],
        token_counts: frozenset[int],
        previous: _LayerActivations | None,
    ) -> None:
        self._offload, self._module, self._shared, self._previous = offload, module, shared, previous
        self._token_counts = token_counts
        self._staying: set[int] | None = None
        self._gathered_later: list[tuple[nn.Module, str]] = []
        """The weights of which this rank has only a shard when the layer begins: FSDP gathers experts by themselves."""
        self._weight_shapes: set[tuple[int, ...]] = set()
        self._storages: dict[int, weakref.ref[_SavedStorage]] = {}
        self._sent: torch.cuda.Event | None = None
        self._fetched: torch.cuda.Event | None = None
        self._in_backward = False

    def pack(self, tensor: torch.Tensor) -> _SavedTensor:
        """Note a tensor that is saved for backward."""
        if self._staying is None:
            # Not before the layer runs: FSDP gathers its weights only then.
            own = [*self._module.parameters(), *self._module.buffers()]
            self._staying = self._shared | {_address(parameter) for parameter in own}
            self._weight_shapes = {tuple(parameter.shape) for parameter in own if parameter.dim() > 1}
            self._gathered_later = [
                (module, name)
                for module in self._module.modules()
                for name, parameter in module.named_parameters(recurse=False)
                if isinstance(parameter, DTensor)
            ]
        storage = tensor.untyped_storage() if type(tensor) in (torch.Tensor, nn.Parameter) else None
        if (
            storage is None
            or tensor.device.type != self._offload.device.type
            or storage.nbytes() < self._offload.min_bytes
            or storage.data_ptr() in self._staying
            or self._is_weight_copy(tensor)
        ):
            return _SavedTensor(self, tensor)
        reference = self._storages.get(storage.data_ptr())
        saved = reference() if reference is not None else None
        if saved is None and self._is_gathered_weight(storage):
            return _SavedTensor(self, tensor)
        if saved is None:
            saved = _SavedStorage(storage.nbytes(), storage)
            self._storages[storage.data_ptr()] = weakref.ref(saved)
        return _SavedTensor(
            self, None, saved, tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())
        )

    def _is_gathered_weight(self, storage: torch.UntypedStorage) -> bool:
        """Whether a storage is that of a weight which was gathered after the layer had begun."""
        address = storage.data_ptr()
        return any(_address(getattr(module, name)) == address for module, name in self._gathered_later)

    def _is_weight_copy(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is a weight in another dtype, or transposed, which a compiled layer saves for backward."""
        shape = tuple(tensor.shape)
        transposed = (*shape[:-2], *shape[:-3:-1])
        return not self._token_counts & set(shape) and bool({shape, transposed} & self._weight_shapes)

    def send(self) -> None:
        """Copy the storages to host memory, after what the device is doing now."""
        storages = self._alive()
        with self._on_stream():
            for saved in storages:
                assert saved.on_device is not None
                saved.on_host = self._offload.take_buffer(saved.size)
                saved.on_host.copy_(_as_bytes(saved.on_device, self._offload.device), non_blocking=True)
        self._sent = self._record()

    def release(self) -> None:
        """Give up the device's memory; what the device does after this waits for the copies."""
        self._wait_for(self._sent)
        for saved in self._alive():
            if saved.on_host is not None:
                saved.on_device = None

    def fetch(self) -> None:
        """Begin to copy back what is no longer on the device."""
        storages = [saved for saved in self._alive() if saved.on_device is None]
        if not storages:
            return
        device, stream = self._offload.device, self._offload.stream
        buffers = [torch.empty(saved.size, dtype=torch.uint8, device=device) for saved in storages]
        with self._on_stream():
            for saved, buffer in zip(storages, buffers, strict=True):
                assert saved.on_host is not None
                buffer.copy_(saved.on_host, non_blocking=True)
                if stream is not None:
                    buffer.record_stream(stream)  # if backward never asks for it
                self._offload.return_buffer(saved.on_host)
                saved.on_device, saved.on_host = buffer.untyped_storage(), None
        self._fetched = self._record()

    def unpack(self, packed: _SavedTensor) -> torch.Tensor:
        """Return a tensor to backward."""
        if not self._in_backward:
            self._in_backward = True
            self.fetch()
            if self._previous is not None:
                self._previous.fetch()
                self._previous = None
        if packed.tensor is not None:
            return packed.tensor
        self._wait_for(self._fetched)
        assert packed.storage is not None
        assert packed.storage.on_device is not None
        empty = torch.empty(0, dtype=packed.dtype, device=self._offload.device)
        return empty.set_(packed.storage.on_device, packed.offset, packed.shape, packed.stride)

    def _alive(self) -> list[_SavedStorage]:
        return [saved for reference in self._storages.values() if (saved := reference()) is not None]

    @contextmanager
    def _on_stream(self) -> Iterator[None]:
        stream = self._offload.stream
        if stream is None:
            yield
            return
        stream.wait_stream(torch.cuda.current_stream(self._offload.device))
        with torch.cuda.stream(stream):
            yield

    def _record(self) -> torch.cuda.Event | None:
        if self._offload.stream is None:
            return None
        event = torch.cuda.Event()
        event.record(self._offload.stream)
        return event

    def _wait_for(self, event: torch.cuda.Event | None) -> None:
        if event is not None:
            torch.cuda.current_stream(self._offload.device).wait_event(event)


def _address(tensor: torch.Tensor) -> int:
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return local.untyped_storage().data_ptr()


def _as_bytes(storage: torch.UntypedStorage, device: torch.device) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (storage.nbytes(),), (1,))
