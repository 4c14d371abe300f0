"""What pyproject.toml cannot say: the native library is built against the headers that jaxlib ships.

It is optional: without a C++ compiler the package installs without it, and CPU servers do the same on XLA.
"""

import sys
from pathlib import Path

import jaxlib
from setuptools import Extension, setup

EXTENSION = Extension(
    "engine.native._native",
    sources=["engine/native/native.cc"],
    depends=["engine/native/kernels.inc"],
    include_dirs=[str(Path(jaxlib.__file__).parent / "include")],
    extra_compile_args=["-std=c++17", "-O3", "-g0"],
    language="c++",
    py_limited_api=True,  # it is no Python module: one file serves all versions
    optional=True,
)

setup(ext_modules=[EXTENSION] if sys.platform != "win32" else [])
