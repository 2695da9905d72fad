"""Reads a recording of `fairlead simulate --record`; internal/simulate/record.go
says what stands in it."""

import dataclasses
import hashlib
import json
import pathlib

import numpy as np

FORMAT = "fairlead-recording/1"
FEATURES = 17
LABELS = ("gap_200ms", "gap_1s")
HELPERS = ("kv_usage", "alloc_rate_1s", "util", "formula_risk")


@dataclasses.dataclass
class Series:
    """One GPU of one run, tick by tick."""

    run: int
    split: str
    scenario: str
    policy: str
    gpu_type: str
    x: np.ndarray  # features
    labels: dict  # by name of the horizon: 1 if a gap follows
    onset: np.ndarray  # no gap in the second before: a label of 1 is a new one
    gap: np.ndarray  # a capacity gap in the tick that ends now
    need: np.ndarray  # that, or one in the tick that begins now
    helper: dict


@dataclasses.dataclass
class Recording:
    features: list
    schema: str
    digest: str
    notes: list
    series: list


def load(directory):
    directory = pathlib.Path(directory)
    text = (directory / "index.json").read_bytes()
    index = json.loads(text)
    if index["format"] != FORMAT:
        raise SystemExit(f"{directory}: found format {index['format']!r}; accepted: {FORMAT!r}")
    names = [c["name"] for c in index["columns"]]
    data = (directory / index["rows_file"]).read_bytes()
    if len(data) != 4 * len(names) * index["row_count"]:
        raise SystemExit(f"{directory}: found {len(data)} bytes of rows; accepted: {index['row_count']} rows of {len(names)} numbers")
    rows = np.frombuffer(data, "<f4").reshape(-1, len(names))
    at = {n: i for i, n in enumerate(names)}
    series = []
    for run in index["runs"]:
        part = rows[run["first_row"] : run["first_row"] + run["rows"]]
        if np.any(part[:, at["run"]] != run["id"]):
            raise SystemExit(f"{directory}: run {run['id']} does not lie where the index says")
        for part in np.split(part, np.flatnonzero(np.diff(part[:, at["gpu"]])) + 1):
            get = lambda name: part[:, at[name]]
            if np.any(np.diff(get("time")) <= 0):
                raise SystemExit(f"{directory}: run {run['id']}: time does not rise")
            gap = get("gap_now") == 1
            series.append(Series(
                run=run["id"], split=run["split"], scenario=run["scenario"], policy=run["policy"],
                gpu_type=index["gpu_types"][int(get("gpu_type")[0])], x=np.ascontiguousarray(part[:, :FEATURES]),
                labels={h: get(h) for h in LABELS}, onset=get("onset") == 1,
                gap=gap, need=gap | (get("gap_200ms") == 1), helper={h: get(h) for h in HELPERS}))
    digest = hashlib.sha256(text + data).hexdigest()
    return Recording(names[:FEATURES], index["schema"], digest, index["notes"], series)
