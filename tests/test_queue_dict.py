"""A dict that is a queue, beside an `OrderedDict`."""

from collections import OrderedDict

from hypothesis import given, settings
from hypothesis import strategies as st

from lmc.queue_dict import FIRST, QueueDict


@settings(max_examples=500)
@given(st.lists(st.tuples(st.sampled_from(["add", "again", "remove", "first"]), st.integers(0, 5))))
def test_the_first_entry_is_that_of_an_ordered_dict(steps):
    queue, model = QueueDict(), OrderedDict()
    for step, key in steps:
        value = object()
        if step == "add":
            if key not in model:
                queue[key] = model[key] = value
        elif step == "again":  # at the end
            queue.pop(key, None)
            queue[key] = model[key] = value
            model.move_to_end(key)
        elif step == "remove":
            assert queue.pop(key, None) == model.pop(key, None)
        else:
            assert queue.first() == next(iter(model), None)
    assert list(queue) == list(model)


def test_many_entries_are_removed_from_the_beginning():
    queue = QueueDict()
    queue.update((number, object()) for number in range(3 * FIRST))
    for number in range(3 * FIRST):
        assert queue.first() == number
        del queue[number]
    assert queue.first() is None
