"""Tasks that are played in a named environment, one seed each, with train and test disjoint by content.

Invariant: a hash of a start's content alone decides its side, so no choice of seeds, sizes or sources can put the same
start on both sides.
"""

import hashlib
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal
from weakref import WeakKeyDictionary

from sensorium.cluster.pool import WorkerFailure, WorkerPool
from sensorium.data.media_files import read_bytes
from sensorium.data.media_store import MediaStore
from sensorium.data.mixture import stable_hash
from sensorium.recipe.registry import build, needs_a_row, resolve, wrong_options
from sensorium.vocabulary.content import Message
from sensorium.vocabulary.errors import MediaError, RecipeError, SensoriumError, TaskError, nearest
from sensorium.vocabulary.plain import attempt, words
from sensorium.vocabulary.task import EnvironmentSpec, Task

TEST_SHARE = 0.25
DEADLINE_S = 60.0  # for building the one environment that checks the options, and for a call of content_key
# Seeds in one call of the worker thread, and seconds after which the rest of them go into a further call: a call for each
# seed would take longer than most content keys do.
AT_A_TIME, ASKED_S = 50, 1.0
REPORTED_S = 10.0  # how often a search for starts reports its progress
ALIKE = 100  # seeds after which a content that never changed is taken for constant


class EnvironmentTasks:
    """``size`` starts of one environment from one side of the split; all different unless ``distinct`` is off.

    The content of a start is the environment class's ``content_key(seed, options)``. With ``split_by: seed`` it is not
    used: the sides then share no seed, but may share starts. Tasks of an environment that ``stands_for`` another
    (``remote``, ``isolated``) have that one's name, so that they are sampled alike wherever they are played.

    With ``levels``, a list of options that each replace some of ``options``, there are ``size`` starts of each, one level
    after the other (``levels`` of the source: their rows). ``category`` names the tasks in tables, before their level's
    options; by default the environment's name, or the level's options alone.
    """

    def __init__(
        self,
        environment: str,
        store: MediaStore,
        options: Mapping[str, Any] | None = None,
        split: Literal["train", "test"] = "train",
        size: int = 512,
        seed: int = 0,
        distinct: bool = True,
        split_by: Literal["content", "seed"] = "content",
        category: str = "",
        levels: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        for option, given, known in (("split", split, ["train", "test"]), ("split_by", split_by, ["content", "seed"])):
            if given not in known:
                raise RecipeError(f"environments: unknown {option} '{given}'{nearest(str(given), known)}")
        if size < 1:
            raise RecipeError(f"environments: size is {size}; a source needs at least one task.")
        self.environment, self.split, self.split_by = environment, split, split_by
        self.options = dict(options or {})
        if not all(isinstance(level, Mapping) and level for level in levels):
            raise RecipeError("environments: levels is a list of options of the environment, as in [{size: 3}, {size: 4}].")
        kind = resolve("environment", environment, "environments")
        if needs_a_row(kind):
            raise RecipeError(
                f"environments: '{environment}' plays the questions of rows and has no seeds to start from. Read the rows "
                f"with jsonl, parquet or hub, with the option environment: {{name: {environment}}}."
            )
        stands_for = bool(getattr(kind, "stands_for", False))
        self._options = [self._at_level(level, stands_for) for level in levels] or [self.options]
        for level_options in self._options:
            _check_options(environment, level_options, store)
        if split_by == "content" and not hasattr(kind, "content_key"):
            raise RecipeError(
                f"environments: '{environment}' has no content_key(seed, options), so train and test cannot be separated. "
                "Give its class one that returns the start of a seed, such as the map as text, or set split_by: seed."
            )
        self.name = str(self.options.get("environment", environment)) if stands_for else environment
        self.seeds = tuple(s for options in self._options for s in self._choose(kind, options, size, seed, distinct))
        self.size = size
        self.levels = tuple(range(n * size, (n + 1) * size) for n in range(len(levels)))
        names = [" ".join(f"{key}={value}" for key, value in level.items())[:60] for level in levels]
        self._categories = [f"{category} {name}".strip()[:80] for name in names] or [category or self.name]

    def __len__(self) -> int:
        return len(self.seeds)

    def id_of(self, index: int) -> str:
        at_level = f"level{self._level(index) + 1}-" if self.levels else ""
        return f"{self.name}-{self.split}-{at_level}{self.seeds[index]}"

    def _level(self, index: int) -> int:
        return (index if index >= 0 else index + len(self)) // self.size

    def __getitem__(self, index: int) -> Task:
        level = self._level(index)
        return Task(
            id=self.id_of(index),
            environment=EnvironmentSpec(self.environment, self._options[level], self.seeds[index]),
            metadata={
                "category": self._categories[level],
                **({"split_by": "seed"} if self.split_by == "seed" else {}),
                **({"level": level + 1} if self.levels else {}),
            },
        )

    def _at_level(self, level: Mapping[str, Any], stands_for: bool) -> dict[str, Any]:
        """The options with a level's; those of an environment that stands for another are within its own ``options``."""
        if stands_for:
            return {**self.options, "options": {**(self.options.get("options") or {}), **level}}
        return {**self.options, **level}

    def _choose(self, kind: Any, options: Mapping[str, Any], size: int, seed: int, distinct: bool) -> Iterator[int]:
        chosen = 0
        seen: set[str] = set()
        contents: set[str] = set()
        candidates = 1000 + 100 * size
        found = self._contents(kind, options, (stable_hash(f"{seed}/{nth}") % 2**31 for nth in range(candidates)))
        reported = time.monotonic()
        for nth, (candidate, content) in enumerate(found):
            contents.add(content)
            if time.monotonic() - reported >= REPORTED_S:
                reported = time.monotonic()
                print(
                    f"looking for {size} {'different ' if distinct else ''}starts of '{self.environment}' for split "
                    f"'{self.split}': {chosen} among the first {nth:,} seeds, of at most {candidates:,} …",
                    file=sys.stderr, flush=True,
                )  # fmt: skip
            if nth + 1 == ALIKE and len(contents) == 1 and (distinct or not chosen):
                raise TaskError(
                    f"environments: the content_key of '{self.environment}' is {content!r:.60} for each of the first "
                    f"{ALIKE} seeds. It must return the start of a seed, such as the map as text: it separates train and "
                    "test. If all seeds start alike and differ later, set split_by: seed."
                )
            if side(content) == self.split and not (distinct and content in seen):
                seen.add(content)
                chosen += 1
                yield candidate
                if chosen == size:
                    return
        raise self._too_few(options, candidates, size, chosen, len(contents), distinct)

    def _too_few(
        self, at: Mapping[str, Any], candidates: int, size: int, chosen: int, contents: int, distinct: bool
    ) -> TaskError:
        """The error of a search that found too few starts; advises only what helps."""
        other = "train" if self.split == "test" else "test"
        with_options = f" with {dict(at)}" if len(self._options) > 1 else ""
        begin = (
            f"environments: {candidates} seeds of '{self.environment}'{with_options} lead to {contents} different starts"
        )
        options = "options that lead to more different starts"
        by_seed = "split_by: seed (then train and test share no seed, but may share starts)"
        if not chosen:
            return TaskError(
                f"{begin}, all of them on side '{other}' of the split and none on side '{self.split}', since a hash of a "
                f"start decides its side. In the source 'environments' set {by_seed}, or {options}."
            )
        if not distinct:
            return TaskError(
                f"{begin}, and only {chosen} of the seeds are on side '{self.split}' of the split; size is {size}. Lower "
                f"size to {chosen}, or in the source 'environments' set {by_seed}, or {options}."
            )
        return TaskError(
            f"{begin}, {chosen} of them on side '{self.split}' of the split, and size is {size}. Lower size to {chosen}, "
            f"set distinct: false (then starts repeat), {by_seed}, or {options}."
        )

    def _contents(self, kind: Any, options: Mapping[str, Any], seeds: Iterator[int]) -> Iterator[tuple[int, str]]:
        """Seeds with their content. The environment's class is called in a thread, for a few seeds at a time."""
        if self.split_by == "seed":
            yield from ((seed, f"seed {seed}") for seed in seeds)
            return
        pool = WorkerPool("content_key")
        worker = pool.lease()
        try:
            few: list[int] = []
            while few := few or list(islice(seeds, AT_A_TIME)):
                found = pool.call_now(partial(_keys, kind, few, options), DEADLINE_S + ASKED_S, worker).value
                answered, few = few[: len(found)], few[len(found) :]
                for candidate, (content, error) in zip(answered, found, strict=True):
                    if isinstance(error, SensoriumError):
                        raise error
                    if error is not None:
                        raise RecipeError(
                            f"environments: the content_key of '{self.environment}' failed for seed {candidate}: "
                            f"{words(error)}"
                        ) from error
                    yield candidate, content
        except WorkerFailure as overdue:
            raise RecipeError(
                f"environments: the content_key of '{self.environment}' {overdue}, asked about seed {few[0]} or one of the "
                "next. See what it waits for, or set split_by: seed, which does not call it."
            ) from overdue
        finally:
            pool.give_back(worker)
            pool.close()


def _keys(kind: Any, seeds: list[int], options: Mapping[str, Any]) -> list[tuple[str, BaseException | None]]:
    """The contents of seeds: of all of them, or where that is slow of the first few."""
    found, late = [], time.monotonic() + ASKED_S
    for seed in seeds:
        found.append(attempt(lambda seed=seed: str(kind.content_key(seed, options))))
        if time.monotonic() > late:
            break
    return found


_BUILT: WeakKeyDictionary[MediaStore, set[str]] = WeakKeyDictionary()
"""Environments with options that were built for the sources of a store: training and evaluation mostly name the same."""


def _check_options(environment: str, options: Mapping[str, Any], store: MediaStore) -> None:
    """Build one environment and close it, so that wrong options are refused before anything is played.

    One with the same options is not built again for the same store: a browser takes seconds to start.
    """
    known, asked = _BUILT.setdefault(store, set()), f"{environment} {dict(options)!r}"
    if asked in known:
        return
    where = f"environments of '{environment}'"
    pool = WorkerPool("environment")
    worker = pool.lease()
    try:
        built = pool.call_now(lambda: build("environment", environment, options, where, store=store), DEADLINE_S, worker)
        if isinstance(built.error, SensoriumError):
            raise built.error
        if built.error is not None:
            raise RecipeError(f"{where}: one could not be built: {words(built.error)}") from built.error
        known.add(asked)
        closing = getattr(built.value, "close", None)
        if closing is not None:
            worker.submit(closing, DEADLINE_S)  # nobody waits for it
    except WorkerFailure as error:
        raise RecipeError(f"{where}: building one {error}. See what it waits for.") from error
    finally:
        pool.give_back(worker)
        pool.close()


def side(content: str) -> Literal["train", "test"]:
    """The side of the split that a start's content belongs to."""
    return "test" if stable_hash(content) < TEST_SHARE * 2**64 else "train"


PICTURES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif")


class SvgFiles:
    """The files of ``path`` (and of folders in it) on one side of the split; ``options`` are the environment's.

    An SVG file is drawn, and its code is the demonstration; a picture has only its pixels. A hash of the content decides
    the side, and equal files are one task, so train and test share nothing.
    """

    def __init__(
        self,
        path: str,
        store: MediaStore,
        options: Mapping[str, Any] | None = None,
        split: Literal["train", "test", "all"] = "train",
    ) -> None:
        if split not in ("train", "test", "all"):
            raise RecipeError(f"svg_files: unknown split '{split}'{nearest(str(split), ['train', 'test', 'all'])}")
        folder = Path(path).expanduser()
        if not folder.is_dir():
            raise TaskError(f"svg_files: '{path}' is no folder.")
        self.options = dict(options or {})
        _, problem = wrong_options("environment", "svg", self.options)
        if problem:
            raise RecipeError(f"svg_files: {problem}")
        files = sorted(file for file in folder.rglob("*") if file.suffix.lower() in (".svg", *PICTURES))
        seen: set[str] = set()
        digest = hashlib.blake2b(digest_size=16)
        self._tasks = []
        for file in files:
            if not file.resolve().is_relative_to(folder.resolve()):
                raise TaskError(f"svg_files: '{file}' is a link that leads out of its folder; copy the file there.")
            held, task = self._task(file, str(file.relative_to(folder)), store)
            digest.update(json.dumps([task.id, held]).encode())
            if held not in seen and split in ("all", side(held)):
                self._tasks.append(task)
            seen.add(held)
        self.row_digests = {path: digest.hexdigest()}
        if not self._tasks:
            raise TaskError(
                f"svg_files: of {len(files)} SVG files and pictures in '{path}' none is on side '{split}' of the split; "
                "add files, or use split: all."
            )

    def __len__(self) -> int:
        return len(self._tasks)

    def __getitem__(self, index: int) -> Task:
        return self._tasks[index]

    def _task(self, file: Path, name: str, store: MediaStore) -> tuple[str, Task]:
        """The content of a file as text, and its task."""
        environment = EnvironmentSpec("svg", self.options)
        if file.suffix.lower() != ".svg":
            shown = store.put_picture(read_bytes(file, "picture", str(file)), str(file))
            return shown.hash, Task(name, (Message("user", (shown,)),), environment=environment)
        try:
            code = read_bytes(file, "picture", str(file)).decode()
        except UnicodeDecodeError as error:
            raise MediaError(f"{file}: the SVG file is not UTF-8 text: {error}.") from error
        if "<svg" not in code or not code.rstrip().endswith("</svg>"):
            raise TaskError(f"{file}: there is no complete <svg>…</svg> in it.")
        return " ".join(code.split()), Task(name, answer=code, environment=environment)
