"""What a request says about its reference audio becomes bytes, and no path or host that is not allowed is touched."""

from __future__ import annotations

import base64
import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from qwen3tts_hw.errors import RequestError, SettingsError
from qwen3tts_hw.settings import Settings
from qwen3tts_hw.voice import audio_fetch, audio_source
from qwen3tts_hw.voice.audio_source import read_source

CONTENT = bytes(range(256)) * 5
BASE64 = base64.b64encode(CONTENT).decode()
SETTINGS = Settings()


def assert_refused(source: str, message: str, settings: Settings = SETTINGS) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        read_source(source, settings)
    assert caught.value.field == "ref_audio"


class TestInline:
    @pytest.mark.parametrize(
        "source",
        [
            BASE64,
            f"data:audio/wav;base64,{BASE64}",
            f"data:audio/x-wav;base64,{BASE64}",
            f"data:audio/webm;codecs=opus;base64,{BASE64}",
            f"data:video/mp4;base64,{BASE64}",
            f"data:application/octet-stream;base64,{BASE64}",
            f"DATA:AUDIO/WAV;BASE64,{BASE64}",
            "data:audio/wav;base64," + base64.encodebytes(CONTENT).decode(),
            "\r\n".join(BASE64[at : at + 64] for at in range(0, len(BASE64), 64)),
        ],
    )
    def test_base64_is_decoded(self, source):
        assert read_source(source, SETTINGS) == CONTENT

    @pytest.mark.parametrize(
        ("source", "message"),
        [
            ("", "is empty"),
            (" \n", "is empty"),
            ("not base64!", "is not valid base64.*send a data URL"),
            (BASE64[:-1], "is not valid base64"),
            ("/etc/passwd", "is not valid base64"),
            ("../secret.wav", "is not valid base64"),
            ("data:audio/wav,abc", "expected data:audio/wav;base64"),
            ("data:audio/wav;base64", "expected data:audio/wav;base64"),
            (f"data:;base64,{BASE64}", "holds text/plain; audio/"),
            (f"data:text/html;base64,{BASE64}", "holds text/html; audio/"),
            ("data:audio/wav;base64,***", "is not valid base64"),
            ("ftp://host/a.wav", "by ftp: is not supported"),
            ("gopher://host/1", "by gopher: is not supported"),
            ("concat:a|b", "by concat: is not supported"),
        ],
    )
    def test_anything_else_is_refused(self, source, message):
        assert_refused(source, message)

    def test_size_is_checked_before_decoding(self, monkeypatch):
        settings = replace(SETTINGS, ref_audio_max_bytes=len(CONTENT))
        assert read_source(BASE64, settings) == CONTENT
        assert_refused(base64.b64encode(CONTENT + b"x").decode(), "has 1281 bytes; at most 1280", settings)

        def fail(*args, **kwargs):
            raise AssertionError("the text was decoded")

        monkeypatch.setattr(audio_source.base64, "b64decode", fail)
        assert_refused("data:audio/wav;base64," + 2 * BASE64[:-2], "has about 25.. bytes; at most 1280", settings)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder that may be read, beside files that may not."""
    allowed = tmp_path / "allowed"
    (allowed / "inner").mkdir(parents=True)
    (allowed / "inner" / "a b.wav").write_bytes(CONTENT)
    (tmp_path / "secret.wav").write_bytes(b"secret")
    (tmp_path / "allowed-not").mkdir()
    (tmp_path / "allowed-not" / "a.wav").write_bytes(b"secret")
    (allowed / "link.wav").symlink_to(tmp_path / "secret.wav")
    (allowed / "link").symlink_to(tmp_path)
    (allowed / "within.wav").symlink_to(allowed / "inner" / "a b.wav")
    (allowed / "device").symlink_to("/dev/zero")
    os.mkfifo(allowed / "pipe")
    return allowed


class TestFiles:
    @pytest.mark.parametrize("url", ["file://{}/inner/a%20b.wav", "file://localhost{}/inner/a%20b.wav"])
    def test_below_an_allowed_folder_are_read(self, folder, url):
        settings = replace(SETTINGS, ref_audio_allowed_folders=f"/nowhere, {folder}/")
        assert read_source(url.format(folder), settings) == CONTENT

    def test_are_refused_unless_allowed(self, folder):
        assert_refused(f"file://{folder}/inner/a%20b.wav", "does not read .* ref_audio_allowed_folders")

    @pytest.mark.parametrize(
        "path",
        [
            "/../secret.wav",
            "/inner/../../secret.wav",
            "/%2e%2e/secret.wav",
            "/..%2fsecret.wav",
            "/./inner/a%20b.wav",
            "-not/a.wav",
            "/inner/a%20b.wav%00.txt",
            "",
        ],
    )
    def test_outside_are_refused_without_a_look(self, folder, path, monkeypatch):
        monkeypatch.setattr(audio_source.os, "open", None)
        settings = replace(SETTINGS, ref_audio_allowed_folders=str(folder))
        assert_refused(f"file://{folder}{path}", "does not read", settings)

    def test_on_other_hosts_are_refused(self, folder):
        settings = replace(SETTINGS, ref_audio_allowed_folders=str(folder))
        assert_refused(f"file://host{folder}/inner/a%20b.wav", "does not read", settings)

    @pytest.mark.parametrize(
        ("path", "message"),
        [
            ("/link.wav", "links are not followed"),
            ("/within.wav", "links are not followed"),
            ("/link/secret.wav", "links are not followed"),
            ("/device", "links are not followed"),
            ("/missing.wav", "No such file"),
            ("/inner/a%20b.wav/x", "Not a directory"),
            ("/pipe", "not a regular file"),
            ("/inner", "not a regular file"),
            ("/", "not a regular file"),
        ],
    )
    def test_that_are_not_plain_files_are_refused(self, folder, path, message):
        settings = replace(SETTINGS, ref_audio_allowed_folders=str(folder))
        assert_refused(f"file://{folder}{path}", message, settings)

    def test_that_are_too_large_are_refused(self, folder):
        settings = replace(SETTINGS, ref_audio_allowed_folders=str(folder), ref_audio_max_bytes=1_279)
        assert_refused(f"file://{folder}/inner/a%20b.wav", "has 1280 bytes; at most 1279", settings)

    def test_leave_nothing_open(self, folder):
        settings = replace(SETTINGS, ref_audio_allowed_folders=str(folder))
        before = len(list(Path("/proc/self/fd").iterdir()))
        for path in ("inner/a%20b.wav", "link.wav", "link/secret.wav", "pipe", "inner", "missing/x"):
            try:
                read_source(f"file://{folder}/{path}", settings)
            except RequestError:
                continue
        assert len(list(Path("/proc/self/fd").iterdir())) == before

    @pytest.mark.parametrize("value", ["relative", "/ok,relative", "/a/../b"])
    def test_setting_needs_absolute_folders(self, value):
        with pytest.raises(SettingsError, match="absolute"):
            Settings(ref_audio_allowed_folders=value)


class Handler(BaseHTTPRequestHandler):
    """Serves the content, a redirect to it, an endless body, and silence."""

    def do_GET(self) -> None:
        if self.path == "/redirect":
            self.answer(302, Location="/audio.wav?x=1")
        elif self.path == "/audio.wav?x=1":
            self.answer(200, **{"Content-Length": str(len(CONTENT))})
            self.wfile.write(CONTENT)
        elif self.path == "/declared":
            self.answer(200, **{"Content-Length": "99999999"})
        elif self.path == "/endless":
            self.answer(200)
            try:
                while True:
                    self.wfile.write(bytes(65_536))
            except OSError:
                return
        elif self.path == "/hang":
            self.server.released.wait(20)  # type: ignore[attr-defined]
        else:
            self.answer(404)

    def answer(self, status: int, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, *args: object) -> None:
        """Say nothing."""


@pytest.fixture(scope="module")
def host() -> Iterator[str]:
    """Address of a running web server, as host:port."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.released = threading.Event()  # type: ignore[attr-defined]
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"127.0.0.1:{server.server_port}"
        server.released.set()  # type: ignore[attr-defined]
        server.shutdown()
        thread.join()


