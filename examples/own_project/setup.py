"""The compiled part: for the CPU, and for CUDA where FORCE_CUDA=1 asks for it, as torchwheels does."""

import os

from setuptools import setup
from torch.utils.cpp_extension import BuildExtension, CppExtension, CUDAExtension

if os.environ.get("FORCE_CUDA") == "1":
    library = CUDAExtension("own_project._C", ["csrc/swish.cpp", "csrc/swish_kernel.cu"])
else:
    library = CppExtension("own_project._C", ["csrc/swish.cpp"])

setup(packages=["own_project"], ext_modules=[library], cmdclass={"build_ext": BuildExtension})
