"""Writes the measured part of the model card."""

BEGIN, END = "<!-- measured: written by scorer/train/train.py -->", "<!-- end of measured -->"


def number(cell, digits):
    """A value with its interval."""
    if cell["value"] is None:
        return "–"
    low, high = cell["interval"]
    text = f"{cell['value']:.{digits}f}"
    return text if low is None else f"{text} ({low:.{digits}f}–{high:.{digits}f})"


def rank_table(horizon, cells):
    prevalence = cells["xgb"]["prevalence"]["value"]
    climate = cells["xgb"]["brier_climatology"]["value"]
    out = [f"Gap within {horizon}: prevalence {100 * prevalence:.2f} %, Brier score of climatology {climate:.4f}.", "",
           "| score | AUC-PR | xgb less this | Brier | ECE |", "|---|---|---|---|---|"]
    for name, c in cells.items():
        difference = "" if name == "xgb" else "{:+.3f} … {:+.3f}".format(*c["model_less_this"]["interval"])
        out.append(f"| {name} | {number(c['auc_pr'], 3)} | {difference} | {number(c['brier'], 4) if 'brier' in c else ''} | "
                   f"{number(c['ece'], 4) if 'ece' in c else ''} |")
    return out + [""]


def reliability_table(bins):
    out = ["| predicted | rows | mean predicted | observed |", "|---|---|---|---|"]
    n, p, y = bins
    for i in range(len(n)):
        if n[i]:
            out.append(f"| {i / len(n):.1f}–{(i + 1) / len(n):.1f} | {n[i]:.0f} | {p[i] / n[i]:.3f} | {y[i] / n[i]:.3f} |")
    return out + [""]


def alarm_table(cells, thresholds=False):
    out = ["| score | onsets warned of | lead p10, s | lead p50, s | above it while a gap lasts | false ejections per GPU-hour | ejections per GPU-hour |",
           "|---|---|---|---|---|---|---|"]
    for name, c in cells.items():
        label = f"{name.split('>')[0]} > {c['threshold']:.3g}" if thresholds else name
        out.append(f"| {label} | {number(c['recall'], 3)} | {number(c['lead_p10'], 1)} | {number(c['lead_p50'], 1)} | "
                   f"{number(c['held_in_gaps'], 3)} | {number(c['false_per_gpu_hour'], 2)} | {number(c['ejections_per_gpu_hour'], 1)} |")
    return out + [""]


def tables(report):
    m, d = report["model"], report["data"]
    out = [f"Model: {m['trees']} trees of depth {m['depth']}, XGBoost {m['xgboost']}, monotone constraints {'on' if m['monotone'] else 'off'} "
           f"(validation AUC-PR {m['validation_auc_pr']['monotone']:.4f} with, {m['validation_auc_pr']['free']:.4f} without), "
           f"{m['bytes']} bytes, SHA-256 `{m['sha256']}`.", "",
           f"Recording: `fairlead simulate --record`, digest `{d['digest']}`. Arrivals: {'; '.join(d['notes'])}.", "",
           "| set | runs | ticks | scenarios | GPU types | policies |", "|---|---|---|---|---|---|"]
    for name, s in d["sets"].items():
        out.append(f"| {name} | {s['runs']} | {s['rows']} | {', '.join(s['scenarios'])} | {', '.join(s['types'])} | {', '.join(s['policies'])} |")
    out += ["", "Share of the total gain: " + ", ".join(f"{k} {v / sum(m['gain'].values()):.3f}" for k, v in list(m["gain"].items())[:8]) + ".", ""]
    for name, r in report["results"].items():
        out += [f"### Test: {name}", "", f"{r['runs']} runs, {r['gpus']} GPU series, {r['rows']} ticks; intervals are 95 %, over runs.", ""]
        for horizon, cells in r["horizons"].items():
            out += rank_table(horizon, cells)
        missing = ", ".join(f"{k} {v:.3f}" for k, v in r["sources_missing"].items())
        out += [f"The model's AUC-PR at 1 s with sources missing: {missing}.", ""]
        out += ["Alarms at each score's own threshold, by the judge's rule of two samples running:", ""] + alarm_table(r["alarms"])
        events = r["alarms"]["xgb"]["events"]["value"]
        out += [f"({events:.0f} onsets.)", ""]
        for budget, cells in r["matched"].items():
            out += [f"Alarms at one price: the lowest threshold with a false-ejection rate of at most {budget} per GPU-hour on the validation runs "
                    "(zeros where only a threshold above all scores keeps it):", ""]
            out += alarm_table(cells, thresholds=True)
        out += ["Reliability of the model on rows before which there was no gap for a second, gap within 1 s:", ""] + reliability_table(r["horizons"]["1 s"]["xgb"]["reliability"])
    v = report["verdict"]
    if v["wins"]:
        out += ["**Verdict: the model beats the formula** on held-out scenarios and on GPU types it never saw, outside the intervals."]
    else:
        out += ["**Verdict: the formula stays the default scorer.** What speaks against the model:", ""] + [f"- {x}" for x in v["against"]]
    return "\n".join(out) + "\n"


def updated(path, text):
    """The card with its measured part replaced and the rest as it was."""
    old = path.read_text() if path.exists() else f"# Model card\n\n{BEGIN}\n{END}\n"
    if old.count(BEGIN) != 1 or old.count(END) != 1 or old.index(BEGIN) > old.index(END):
        raise SystemExit(f"{path}: accepted: a card with one line {BEGIN!r} and after it one {END!r}")
    before, rest = old.split(BEGIN)
    _, after = rest.split(END)
    return before + BEGIN + "\n" + text + END + after