class TestHosts:
    def test_that_are_allowed_are_asked(self, host):
        settings = replace(SETTINGS, ref_audio_allowed_hosts=f"audio.example, {host}")
        assert read_source(f"http://{host}/audio.wav?x=1", settings) == CONTENT

    @pytest.mark.parametrize(
        "url",
        [
            "http://{host}/audio.wav",
            "https://{host}/audio.wav",
            "http://localhost/a",
            "http://169.254.169.254/latest/meta-data/",
            "http://[::1]/a",
            "http://0x7f000001/a",
            "http://audio.example.evil.test/a",
            "http://evil.test/audio.example",
            "http://evil.test#audio.example",
            "http://audio.example:8080/a",
            "http://audio.example:443/a",
            "http:///a",
            "HTTP://EVIL.TEST/a",
        ],
    )
    def test_that_are_not_allowed_are_not_asked(self, host, url, monkeypatch):
        monkeypatch.setattr(audio_fetch.http.client, "HTTPConnection", None)
        monkeypatch.setattr(audio_fetch.http.client, "HTTPSConnection", None)
        settings = replace(SETTINGS, ref_audio_allowed_hosts="audio.example")
        assert_refused(url.format(host=host), "does not fetch reference audio from that host", settings)
        assert_refused(url.format(host=host), "does not fetch reference audio from that host")

    @pytest.mark.parametrize(
        "url",
        [
            "http://audio.example@evil.test/a",
            "http://evil.test\\@audio.example/a",
            "http://audio.example/a\r\nHost: evil.test",
            "http://audio.example /a",
            "http://audio.example:port/a",
            "http://[audio.example/a",
        ],
    )
    def test_that_parsers_read_differently_are_refused(self, url):
        settings = replace(SETTINGS, ref_audio_allowed_hosts="audio.example,evil.test")
        assert_refused(url, "not allowed|malformed", settings)

    @pytest.mark.parametrize(
        ("path", "message"),
        [
            ("redirect", "answered 302 Found; redirects are not followed"),
            ("missing", "answered 404 Not Found"),
            ("declared", "has 99999999 bytes; at most 2000000"),
            ("endless", "more than 2000000 bytes"),
        ],
    )
    def test_answers_that_are_refused(self, host, path, message):
        settings = replace(SETTINGS, ref_audio_allowed_hosts=host, ref_audio_max_bytes=2_000_000)
        assert_refused(f"http://{host}/{path}", message, settings)

    def test_that_do_not_answer_are_given_up(self, host, monkeypatch):
        monkeypatch.setattr(audio_fetch, "TIMEOUT_SECONDS", 0.05)
        settings = replace(SETTINGS, ref_audio_allowed_hosts=host)
        assert_refused(f"http://{host}/hang", "cannot be fetched from .*timed out", settings)

    def test_that_are_not_there(self):
        settings = replace(SETTINGS, ref_audio_allowed_hosts="127.0.0.1:1")
        assert_refused("http://127.0.0.1:1/a", "cannot be fetched from 127.0.0.1:1", settings)
