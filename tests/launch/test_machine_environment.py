"""What ranks get in their environment because of the machine, and never in place of what a person wrote."""

from __future__ import annotations

import pytest

from trainshed.launch import attempt
from trainshed.launch.attempt import machine_environment

ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


@pytest.fixture(autouse=True)
def a_machine_with_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempt, "has_gpu_driver", lambda: True)
    for name in (*ALLOCATOR, "CUBLAS_WORKSPACE_CONFIG"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("installed", "name"),
    [("2.13.0+cu128", "PYTORCH_ALLOC_CONF"), ("2.9.0", "PYTORCH_ALLOC_CONF"), ("2.8.1", "PYTORCH_CUDA_ALLOC_CONF")],
)
def test_memory_of_a_gpu_grows_in_segments_that_expand(
    installed: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempt, "version", lambda _: installed)
    variables = machine_environment("fp32")
    assert {key: value for key, value in variables.items() if key in ALLOCATOR} == {name: "expandable_segments:True"}


@pytest.mark.parametrize("name", ALLOCATOR)
def test_an_allocator_setting_of_the_user_stays_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    written = {name: "max_split_size_mb:512"}
    assert not machine_environment("fp32", written).keys() & set(ALLOCATOR)
    monkeypatch.setenv(name, "max_split_size_mb:512")
    assert not machine_environment("fp32").keys() & set(ALLOCATOR)


def test_a_machine_without_a_gpu_gets_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempt, "has_gpu_driver", lambda: False)
    assert machine_environment("fp32") == {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


def test_what_is_written_for_the_ranks_is_not_replaced() -> None:
    assert "CUBLAS_WORKSPACE_CONFIG" not in machine_environment("fp32", {"CUBLAS_WORKSPACE_CONFIG": ":16:8"})
