"""Makes the golden models and margins that the tests compare with.

One run writes one directory, named after the version of the XGBoost library
that is installed, with models as that library's save_raw writes them and the
margins that its predict(output_margin=True) returns. Each requirements file
beside this script pins one version:

    python3.11 -m venv venv && venv/bin/pip install -r requirements-3.2.txt
    venv/bin/python golden.py

Rows are not stored: they come from a counter-based generator that golden_test.go
repeats. Output is the same, byte for byte, when run again.
"""

import gzip
import hashlib
import json
import pathlib
import sys

import numpy as np
import xgboost as xgb

FEATURES = 17
HERE = pathlib.Path(__file__).resolve().parent


def draw(seed, rows, columns):
    """splitmix64 of seed and position: rows × columns of uint64."""
    with np.errstate(over="ignore"):
        z = np.arange(1, rows * columns + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        z += np.uint64(seed) * np.uint64(0xD1B54A32D192ED03)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (z ^ (z >> np.uint64(31))).reshape(rows, columns)


def make_rows(seed, rows):
    """Quantised telemetry-like numbers, which often equal a threshold; one in 16
    is missing, and every 97th row is empty."""
    u = draw(seed, rows, FEATURES)
    k = (u & np.uint64(0xFFFFFFFF)).astype(np.int64)
    x = np.empty((rows, FEATURES), np.float32)
    for f in range(FEATURES):
        kind = f % 5
        if kind == 0:  # percent
            x[:, f] = (k[:, f] % 101).astype(np.float32) / np.float32(100)
        elif kind == 1:  # queue length
            x[:, f] = (k[:, f] % 40).astype(np.float32)
        elif kind == 2:  # both signs
            x[:, f] = (k[:, f] % 257).astype(np.float32) / np.float32(256) - np.float32(0.25)
        elif kind == 3:  # 24 bits
            x[:, f] = (k[:, f] & 0xFFFFFF).astype(np.float32) / np.float32(1 << 23) - np.float32(1)
        else:  # few values
            x[:, f] = (k[:, f] % 4).astype(np.float32)
    x[(u >> np.uint64(60)) == 0] = np.nan
    x[::97] = np.nan
    return x


def make_labels(seed, x):
    score = np.zeros(len(x))
    for f in range(FEATURES):
        score += np.nan_to_num(x[:, f]).astype(np.float64) * ((f * 7) % 5 - 2) / (20 if f % 5 == 1 else 1)
    noise = (draw(seed + 1000, len(x), 1)[:, 0] >> np.uint64(11)).astype(np.float64) / 2.0**53
    return (score - np.median(score) + 4 * (noise - 0.5) > 0.5).astype(np.float32)


# name: (parameters, rounds, rows to predict)
CASES = {
    "depth4": (dict(max_depth=4), 100, 6000),
    "depth5": (dict(max_depth=5), 10, 2500),
    "depth6": (dict(max_depth=6), 5, 2500),
    "depth8": (dict(max_depth=8), 2, 1000),
    "dart": (dict(max_depth=4, booster="dart", rate_drop=0.3), 13, 3000),
    "early": (dict(max_depth=4, eta=1.0), 60, 1500),
    "forest": (dict(max_depth=3, num_parallel_tree=3, subsample=0.5, colsample_bynode=0.5), 3, 1000),
    "pruned": (dict(max_depth=6, tree_method="exact", gamma=6), 2, 800),
    "base_tiny": (dict(max_depth=2, base_score=1e-7), 2, 200),
    "base_low": (dict(max_depth=2, base_score=0.037), 2, 200),
    "base_high": (dict(max_depth=2, base_score=0.9999999), 2, 200),
    "logitraw": (dict(max_depth=3, objective="binary:logitraw"), 5, 800),
    "leaf": (dict(max_depth=3, min_child_weight=1e9), 2, 100),
}


def train(name, parameters, rounds, data, held_out):
    p = dict(objective="binary:logistic", eta=0.2, seed=7, nthread=1, tree_method="hist", verbosity=0)
    p.update(parameters)
    if name == "early":
        booster = xgb.train(p, data, rounds, evals=[(held_out, "held_out")], early_stopping_rounds=5, verbose_eval=False)
        assert booster.best_iteration + 1 < booster.num_boosted_rounds()
        return booster
    booster = xgb.train(p, data, rounds)
    if name == "depth4":
        booster.set_attr(note="golden", empty="")
    return booster


def margins(booster, x, names, **how):
    return booster.predict(xgb.DMatrix(x, feature_names=names), output_margin=True, **how).astype("<f4")


def save(path, data):
    with open(path, "wb") as f, gzip.GzipFile("", "wb", 9, f, mtime=0) as z:
        z.write(data)


def base_scores():
    """The intercept of many base scores: the margin of a model without a split."""
    data = xgb.DMatrix(np.zeros((4, 1), np.float32), label=np.array([0, 1, 0, 1]))
    out = []
    for objective in ("binary:logistic", "binary:logitraw"):
        for k in range(200):
            p = (draw(5, 200, 1)[k, 0] >> np.uint64(40)) / 2.0**24 if k > 9 else 10.0 ** -(k + 1)
            booster = xgb.train(
                dict(objective=objective, base_score=float(np.float32(p)), eta=0.0, max_depth=1, nthread=1, verbosity=0), data, 1)
            text = json.loads(bytes(booster.save_raw("json")))["learner"]["learner_model_param"]["base_score"]
            bits = int(booster.predict(data, output_margin=True)[:1].astype("<f4").view("<u4")[0])
            out.append([objective, text, bits])
    return out


def refused(directory):
    """Models of kinds that are not evaluated."""
    x = make_rows(3, 400)
    y = make_labels(3, x)
    data = xgb.DMatrix(x[:, :3], label=y)
    kinds = {
        "multiclass": (dict(objective="multi:softprob", num_class=3), data),
        "regression": (dict(objective="reg:squarederror"), data),
        "linear": (dict(objective="binary:logistic", booster="gblinear"), data),
        "deep": (dict(objective="binary:logistic", max_depth=9, min_child_weight=0), xgb.DMatrix(make_rows(4, 3000)[:, :8], label=make_labels(5, make_rows(5, 3000)))),
        "targets": (dict(objective="binary:logistic"), xgb.DMatrix(x[:, :3], label=np.stack([y, 1 - y], axis=1))),
        "vector_leaf": (dict(objective="binary:logistic", multi_strategy="multi_output_tree"), xgb.DMatrix(x[:, :3], label=np.stack([y, 1 - y], axis=1))),
        "categorical": (dict(objective="binary:logistic"), xgb.DMatrix(
            np.floor(np.nan_to_num(x[:, 1:2])), label=y, feature_types=["c"], enable_categorical=True)),
    }
    directory.mkdir(exist_ok=True)
    for name, (parameters, matrix) in kinds.items():
        p = dict(max_depth=2, nthread=1, verbosity=0, seed=7, tree_method="hist")
        p.update(parameters)
        if p.get("booster") == "gblinear":
            del p["max_depth"], p["tree_method"]
        booster = xgb.train(p, matrix, 2 if name != "deep" else 1)
        for form in ("json", "ubj"):
            save(directory / f"{name}.{form}.gz", bytes(booster.save_raw(form)))


def main():
    version = xgb.__version__
    out = HERE / version
    out.mkdir(exist_ok=True)
    x, held = make_rows(1, 3000), make_rows(2, 1500)
    names = [f"f_{i}" for i in range(FEATURES)]
    data = xgb.DMatrix(x, label=make_labels(1, x), feature_names=names)
    held_out = xgb.DMatrix(held, label=make_labels(2, held), feature_names=names)
    cases, stored, seed = [], b"", 100
    for name, (parameters, rounds, rows) in CASES.items():
        booster = train(name, parameters, rounds, data, held_out)
        for form in ("json", "ubj"):
            save(out / f"{name}.{form}.gz", bytes(booster.save_raw(form)))
        for iterations in (0, -1) if name == "early" else (0,):
            seed += 1
            sample = make_rows(seed, rows)
            how = dict(iteration_range=(0, booster.best_iteration + 1)) if iterations < 0 else {}
            m = margins(booster, sample, names, **how)
            one = np.concatenate([margins(booster, sample[i : i + 1], names, **how) for i in range(50)])
            assert (one.view("<u4") == m[:50].view("<u4")).all(), "single rows differ from a batch"
            stored += m.tobytes()
            cases.append(dict(name=name, iterations=iterations, seed=seed, rows=rows,
                              digest=hashlib.sha256(sample.astype("<f4").view("<u4").tobytes()).hexdigest()))
    save(out / "margins.f32.gz", stored)
    manifest = dict(xgboost=version, cases=cases, base_scores=base_scores())
    save(out / "manifest.json.gz", json.dumps(manifest, indent=0).encode())
    if version == "3.2.0":
        refused(HERE / "refused")
    print(version, sum(c["rows"] for c in cases), "rows", file=sys.stderr)


main()
