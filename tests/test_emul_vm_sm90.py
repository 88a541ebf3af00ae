"""The machine runs the sm_90a instruction class right."""

from __future__ import annotations

import pytest
from emulator import EmulatedDevice
from emulator.toys import attend


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("n", [1, 17, 64, 100, 200])
def test_attention_with_tma_mbarrier_and_wgmma(n, causal):
    device = EmulatedDevice("sm_90a")
    for seed in range(4):
        error, report = attend(device, "fa3.cu", n, 2, causal, seed)
        assert error < 0.0101
        assert report.count("wgmma.mma_async") == report.mma_count
