"""Measuring a GPU: plausible, quick, and nothing is kept."""

import time

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("cuda.bindings", reason="needs cuda-bindings")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from tpde.streaming.rates import DECODE_SHARE, measure_rates  # noqa: E402


@pytest.mark.whole_card
def test_rates_are_plausible_and_memory_is_given_back():
    device = torch.device("cuda", torch.cuda.current_device())
    measure_rates(device)  # whatever is made only once
    torch.cuda.empty_cache()
    before = torch.cuda.mem_get_info(device)[0]
    start = time.perf_counter()
    rates = measure_rates(device)
    seconds = time.perf_counter() - start
    torch.cuda.empty_cache()
    assert 1e9 < rates.copy < 1e12
    assert rates.copy < rates.memory < 2e13
    assert rates.decode == DECODE_SHARE * rates.memory
    assert 1e-6 < rates.launch < 1e-3
    assert seconds < 5
    assert before - torch.cuda.mem_get_info(device)[0] < 4 << 20
