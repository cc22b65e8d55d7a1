"""megatron-core as the oracle for Megatron's checkpoints, where it is installed and has layers for them.

It runs in a process of its own (`megatron_process.py`): it must be patched to work without a GPU and needs process
groups, and both last as long as the process. Its states come through a pipe one by one, so neither side holds more than
one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from argparse import Namespace
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import IO, Any

import torch

from trainshed.checkpoints.megatron.args import MegatronLayout, has_zero_centered_norms
from trainshed.checkpoints.megatron.legacy import MegatronLegacyWeights
from trainshed.checkpoints.megatron.weights import MegatronWeights
from trainshed.checkpoints.prove.layerwise import LOGITS, LayerState
from trainshed.checkpoints.weights import dtype_name
from trainshed.errors import TrainshedError

PROCESS = "trainshed.checkpoints.prove.megatron_process"
_SHOWN_CHARACTERS = 300
# The oracle computes in float32 on a CPU, whatever else this machine has; compiling would take longer than computing.
_ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "", "TORCHDYNAMO_DISABLE": "1"}


class MegatronOracle:
    """megatron-core over a checkpoint; with `dtype` its weights are rounded to it first. Computes in float32.

    It gets the token ids [B, S] when it is created. `refusal` says why it does not compute, None where it does; `name`
    holds its version. `close` kills its process.
    """

    name: str
    refusal: str | None

    def __init__(self, weights: MegatronWeights, tokens: torch.Tensor, dtype: torch.dtype | None = None) -> None:
        self._weights, self.name = weights, "megatron-core"
        self._process: subprocess.Popen[bytes] | None = None
        self._errors: IO[bytes] | None = None
        self.refusal = _refusal(weights.args)
        if self.refusal is None:
            self._start(tokens, dtype)

    def states(self, advance: Callable[[int], None] = lambda _: None) -> Iterator[LayerState]:
        """Yield the state after the embedding and each layer, then the logits. Can be called once.

        `advance` is called after each layer.
        """
        name = ""
        while name != LOGITS:
            header = self._read_line()
            name, shape = header["state"], header["shape"]
            data = bytearray(self._pipe.read(header["bytes"]))
            if len(data) != header["bytes"]:
                raise self._failure()
            if name.startswith("layer"):
                advance(1)
            yield LayerState(name, torch.frombuffer(data, dtype=torch.float32).view(shape))

    def close(self) -> None:
        """End the process."""
        if self._process is not None and self._errors is not None:
            self._process.kill()
            self._process.wait()
            self._pipe.close()
            self._errors.close()
            self._process = None

    def _start(self, tokens: torch.Tensor, dtype: torch.dtype | None) -> None:
        request = {
            "folder": str(self._weights.folder),
            "legacy": isinstance(self._weights, MegatronLegacyWeights),
            "config": self._weights.config.model_dump(mode="json"),
            "dtype": None if dtype is None else dtype_name(dtype),
            "tokens": tokens.tolist(),
        }
        self._errors = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-W", "ignore", "-m", PROCESS],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=os.environ | _ENVIRONMENT,
        )
        try:
            assert self._process.stdin is not None
            try:
                self._process.stdin.write(json.dumps(request).encode())
                self._process.stdin.close()
            except BrokenPipeError:
                raise self._failure() from None
            reply = self._read_line()
            self.refusal, version = reply.get("refusal"), reply.get("version")
            self.name += f" {version}"
            if getattr(self._weights.args, "rotary_seq_len_interpolation_factor", None) is not None:
                self.name += ", with linear rope scaling, which pretrain_gpt.py reads from 0.19 on"
            if self._weights.layout != MegatronLayout():
                self.name += ", the shares of its ranks put together by our reader"
        except TrainshedError as error:
            # It failed before it could refuse; our decoder computes instead, and this is the reason.
            self.refusal = f"failed: {error.hint}"
        except BaseException:
            self.close()
            raise
        if self.refusal is not None:
            self.close()

    @property
    def _pipe(self) -> IO[bytes]:
        assert self._process is not None, "used before it was started, or after it was closed"
        assert self._process.stdout is not None
        return self._process.stdout

    def _read_line(self) -> dict[str, Any]:
        line = self._pipe.readline()
        if not line.endswith(b"\n"):
            raise self._failure()
        return json.loads(line)

    def _failure(self) -> TrainshedError:
        assert self._process is not None
        assert self._errors is not None
        code = self._process.wait()
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").split("\n")
        last = next((line for line in reversed(lines) if line.strip()), f"exit code {code}, without a word")
        return TrainshedError(
            f"{self.name} ended before its answer did", where=str(self._weights.folder), hint=last[:_SHOWN_CHARACTERS]
        )


def is_installed() -> bool:
    """Whether megatron-core can be found; it is not imported here."""
    try:
        return find_spec("megatron.core") is not None
    except ImportError:  # of the parent package `megatron`
        return False


def _refusal(args: Namespace | None) -> str | None:
    if not is_installed():
        return "is not installed"
    if args is None:
        return "was not asked: the checkpoint has no args to build its model by"
    if has_zero_centered_norms(args):
        return "was not asked: norm weights stored less one need Transformer Engine layers"
    return None
