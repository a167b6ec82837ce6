"""What the installation builds: the native kernels, where there is a C++ compiler, and the manual page.

Everything else is in pyproject.toml; the build of the kernels is kernels/cpu/build.py, the page docs/manual.py.
"""

import importlib.util
import os
import re
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
FOLDER = Path("kernels", "cpu")
#: If this is set, as for images and releases, an installation without the native kernels fails, and they fit machines
#: whose torch has another OpenMP runtime than this one's.
REQUIRED = "AIAKQ_REQUIRE_NATIVE"


def load(name, path):
    """Import a script of the source tree, of which nothing is installed yet."""
    spec = importlib.util.spec_from_file_location(name, ROOT / path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


native = load("aiakq_native_build", FOLDER / "build.py")
manual = load("aiakq_manual", Path("docs", "manual.py"))
manual.PAGE.write_text(manual.manual_page(), encoding="utf-8")


class BuildNative(build_ext):
    """Leaves the compiling to build.py; the library is no Python module and fits every version of Python."""

    def get_ext_filename(self, fullname):
        return str(Path(*fullname.split("."))) + ".so"

    def build_extension(self, ext):
        target = Path(self.get_ext_fullpath(ext.name))
        try:
            native.build(target, native.objects_folder(), link_openmp=not os.environ.get(REQUIRED))
        except (native.BuildError, OSError) as problem:
            if os.environ.get(REQUIRED):
                raise SystemExit(f"{REQUIRED} is set, and the native CPU kernels cannot be built: {problem}") from None
            # An older one in its place would be installed as if it were of these sources.
            target.unlink(missing_ok=True)
            self.warn(
                f"aiakq is installed without its native CPU kernels: {problem}. It runs through torch instead, several "
                f"times slower; with a compiler there, install again or run '{native.COMMAND}'."
            )


class AnyPython(bdist_wheel):
    """A wheel for this platform and every Python 3."""

    def get_tag(self):
        return "py3", "none", super().get_tag()[2]


def readme() -> str:
    """README.md for a package index, where its links to files of the repository would lead nowhere."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return re.sub(r"\[([^\]]+)\]\((?!https?:)[^)]*\)", r"\1", text)


setup(
    long_description=readme(),
    long_description_content_type="text/markdown",
    ext_modules=[
        Extension(
            "aiakq.kernels.cpu._native",
            sources=[str(path) for path in sorted(FOLDER.glob("src/*.cpp"))],
            depends=[str(path) for path in sorted(FOLDER.glob("src/*.h"))],
            optional=True,
        )
    ],
    cmdclass={"build_ext": BuildNative, "bdist_wheel": AnyPython},
)
