"""Install this project and its extras into .venv: ``python tools/install.py '.[dev]'``.

uv takes a fraction of pip's time. It looks for packages where pip is told to look; where it is missing, fails, or would
have to leave out one of pip's settings, pip installs.
"""

import os
import shutil
import subprocess
import sys
from ast import literal_eval
from pathlib import Path

ENVIRONMENT = Path(".venv")
PIP = (str(ENVIRONMENT / "bin/python"), "-m", "pip", "--disable-pip-version-check")
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


def settings_for_uv(listed: str) -> dict[str, str] | None:
    """What ``pip config list`` says, as uv's variables; None where uv has no such setting.

    Lines are ``global.index-url='https://…'``, weakest first: global, then of the command, then of the environment.
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


def with_uv(what: str) -> bool:
    """Whether uv installed it."""
    listed = subprocess.run([*PIP, "config", "list"], capture_output=True, text=True, check=False)
    settings = settings_for_uv(listed.stdout)
    if listed.returncode or settings is None:
        return False
    if (
        not UV.exists()
        and subprocess.run([*PIP, "install", "--quiet", "uv"], stderr=subprocess.DEVNULL, check=False).returncode
    ):
        return False
    cache = ENVIRONMENT / "uv_cache"  # beside what is installed: files are linked, not copied
    command = [UV, "pip", "install", "--quiet", "--python", ENVIRONMENT / "bin/python", "-c", "constraints.txt", "-e", what]
    try:
        done = subprocess.run(command, env=settings | os.environ | {"UV_CACHE_DIR": str(cache)}, check=False)
        return done.returncode == 0
    finally:
        shutil.rmtree(cache, ignore_errors=True)


if __name__ == "__main__":
    if not with_uv(sys.argv[1]):
        print("uv cannot install it here; pip does, which takes a minute longer", flush=True)
        sys.exit(
            subprocess.run(
                [*PIP, "install", "--quiet", "--no-compile", "-c", "constraints.txt", "-e", sys.argv[1]], check=False
            ).returncode
        )
