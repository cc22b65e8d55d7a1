"""Evaluation: tasks of lm-eval by our generator beside lm-eval's own `hf` model, the same weights, in one run.

    python benchmarks/evaluate.py                        # on the CPU, a small model, fp32
    python benchmarks/evaluate.py --profile choose       # where our time goes in one of the tasks

Three tasks over local documents, one for each way in which lm-eval asks: choices, whole texts, generated texts.
transformers gets the batch size that is fastest of those tried. Prints seconds of the best of some rounds and the
ratio; asserts no time, but that both give the same scores.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import math
import pstats
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from measure import table
from trainshed.serve.evaluation.likelihood import LikelihoodScorer
from trainshed.serve.evaluation.lm_eval import (
    CPU_SEQUENCES,
    LoadedTask,
    ServedLM,
    TaskOptions,
    load_tasks,
    quiet,
    run_task,
)
from trainshed.serve.loading import load_model

SIZES: dict[str, Any] = {
    "num_hidden_layers": 4,
    "hidden_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 768,
    "max_position_embeddings": 512,
}
BATCH_SIZES = (1, 8, 32)
_DATA = "dataset_path: json\ndataset_kwargs: {data_files: {test: lines.jsonl}}\ntest_split: test\n"
TASKS = {
    "choose": "output_type: multiple_choice\ndoc_to_text: '{{text}}'\ndoc_to_choice: choices\ndoc_to_target: answer\n"
    "metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]\n",
    "roll": "output_type: loglikelihood_rolling\ndoc_to_text: ''\ndoc_to_target: '{{text}}'\n"
    "metric_list: [{metric: bits_per_byte, aggregation: bits_per_byte, higher_is_better: false}]\n",
    "write": "output_type: generate_until\ndoc_to_text: '{{text}}'\ndoc_to_target: '{{choices[0]}}'\n"
    "generation_kwargs: {max_gen_toks: 32, until: ['~~'], do_sample: false}\n"
    "metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]\n",
}


def write_model(folder: Path) -> Path:
    """Write random weights as transformers saves them, with a tokenizer of bytes."""
    from transformers import LlamaConfig, LlamaForCausalLM

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.add_special_tokens(["</s>"])
    end = len(letters)  # the id of the token that was added
    torch.manual_seed(1)
    config = LlamaConfig(vocab_size=end + 1, eos_token_id=end, bos_token_id=end, initializer_range=0.06, **SIZES)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def write_tasks(folder: Path, documents: int) -> Path:
    """Write the tasks: questions of 100 to 200 bytes with four choices."""
    folder.mkdir()
    for name, text in TASKS.items():
        (folder / f"{name}.yaml").write_text(f"task: {name}\n{_DATA}{text}")
    with (folder / "lines.jsonl").open("w") as file:
        for number in range(documents):
            text = (
                f"Question {number}: " + "which of the four is it, after all of this? " * (2 + number % 3) + "Answer:"
            )
            choices = [" the first one", " another", f" number {number}", " none of them"]
            file.write(json.dumps({"text": text, "choices": choices, "answer": number % 4}) + "\n")
    return folder


@contextmanager
def our_model(folder: Path) -> Iterator[ServedLM]:
    """Load the weights into our own generator."""
    model = load_model(str(folder), device="cpu")
    assert model.tokenizer is not None
    generator = model.generator(max_sequences=CPU_SEQUENCES)
    try:
        yield ServedLM(generator, LikelihoodScorer(model.decoder, max_length=generator.max_length), model.tokenizer)
    finally:
        generator.close()


def timed(model: Any, task: LoadedTask) -> tuple[float, dict[str, float]]:
    """Return the seconds of a task, and its scores."""
    began = time.perf_counter()
    scores = run_task(model, task, TaskOptions()).scores
    return time.perf_counter() - began, scores


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--profile", choices=sorted(TASKS))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        model, folder = write_model(Path(place) / "model"), write_tasks(Path(place) / "tasks", options.documents)
        tasks = {task.name: task for task in load_tasks(list(TASKS), str(folder))}
        with our_model(model) as ours:
            if options.profile:
                profile = cProfile.Profile()
                profile.runcall(timed, ours, tasks[options.profile])
                pstats.Stats(profile).sort_stats("cumulative").print_stats(40)
                return
            with quiet():
                from lm_eval.models.huggingface import HFLM

                theirs = {
                    size: HFLM(pretrained=str(model), dtype="float32", device="cpu", batch_size=size)
                    for size in BATCH_SIZES
                }
            rows = []
            for name, task in tasks.items():
                mine, best = math.inf, (math.inf, 0)
                for _ in range(options.rounds):
                    seconds, scores = timed(ours, task)
                    mine = min(mine, seconds)
                    for size, other in theirs.items():
                        seconds, expected = timed(other, task)
                        best = min(best, (seconds, size))
                        assert all(math.isclose(scores[key], expected[key], rel_tol=1e-4) for key in expected), name
                rows.append([name, f"{mine:.2f}", f"{best[0]:.2f}", str(best[1]), f"{best[0] / mine:.2f}"])
    heads = ["task", "ours s", "lm-eval + transformers s", "its batch", "times as fast"]
    table("Evaluation on the CPU: the best of some rounds", heads, rows)


if __name__ == "__main__":
    main()
