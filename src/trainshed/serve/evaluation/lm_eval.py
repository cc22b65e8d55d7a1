"""Tasks of lm-eval: by our own generator in this process, or through a server's API.

`ServedLM` is a model as lm-eval calls it. It encodes, cuts and scores as lm-eval's `hf` model does, so that both give
the same scores; tests hold it against that one.

lm-eval is imported by this module, and it imports half a machine: import it where tasks are asked for, in `quiet()`.
"""

from __future__ import annotations

import hashlib
import os
import random
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import chdir, contextmanager
from dataclasses import dataclass, field
from functools import partialmethod
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import torch
from lm_eval import evaluate, utils
from lm_eval.api.model import LM, TemplateLM
from lm_eval.api.task import Task
from lm_eval.models.openai_completions import LocalCompletionsAPI
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.tasks import TaskManager
from tqdm import tqdm

from trainshed.errors import InputError, TrainshedError
from trainshed.reporting import SILENT, ProgressTask, Reporter, quiet_loggers
from trainshed.serve.evaluation.completions_client import CompletionsServer
from trainshed.serve.evaluation.likelihood import Continuation, LikelihoodScorer
from trainshed.serve.evaluation.questions import TextRequest, generate_texts
from trainshed.serve.request import Generator, SamplingParams
from trainshed.serve.tokenizer import ChatTokenizer

SEED = 1234
"""Of few-shot examples, and of sampling where a task asks for it; the default of lm-eval's command line."""
_PYTHON_SEED = 0
"""Of Python's own generator, as lm-eval's command line has it."""
_DEFAULT_OUTPUT_TOKENS = 256
"""As lm-eval's `hf` model has it."""
_CONCURRENT_REQUESTS = 8
"""To a server, at a time."""
CPU_SEQUENCES = 32
"""Answers at a time on a CPU: more than a server has, since nobody waits for the first of them."""
_KNOWN_GENERATION_KEYS = {"until", "do_sample", "temperature", "max_gen_toks", "top_p", "top_k"}


@contextmanager
def quiet() -> Iterator[None]:
    """Keep lm-eval and datasets from writing to the terminal; what goes wrong is raised."""
    import datasets

    were_disabled = datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    # Our reporter shows the progress. tqdm's own variable is too late: it is read when torch imports tqdm.
    bars: Any = tqdm
    make_bar = bars.__init__
    bars.__init__ = partialmethod(make_bar, disable=True)
    with warnings.catch_warnings(), quiet_loggers("lm_eval", "datasets", "httpx"):
        warnings.simplefilter("ignore")  # of libraries about each other
        try:
            yield
        finally:
            bars.__init__ = make_bar
            if not were_disabled:
                datasets.enable_progress_bars()


@dataclass(frozen=True)
class LoadedTask:
    """A task, group or tag by its name, with its documents read; `sha256` is of all that decides its scores."""

    name: str
    loaded: Mapping[str, Any] = field(repr=False)
    sha256: str


@dataclass(frozen=True)
class TaskOptions:
    """How tasks are asked. `limit` takes the first documents of each; `fewshot` None: as the task says."""

    fewshot: int | None = None
    limit: int | None = None
    chat: bool = False


def load_tasks(names: Sequence[str], include_path: str | None = None) -> list[LoadedTask]:
    """Read tasks by name: those of a folder of YAML files, and those that lm-eval has."""
    manager = find_tasks(names, include_path)
    include_path = os.path.abspath(include_path) if include_path is not None else None
    with quiet():
        return [_load_task(manager, name, include_path) for name in names]


def find_tasks(names: Sequence[str], include_path: str | None = None) -> TaskManager:
    """Return lm-eval's list of tasks, which has all of these names; nothing of them is read yet."""
    if include_path is not None and not Path(include_path).is_dir():
        raise InputError("there is no such folder of tasks", where=include_path, hint="name a folder with YAML files")
    include_path = os.path.abspath(include_path) if include_path is not None else None
    with quiet():
        # lm-eval has thousands of files, which take seconds to list: only where a name asks for them.
        manager = TaskManager(include_path=include_path, include_defaults=False) if include_path else None
        if manager is None or any(name not in manager.all_tasks for name in names):
            manager = TaskManager(include_path=include_path)
        for name in names:
            if name not in manager.all_tasks:
                where = f" or in {include_path}" if include_path else ""
                raise InputError(
                    f"there is no task `{name}` in lm-eval{where}",
                    hint="`lm-eval ls tasks` lists them; --include-path FOLDER adds your own",
                )
    return manager


