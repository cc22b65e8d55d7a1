"""`trainshed eval`: perplexity, tasks of lm-eval and questions, as scores beside the weights."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from trainshed.cli.completion import RunName
from trainshed.cli.console import Output
from trainshed.cli.serve import DEFAULT_MODEL_OPTIONS, ModelOptions, read_api_key
from trainshed.errors import InputError

if TYPE_CHECKING:
    from trainshed.workflow.evaluation.evaluate import EvaluationReport, EvaluationRequest

Names = Annotated[tuple[str, ...], Parameter(consume_multiple=True, negative="")]


def evaluate(
    checkpoint: RunName,
    *,
    perplexity: Names = (),
    tasks: Names = (),
    questions: Path | None = None,
    at_least: float | None = None,
    include_path: str | None = None,
    fewshot: int | None = None,
    limit: int | None = None,
    chat: Annotated[bool, Parameter(negative="")] = False,
    answer_tokens: int = 64,
    sequence_length: int | None = None,
    document_mask: bool | None = None,
    validation_of: str | None = None,
    url: str | None = None,
    api_key_env: str | None = None,
    to: Path | None = None,
    model: ModelOptions = DEFAULT_MODEL_OPTIONS,
    output: Annotated[Output, Parameter(name=["-o", "--output"])] = "text",
) -> int:
    """Measure a checkpoint, and keep the scores beside it.

    Without --perplexity, --tasks and --questions a run is measured as `eval` of its recipe says. What was measured
    before is shown and not computed again. Exits with 1 where fewer questions than --at-least are answered as expected.

    Parameters
    ----------
    checkpoint
        A run (its name, name/id, folder or recipe file: the best checkpoint where its recipe keeps one, else the
        newest), one of its checkpoints, a folder for transformers, a Megatron checkpoint, a LoRA adapter; a path, or
        an address in any store (hf://org/name[@revision], s3://…).
    perplexity
        `validation` for the validation sets of its run, or prepared tokens: a prefix, or the folder of an artefact.
    tasks
        Tasks, groups or tags of lm-eval, by name.
    questions
        A YAML file of questions: a list of {ask: TEXT, expect: [WORDS]}.
    at_least
        The share of questions (0 to 1) that must be answered with one of the expected words.
    include_path
        A folder with YAML tasks of your own; files that they name may lie beside them.
    fewshot
        How many examples come before each question of a task (default: as the task says).
    limit
        Only the first so many documents of each task, for a try.
    chat
        Ask tasks in the model's chat template.
    answer_tokens
        The longest answer to a question, in tokens.
    sequence_length
        How many tokens a row of prepared tokens has (default: as the run was trained, else the model's length).
    document_mask
        Whether documents of prepared tokens are kept apart (default: as the run was trained).
    validation_of
        The run whose validation sets are meant (default: that of the checkpoint).
    url
        Ask a server that speaks OpenAI's API (http://host:8000) in place of loading the weights; the checkpoint names
        the tokenizer, and where scores are kept.
    api_key_env
        The environment variable that holds the key of the server.
    to
        The folder of the scores (default: in the run, or `evaluations` beside the weights).
    model
        How it is loaded.
    output
        Report as text or json.
    """
    from trainshed.cli.console import print_report, reporter
    from trainshed.recipe.evaluation import load_questions
    from trainshed.signals import import_torch
    from trainshed.workflow.evaluation.evaluate import EvaluationRequest, ModelLoading
    from trainshed.workflow.evaluation.evaluate import evaluate as measure
    from trainshed.workflow.known_runs import checkpoint_address, find_run

    if at_least is not None and not 0 < at_least <= 1:
        raise InputError(
            f"--at-least {at_least} is not a share", hint="write a number over 0 and up to 1, such as 0.67"
        )
    for name, number in (("limit", limit), ("answer-tokens", answer_tokens), ("sequence-length", sequence_length)):
        if number is not None and number < 1:
            raise InputError(f"--{name} {number} measures nothing", hint="write 1 or more")
    address = checkpoint_address(checkpoint, model.on)
    request = EvaluationRequest(
        perplexity=_split(perplexity),
        tasks=_split(tasks),
        questions=load_questions(questions) if questions is not None else (),
        questions_name=questions.stem if questions is not None else "questions",
        include_path=include_path,
        fewshot=fewshot,
        limit=limit,
        chat=chat,
        answer_tokens=answer_tokens,
        at_least=at_least,
        sequence_length=sequence_length,
        document_mask=document_mask,
        validation_run=None if validation_of is None else find_run(validation_of, on=model.on).local_folder(),
        url=url,
        api_key=read_api_key(api_key_env),
    )
    if not (request.perplexity or request.tasks or request.questions):
        request = _recipe_request(address, request)
    import_torch()
    report = measure(
        address,
        request,
        loading=ModelLoading(
            dtype=model.dtype,
            device=model.device,
            tokenizer=model.tokenizer,
            base=None if model.base is None else checkpoint_address(model.base, model.on),
            vocab_size=model.vocab_size,
            ignore_verdict=model.ignore_verdict,
            eager=model.eager,
        ),
        home=to,
        reporter=reporter(),
    )
    print_report(_report_data(report), output, report_text(report))
    return 0 if report.passed else 1


def _split(names: tuple[str, ...]) -> tuple[str, ...]:
    """Let `a,b` stand for `a b`, as lm-eval's own command line writes tasks."""
    return tuple(part for name in names for part in name.split(",") if part)


def _recipe_request(address: str, written: EvaluationRequest) -> EvaluationRequest:
    """Return what the recipe of a run asks for; one without `eval` leaves nothing to measure."""
    from dataclasses import replace

    from trainshed.checkpoints.lora.checkpoint_spec import run_folder_of
    from trainshed.plugins import plugins_not_run
    from trainshed.recipe import load_recipe
    from trainshed.run_folder import RECIPE_FILE
    from trainshed.workflow.evaluation.evaluate import EvaluationRequest

    run = run_folder_of(address)
    if run is None:
        return written
    with plugins_not_run():
        recipe = load_recipe(str(run / RECIPE_FILE))
    if recipe.eval is None:
        return written
    asked = EvaluationRequest.of_recipe(recipe, run)
    return replace(asked, limit=written.limit or asked.limit, url=written.url, api_key=written.api_key)


def _report_data(report: EvaluationReport) -> dict[str, object]:
    return {
        "schema": "trainshed.eval/1",
        "checkpoint": report.checkpoint,
        "step": report.step,
        "computed": report.computed,
        "passed": report.passed,
        "evaluations": [record.to_plain() for record in report.records],
    }


def report_text(report: EvaluationReport) -> str:
    """Return the scores as lines for people, and of questions what was answered."""
    step = "" if report.step is None else f", step {report.step:,}"
    lines = [f"{report.checkpoint}{step}"]
    width = max((len(record.label) for record in report.records), default=0)
    for record in report.records:
        counted = record.details.get("tokens")
        more = f"  ({counted:,} tokens)" if isinstance(counted, int) else ""
        lines.append(f"  {record.label:<{width}}  {record.scores_text()}{more}")
        for question in record.details.get("questions", ()):
            # An answer of white space alone is shown as Python writes it: nobody sees it otherwise.
            answer = " ".join(question["answer"].split()) or repr(question["answer"])
            mark = "+" if question["contains"] is not None else "-"
            lines.append(f"    {mark} {question['ask']} -> {answer[:80]}")
    gate = report.gate_text()
    return "\n".join([*lines, *([gate] if gate else [])])
