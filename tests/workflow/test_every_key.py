"""Every key of a recipe on every engine and target: it is honoured, or refused by its name. None is ignored.

A key is *honoured* where a change of it changes what is sent (scripts, manifests, arguments, the layout), or where our
own code reads it in a real run: preparing, training and exporting are traced. A key of the schema that has no row in
`CHANGES` fails the first test, so that a new one cannot slip through.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import orjson
import pytest

from support.recipes.text_recipes import write_script
from trainshed.engines.torch.rank import train_rank
from trainshed.errors import InputError
from trainshed.launch.job import CodeArchive, Job
from trainshed.observe.notify import notify_of_run, recipients_of
from trainshed.recipe import Cluster, Recipe, load_cluster, load_recipe, parse_recipe
from trainshed.recipe.section import Section
from trainshed.recipe.validation import known_keys
from trainshed.workflow import prepare_run, run_layout, train_job
from trainshed.workflow.evaluation.stage import evaluate_run
from trainshed.workflow.stages import export_run
from trainshed.workflow.submit import build_job

CODE = CodeArchive("trainshed-0-0.tar.xz", "0" * 64, b"")

PRETRAIN = """
name: walk
model: {preset: llama3-8b, init: random}
tokenizer: hf://org/tokenizer
data: {sequence_length: 2048, train: [{path: /shared/x.jsonl}]}
train: {steps: 100, global_batch: 64, optimizer: {lr: 1.0e-4}, schedule: {name: cosine, warmup: 10}}
layout: {tp: 8}
"""
ENGINES = {
    "torch": PRETRAIN,
    "megatron 0.16.1": PRETRAIN + 'engine: {name: megatron, version: "0.16.1"}\n',
    "megatron head": PRETRAIN + "engine: {name: megatron, version: head}\n",
    "nemo 24.07": PRETRAIN + 'engine: {name: nemo, version: "24.07"}\n',
    "nemo 26.06": PRETRAIN + 'engine: {name: nemo, version: "26.06"}\n',
    "torchtune": PRETRAIN.replace("init: random", "from: hf://org/base")
    .replace("train: {steps", "train: {mode: finetune, steps")
    .replace("layout: {tp: 8}", "layout: {tp: 8, shard: full}")
    + 'engine: {name: torchtune, version: "0.7.0"}\n',
}
VOLUMES = "volumes=[{mount: /shared, path: /shared}]"
CLAIM = "volumes=[{mount: /shared, pvc: data}]"
IMAGE = "image=registry/image@sha256:0"
RAY = """\
name: running-ray
target: ray
machine: dgx-h100
store: /shared/trainshed
nodes: {default: 2}
ray: {address: "http://head:8265"}
"""
TARGETS: dict[str, tuple[str, tuple[str, ...]]] = {
    "slurm with containers": ("slurm-h100", ("slurm={container: pyxis}", IMAGE, VOLUMES)),
    "slurm": ("slurm-h100", ()),
    "kubernetes": ("aks-nd-h100-v5", (IMAGE, CLAIM, "store=/shared", "nodes.default=2")),
    "kubernetes with ray": (
        "aks-nd-h100-v5",
        (IMAGE, CLAIM, "store=/shared", "nodes.default=2", "kubernetes.kind=rayjob"),
    ),
    "ray": (RAY, ()),
}


WALK_PLUGIN = """
from trainshed.engines.torch.optimizer_registry import OPTIMIZERS, ElementwiseOptimizer
from trainshed.models.token_loss import LOSSES, TokenLoss
from trainshed.observe.exporters import EXPORTERS


@OPTIMIZERS.register("walk_sgd")
class WalkSgd(ElementwiseOptimizer):
    def __init__(self, settings, factor=1.0):
        super().__init__(settings)
        self.factor = factor

    def update(self, weight, gradient, state, lr, updates):
        weight.sub_(self.factor * lr * gradient)


@LOSSES.register("walk_loss")
class WalkLoss(TokenLoss):
    def __init__(self, factor=1.0):
        self.factor = factor

    def loss(self, logits, labels):
        return self.factor * logits.cross_entropy(labels)


@EXPORTERS.register("walk_exporter")
class WalkExporter:
    def __init__(self, run_folder):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def __call__(self, event):
        pass