def _load_task(manager: TaskManager, name: str, include_path: str | None) -> LoadedTask:
    try:
        try:
            loaded = manager.load([name])
        except FileNotFoundError:
            if include_path is None:
                raise
            with chdir(include_path):  # its files may be named as seen from its own folder
                loaded = manager.load([name])
    except Exception as error:  # the Hub, its clients and datasets raise dozens of kinds
        first = (str(error).splitlines() or [""])[0]
        raise TrainshedError(
            f"the task `{name}` cannot be read: {type(error).__name__}: {first}",
            hint="most tasks of lm-eval read a dataset from huggingface.co: HF_ENDPOINT names a mirror, "
            "HF_HUB_OFFLINE=1 takes what is in its cache; a task over JSONL files of your own (`dataset_path: json`) "
            "in --include-path FOLDER needs neither",
        ) from None
    return LoadedTask(name, loaded, _hash_tasks(loaded["tasks"]))


# Where a task and its documents are read from; the documents themselves are hashed.
_PLACES = ("metadata", "dataset_path", "dataset_name", "dataset_kwargs")


def _hash_tasks(tasks: Mapping[str, Task]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tasks):
        task = tasks[name]
        config = {key: value for key, value in task.dump_config().items() if key not in _PLACES}
        digest.update(orjson.dumps([name, task.VERSION, config], default=str, option=_SORTED))
        for document in task.eval_docs:
            digest.update(orjson.dumps(document, default=str, option=_SORTED))
        if task.has_training_docs() and (task.config.num_fewshot or 0) > 0:
            for document in task.fewshot_docs():
                digest.update(orjson.dumps(document, default=str, option=_SORTED))
    return digest.hexdigest()


_SORTED = orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY


@dataclass(frozen=True)
class TaskResult:
    """The scores of a task by metric; of a group, the same for each of its tasks in `details`."""

    scores: dict[str, float]
    details: dict[str, Any]


def run_task(model: LM, task: LoadedTask, options: TaskOptions) -> TaskResult:
    """Ask a model everything that a task holds, and return what lm-eval makes of the answers."""
    try:
        with quiet():
            results = _evaluate(model, task, options)
    except TrainshedError:
        raise
    except Exception as error:
        first = (str(error).splitlines() or [""])[0]
        raise TrainshedError(f"the task `{task.name}` failed: {type(error).__name__}: {first}") from error
    assert results is not None, "only other ranks get nothing"
    by_task = {name: _numbers(scores) for name, scores in results["results"].items()}
    samples = {name: counts["effective"] for name, counts in results.get("n-samples", {}).items()}
    own = by_task.get(task.name) or _mean_scores(list(by_task.values()))
    return TaskResult(own, {"tasks": by_task, "samples": samples})


def _evaluate(model: LM, task: LoadedTask, options: TaskOptions) -> Mapping[str, Any] | None:
    """Evaluate as lm-eval's `simple_evaluate` does, without its report about the machine.

    That report starts git, pip and a dozen other programs for each task. It takes longer than a small task.
    """
    random.seed(_PYTHON_SEED)
    np.random.seed(SEED)
    torch.manual_seed(SEED)
    for part in task.loaded["tasks"].values():
        written = part.get_config("num_fewshot")
        # A task that says 0 keeps it.
        if written is None or (options.fewshot is not None and written != 0):
            part.set_config(key="num_fewshot", value=options.fewshot or 0)
        part.set_fewshot_seed(seed=SEED)
    return evaluate(
        lm=model,
        task_dict=task.loaded,
        limit=options.limit,
        apply_chat_template=options.chat,
        log_samples=False,
        bootstrap_iters=0,
    )


