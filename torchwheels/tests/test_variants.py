"""Variant wheels: what is in them, and which one real installers take from a served index."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import http.server
import json
import os
import re
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from variantlib.models.variant import VariantProperty
from variantlib.resolver.lib import sort_and_filter_supported_variants
from variantlib.variants_json import VariantsJson

from conftest import version_of_torch
from forged_wheels import Forge
from torchwheels import environments
from torchwheels.audit import reports
from torchwheels.audit import rules as audit
from torchwheels.errors import UserError
from torchwheels.index import kept, site
from torchwheels.options import project, releases
from torchwheels.system import sandbox
from torchwheels.wheel import variants
from torchwheels.wheel.archive import record_hash, with_record, write_wheel
from torchwheels.wheel.contents import read

version_of_torch()  # else all is skipped

TARGETS = ("3.11-cpu", "3.11-cu124", "3.11-cu130", "3.11-cu130-torch2.12")
TORCHES = ("2.6.0", "2.12.1", "2.13.0")


def forge_target(folder: Path, name: str) -> Path:
    """A wheel of that target, whose module says so; of GPU code it has none."""
    folder.mkdir(parents=True, exist_ok=True)
    forge = Forge(folder)
    if name == releases.RELEASE:
        forge.make_stable()
    else:
        target = forge.target = releases.load().target(name)
        torch = releases.minor(target.torch)
        forge.version, forge.requires = f"1.0+{target.label}.torch{torch}", [f"torch=={torch}.*"]
        forge.architectures = target.architectures
    forge.files["tinyops/__init__.py"] = f"built_for = {name!r}\n".encode()
    return forge.wheel()


def published(wheel: Path, dist: Path) -> Path:
    """That wheel in `dist`, as a build leaves it there."""
    variants.write(read(wheel))
    reports.write_report(wheel, project.Project())
    return kept.publish(wheel, dist)


def properties(path: Path) -> dict[str, object]:
    """What the variant of a wheel wants of a machine, by its label."""
    variant = variants.of(read(path))
    assert variant is not None
    return {variant.label: variant.properties}


def test_variant_has_the_same_files_but_for_the_metadata(tmp_path: Path) -> None:
    labelled = published(forge_target(tmp_path / "work", "3.11-cu130"), tmp_path / "dist")
    folder = tmp_path / "dist" / "variants"
    variant = folder / "tinyops-1.0-cp311-cp311-manylinux_2_5_x86_64-cu130.whl"
    assert [*labelled.parent.glob("*.whl")] == [labelled]  # `pip install dist/*.whl` works
    assert [*folder.iterdir()] == [variant]
    with zipfile.ZipFile(labelled) as one, zipfile.ZipFile(variant) as other:
        ours, theirs = ({x: z.read(x) for x in z.namelist()} for z in (one, other))
    old, new = "tinyops-1.0+cu130.torch2.13.dist-info", "tinyops-1.0.dist-info"
    for name in ours:
        if not name.startswith(old):
            assert theirs.pop(name) == ours[name]
    assert {x.removeprefix(new) for x in theirs} == {
        "/variant.json",
        *(x.removeprefix(old) for x in ours if x.startswith(old)),
    }
    assert b"\nVersion: 1.0\n" in theirs[f"{new}/METADATA"]
    assert b"\nRequires-Dist: torch==2.13.*" in theirs[f"{new}/METADATA"]
    assert not [name for name, data in theirs.items() if b"1.0+cu130" in data]
    said = json.loads(theirs[f"{new}/variant.json"])
    cuda = {"nvidia": {"cuda_version_lower_bound": ["13.0"]}}
    assert said["variants"] == {"cu130": cuda}
    assert said["default-priorities"] == {"namespace": ["nvidia"]}
    rows = [row.rsplit(",", 2) for row in theirs[f"{new}/RECORD"].decode().splitlines()]
    with zipfile.ZipFile(variant) as archive:
        assert [name for name, _, _ in rows] == archive.namelist()
        for name, digest, _ in rows[:-1]:
            assert digest == record_hash(archive.read(name))


def test_properties_are_those_of_the_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {name: properties(forge_target(tmp_path, name)) for name in TARGETS}
    bound = {"cuda_version_lower_bound": ["13.0"]}
    assert found["3.11-cpu"] == {"null": {}}
    assert found["3.11-cu130"] == {"cu130": {"nvidia": bound}}
    assert found["3.11-cu130-torch2.12"] == {
        "cu130.torch2.12": {"nvidia": bound, "abi_dependency": {"torch": ["2.12"]}}
    }
    # PTX runs on GPUs that no list names; without it the list is whole.
    monkeypatch.setenv("TORCHWHEELS_ARCHITECTURES", "9.0 8.0")
    assert properties(forge_target(tmp_path, "3.11-cu130")) == {
        "cu130": {"nvidia": {**bound, "sm_arch": ["80_real", "90_real"]}}
    }


def test_wheel_without_a_label_has_no_variant(tmp_path: Path) -> None:
    forge = Forge(tmp_path)
    forge.make_stable()
    assert variants.write(read(forge.wheel())) is None
    assert len([*tmp_path.rglob("*.whl")]) == 1


def test_a_variant_of_other_content_is_refused(tmp_path: Path) -> None:
    wheel = forge_target(tmp_path, "3.11-cpu")
    assert reports.write_report(wheel, project.Project())["variant"] is None
    variant = variants.write(read(wheel))
    assert variant
    said = reports.write_report(wheel, project.Project())["variant"]
    assert (said["wheel"], said["label"], said["properties"]) == (variant.name, "null", {})
    whole = variant.read_bytes()
    with zipfile.ZipFile(variant, "a") as archive:
        archive.writestr("more", "")
    with pytest.raises(UserError, match=r"-null\.whl is not the variant of tinyops"):
        reports.read_reports(tmp_path, project.Project())
    for spoiled in (variant.read_bytes(), whole + b"x", b"text"):
        variant.write_bytes(spoiled)
        with pytest.raises(UserError, match=r"-null\.whl is not the variant of tinyops"):
            reports.write_report(wheel, project.Project())


def test_a_variant_beside_its_wheel_is_not_left_out_in_silence(tmp_path: Path) -> None:
    """So a flat copy of a site has both, and the next site would have lost it."""
    variant = variants.write(read(forge_target(tmp_path, "3.11-cpu")))
    assert variant
    flat = variant.rename(tmp_path / variant.name)
    with pytest.raises(UserError) as caught:
        reports.read_reports(tmp_path, project.Project())
    said = f"{flat} is a wheel's variant: it belongs into {tmp_path / 'variants'}"
    assert str(caught.value) == said
    flat.rename(variant)
    (found,) = reports.read_reports(tmp_path, project.Project())
    assert found["variant"]["label"] == "null"


def test_a_variant_stays_when_the_table_has_a_newer_torch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both wheels are for 3.11-cpu, and their variants have one name."""
    dist, renewed = tmp_path / "dist", releases.load()
    published(forge_target(tmp_path / "one", "3.11-cpu"), dist)
    (variant,) = dist.glob("variants/*.whl")
    before = variant.read_bytes()
    renewed = dataclasses.replace(renewed, cpu={**renewed.cpu, "torch": "2.12.1"})
    monkeypatch.setattr(releases, "load", lambda: renewed)
    for _ in range(2):  # also when it is built again
        published(forge_target(tmp_path / "two", "3.11-cpu"), dist)
        assert variant.read_bytes() == before
        said = "-torch2.12 has one of its own"
        assert f"{variant} is there already, of a wheel for another torch" in (
            out := capsys.readouterr().out
        )
        assert said in out
    monkeypatch.undo()
    found = reports.read_reports(dist, project.Project())
    assert {x["version"]: bool(x["variant"]) for x in found} == {
        "1.0+cpu.torch2.12": False,
        "1.0+cpu.torch2.13": True,
    }
    published(forge_target(tmp_path / "one", "3.11-cpu"), dist)