"""
"""One class of each kind that a recipe may name and our engine alone knows."""


@dataclass(frozen=True)
class Change:
    """How a key is changed, from a recipe in which it can stand."""

    to: str
    given: str = ""


BASE = "model={preset: llama3-8b, from: hf://org/base}"
LEARNED = "tokenizer={train: {vocab_size: 300}}"
EXPERTS = "model={preset: mixtral-8x7b, init: random} layout.etp=8"
SCORE_BIAS = "model={preset: moonlight-16b-a3b, init: random} layout.etp=8"
OWN = "data.validation={path: /shared/v.jsonl}"
TEXT = "data.train=[{path: /shared/x.txt}]"
SERVED = "export={} serve={}"
SERVED_BY_VLLM = "export={} serve={engine: vllm, image: 'vllm@sha256:0'}"
CHAT = f"{BASE} train.mode=finetune"
LORA = f"{CHAT} layout.tp=1 train.lora={{rank: 4, alpha: 8}}"
MUON = "train.optimizer.name=muon train.optimizer.muon={}"
GROUPS = "train.optimizer.groups=[{match: embedding.*, lr_scale: 0.5}]"
SPIKES = "train.spikes={}"
EMA = "train.ema={decay: 0.9}"
MTP = "model={preset: deepseek-v3, init: random} layout.etp=8 train.mtp={}"
PAIRS = f"{BASE} train.mode=dpo train.dpo={{}}"
PHASED = "train={global_batch: 64, optimizer: {lr: 1.0e-4}, phases: [{steps: 90}, {steps: 10}]}"
PHASED_CHAT = f"{BASE} train={{mode: finetune, global_batch: 64, optimizer: {{lr: 1.0e-4}}, phases: [{{steps: 90}}]}}"
EVALUATED = "data.validation={path: /shared/v.jsonl} eval={perplexity: [validation]}"
WITH_TASKS = "eval={tasks: [arc_easy]}"
ASKED = "eval={questions: questions.yaml}"
NAMED = "data.validation={one: {path: /shared/v.jsonl}}"
CHANGES = {
    "name": Change("name=other"),
    "model.preset": Change("model.preset=llama2-7b"),
    "model.from": Change("model={preset: llama3-8b, from: hf://org/other}", BASE),
    "model.init": Change("model={preset: llama3-8b, init: random}", BASE),
    "model.verdict": Change("model.verdict=ignore", BASE),
    "model.added_tokens": Change("model.added_tokens=['<tool>', '</tool>']", BASE),
    "tokenizer.train.vocab_size": Change("tokenizer.train.vocab_size=400", LEARNED),
    "tokenizer.train.min_frequency": Change("tokenizer.train.min_frequency=4", LEARNED),
    "tokenizer.train.eod": Change("tokenizer.train.eod=<e>", LEARNED),
    "data.synthetic": Change("data={synthetic: true, sequence_length: 2048}"),
    "data.sequence_length": Change("data.sequence_length=1024"),
    "data.seed": Change("data.seed=7"),
    "data.format": Change("data.format=instruct", CHAT),
    "data.template": Change("data.template=chatml", CHAT),
    "data.system": Change("data.system=brief", CHAT),
    "data.train_on": Change("data.train_on=all", CHAT),
    "data.thinking": Change("data.thinking=drop", CHAT),
    "data.document_mask": Change("data.document_mask=false", "data.document_mask=true"),
    "data.packing": Change("data.packing=false", CHAT),
    "data.on_too_long": Change("data.on_too_long=drop", CHAT),
    "data.train.*.path": Change("data.train=[{path: /shared/y.jsonl}]"),
    "data.train.*.tokens": Change("data.train=[{tokens: /shared/t}]"),
    "data.train.*.script": Change("data.train=[{script: numbers.py}]"),
    "data.train.*.args": Change("data.train.0.args=[a]", "data.train=[{script: numbers.py}]"),
    "data.train.*.key": Change("data.train.0.key=body"),
    "data.train.*.format": Change("data.train.0.format=text"),
    "data.train.*.documents": Change("data.train.0.documents=line", TEXT),
    "data.train.*.columns": Change("data.train.0.columns={messages: talks}", CHAT),
    "data.train.*.split": Change("data.train.0.split=train[:9%]"),
    "data.train.*.limit": Change("data.train.0.limit=1"),
    "data.train.*.name": Change("data.train.0.name=other"),
    "data.train.*.weight": Change(
        "data.train.0.weight=3", "data.train=[{path: /shared/x.jsonl, weight: 1}, {path: /shared/y.jsonl, weight: 1}]"
    ),
    "data.validation.path": Change(OWN),
    "data.validation.tokens": Change("data.validation={tokens: /shared/v}"),
    "data.validation.script": Change("data.validation={script: numbers.py}"),
    "data.validation.args": Change("data.validation.args=[a]", "data.validation={script: numbers.py}"),
    "data.validation.key": Change("data.validation.key=body", OWN),
    "data.validation.format": Change("data.validation.format=text", OWN),
    "data.validation.documents": Change("data.validation.documents=line", "data.validation={path: /shared/v.txt}"),
    "data.validation.columns": Change("data.validation.columns={messages: talks}", f"{CHAT} {OWN}"),
    "data.validation.split": Change("data.validation.split=train[:9%]", OWN),
    "data.validation.limit": Change("data.validation.limit=1", OWN),
    "data.validation.name": Change("data.validation.name=other", OWN),
    "data.validation.every": Change("data.validation.every=7", OWN),
    "data.validation.batches": Change("data.validation.batches=7", OWN),
    "data.validation.prompts": Change("data.validation.prompts=[one]", OWN),
    "data.validation.answer_tokens": Change(
        "data.validation.answer_tokens=7", "data.validation={path: /shared/v.jsonl, prompts: [one]}"
    ),
    "data.validation.*.path": Change("data.validation.one.path=/shared/w.jsonl", NAMED),
    "data.validation.*.tokens": Change("data.validation={one: {tokens: /shared/v}}", NAMED),
    "data.validation.*.script": Change("data.validation={one: {script: numbers.py}}", NAMED),
    "data.validation.*.args": Change("data.validation.one.args=[a]", "data.validation={one: {script: numbers.py}}"),
    "data.validation.*.key": Change("data.validation.one.key=body", NAMED),
    "data.validation.*.format": Change("data.validation.one.format=text", NAMED),
    "data.validation.*.documents": Change(
        "data.validation.one.documents=line", "data.validation={one: {path: /shared/v.txt}}"
    ),
    "data.validation.*.columns": Change("data.validation.one.columns={messages: talks}", f"{CHAT} {NAMED}"),
    "data.validation.*.split": Change("data.validation.one.split=train[:9%]", NAMED),
    "data.validation.*.limit": Change("data.validation.one.limit=1", NAMED),
    "data.validation.*.name": Change("data.validation.one.name=other", NAMED),
    "data.validation.*.every": Change("data.validation.one.every=7", NAMED),
    "data.validation.*.batches": Change("data.validation.one.batches=7", NAMED),
    "data.validation.*.prompts": Change("data.validation.one.prompts=[one]", NAMED),
    "data.validation.*.answer_tokens": Change(
        "data.validation.one.answer_tokens=7", "data.validation={one: {path: /shared/v.jsonl, prompts: [one]}}"
    ),
    "train.phases.*.name": Change("train.phases.0.name=main", PHASED),
    "train.phases.*.steps": Change("train.phases.0.steps=80", PHASED),
    "train.phases.*.tokens": Change("train.phases.0={tokens: 20M}", PHASED),
    "train.phases.*.sequence_length": Change("train.phases.0.sequence_length=1024", PHASED),
    "train.phases.*.global_batch": Change("train.phases.0.global_batch=32", PHASED),
    "train.phases.*.lr": Change("train.phases.0.lr=2e-4", PHASED),
    "train.phases.*.shape": Change("train.phases.0.shape=linear", PHASED),
    "train.phases.*.rope_base": Change("train.phases.0.rope_base=2e6", PHASED),
    "train.phases.*.data.seed": Change("train.phases.0.data={seed: 7}", PHASED),
    "train.phases.*.data.skip": Change("train.phases.0.data={skip: [[0, 4]]}", PHASED),
    **{
        f"train.phases.*.data.train.*.{key}": Change(
            f"train.phases.0.data={{train: [{{{text}}}]}}",
            f"{PHASED_CHAT if key == 'columns' else PHASED} train.phases.0.data={{train: [{{{before}}}]}}",
        )
        for key, before, text in (
            ("path", "path: /shared/y.jsonl", "path: /shared/z.jsonl"),
            ("tokens", "path: /shared/y.jsonl", "tokens: /shared/t"),
            ("script", "path: /shared/y.jsonl", "script: numbers.py"),
            ("args", "script: numbers.py", "script: numbers.py, args: [a]"),
            ("format", "path: /shared/y.jsonl", "path: /shared/y.jsonl, format: text"),
            ("key", "path: /shared/y.jsonl", "path: /shared/y.jsonl, key: body"),
            ("documents", "path: /shared/y.txt", "path: /shared/y.txt, documents: line"),
            ("columns", "path: /shared/y.jsonl", "path: /shared/y.jsonl, columns: {messages: talks}"),
            ("split", "path: /shared/y.jsonl", "path: /shared/y.jsonl, split: 'train[:9%]'"),
            ("limit", "path: /shared/y.jsonl", "path: /shared/y.jsonl, limit: 1"),
            ("name", "path: /shared/y.jsonl", "path: /shared/y.jsonl, name: other"),
            ("weight", "path: /shared/y.jsonl", "path: /shared/y.jsonl, weight: 3"),
        )
    },
    **{
        f"train.phases.*.layout.{key}": Change(f"train.phases.0.layout={layout}", f"{given} train.phases.0.layout={{}}")
        for key, given, layout in (
            ("tp", PHASED, "{tp: 4}"),
            ("pp", PHASED, "{pp: 2}"),
            ("vp", PHASED, "{pp: 2, vp: 2}"),
            ("cp", PHASED, "{cp: 2}"),
            ("ep", f"{EXPERTS} {PHASED}", "{ep: 2}"),
            ("etp", f"{EXPERTS} {PHASED}", "{tp: 8, etp: 8}"),
            ("dp", PHASED, "{dp: 8, tp: 2}"),
            ("replicate", PHASED, "{replicate: 2}"),
            ("shard", PHASED, "{shard: full}"),
            ("micro_batch", PHASED, "{micro_batch: 2}"),
            ("recompute", PHASED, "{recompute: full}"),
            ("offload", PHASED, "{offload: activations}"),
            ("overlap", PHASED, "{tp: 2, overlap: tp}"),
            ("schedule", PHASED, "{pp: 2, schedule: gpipe}"),
            ("stages", PHASED, "{pp: 2, stages: [10, 22]}"),
        )
    },
    "data.split.train": Change("data.split={train: 0.9, validation: 0.1}", "data.split={train: 0.8, validation: 0.2}"),
    "data.split.validation": Change("data.split={train: 0.9, validation: 0.1}"),
    "data.split.test": Change(
        "data.split={train: 0.8, validation: 0.1, test: 0.1}", "data.split={train: 0.9, validation: 0.1}"
    ),
    "data.skip": Change("data.skip=[[0, 4]]"),
    "data.stage": Change("data.stage=nvme"),
    "data.shards": Change("data.shards=4"),
    "data.eod": Change("data.eod=false"),
    "data.bos": Change("data.bos=true"),
    "data.on_bad_line": Change("data.on_bad_line=skip"),
    "train.mode": Change("train.mode=pretrain", f"{BASE} train.mode=finetune"),
    "train.steps": Change("train.steps=50"),
    "train.tokens": Change("train.tokens=20M train.steps=null"),
    "train.epochs": Change("train.epochs=2 train.steps=null"),
    "train.global_batch": Change("train.global_batch=128"),
    "train.batch_ramp.start": Change(
        "train.batch_ramp={start: 32, increment: 32, samples: 320}",
        "train.batch_ramp={start: 16, increment: 16, samples: 320}",
    ),
    "train.batch_ramp.increment": Change(
        "train.batch_ramp={start: 32, increment: 32, samples: 320}",
        "train.batch_ramp={start: 32, increment: 16, samples: 320}",
    ),
    "train.batch_ramp.samples": Change(
        "train.batch_ramp.samples=640", "train.batch_ramp={start: 32, increment: 32, samples: 320}"
    ),
    "train.precision": Change("train.precision=fp32"),
    "train.optimizer.lr": Change("train.optimizer.lr=3e-4"),
    "train.optimizer.betas": Change("train.optimizer.betas=[0.8, 0.9]"),
    "train.optimizer.eps": Change("train.optimizer.eps=1e-6"),
    "train.optimizer.weight_decay": Change("train.optimizer.weight_decay=0.3"),
    "train.optimizer.clip": Change("train.optimizer.clip=0.5"),
    "train.optimizer.states": Change("train.optimizer.states=bf16", "train.optimizer.states=fp32"),
    "train.optimizer.decoupled": Change("train.optimizer.decoupled=true"),
    "train.optimizer.muon.momentum": Change("train.optimizer.muon.momentum=0.9", MUON),
    "train.optimizer.muon.nesterov": Change("train.optimizer.muon.nesterov=false", MUON),
    "train.optimizer.muon.ns_steps": Change("train.optimizer.muon.ns_steps=4", MUON),
    "train.optimizer.muon.adjust_lr": Change("train.optimizer.muon.adjust_lr=original", MUON),
    "train.optimizer.groups.*.match": Change("train.optimizer.groups=[{match: head.*, lr_scale: 0.5}]", GROUPS),
    "train.optimizer.groups.*.lr_scale": Change("train.optimizer.groups.0.lr_scale=0.1", GROUPS),
    "train.optimizer.groups.*.weight_decay": Change("train.optimizer.groups.0.weight_decay=0.2", GROUPS),
    "train.optimizer.groups.*.freeze": Change("train.optimizer.groups=[{match: embedding.*, freeze: true}]", GROUPS),
    "train.spikes.sigma": Change("train.spikes.sigma=3", SPIKES),
    "train.spikes.window": Change("train.spikes.window=3", SPIKES),
    "train.spikes.max_in_a_row": Change("train.spikes.max_in_a_row=3", SPIKES),
    "train.ema.decay": Change("train.ema.decay=0.5", EMA),
    "train.ema.validation": Change("train.ema.validation=true", f"{OWN} {EMA}"),
    "train.mtp.layers": Change("train.mtp.layers=2", MTP),
    "train.mtp.weight": Change("train.mtp.weight=0.1", MTP),
    "export.weights": Change("export.weights=ema", f"{EMA} export={{}}"),
    "train.schedule.name": Change("train.schedule.name=linear"),
    "train.schedule.warmup": Change("train.schedule.warmup=5"),
    "train.schedule.decay": Change("train.schedule.decay=60"),
    "train.schedule.min_lr": Change("train.schedule.min_lr=1e-5"),
    "train.z_loss": Change("train.z_loss=1e-4"),
    "train.moe.balance_loss": Change("train.moe={balance_loss: 0.5}", EXPERTS),
    "train.moe.z_loss": Change("train.moe={z_loss: 0.5}", EXPERTS),
    "train.moe.bias_update": Change("train.moe={bias_update: 0.5}", SCORE_BIAS),
    "train.dropout": Change("train.dropout=0.1"),
    "train.non_finite": Change("train.non_finite=skip"),
    "train.deterministic": Change("train.deterministic=true"),
    "train.early_stop.patience": Change("train.early_stop={patience: 3}", OWN),
    "train.early_stop.min_delta": Change("train.early_stop.min_delta=0.1", f"{OWN} train.early_stop={{patience: 3}}"),
    "train.lora.rank": Change("train.lora.rank=8", LORA),
    "train.lora.alpha": Change("train.lora.alpha=4", LORA),
    "train.lora.dropout": Change("train.lora.dropout=0.1", LORA),
    "train.lora.targets": Change("train.lora.targets=[q_proj]", LORA),
    "train.lora.rslora": Change("train.lora.rslora=true", LORA),
    "train.lora.dora": Change("train.lora.dora=true", LORA),
    "train.lora.quantize": Change("train.lora.quantize=nf4", LORA),
    "train.dpo.beta": Change("train.dpo.beta=0.2", PAIRS),
    "train.dpo.label_smoothing": Change("train.dpo.label_smoothing=0.1", PAIRS),
    "train.dpo.length_normalized": Change("train.dpo.length_normalized=true", PAIRS),
    "layout.tp": Change("layout.tp=4"),
    "layout.pp": Change("layout.pp=2"),
    "layout.vp": Change("layout.vp=2", "layout.pp=2"),
    "layout.cp": Change("layout.cp=2"),
    "layout.ep": Change("layout.ep=2", EXPERTS),
    "layout.etp": Change("layout.etp=1", EXPERTS),
    "layout.dp": Change("layout.dp=1"),
    "layout.replicate": Change("layout.replicate=2"),
    "layout.shard": Change("layout.shard=none"),
    "layout.micro_batch": Change("layout.micro_batch=2"),
    "layout.recompute": Change("layout.recompute=full"),
    "layout.offload": Change("layout.offload=activations"),
    "layout.overlap": Change("layout.overlap=tp", "layout.tp=2"),
    "layout.schedule": Change("layout.schedule=gpipe", "layout.pp=2"),
    "layout.stages": Change("layout.stages=[10, 22]", "layout.pp=2"),
    "engine.name": Change("engine=megatron", "engine=torch"),
    "engine.image": Change("engine.image=other@sha256:1"),
    "engine.version": Change("engine.version=1.0"),
    "engine.program": Change("engine.program=/elsewhere/pretrain_gpt.py"),
    "engine.args": Change('engine.args."log_interval"=7'),
    "checkpoint.save": Change("checkpoint.save=false"),
    "checkpoint.every": Change("checkpoint.every=7"),
    "checkpoint.keep": Change("checkpoint.keep=7"),
    "checkpoint.best.by": Change("checkpoint.best={by: validation}", OWN),
    "checkpoint.to": Change("checkpoint.to=s3://bucket/checkpoints"),
    "checkpoint.async": Change("checkpoint.async=false", "checkpoint.async=true"),
    "checkpoint.resume": Change("checkpoint.resume=must"),
    "observe.tensorboard": Change("observe.tensorboard=true", "observe.tensorboard=false"),
    "observe.dllogger": Change("observe.dllogger=true", "observe.dllogger=false"),
    "observe.prometheus.port": Change("observe.prometheus.port=9401", "observe.prometheus.host=0.0.0.0"),
    "observe.prometheus.host": Change("observe.prometheus.host=0.0.0.0", "observe.prometheus=true"),
    "observe.wandb.project": Change("observe.wandb={project: p, mode: offline}"),
    "observe.wandb.entity": Change("observe.wandb.entity=team", "observe.wandb={project: p, mode: offline}"),
    "observe.wandb.mode": Change("observe.wandb.mode=online", "observe.wandb={project: p, mode: offline}"),
    "observe.mlflow.uri": Change("observe.mlflow={uri: /shared/a}"),
    "observe.mlflow.experiment": Change("observe.mlflow.experiment=e", "observe.mlflow={uri: /shared/a}"),
    "observe.trackio.project": Change("observe.trackio={project: p}"),
    "observe.trackio.space": Change("observe.trackio.space=me/space", "observe.trackio={project: p}"),
    "notify.*.command": Change("notify=[{command: [page]}]"),
    "notify.*.webhook.secret": Change("notify=[{webhook: {secret: HOOK}}]"),
    "notify.*.on": Change("notify=[{command: [page], on: [end]}]", "notify=[{command: [page]}]"),
    "notify.*.every_minutes": Change("notify=[{command: [page], every_minutes: 5}]", "notify=[{command: [page]}]"),
    "notify.*.low_goodput": Change("notify=[{command: [page], low_goodput: 0.9}]", "notify=[{command: [page]}]"),
    "observe.profile.start": Change("observe.profile.start=4", "observe.profile={}"),
    "observe.profile.steps": Change("observe.profile.steps=4", "observe.profile={}"),
    "observe.profile.ranks": Change("observe.profile.ranks=[1]", "observe.profile={}"),
    "observe.profile.warmup": Change("observe.profile.warmup=2", "observe.profile={}"),
    "observe.profile.cycles": Change("observe.profile.cycles=2", "observe.profile={}"),
    "observe.profile.wait": Change("observe.profile.wait=2", "observe.profile={cycles: 2}"),
    "observe.profile.memory": Change("observe.profile.memory=true", "observe.profile={}"),
    "observe.profile.stacks": Change("observe.profile.stacks=true", "observe.profile={}"),
    "observe.profile.shapes": Change("observe.profile.shapes=true", "observe.profile={}"),
    **{
        f"budgets.{phase}": Change(f"budgets.{phase}=50m", f"{OWN} budgets={{{phase}: 20m}}")
        for phase in ("rendezvous", "load", "first_step", "step", "validation", "checkpoint")
    },
    "resources.nodes": Change("resources.nodes=1"),
    "elastic.min_nodes": Change("elastic={min_nodes: 1}"),
    "elastic.spares": Change("elastic={min_nodes: 2, spares: 1}", "elastic={min_nodes: 2}"),
    "export.format": Change("export.format=megatron", "export={}"),
    "export.dtype": Change("export.dtype=fp32", "export={}"),
    "export.merge": Change("export.merge=true", f"{LORA} export={{}}"),
    "export.to": Change("export.to=/shared/weights", "export={}"),
    "eval.every": Change("eval.every=500", f"{EVALUATED} checkpoint.keep=null checkpoint.every=500"),
    "eval.perplexity": Change("eval.perplexity=[/shared/tokens]", EVALUATED),
    "eval.tasks": Change("eval.tasks=[piqa]", WITH_TASKS),
    "eval.include_path": Change("eval.include_path=/shared/tasks", WITH_TASKS),
    "eval.fewshot": Change("eval.fewshot=5", WITH_TASKS),
    "eval.limit": Change("eval.limit=5", WITH_TASKS),
    "eval.questions": Change("eval.questions=others.yaml", ASKED),
    "eval.answer_tokens": Change("eval.answer_tokens=5", ASKED),
    "eval.at_least": Change("eval.at_least=0.5", ASKED),
    "eval.gpus": Change("eval.gpus=1", EVALUATED),
    "serve.engine": Change(SERVED_BY_VLLM, SERVED),
    "serve.gpus": Change("serve.gpus=2", SERVED_BY_VLLM),
    "serve.replicas": Change("serve.replicas=2", SERVED),
    "serve.port": Change("serve.port=9000", SERVED),
    "serve.max_length": Change("serve.max_length=512", SERVED),
    "serve.max_sequences": Change("serve.max_sequences=3", SERVED),
    "serve.image": Change("serve.image=other@sha256:1", SERVED),
    "serve.api_key": Change("serve.api_key=HF_TOKEN", SERVED),
    "serve.args": Change("serve.args={seed: 3}", SERVED_BY_VLLM),
    "serve.adapters": Change("serve.adapters={one: /shared/one}", SERVED),
    "serve.cpus": Change("serve.cpus=3", SERVED),
    "serve.memory": Change("serve.memory=99Gi", SERVED),
    "store": Change("store=/shared/other"),
    "seed": Change("seed=7"),
    "plugins": Change("plugins=[walk_plugin]"),
    "train.optimizer.name": Change("train.optimizer.name=walk_sgd", "plugins=[walk_plugin]"),
    "train.optimizer.options": Change(
        "train.optimizer.options={factor: 0.5}", "plugins=[walk_plugin] train.optimizer.name=walk_sgd"
    ),
    "train.loss.name": Change("train.loss={name: walk_loss}", "plugins=[walk_plugin]"),
    "train.loss.options": Change("train.loss.options={factor: 0.5}", "plugins=[walk_plugin] train.loss.name=walk_loss"),
    "observe.exporters": Change("observe.exporters=[walk_exporter]", "plugins=[walk_plugin]"),
}
NOT_WALKED = ("trainshed", "model.config")
"""The format's version; facts of an architecture, which the tests of models and adapters hold against transformers."""


