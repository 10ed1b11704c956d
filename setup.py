"""The native kernels; everything else about the package is in pyproject.toml."""

from glob import glob
from pathlib import Path
from runpy import run_path
from tempfile import TemporaryDirectory

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError, LinkError

FOLDER = "src/prefold/kernels"
OPENMP = "-fopenmp"

digest = run_path(f"{FOLDER}/sources.py")["digest"]


class BuildKernels(build_ext):
    """With threads where the compiler has OpenMP; without, kernels run on one."""

    def build_extensions(self) -> None:
        # A header of its own: as an option it would make every file a new one to a compiler cache.
        headers = Path(self.build_temp, "generated")
        headers.mkdir(parents=True, exist_ok=True)
        (headers / "prefold_sources.h").write_text(f'#define PREFOLD_SOURCES "{digest(Path(FOLDER))}"\n')
        for extension in self.extensions:
            extension.include_dirs.append(str(headers))
        if self._has_openmp():
            for extension in self.extensions:
                extension.extra_compile_args.append(OPENMP)
                extension.extra_link_args.append(OPENMP)
        super().build_extensions()

    def _has_openmp(self) -> bool:
        with TemporaryDirectory() as folder:
            source = Path(folder, "probe.cpp")
            source.write_text("#include <omp.h>\nint threads() { return omp_get_max_threads(); }\n")
            try:
                objects = self.compiler.compile([str(source)], output_dir=folder, extra_postargs=[OPENMP])
                self.compiler.link_shared_object(
                    objects, str(source.with_suffix(".so")), extra_postargs=[OPENMP]
                )
            except (CompileError, LinkError):
                return False
        return True


setup(
    cmdclass={"build_ext": BuildKernels},
    ext_modules=[
        Extension(
            "prefold.kernels._native",
            sorted(glob(f"{FOLDER}/*.cpp")),
            depends=sorted(glob(f"{FOLDER}/*.h") + glob(f"{FOLDER}/*.inl")),
            extra_compile_args=["-O3", "-std=c++17", "-g0", "-Wno-psabi", "-Wno-maybe-uninitialized"],
            # Without a C++ compiler the package installs all the same, and torch does the work.
            optional=True,
        )
    ],
)
