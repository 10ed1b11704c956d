"""The native kernels; everything else about the package is in pyproject.toml."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "prefold.kernels._bf16",
            ["src/prefold/kernels/bf16.cpp"],
            extra_compile_args=["-O3", "-std=c++17", "-Wno-psabi"],
            # Without a C++ compiler the package installs all the same, and torch does the work.
            optional=True,
        )
    ]
)
