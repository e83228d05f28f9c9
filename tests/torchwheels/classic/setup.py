"""A classic extension, as most are: the metadata imports torch, CUDA is built where it is found."""

import os

import torch
from setuptools import setup
from torch.utils import cpp_extension

FLAGS = ["-O1", f"-DSENTENCE={os.environ.get('SENTENCE', 'plain')}"]
EXTENSIONS = [
    cpp_extension.CppExtension("classic_extension._cpu", ["csrc/cpu.cpp"], extra_compile_args=FLAGS)
]
if torch.cuda.is_available() and cpp_extension.CUDA_HOME:
    EXTENSIONS.append(cpp_extension.CUDAExtension("classic_extension._cuda", ["csrc/cuda.cu"]))

setup(
    name="classic-extension",
    version="1.2",
    packages=["classic_extension"],
    install_requires=["torch"],
    ext_modules=EXTENSIONS,
    cmdclass={"build_ext": cpp_extension.BuildExtension},
)