def test_a_wheel_of_changed_sources_takes_the_place_of_the_one_with_another_label(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the same target and torch: the variant is that of the new sources."""
    dist = tmp_path / "dist"
    old = published(forge_target(tmp_path / "one", "3.11-cpu"), dist)
    forge = Forge(tmp_path / "one")
    forge.version, forge.requires = "1.0+cpu", ["torch>=2.10"]
    forge.files["tinyops/__init__.py"] = b"changed = True\n"
    new = published(forge.wheel(), dist)
    assert [*dist.glob("*.whl")] == [new] and new != old
    assert not reports.report_file(old).exists()
    (variant,) = dist.glob("variants/*.whl")
    assert b"changed" in read_zip(variant, "tinyops/__init__.py")
    assert "has no variant" not in capsys.readouterr().out


def test_a_broken_wheel_is_in_the_way(tmp_path: Path) -> None:
    dist = tmp_path / "dist"
    published(forge_target(tmp_path / "one", "3.11-cpu"), dist).write_bytes(b"")
    with pytest.raises(UserError, match=r"built for nobody knows what, .*: delete the wheel first"):
        published(forge_target(tmp_path / "two", "3.11-cpu"), dist)


def test_two_spellings_of_a_wheel(tmp_path: Path) -> None:
    """An installer would take one or the other."""
    wheel = forge_target(tmp_path, "3.11-cpu")
    other = wheel.rename(wheel.with_name(wheel.name.replace("-1.0+", "-01.0+")))
    forge_target(tmp_path, "3.11-cpu")
    both = f"{other.name} and {wheel.name} are of one version and for the same machines: delete"
    with pytest.raises(UserError, match=re.escape(both)):
        site.make_site(tmp_path, tmp_path / "site", project.Project())


def read_zip(path: Path, name: str) -> bytes:
    with zipfile.ZipFile(path) as archive:
        return archive.read(name)


def do_not_audit(patch: pytest.MonkeyPatch) -> None:
    """No compiler makes GPU code of all these CUDA versions, and installers do not look for it."""
    patch.setattr(audit, "findings", lambda *_: {})
    patch.setattr(sandbox, "call", lambda reader, *arguments: reader(*arguments))


def test_variants_of_one_label_must_want_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    do_not_audit(monkeypatch)
    for tag, architectures in (("cp312-cp312", "9.0"), ("cp311-cp311", "8.0")):
        monkeypatch.setenv("TORCHWHEELS_ARCHITECTURES", architectures)
        forged = forge_target(tmp_path, "3.11-cu130")
        wheel = forged.rename(forged.with_name(forged.name.replace("cp311-cp311", tag)))
        variants.write(read(wheel))
        reports.write_report(wheel, project.Project())
    with pytest.raises(
        UserError, match=r"the variants cu130 of tinyops-1\.0 want different machines"
    ):
        site.make_site(tmp_path, tmp_path / "site", project.Project())


class Served:
    """A served index, beside one that has torch, and the installers that take from the two."""

    def __init__(self, address: str, folder: Path) -> None:
        self.address, self.folder = address, folder
        self.variables = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("PIP_", "UV_", "NV_VARIANT_"))
        } | {"PIP_CONFIG_FILE": os.devnull, "UV_NO_CONFIG": "1", "UV_NO_CACHE": "1"}

    def uv(self, *wanted: str, driver: str = "", gpu: str = "", flag: bool = True) -> str:
        """The target and the torch that uv installs, or what it says."""
        variables = dict(self.variables)
        if driver:
            variables["NV_VARIANT_PROVIDER_FORCE_CUDA_DRIVER_VERSION"] = driver
        if gpu:
            variables["NV_VARIANT_PROVIDER_FORCE_SM_ARCH"] = gpu
        command = environments.uv("pip", "install", *wanted, "--python-version=3.11")
        command += ["--python-platform=x86_64-manylinux_2_28", f"--python={sys.executable}"]
        command += [f"--index={self.address}/simple"]
        command += [f"--default-index={self.address}/others/simple"]
        return self._install(
            [*command, *(["--preview-features=wheel-variants"] if flag else [])], variables
        )

    def pip(self, index: str, *wanted: str) -> str:
        """The same of pip."""
        command = [sys.executable, "-m", "pip", "install", *wanted, "--python-version=3.11"]
        command += ["--platform=manylinux_2_5_x86_64", "--only-binary=:all:", "--no-cache-dir"]
        command += [f"--index-url={self.address}/others/simple"]
        command += [f"--extra-index-url={self.address}/{index}"]
        return self._install(command, self.variables)

    def _install(self, command: list[str], variables: dict[str, str]) -> str:
        target = self.folder / f"installed-{len([*self.folder.iterdir()])}"
        done = subprocess.run(
            [*command, f"--target={target}"], env=variables, capture_output=True, text=True
        )
        if done.returncode != 0:
            return " ".join(done.stderr.split())
        said: dict[str, str] = {}
        exec((target / "tinyops" / "__init__.py").read_text(), said)
        (torch,) = target.glob("torch-*.dist-info")
        return f"{said['built_for']} {torch.stem.removeprefix('torch-')}"


@contextlib.contextmanager
def serve(
    folder: Path, targets: Sequence[str], yanked: Mapping[str, str] | None = None
) -> Iterator[Served]:
    """The index of wheels for `targets`, at an address of this machine."""
    dist, root = folder / "dist", folder / "site"
    with pytest.MonkeyPatch.context() as patch:
        do_not_audit(patch)
        for name in targets:
            published(forge_target(folder / "work" / name, name), dist)
        site.make_site(dist, root, project.Project(yanked=yanked or {}))
    _index_torches(root / "others" / "simple")
    handler = functools.partial(_Quiet, directory=str(root))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever).start()
        (folder / "installed").mkdir()
        yield Served(f"http://127.0.0.1:{server.server_port}", folder / "installed")
        server.shutdown()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Wheels for several CUDA versions and torches."""
    with serve(tmp_path_factory.mktemp("served"), TARGETS) as found:
        yield found


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


def _index_torches(simple: Path) -> None:
    """An index that has nothing but torches, of nothing but metadata."""
    (simple / "torch").mkdir(parents=True)
    for version in TORCHES:
        info = f"torch-{version}.dist-info"
        files = {
            f"{info}/METADATA": f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n".encode(),
            f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        }
        path = simple / "torch" / f"torch-{version}-py3-none-any.whl"
        write_wheel(path, with_record(files, f"{info}/RECORD"))
    names = [path.name for path in simple.glob("torch/*.whl")]
    links = "".join(f'<a href="{name}">{name}</a>' for name in names)
    (simple / "torch" / "index.html").write_text(links)


@pytest.mark.parametrize(
    ("driver", "found"),
    [
        ("12.3", "3.11-cpu 2.13.0"),
        ("12.4", "3.11-cu124 2.6.0"),
        ("12.8", "3.11-cu124 2.6.0"),
        ("13.0", "3.11-cu130 2.13.0"),
        ("13.2", "3.11-cu130 2.13.0"),
    ],
)
def test_uv_takes_the_variant_for_the_driver(served: Served, driver: str, found: str) -> None:
    assert served.uv("tinyops", driver=driver) == found


@pytest.mark.skipif(
    Path("/proc/driver/nvidia/version").exists(), reason="this machine has a driver of NVIDIA"
)
def test_uv_takes_the_null_variant_where_there_is_no_driver(served: Served) -> None:
    assert served.uv("tinyops") == "3.11-cpu 2.13.0"


def test_uv_keeps_the_torch_that_is_asked_for_or_says_why_not(served: Served) -> None:
    assert served.uv("tinyops", "torch==2.13.*", driver="13.2") == "3.11-cu130 2.13.0"
    assert served.uv("tinyops", "torch==2.6.*", driver="12.8") == "3.11-cu124 2.6.0"
    for torch in ("2.6", "2.12"):
        refused = served.uv("tinyops", f"torch=={torch}.*", driver="13.2")
        assert "all versions of tinyops depend on torch==2.13.*" in refused


@pytest.mark.xfail(strict=True, reason="uv 0.13.9 skips what needs the namespace abi_dependency")
def test_uv_takes_the_variant_for_the_torch_that_is_asked_for(served: Served) -> None:
    found = served.uv("tinyops", "torch==2.12.*", driver="13.2")
    assert found == "3.11-cu130-torch2.12 2.12.1"


@pytest.mark.parametrize(("torch", "first"), [("2.12.1", "cu130.torch2.12"), ("2.13.0", "cu130")])
def test_an_installer_that_knows_abi_dependency_chooses_by_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, torch: str, first: str
) -> None:
    """variantlib is the library of those who propose variants."""
    found = [variants.of(read(forge_target(tmp_path, name))) for name in TARGETS]
    document = VariantsJson(
        json.loads(variants.metadata({x.label: x.properties for x in found if x}))
    )
    bounds = [
        VariantProperty("nvidia", "cuda_version_lower_bound", x) for x in ("13.2", "13.0", "12.4")
    ]
    monkeypatch.setenv("VARIANT_ABI_DEPENDENCY", f"torch=={torch}")
    order = sort_and_filter_supported_variants(
        [*document.variants.values()], bounds, document.namespace_priorities
    )
    fallbacks = [x for x in ("cu130", "cu124", "null") if x != first]
    assert [x.label for x in order] == [first, *fallbacks]