def leaves() -> list[str]:
    """The keys of a recipe that hold values, list elements as `*`."""
    found = [".".join(map(str, path)) for path, key in known_keys(Recipe).items() if not key.sections]
    return [key for key in found if not key.startswith(NOT_WALKED)]


def test_the_walk_knows_every_key_of_a_recipe() -> None:
    assert sorted(set(leaves()) - set(CHANGES)) == [], "say in CHANGES how each is changed"
    assert sorted(set(CHANGES) - set(leaves())) == [], "these are not keys"


@dataclass(frozen=True)
class Read:
    """Which keys our own code reads in a real run, by the stage that does; as (class, field)."""

    prepare: frozenset[tuple[str, str]]
    train: frozenset[tuple[str, str]]
    export: frozenset[tuple[str, str]]


NO_READERS = re.compile(
    r"trainshed\.(recipe(?!\.phase_spans)|plan|line\.(runnable|planning|placing)|engines\.planned_habits)\b|pydantic"
)
"""Who looks at keys without doing what they say: the schema, the check of this walk, the planner's estimates.

The phases that a run trains are put together in the schema's room, from all their keys."""


def _is_property(frame: FrameType, section: Section) -> bool:
    """Whether a frame is a function of the section itself, or a property of another section that sums keys up."""
    owner = frame.f_locals.get("self")
    kind = object.__getattribute__(owner, "__class__")
    return owner is section or (
        issubclass(kind, Section) and isinstance(getattr(kind, frame.f_code.co_name, None), property)
    )


