"""The native kernels; everything else about the package is in pyproject.toml."""

from glob import glob

from setuptools import Extension, setup

FOLDER = "src/prefold/kernels"

setup(
    ext_modules=[
        Extension(
            "prefold.kernels._native",
            sorted(glob(f"{FOLDER}/*.cpp")),
            depends=sorted(glob(f"{FOLDER}/*.h") + glob(f"{FOLDER}/*.inl")),
            extra_compile_args=["-O3", "-std=c++17", "-Wno-psabi", "-Wno-maybe-uninitialized"],
            # Without a C++ compiler the package installs all the same, and torch does the work.
            optional=True,
        )
    ]
)
