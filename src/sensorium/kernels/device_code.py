"""CUDA sources of this package, compiled for the GPU at hand when they are first needed, and kept in the user's cache.

The compiler is NVRTC, which comes with torch; the driver loads and launches what it gives.

A file of the cache is named by a hash of all that its code was made from. Behind the code in it stands the SHA-256 of its
bytes, so that a file that was cut off or changed is not used. Processes that compile at the same time write to files of
their own; the last one to be renamed stays, and they are alike.
"""

import ctypes
import hashlib
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from ctypes import (
    POINTER,
    Structure,
    addressof,
    byref,
    c_char,
    c_int,
    c_size_t,
    c_uint,
    c_void_p,
    create_string_buffer,
    pointer,
)
from functools import cache
from itertools import chain
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from sensorium.kernels.first_use import compiling

SOURCES = Path(__file__).parent / "cuda"
DIGEST_BYTES = hashlib.sha256().digest_size
EXPLAINED = 300  # characters of what the compiler says
MAX_SHARED_BYTES, AHEAD = 8, 6  # attributes in the driver's numbering: of a function, of a launch


class NoDeviceCode(Exception):
    """Why there is no compiled code for the GPU; what it computes has another way."""


class _Attribute(Structure):
    _fields_: ClassVar = [("kind", c_int), ("padding", c_int), ("value", c_int), ("rest", c_char * 60)]


class _Launch(Structure):
    _fields_: ClassVar = [
        *((f"{what}_{axis}", c_uint) for what in ("grid", "block") for axis in "xyz"),
        ("shared_bytes", c_uint), ("stream", c_void_p), ("attributes", POINTER(_Attribute)), ("count", c_uint),
    ]  # fmt: skip


def pointers(names: str) -> list[tuple[str, type]]:
    """Fields of a structure that hold a tensor's address, or NULL."""
    return [(name, c_void_p) for name in names.split()]


def addresses(*tensors: Tensor | None) -> tuple[int | None, ...]:
    """Where tensors lie; they must be contiguous, and outlive the launch."""
    return tuple(None if tensor is None else tensor.data_ptr() for tensor in tensors)


class DeviceCode:
    """The kernels of one source, compiled with some numbers defined, on the current device."""

    def __init__(self, source: str, numbers: Mapping[str, int]) -> None:
        self._module = c_void_p()
        self._image = create_string_buffer(_compiled(SOURCES / source, tuple(sorted(numbers.items())), _architecture()))
        _call("cuModuleLoadData", byref(self._module), self._image)

    def kernel(self, name: str, shared_bytes: int = 0) -> c_void_p:
        """A kernel by its name, that may be launched with so much shared memory."""
        function = c_void_p()
        _call("cuModuleGetFunction", byref(function), self._module, name.encode())
        if shared_bytes:
            _call("cuFuncSetAttribute", function, c_int(MAX_SHARED_BYTES), c_int(shared_bytes))
        return function


def launch(kernel: c_void_p, blocks: int, threads: int, given: Structure, shared_bytes: int = 0) -> None:
    """Launch a kernel that takes one structure, on torch's current stream, while the kernel before it ends.

    The kernel itself waits for that one before it reads anything.
    """
    ahead = _Attribute(AHEAD, 0, 1)
    settings = _Launch(
        blocks, 1, 1, threads, 1, 1, shared_bytes, torch.cuda.current_stream().cuda_stream, pointer(ahead), 1
    )
    _call("cuLaunchKernelEx", byref(settings), kernel, (c_void_p * 1)(addressof(given)), None)


def _architecture() -> str:
    major, minor = torch.cuda.get_device_capability()
    return f"sm_{major}{minor}"


@cache
def _compiled(source: Path, numbers: tuple[tuple[str, int], ...], architecture: str) -> bytes:
    """Code for one kind of GPU: from the cache, or from the compiler."""
    text = source.read_bytes()
    options = [f"--gpu-architecture={architecture}", "--std=c++17", *(f"-D{name}={value}" for name, value in numbers)]
    compiler = _nvrtc()
    version = (c_int(), c_int())
    compiler.nvrtcVersion(byref(version[0]), byref(version[1]))
    made_from = (text, repr((options, [part.value for part in version])).encode())
    digest = hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in made_from)).hexdigest()
    kept = cache_folder() / f"{source.stem}-{digest[:32]}.cubin"
    code = read_kept(kept)
    if code is None:
        with compiling():
            code = _compile(compiler, text, source.name, options)
        keep(code, kept)
    return code