class Tracer:
    """Notes which fields of a recipe's sections are read from outside of the recipe's own room."""

    def __init__(self) -> None:
        self.seen: set[tuple[str, str]] = set()

    def install(self, patch: pytest.MonkeyPatch) -> None:
        seen = self.seen

        def read(section: Section, name: str) -> Any:
            kind = object.__getattribute__(section, "__class__")
            if name in kind.__pydantic_fields__:
                frame = sys._getframe(1)
                while _is_property(frame, section) and frame.f_back is not None:
                    frame = frame.f_back  # a property of the section or of the recipe: who asked for it reads the key
                reader = frame.f_globals.get("__name__", "")
                if not NO_READERS.match(reader):
                    seen.add((kind.__name__, name))
            return object.__getattribute__(section, name)

        patch.setattr(Section, "__getattribute__", read, raising=False)

    def taken(self) -> frozenset[tuple[str, str]]:
        found = frozenset(self.seen)
        self.seen.clear()
        return found


SIZES = "layers: 2, hidden: 16, heads: 4, kv_heads: 2, head_dim: 4, vocab_size: 280, max_positions: 32"
DENSE = f"{{family: llama, {SIZES}, ffn: 24, rope: {{base: 10000.0}}}}"
SPARSE = f"{{family: qwen3_moe, {SIZES}, rope: {{base: 10000.0}}, moe: {{experts: 4, top_k: 2, ffn: 8}}}}"
LOCAL = f"""
name: traced
model: {{config: {DENSE}, init: random}}
tokenizer: {{train: {{vocab_size: 280}}}}
data:
  sequence_length: 32
  train: [{{script: numbers.py, args: [a]}}]
  split: {{train: 0.9, validation: 0.1}}
  validation: {{every: 2, batches: 1, prompts: [one two], answer_tokens: 4}}
train:
  steps: 3
  global_batch: 4
  precision: fp32
  optimizer: {{lr: 1.0e-3}}
  schedule: {{name: cosine}}
  early_stop: {{patience: 3, min_delta: 0.1}}
layout: {{dp: 1, micro_batch: 2}}
checkpoint: {{every: 2, best: {{by: validation}}}}
observe: {{profile: {{start: 1, steps: 1}}}}
budgets: {{step: 20m}}
export: {{}}
"""
WITH_EXPERTS = (
    "name=experts",
    f"model.config={SPARSE}",
    "train.moe={}",
    "train.batch_ramp={start: 2, increment: 2, samples: 4}",
)
MEASURED = (
    "name=measured",
    "eval={every: 2, perplexity: [validation], questions: questions.yaml, answer_tokens: 2}",
    "export=null",
)
QUESTIONS = "- {ask: one two, expect: [three]}\n"
WITH_PLUGINS = (
    "name=plugged",
    "plugins=[walk_plugin]",
    "train.optimizer.name=walk_sgd",
    "train.loss=walk_loss",
    "observe={exporters: [walk_exporter]}",
    "export=null",
)
OBSERVED = (
    "name=observed",
    "notify=[{command: ['true']}, {webhook: {secret: HOOK}}]",
    "observe={prometheus: {port: 19400}, wandb: {project: p, mode: offline}, mlflow: {uri: mlruns}, "
    "trackio: {project: p}}",
    "export=null",
)
BY_MUON = (
    "name=by-muon",
    "train.optimizer={name: muon, lr: 1.0e-3, muon: {}, groups: [{match: embedding.*, lr_scale: 0.5}]}",
    "train.spikes={sigma: 0.01, window: 2}",
    "train.ema={decay: 0.9}",
)
WITH_MTP = (
    "name=mtp",
    "model.config={family: deepseek_v3, layers: 2, hidden: 16, heads: 2, ffn: 32, vocab_size: 300, max_positions: 64, "
    "rope: {base: 100.0}, mla: {kv_rank: 8, nope_dim: 4, rope_dim: 2, value_dim: 4}, "
    "moe: {experts: 4, top_k: 2, ffn: 8, shared_ffn: 8, dense_first: 1, scores: sigmoid, score_bias: true}}",
    "train.mtp={}",
    "export=null",
)
FROM_TEXT = (
    "name=text",
    "train={tokens: 384, global_batch: 4, precision: fp32, optimizer: {lr: 1.0e-3}}",
    "data.split=null",
    "data.train=[{path: text.txt, documents: line}]",
    "data.validation={script: numbers.py, args: [a], every: 2, batches: 1}",
)


