"""Builds the native library: plain C functions behind an empty module, by g++ alone; the rest is in pyproject.toml."""

import os
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

SOURCES = sorted(str(path) for path in Path("csrc").glob("*.cpp"))
FLAGS = ["-std=c++17", "-O3", "-pthread", "-fvisibility=hidden", "-Wall", "-Wextra", "-Wno-psabi"]
# No contraction and no traps: results must have the same bits at every instruction set (csrc/kernels.h).
FLAGS += ["-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off"]


def sanitizer(wanted: str) -> list[str]:
    """What a build for ThreadSanitizer needs; it goes to a directory of its own (tests/hurt/test_races.py), never in
    place: Python alone cannot load it."""
    if wanted not in ("", "thread"):
        raise ValueError(f"OFFLOADZ_SANITIZE is {wanted!r}; it must be thread, or unset for the usual build")
    return ["-fsanitize=thread", "-g"] if wanted else []


SANITIZER = sanitizer(os.environ.get("OFFLOADZ_SANITIZE", ""))


class QuickBuild(build_ext):
    """Compiles the files side by side: they are few and independent, and a build takes half the time."""

    def build_extension(self, ext: Extension) -> None:
        from concurrent.futures import ThreadPoolExecutor

        compile_all = self.compiler.compile

        def compile_together(sources, *args, **kwargs):  # type: ignore[no-untyped-def]
            with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
                parts = pool.map(lambda source: compile_all([source], *args, **kwargs), sources)
            return [name for part in parts for name in part]

        self.compiler.compile = compile_together
        super().build_extension(ext)


setup(
    ext_modules=[
        Extension(
            "offloadz._native",
            sources=SOURCES,
            depends=sorted(str(path) for path in Path("csrc").glob("*.[hi]*")),
            language="c++",
            extra_compile_args=FLAGS + SANITIZER,
            extra_link_args=["-pthread", *SANITIZER],
        )
    ],
    cmdclass={"build_ext": QuickBuild},
)
