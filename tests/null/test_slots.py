from hypothesis import given
from hypothesis import strategies as st

from prefold.distributed.slots import MIN_SLOT_BYTES, PAGE_BYTES, slot_bytes


@given(st.integers(1, 1 << 36))
def test_a_slot_holds_its_message_and_little_more(num_bytes):
    size = slot_bytes(num_bytes)
    assert num_bytes <= size
    assert size % PAGE_BYTES == 0
    if num_bytes > MIN_SLOT_BYTES:
        assert size - num_bytes < max(num_bytes / 8, PAGE_BYTES)
    assert slot_bytes(size) == size


@given(st.integers(1, 1 << 36))
def test_messages_that_grow_get_few_slots(num_bytes):
    sizes = {slot_bytes(num_bytes + num_bytes * i // 1000) for i in range(1001)}
    assert len(sizes) <= 10