IN_PHASES = (
    "name=phased",
    "train={global_batch: 4, precision: fp32, optimizer: {lr: 1.0e-3}, phases: [{name: warm, steps: 2, shape: linear}, "
    "{tokens: 128, data: {train: [{path: text.txt, documents: line}], seed: 3}, lr: 1.0e-4, rope_base: 2.0e4}]}",
    "data.split=null",
    "data.validation={one: {path: text.txt, documents: line, every: 2, batches: 1}}",
    "export=null",
)


TEMPLATE = """\
{%- for message in messages %}{{ message.role[0] + ":" + message.content + "\\n" }}{% endfor -%}
{%- if add_generation_prompt %}{{ "a:" }}{% endif -%}
"""
TALK = {"messages": [{"role": "user", "content": "3"}, {"role": "assistant", "content": "4"}]}
PAIR = {"prompt": "3", "chosen": "4", "rejected": "5"}
ON_ANSWERS = (
    "train.steps=2",
    "train.global_batch=2",
    "data={sequence_length: 32, template: walk.jinja, train: [{path: lines.jsonl}]}",
    "checkpoint={every: 2}",
    "observe={}",
)


def _fine_tuned(base: Path) -> Iterator[tuple[str, ...]]:
    """Runs from weights, on conversations with adapters and on pairs of answers."""
    start = (f"model={{from: {base}}}", f"tokenizer={base}", *ON_ANSWERS)
    validation = "data.validation={path: lines.jsonl, every: 2, batches: 1}"
    Path("walk.jinja").write_text(TEMPLATE)
    Path("lines.jsonl").write_bytes(b"\n".join([orjson.dumps(TALK)] * 64))
    added = "model.added_tokens=['<tool>']"
    yield ("name=chat", *start, added, validation, "train.mode=finetune", "train.lora={rank: 2, alpha: 4}")
    Path("lines.jsonl").write_bytes(b"\n".join([orjson.dumps(PAIR)] * 64))
    yield ("name=pairs", *start, "train.mode=dpo", "train.dpo={}", "train.early_stop=null", "export=null")


