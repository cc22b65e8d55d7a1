"""The Soperator seed with our own engine, scaled down: the shipped recipes on a real Slurm of two nodes.

The model, its tokenizer and alpaca-cleaned lie on a Hub-like server under the names that the recipes read. Everything
goes by the command line, as the page `docs/seeds/soperator.md` has it: from `submit` to an answer.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import orjson
import pytest
import torch
from peft import PeftModel
from transformers import LlamaForCausalLM

from support import TESTS
from support.clusters.slurm_runs import SlurmRun, SlurmRuns, write_cluster
from support.models.tiny_chat_model import save_tiny_chat_model
from support.page_commands import read_page
from support.servers import hub_server
from trainshed.cli import run_cli
from trainshed.launch.slurm.target import SlurmTarget
from trainshed.launch.submissions import find_submission
from trainshed.observe.event_log import read_steps
from trainshed.storage import LocalStore

pytestmark = [pytest.mark.slurm, pytest.mark.full, pytest.mark.timeout(1800)]

MODEL = "meta-llama/Llama-3.3-70B-Instruct"
ROWS = 60
SMALL = (
    f"model={{from: hf://{MODEL}}}",
    *("data.sequence_length=128", "data.validation.every=2"),
    *("train.global_batch=4", "train.precision=fp32", "train.epochs=2"),
    *("layout.tp=2", "layout.dp=2", "layout.micro_batch=2", "checkpoint.every=2"),
)
PAGE = TESTS.parent / "docs" / "seeds" / "soperator.md"
FOLLOWS_A_RUN = ("status", "watch", "logs", "metrics", "checkpoints")


def serve_the_seed(hub: hub_server.HubServer, folder: Path) -> Path:
    """Put a tiny model and alpaca's rows where the recipes look for them; returns the model's folder."""
    model = save_tiny_chat_model(folder, max_positions=256)
    hub.repos[MODEL] = {path.name: path.read_bytes() for path in model.iterdir()}
    rows = [
        {"instruction": f"Add {n} and {n + 1}.", "input": "" if n % 3 else "Be brief.", "output": f"It is {2 * n + 1}."}
        for n in range(ROWS)
    ]
    hub.repos["datasets/yahma/alpaca-cleaned"] = {"alpaca_data_cleaned.json": json.dumps(rows).encode()}
    return model


class Operator:
    """Somebody at the login node."""

    def __init__(self, runs: SlurmRuns, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.runs, self.model, self.capsys = runs, model, capsys

    def run(self, *words: str) -> str:
        """Run one of our commands, and return what it prints."""
        code = run_cli(list(words))
        printed = self.capsys.readouterr()
        assert code == 0, f"{words}\n{printed.out}\n{printed.err}"
        return printed.out

    def submit(self, recipe: str, *overrides: str) -> SlurmRun:
        words = ("submit", recipe, "--on", str(self.runs.folder / "cluster.yaml"), "-o", "json", *SMALL, *overrides)
        sent = orjson.loads(self.run(*words))
        submission = find_submission(sent["run"])
        self.runs.keep(submission.submitted)
        return SlurmRun(self.runs.slurm, SlurmTarget(submission.cluster), submission.submitted)


@pytest.fixture
def operator(
    slurm_runs: SlurmRuns, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Operator]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with hub_server.running() as hub:
        model = serve_the_seed(hub, tmp_path / "model")
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        write_cluster(tmp_path, environment={"HF_ENDPOINT": hub.url})
        yield Operator(slurm_runs, model, capsys)


def logits(model: LlamaForCausalLM | PeftModel) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.arange(40)[None]).logits


def losses(run: SlurmRun) -> list[float]:
    return [step["loss"] for step in read_steps(LocalStore(run.folder), "")]


def test_all_weights_are_trained_exported_and_generated_from(operator: Operator) -> None:
    name = "soperator-llama3-3-70b-torch"
    run = operator.submit(name)
    assert run.wait("export", seconds=900).state == "done", run.all_logs()
    trained = losses(run)
    assert trained[-1] < trained[0]
    assert json.loads((run.folder / "export" / "verdict.json").read_text())["passed"]
    exported = LlamaForCausalLM.from_pretrained(run.folder / "export", dtype=torch.float32)
    base = LlamaForCausalLM.from_pretrained(operator.model, dtype=torch.float32)
    assert not torch.allclose(logits(exported), logits(base), atol=1e-3)
    assert operator.run("generate", str(run.folder / "export"), "--chat", "--prompt", "Add 2 and 3.").strip()
    # What the page says about a run that was submitted.
    shown = [command.words[1:] for command in read_page(PAGE).commands if name in command.words]
    followed = [words for words in shown if words[0] in FOLLOWS_A_RUN]
    assert len(followed) >= 5
    for words in followed:
        assert operator.run(*words).strip(), words
    # The same command once more finds that all of it is done; a longer one goes on where it was.
    again = operator.submit(name, "train.epochs=3")
    assert again.folder == run.folder
    assert again.wait("export", seconds=900).state == "done", again.all_logs()
    longer = losses(again)
    further = LlamaForCausalLM.from_pretrained(run.folder / "export", dtype=torch.float32)
    assert not torch.equal(logits(further), logits(exported)), "the export is the longer run's"
    assert longer[: len(trained)] == trained
    assert len(longer) == len(trained) * 3 // 2


def test_adapters_are_trained_under_tensor_parallel_and_exported_as_peft_has_them(operator: Operator) -> None:
    run = operator.submit("soperator-llama3-3-70b-lora-torch", "train.lora.rank=4", "train.schedule.warmup=2")
    assert run.wait("export", seconds=900).state == "done", run.all_logs()
    assert json.loads((run.folder / "export" / "verdict.json").read_text())["passed"]
    base = LlamaForCausalLM.from_pretrained(operator.model, dtype=torch.float32)
    before = logits(base)
    adapted = logits(PeftModel.from_pretrained(base, run.folder / "export"))
    assert not torch.allclose(adapted, before, atol=1e-3)
    merged = operator.runs.folder / "merged"
    operator.run("model", "merge", str(operator.model), str(run.folder / "export"), str(merged))
    after = logits(LlamaForCausalLM.from_pretrained(merged, dtype=torch.float32))
    assert torch.allclose(after, adapted, atol=1e-4)
    answers = operator.run("status", "soperator-llama3-3-70b-lora-torch", "--answers", "-o", "json")
    assert "railway turntable" in answers
    assert operator.run("generate", str(run.folder), "--chat", "--prompt", "Add 2 and 3.").strip()
