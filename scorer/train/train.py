r"""Trains the risk model on recordings of `fairlead simulate --record` and says
honestly how good it is.

    python3.11 -m venv venv && venv/bin/pip install -r requirements.txt
    venv/bin/python train.py --data RECORDING --model ../xgb/model.ubj \
        --card ../xgb/MODEL_CARD.md --metrics ../xgb/metrics.json \
        --golden ../xgb/testdata/shipped.f32.gz

The same recording gives the same model file, byte for byte. The recording says
which run is for what, and splits by run, scenario and GPU type, never by tick:
train, validation (stops training, chooses between variants and sets thresholds)
and test have the same scenarios and GPU types under other seeds; the held-out
scenarios and GPU types occur in none of these.
"""

import argparse
import gzip
import hashlib
import io
import json
import pathlib
import sys

import numpy as np

import card
import evaluate
import fit
import metrics
import recording

TARGET = "gap_1s"  # the horizon that leaves time to act

EJECT = 0.82  # fleet.RiskEject
KV_FULL, UTIL_FULL = 0.9, 0.95
# 1,200 MB/s over the 5.4 GB of KV cache of a 24 GB GPU (41,408 tokens of 131,072
# bytes) is 22 % of the cache a second.
ALLOCATION = 0.2


def column(name):
    return lambda s: s.helper[name]


SCORES = [
    evaluate.Score("xgb", column("model"), EJECT, probability=True),
    evaluate.Score("formula", column("formula_risk"), EJECT, probability=True),
    evaluate.Score("kv>0.9", column("kv_usage"), KV_FULL),
    evaluate.Score("util>95%", column("util"), UTIL_FULL),
    evaluate.Score("alloc>20%/s", column("alloc_rate_1s"), ALLOCATION),
]

# What area under the curve the constraints may cost on validation runs.
CONSTRAINT_PRICE = 0.02

# False ejections per GPU-hour at which scores are compared.
BUDGETS = (1, 10)

GOLDEN_ROWS = 400

# The recording's splits, under the names of the card.
SETS = {
    "train": "train",
    "validation": "validation",
    "in distribution": "test",
    "held-out scenarios": "heldout-scenario",
    "unseen GPU types": "heldout-gpu",
}
TESTS = tuple(SETS)[2:]


def split(series):
    """The sets by name. Each needs onsets to predict within each horizon: without
    them there is nothing to learn, stop at or measure."""
    sets = {name: [s for s in series if s.split == of] for name, of in SETS.items()}
    for name, members in sets.items():
        if not members:
            sys.exit(f"the recording has no run for {SETS[name]!r}")
        for horizon, label in evaluate.HORIZONS.items():
            if not fit.rows(members, label, onset_only=True)[1].any():
                sys.exit(f"the recording has no tick that a gap follows within {horizon} (with none in the second before) in its "
                         f"{len({s.run for s in members})} runs for {SETS[name]!r}; accepted: at least one in each set; "
                         "record more or longer runs (--record-small is too small)")
    seen = {s.gpu_type for s in sets["train"]}
    if seen & {s.gpu_type for s in sets["unseen GPU types"]}:
        sys.exit("a GPU type that should be unseen is in the training runs")
    return sets


def verdict(results):
    """The model is the better default only if it wins wherever it was not
    trained: at the target horizon the whole interval of the difference in area
    to every other score lies above 0, its squared error is no larger than the
    formula's, it ejects no more often without need, and it does not let go,
    outside the intervals, of gaps that last."""
    against = []
    for name in TESTS[1:]:
        r = results[name]
        for other, cells in r["horizons"]["1 s"].items():
            low, high = cells.get("model_less_this", {}).get("interval", (1, 1))
            if not low > 0:
                against.append(f"{name}: difference in AUC-PR to {other} {low:+.3f} … {high:+.3f}")
        model, formula = (r["horizons"]["1 s"][n]["brier"]["value"] for n in ("xgb", "formula"))
        if model > formula:
            against.append(f"{name}: Brier score {model:.4f}, formula {formula:.4f}")
        model, formula = (r["alarms"][n]["false_per_gpu_hour"]["value"] for n in ("xgb", "formula"))
        if model > formula:
            against.append(f"{name}: {model:.2f} false ejections per GPU-hour, formula {formula:.2f}")
        model, formula = (r["alarms"][n]["held_in_gaps"] for n in ("xgb", "formula"))
        if model["interval"][1] < formula["interval"][0]:
            against.append(f"{name}: while a gap lasts the risk is above {EJECT} in {100 * model['value']:.0f} % of the ticks, "
                           f"the formula's in {100 * formula['value']:.0f} %")
    return dict(wins=not against, against=against)


def probability(booster, x, names):
    return 1 / (1 + np.exp(-fit.margins(booster, x, names).astype(float)))


