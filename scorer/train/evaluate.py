"""Compares scores on sets of series: each measure with an interval over runs."""

import numpy as np

import metrics

BOOTSTRAPS = 400
HORIZONS = {"200 ms": "gap_200ms", "1 s": "gap_1s"}


class Score:
    """A score to compare: where it comes from and where its alarm lies."""

    def __init__(self, name, of, threshold, probability=False):
        self.name, self.of, self.threshold, self.probability = name, of, threshold, probability


def by_run(series):
    runs = {}
    for s in series:
        runs.setdefault(s.run, []).append(s)
    return list(runs.values())


def ranked(runs, score, horizon, climate):
    """Counts of each run, on onset rows, for the measures that a label has:
    histogram for the precision-recall curve; squared errors of score and of
    climatology; reliability."""
    edges = metrics.score_edges(np.concatenate([score.of(s) for r in runs for s in r]))
    out = []
    for r in runs:
        p = np.concatenate([score.of(s) for s in r]).astype(float)
        y = np.concatenate([s.labels[horizon] for s in r]).astype(float)
        onset = np.concatenate([s.onset for s in r])
        p, y = p[onset], y[onset]
        counts = dict(zip(("positives", "total"), metrics.histogram(p, y, edges)))
        counts["climate"] = np.sum((climate - y) ** 2)
        if score.probability:
            p = np.where(np.isnan(p), climate, p)  # not judged: says what is usual
            counts["squares"] = np.sum((p - y) ** 2)
            counts["reliability"] = metrics.reliability(p, y)
        out.append(counts)
    return out


def rank_measures(counts, times):
    """Measures of runs drawn times[i] times each."""
    total = lambda key: sum(t * c[key] for t, c in zip(times, counts) if t)
    n = total("total")
    rows, positives = n.sum(), total("positives")
    out = dict(prevalence=positives.sum() / rows, auc_pr=metrics.average_precision(positives, n),
               brier_climatology=total("climate") / rows)
    if "squares" in counts[0]:
        out["brier"] = total("squares") / rows
        out["ece"] = metrics.calibration_error(total("reliability"))
    return out


def alarm_measures(counts, times):
    total = lambda key: sum(t * c[key] for t, c in zip(times, counts) if t)
    leads = np.concatenate([np.tile(c["leads"], t) for t, c in zip(times, counts) if t])
    events, hours = total("events"), total("hours")
    out = dict(recall=len(leads) / events if events else np.nan, events=events,
               false_per_gpu_hour=total("false") / hours, ejections_per_gpu_hour=total("ejections") / hours)
    out["held_in_gaps"] = total("held") / max(1, total("inside"))
    out["lead_p10"], out["lead_p50"] = np.quantile(leads, [0.1, 0.5]) if len(leads) else (np.nan, np.nan)
    return out


def with_intervals(counts, measures, draws):
    point = measures(counts, np.ones(len(counts), int))
    samples = [measures(counts, d) for d in draws]
    return {k: dict(value=None if np.isnan(v) else float(v), interval=metrics.interval([s[k] for s in samples]))
            for k, v in point.items()}


def alarm_counts(runs, score, threshold):
    return [metrics.alarm_counts([(score.of(s), s.gap, s.need) for s in r], threshold) for r in runs]


def alarms(runs, score, threshold, draws):
    return with_intervals(alarm_counts(runs, score, threshold), alarm_measures, draws)


def compare(series, scores, climates, matched, seed):
    """Measures of all scores on one set of series. matched are thresholds chosen
    elsewhere. The same draws serve all scores, so that differences are paired."""
    runs = by_run(series)
    draws = metrics.resamples(len(runs), BOOTSTRAPS, seed)
    out = dict(runs=len(runs), gpus=len(series), rows=sum(len(s.gap) for s in series), horizons={}, alarms={}, matched={})
    for horizon, label in HORIZONS.items():
        counts = {s.name: ranked(runs, s, label, climates[label]) for s in scores}
        out["horizons"][horizon] = {n: with_intervals(c, rank_measures, draws) for n, c in counts.items()}
        first = scores[0].name
        for n in (s.name for s in scores[1:]):
            difference = [rank_measures(counts[first], d)["auc_pr"] - rank_measures(counts[n], d)["auc_pr"] for d in draws]
            out["horizons"][horizon][n]["model_less_this"] = dict(interval=metrics.interval(difference))
        out["horizons"][horizon][first]["reliability"] = sum(c["reliability"] for c in counts[first]).tolist()
    for s in scores:
        out["alarms"][s.name] = alarms(runs, s, s.threshold, draws)
        for budget, thresholds in matched.items():
            cell = alarms(runs, s, thresholds[s.name], draws)
            cell["threshold"] = thresholds[s.name]
            out["matched"].setdefault(budget, {})[s.name] = cell
    return out


def match(series, scores, budgets):
    """For each budget of unjustified ejections per GPU-hour and each score, the
    lowest threshold that keeps the budget on series: so scores can be compared
    at one price. A threshold above all scores means that none does."""
    runs, out = by_run(series), {b: {} for b in budgets}
    for s in scores:
        values = np.concatenate([s.of(x) for x in series])
        values = values[~np.isnan(values)]
        candidates = np.unique(np.quantile(values, 1 - np.geomspace(1e-5, 0.5, 40)))[::-1]
        cost = [alarm_measures(alarm_counts(runs, s, c), np.ones(len(runs), int))["false_per_gpu_hour"] for c in candidates]
        for b in budgets:
            over = [i for i, c in enumerate(cost) if c > b]
            kept = candidates[: over[0] if over else len(candidates)]
            out[b][s.name] = float(kept[-1] if len(kept) else values.max())
    return out
