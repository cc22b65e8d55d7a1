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
