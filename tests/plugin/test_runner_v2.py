"""Model Runner V2 gives the codes that the local engine gives, also when requests are preempted and come back."""

from __future__ import annotations

import pytest

from tests.plugin.pool import SERVERS
from tests.plugin.reference import LocalReference, eight_requests
from tests.plugin.server import SpeechServer
from tests.plugin.test_batching import SAMPLING, assert_right, growing_at_once, speak_at_once

pytestmark = pytest.mark.vllm

FRAMES = 48  # longer than a block of cache, for which there is no room eight times


@pytest.mark.server("v2")
@SAMPLING
def test_requests_at_once_are_right(server: SpeechServer, local: LocalReference, seeded: bool) -> None:
    requests = [fields | {"max_new_tokens": 16} for fields in eight_requests(SERVERS["v2"].checkpoint, seeded=seeded)]
    assert_right("v2", speak_at_once(server, requests), requests, local)
    assert server.worker()["runner"] == "v2"


@pytest.mark.server("v2")
def test_preempted_requests_are_right(server: SpeechServer, local: LocalReference) -> None:
    requests = growing_at_once(SERVERS["v2"].checkpoint, FRAMES, seeded=True)
    before = server.worker()["preempted"]
    assert_right("v2", speak_at_once(server, requests), requests, local)
    assert server.worker()["preempted"] > before
    server.wait_until_idle()
