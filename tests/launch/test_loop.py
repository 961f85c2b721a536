"""Python's garbage collector during the training loop."""

import gc

from launch.train import short_collections


def test_garbage_collection_leaves_out_what_was_set_up():
    """What is made inside is still collected; afterwards everything is again."""
    before = [[]]  # a list of containers, which the collector follows
    with short_collections():
        inside = [[]]
        followed = {id(x) for x in gc.get_objects()}
        assert id(inside) in followed and id(before) not in followed
        assert len(followed) < 10_000
        inside.append(inside)
        del inside
        assert gc.collect() >= 1
    assert gc.get_freeze_count() == 0
    assert id(before) in {id(x) for x in gc.get_objects()}
