from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest
from trivet._garbage import collection_paused


class Node:
    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def collector_as_it_was() -> Iterator[None]:
    assert gc.isenabled() and gc.get_freeze_count() == 0
    yield
    gc.unfreeze()
    gc.enable()


def test_no_collection_in_the_block_and_all_of_it_later() -> None:
    with collection_paused(), pytest.raises(KeyError), collection_paused():
        assert not gc.isenabled()
        cycle = weakref.ref(Node())
        nodes = [Node() for _ in range(10_000)]
        raise KeyError
    assert gc.isenabled() and gc.get_freeze_count() == 0
    assert gc.get_count()[0] < gc.get_threshold()[0], "the next object would cost a look through all of these"
    assert any(node is nodes[0] for node in gc.get_objects(generation=2))
    assert cycle() is not None
    gc.collect()
    assert cycle() is None


def test_a_collector_that_is_off_stays_off() -> None:
    gc.disable()
    with collection_paused():
        pass
    assert not gc.isenabled()


def test_what_the_program_has_frozen_stays_frozen() -> None:
    node = Node()
    gc.freeze()
    with collection_paused():
        assert gc.isenabled()
    assert not any(known is node for known in gc.get_objects()), "it is looked through again"
