"""C sources of this package, compiled when they are first needed, for the processor at hand, and kept in the user's cache.

A kept library is named by a hash of all that it was made from: sources, flags, compiler, processor. Behind it in the file
stand the SHA-256 of its bytes, so that one that was cut off or changed is not loaded but compiled again. Processes that
compile at the same time write to files of their own; the last one to be renamed stays, and they are alike.
"""

import ctypes
import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path

SOURCES = Path(__file__).parent / "c"
FLAGS = ("-std=gnu11", "-O3", "-fno-math-errno", "-ffp-contract=fast", "-Wno-psabi", "-pthread", "-shared", "-fPIC")
COMPILERS = ("cc", "gcc", "clang")
PATIENCE_S = 120.0
DIGEST_BYTES = hashlib.sha256().digest_size
EXPLAINED = 300  # characters of what a compiler says


class NoLibrary(Exception):
    """Why there is no compiled library; what it computes has another way."""


@cache
def load_library(folder: Path = SOURCES) -> ctypes.CDLL:
    """The C files of a folder as a library. Raises NoLibrary."""
    compiler, version = _compiler()
    name = _name(folder, compiler, version)
    kept = cache_folder() / name
    if _is_whole(kept):
        with suppress(OSError):  # of a system that loads no files from there
            return ctypes.CDLL(str(kept))
    with tempfile.TemporaryDirectory() as scratch:
        made = Path(scratch) / name
        _compile(folder, compiler, made)
        try:
            library = ctypes.CDLL(str(made))
        except OSError as error:
            raise NoLibrary(f"what {shlex.join(compiler)} compiled cannot be loaded ({error})") from error
        _keep(made, kept)
    return library


def cache_folder() -> Path:
    """Where this user's compiled libraries are kept."""
    given = os.environ.get("XDG_CACHE_HOME")
    return (Path(given) if given else Path("~/.cache").expanduser()) / "sensorium"


def compiler_name() -> str:
    """The first line of what the C compiler says of itself, or that there is none."""
    try:
        return _compiler()[1].partition("\n")[0]
    except NoLibrary:
        return "no C compiler"


def _compiler() -> tuple[tuple[str, ...], str]:
    """The command of a C compiler, and what it says of itself."""
    given = os.environ.get("CC")
    for command in [shlex.split(given)] if given else [[name] for name in COMPILERS]:
        if command and shutil.which(command[0]):
            return tuple(command), _version_of(tuple(command))
    raise NoLibrary(f"no C compiler was found ({given or ', '.join(COMPILERS)})")


@cache
def _version_of(compiler: tuple[str, ...]) -> str:
    return _run([*compiler, "--version"])


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
        _run([*compiler, _native(), *common])
    except NoLibrary:
        _run([*compiler, *common])  # the compiler may not know the processor; whatever else is wrong is said now


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoLibrary(f"the C compiler {command[0]} did not run ({error})") from error
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip())[:EXPLAINED]
        raise NoLibrary(f"the C compiler {command[0]} ended with {done.returncode}: {said}")
    return done.stdout


def _is_whole(file: Path) -> bool:
    try:
        content = file.read_bytes()
    except OSError:
        return False
    return hashlib.sha256(content[:-DIGEST_BYTES]).digest() == content[-DIGEST_BYTES:]


def _keep(made: Path, kept: Path) -> None:
    """A copy for later processes, where the cache folder can be written; they compile it themselves otherwise."""
    content = made.read_bytes()
    with suppress(OSError):
        kept.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=kept.parent) as own:
            whole = Path(own) / kept.name
            whole.write_bytes(content + hashlib.sha256(content).digest())
            os.replace(whole, kept)
