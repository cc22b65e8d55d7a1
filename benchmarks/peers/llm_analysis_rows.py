"""llm-analysis on rows of published measurements: JSON lines of cases in, JSON lines of its predictions out.

It is told everything it can take: sizes, layout, recomputation, ZeRO stage, the card's peak and bandwidths. What it
does not know (interleaved pipelines, context parallel, hybrid sharding) it cannot count.
"""

from __future__ import annotations

import json
import logging
import sys
from importlib import import_module


def main() -> None:
    # By name: it is not among our own dependencies, and its Python is not ours.
    peer, config = import_module("llm_analysis.analysis"), import_module("llm_analysis.config")
    logging.disable(logging.CRITICAL)
    for line in sys.stdin:
        case = json.loads(line)
        try:
            model = config.ModelConfig(**case["model"], expansion_ratio=case["model"]["ffn_embed_dim"] / case["hidden"])
            analysis = peer.LLMAnalysis(
                model,
                config.GPUConfig(**case["gpu"]),
                parallelism_config=config.ParallelismConfig(**case["parallelism"]),
                flops_efficiency=1.0,
                hbm_memory_efficiency=1.0,
            )
            found = analysis.training(
                batch_size_per_gpu=case["micro_batch"],
                gradient_accumulation_steps=case["micro_batches"],
                seq_len=case["sequence_length"],
                activation_recomputation=peer.ActivationRecomputation(case["recompute"]),
                ds_zero=peer.DSZeRO(case["zero"]),
                mlp_gated_linear_units=case["gated"],
            )
            result = {
                "seconds": found["latency_per_iter"],
                "gib": found["(weight+op_state+grad+act)_memory_per_gpu"] / 2**30,
            }
        except (AssertionError, ArithmeticError, ValueError, TypeError, KeyError) as error:
            result = {"why": f"{type(error).__name__}: {error}"[:200]}
        print(json.dumps({"number": case["number"], **result}), flush=True)


if __name__ == "__main__":
    main()
