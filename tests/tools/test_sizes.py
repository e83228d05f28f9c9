"""The sizes of wheels: what of each is known without a build, and when that is an error."""

from __future__ import annotations

import copy
import json
import re
import zipfile
from pathlib import Path

import pytest

from extops_build.libraries import compiled_architectures
from tools import sizes
from tools.sizes import HOST, Part

NOTED = json.loads(sizes.NOTED.read_text())


def faults(built: sizes.Families) -> list[str]:
    return [fault for size in sizes.sizes({"cu130": built}, NOTED) for fault in size.faults()]


def test_every_wheel_of_the_matrix_is_noted_and_within_its_budget() -> None:
    assert faults(NOTED["cu130"]) == []
    for size in sizes.sizes({"cu130": NOTED["cu130"]}, NOTED):
        assert size.budget > 0
        assert sizes.megabytes(size.families) == pytest.approx(sizes.megabytes(size.noted))
        expected = set()
        for name in compiled_architectures(size.target.architectures):
            digits = name.removesuffix("+PTX").replace(".", "")
            expected.add(f"sm_{digits}a" if digits == "90" else f"sm_{digits}")
            expected |= {f"compute_{digits}"} if name.endswith("+PTX") else set()
        assert {*size.noted} == expected | {HOST}, size.target.name


def test_a_kernel_that_grows_by_a_megabyte() -> None:
    """In the wheel that is built; others would be too large, too."""
    grown = copy.deepcopy(NOTED["cu130"])
    grown["sm_90a"]["sequence_group"] += 1_000_000
    found = {message.split()[0]: message for message in faults(grown)}
    assert {"3.11-release", "3.11-cu121", "3.11-cu124", "3.11-cu126", "3.11-cu130"} <= {*found}
    for target, message in found.items():
        size = r"has \d+\.\d\d MB, above 90% of the [\d.]+ MB that pyproject\.toml allows it"
        grew = r"Since that was noted, what grew most is sequence_group by 1\.\d\d MB"
        assert re.fullmatch(rf"{target} {size}\. {grew}", message)


def test_an_estimate_follows_what_changes() -> None:
    before = {"host": {"x": 100}, "sm_80": {"a": 10, "b": 20, "c": 30}, "sm_90a": {"a": 50}}
    now = {"host": {"x": 150}, "sm_80": {"a": 20, "b": 20, "d": 6}, "sm_90a": {"a": 50}}
    noted = {"host": {"x": 90}, "sm_50": {"a": 30, "b": 20, "c": 40}, "sm_90a": {"a": 60}}
    # Of sm_50 all takes 1.5 times as much as of sm_80, which is the nearest.
    assert sizes.estimated(noted, now, before) == {
        "host": {"x": 135},
        "sm_50": {"a": 60, "b": 20, "c": 0, "d": 9},
        "sm_90a": {"a": 60},
    }
    assert sizes.estimated({"host": {"x": 90}}, now, before) == {"host": {"x": 135}}


def test_an_estimate_that_was_wrong() -> None:
    built = {"cu130": NOTED["cu130"], "cu121": copy.deepcopy(NOTED["cu121"])}
    for architecture in ("sm_50", "sm_60"):
        built["cu121"][architecture]["sequence_float32_block"] /= 4
    by_name = {size.target.label: size for size in sizes.sizes(built, NOTED)}
    (message,) = by_name["cu121"].faults()
    assert re.fullmatch(r"3\.11-cu121 has .* MB, but .* were estimated: .* --note`", message)


def test_the_parts_of_a_wheel_add_up_to_it(tmp_path: Path) -> None:
    wheel = tmp_path / "x.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("extops/libextops_cpu.so", b"code" * 10_000)
        archive.writestr("extops/__init__.py", b"import this\n" * 100)
    parts = sizes.parts_of(wheel)
    assert {*parts} == {Part("libextops_cpu.so", "", HOST), Part("other files", "", HOST)}
    assert parts.total() == wheel.stat().st_size


@pytest.mark.parametrize(
    ("symbol", "expected"),
    [
        (
            "_ZN6extops4cuda20sequence_step_kernelINS_3RnnILb1EEEffEEvNS0_15SequenceForwardIT_T0_EEiPKT1_PS8_",
            ("sequence_step", "Rnn<true>"),
        ),
        ("_ZN6extops4cuda4step18column_sums_kernelIfEEvNS1_10ColumnSumsIT_EE", ("column_sums", "")),
        ("", ("no kernel alone", "")),
    ],
)
def test_the_kernel_of_a_symbol(symbol: str, expected: tuple[str, str]) -> None:
    assert sizes.kernel(symbol) == expected


def test_wheels_of_another_version_are_not_read(tmp_path: Path) -> None:
    version = sizes.EXTOPS.version()
    names = {
        f"extops-{version}+cu130-py3-none-manylinux_2_24_x86_64.whl": "cu130",
        f"extops-{version}+cu130-py3-none-manylinux_2_24_aarch64.whl": "cu130-aarch64",
        f"extops-{version}-py3-none-manylinux_2_24_x86_64.whl.refused": "release",
        "extops-0.0.1+cu124-py3-none-manylinux_2_24_x86_64.whl": None,
    }
    for name in names:
        (tmp_path / name).touch()
    assert sizes.wheels(tmp_path) == {key: tmp_path / name for name, key in names.items() if key}


def test_a_folder_with_nothing_to_go_by(tmp_path: Path) -> None:
    with pytest.raises(sizes.UserError, match=r"has no wheel with code for GPUs to go by: `nox"):
        sizes.verdict(tmp_path, note=False)
    assert {size.target.label for size in sizes.sizes({}, NOTED)} >= {"cpu", "release"}
