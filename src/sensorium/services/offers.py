"""Which environments a service offers. Clients are not trusted: they choose among these, and cannot name code."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from inspect import Parameter
from pathlib import Path
from typing import Any

from sensorium.media.files import open_regular
from sensorium.media.store import MediaStore
from sensorium.recipe.names import (
    build,
    check,
    closed_options,
    needs_a_row,
    parameters_of,
    plays_for_anybody,
    resolve,
    table,
    wrong_options,
)
from sensorium.vocabulary.errors import RecipeError, nearest

NOT_SERVED = ("question", "remote", "isolated")


@dataclass(frozen=True)
class Offer:
    """An environment under a name of its own, with options that clients cannot change."""

    environment: str
    options: Mapping[str, Any] = field(default_factory=dict)


class Offers:
    """Environments by name. A client's options go beside an offer's own, except those that say what code runs."""

    def __init__(self, offers: Mapping[str, Offer]) -> None:
        self.offers = dict(offers)
        if not self.offers:
            raise RecipeError(
                "the service offers no environment; name some, as in: sensorium serve env frozen_lake sokoban."
            )
        for name, offer in self.offers.items():
            check("environment", offer.environment, f"environment '{name}'")
            if needs_a_row(resolve("environment", offer.environment)):
                raise RecipeError(f"environment '{name}' plays the questions of rows, and cannot be served by seeds.")
            kind = resolve("environment", offer.environment)
            needed = [
                key
                for key, parameter in parameters_of(kind).items()
                if key in closed_options(kind) and parameter.default is Parameter.empty and key not in offer.options
            ]
            if needed:
                raise RecipeError(
                    f"environment '{name}' needs '{needed[0]}', which a client may not set. Say it in a file, "
                    f"{{environment: {offer.environment}, options: {{{needed[0]}: …}}}}, and offer that: {name}=FILE.yaml."
                )

    @property
    def environments(self) -> dict[str, str]:
        """The environment behind each name."""
        return {name: offer.environment for name, offer in self.offers.items()}

    def chosen(self, name: Any, options: Any) -> tuple[str, dict[str, Any]]:
        """What a client's name and options stand for; RecipeError says what is wrong with them."""
        if not isinstance(name, str) or name not in self.offers:
            raise RecipeError(f"unknown environment '{name!s:.60}'{nearest(str(name)[:60], list(self.offers))}")
        if not isinstance(options, Mapping):
            raise RecipeError("the options of an environment are an object.")
        offer = self.offers[name]
        closed = {*closed_options(resolve("environment", offer.environment)), *offer.options}
        for key, value in options.items():
            if key in closed and (key not in offer.options or value != offer.options[key]):
                raise RecipeError(f"the option '{key}' of environment '{name}' is the server's own.")
        chosen = {**offer.options, **options}
        _, problem = wrong_options("environment", offer.environment, chosen)
        if problem:
            raise RecipeError(problem)
        return offer.environment, chosen

    def built(self, name: Any, options: Any, store: MediaStore) -> Any:
        """The environment."""
        environment, chosen = self.chosen(name, options)
        return build("environment", environment, chosen, f"environment '{name}'", store=store)

    def isolated(self, name: Any, options: Any, store: MediaStore, memory_mib: int, deadline_s: float) -> Any:
        """The environment, in a process of its own."""
        from sensorium.envs.remote.isolated import IsolatedEnvironment

        environment, chosen = self.chosen(name, options)
        return IsolatedEnvironment(store, environment, chosen, memory_mib, deadline_s)

    def content_key(self, name: Any, options: Any, seed: int) -> str:
        """What a seed leads to."""
        environment, chosen = self.chosen(name, options)
        kind = resolve("environment", environment)
        if not hasattr(kind, "content_key"):
            raise RecipeError(f"environment '{name}' has no content_key(seed, options).")
        return str(kind.content_key(seed, chosen))


def rows_offer(given: str) -> tuple[str, Offer]:
    """``NAME=FILE``: the rows of a source as an environment; the file is YAML, ``{source: parquet, options: {…}}``."""
    name, held = _in_file(given, "source", f"--rows {given}")
    return name, Offer("rows", {"source": held["source"], "options": dict(held.get("options") or {})})


def environment_offer(given: str) -> tuple[str, Offer]:
    """``NAME``, ``NAME=module:Class``, or ``NAME=FILE.yaml`` with ``{environment: gymnasium, options: {id: …}}``."""
    name, _, place = given.partition("=")
    if not place.endswith((".yaml", ".yml")):
        return name, Offer(place or name)
    name, held = _in_file(given, "environment", given)
    return name, Offer(str(held["environment"]), dict(held.get("options") or {}))


def _in_file(given: str, key: str, where: str) -> tuple[str, Mapping[str, Any]]:
    """The name and what the file of ``NAME=FILE`` holds: ``key`` and options."""
    import yaml

    name, _, file = given.partition("=")
    try:
        with open_regular(Path(file)) as opened:
            held = yaml.safe_load(opened)
    except (OSError, yaml.YAMLError, RecursionError) as error:
        raise RecipeError(f"{where}: the file cannot be read: {error}") from error
    if not name or not isinstance(held, Mapping) or set(held) - {key, "options"} or key not in held:
        raise RecipeError(f"{where}: it is NAME=FILE, and the file holds {key} and options, as a recipe's tasks do.")
    return name, held


def usual_offers() -> dict[str, Offer]:
    """Every registered environment that plays from seeds and runs no code of a client's choosing."""
    found = {}
    for name in table("environment"):
        kind = resolve("environment", name) if name not in NOT_SERVED else None
        if kind is not None and plays_for_anybody(kind):
            found[name] = Offer(name)
    return found
