"""Who may use a service: anybody on loopback, and with the key anywhere. A service without a key stays on loopback.

Web pages may not. A browser on this machine reaches loopback for any page it shows, and tells where the page came from:

    Host: 127.0.0.1:8300, no Origin                        a program: served
    Host: 127.0.0.1:8300, Origin: http://127.0.0.1:8300    a page of this service itself: served
    Host: 127.0.0.1:8300, Origin: https://evil.example     a page of another site: refused
    Host: evil.example:8300, Origin: the same              a site whose name was rebound to this machine: refused
"""

import functools
import hmac
import ipaddress
import re
import socket
from collections.abc import Collection, Mapping, Sequence

from sensorium.vocabulary.errors import RecipeError

ENVIRONMENT_VARIABLE = "SENSORIUM_SERVICE_KEY"
_HOST = r"(?:\[([^\]/@]+)\]|([^\[\]:/@\s]+))(?::(\d*))?"


def refuse_open(host: str, key: str) -> None:
    """Refuse to listen beyond this machine without a key, and a key that no header can hold."""
    if not re.fullmatch(r"[!-~]*", key):
        raise RecipeError(
            f"{ENVIRONMENT_VARIABLE} has a character that cannot be sent, such as a line's end or a letter beyond ASCII. "
            "Use letters, digits and signs without spaces, here and at the clients."
        )
    if not key and not is_loopback(host):
        raise RecipeError(
            f"host {host} can be reached from other machines, and there is no key. Set {ENVIRONMENT_VARIABLE} to a long "
            "random text here and at the clients (for a client that sends no headers, such as CapRL's: ?token=KEY in its "
            "address), or listen on 127.0.0.1."
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
    """Whether a request carries the key: as ``Authorization: Bearer``, ``X-API-Key``, or ``?token=`` in its address.

    The last is for clients that send no headers, such as VAGEN's and CapRL's.
    """
    if not key:
        return True
    bearer = re.sub(r"(?i)^bearer +", "", headers.get("authorization", ""))
    given = headers.get("x-api-key") or bearer or query.get("token", "")
    return hmac.compare_digest(given.encode("utf-8", "replace"), key.encode())


def foreign(hosts: Sequence[str], origins: Sequence[str], bound: str, key: str, names: Collection[str]) -> str:
    """Why a request is refused as a web page's: its Host or Origin headers; empty where they are in order.

    A service has loopback's names, the address ``bound`` that the connection came to, and ``names``. With a key it has also
    the machine's own names, and any IP address (of a container's host, say): a name can be rebound, an address cannot.
    """
    for host in hosts:
        name, _ = _split(host, "http")
        if not (_is_local(name, bound, key != "") or name in names or (key and name in machine_names())):
            return (
                f"'{host:.100}' is not a name of this service: a web page may have sent this. Ask it by its IP address or "
                f"by localhost; if it has this name, behind a proxy say, start it with --allowed-host {name or 'NAME':.100}"
            )
    for origin in origins:
        scheme, _, place = origin.partition("://")
        asked = _split(place, scheme)
        if asked[0] not in names and (not asked[0] or any(asked != _split(host, scheme) for host in hosts or [""])):
            return (
                f"the web page of '{origin:.100}' may not use this service; if it should, start the service with "
                f"--allowed-host {asked[0] or 'NAME':.100}"
            )
    return ""


@functools.cache
def machine_names() -> frozenset[str]:
    """What this machine calls itself: its name, that without the domain, and the full one."""
    name = socket.gethostname().lower()
    return frozenset({name, name.partition(".")[0], socket.getfqdn().lower()} - {""})


def _split(place: str, scheme: str) -> tuple[str, int]:
    """Name and port of ``name:port``; the name is empty where it cannot be read."""
    found = re.fullmatch(_HOST, place)
    if found is None or scheme not in ("http", "https"):
        return "", 0
    port = int(found[3]) if found[3] else {"http": 80, "https": 443}[scheme]
    return (found[1] or found[2]).lower().rstrip("."), port


def _is_local(name: str, bound: str, any_address: bool) -> bool:
    """Whether a name is loopback's, or the address that is listened on (with ``any_address``, any)."""
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return name == "localhost"
    return any_address or address.is_loopback or address.is_unspecified or name == bound.lower()
