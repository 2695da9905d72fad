"""Trains on a small made-up recording and looks at what comes out."""

import contextlib
import io
import json
import pathlib
import tempfile
import unittest
import unittest.mock

import numpy as np

import card
import fit
import recording
import train

NAMES = ["kv_usage", "kv_slope_1s", "kv_slope_5s", "alloc_rate_1s", "alloc_slope_1s", "alloc_std_5s", "queued_tokens_frac", "waiting",
         "running_frac", "inflight_delta", "arr_tokens_1s", "gr_active_1s", "util_slope_1s", "dram_active_1s", "pcie_sat_1s",
         "blocked_5s", "err_5s"]
COLUMNS = NAMES + ["gap_200ms", "gap_1s", "gap_now", "onset", "run", "scenario", "seed", "gpu", "gpu_type", "time", "formula_risk", "util"]
SPLITS = [("train", "a", 4), ("validation", "a", 2), ("test", "a", 2), ("heldout-scenario", "b", 2), ("heldout-gpu", "a", 2)]


def gpu(rng, ticks):
    """A GPU whose gaps come a second after its KV usage passes 0.8."""
    x = rng.random((ticks, len(NAMES))).astype("<f4")
    kv = np.abs((np.arange(ticks) * 0.01 + rng.random()) % 2 - 1)
    x[:, 0] = kv
    now = np.concatenate((np.zeros(5, bool), kv[:-5] > 0.8))
    ahead = lambda n: np.array([now[i + 1 : i + 1 + n].any() for i in range(ticks)])
    onset = np.array([not now[max(0, i - 4) : i + 1].any() for i in range(ticks)])
    return x, np.column_stack([ahead(1), ahead(5), now, onset]).astype("<f4"), kv


def write(directory, seed=1, calm=None):
    """calm is a split whose GPUs have no gap."""
    rng = np.random.default_rng(seed)
    rows, runs = [], []
    for split, scenario, n in SPLITS:
        for _ in range(n):
            first = sum(len(r) for r in rows)
            for g in range(3):
                x, labels, kv = gpu(rng, 600)
                if split == calm:
                    labels[:, :3], labels[:, 3] = 0, 1
                kind = 1 if split == "heldout-gpu" else 0
                ids = np.tile([len(runs), 0, 1, g, kind], (600, 1))
                rest = np.column_stack([np.arange(600) * 0.2, np.clip(kv, 0, 1), np.full(600, 0.5)])
                rows.append(np.column_stack([x, labels, ids, rest]).astype("<f4"))
            runs.append(dict(id=len(runs), split=split, scenario=scenario, seed=1, policy="random", first_row=first, rows=1800))
    data = np.concatenate(rows)
    (directory / "rows.f32").write_bytes(data.tobytes())
    (directory / "index.json").write_text(json.dumps(dict(
        format=recording.FORMAT, rows_file="rows.f32", schema="cafe", row_count=len(data), gpu_types=["x", "y"], runs=runs,
        notes=["made up"], columns=[dict(name=n) for n in COLUMNS])))
    return data