def _numbers(scores: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics of lm-eval (`acc,none`) by plain names; filters other than `none` stay part of the name."""
    numbers = {}
    for name, value in scores.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or "stderr" in name or "," not in name:
            continue
        metric, _, used_filter = name.partition(",")
        numbers[metric if used_filter == "none" else f"{metric} ({used_filter})"] = float(value)
    return numbers


def _mean_scores(tasks: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the means of the metrics that all tasks of a tag have."""
    shared = [metric for metric in (tasks[0] if tasks else {}) if all(metric in scores for scores in tasks)]
    return {metric: sum(scores[metric] for scores in tasks) / len(tasks) for metric in shared}


class ServedLM(TemplateLM):
    """A model of ours as lm-eval asks it: likelihoods by the scorer, texts by the generator."""

    def __init__(
        self,
        generator: Generator,
        scorer: LikelihoodScorer,
        tokenizer: ChatTokenizer,
        *,
        name: str = "",
        reporter: Reporter = SILENT,
    ) -> None:
        super().__init__()
        self._generator, self._scorer, self._words, self._reporter = generator, scorer, tokenizer, reporter
        self._name = name
        self._backend_tokenizer = tokenizer.tokenizer.backend
        # The tokenizer's own: a model's config may name others that end an answer.
        text = tokenizer.tokenizer.special_texts.get("eos_token")
        eos = None if text is None else self._backend_tokenizer.token_to_id(text)
        eos = min(tokenizer.eos_tokens, default=None) if eos is None else eos
        if eos is None:
            raise InputError(
                "the tokenizer has no end token, which lm-eval puts before texts without a context",
                where=tokenizer.tokenizer.address,
                hint="write `eos_token` in its tokenizer_config.json",
            )
        self._eos = eos

    @property
    def eot_token_id(self) -> int:
        """The end token."""
        return self._eos

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text without a context: BOS, or the end token where there is none."""
        return self._eos if self._words.bos_token is None else self._words.bos_token

    @property
    def max_length(self) -> int:
        """The most tokens of context and continuation."""
        return self._scorer.max_length

    @property
    def tokenizer_name(self) -> str:
        """Named in lm-eval's results."""
        return self._words.tokenizer.address

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Return the text of the chat template."""
        return self._words.tokenizer.chat_templates.get("default", "")

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Return a conversation as the chat template writes it."""
        return self._words.chat_text(chat_history, add_generation_prompt=add_generation_prompt)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Return the tokens of a text; a text that begins with BOS gets no second one."""
        if add_special_tokens is None:
            prefix = self._backend_tokenizer.decode([self.prefix_token_id], skip_special_tokens=False)
            add_special_tokens = not (prefix and string.startswith(prefix))
        return self._backend_tokenizer.encode(string, add_special_tokens=add_special_tokens).ids

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        """Return the log-likelihood of each (context, continuation), and whether greedy decoding gives it."""
        return super().loglikelihood(requests, disable_tqdm=True)

    def _loglikelihood_tokens(self, requests: list[Any], **_: Any) -> list[tuple[float, bool]]:
        continuations = [Continuation(context, tokens) for _, context, tokens in requests]
        with self._task("loglikelihood", len(requests)) as task:
            scored = self._scorer.score(continuations, task.advance)
        return [(one.logprob, one.is_greedy) for one in scored]

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = True) -> list[float]:
        """Return the log-likelihood of each text; one longer than the model is cut into windows."""
        windows: list[Continuation] = []
        counts: list[int] = []
        for (text,) in (request.args for request in requests):
            rolling = utils.get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            own = [Continuation(*utils.make_disjoint_window(window)) for window in rolling]
            windows += own
            counts.append(len(own))
        with self._task("loglikelihood", len(windows)) as task:
            scored = iter(self._scorer.score(windows, task.advance))
        return [sum(next(scored).logprob for _ in range(count)) for count in counts]

    def generate_until(self, requests: list[Any], disable_tqdm: bool = True) -> list[str]:
        """Return what the model writes after each context, until one of the stop strings."""
        eos = self._backend_tokenizer.decode([self._eos], skip_special_tokens=False)
        asked = [self._generation(context, wanted, eos) for context, wanted in (request.args for request in requests)]
        with self._task("generate", len(asked)) as task:
            return generate_texts(self._generator, asked, task.advance)

    def _generation(self, context: str, arguments: dict[str, Any], eos: str) -> TextRequest:
        wanted: dict[str, Any] = dict(normalize_gen_kwargs(arguments, _DEFAULT_OUTPUT_TOKENS))
        unknown = sorted(set(wanted) - _KNOWN_GENERATION_KEYS)
        if unknown:
            raise InputError(
                f"the task asks for `generation_kwargs.{unknown[0]}`, which this generator does not have",
                hint=f"it has {', '.join(sorted(_KNOWN_GENERATION_KEYS))}; delete it in the task, or ask a server "
                "that has it by --url",
            )
        most = wanted["max_gen_toks"]
        room = min(self.max_length, self._generator.max_length) - most
        if room < 1:
            raise InputError(
                f"the task asks for {most} tokens of output, and the model has {self.max_length} positions",
                hint="write a smaller `generation_kwargs.max_gen_toks` in the task",
            )
        stops = [stop for stop in (*wanted["until"], eos) if stop]
        sampled = bool(wanted["do_sample"])
        sampling = SamplingParams(
            max_tokens=most,
            temperature=float(wanted["temperature"]) if sampled else 0.0,
            top_p=float(wanted.get("top_p", 1.0)) if sampled else 1.0,
            top_k=int(wanted.get("top_k", 0)) if sampled else 0,
            seed=SEED,
            stop=tuple(dict.fromkeys(stops)),
        )
        return TextRequest(self.tok_encode(context)[-room:], sampling)

    @contextmanager
    def _task(self, label: str, total: int) -> Iterator[ProgressTask]:
        named = f"{self._name}: {label}" if self._name else label
        with self._reporter.task(named, total=total, unit="requests") as task:
            yield task

    def named(self, name: str) -> ServedLM:
        """Return this model with a name for its progress: that of the task."""
        return ServedLM(self._generator, self._scorer, self._words, name=name, reporter=self._reporter)


class ServerLM(LocalCompletionsAPI):
    """A model behind the completions API of a server (ours, vLLM), asked by lm-eval's `local-completions`.

    Prompts are sent as the tokens that lm-eval's `hf` model makes. `local-completions` itself leaves out BOS, so its
    scores are those of another prompt. It also takes its key from OPENAI_API_KEY, whatever server it asks.
    """

    def __init__(
        self,
        server: CompletionsServer,
        *,
        model: str,
        tokenizer_folder: str,
        max_length: int,
        name: str = "",
        reporter: Reporter = SILENT,
    ) -> None:
        super().__init__(
            base_url=server.address("/v1/completions"),
            model=model,
            tokenizer=tokenizer_folder,
            tokenizer_backend="huggingface",
            num_concurrent=_CONCURRENT_REQUESTS,
            max_length=max_length,
            header=server.headers(),
        )
        self._name, self._reporter = name, reporter
        self._progress: ProgressTask | None = None

    def tok_encode(
        self,
        string: str | Sequence[str],
        left_truncate_len: int | None = None,
        add_special_tokens: bool | None = None,
        truncation: bool = False,
        **_: Any,
    ) -> Any:
        """Return the tokens of a text, or of each of some; a text that begins with BOS gets no second one."""
        if not isinstance(string, str):
            return [self.tok_encode(one) for one in string]
        tokenizer: Any = self.tokenizer
        prefix = tokenizer.decode([self.prefix_token_id])
        return tokenizer.encode(string, add_special_tokens=not (prefix and string.startswith(prefix)))

    async def amodel_call(self, *arguments: Any, **options: Any) -> Any:
        """Send one request; a progress bar counts it when it is answered."""
        answers = await super().amodel_call(*arguments, **options)
        if self._progress is not None:
            self._progress.advance(1)
        return answers

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        """Return the log-likelihood of each (context, continuation), and whether greedy decoding gives it."""
        with self._counted("loglikelihood", len(requests)):
            return super().loglikelihood(requests, disable_tqdm=True)

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = True) -> list[float]:
        """Return the log-likelihood of each text; one longer than the model is cut into windows."""
        with self._counted("loglikelihood", None):
            return super().loglikelihood_rolling(requests, disable_tqdm=True)

    def generate_until(self, requests: list[Any], disable_tqdm: bool = True) -> list[str]:
        """Return what the model writes after each context, until one of the stop strings."""
        with self._counted("generate", len(requests)):
            return super().generate_until(requests, disable_tqdm=True)

    @contextmanager
    def _counted(self, label: str, total: int | None) -> Iterator[None]:
        with self._reporter.task(f"{self._name}: {label}", total=total, unit="requests") as task:
            self._progress = task
            yield


@contextmanager
def tokenizer_for_transformers(tokenizer: ChatTokenizer) -> Iterator[str]:
    """Yield a folder with a tokenizer that transformers' `AutoTokenizer` reads without a model beside it."""
    with tempfile.TemporaryDirectory(prefix="trainshed-tokenizer-") as folder:
        own = tokenizer.tokenizer
        config = {"tokenizer_class": "PreTrainedTokenizerFast"} | dict(own.config)
        Path(folder, "tokenizer.json").write_bytes(own.json)
        Path(folder, "tokenizer_config.json").write_bytes(orjson.dumps(config))
        yield folder
