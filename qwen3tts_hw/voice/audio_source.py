"""From what a request says about its reference audio to the bytes of an audio file.

Takes data URLs and bare base64; file:// and http(s) addresses only where the operator allows them. Files are opened
component by component without following links, so that no path can leave its folder. Decodes nothing.
"""

from __future__ import annotations

import base64
import binascii
import os
import re
import stat
from urllib.parse import unquote, urlsplit

from qwen3tts_hw.errors import RequestError
from qwen3tts_hw.settings import Settings, listed
from qwen3tts_hw.voice.audio_fetch import fetch

FIELD = "ref_audio"
_DATA_URL = re.compile(r"data:(?P<type>[\w.+-]+/[\w.+-]+)?(?P<options>(;[\w.+-]+=[^;,]*)*)(?P<base64>;base64)?,", re.I)
_AUDIO_TYPE = re.compile(r"(audio|video)/.+|application/(octet-stream|ogg)", re.I)  # recordings of browsers are video
_SCHEME = re.compile(r"([a-z][a-z0-9+.-]*):", re.I)
_WHITE_SPACE = re.compile(r"[ \t\r\n]+")
_WHAT_WORKS = "send a data URL (data:audio/wav;base64,...) or the base64 text alone"
_CHAIN = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC


def read_source(source: str, settings: Settings) -> bytes:
    """Return the bytes that a request's ``ref_audio`` stands for; raise RequestError saying what would work."""
    if not source.strip():
        raise RequestError(FIELD, f"the reference audio is empty; {_WHAT_WORKS}")
    scheme = _SCHEME.match(source)
    if scheme is None:
        return _from_base64(source, settings.ref_audio_max_bytes)
    name = scheme.group(1).lower()
    if name == "data":
        return _from_data_url(source, settings.ref_audio_max_bytes)
    if name == "file":
        return _from_file(source, settings)
    if name in ("http", "https"):
        return fetch(source, settings)
    raise RequestError(FIELD, f"reference audio by {name}: is not supported; {_WHAT_WORKS}")


def _from_data_url(source: str, max_bytes: int) -> bytes:
    header = _DATA_URL.match(source)
    if header is None or header.group("base64") is None:
        raise RequestError(FIELD, "the data URL is malformed; expected data:audio/wav;base64,...")
    media_type = header.group("type") or "text/plain"
    if not _AUDIO_TYPE.fullmatch(media_type):
        raise RequestError(FIELD, f"the data URL holds {media_type}; audio/... was expected")
    return _from_base64(source[header.end() :], max_bytes)


def _from_base64(text: str, max_bytes: int) -> bytes:
    """Decode after the size is known to be acceptable; line breaks are allowed, as in mail."""
    limit = -(-max_bytes // 3) * 4
    if len(text) > limit + limit // 30:  # a line break of two characters every 60 or more
        raise RequestError(
            FIELD,
            f"the reference audio has about {len(text) * 3 // 4} bytes; at most {max_bytes} are accepted, so send a "
            "shorter clip or a compressed format",
        )
    try:
        data = base64.b64decode(_WHITE_SPACE.sub("", text), validate=True)
    except (ValueError, binascii.Error) as error:
        raise RequestError(FIELD, f"the reference audio is not valid base64 ({error}); {_WHAT_WORKS}") from None
    if len(data) > max_bytes:
        raise RequestError(FIELD, f"the reference audio has {len(data)} bytes; at most {max_bytes} are accepted")
    return data


def _from_file(source: str, settings: Settings) -> bytes:
    address = urlsplit(source)
    path = unquote(address.path)
    folders = [folder.rstrip("/") for folder in listed(settings.ref_audio_allowed_folders)]
    parts = path.split("/")
    inside = [folder for folder in folders if path.startswith(f"{folder}/")]
    local = address.netloc.lower() in ("", "localhost")
    if not inside or not local or "\0" in path or {".", ".."} & set(parts):
        raise RequestError(
            FIELD,
            f"this server does not read reference audio from that path; {_WHAT_WORKS}, or let the operator add the "
            "folder to ref_audio_allowed_folders",
        )
    folder = max(inside, key=len)
    below = [part for part in path[len(folder) :].split("/") if part]
    try:
        return _read_below(folder or "/", below, settings.ref_audio_max_bytes)
    except OSError as error:
        raise RequestError(
            FIELD, f"the file of the reference audio cannot be read: {error.strerror} (links are not followed)"
        ) from None


def _read_below(folder: str, parts: list[str], max_bytes: int) -> bytes:
    """Read a regular file below ``folder``; every component is opened by itself and may not be a link."""
    here = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for part in parts[:-1]:
            inner = os.open(part, _CHAIN | os.O_DIRECTORY, dir_fd=here)
            os.close(here)
            here = inner
        # Without waiting: a pipe would block until somebody writes.
        file = os.open(parts[-1] if parts else ".", _CHAIN | os.O_NONBLOCK, dir_fd=here)
    finally:
        os.close(here)
    try:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode):
            raise RequestError(FIELD, "the path of the reference audio is not a regular file")
        with os.fdopen(file, "rb", closefd=False) as stream:
            data = stream.read(max_bytes + 1)
    finally:
        os.close(file)
    if len(data) > max_bytes:
        raise RequestError(FIELD, f"the reference audio has {status.st_size} bytes; at most {max_bytes} are accepted")
    return data
