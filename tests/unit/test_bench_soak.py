"""The soak benchmark's plan, and what it counts as held."""

from __future__ import annotations

from benchmarks.bench_soak import BYTES_PER_FRAME, held, parse_options, plans

NAMES = ("requests_open", "streams_open", "chunks_queued", "tickets_open", "voices_open")
WORKER = dict.fromkeys(NAMES, 0) | {"slots": 8, "slots_free": 8}


def test_the_plan_follows_from_the_seed() -> None:
    options = parse_options(["--requests", "200", "--leave", "0.5", "--frames", "10", "--voice", "ryan"])
    made = plans(options)
    assert made == plans(options)
    leaving = [plan.leaves_after for plan in made if plan.leaves_after is not None]
    assert 60 < len(leaving) < 140
    assert 0 <= min(leaving) < max(leaving) < 10 * BYTES_PER_FRAME
    assert {plan.body["voice"] for plan in made} == {"ryan"}
    assert {plan.body["max_new_tokens"] for plan in made} == {10}


def test_a_field_can_be_removed() -> None:
    made = plans(parse_options(["--requests", "1", "--body", '{"voice": null, "instructions": "-"}']))
    assert "voice" not in made[0].body and made[0].body["instructions"] == "-"


def test_what_is_not_free_is_held() -> None:
    idle = {"running": 0, "inboxes_open": 0, "workers": [WORKER]}
    assert held(idle) == 0
    assert held(idle | {"running": 1}) == held(idle | {"inboxes_open": 1}) == 1
    for name in NAMES:
        assert held(idle | {"workers": [WORKER, WORKER | {name: 2}]}) == 2
    assert held(idle | {"workers": [WORKER | {"slots_free": 5}]}) == 3
