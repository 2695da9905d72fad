"""Measures the alert rules of examples/alerts on a recording: how long before or
after an overload begins each one fires, and how often it fires for nothing.

    venv/bin/python alerts.py --data RECORDING

Rules are evaluated once a second, as Prometheus does with interval: 1s, on what
was known at that second; `for` counts from the first evaluation that holds. An
overload is a stretch of capacity gaps, with pauses of up to 1 s inside it, that
lasts 5 s or longer and begins after 5 s without a gap: what somebody would want
to be told of. All runs of the test and held-out splits count; intervals are over
runs.
"""

import argparse
import pathlib

import numpy as np

import metrics
import recording

EVERY = 5  # ticks between two evaluations
SPAN = 25  # ticks: how long an overload must last, and how quiet it was before
PAUSE = 5  # ticks without a gap that an overload may have inside
AROUND = 50  # ticks around a firing in which a gap justifies it

# 1,200 MB/s over the bytes of the KV cache, by GPU type.
KV_BYTES = {
    "llama-3.1-8b-h100": 447_040 * 131_072, "llama-3.1-8b-a100": 447_040 * 131_072,
    "llama-3.1-70b-4xh100": 482_000 * 327_680, "llama-3.1-8b-rtx4090": 41_408 * 131_072,
}
DEFAULT_BYTES = 41_408 * 131_072
LIMIT = 1.2e9


def hot(s):
    return np.nan_to_num(s.helper["formula_risk"], nan=0) > 0.82


def fast(s):
    name = next((n for n in KV_BYTES if s.gpu_type.startswith(n)), None)
    share = LIMIT / KV_BYTES.get(name, DEFAULT_BYTES)
    return (np.nan_to_num(s.helper["alloc_rate_1s"], nan=0) > share) & (np.nan_to_num(s.helper["kv_usage"], nan=0) > 0.5)


RULES = {"FairleadEndpointHot": (hot, 5), "FairleadAllocationFast": (fast, 2)}


def firing(condition, seconds):
    """Ticks at which a rule begins to fire."""
    held, active, out = 0, False, []
    for i in range(0, len(condition), EVERY):
        held = held + 1 if condition[i] else 0
        now = held > seconds  # the first evaluation only starts the clock
        if now and not active:
            out.append(i)
        active = now
    return np.array(out, int)


def overloads(gap):
    """Begins of overloads."""
    on = np.flatnonzero(gap)
    if len(on) == 0:
        return on
    breaks = np.flatnonzero(np.diff(on) > PAUSE)
    begins = on[np.concatenate(([0], breaks + 1))]
    ends = on[np.concatenate((breaks, [len(on) - 1]))]
    quiet = np.concatenate(([begins[0]], begins[1:] - ends[:-1]))
    keep = (ends - begins + 1 >= SPAN) & (quiet >= SPAN)
    return begins[keep]


def measure(series, rule):
    """Counts of one run."""
    condition, seconds = rule
    events, false, hours, leads = 0, 0, 0.0, []
    for s in series:
        at = firing(condition(s), seconds)
        begins = overloads(s.gap)
        events += len(begins)
        for b in begins:
            near = at[(at >= b - SPAN) & (at <= b + 2 * AROUND)]
            if len(near):
                leads.append((b - near[0]) * metrics.TICK)
        before = np.concatenate(([0], np.cumsum(s.need)))
        low, high = np.maximum(at - AROUND, 0), np.minimum(at + AROUND + 1, len(s.need))
        false += int(np.sum(before[high] == before[low]))
        hours += len(s.gap) * metrics.TICK / 3600
    return dict(events=events, leads=np.array(leads), false=false, hours=hours)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--data", type=pathlib.Path, required=True)
    a = p.parse_args()
    runs = {}
    for s in recording.load(a.data).series:
        if s.split in ("test", "heldout-scenario", "heldout-gpu"):
            runs.setdefault(s.run, []).append(s)
    draws = metrics.resamples(len(runs), 1000, 1)
    for name, rule in RULES.items():
        counts = [measure(series, rule) for series in runs.values()]
        events, false, hours = (np.array([c[k] for c in counts]) for k in ("events", "false", "hours"))
        told = np.array([len(c["leads"]) for c in counts])
        leads = np.concatenate([c["leads"] for c in counts])
        share = metrics.interval([(d @ told) / (d @ events) for d in draws if d @ events])
        rate = metrics.interval([(d @ false) / (d @ hours) for d in draws])
        quantiles = np.quantile(leads, [0.1, 0.5, 0.9]) if len(leads) else [np.nan] * 3
        print(f"{name}: {events.sum()} overloads in {len(runs)} runs, {hours.sum():.0f} GPU-hours; told of {100 * told.sum() / max(1, events.sum()):.0f} % "
              f"[{100 * share[0]:.0f}, {100 * share[1]:.0f}]; lead p10 {quantiles[0]:+.1f} s, p50 {quantiles[1]:+.1f} s, p90 {quantiles[2]:+.1f} s "
              f"(negative: after it began); {false.sum() / hours.sum():.2f} [{rate[0]:.2f}, {rate[1]:.2f}] firings without a gap per GPU-hour")


if __name__ == "__main__":
    main()
