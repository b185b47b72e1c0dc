"""vLLM's own routes beside the speech: those that make sense work, the others fail without harm."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.plugin.pool import SERVERS
from tests.plugin.reference import LocalReference
from tests.plugin.server import SpeechServer

pytestmark = pytest.mark.vllm

COMPLETIONS: dict[str, dict[str, Any]] = {
    "token ids": {"prompt": [1, 2, 3, 4], "max_tokens": 5},
    "several prompts": {"prompt": [[5, 6], [7] * 100], "max_tokens": 5, "temperature": 0.7},
    "codes above the codebook": {"prompt": [2_100, 3_000], "max_tokens": 5},
    "a payload of the wrong form": {"prompt": [1, 2], "max_tokens": 5, "vllm_xargs": {"qwen3tts": "forged"}},
    "log probabilities": {"prompt": [1, 2], "max_tokens": 5, "logprobs": 3},
    "text": {"prompt": "Hello there.", "max_tokens": 5},
}


@pytest.mark.server("standard")
def test_the_model_is_listed(server: SpeechServer) -> None:
    answer = server.client.get("/v1/models")
    assert answer.status_code == 200
    (model,) = answer.json()["data"]
    assert model["id"] == str(server.checkpoint)


@pytest.mark.server("standard")
def test_health_tells_what_is_served(server: SpeechServer) -> None:
    health = server.client.get("/health").json()
    assert health["status"] == "ok"
    assert health["variant"] == "custom_voice"
    assert health["settings"]["trace"] is True


@pytest.mark.server("standard")
def test_metrics_count_the_requests(server: SpeechServer) -> None:
    server.speak(max_new_tokens=2)
    assert "vllm:request_success_total" in server.client.get("/metrics").text


@pytest.mark.server("standard")
@pytest.mark.parametrize("body", COMPLETIONS.values(), ids=COMPLETIONS)
def test_completions_do_no_harm(server: SpeechServer, local: LocalReference, body: dict[str, Any]) -> None:
    fields = {"text": "Speech goes on beside it.", "max_new_tokens": 24}
    with ThreadPoolExecutor(1) as threads:
        speech = threads.submit(server.speak, **fields)
        answer = server.client.post("/v1/completions", json=body)
    assert answer.status_code in (200, 400, 500)
    if answer.status_code == 200:  # no speech was asked for, so all that comes is the end of it
        assert answer.json()["usage"]["completion_tokens"] == len(answer.json()["choices"])
    local.assert_equal(speech.result(), SERVERS["standard"].checkpoint, fields)
    server.wait_until_idle()


@pytest.mark.server("standard")
def test_chat_fails_without_harm(server: SpeechServer) -> None:
    body = {"messages": [{"role": "user", "content": "Hello."}], "max_tokens": 3}
    assert server.client.post("/v1/chat/completions", json=body).status_code in (400, 404, 500)
    assert len(server.speak(max_new_tokens=3).codes) == 3
    server.wait_until_idle()