@pytest.fixture(scope="module")
def read(tmp_path_factory: pytest.TempPathFactory) -> Read:
    """What small runs read here: from a script, with experts, from text, from weights and tokens, with a bad step."""
    folder = tmp_path_factory.mktemp("traced")
    write_script(folder)
    (folder / "walk_plugin.py").write_text(WALK_PLUGIN)
    (folder / "questions.yaml").write_text(QUESTIONS)
    (folder / "recipe.yaml").write_text(LOCAL)
    count = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
    lines = (" ".join(count[(line * step) % 10] for step in range(1, 40)) for line in range(300))
    (folder / "text.txt").write_text("\n".join(lines))
    tracer, stages = Tracer(), (set(), set(), set())
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        tracer.install(patch)
        patch.setenv("TRACKIO_DIR", str(folder / "trackio"))
        own_runs = (MEASURED, WITH_EXPERTS, OBSERVED, FROM_TEXT, WITH_PLUGINS, IN_PHASES, BY_MUON, WITH_MTP)
        for overrides in ((), *own_runs):
            _traced_run(overrides, tracer, stages)
        exported = next(Path("store/runs/text").glob("*/export")).absolute()
        for overrides in _fine_tuned(exported):
            _traced_run(overrides, tracer, stages)
        # Weights whose conversion is said to have failed, which a recipe may take all the same.
        verdict = exported / "verdict.json"
        verdict.write_bytes(orjson.dumps(orjson.loads(verdict.read_bytes()) | {"passed": False}))
        prepared = sorted(Path("store/artefacts").glob("tokens/*/*.bin"))
        tokens = next(file for file in prepared if not file.with_suffix(".learned").exists()).with_suffix("")
        based = (
            "name=based",
            f"model={{from: {exported}, verdict: ignore}}",
            f"tokenizer={exported}",
            "data.split=null",
            f"data.train=[{{tokens: {tokens}}}]",
            "data.validation={path: text.txt, documents: line, every: 2, batches: 1}",
            "train={epochs: 0.01, global_batch: 4, precision: fp32, optimizer: {lr: 1.0e-3}}",
        )
        _traced_run(based, tracer, stages)
        lora = "{rank: 2, alpha: 4, dropout: 0.1, targets: [attn], rslora: true, dora: true, quantize: int8}"
        adapted = ("name=adapted", f"train.lora={lora}", "train.optimizer.states=bf16", "export=null")
        _traced_run((*based, *adapted), tracer, stages)
        _traced_run(("name=bad", "train.optimizer.lr=1e38", "train.non_finite=skip", "export=null"), tracer, stages)
    return Read(*(frozenset(found) for found in stages))