def test_uv_takes_gpu_code_without_ptx_only_where_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHWHEELS_ARCHITECTURES", "9.0")
    with serve(tmp_path, ("3.11-cpu", "3.11-cu130")) as served:
        for gpu, target in (("9.0", "3.11-cu130"), ("8.0", "3.11-cpu"), ("12.0", "3.11-cpu")):
            assert served.uv("tinyops", driver="13.2", gpu=gpu) == f"{target} 2.13.0"


def test_uv_without_variants_refuses_them(served: Served) -> None:
    said = served.uv("tinyops", flag=False)
    assert "tinyops==1.0 has only unsupported wheel variants" in said
    wanted, driver = "tinyops==1.0+cu124.torch2.6", "13.2"
    assert "there is no version of tinyops==1.0+cu124" in served.uv(wanted, driver=driver)


@pytest.mark.slow
def test_pip_never_takes_a_variant(served: Served) -> None:
    refused = "No matching distribution found for tinyops"
    assert refused in served.pip("simple", "tinyops")
    for target, label, torch in (
        ("3.11-cpu", "cpu.torch2.13", "2.13.0"),
        ("3.11-cu130-torch2.12", "cu130.torch2.12", "2.12.1"),
    ):
        assert served.pip(f"{label}/simple", "tinyops") == f"{target} {torch}"


