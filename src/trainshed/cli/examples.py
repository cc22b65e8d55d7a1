"""Commands to begin with, which help and the manual show."""

from __future__ import annotations

EXAMPLES: dict[str, tuple[str, ...]] = {
    "run": (
        "trainshed run quickstart",
        "trainshed run recipe.yaml train.steps=100 --layout tp=2",
        "trainshed run recipe.yaml --on slurm-h100 --nodes 4",
    ),
    "plan": (
        "trainshed plan gke-llama3-70b --on gke-a3-mega",
        "trainshed plan --model llama3-8b --gpu h100,h200 --gpus 64 --seq 8192 --global-batch 512",
    ),
    "plan calibrate": ("trainshed plan calibrate store/runs/my-run/0a1b2c3d --to calibration.yaml",),
    "plan probe": ("trainshed plan probe --to mynode.yaml",),
    "plan validate": ("trainshed plan validate", "trainshed plan validate --worst 10"),
    "submit": (
        "trainshed submit recipe.yaml --on slurm-h100 --nodes 4",
        "trainshed submit recipe.yaml --on slurm-h100 --dry-run",
    ),
    "render": (
        "trainshed render recipe.yaml --on slurm-h100 --out job",
        "trainshed render recipe.yaml --on gke-a3-mega --as helm --out chart",
    ),
    "status": ("trainshed status quickstart", "trainshed status quickstart -o json"),
    "logs": ("trainshed logs quickstart -f", "trainshed logs quickstart --rank 3 --grep loss"),
    "metrics": ("trainshed metrics quickstart", "trainshed metrics megatron.log --gpu h100 --gpus 64"),
    "dash": ("trainshed dash", "trainshed dash quickstart --save page.html"),
    "watch": ("trainshed watch quickstart", "trainshed watch quickstart --once"),
    "sweep": (
        "trainshed sweep recipe.yaml train.optimizer.lr=1e-4,3e-4 train.global_batch=64,128",
        "trainshed sweep recipe.yaml train.optimizer.lr=1e-5..1e-3 --random 12 --dry-run",
    ),
    "scaling": ("trainshed scaling small/e9c23b2c --parameters 1B --tokens 20B",),
    "eval": (
        "trainshed eval quickstart --perplexity validation",
        "trainshed eval hf://org/name --tasks arc_easy hellaswag --limit 100",
        "trainshed eval quickstart --questions questions.yaml --at-least 0.67",
    ),
    "import": ("trainshed import pretrain_gpt.sh --out recipe.yaml",),
    "train": ("trainshed train recipe.yaml train.steps=10",),
    "open": ("trainshed open my-run tensorboard",),
    "exec": ("trainshed exec my-run --rank 3",),
    "stacks": ("trainshed stacks my-run",),
    "cancel": ("trainshed cancel my-run",),
    "rm": ("trainshed rm quickstart",),
    "clean": ("trainshed clean",),
    "ls": ("trainshed ls", "trainshed ls -o json"),
    "export-figures": ("trainshed export-figures quickstart --to tensorboard",),
    "grafana": ("trainshed grafana > dashboard.json",),
    "schema": ("trainshed schema > recipe.schema.json",),
    "man": ("trainshed man | man -l -",),
    "data fetch": ("trainshed data fetch hf://datasets/org/name corpus",),
    "data prepare": ("trainshed data prepare --input 'text/*.jsonl' --output tokens/text --tokenizer hf://org/name",),
    "data inspect": ("trainshed data inspect tokens/text",),
    "data verify": ("trainshed data verify tokens/text",),
    "data merge": ("trainshed data merge tokens/a tokens/b --output tokens/both",),
    "data blend": ("trainshed data blend quickstart",),
    "data batch": ("trainshed data batch quickstart --step 1",),
    "model fetch": ("trainshed model fetch hf://org/name models/name",),
    "model convert": ("trainshed model convert models/name out --to megatron",),
    "model compare": ("trainshed model compare models/name out",),
    "model inspect": ("trainshed model inspect models/name",),
    "model merge": ("trainshed model merge models/base my-lora-run merged",),
    "verify": ("trainshed verify recipe.yaml --layout tp=2,pp=2",),
    "generate": ("trainshed generate quickstart --prompt 'The '",),
    "serve": ("trainshed serve quickstart --port 8000",),
    "checkpoints": ("trainshed checkpoints quickstart --verify",),
    "recipes": ("trainshed recipes", "trainshed recipes copy quickstart", "trainshed recipes check recipe.yaml"),
    "clusters": (
        "trainshed clusters",
        "trainshed clusters copy slurm-h100",
        "trainshed clusters check clusters/slurm-h100.yaml",
    ),
    "init": (
        "trainshed init",
        "trainshed init recipe.yaml --model llama3.2-1b --data 'data/*.jsonl' --length 20B",
        "trainshed init cluster clusters/ours.yaml --target slurm --machine dgx-h100 --store /shared --nodes 16",
    ),
    "doctor": ("trainshed doctor", "trainshed doctor --on slurm-h100 --nodes 2"),
}


def examples_text(command: str) -> str:
    """Return what help shows below a command: how people call it."""
    lines = [f"- `{example}`" for example in EXAMPLES.get(command, ())]
    return "\n".join(["Examples:", "", *lines]) if lines else ""
