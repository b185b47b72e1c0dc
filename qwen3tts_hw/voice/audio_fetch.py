"""Fetching reference audio from hosts that the operator allows, and from no others.

The connection goes to the host that was compared with the list: the address is taken apart once, redirects are refused
and proxies are not used. Size and time are bounded. Blocks; callers in an event loop run it in a thread.
"""

from __future__ import annotations

import http.client
import re
import time
from urllib.parse import SplitResult, urlsplit

from qwen3tts_hw.errors import RequestError
from qwen3tts_hw.settings import Settings, listed

FIELD = "ref_audio"
TIMEOUT_SECONDS = 20.0
_BLOCK_BYTES = 65_536
_UNSAFE = re.compile(r"[\x00-\x20\x7f\\]")  # parsers of addresses disagree about these


def fetch(url: str, settings: Settings) -> bytes:
    """Fetch an http or https address of an allowed host; raise RequestError for any other and for every failure."""
    address = _allowed_address(url, settings)
    secure = address.scheme == "https"
    connect = http.client.HTTPSConnection if secure else http.client.HTTPConnection
    connection = connect(address.hostname or "", address.port, timeout=TIMEOUT_SECONDS)
    target = (address.path or "/") + (f"?{address.query}" if address.query else "")
    deadline = time.monotonic() + TIMEOUT_SECONDS
    try:
        connection.request("GET", target, headers={"Accept": "audio/*"})
        with connection.getresponse() as response:
            if response.status != http.client.OK:
                redirected = 300 <= response.status < 400
                raise RequestError(
                    FIELD,
                    f"{address.netloc} answered {response.status} {response.reason}"
                    + ("; redirects are not followed, send the final address" if redirected else ""),
                )
            return _body(response, settings.ref_audio_max_bytes, deadline)
    except (OSError, http.client.HTTPException) as error:
        raise RequestError(FIELD, f"the reference audio cannot be fetched from {address.netloc}: {error}") from error
    finally:
        connection.close()


def _allowed_address(url: str, settings: Settings) -> SplitResult:
    allowed = {host.lower() for host in listed(settings.ref_audio_allowed_hosts)}
    try:
        address = urlsplit(url)
        host, port = (address.hostname or "").lower(), address.port
    except ValueError as error:
        raise RequestError(FIELD, f"the address of the reference audio is malformed: {error}") from None
    if _UNSAFE.search(url) or "@" in address.netloc:
        raise RequestError(
            FIELD, "the address of the reference audio has user names or characters that are not allowed"
        )
    named = f"[{host}]" if ":" in host else host
    usual_port = 443 if address.scheme == "https" else 80
    port = port or usual_port
    if f"{named}:{port}" not in allowed and (named not in allowed or port != usual_port):
        raise RequestError(
            FIELD,
            "this server does not fetch reference audio from that host; send the audio itself as a data URL "
            "(data:audio/wav;base64,...), or let the operator add the host to ref_audio_allowed_hosts",
        )
    return address


def _body(response: http.client.HTTPResponse, max_bytes: int, deadline: float) -> bytes:
    declared = response.getheader("Content-Length", "")
    if declared.isdecimal() and int(declared) > max_bytes:
        raise RequestError(FIELD, f"the reference audio has {declared} bytes; at most {max_bytes} are accepted")
    data = bytearray()
    while block := response.read1(_BLOCK_BYTES):
        data += block
        if len(data) > max_bytes:
            raise RequestError(FIELD, f"the reference audio has more than {max_bytes} bytes, which is the limit")
        if time.monotonic() > deadline:
            raise RequestError(FIELD, f"the reference audio took longer than {TIMEOUT_SECONDS:.0f} s to fetch")
    return bytes(data)
