"""Requests and tokens a minute, shared by all processes of a run through one SQLite file.

Each limit is a bucket that fills at its rate and holds a tenth of a minute's worth (at least one request). Who asks takes
at once and waits until the debt is paid: with 60 requests a minute, and 6 in the bucket, the 8th call waits 2 s and the 9th
3 s, in whichever processes they are made. Tokens are taken as estimated, and settled when the answer says how many it took.
"""

import sqlite3
import time
from collections.abc import Mapping
from pathlib import Path

from sensorium.record.durable import cannot_write, full_disk_error
from sensorium.vocabulary.errors import RecordError

SCHEMA = "CREATE TABLE IF NOT EXISTS buckets (name TEXT PRIMARY KEY, level REAL NOT NULL, at REAL NOT NULL)"
BURST_S = 6.0
CLOCKS_DIFFER_S = 3600.0
"""By how much clocks of machines may differ. A bucket fills by the clock that is ahead: each second of it counts once."""


class SharedLimits:
    """The limits of every model: ``take`` says how long to wait before a call is made."""

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
        """A call was not made after all."""
        self._move(f"requests/{model}", -1.0)
        self._move(f"tokens/{model}", -float(tokens))

    def settle(self, model: str, estimated: int, used: int) -> None:
        """An answer said how many tokens it took."""
        self._move(f"tokens/{model}", float(used - estimated))

    def _move(self, name: str, amount: float) -> float:
        rate = self._rates.get(name)
        if rate is None or amount == 0:
            return 0.0
        most = max(1.0, rate * BURST_S)
        try:
            db = sqlite3.connect(self.path, timeout=30.0, isolation_level=None)
            try:
                db.execute(SCHEMA)
                db.execute("BEGIN IMMEDIATE")
                now = time.time()
                row = db.execute("SELECT level, at FROM buckets WHERE name = ?", (name,)).fetchone()
                level, at = row or (most, now)
                if at > now + CLOCKS_DIFFER_S:
                    at = now  # the clock was set back
                level = min(most, level + max(0.0, now - at) * rate) - amount
                db.execute("INSERT OR REPLACE INTO buckets VALUES (?, ?, ?)", (name, level, max(now, at)))
                db.execute("COMMIT")
            finally:
                db.close()
        except (sqlite3.Error, OSError) as error:
            full = full_disk_error(error)
            raise (
                cannot_write(self.path, full)
                if full
                else RecordError(
                    f"the file of judges' limits '{self.path}' cannot be used: {error}. Remove it and go on with --resume."
                )
            ) from error
        return max(0.0, -level / rate)
