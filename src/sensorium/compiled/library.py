"""C sources of this package, compiled when they are first needed, for the processor at hand, and kept in the user's cache.

A kept library is named by a hash of all that it was made from: sources, flags, compiler, processor (see ``kept_files``).
"""

import ctypes
import hashlib
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path

from sensorium.compiled.compile_time import compiling
from sensorium.compiled.kept_files import cache_folder, keep, read_kept

SOURCES = Path(__file__).parent / "c"
FLAGS = ("-std=gnu11", "-O3", "-fno-math-errno", "-ffp-contract=fast", "-Wno-psabi", "-pthread", "-shared", "-fPIC")
COMPILERS = ("cc", "gcc", "clang")
PATIENCE_S, VERSION_PATIENCE_S = 120.0, 20.0
EXPLAINED = 300  # characters of what a compiler says


class NoLibrary(Exception):
    """Why there is no compiled library; what it computes has another way."""


class CompilerRefused(NoLibrary):
    """The compiler ended with an error."""


def load_library(folder: Path = SOURCES) -> ctypes.CDLL:
    """The C files of a folder as a library. Raises NoLibrary, and after that at once: nothing is tried twice."""
    found = _tried(folder)
    if isinstance(found, str):
        raise NoLibrary(found)
    return found


@cache
def _tried(folder: Path) -> ctypes.CDLL | str:
    """The library, or why there is none."""
    try:
        return _loaded(folder)
    except NoLibrary as error:
        return str(error)
    except OSError as error:  # no folder to compile in, or it is full
        return f"the C sources were not compiled ({error})"


def _loaded(folder: Path) -> ctypes.CDLL:
    compiler, version = _compiler()
    name = _name(folder, compiler, version)
    kept = cache_folder() / name
    if read_kept(kept) is not None:
        with suppress(OSError):  # of a system that loads no files from there
            return ctypes.CDLL(str(kept))
    with tempfile.TemporaryDirectory() as scratch:
        made = Path(scratch) / name
        with compiling():
            _compile(folder, compiler, made)
        keep(made.read_bytes(), kept)
        try:
            return ctypes.CDLL(str(made))
        except OSError as error:
            if read_kept(kept) is not None:
                with suppress(OSError):  # temporary files may not be executed, those of the home folder may
                    return ctypes.CDLL(str(kept))
            raise NoLibrary(f"what {shlex.join(compiler)} compiled cannot be loaded ({error})") from error


def compiler_name() -> str:
    """The first line of what the C compiler says of itself, or that there is none."""
    try:
        return _compiler()[1].partition("\n")[0]
    except NoLibrary:
        return "no C compiler"


def _compiler() -> tuple[tuple[str, ...], str]:
    """The command of a C compiler, and what it says of itself."""
    given = os.environ.get("CC")
    try:
        commands = [shlex.split(given)] if given else [[name] for name in COMPILERS]
    except ValueError as error:
        raise NoLibrary(f"the environment variable CC is no command: {error} ({given})") from error
    for command in commands:
        if command and shutil.which(command[0]):
            return tuple(command), _version_of(tuple(command))
    if given:
        raise NoLibrary(
            f"the environment variable CC names a C compiler that is not there ({given}); unset it to use another"
        )
    raise NoLibrary(f"no C compiler was found ({', '.join(COMPILERS)})")


@cache
def _version_of(compiler: tuple[str, ...]) -> str:
    return _run([*compiler, "--version"], VERSION_PATIENCE_S)


def _name(folder: Path, compiler: tuple[str, ...], version: str) -> str:
    digest = hashlib.sha256()
    sources = [file.read_bytes() for file in sorted(folder.glob("*.[ch]"))]
    for part in (*sources, *(repr(known).encode() for known in (FLAGS, _native(), compiler, version, _processor()))):
        digest.update(hashlib.sha256(part).digest())
    return f"{folder.parent.name}-{digest.hexdigest()[:32]}.so"


def _native() -> str:
    """The flag that has a compiler use all that this processor can do."""
    return "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native"


def _processor() -> str:
    """What tells this kind of processor from others that a home folder may be shared with."""
    try:
        told = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
    except OSError:
        return f"{platform.machine()} {platform.processor()} {platform.node()}"
    kinds = r"^(?:vendor_id|cpu family|model|model name|stepping|flags|Features|CPU \w+)\s*:.*$"
    return platform.machine() + "\n".join(re.findall(kinds, told, re.MULTILINE))


def _compile(folder: Path, compiler: tuple[str, ...], made: Path) -> None:
    sources = [str(file) for file in sorted(folder.glob("*.c"))]
    common = [*FLAGS, "-o", str(made), *sources, "-lm"]
    try:
        _run([*compiler, _native(), *common], PATIENCE_S)
    except CompilerRefused:
        _run(
            [*compiler, *common], PATIENCE_S
        )  # the compiler may not know the processor; whatever else is wrong is said now


def _run(command: list[str], patience_s: float) -> str:
    try:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace", start_new_session=True
        )
    except OSError as error:
        raise NoLibrary(f"the C compiler {command[0]} did not run ({error})") from error
    with process:
        try:
            said, complained = process.communicate(timeout=patience_s)
        except BaseException as error:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with all that it started
            if isinstance(error, subprocess.TimeoutExpired):
                raise NoLibrary(f"the C compiler {command[0]} did not end within {patience_s:g} s") from None
            raise
    if process.returncode:
        told = (complained.strip() or said.strip() or "it said nothing")[:EXPLAINED]
        raise CompilerRefused(f"the C compiler {command[0]} ended with {process.returncode}: {told}")
    return said
