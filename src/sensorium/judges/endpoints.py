"""Endpoints of judges: from the recipe, or from a JSON file ``{model: {…} or [{…}, …]}``.

The file is that of ``judges.config``, else the one that ``M3_API_CONFIG`` names, else, where the recipe has no endpoints,
``configs/api_config.json``, as in TaskMem.

A key is read from the environment or a file when an endpoint is first called. It is held in a ``Secret``, which prints as
``***``: it reaches no log, no recipe dump, no error and no cache.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from sensorium.recipe.judge_section import JudgeEndpointSection, JudgesSection
from sensorium.vocabulary.errors import RecipeError, UnknownJudge
from sensorium.vocabulary.plain import strict_json
from sensorium.vocabulary.secrets import Secret

CONFIG_VARIABLE = "M3_API_CONFIG"
DEFAULT_CONFIG = Path("configs/api_config.json")
FIELDS = ("azure_endpoint", "api_version", "api_key", "base_url", "model", "api_key_env", "api_key_file")


@dataclass(frozen=True)
class Endpoint:
    """Where one model is reached. ``served_model`` is its name there."""

    model: str
    served_model: str
    base_url: str = ""
    azure_endpoint: str = ""
    api_version: str = ""
    key_env: str = ""
    key_file: Path | None = None
    key: Secret | None = field(default=None, repr=False, compare=False)

    @property
    def place(self) -> str:
        """The address, for errors and counts; never the key."""
        return self.base_url or self.azure_endpoint

    @property
    def key_source(self) -> str:
        """Where the key comes from, for errors."""
        if self.key_env:
            return f"the environment variable {self.key_env}"
        return f"the file '{self.key_file}'" if self.key_file else "the file of endpoints" if self.key else "nowhere"

    def secret(self) -> Secret | None:
        """The key, read now; None where there is none. UnknownJudge says where it should have been."""
        found = self._read_secret()
        if found is not None and not (found.reveal().isascii() and found.reveal().isprintable()):
            raise UnknownJudge(
                f"judges: the key of '{self.model}' at {self.place}, from {self.key_source}, has a character that no key "
                "can have: a line break, a tab or one beyond ASCII. Put the key alone there."
            )
        return found

    def _read_secret(self) -> Secret | None:
        if self.key_env:
            key = os.environ.get(self.key_env, "").strip()
            if not key:
                raise UnknownJudge(
                    f"judges: the key of '{self.model}' at {self.place} should be in the environment variable "
                    f"{self.key_env}, which is not set. Set it where the run is started."
                )
            return Secret(key)
        if self.key_file is not None:
            try:
                return Secret(self.key_file.expanduser().read_text().strip())
            except (OSError, UnicodeDecodeError) as error:
                raise UnknownJudge(
                    f"judges: the key of '{self.model}' at {self.place} should be in '{self.key_file}', which cannot be "
                    f"read: {error.strerror if isinstance(error, OSError) else 'it is no text'}."
                ) from None
        return self.key


def endpoints_of(section: JudgesSection) -> dict[str, tuple[Endpoint, ...]]:
    """All endpoints by model name: the recipe's, then those of the file."""
    found = {
        model: tuple(_of_section(model, one) for one in several) for model, several in section.endpoints.items() if several
    }
    named = section.config or (Path(os.environ[CONFIG_VARIABLE]) if os.environ.get(CONFIG_VARIABLE) else None)
    if named is None and not found and DEFAULT_CONFIG.is_file():
        named = DEFAULT_CONFIG
    if named is not None:
        for model, several in read_config(named).items():
            found[model] = (*found.get(model, ()), *several)
    return found


def read_config(path: Path) -> dict[str, tuple[Endpoint, ...]]:
    """The endpoints of an ``api_config.json``: each model has one object or a list of them."""
    where = f"judges.config: '{path}'"
    try:
        rows = strict_json(path.expanduser().read_text())
    except OSError as error:
        raise RecipeError(f"{where} cannot be read: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        raise RecipeError(f"{where} is no JSON: {str(error).split(':')[0]}.") from None  # its text may hold a key
    if not isinstance(rows, dict):
        raise RecipeError(f"{where} must be an object of endpoints by model name.")
    return {
        model: _of_rows(f"{where}: '{model}'", model, given)
        for model, given in rows.items()
        if not (model.startswith("_") and isinstance(given, str))  # a comment, as in TaskMem's template
    }


def _of_rows(where: str, model: str, given: Any) -> tuple[Endpoint, ...]:
    rows = given if isinstance(given, list) else [given]
    if not rows or not all(isinstance(row, Mapping) for row in rows):
        raise RecipeError(f"{where} must be an endpoint (an object) or a list of them.")
    found = []
    for row in rows:
        if strange := [key for key in row if key not in FIELDS]:
            raise RecipeError(f"{where}: unknown key '{strange[0]}'. Known: {', '.join(FIELDS)}.")
        if not all(isinstance(value, str) for value in row.values()):
            raise RecipeError(f"{where}: the values of an endpoint are texts.")
        rest = {key: value for key, value in row.items() if key != "api_key"}
        try:
            endpoint = _of_section(model, JudgeEndpointSection(**rest))
        except ValidationError as error:
            raise RecipeError(f"{where}: {error.errors()[0]['msg']}.") from None
        if row.get("api_key"):
            endpoint = Endpoint(**{**vars(endpoint), "key": Secret(row["api_key"])})
        found.append(endpoint)
    return tuple(found)


def _of_section(model: str, section: JudgeEndpointSection) -> Endpoint:
    return Endpoint(
        model=model,
        served_model=section.model or model,
        base_url=section.base_url,
        azure_endpoint=section.azure_endpoint,
        api_version=section.api_version,
        key_env=section.api_key_env,
        key_file=section.api_key_file,
    )