def test_wheel_without_a_label_is_for_all_who_know_no_variants(tmp_path: Path) -> None:
    with serve(tmp_path, ("release", "3.11-cpu", "3.11-cu130")) as served:
        assert served.pip("simple", "tinyops") == "release 2.13.0"
        assert served.uv("tinyops", driver="13.2", flag=False) == "release 2.13.0"
        assert served.uv("tinyops", driver="13.2") == "3.11-cu130 2.13.0"


def test_page_offers_the_line_for_every_machine_first(served: Served) -> None:
    page = (served.folder.parent / "site" / "index.html").read_text()
    first = re.search(r"<code>(.*?)</code>", page)
    assert first
    assert first[1] == (
        "uv pip install --preview-features wheel-variants tinyops "
        '--index <span class="index">simple/</span>'
    )
    assert "uv can do this from 0.13.9 on, pip cannot yet" in page


@pytest.mark.parametrize(
    "yanked", ["1.0", pytest.param("1.0+cu130.torch2.13", marks=pytest.mark.slow)]
)
def test_what_is_withdrawn_is_taken_only_where_it_is_named(tmp_path: Path, yanked: str) -> None:
    reason = "wrong <sums>"
    with serve(tmp_path, ("3.11-cpu", "3.11-cu130"), {yanked: reason}) as served:
        labelled = "cu130.torch2.13/simple"
        assert "No matching distribution found" in served.pip(labelled, "tinyops")
        named = served.pip(labelled, "tinyops==1.0+cu130.torch2.13")
        assert named == "3.11-cu130 2.13.0"
        page = (tmp_path / "site" / "index.html").read_text()
        assert page.count("withdrawn: wrong &lt;sums&gt;") == (2 if yanked == "1.0" else 1)
        listing = (tmp_path / "site" / "simple" / "tinyops" / "index.html").read_text()
        assert 'data-yanked="wrong &lt;sums&gt;"' in listing
        if yanked == "1.0":
            assert "tinyops==1.0 was yanked" in served.uv("tinyops", driver="13.2")
            assert served.uv("tinyops==1.0", driver="13.2") == "3.11-cu130 2.13.0"
        else:
            assert served.uv("tinyops", driver="13.2") == "3.11-cpu 2.13.0"
