"""GPUs have the dense peaks of their datasheets, and a GPU nobody described is not guessed at."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from trainshed.catalog import Gpu, find_gpu, gpu, gpu_by_device_name, gpu_from_file, gpu_names
from trainshed.errors import InputError, RecipeError

PROMISED = ["v100-16gb", "v100-32gb", "rtx-3090", "rtx-a6000", "rtx-4090", "rtx-5090", "rtx-pro-6000", "l4"]
PROMISED += ["a10g", "l40s", "a100-40gb", "a100-80gb", "h100-sxm", "h100-pcie", "h200", "h20"]
PROMISED += ["b200", "gb200", "b300", "gb300", "mi300x", "mi325x", "mi350x", "mi355x"]
WIDEST_FIRST = ("fp4", "fp8", "bf16", "tf32", "fp32")


def test_the_catalog_has_every_gpu_we_promised() -> None:
    assert gpu_names() == PROMISED


@pytest.mark.parametrize("name", PROMISED)
def test_a_gpu_has_dense_peaks_that_fit_together(name: str) -> None:
    found = gpu(name)
    peaks = [peak for dtype in WIDEST_FIRST if (peak := found.dense_tflops.peak(dtype)) is not None]
    assert peaks == sorted(peaks, reverse=True), "narrower products are never slower"
    assert found.dense_tflops.fp16 == found.dense_tflops.half
    assert (found.dense_tflops.bf16 is None) == name.startswith("v100"), "Volta is the one without bf16"
    # Matrix units double their rate as the inputs' width halves; a sparse figure among them would stand out.
    for narrow, wide in (("fp8", "bf16"), ("bf16", "tf32")):
        rates = found.dense_tflops.peak(narrow), found.dense_tflops.peak(wide)
        if rates[0] is not None and rates[1] is not None:
            assert rates[0] / rates[1] == pytest.approx(2, rel=0.03)


@pytest.mark.parametrize("name", PROMISED)
def test_a_gpu_names_its_source_and_says_that_its_peaks_are_dense(name: str) -> None:
    assert "datasheet" in gpu(name).source or "whitepaper" in gpu(name).source
    assert re.search(r"dense|halved|without sparsity", gpu(name).source)


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100-sxm"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA B300 SXM6 AC", "b300"),
        ("NVIDIA GB300", "gb300"),
        ("nvidia  gb200 ", "gb200"),
        ("AMD Instinct MI300X VF", "mi300x"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("NVIDIA RTX A6000", "rtx-a6000"),
        ("Tesla V100-SXM2-32GB", "v100-32gb"),
    ],
)
def test_a_gpu_is_found_by_what_its_driver_calls_it(device: str, name: str) -> None:
    assert gpu_by_device_name(device) is gpu(name)


@pytest.mark.parametrize(
    "device", ["NVIDIA H200 NVL", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA GeForce RTX 4090 Laptop GPU", "B200", ""]
)
def test_a_gpu_that_only_looks_like_a_known_one_is_unknown(device: str) -> None:
    assert gpu_by_device_name(device) is None


def test_no_two_gpus_share_a_device_name() -> None:
    names = [device.casefold() for name in gpu_names() for device in gpu(name).device_names]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        ("h100", "h100-sxm"),
        ("H100", "h100-sxm"),
        ("A100_80GB", "a100-80gb"),
        ("gb200", "gb200"),
        ("mi300", "mi300x"),
        ("4090", "rtx-4090"),
        ("A6000", "rtx-a6000"),
        ("h20", "h20"),
    ],
)
def test_what_people_type_is_understood(typed: str, name: str) -> None:
    assert gpu(typed) is gpu(name)
    assert gpu(typed).name == name


def test_no_two_gpus_share_an_alias() -> None:
    names = [*gpu_names(), *(alias for name in gpu_names() for alias in gpu(name).aliases)]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("wrong", "near"),
    [("a100", "a100-40gb or a100-80gb"), ("v100", "v100-16gb or v100-32gb"), ("h100-nvl", "h100-sxm?")],
)
def test_a_misspelt_or_ambiguous_gpu_gets_the_nearest(wrong: str, near: str) -> None:
    with pytest.raises(InputError) as caught:
        gpu(wrong)
    assert caught.value.what == f"there is no GPU `{wrong}` in the catalog"
    assert (caught.value.hint or "").startswith(f"did you mean {near}")


def test_an_unknown_gpu_is_told_how_to_describe_one_and_that_description_works(tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        gpu("zzzzzz")
    known, describing = (caught.value.hint or "").split("\n")
    assert known == f"known GPUs: {', '.join(PROMISED)}"
    assert "--gpu ./mygpu.yaml" in describing
    file = tmp_path / "mygpu.yaml"
    file.write_text(describing[describing.index("NAME:") :])
    found = find_gpu(str(file))
    assert isinstance(found, Gpu)
    assert (found.name, found.dense_tflops.bf16, found.machine) == ("NAME", 300.0, "dgx-h100")


def test_a_described_gpu_is_checked_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("mine:\n  source: me\n  device_names: [X]\n  memory_gb: 80.0\n")
    with pytest.raises(RecipeError) as caught:
        gpu_from_file(file)
    assert f"{file}:4 (memory_gb): unknown key `memory_gb`; did you mean memory_gib?" in caught.value.what


@pytest.mark.parametrize("text", ["a: {source: x}\nb: {source: y}\n", "a: 3\n"])
def test_a_file_describes_one_gpu(tmp_path: Path, text: str) -> None:
    file = tmp_path / "two.yaml"
    file.write_text(text)
    with pytest.raises(RecipeError, match="the file must describe one GPU under its name"):
        gpu_from_file(file)


def test_a_file_that_is_not_there_is_named() -> None:
    with pytest.raises(InputError) as caught:
        find_gpu("nowhere/mine.yaml")
    assert (caught.value.what, caught.value.where) == ("cannot be read: No such file or directory", "nowhere/mine.yaml")
