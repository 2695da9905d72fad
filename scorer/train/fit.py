"""Fits the boosted trees and writes the model file."""

import numpy as np
import xgboost as xgb

# What goes missing together; scorer/features says the same of its Source.
ENGINE = ("kv_usage", "kv_slope_1s", "kv_slope_5s", "alloc_rate_1s", "alloc_slope_1s", "alloc_std_5s", "waiting",
          "running_frac", "inflight_delta", "blocked_5s")
GPU = ("gr_active_1s", "util_slope_1s", "dram_active_1s", "pcie_sat_1s")

# More of these never means less risk. The rest is free: a slope may be large
# because much was just freed, and utilisation says little.
RISING = ("kv_usage", "alloc_rate_1s", "queued_tokens_frac", "waiting", "arr_tokens_1s", "blocked_5s", "err_5s")

SEED = 20_240_601
PARAMETERS = dict(
    objective="binary:logistic", eval_metric="aucpr", tree_method="hist", max_depth=4, eta=0.15, min_child_weight=50,
    subsample=0.8, reg_lambda=5.0, max_bin=256, seed=SEED, verbosity=0,
    # The number of threads decides how sums are split, and so the last bits.
    nthread=2,
)
ROUNDS, PATIENCE = 100, 12

DROP_ENGINE, DROP_GPU, DROP_ONE = 0.10, 0.15, 0.05


def drop_out(x, names, rng):
    """A copy of x in which whole sources are missing, and single features beside,
    as a fleet without an exporter or with a blank field shows them. Without it
    the direction of a missing value would be chance."""
    out = x.copy()
    columns = lambda of: [names.index(n) for n in of]
    out[np.ix_(rng.random(len(x)) < DROP_ENGINE, columns(ENGINE))] = np.nan
    out[np.ix_(rng.random(len(x)) < DROP_GPU, columns(GPU))] = np.nan
    out[rng.random(x.shape, dtype=np.float32) < DROP_ONE] = np.nan
    return out


def rows(series, label, onset_only=False):
    x = np.concatenate([s.x for s in series])
    y = np.concatenate([s.labels[label] for s in series])
    kept = np.concatenate([s.onset for s in series]) if onset_only else slice(None)
    return x[kept], y[kept]


def fit(train, validation, names, label, constrained=True):
    """Trains on whole rows and as many with drop-out; stops on validation.

    Rows inside a gap are trained on too, although only onsets are predictions:
    trained on onsets alone a model has not seen what an overload looks like while
    it lasts, and lets go of it (on GPU types it had not seen the mean risk inside
    a gap fell from 0.66 to 0.46, with no better ranking of onsets)."""
    rng = np.random.default_rng(SEED)
    x, y = rows(train, label)
    parameters = dict(PARAMETERS)
    if constrained:
        parameters["monotone_constraints"] = "(" + ",".join("1" if n in RISING else "0" for n in names) + ")"
    data = xgb.DMatrix(np.concatenate([x, drop_out(x, names, rng)]), label=np.concatenate([y, y]), feature_names=names)
    vx, vy = rows(validation, label)
    held = xgb.DMatrix(np.concatenate([vx, drop_out(vx, names, rng)]), label=np.concatenate([vy, vy]), feature_names=names)
    booster = xgb.train(parameters, data, ROUNDS, evals=[(held, "validation")], early_stopping_rounds=PATIENCE, verbose_eval=False)
    return booster[: booster.best_iteration + 1]


def margins(booster, x, names):
    return booster.predict(xgb.DMatrix(x, feature_names=names), output_margin=True)


def document(booster, attributes):
    """The model file: UBJSON with the attributes given and no others."""
    for name in list(booster.attributes()):
        booster.set_attr(**{name: None})
    booster.set_attr(**attributes)
    return bytes(booster.save_raw("ubj"))
