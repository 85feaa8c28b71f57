"""Who may use a service: anybody on loopback, and with the key anywhere. A service without a key stays on loopback."""

import hmac
import ipaddress
from collections.abc import Mapping

from sensorium.vocabulary.errors import RecipeError

ENVIRONMENT_VARIABLE = "SENSORIUM_SERVICE_KEY"


def refuse_open(host: str, key: str) -> None:
    """Refuse to listen beyond this machine without a key."""
    if not key and not is_loopback(host):
        raise RecipeError(
            f"host {host} can be reached from other machines, and there is no key. Set {ENVIRONMENT_VARIABLE} to a long "
            "random text here and at the clients, or listen on 127.0.0.1."
        )


def is_loopback(host: str) -> bool:
    """Whether an address reaches this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def allowed(key: str, headers: Mapping[str, str], query: Mapping[str, str]) -> bool:
    """Whether a request carries the key: as ``Authorization: Bearer``, ``X-API-Key``, or ``?token=`` (VAGEN's clients)."""
    if not key:
        return True
    given = headers.get("x-api-key") or headers.get("authorization", "").removeprefix("Bearer ") or query.get("token", "")
    return hmac.compare_digest(given.encode("utf-8", "replace"), key.encode())
