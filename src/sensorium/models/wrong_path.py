"""What to say of a model path that leads nowhere: what it was taken for, what is there instead, and the nearest name."""

import re
from collections.abc import Iterator
from difflib import get_close_matches
from importlib.resources import files
from pathlib import Path

from sensorium.recipe.tiny_sizes import KINDS

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
FORMS = "model.path is a folder, a hub id (owner/name), package:NAME or tiny:FAMILY."
SHOWN = 12
"""Names of a folder that are listed."""


def may_be_hub_id(path: str) -> bool:
    """Whether a path that is no folder may be one of the hub's: ``owner/name``, and no folder here is called ``owner``."""
    local = path.startswith((".", "~")) or Path(path).parent.is_dir()
    return HUB_ID.fullmatch(path) is not None and not local


def nowhere(path: str) -> str:
    """Why a path that is neither a folder nor a hub id means nothing, and what may be meant."""
    folder = Path(path).expanduser()
    if folder.is_file():
        return f"it is a file, and a checkpoint is a folder; give '{folder.parent}'. {FORMS}"
    if folder.is_absolute() or "/" in path:
        return f"there is no such folder{_in_parent(folder)}"
    close = _close(path, {_plain(name): name for name in candidates()})
    hint = f"; did you mean '{close}'?" if close else "."
    return f"there is no such folder in '{Path.cwd()}', and a hub id has an owner (owner/name){hint} {FORMS}"


def near_to_hub_id(path: str) -> str:
    """The folder here whose name a hub id nearly has: ``; did you mean 'models/Qwen3-VL'?``, or nothing."""
    close = _close(path.partition("/")[2], {_plain(name): name for name in _checkpoints_here()})
    return f"; did you mean '{close}'?" if close else ""


def candidates() -> Iterator[str]:
    """What is here by name: models that are made or shipped, and folders."""
    yield from (f"tiny:{family}" for family in KINDS)
    yield from (f"package:{entry.parent.name}" for entry in shipped_models().glob("*/config.json"))
    yield from _checkpoints_here()


def _checkpoints_here() -> Iterator[str]:
    """Folders of the working directory, and checkpoints one folder below."""
    here = Path.cwd()
    yield from (path.name for path in _folders(here))
    yield from (str(path.parent.relative_to(here)) for path in here.glob("*/*/config.json"))


def shipped_models() -> Path:
    """Where the models are that come with the package."""
    return Path(str(files("sensorium"))) / "assets"


def _in_parent(folder: Path) -> str:
    """What the nearest folder above holds that is there, and which of it is nearly the right name."""
    parent, missing = folder.parent, folder
    while not parent.is_dir():
        parent, missing = parent.parent, parent
    names = [path.name for path in _folders(parent)]
    close = _close(missing.name, {_plain(name): name for name in names})
    hint = f"; did you mean '{parent / close}'?" if close else "."
    holds = ", ".join(names[:SHOWN]) + (", …" if len(names) > SHOWN else "")
    at = f" '{parent.resolve()}' is the nearest folder that is there, and it holds"
    return f"{hint}{at} {f'the folders {holds}' if names else 'no folders'}."


def _folders(place: Path) -> list[Path]:
    try:
        return sorted(path for path in place.iterdir() if path.is_dir() and not path.name.startswith("."))
    except OSError:
        return []


def _close(name: str, known: dict[str, str]) -> str:
    found = get_close_matches(_plain(name), known, n=1, cutoff=0.6)
    return known[found[0]] if found else ""


def _plain(name: str) -> str:
    """A name as it is compared: ``tiny:qwen3_vl``, ``tiny_qwen3-vl`` and ``models/Qwen3-VL`` are near each other."""
    bare = name.rpartition(":")[2].rpartition("/")[2].lower()
    return re.sub(r"[-_. ]+", "_", re.sub(r"^(tiny|package)[-_]", "", bare))
