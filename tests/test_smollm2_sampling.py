"""Sampling of examples/serve_smollm2."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from examples.serve_smollm2.sampling import Sampling


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_p": float("nan")},
        {"seed": -1},
        {"max_tokens": 0},
    ],
    ids=str,
)
def test_sampling_settings_out_of_range_are_refused(bad: dict[str, Any]) -> None:
    (name,) = bad
    with pytest.raises(ValueError, match=f"{name}="):
        Sampling(**bad)


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [(0.4, [2]), (0.5, [2]), (0.51, [2, 0]), (0.8, [2, 0, 1]), (1.0, [2, 0, 1, 3])],
)
def test_the_nucleus_is_the_fewest_tokens_that_reach_top_p(top_p: float, kept: list[int]) -> None:
    logits = np.log(np.array([0.25, 0.125, 0.5, 0.125], np.float32))
    tokens, weights = Sampling(1.0, top_p).nucleus(logits)
    assert tokens.tolist() == kept
    assert weights.sum() == pytest.approx(1)


def test_temperature_shapes_the_draws() -> None:
    logits = np.log(np.array([0.7, 0.2, 0.1], np.float32))
    rng = np.random.default_rng(0)
    cool, warm = (
        np.bincount([Sampling(t, 1.0).choose(logits, rng) for _ in range(4000)], minlength=3) / 4000
        for t in (0.5, 1.0)
    )
    # Four standard deviations of a share in 4000 draws are below 0.032.
    np.testing.assert_allclose(warm, [0.7, 0.2, 0.1], atol=0.032)
    np.testing.assert_allclose(cool, np.array([0.49, 0.04, 0.01]) / 0.54, atol=0.032)
