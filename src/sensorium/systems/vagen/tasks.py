"""VAGEN's files of tasks: its parquet rows, its YAML list of seeds, and the legacy ``env_config.yaml``.

    rows      {data_source, prompt, extra_info: {split, env_name, env_config, seed}}    the row's seed
    list      envs: [{name, n_envs, seed: [1, 10000, 1], max_turns, config}]             the seeds that VAGEN draws
    legacy    sokoban: {env_name, env_config, train_size, test_size}                     seeds of ours, split by content

VAGEN plays legacy files with the same seeds for training and test; here the splits share no content.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import yaml

from sensorium.data.environment_tasks import EnvironmentTasks
from sensorium.data.media_files import open_regular
from sensorium.data.media_store import MediaStore
from sensorium.data.rows import content_digest
from sensorium.recipe.registry import check, closed_options, parameters_of, plays_for_anybody, resolve, table, wrong_options
from sensorium.systems.vagen.settings import entry_name, environment_of, seeds_of, without_client
from sensorium.vocabulary.errors import RecipeError, TaskError, nearest
from sensorium.vocabulary.task import EnvironmentSpec, Task

SKILLS = "primitive_skill"


class VagenTasks:
    """The tasks of a ``.parquet``, ``.yaml`` or ``.yml`` file, of one ``split``.

    ``max_turns`` ends an episode; VAGEN sets it outside of its environments. ``options`` are the recipe's own for an
    environment, {svg: {dino_path: …}}, such as folders of models, which a file must not set.
    """

    def __init__(
        self,
        path: str,
        store: MediaStore,
        split: Literal["train", "test"] = "train",
        max_turns: int = 5,
        seed: int = 0,
        options: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        if split not in ("train", "test"):
            raise RecipeError(f"vagen: unknown split '{split}'{nearest(str(split), ['train', 'test'])}")
        self.path, self.split, self.max_turns, self.seed = Path(path), split, max_turns, seed
        self.options = {name: dict(own) for name, own in (options or {}).items()}
        for name in self.options:
            check("environment", name, "vagen, options")
        self._served = {name: name for name in table("environment") if name in self.options or _plays_from_seeds(name)}
        self._tasks: list[Task] = []
        if self.path.suffix == ".parquet":
            self._take_rows()
        elif self.path.suffix in (".yaml", ".yml"):
            self._take_yaml(store)
        else:
            raise RecipeError(f"vagen: '{path}' is no .parquet, .yaml or .yml file.")
        self.row_digests = {path: content_digest(self.path)}
        if not self._tasks:
            raise TaskError(f"{path}: there are no tasks of split '{split}' in it.")

    def __len__(self) -> int:
        return len(self._tasks)

    def __getitem__(self, index: int) -> Task:
        return self._tasks[index]

    def _take_rows(self) -> None:
        import pyarrow
        from pyarrow.parquet import ParquetFile

        try:
            with open_regular(self.path):
                rows = ParquetFile(self.path).read(columns=["data_source", "extra_info"]).to_pylist()
        except (OSError, ValueError, OverflowError, pyarrow.ArrowException) as error:
            raise TaskError(f"{self.path}: cannot read the Parquet file: {error}") from error
        for number, row in enumerate(rows):
            place, extra = f"{self.path}, row {number}", row.get("extra_info")
            if not isinstance(extra, Mapping) or type(extra.get("seed")) is not int:
                raise TaskError(f"{place}: 'extra_info' must hold env_name, env_config and seed.")
            if extra.get("split", self.split) == self.split:
                name, options = self._environment(dict(extra), place)
                self._add(name, options, extra["seed"], str(row.get("data_source") or name), number)

    def _take_yaml(self, store: MediaStore) -> None:
        try:
            with open_regular(self.path) as file:
                held = yaml.safe_load(file)
        except (OSError, yaml.YAMLError) as error:
            raise TaskError(f"{self.path}: cannot read the file: {error}") from error
        if isinstance(held, Mapping) and isinstance(held.get("envs"), list):
            for index, entry in enumerate(held["envs"]):
                self._take_entry(entry, index, int(held.get("base_seed", 0)))
        elif isinstance(held, Mapping) and all(isinstance(entry, Mapping) for entry in held.values()):
            for name, entry in held.items():
                self._take_legacy(str(name), dict(entry), store)
        else:
            raise TaskError(f"{self.path}: it holds neither 'envs: […]' nor environments by name.")

    def _take_entry(self, entry: Any, index: int, base_seed: int) -> None:
        place = f"{self.path}, envs.{index}"
        named_so = isinstance(entry, Mapping) and isinstance(entry.get("name"), str)
        if not named_so or not isinstance(entry.get("n_envs"), int):
            raise TaskError(f"{place}: an entry has name, n_envs and seed or seed_list.")
        config = entry.get("config") or {}
        if not isinstance(config, Mapping):
            raise TaskError(f"{place}: 'config' must hold settings by name.")
        named = entry_name(entry["name"], config, str(entry.get("data_source") or entry["name"]))
        name, options = self._environment({"env_name": named, "env_config": without_client(config)}, place, current=True)
        if isinstance(entry.get("max_turns"), int):
            options["max_turns"] = entry["max_turns"]
        count, listed = entry["n_envs"], entry.get("seed_list")
        drawn = seeds_of(count, entry.get("seed") or [0], entry["name"], index, base_seed) if not listed else []
        seeds = list(listed)[:count] if listed else drawn
        if len(seeds) < count:
            raise TaskError(f"{place}: n_envs is {count}, and seed_list has {len(seeds)}.")
        for number, seed in enumerate(seeds):
            self._add(name, options, int(seed), str(entry.get("data_source") or name), f"{index}/{number}")

    def _take_legacy(self, title: str, entry: dict[str, Any], store: MediaStore) -> None:
        size = entry.get(f"{self.split}_size", 0)
        name, options = self._environment(entry, f"{self.path}, {title}")
        if size:
            source = EnvironmentTasks(name, store, options, self.split, int(size), self.seed, distinct=False)
            for number in range(len(source)):
                spec = source[number].environment
                assert spec is not None
                self._add(name, options, spec.seed, title, number)

    def _environment(self, wish: dict[str, Any], place: str, current: bool = False) -> tuple[str, dict[str, Any]]:
        """Our environment for theirs. Files are data: they name registered environments that run no code of the file."""
        try:
            name, options = environment_of(wish, self._served, current)
        except RecipeError as error:
            raise TaskError(f"{place}: {error}") from error
        if name not in self._served:
            raise TaskError(f"{place}: unknown environment '{name:.60}'{nearest(name, list(self._served))}")
        own = dict(self.options.get(name, {}))
        if "max_turns" in parameters_of(resolve("environment", name)):
            options["max_turns"] = self.max_turns
        options = {key: value for key, value in options.items() if value is not None}
        _, problem = wrong_options("environment", name, {**options, **own})
        problem = _only_the_recipes(name, options, own) or problem
        if problem:
            raise TaskError(f"{place}: {problem}")
        return name, {**options, **own}

    def _add(self, name: str, options: dict[str, Any], seed: int, category: str, number: int | str) -> None:
        spec = EnvironmentSpec(name, dict(options), seed)
        self._tasks.append(Task(f"{self.path.name}/{number}", environment=spec, metadata={"category": category}))


def _plays_from_seeds(name: str) -> bool:
    kind = resolve("environment", name)
    return hasattr(kind, "content_key") and plays_for_anybody(kind)


def _only_the_recipes(name: str, options: Mapping[str, Any], own: Mapping[str, Any]) -> str:
    """An error for an option of a file that only a recipe may set; empty if there is none."""
    for term in ("dino", "dreamsim") if name == "svg" else ():
        if options.get(f"{term}_weight") and not own.get(f"{term}_path"):
            return (
                f"{term}_weight needs a model, which a file cannot name: give the source options: "
                f"{{svg: {{{term}_path: folder}}}}, or set {term}_weight: 0."
            )
    if name == SKILLS and "id" in options:
        return "" if own.get("modules") else (
            f"'{options['id']}' is a task of VAGEN's own; name the modules that register it: give the source options: "
            f"{{{SKILLS}: {{modules: [module, …]}}}}."
        )  # fmt: skip
    closed = [key for key in options if key in closed_options(resolve("environment", name)) and key not in own]
    closed = [key for key in closed if (name, key) != ("svg", "dataset")]  # an id of the hub, which is checked
    return f"the option '{closed[0]}' of environment '{name}' is the recipe's to set, not a file's." if closed else ""
