"""The kernels that the build refuses, though they compile."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from extops_build import UserError, machine_code, memory_model

# The first breaks the rule. The pointers of the second may alias, and the third waits for no kernel before it.
KERNELS = """
extern "C" __global__ void copy(const float* __restrict__ from, float* __restrict__ to) {
  cudaGridDependencySynchronize();
  to[threadIdx.x] = from[threadIdx.x];
}
extern "C" __global__ void coherent(const float* from, float* to) {
  cudaGridDependencySynchronize();
  to[threadIdx.x] = from[threadIdx.x];
}
extern "C" __global__ void alone(const float* __restrict__ from, float* __restrict__ to) {
  to[threadIdx.x] = from[threadIdx.x];
}
"""


@pytest.fixture(scope="module")
def nvcc() -> Path:
    folders = [Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "bin"), os.environ["PATH"]]
    found = shutil.which("nvcc", path=os.pathsep.join(map(str, folders)))
    if found is None:
        pytest.skip("there is no CUDA compiler (nvcc)")
    return Path(found)


def compile(folder: Path, nvcc: Path, text: str, code: str) -> Path:
    source, library = folder / "copy.cu", folder / "libcopy.so"
    source.write_text(text)
    options = [
        "-shared",
        "-Xcompiler=-fPIC",
        "-cudart=none",
        f"-gencode=arch=compute_90,code={code}",
    ]
    subprocess.run([nvcc, *options, source, "-o", library], check=True)
    return library


@pytest.mark.parametrize("code", ["compute_90", "sm_90"])
def test_a_kernel_that_breaks_the_rule(tmp_path: Path, nvcc: Path, code: str) -> None:
    """It alone is named."""
    library = compile(tmp_path, nvcc, KERNELS, code)
    with pytest.raises(
        UserError, match=r"libcopy\.so: copy may start before .*take `__restrict__` off"
    ):
        memory_model.check(library)


PTX = """
.visible .entry good(
	griddepcontrol.wait;
	ld.global.f32 %f1, [%rd1];
}
.entry bad(
	griddepcontrol.wait;
	ld.global.nc.v4.f32 {%f1, %f2, %f3, %f4}, [%rd1];
}
.visible .entry alone(
	ld.global.nc.f32 %f1, [%rd1];
}
"""
SASS = """
		Function : good
        /*0010*/    ACQBULK ;
        /*0020*/    LDG.E R10, desc[UR10][R10.64] ;
		Function : bad
        /*0010*/    ACQBULK ;
        /*0020*/    @P1 LDG.E.128.CONSTANT R10, desc[UR10][R10.64] ;
		Function : alone
        /*0020*/    LDG.E.CONSTANT R10, desc[UR10][R10.64] ;
"""


def test_listings() -> None:
    assert [*memory_model.violations(memory_model.PTX, PTX)] == ["bad"]
    assert [*memory_model.violations(memory_model.SASS, SASS)] == ["bad"]


RELEASE = """
extern "C" __global__ void NAME(float* to, unsigned* counter) {
  __shared__ float from[1024];
  __shared__ unsigned long long barrier;
  from[threadIdx.x] = to[threadIdx.x];
  __syncthreads();
  float value;
  const auto at = [](const void* pointer) { return static_cast<unsigned>(__cvta_generic_to_shared(pointer)); };
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(at(&from[threadIdx.x ^ 1])));
  FENCE;
  asm volatile(ARRIVE : "memory");
  to[threadIdx.x] = value;
}
"""
ARRIVALS = {
    "mbarrier": ("SYNCS", '"mbarrier.arrive.shared.b64 _, [%0];" ::"r"(at(&barrier))'),
    "cluster": ("UCGABAR", '"barrier.cluster.arrive.relaxed;" : :'),
    "counter": ("RED", '"red.relaxed.gpu.global.add.u32 [%0], 1;" ::"l"(counter)'),
}


def test_a_release_with_loads_in_flight(tmp_path: Path, nvcc: Path) -> None:
    kernels = [RELEASE.replace("NAME", x).replace("ARRIVE", y) for x, (_, y) in ARRIVALS.items()]
    text = "".join(kernels)
    with pytest.raises(UserError) as faults:
        memory_model.check(compile(tmp_path, nvcc, text.replace("FENCE", ""), "sm_90"))
    for name, (instruction, _) in ARRIVALS.items():
        place = rf"{name} \({instruction}\S+ at 0x\w+ does not wait for scoreboard \d of LDS at"
        assert re.search(place, str(faults.value)), faults.value
    memory_model.check(
        compile(tmp_path, nvcc, text.replace("FENCE", "__threadfence_block()"), "sm_90")
    )


def test_a_load_in_flight_along_a_loop() -> None:
    """The load comes behind the arrival in the listing, and before it on the way."""

    def instruction(address: int, text: str, scoreboard: int = 7, waits: int = 0) -> str:
        control = scoreboard << 46 | waits << 52
        return f"/*{address:04x}*/ {text} ; /* 0x{0:016x} */\n /* 0x{control:016x} */\n"

    def listing(waits: int) -> str:
        return (
            "\t\tFunction : loop\n"
            + instruction(0x00, "@P0 SYNCS.ARRIVE.TRANS64.A1T0 RZ, [UR4], RZ")
            + instruction(0x10, "@P1 EXIT")
            + instruction(0x20, "LDS R0, [R1]", scoreboard=2)
            + instruction(0x30, "FADD R2, R3, R4", waits=waits)
            + instruction(0x40, "BRA 0x0")
            + instruction(0x50, "FADD R2, R2, R0", waits=4)
        )

    found = "loop (SYNCS.ARRIVE.TRANS64.A1T0 at 0x0 does not wait for scoreboard 2 of LDS at 0x20)"
    assert [*machine_code.releases_with_loads_in_flight(listing(0b000011))] == [found]
    assert [*machine_code.releases_with_loads_in_flight(listing(0b000100))] == []


def test_a_listing_that_cannot_be_read_does_not_pass() -> None:
    with pytest.raises(UserError, match="lists good in a form"):
        [*machine_code.releases_with_loads_in_flight(SASS)]


def test_a_library_without_gpu_code_does_not_pass(tmp_path: Path) -> None:
    library = tmp_path / "libempty.so"
    subprocess.run(["g++", "-shared", "-x", "c++", "/dev/null", "-o", library], check=True)
    with pytest.raises(UserError, match=re.escape("libempty.so")):
        memory_model.check(library)
