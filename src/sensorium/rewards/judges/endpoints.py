"""Endpoints of judges: from the recipe, or from a JSON file ``{model: {…} or [{…}, …]}``.

The file is that of ``judges.config``, else the one that ``M3_API_CONFIG`` names, else, where the recipe has no endpoints,
``configs/api_config.json``, as in TaskMem. Keys are read from the environment or a file when an endpoint is first called
and held in a ``Secret``: they reach no log, no recipe dump, no error and no cache.
"""

import os
import sqlite3
import sys
import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from sensorium.recipe.schema import JudgeEndpointSection, JudgesSection
from sensorium.runs.durable import database_errors
from sensorium.vocabulary.errors import RecipeError, RecordError, UnknownJudge
from sensorium.vocabulary.plain import strict_json
from sensorium.vocabulary.secrets import Secret

CONFIG_VARIABLE = "M3_API_CONFIG"
DEFAULT_CONFIG = Path("configs/api_config.json")
FIELDS = ("azure_endpoint", "api_version", "api_key", "base_url", "model", "api_key_env", "api_key_file")


@dataclass(frozen=True)
class Endpoint:
    """The endpoint of one model, with the key where a file of endpoints holds it."""

    model: str
    section: JudgeEndpointSection
    key: Secret | None = field(default=None, repr=False, compare=False)

    @property
    def place(self) -> str:
        """The address, for errors and counts; never the key."""
        return self.section.base_url or self.section.azure_endpoint

    @property
    def key_source(self) -> str:
        if self.section.api_key_env:
            return f"the environment variable {self.section.api_key_env}"
        file = self.section.api_key_file
        return f"the file '{file}'" if file else "the file of endpoints" if self.key else "nowhere"

    def secret(self) -> Secret | None:
        """The key, read now; None where there is none. UnknownJudge says where it should have been."""
        subject = f"judges: the key of '{self.model}' at {self.place}"
        found, variable, file = self.key, self.section.api_key_env, self.section.api_key_file
        if variable:
            found = Secret(os.environ.get(variable, "").strip())
            if not found.reveal():
                raise UnknownJudge(
                    f"{subject} should be in the environment variable {variable}, which is not set. Set it where the run "
                    "is started."
                )
        elif file is not None:
            try:
                found = Secret(file.expanduser().read_text().strip())
            except (OSError, UnicodeDecodeError) as error:
                problem = error.strerror if isinstance(error, OSError) else "it is no text"
                raise UnknownJudge(f"{subject} should be in '{file}', which cannot be read: {problem}.") from None
        if found is not None and not (found.reveal().isascii() and found.reveal().isprintable()):
            raise UnknownJudge(
                f"{subject}, from {self.key_source}, has a character that no key can have: a line break, a tab or one "
                "beyond ASCII. Put the key alone there."
            )
        return found


