import os

import numpy
from setuptools import setup
from torch.utils.cpp_extension import BuildExtension, CppExtension

library = CppExtension(
    "sample._C",
    ["sample.cpp"],
    include_dirs=[numpy.get_include()],
    define_macros=[("ANSWER", os.environ["ANSWER"])],
)
setup(ext_modules=[library], cmdclass={"build_ext": BuildExtension})
