# SPDX-License-Identifier: Apache-2.0
"""What another process shows: in order, and again where an answer was lost."""

from tba_jax.report.relay import Relay, show


class Seen:
    """Remembers what was shown."""

    def __init__(self):
        self.items = []

    def phase(self, text):
        self.items.append(("phase", text))

    def note(self, text):
        self.items.append(("note", text))

    def write(self, step, values):
        self.items.append((step, dict(values)))


def test_items_are_kept_until_the_next_question_says_that_they_arrived():
    relay, seen = Relay(), Seen()
    relay.phase("starting")
    relay.write(1, {"train/loss": 2.0})
    number, items = relay.since(0)
    assert (number, len(items)) == (2, 2)
    relay.note("a line")
    assert relay.since(0) == (3, [*items, ("note", ("a line",))])  # the first answer was lost
    number, items = relay.since(2)
    show(items, seen)
    assert number == 3 and seen.items == [("note", "a line")]
    assert relay.since(3) == (3, [])
