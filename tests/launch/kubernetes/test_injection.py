"""Whatever a person writes stays text: it cannot become a key, a template, a command or another value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.clusters.helm_program import charted_objects, templated
from support.clusters.kubernetes_jobs import cluster_of, job_of, served, stages_of, train_alone
from trainshed.launch.job import ServingSpec
from trainshed.launch.kubernetes.helm import write_chart
from trainshed.launch.kubernetes.kinds import split_documents
from trainshed.launch.kubernetes.objects import read_documents, to_documents, to_yaml
from trainshed.launch.kubernetes.pod import escape_var_references
from trainshed.launch.kubernetes.render import render

# Pieces of syntax of YAML, shells, Go's templates and the kubelet, between any other characters.
SYNTAX = st.sampled_from(
    ["'", '"', "$(", "$((", "$$", ")", "`", "\n", "\n---\n", "\t", ": ", "- ", " #", "{{", "}}", "{{-", "{", "}", "[",
     "&a", "*a", "!!str ", "|", ">", "%", "@", "\\", "\\n", "\r", "\x85", "\u2028", "\ufeff", "\x7f", "\x1b", "😀",
     "yes", "null", "~", "0x1f", "1e3", "0o17", "1:30", "2026-11-15", "=", "<<", ".inf", " ", "$(HOME)", "EOF"]
)  # fmt: skip
ODD = st.lists(SYNTAX | st.characters(exclude_categories=("Cs",), exclude_characters="\x00"), max_size=8).map("".join)
QUICK = settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
FEW = settings(QUICK, max_examples=8)


def expand(text: str, mapping: Mapping[str, str]) -> str:
    """The kubelet's own expansion of `$(NAME)` (kubernetes third_party/forked/golang/expansion), ported."""
    out, place = [], 0
    while place < len(text):
        if text[place] == "$" and place + 1 < len(text):
            if text[place + 1] == "$":
                out.append("$")
                place += 2
                continue
            end = text.find(")", place)
            if text[place + 1] == "(" and end > 0:
                name = text[place + 2 : end]
                out.append(mapping.get(name, f"$({name})"))
                place = end + 1
                continue
        out.append(text[place])
        place += 1
    return "".join(out)


@QUICK
@given(ODD)
def test_the_kubelet_gives_the_container_what_was_written(text: str) -> None:
    assert expand(escape_var_references(text), {"HOME": "/root", "": "empty", "HOME)": "x"}) == text


@QUICK
@given(st.dictionaries(ODD.filter(bool), ODD | st.lists(ODD, max_size=3), min_size=1, max_size=4))
def test_any_text_comes_back_from_yaml(body: dict[str, Any]) -> None:
    text = to_yaml({"kind": "X", "data": body})
    assert yaml.safe_load(text) == {"kind": "X", "data": body}
    assert split_documents(to_documents([{"data": body}, {"data": body}])) == [f"---\n{to_yaml({'data': body})}"] * 2


def leaves(value: Any, path: tuple[Any, ...] = ()) -> dict[tuple[Any, ...], Any]:
    """Every scalar by its path."""
    if isinstance(value, dict):
        return {key: leaf for name, each in value.items() for key, leaf in leaves(each, (*path, name)).items()}
    if isinstance(value, list):
        return {key: leaf for number, each in enumerate(value) for key, leaf in leaves(each, (*path, number)).items()}
    return {path: value}


def stage_leaves(text: str) -> dict[tuple[Any, ...], Any]:
    """The scalars of all objects, those inside of the driver's ConfigMap too; names are hashes of what they hold."""
    found = read_documents(text)
    for each in list(found):
        if "-stages-" in each["metadata"]["name"]:
            found += [inner for body in each.pop("data").values() for inner in read_documents(body)]
    return {
        path: leaf
        for path, leaf in leaves(found).items()
        if not (isinstance(leaf, str) and ("-files-" in leaf or "-stages-" in leaf))
    }


@QUICK
@given(ODD.filter(bool), ODD)
def test_odd_values_change_themselves_and_nothing_else(program: str, value: str) -> None:
    def rendered(python: str, environment: str, note: str) -> dict[tuple[Any, ...], Any]:
        cluster = cluster_of({}).model_copy(update={"python": python, "environment": {"ODD": environment}})
        kubernetes = cluster.on_kubernetes.model_copy(update={"annotations": {"note": note}, "queue": "q"})
        cluster = cluster.model_copy(update={"kubernetes": kubernetes})
        server = served(cluster)[-1]
        server = replace(server, serving=ServingSpec(words=("serve", environment)))
        stages = (*stages_of(cluster, nodes=1), server)
        job = job_of(cluster, stages=stages, files={"recipe.yaml": f"x: {environment}"})
        return stage_leaves(render(job).text())

    plain, odd = rendered("PROGRAM", "VALUE", "VALUE"), rendered(program, value, value)
    assert odd.keys() == plain.keys()
    for path, leaf in plain.items():
        wanted = {
            "PROGRAM": escape_var_references(program),
            "VALUE": escape_var_references(value),
            "x: VALUE": f"x: {value}",
        }.get(leaf, leaf)
        if path[-2:] == ("annotations", "note"):
            wanted = value  # annotations are not expanded
        assert odd[path] == wanted


@FEW
@given(st.lists(ODD, min_size=6, max_size=6))
def test_helm_gives_back_every_text_as_it_was(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> None:
    folder = tmp_path_factory.mktemp("chart")
    cluster = cluster_of({}).model_copy(
        update={"environment": {"A": texts[0], "B": texts[1]}, "python": texts[2] or "python3"}
    )
    files = {"recipe.yaml": texts[3], "other.txt": texts[4], "steps.yaml": f"train:\n  steps: 1000\n{texts[5]}"}
    job = job_of(cluster, stages=stages_of(cluster, nodes=2), files=files)
    request = render(job)
    write_chart(job, request, folder)
    assert templated(folder) == charted_objects(request)


def test_secrets_are_references_and_their_values_are_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret_of_the_tests")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "aws_secret_of_the_tests")
    references = {"HF_TOKEN": {"k8s": "hf/token"}, "AWS_SECRET_ACCESS_KEY": {"k8s": "aws/key"}}
    job = job_of(cluster_of({"secrets": references}), stages=train_alone())
    request = render(job)
    write_chart(job, request, tmp_path)
    written = request.text() + "".join(path.read_text() for path in tmp_path.rglob("*") if path.is_file())
    assert "secretKeyRef" in written
    assert "secret_of_the_tests" not in written