def endpoints_of(section: JudgesSection) -> dict[str, tuple[Endpoint, ...]]:
    """All endpoints by model name: the recipe's, then those of the file."""
    found = {
        model: tuple(Endpoint(model, one) for one in several) for model, several in section.endpoints.items() if several
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
    comments = {model for model, given in rows.items() if model.startswith("_") and isinstance(given, str)}
    return {model: _of_rows(f"{where}: '{model}'", model, given) for model, given in rows.items() if model not in comments}


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
            section = JudgeEndpointSection(**rest)
        except ValidationError as error:
            raise RecipeError(f"{where}: {error.errors()[0]['msg']}.") from None
        found.append(Endpoint(model, section, Secret(row["api_key"]) if row.get("api_key") else None))
    return tuple(found)


LONGEST_REST_S = 60.0
NOTED_FAILURES = 3  # in a row, after which one of several endpoints is named: the others would hide it
DOUBLINGS = 10  # more would rest longer than LONGEST_REST_S anyway, and overflow after a thousand failures


@dataclass
class EndpointHealth:
    """How an endpoint is doing: calls open now, failures in a row, when it may be asked again, calls it was given."""

    endpoint: Endpoint
    open: int = 0
    failures: int = 0
    rests_until: float = 0.0
    calls: int = 0
    refused_key: str = ""


class EndpointPool:
    """Chooses among the endpoints of a model. Used from one event loop only.

    An endpoint that fails rests: 1 s, 2 s, 4 s … up to a minute, or as long as its Retry-After says. One that refuses the
    key is not asked again. Example: a has 2 calls open, b 1, so b is next; b answers 503 and rests 1 s, so the next calls
    go to a, even if it is busier; when both rest, the caller waits for the first to be back.
    """

    def __init__(self, endpoints: tuple[Endpoint, ...]) -> None:
        self.members = [EndpointHealth(endpoint) for endpoint in endpoints]

    def next(self) -> tuple[EndpointHealth | None, float]:
        """The endpoint to ask now; or None, and the seconds until one may be asked (infinite: none will be)."""
        now = time.monotonic()
        usable = [member for member in self.members if not member.refused_key]
        ready = [member for member in usable if member.rests_until <= now]
        if ready:
            return min(ready, key=lambda member: (member.open, member.calls)), 0.0
        return None, min((member.rests_until - now for member in usable), default=float("inf"))

    def begin(self, member: EndpointHealth) -> None:
        """Count a call that starts."""
        member.open += 1
        member.calls += 1

    def answered(self, member: EndpointHealth) -> None:
        """A call was answered: the endpoint is healthy."""
        member.open -= 1
        member.failures = 0

    def failed(self, member: EndpointHealth, rest_s: float | None) -> None:
        """A call failed; the endpoint rests as long as it asked for, or longer with every failure."""
        member.open -= 1
        member.failures += 1
        if member.failures == NOTED_FAILURES and len(self.members) > 1:
            print(
                f"judge '{member.endpoint.model}': {member.endpoint.place} failed {member.failures} times in a row and "
                f"is asked less often; {len(self.members) - 1} other endpoints take its questions. Is it running?",
                file=sys.stderr,
                flush=True,
            )
        usual = min(LONGEST_REST_S, 2.0 ** min(member.failures - 1, DOUBLINGS))
        if len(self.members) == 1 and rest_s is None:
            usual = 0.0  # there is no other to ask, and the caller waits by itself
        member.rests_until = time.monotonic() + (usual if rest_s is None else rest_s)

    def refused(self, member: EndpointHealth, reason: str = "") -> None:
        """A call was refused: for what was asked, or, with a reason, for the key."""
        member.open -= 1
        member.refused_key = reason


SCHEMA = "CREATE TABLE IF NOT EXISTS buckets (name TEXT PRIMARY KEY, level REAL NOT NULL, at REAL NOT NULL)"
BURST_S = 6.0
CLOCKS_DIFFER_S = 3600.0  # between machines. A bucket fills by the clock that is ahead: each of its seconds counts once


class SharedLimits:
    """The limits of every model, shared by processes; ``take`` returns how long to wait before a call is made.

    Each limit is a bucket that fills at its rate and holds a tenth of a minute's worth (at least one request). A caller
    takes at once and waits until the level is back at 0: with 60 requests a minute, and 6 in the bucket, the 8th call
    waits 2 s and the 9th 3 s, in whichever processes. Tokens are taken as estimated, and corrected by the answer's count.
    """

    def __init__(self, path: Path, requests: Mapping[str, float], tokens: Mapping[str, float]) -> None:
        self.path = path
        self._rates = {f"requests/{model}": rate / 60 for model, rate in requests.items()}
        self._rates |= {f"tokens/{model}": rate / 60 for model, rate in tokens.items()}
        if any(rate <= 0 for rate in self._rates.values()):
            raise RecordError("judges: limits are above 0 requests or tokens a minute; leave out those that do not hold.")

    def take(self, model: str, tokens: int) -> float:
        """Take one request and so many tokens; the seconds to wait before the call."""
        return max(self._move(f"requests/{model}", 1.0), self._move(f"tokens/{model}", float(tokens)))

    def give_back(self, model: str, tokens: int) -> None:
        """Undo ``take`` for a call that was not made."""
        self._move(f"requests/{model}", -1.0)
        self._move(f"tokens/{model}", -float(tokens))

    def settle(self, model: str, estimated: int, used: int) -> None:
        """Correct an estimate by the tokens that an answer used."""
        self._move(f"tokens/{model}", float(used - estimated))

    def _move(self, name: str, amount: float) -> float:
        rate = self._rates.get(name)
        if rate is None or amount == 0:
            return 0.0
        most = max(1.0, rate * BURST_S)
        with (
            database_errors(self.path, "the file of judges' limits", "Remove it and continue with --resume."),
            closing(sqlite3.connect(self.path, timeout=30.0, isolation_level=None)) as db,
            db,
        ):
            db.execute(SCHEMA)
            db.execute("BEGIN IMMEDIATE")
            now = time.time()
            row = db.execute("SELECT level, at FROM buckets WHERE name = ?", (name,)).fetchone()
            level, at = row or (most, now)
            if at > now + CLOCKS_DIFFER_S:
                at = now  # the clock was set back
            level = min(most, level + max(0.0, now - at) * rate) - amount
            db.execute("INSERT OR REPLACE INTO buckets VALUES (?, ?, ?)", (name, level, max(now, at)))
        return max(0.0, -float(level) / rate)
