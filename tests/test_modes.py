"""The mode of a context: one object for the same values, restored field by field."""

import threading

import gpuattn
from gpuattn.modes import Names, mode, with_mode


def test_equal_modes_are_one_object():
    first = mode.get()
    assert first.but("recorded", False).but("recorded", True) is first
    softmax = Names(softmax="reference")
    one = first.but("impls", softmax).but("batch_invariant", True)
    other = first.but("batch_invariant", True).but("impls", Names(softmax))
    assert one is other and one is not first and one.impls == softmax
    assert first.but("planned", False) is not first


def test_a_block_restores_its_field_alone():
    """Generators end their blocks when they are closed, inside whatever block runs then."""
    first = mode.get()
    inner, outer = gpuattn.no_grad(), gpuattn.use_impl(softmax="reference")
    inner.__enter__()
    outer.__enter__()
    inner.__exit__(None, None, None)
    assert mode.get().recorded and mode.get().impls == {"softmax": "reference"}
    outer.__exit__(None, None, None)
    assert mode.get() is first


def test_nested_blocks_add_up():
    with gpuattn.use_impl(softmax="reference"), gpuattn.use_impl(gelu="reference"):
        assert mode.get().impls == {"softmax": "reference", "gelu": "reference"}
        with gpuattn.use_impl(softmax="raw"):
            assert mode.get().impls == {"softmax": "raw", "gelu": "reference"}
    assert not mode.get().impls


def test_other_threads_have_the_default():
    found = []
    with with_mode("recorded", False):
        thread = threading.Thread(target=lambda: found.append(mode.get().recorded))
        thread.start()
        thread.join()
    assert found == [True]