class Training(unittest.TestCase):
    def run_train(self, directory, name):
        out = directory / name
        out.mkdir()
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            train.main(["--data", str(directory), "--model", str(out / "model.ubj"), "--card", str(out / "card.md"),
                        "--metrics", str(out / "metrics.json"), "--golden", str(out / "golden.gz")])
        return {f.name: f.read_bytes() for f in out.iterdir()}

    def test_the_same_recording_gives_the_same_bytes(self):
        with tempfile.TemporaryDirectory() as d:
            directory = pathlib.Path(d)
            write(directory)
            one, two = self.run_train(directory, "1"), self.run_train(directory, "2")
            self.assertEqual(one, two)
            report = json.loads(one["metrics.json"])
            for name in train.TESTS:
                area = report["results"][name]["horizons"]["1 s"]
                self.assertGreater(area["xgb"]["auc_pr"]["value"], 0.6)
                self.assertLess(area["util>95%"]["auc_pr"]["value"], 0.2)
                missing = report["results"][name]["sources_missing"]
                self.assertEqual(missing["none"], area["xgb"]["auc_pr"]["value"])
                self.assertLess(missing["engine"], missing["none"] / 2)
            self.assertIn(b"fairlead_schema", one["model.ubj"])
            self.assertIn(b"cafe", one["model.ubj"])
            self.assertIn("Test: unseen GPU types", one["card.md"].decode())

    def test_a_set_without_gaps_is_refused_and_nothing_written(self):
        for name in train.SETS.values():
            with tempfile.TemporaryDirectory() as d:
                directory = pathlib.Path(d)
                write(directory, calm=name)
                with self.assertRaisesRegex(SystemExit, f"no tick that a gap follows within 200 ms .* runs for '{name}'"):
                    self.run_train(directory, "out")
                self.assertEqual(list((directory / "out").iterdir()), [])

    def test_a_failure_after_the_fit_writes_nothing(self):
        with tempfile.TemporaryDirectory() as d:
            directory = pathlib.Path(d)
            write(directory)
            with unittest.mock.patch.object(train, "verdict", side_effect=TypeError), self.assertRaises(TypeError):
                self.run_train(directory, "out")
            self.assertEqual(list((directory / "out").iterdir()), [])

    def test_outputs_are_all_written_or_none(self):
        with tempfile.TemporaryDirectory() as d:
            directory = pathlib.Path(d)
            model = directory / "model.ubj"
            model.write_bytes(b"old")
            with self.assertRaises(FileNotFoundError):
                train.write_all({model: b"new", directory / "none" / "card.md": b"new"})
            with self.assertRaises(SystemExit):
                train.write_all({model: b"new", directory: b"new"})
            self.assertEqual(model.read_bytes(), b"old")
            train.write_all({model: b"new", directory / "card.md": b"new"})
            self.assertEqual({f.name: f.read_bytes() for f in directory.iterdir()}, {"model.ubj": b"new", "card.md": b"new"})

    def test_a_card_keeps_what_was_written_by_hand(self):
        with tempfile.TemporaryDirectory() as d:
            path = pathlib.Path(d) / "card.md"
            path.write_text(f"by hand\n{card.BEGIN}\nold\n{card.END}\nafter\n")
            self.assertEqual(card.updated(path, "new\n"), f"by hand\n{card.BEGIN}\nnew\n{card.END}\nafter\n")
            path.write_text("by hand\n")
            with self.assertRaises(SystemExit):
                card.updated(path, "new\n")

    def test_the_recording_is_read_as_written(self):
        with tempfile.TemporaryDirectory() as d:
            directory = pathlib.Path(d)
            data = write(directory)
            rec = recording.load(directory)
            self.assertEqual(len(rec.series), 36)
            self.assertEqual(rec.features, NAMES)
            np.testing.assert_array_equal(np.concatenate([s.x for s in rec.series]), data[:, :17])
            self.assertEqual({s.gpu_type for s in rec.series if s.split == "heldout-gpu"}, {"y"})

    def test_a_recording_cut_short_is_refused(self):
        with tempfile.TemporaryDirectory() as d:
            directory = pathlib.Path(d)
            write(directory)
            rows = directory / "rows.f32"
            rows.write_bytes(rows.read_bytes()[:-4])
            with self.assertRaises(SystemExit):
                recording.load(directory)

    def test_whole_sources_drop_out(self):
        x = np.zeros((4000, 17), "<f4")
        out = fit.drop_out(x, NAMES, np.random.default_rng(1))
        columns = lambda of: np.isnan(out[:, [NAMES.index(n) for n in of]]).all(axis=1).mean()
        self.assertAlmostEqual(columns(fit.ENGINE), fit.DROP_ENGINE, delta=0.02)
        self.assertAlmostEqual(columns(fit.GPU), fit.DROP_GPU, delta=0.02)
        self.assertEqual(set(fit.ENGINE + fit.GPU) | {"queued_tokens_frac", "arr_tokens_1s", "err_5s"}, set(NAMES))
        self.assertFalse(np.isnan(x).any())


if __name__ == "__main__":
    unittest.main()