def _traced_run(overrides: tuple[str, ...], tracer: Tracer, stages: tuple[set[Any], ...]) -> None:
    recipe = load_recipe("recipe.yaml", overrides)
    tracer.taken()
    run = prepare_run(recipe, load_cluster())
    stages[0].update(tracer.taken())
    recipients = recipients_of(run.recipe, None)
    with notify_of_run(run.folder, recipients, run=run.id, environment={}, poll_seconds=0.05):
        train_rank(train_job(run, run_layout(run)), run_folder=run.folder)
    stages[1].update(tracer.taken())
    if run.recipe.export is not None:
        tracer.taken()
        export_run(run.recipe, run.folder, tokenizer=run.tokenizer)
        stages[2].update(tracer.taken())
    if run.recipe.eval is not None:
        evaluate_run(run.recipe, run.folder)
        stages[2].update(tracer.taken())


def owner(key: str) -> tuple[str, str]:
    """The class and the field of a key."""
    *parents, last = key.split(".")
    parent = tuple(parents)
    while parent and parent[-1] == "*":
        parent = parent[:-1]
    sections = known_keys(Recipe)[parent].sections if parent else (Recipe,)
    for section in sections:
        for name, field in section.model_fields.items():
            if (field.alias or name) == last:
                return section.__name__, name
    raise AssertionError(f"{key} is in none of {sections}")


