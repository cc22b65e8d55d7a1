"""The README.md of published weights: what they are, what they were trained on and how, and what was proven of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import trainshed
from trainshed.checkpoints.prove.verdict import read_verdict
from trainshed.observe.evaluations import list_evaluations
from trainshed.observe.event_log import read_events
from trainshed.observe.run_facts import run_facts
from trainshed.plan.model_shape import model_shape
from trainshed.plan.report.text import format_count
from trainshed.recipe import Recipe, to_yaml
from trainshed.recipe.yaml_io import dotted_key
from trainshed.redaction import redacted, shown_address
from trainshed.run_folder import PLANS
from trainshed.storage import LocalStore
from trainshed.workflow.sweeps.results import read_figures


def model_card(recipe: Recipe, run: Path, export: Path) -> str:
    """Write the card of a run's export; everything in it is read from the run's own files."""
    store = LocalStore(run)
    figures = read_figures(store)
    facts = run_facts(store, "", list(read_events(store, "")))
    config = facts.config
    # What a card for transformers must say; a GGUF file or an adapter says its kind itself.
    head = {"library_name": "transformers", "pipeline_tag": "text-generation", "tags": ["trainshed"]}
    if recipe.export is not None and recipe.export.format == "gguf":
        head["library_name"] = "gguf"
    if recipe.model.from_ is not None and recipe.model.from_.startswith("hf://"):
        head["base_model"] = recipe.model.from_.removeprefix("hf://").partition("@")[0]
    lines = ["---", *(f"{key}: {json.dumps(value)}" for key, value in head.items()), "---", "", f"# {recipe.name}", ""]
    if config is not None:
        lines.append(f"{config.family}, {format_count(model_shape(config).weights)} parameters.")
    origin = recipe.model.from_ and shown_address(recipe.model.from_)
    lines += [f"Trained from {origin}." if origin else "Trained from random weights.", "", "## Data", ""]
    lines += [f"- `{dotted_key(path)}`: {_source_text(source)}" for path, source in recipe.sources()]
    lines += ["- synthetic tokens"] if recipe.data.synthetic else []
    lines += ["", "## Training", "", f"- {figures.step:,} steps, {format_count(figures.tokens or 0)} tokens"]
    lines += [f"- last training loss {figures.loss:.4f}"] if figures.loss is not None else []
    if figures.validation_loss is not None:
        lines.append(f"- last validation loss {figures.validation_loss:.4f}")
    lines += [f"- plan: {text}" for text in _plan_texts(run)]
    lines += ["", "## Proof", "", *_proof_lines(export), *_evaluation_lines(run)]
    lines += ["", "## Recipe", "", "```yaml", redacted(to_yaml(recipe)).rstrip(), "```", ""]
    lines.append(f"Made with Trainshed {trainshed.__version__}, run `{recipe.name}/{run.name}`.")
    return "\n".join(lines) + "\n"


def _source_text(source: Any) -> str:
    for key in ("path", "tokens"):
        if addresses := getattr(source, key):
            return ", ".join(shown_address(address) for address in addresses)
    return f"the script {source.script}"


def _plan_texts(run: Path) -> list[str]:
    """The layout of the last attempt, and what was predicted of it."""
    plans = sorted((run / PLANS).glob("*.json"))
    if not plans:
        return []
    body = json.loads(plans[-1].read_bytes())
    layout = ", ".join(f"{key} {value}" for key, value in body["layout"].items() if value not in (None, 1, "none"))
    predicted = body.get("predicted") or {}
    seconds = predicted.get("step_seconds")
    return [f"layout {layout or 'one process'}" + ("" if seconds is None else f", {seconds:.3g} s a step predicted")]


def _proof_lines(export: Path) -> list[str]:
    verdict = read_verdict(export)
    if verdict is None:
        return ["There is no verdict."]
    passed = "The exported weights are those that were trained" if verdict.passed else "The proof FAILED"
    return [f"{passed} (`verdict.json`):", "", "```text", *verdict.lines(), "```"]


def _evaluation_lines(run: Path) -> list[str]:
    records = list_evaluations(LocalStore(run))
    if not records:
        return []
    lines = [
        f"- {record.label}{f', step {record.step:,}' if record.step is not None else ''}: {record.scores_text()}"
        for record in records
    ]
    return ["", "## Evaluation", "", *lines]