def cache_folder() -> Path:
    """Where this user's compiled code is kept. Links are resolved: one that is switched later leads nowhere else."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    try:
        return ((Path(given) if os.path.isabs(given) else Path("~/.cache").expanduser()) / "sensorium").resolve()
    except RuntimeError:  # a user without a home folder, as in some containers
        return Path(os.devnull) / "sensorium"  # where nothing is kept


def read_kept(file: Path) -> bytes | None:
    """The code in a file, if it is whole and nobody but this user or root could have written it: what it holds is run.

    The folder and the file that are checked are those that are read, even where a link on the way is switched meanwhile.
    """
    try:
        folder = os.open(file.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            descriptor = os.open(file.name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
            with os.fdopen(descriptor, "rb") as opened:
                trusted = _only_ours(os.fstat(folder)) and _only_ours(os.fstat(descriptor))
                content = opened.read() if trusted else b""
        finally:
            os.close(folder)
    except OSError:
        return None
    code, digest = content[:-DIGEST_BYTES], content[-DIGEST_BYTES:]
    return code if hashlib.sha256(code).digest() == digest else None


def keep(code: bytes, file: Path) -> None:
    """A copy for later processes, where the cache folder is this user's; they compile it themselves otherwise."""
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        if not _only_ours(file.parent.stat()):
            return
        with tempfile.TemporaryDirectory(dir=file.parent) as own:
            whole = Path(own) / file.name
            whole.write_bytes(code + hashlib.sha256(code).digest())
            os.replace(whole, file)


def _only_ours(seen: os.stat_result) -> bool:
    return seen.st_uid in (0, os.geteuid()) and not seen.st_mode & 0o002


def _compile(compiler: ctypes.CDLL, text: bytes, name: str, options: list[str]) -> bytes:
    program = c_void_p()
    given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    if compiler.nvrtcCreateProgram(byref(program), text, name.encode(), 0, None, None):
        raise NoDeviceCode("NVRTC did not take the source")
    try:
        if compiler.nvrtcCompileProgram(program, len(options), given):
            said = _told(compiler.nvrtcGetProgramLogSize, compiler.nvrtcGetProgramLog, program)
            text_said = said.rstrip(b"\0").decode(errors="replace").strip()
            raise NoDeviceCode(f"NVRTC did not compile {name}: {text_said[:EXPLAINED]}")
        return _told(compiler.nvrtcGetCUBINSize, compiler.nvrtcGetCUBIN, program)
    finally:
        compiler.nvrtcDestroyProgram(byref(program))


def _told(size_of: Callable[..., int], content_of: Callable[..., int], program: c_void_p) -> bytes:
    size = c_size_t()
    size_of(program, byref(size))
    content = create_string_buffer(size.value)
    content_of(program, content)
    return content.raw


@cache
def _nvrtc() -> ctypes.CDLL:
    """The compiler, from torch's own folder or from the packages that torch requires."""
    beside = [Path(torch.__file__).parent / "lib"]
    packages = (Path(folder).glob("nvidia/*/lib") for folder in sys.path if folder)
    for file in chain.from_iterable(sorted(folder.glob("libnvrtc*.so*")) for folder in (*beside, *chain(*packages))):
        if "builtins" in file.name or ".alt." in file.name:
            continue
        try:
            return ctypes.CDLL(str(file))
        except OSError:
            continue  # of another CUDA than torch's, say
    try:
        return ctypes.CDLL("libnvrtc.so")
    except OSError as error:
        raise NoDeviceCode(f"NVRTC, the compiler that comes with torch, was not found ({error})") from error


@cache
def _driver() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise NoDeviceCode(f"the driver's library was not found ({error})") from error


def _call(name: str, *given: object) -> None:
    """Call the driver. What it refuses is told by its name for it."""
    status = getattr(_driver(), name)(*given)
    if status:
        told = ctypes.c_char_p()
        _driver().cuGetErrorName(status, byref(told))
        raise NoDeviceCode(f"{name} of the driver gave {(told.value or b'an error').decode()}")