def with_sources_missing(booster, names, series):
    """AUC-PR of the model at the target horizon when whole sources say nothing.
    It is counted as the tables count it, so that with none missing it is theirs."""
    out = {}
    for source, gone in (("none", ()), ("GPU", fit.GPU), ("engine", fit.ENGINE), ("GPU and engine", fit.GPU + fit.ENGINE)):
        scores = {}
        for s in series:
            blind = s.x.copy()
            blind[:, [names.index(n) for n in gone]] = np.nan
            scores[id(s)] = probability(booster, blind, names)
        counts = evaluate.ranked([series], evaluate.Score(source, lambda s: scores[id(s)], EJECT), TARGET, 0.0)
        out[source] = evaluate.rank_measures(counts, [1])["auc_pr"]
    return out


def golden(booster, names, series):
    """Rows of every sort, each with its margin: what the evaluator must repeat.
    Gzipped float32."""
    x = np.concatenate([s.x for s in series])
    x = x[np.linspace(0, len(x) - 1, GOLDEN_ROWS).astype(int)]
    x = np.concatenate([x, fit.drop_out(x, names, np.random.default_rng(fit.SEED))])
    rows = np.column_stack([x, fit.margins(booster, x, names)]).astype("<f4")
    out = io.BytesIO()
    with gzip.GzipFile("", "wb", 9, out, mtime=0) as z:
        z.write(rows.tobytes())
    return out.getvalue()


def write_all(files):
    """Writes files (bytes by path), all or none: each is complete beside its
    place before the first takes its place."""
    for path in files:
        if path.is_dir():
            sys.exit(f"{path} is a folder; accepted: a file")
    beside = {path: path.with_name(path.name + ".new") for path in files}
    try:
        for path, data in files.items():
            beside[path].write_bytes(data)
        for path in files:
            beside[path].replace(path)
    finally:
        for path in beside.values():
            path.unlink(missing_ok=True)


def main(arguments=None):
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--data", type=pathlib.Path, required=True)
    p.add_argument("--model", type=pathlib.Path, required=True)
    p.add_argument("--card", type=pathlib.Path)
    p.add_argument("--metrics", type=pathlib.Path)
    p.add_argument("--golden", type=pathlib.Path, help="write some rows and their margins here, gzipped float32")
    a = p.parse_args(arguments)

    rec = recording.load(a.data)
    sets = split(rec.series)
    variants = {}
    for constrained in (True, False):
        booster = fit.fit(sets["train"], sets["validation"], rec.features, TARGET, constrained)
        x, y = fit.rows(sets["validation"], TARGET, onset_only=True)
        m = fit.margins(booster, x, rec.features)
        area = metrics.average_precision(*metrics.histogram(m, y, metrics.score_edges(m)))
        variants[constrained] = (area, booster)
        print(f"monotone constraints {constrained}: {booster.num_boosted_rounds()} trees, validation AUC-PR {area:.4f}", file=sys.stderr)
    # Constraints are the safer extrapolation; they go only if they cost.
    constrained = variants[True][0] >= variants[False][0] - CONSTRAINT_PRICE
    booster = variants[constrained][1]
    data = fit.document(booster, {"fairlead_schema": rec.schema, "target": TARGET, "recording": rec.digest})

    for s in rec.series:
        s.helper["model"] = probability(booster, s.x, rec.features)
    climates = {h: float(np.mean(fit.rows(sets["train"], h, onset_only=True)[1])) for h in evaluate.HORIZONS.values()}
    matched = evaluate.match(sets["validation"], SCORES, BUDGETS)
    results = {name: evaluate.compare(sets[name], SCORES, climates, matched, fit.SEED)
               for name in TESTS}
    for name in TESTS:
        results[name]["sources_missing"] = with_sources_missing(booster, rec.features, sets[name])
    report = dict(
        model=dict(sha256=hashlib.sha256(data).hexdigest(), bytes=len(data), trees=booster.num_boosted_rounds(),
                   depth=fit.PARAMETERS["max_depth"], xgboost=fit.xgb.__version__, monotone=constrained,
                   validation_auc_pr={("monotone" if k else "free"): v[0] for k, v in variants.items()},
                   gain={k: round(v, 1) for k, v in sorted(booster.get_score(importance_type="total_gain").items(), key=lambda i: -i[1])}),
        data=dict(digest=rec.digest, notes=rec.notes, climates=climates, sets={
            k: dict(runs=len({s.run for s in v}), rows=sum(len(s.gap) for s in v), scenarios=sorted({s.scenario for s in v}),
                    types=sorted({s.gpu_type for s in v}), policies=sorted({s.policy for s in v})) for k, v in sets.items()}),
        results=results, verdict=verdict(results))
    text = card.tables(report)
    # A model without its card and numbers says nothing of what it is worth.
    files = {a.model: data}
    if a.golden:
        files[a.golden] = golden(booster, rec.features, sets["validation"])
    if a.metrics:
        files[a.metrics] = (json.dumps(report, indent=1, allow_nan=False) + "\n").encode()
    if a.card:
        files[a.card] = card.updated(a.card, text).encode()
    write_all(files)
    print(text)


if __name__ == "__main__":
    main()
