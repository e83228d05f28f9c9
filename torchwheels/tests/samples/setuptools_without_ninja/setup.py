from setuptools import setup
from torch.utils.cpp_extension import BuildExtension, CppExtension

NAMES = ("first", "second")

setup(
    name="sample",
    version="0.1",
    packages=["sample"],
    install_requires=["torch"],
    ext_modules=[
        CppExtension(
            f"sample._{name}",
            [f"{name}.cpp", "answer.cpp"],
            define_macros=[("ANSWER", {"first": 42, "second": 43}[name])],
            include_dirs=["."],
        )
        for name in NAMES
    ],
    cmdclass={"build_ext": BuildExtension.with_options(use_ninja=False, no_python_abi_suffix=True)},
)
