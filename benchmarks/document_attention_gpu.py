"""Attention over packed documents on one GPU: flash and cuDNN with variable lengths, FlexAttention, and no mask at all.

    python benchmarks/document_attention_gpu.py [--length 8192] [--document 1000] [--rows 1]

Prints milliseconds of forward and backward of one layer's attention, and the ratio to the unmasked one. The engine's
choice (`models/documents.py`) follows from this table.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention


def document_ends(length: int, rows: int, mean: int, seed: int = 0) -> torch.Tensor:
    """Return ends of documents of random lengths around a mean, over all rows: int32 [N + 1]."""
    generator = torch.Generator().manual_seed(seed)
    ends = [0]
    for row in range(rows):
        column = 0
        while column < length:
            column = min(length, column + int(torch.randint(mean // 2, 3 * mean // 2, (), generator=generator)))
            ends.append(row * length + column)
    return torch.tensor(ends, dtype=torch.int32, device="cuda")


def measure(run: Callable[[], torch.Tensor], inputs: list[torch.Tensor]) -> tuple[float, float]:
    """Return milliseconds of forward, and of forward and backward."""

    def seconds(count: int, backward: bool) -> float:
        torch.cuda.synchronize()
        began = time.monotonic()
        for _ in range(count):
            out = run()
            if backward:
                torch.autograd.grad(out, inputs, torch.ones_like(out))
        torch.cuda.synchronize()
        return (time.monotonic() - began) / count

    for backward in (False, True):
        seconds(3, backward)
    return 1000 * seconds(20, False), 1000 * seconds(20, True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--document", type=int, default=1000)
    parser.add_argument("--rows", type=int, default=1)
    options = parser.parse_args()
    length, rows, heads, groups, dim = options.length, options.rows, 32, 8, 128
    total = length * rows
    query, key, value = (
        torch.randn(total, count, dim, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for count in (heads, groups, groups)
    )
    inputs = [query, key, value]
    ends = document_ends(length, rows, options.document)
    longest = int(ends.diff().max())

    def batched(x: torch.Tensor) -> torch.Tensor:
        return x.view(rows, length, -1, dim).transpose(1, 2)

    def unmasked() -> torch.Tensor:
        with sdpa_kernel([SDPBackend.CUDNN_ATTENTION]):
            return F.scaled_dot_product_attention(
                batched(query), batched(key), batched(value), is_causal=True, enable_gqa=True
            )

    def flash(padded: torch.Tensor, limit: int) -> torch.Tensor:
        return torch.ops.aten._flash_attention_forward(
            query, key, value, padded, padded, limit, limit, 0.0, True, False
        )[0]

    def cudnn(padded: torch.Tensor, limit: int) -> torch.Tensor:
        return torch.ops.aten._cudnn_attention_forward(
            query, key, value, None, padded, padded, limit, limit, True, 0.0, True, False
        )[0]

    document = torch.searchsorted(ends[1:].contiguous(), torch.arange(total, device="cuda"), right=True).view(
        rows, length
    )

    def same_document(b, h, q, k):
        return (q >= k) & (document[b, q] == document[b, k])

    compiled_mask = torch.compile(create_block_mask)
    compiled_flex = torch.compile(flex_attention)
    blocks = compiled_mask(same_document, rows, None, length, length, device="cuda")

    def flex() -> torch.Tensor:
        return compiled_flex(batched(query), batched(key), batched(value), block_mask=blocks, enable_gqa=True)

    padded = torch.cat([ends, ends[-1:].expand(max(0, 64 * rows + 1 - len(ends)))])
    variants: dict[str, Callable[[], torch.Tensor]] = {
        "unmasked (cuDNN)": unmasked,
        "flash varlen": lambda: flash(ends, longest),
        "flash varlen, padded ends, whole length": lambda: flash(padded, length),
        "cuDNN varlen": lambda: cudnn(ends, longest),
        "cuDNN varlen, padded ends, whole length": lambda: cudnn(padded, length),
        "FlexAttention": flex,
    }
    reference = flash(ends, longest).float()
    base = None
    for name, run in variants.items():
        try:
            out = run().detach()
            if name.startswith("Flex"):
                out = out.transpose(1, 2).reshape(total, heads, dim)
            error = "" if "unmasked" in name else f", largest difference {(out.float() - reference).abs().max():.1e}"
            forward, both = measure(run, inputs)
        except Exception as problem:  # a kernel that this build lacks is a line of the table
            print(f"{name:45} {type(problem).__name__}: {str(problem).splitlines()[0][:150]}")
            continue
        base = base or both
        print(f"{name:45} forward {forward:7.3f} ms, both {both:7.3f} ms, {base / both:5.2f}x{error}")
    torch.cuda.synchronize()
    began = time.monotonic()
    for _ in range(10):
        compiled_mask(same_document, rows, None, length, length, device="cuda")
    torch.cuda.synchronize()
    print(f"a block mask of FlexAttention takes {(time.monotonic() - began) * 100:.2f} ms")


if __name__ == "__main__":
    main()
