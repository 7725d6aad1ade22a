import pytest

from jetdraft.contracts.step_contract import StepContract
from jetdraft.runtime.passes.cache import Cache

CONTRACT = StepContract(
    vocab_size=8, capacity=10, max_width=4, dtype="float32", kv_shapes=((2, 4),)
)


def test_cursor_moves_and_buffers_stay():
    cache = Cache(CONTRACT)
    pointers = [buffer.data_ptr() for buffer in cache.buffers.values()]
    cache.advance(7)
    cache.rewind(3)
    assert (cache.length, cache.room) == (3, 7)
    assert [buffer.data_ptr() for buffer in cache.buffers.values()] == pointers


@pytest.mark.parametrize("rows", [-1, 11])
def test_advance_never_passes_the_capacity(rows):
    with pytest.raises(ValueError, match="cannot commit"):
        Cache(CONTRACT).advance(rows)


@pytest.mark.parametrize("length", [-1, 5])
def test_rewind_never_goes_forward(length):
    cache = Cache(CONTRACT)
    cache.advance(4)
    with pytest.raises(ValueError, match="cannot rewind"):
        cache.rewind(length)