READ_AS = {"data.split.test": "data.split.train"}
"""The fractions sum to one: what is read of the others leaves the rest."""


def ours_reads(engine: str, key: str, read: Read) -> bool:
    """Whether our own stages read a key in a job of this engine."""
    name, key = engine.split()[0], READ_AS.get(key, key)
    stages = read.export | (read.prepare if name != "torchtune" else frozenset())
    if name == "torch":
        stages |= read.train
    # torchtune reads its data itself; weights are fetched and held against their verdict by us.
    fetched = key in ("model.from", "model.verdict")
    return owner(key) in stages or (name == "torchtune" and fetched and owner(key) in read.prepare)


def words(text: str) -> list[str]:
    """Split overrides that stand in one text at the blanks before a key."""
    return re.split(r" (?=[a-z_]+(?:\.[a-z_0-9]+)*=)", text) if text else []


def facts(job: Job) -> Any:
    """All that is sent of a job, less what only repeats the recipe."""
    repeated = ("recipe.yaml", "cluster.yaml", "provenance.json", "plan.json")
    files = {name: text for name, text in job.files.items() if name not in repeated}
    plan = orjson.loads(job.files["plan.json"])
    return files, job.stages, job.run, job.name, plan["layout"], plan.get("phase_layouts")


@dataclass
class Walk:
    """One engine on one cluster."""

    engine: str
    cluster: Cluster
    folder: Path

    def job(self, *overrides: str) -> Job:
        recipe = parse_recipe(ENGINES[self.engine], overrides, folder=self.folder)
        return build_job(recipe, self.cluster, id="walk", code=CODE, offline=True, despite_memory=True)

    def fate(self, key: str, read: Read) -> str:
        change = CHANGES[key]
        given, to = words(change.given), words(change.to)
        try:
            before = facts(self.job(*given))
        except InputError as error:  # what the key stands in is refused already
            return "refused" if _names(error, key, *given) else f"refused, but not by its name: {error}"
        try:
            after = facts(self.job(*given, *to))
        except InputError as error:
            return "refused" if _names(error, key, *to) else f"refused, but not by its name: {error}"
        if before != after:
            return "sent"
        return "read" if ours_reads(self.engine, key, read) else "ignored"


def _names(error: InputError, key: str, *overrides: str) -> bool:
    """Whether an error names a key, or what was written on the command line to change it."""
    written = (word.partition("=")[0] for word in overrides)
    named = (re.escape(each).replace(r"\.\*", r"(\.\d+)?") for each in (key, *written))
    return any(re.search(rf"\b{each}\b", str(error)) for each in named)


def walk(engine: str, target: str, folder: Path, read: Read) -> dict[str, str]:
    write_script(folder)
    (folder / "walk_plugin.py").write_text(WALK_PLUGIN)
    for questions in ("questions.yaml", "others.yaml"):
        (folder / questions).write_text(QUESTIONS)
    name, overrides = TARGETS[target]
    if "\n" in name:
        (folder / "cluster.yaml").write_text(name)
        name = str(folder / "cluster.yaml")
    steps = Walk(engine, load_cluster(name, overrides), folder)
    return {key: fate for key in CHANGES if (fate := steps.fate(key, read)) not in ("sent", "read", "refused")}


@pytest.mark.parametrize("engine", ENGINES)
def test_every_key_is_honoured_or_refused_by_every_engine(engine: str, read: Read, tmp_path: Path) -> None:
    assert walk(engine, "slurm with containers", tmp_path, read) == {}


@pytest.mark.parametrize(
    "target",
    [
        "slurm",
        "kubernetes",
        pytest.param("kubernetes with ray", marks=pytest.mark.full),
        pytest.param("ray", marks=pytest.mark.full),
    ],
)
def test_every_key_is_honoured_or_refused_on_every_target(target: str, read: Read, tmp_path: Path) -> None:
    assert walk("torch", target, tmp_path, read) == {}


@pytest.mark.full
@pytest.mark.parametrize("target", [target for target in TARGETS if target != "slurm with containers"])
@pytest.mark.parametrize("engine", [engine for engine in ENGINES if engine != "torch"])
def test_every_key_on_every_engine_and_target(engine: str, target: str, read: Read, tmp_path: Path) -> None:
    assert walk(engine, target, tmp_path, read) == {}
