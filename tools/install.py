"""Install this project and its extras into this environment: ``.venv/bin/python tools/install.py '.[dev]'``.

uv takes a fraction of pip's time. It looks for packages where pip is told to look; where it is missing, fails, or would
have to leave out one of pip's settings, pip installs. Versions are those of requirements.lock, which ``make lock`` renews;
where they cannot be installed, this is reported and constraints.txt alone decides.
"""

import compileall
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from ast import literal_eval
from collections.abc import Iterable
from pathlib import Path

ENVIRONMENT = Path(sys.prefix)
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")
UV = ENVIRONMENT / "bin/uv"
NAMES = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "cert": "SSL_CERT_FILE",
    "trusted-host": "UV_INSECURE_HOST",
    "proxy": "ALL_PROXY",
    "default-timeout": "UV_HTTP_TIMEOUT",
    "timeout": "UV_HTTP_TIMEOUT",
}
"""What uv calls a setting of pip."""
NOT_NEEDED = {"disable-pip-version-check", "no-cache-dir", "cache-dir", "quiet", "verbose", "progress-bar", "retries",
              "root-user-action", "no-input", "no-color", "no-compile", "prefer-binary"}  # fmt: skip

LOCKED = (".", ".[dev]")
"""What requirements.lock was made for; other extras, as vLLM, need other versions of the same packages."""
LIBRARY_APART = ("soundfile",)
"""Modules that have one wheel with their library and one without. Of several indexes that have a version uv takes the first
one's wheel, pip the one that fits the machine best."""


def settings_of_pip() -> str:
    """What pip's files and variables say."""
    return subprocess.run([*PIP, "config", "list"], stdout=subprocess.PIPE, text=True, check=True).stdout


def settings_for_uv(listed: str) -> dict[str, str] | None:
    """The settings of pip as uv's variables; None where uv has no such setting.

    Lines are ``global.index-url='https://…'``; what the environment says is stronger than what files say.
    """
    lines = [line.partition("=") for line in listed.splitlines() if "=" in line]
    strength = {"global": 0, "install": 1, ":env:": 2}
    found: dict[str, tuple[int, str]] = {}
    for name, _, value in lines:
        section, _, key = name.rpartition(".")
        if section not in strength or key in NOT_NEEDED:
            continue
        if key not in NAMES:
            return None
        found[key] = max(found.get(key, (-1, "")), (strength[section], literal_eval(value)))
    separator = {"find-links": ","}
    settings = {NAMES[key]: separator.get(key, " ").join(value.split()) for key, (_, value) in found.items()}
    # As pip does: the best version of all indexes, not the best of the first that has any.
    return settings | {"UV_INDEX_STRATEGY": "unsafe-best-match"}


def with_uv(what: str, versions: str) -> bool:
    """Whether uv installed it, with the versions of a file."""
    settings = settings_for_uv(settings_of_pip())
    if settings is None or not (UV.exists() or _done([*PIP, "install", "--quiet", "uv"])):
        return False
    kept = os.environ.get("UV_CACHE_DIR")  # by who makes several environments: what they share is unpacked once
    cache = Path(kept) if kept else ENVIRONMENT / "uv_cache"  # beside what is installed: files are linked, not copied
    command = [str(UV), "pip", "install", "--quiet", "--python", sys.executable, "-c", versions, "-e", what]
    try:
        return _done(command, settings | os.environ | {"UV_CACHE_DIR": str(cache)})
    finally:
        if not kept:
            shutil.rmtree(cache, ignore_errors=True)


def with_pip(what: str, versions: str) -> bool:
    """Whether pip installed it, with the versions of a file."""
    return _done([*PIP, "install", "--quiet", "--no-compile", "-c", versions, "-e", what])


def unloadable(names: Iterable[str]) -> list[str]:
    """Those of these modules that are installed and cannot be imported."""
    return [name for name in names if _found(name) and not _done([sys.executable, "-c", f"import {name}"], quiet=True)]


def mend_torchvision(packages: Path) -> bool:
    """Let every Python process that finds packages here import torchvision, also one that was built for another torch.

    So stock transformers works in this environment. Returns whether that was needed; a pair that fits is left alone.
    """
    module, imported = packages / "sensorium_torchvision.py", packages / "sensorium_torchvision.pth"
    for file in (imported, module):
        file.unlink(missing_ok=True)
    if not unloadable(["torchvision"]):
        return False
    shutil.copyfile("src/sensorium/models/torchvision_fix.py", module)
    imported.write_text("import sensorium_torchvision\n")
    return True


def main(what: str) -> int:
    """Install by uv, or else by pip."""
    code = _installed(what)
    if code == 0:
        packages = Path(sysconfig.get_paths()["purelib"])
        mend_torchvision(packages)
        compile_packages(packages, Path("src"))
    return code


def compile_packages(*folders: Path) -> bool:
    """Compile what is installed where Python may not write bytecode: else every command would compile torch again."""
    if not os.environ.get("PYTHONDONTWRITEBYTECODE"):
        return False
    print("compiling the installed packages, since PYTHONDONTWRITEBYTECODE is set (a minute or two)", flush=True)
    for folder in folders:
        compileall.compile_dir(str(folder), quiet=2, workers=0)  # files that no Python compiles are left as they are
    return True


def _installed(what: str) -> int:
    files = ("requirements.lock", "constraints.txt") if what in LOCKED else ("constraints.txt",)
    for install in (with_uv, with_pip):
        for versions in files:
            if install(what, versions):
                broken = unloadable(LIBRARY_APART) if install is with_uv else []
                return (
                    0 if not broken or _done([*PIP, "install", "--quiet", "--force-reinstall", "--no-deps", *broken]) else 1
                )
            print(f"{install.__name__[5:]} cannot install it here with the versions of {versions}", flush=True)
    return 1


def _done(command: list[str], environment: dict[str, str] | None = None, *, quiet: bool = False) -> bool:
    heard = subprocess.DEVNULL if quiet else None
    return subprocess.run(command, env=environment, stdout=heard, stderr=heard, check=False).returncode == 0


def _found(name: str) -> bool:
    importlib.invalidate_caches()
    return importlib.util.find_spec(name) is not None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
