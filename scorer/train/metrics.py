"""Measures of a risk score on recorded ticks, with intervals over whole runs.

Everything that can be added up is counted once per run; a bootstrap sample of
runs then only adds. Ticks of one run resemble each other, so runs are what is
drawn: intervals over ticks would be far too narrow.
"""

import numpy as np

TICK = 0.2  # seconds
QUIET_TICKS = 5  # an onset is a gap after this many ticks (1 s) without one
LOOK_BACK_TICKS = 25  # how long before an onset an alarm counts as its warning
JUSTIFIED_AHEAD = 25  # an ejection is justified by a gap up to this many ticks later
JUSTIFIED_BEHIND = 5  # or by one this many ticks ago
RELEASE_TICKS = 5  # calm ticks that end an ejection
SCORE_BINS = 4096
RELIABILITY_BINS = 10


def score_edges(scores):
    """Bin edges for ranking: quantiles of all scores, so that no two bins differ
    much in weight; missing scores rank lowest."""
    known = scores[~np.isnan(scores)]
    if len(known) == 0:
        return np.array([0.0])
    return np.unique(np.quantile(known, np.linspace(0, 1, SCORE_BINS)))


def histogram(scores, labels, edges):
    """Counts of positives and of all by score bin; bin 0 holds missing scores."""
    bins = np.where(np.isnan(scores), 0, 1 + np.searchsorted(edges, scores, side="right"))
    size = len(edges) + 2
    return (np.bincount(bins, weights=labels, minlength=size), np.bincount(bins, minlength=size).astype(float))


def average_precision(positives, total):
    """Area under the precision-recall curve as a sum of steps, ties together."""
    p, n = positives[::-1].cumsum(), total[::-1].cumsum()
    if p[-1] == 0:
        return np.nan
    recall = p / p[-1]
    precision = np.divide(p, n, out=np.zeros_like(p), where=n > 0)
    return float(np.sum(np.diff(recall, prepend=0.0) * precision))


def ejections(above):
    """Ticks at which the judge's two-sample rule would eject: the second of two
    ticks above the threshold, unless it is ejected already; RELEASE_TICKS calm
    ticks end an ejection. above is one GPU's ticks in order."""
    on = np.flatnonzero(above)
    if len(on) == 0:
        return on
    episode = np.concatenate(([0], np.cumsum(np.diff(on) > RELEASE_TICKS)))
    second = on > 0
    second &= above[np.maximum(on - 1, 0)]
    where = np.flatnonzero(second)
    _, first = np.unique(episode[where], return_index=True)
    return on[where[first]]


def onsets(gap):
    """Ticks at which a gap begins after QUIET_TICKS ticks without one. The first
    ticks of a recording don't count: what was before is not known."""
    before = np.concatenate(([0], np.cumsum(gap)))
    i = np.flatnonzero(gap)
    i = i[i >= QUIET_TICKS]
    return i[before[i] - before[i - QUIET_TICKS] == 0]


def warnings(above, gap, at):
    """For each onset in at, how many ticks before it the two-sample rule first
    spoke within LOOK_BACK_TICKS and since the last gap; 0 if it did not."""
    pair = above.copy()
    pair[1:] &= above[:-1]
    pair[0] = False
    lead = np.zeros(len(at), int)
    for k, i in enumerate(at):
        start = max(0, i - LOOK_BACK_TICKS)
        earlier = np.flatnonzero(gap[start:i])
        if len(earlier):
            start += earlier[-1] + 1
        spoke = np.flatnonzero(pair[start:i])
        if len(spoke):
            lead[k] = i - start - spoke[0]
    return lead


def unjustified(at, gap):
    """How many ejections have no gap around them."""
    if len(at) == 0:
        return 0
    before = np.concatenate(([0], np.cumsum(gap)))
    low = np.maximum(at - JUSTIFIED_BEHIND, 0)
    high = np.minimum(at + JUSTIFIED_AHEAD + 1, len(gap))
    return int(np.sum(before[high] == before[low]))


def alarm_counts(series, threshold):
    """Counts of one run: series is a list of (scores, gap, need), one per GPU.
    gap makes the onsets, need justifies an ejection. inside counts ticks in a gap
    that goes on, held those of them above the threshold."""
    events, false, ejected, ticks, leads, held, inside = 0, 0, 0, 0, [], 0, 0
    for scores, gap, need in series:
        above = np.nan_to_num(scores, nan=-np.inf) > threshold
        at, out = onsets(gap), ejections(above)
        lead = warnings(above, gap, at)
        events += len(at)
        leads.extend(lead[lead > 0] * TICK)
        ejected += len(out)
        false += unjustified(out, need)
        ticks += len(gap)
        lasting = gap[:-1] & gap[1:]
        held += int(np.sum(lasting & above[:-1]))
        inside += int(np.sum(lasting))
    return dict(events=events, leads=np.array(leads), ejections=ejected, false=false, hours=ticks * TICK / 3600,
                held=held, inside=inside)


def reliability(p, labels):
    """Sums by bin of predicted probability: count, Σp, Σlabel."""
    bins = np.minimum((p * RELIABILITY_BINS).astype(int), RELIABILITY_BINS - 1)
    return np.stack([np.bincount(bins, weights=w, minlength=RELIABILITY_BINS) for w in (np.ones(len(p)), p, labels)])


def calibration_error(bins):
    """Expected calibration error: mean |predicted − observed|, by count."""
    return float(np.abs(bins[1] - bins[2]).sum() / bins[0].sum())


def interval(values):
    values = np.asarray(values, float)
    values = values[~np.isnan(values)]
    if len(values) == 0:
        return [None, None]
    return [float(v) for v in np.quantile(values, [0.025, 0.975])]


def resamples(runs, times, seed):
    """Bootstrap samples of runs, as how often each run is drawn."""
    rng = np.random.default_rng(seed)
    draws = rng.integers(0, runs, size=(times, runs))
    return np.stack([np.bincount(d, minlength=runs) for d in draws])
