"""Tests of the measures against slow or hand-made answers.

    venv/bin/python -m unittest discover -s scorer/train
"""

import unittest

import numpy as np

import metrics


def slow_average_precision(scores, labels):
    order = np.argsort(-scores, kind="stable")
    hits, area = 0, 0.0
    for i, k in enumerate(order, 1):
        if labels[k]:
            hits += 1
            area += hits / i
    return area / labels.sum()


class Ranking(unittest.TestCase):
    def test_average_precision_matches_the_definition(self):
        rng = np.random.default_rng(1)
        scores, labels = rng.random(2000), rng.random(2000) < 0.1
        edges = np.unique(scores)
        got = metrics.average_precision(*metrics.histogram(scores, labels.astype(float), edges))
        self.assertAlmostEqual(got, slow_average_precision(scores, labels), places=9)

    def test_coarse_bins_change_little(self):
        rng = np.random.default_rng(2)
        labels = rng.random(200_000) < 0.02
        scores = rng.normal(size=len(labels)) + 2 * labels
        got = metrics.average_precision(*metrics.histogram(scores, labels.astype(float), metrics.score_edges(scores)))
        self.assertAlmostEqual(got, slow_average_precision(scores, labels), delta=0.01)

    def test_a_constant_score_has_the_prevalence(self):
        labels = (np.arange(100) < 7).astype(float)
        scores = np.full(100, 0.3)
        self.assertAlmostEqual(metrics.average_precision(*metrics.histogram(scores, labels, metrics.score_edges(scores))), 0.07)

    def test_missing_scores_rank_last(self):
        scores, labels = np.array([np.nan, 0.1, 0.2, 0.3]), np.array([1.0, 0, 0, 0])
        self.assertAlmostEqual(metrics.average_precision(*metrics.histogram(scores, labels, metrics.score_edges(scores))), 0.25)

    def test_calibration_error(self):
        p = np.array([0.05] * 100 + [0.95] * 100)
        exact = np.array([1.0] * 5 + [0] * 95 + [1] * 95 + [0] * 5)
        self.assertAlmostEqual(metrics.calibration_error(metrics.reliability(p, exact)), 0)
        self.assertAlmostEqual(metrics.calibration_error(metrics.reliability(p, 1 - exact)), 0.9)
        self.assertEqual(metrics.reliability(np.array([1.0]), np.array([1.0]))[0][-1], 1)


def ticks(text):
    return np.array([c == "x" for c in text])


class Alarms(unittest.TestCase):
    def test_an_ejection_needs_two_samples(self):
        self.assertEqual(list(metrics.ejections(ticks("x.x.x.x...........xx"))), [19])

    def test_an_ejection_lasts_until_five_calm_ticks(self):
        self.assertEqual(list(metrics.ejections(ticks("xx....xx.....xx..x"))), [1, 14])

    def test_no_alarm(self):
        self.assertEqual(list(metrics.ejections(ticks("....."))), [])

    def test_an_onset_follows_a_quiet_second(self):
        self.assertEqual(list(metrics.onsets(ticks("x....x.....xx....x.....x"))), [11, 23])
        self.assertEqual(list(metrics.onsets(ticks("......x"))), [6])

    def test_warning_time(self):
        gap = ticks("..........x")
        self.assertEqual(list(metrics.warnings(ticks("......xxxxx"), gap, [10])), [3])
        self.assertEqual(list(metrics.warnings(ticks("......x.x.x"), gap, [10])), [0])
        # An alarm that began before the last gap warns from that gap's end on.
        gap = ticks("..x.......x")
        self.assertEqual(list(metrics.warnings(ticks("xxxxxxxxxxx"), gap, [10])), [7])

    def test_old_warnings_do_not_count(self):
        gap = np.zeros(60, bool)
        gap[59] = True
        above = np.ones(60, bool)
        self.assertEqual(list(metrics.warnings(above, gap, [59])), [metrics.LOOK_BACK_TICKS])
        above[30:] = False
        self.assertEqual(list(metrics.warnings(above, gap, [59])), [0])

    def test_unjustified_ejections(self):
        gap = np.zeros(100, bool)
        gap[50] = True
        self.assertEqual(metrics.unjustified(np.array([24]), gap), 1)
        self.assertEqual(metrics.unjustified(np.array([25, 50, 55]), gap), 0)
        self.assertEqual(metrics.unjustified(np.array([56, 99]), gap), 2)

    def test_counts_add_up(self):
        gap = np.zeros(9000, bool)
        gap[100] = True
        scores = np.zeros(9000)
        scores[95:101] = 1
        scores[4000:4002] = 1
        c = metrics.alarm_counts([(scores, gap, gap)], 0.5)
        self.assertEqual((c["events"], c["ejections"], c["false"], list(c["leads"])), (1, 2, 1, [0.8]))
        self.assertAlmostEqual(c["hours"], 0.5)


if __name__ == "__main__":
    unittest.main()
