import unittest

import numpy as np

import alerts


def ticks(*spans):
    """Booleans from (value, length) pairs."""
    return np.concatenate([np.full(n, v, bool) for v, n in spans])


class Firing(unittest.TestCase):
    def test_fires_once_the_condition_has_held_for_the_time(self):
        # True from tick 10 on: evaluations at 10, 15, … seconds 2, 3, …
        held = ticks((False, 10), (True, 60))
        self.assertEqual(list(alerts.firing(held, 5)), [35])
        self.assertEqual(list(alerts.firing(held, 0)), [10])

    def test_a_gap_in_the_condition_starts_the_clock_again(self):
        held = ticks((True, 20), (False, 5), (True, 60))
        self.assertEqual(list(alerts.firing(held, 5)), [50])

    def test_what_holds_between_evaluations_alone_is_not_seen(self):
        self.assertEqual(len(alerts.firing(ticks((False, 1), (True, 4), (False, 50)), 0)), 0)


class Overloads(unittest.TestCase):
    def test_only_what_lasts_and_begins_after_quiet_counts(self):
        gap = ticks((False, 30), (True, 10), (False, 30), (True, 30), (False, 5), (True, 30), (False, 40), (True, 25))
        # The first is too short; the second has a pause inside and is one.
        self.assertEqual(list(alerts.overloads(gap)), [70, 175])

    def test_the_start_of_a_recording_is_no_begin(self):
        self.assertEqual(list(alerts.overloads(ticks((True, 60)))), [])

    def test_nothing(self):
        self.assertEqual(len(alerts.overloads(ticks((False, 60)))), 0)


if __name__ == "__main__":
    unittest.main()
