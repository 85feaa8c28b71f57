"""A checkpoint of the Hugging Face hub, as a folder of the hub's cache.

The cache is where ``HF_HOME`` or ``HF_HUB_CACHE`` say. What it lacks is fetched, unless ``HF_HUB_OFFLINE`` forbids it.
"""

import json
from pathlib import Path

from sensorium.models.weight_files import INDEX, SINGLE

SMALL_FILES = ("*.json", "*.txt", "*.jinja", "*.model", "LICENSE*", "spk_dict.pt")
"""What stands beside the weights; the last one is Qwen2.5-Omni's table of voices, which exports carry along."""


class NotFetched(Exception):
    """A checkpoint cannot be had from the hub or its cache; the message says why in one sentence, without a stop."""


def fetch_small_files(name: str, revision: str) -> Path:
    """The folder of a hub id at a branch, tag or commit (none: the main branch), with all but its weights."""
    return _fetch(name, revision, SMALL_FILES)


def fetch_weights(name: str, folder: Path) -> Path:
    """The same with its weights, of the same commit, though the branch may have moved on."""
    return folder if has_weights(folder) else _fetch(name, folder.name, _weight_names(folder))


def has_weights(folder: Path) -> bool:
    """Whether a folder of the cache has the weight files that its small files name."""
    return all((folder / name).is_file() for name in _weight_names(folder))


def cached_commit(name: str, revision: str) -> str | None:
    """The commit of the files in the cache that a hub id at a revision stands for; None if it is not there."""
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(name, "config.json", revision=revision or None)
    return Path(cached).parent.name if isinstance(cached, str) else None


def _fetch(name: str, revision: str, patterns: tuple[str, ...]) -> Path:
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        # A commit is looked for in the cache alone only if that is said here; a branch is even without.
        offline = bool(constants.HF_HUB_OFFLINE)
        return Path(
            snapshot_download(name, revision=revision or None, allow_patterns=list(patterns), local_files_only=offline)
        )
    except (OSError, ValueError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        at = f" at revision '{revision}'" if revision else ""
        if constants.HF_HUB_OFFLINE:
            reason = f"HF_HUB_OFFLINE is set and the cache {constants.HF_HUB_CACHE} does not have it{at}"
        elif isinstance(error, LocalEntryNotFoundError):  # the hub does not answer, which is said last
            reason = (
                f"the hub cannot be reached from here ({reason.removeprefix('Got: ')}), and its cache "
                f"{constants.HF_HUB_CACHE} does not have it. Without a network, bring the checkpoint onto this machine and "
                "give its folder, or fill the cache where there is one"
            )
        raise NotFetched(f"it is no folder here ('{Path.cwd()}'), and not to be had as a hub id{at}: {reason}") from error


def _weight_names(folder: Path) -> tuple[str, ...]:
    """The weight files that the small files name; a damaged index is refused later, by name."""
    try:
        return tuple(sorted(set(json.loads((folder / INDEX).read_bytes())["weight_map"].values())))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return (SINGLE,)
