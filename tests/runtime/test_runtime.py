"""Speed is measured in turns."""

import pytest

from pmvit.runtime.bench.timing import interleave, speedup


def test_speed_is_measured_in_turns() -> None:
    calls: list[str] = []
    times = interleave({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, rounds=5, warmup=1)
    assert calls.count("a") == calls.count("b") == 6
    assert all({calls[i], calls[i + 1]} == {"a", "b"} for i in range(0, 12, 2))
    ratio = speedup({"a": [1.0, 1.0, 1.0], "b": [2.0, 2.2, 1.8]}, "a", "b")
    assert ratio.value == pytest.approx(2.0)
    assert ratio.low <= ratio.value <= ratio.high
    assert len(times["a"]) == 5
