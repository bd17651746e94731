#!/usr/bin/env python3
"""Turns results of `fathom bench step --json` into the tables of docs/results/cuda.md.

usage: step_report.py [--doc PAGE [--check]] RESULT.json...

Without --doc the tables are printed. With it, the text of PAGE between the markers
<!-- NAME --> and <!-- /NAME -->, where NAME is the result's file name without .json, is replaced;
results without markers are an error. --check writes nothing and fails when PAGE is not what the
results say.
"""
import argparse
import json
import sys
from pathlib import Path

import bench_report

STAGES = ["dense", "plan", "gather", "scan", "select", "rows", "attend", "other"]
PLACES = {"host": "host memory", "hbm": "HBM"}


def milliseconds(value):
    """Of a whole step; of a stage that the method does not have, nothing."""
    return "–" if not value else f"{value:,.3f}" if value < 1 else f"{value:,.2f}" if value < 100 else f"{value:,.0f}"


def amount(value, decimals=1):
    return f"{value:,.{decimals}f}" if value else "–"


def percent(value):
    return f"{100 * value:.0f} %" if value else "–"


def times(value):
    return f"{value:.2f}" if value else "–"


def not_transfer(row):
    """Part of all stages in which nothing crosses the link; by the graph with events, which adds some 2 % to a step."""
    stages = row["stages"]
    moved = stages["attend"] if row["read_bits"] == 0 else stages["rows"] + (stages["gather"] if row["placement"] == "host" else 0)
    total = sum(value for name, value in stages.items() if name != "other")
    return max(0.0, 1 - moved / total) if total else 0.0


# Columns: header, and how to write a row's value.
TIME = [("read", lambda r: f"`{r['method']}`"), ("GPU ms", lambda r: milliseconds(r["gpu_ms"])), ("wall ms", lambda r: milliseconds(r["wall_ms"])),
        ("wall / GPU", lambda r: f"{r['wall_ratio']:.3f}"), ("tokens/s", lambda r: amount(r["tokens_per_second"])),
        ("times faster than the 32-channel scan", lambda r: times(r.get("ratio")))]
TIME += [(stage, lambda r, stage=stage: milliseconds(r["stages"].get(stage, 0))) for stage in STAGES]
BYTES = [("read", lambda r: f"`{r['method']}`"), ("read bits", lambda r: amount(r["read_bits"])), ("rows/head", lambda r: amount(r["winners_per_head"], 0)),
         ("link GB", lambda r: amount(r["link_bytes"] / 1e9, 3)), ("link GB/s", lambda r: amount(r["link_gb_s"])),
         ("of memcpy", lambda r: percent(r["link_share"])), ("gather GB/s", lambda r: amount(r["gather_gb_s"])),
         ("of memcpy", lambda r: percent(r["gather_share"])), ("rows GB/s", lambda r: amount(r["rows_gb_s"])),
         ("HBM GB", lambda r: amount(r["hbm_bytes"] / 1e9, 2)), ("HBM GB/s", lambda r: amount(r["hbm_gb_s"], 0)),
         ("of copy", lambda r: percent(r["hbm_share"])), ("scan GB/s", lambda r: amount(r["scan_gb_s"], 0)),
         ("of copy", lambda r: percent(r["scan_share"])), ("not transfer", lambda r: percent(not_transfer(r)))]


def markdown(columns, rows):
    lines = ["| " + " | ".join(header for header, _ in columns) + " |", "|" + "---|" * len(columns)]
    return lines + ["| " + " | ".join(write(row) for _, write in columns) + " |" for row in rows]


def published_table(rows):
    """Our rows beside the paper's numbers, or nothing."""
    if not any("published" in row for row in rows):
        return []

    def both(entry):
        return f"{entry['gpu_ms']:,.0f} ({entry['wall_ms']:,.0f})" if entry["gpu_ms"] >= 100 else f"{entry['gpu_ms']:.1f} ({entry['wall_ms']:.1f})"

    columns = [("read", lambda r: f"{r['published']['name']} (`{r['method']}`)" if "published" in r else f"`{r['method']}`"),
               ("paper, GPU ms (wall)", lambda r: both(r["published"]) if "published" in r else "–"),
               ("times faster than 32 channels", lambda r: times(r["published"]["ratio"]) if "published" in r else "–"),
               ("here, GPU ms (wall)", both), ("times faster than 32 channels", lambda r: times(r.get("ratio"))),
               ("paper's GPU time over ours", lambda r: times(r["published"]["gpu_ms"] / r["gpu_ms"]) if "published" in r else "–")]
    return ["", "Beside the paper's table (A100, PCIe 4):", ""] + markdown(columns, rows)


def keys_text(result):
    """Which keys a result is of; results from before captured keys have synthetic ones."""
    keys = result.get("keys")
    if not keys:
        return ""
    model = f" ({keys['model']})" if keys["model"] else ""
    return f" Keys, values and queries are those of `{keys['file']}`{model}: token i uses captured token i mod {keys['n_tokens']:,}."


def setting_text(n_tokens, batch, placement):
    return f"{n_tokens:,} tokens, batch {batch}, index in {PLACES[placement]}"


def setting_section(setting, rows):
    """One context, batch and placement: both tables and what has to be said of them."""
    measured = [row for row in rows if "refusal" not in row]
    lines = [f"**{setting_text(*setting)}**", ""]
    if measured:
        lines += markdown(TIME, measured) + [""] + markdown(BYTES, measured) + published_table(measured)
    notes = [f"rows are folded: token i uses row i mod {modulus:,}" for modulus in sorted({row["row_modulus"] for row in measured} - {0})]
    notes += [f"host memory was not pinned for `{row['method']}`" for row in measured if not row["pinned"]]
    notes += [f"`{row['method']}` made {row['redone_lists']:,} lists of candidates again in {row['steps']:,} steps"
              for row in measured if row["redone_lists"]]
    notes += [f"the index of `{row['method']}` holds random codes" for row in measured if row.get("random_index")]
    notes += [f"`{row['method']}` was not measured: {row['refusal']}" for row in rows if "refusal" in row]
    for note in notes:
        lines += ["", note[0].upper() + note[1:] + "."]
    return "\n".join(lines) + "\n"


def span(values, decimals):
    low, high = f"{min(values):,.{decimals}f}", f"{max(values):,.{decimals}f}"
    return low if low == high else f"{low} to {high}"


def report(path):
    """Name and text of a result."""
    result = json.loads(path.read_text(encoding="utf-8"))
    if result.get("bench") != "step":
        sys.exit(f"{path} is no result of fathom bench step")
    if result["interrupted"]:
        sys.exit(f"{path} is of an interrupted run")
    settings = {}
    for row in result["rows"]:
        settings.setdefault((row["n_tokens"], row["batch"], row["placement"]), []).append(row)
    measured = [row for row in result["rows"] if "refusal" not in row]
    if not measured:
        sys.exit(f"{path} has no measured rows")
    shape = result["shape"]
    note = (f"{shape['name']}: {shape['n_layers']} layers, {shape['n_heads']} heads, {shape['n_kv_heads']} KV heads of {shape['head_dim']} channels, "
            f"random weights, k = {result['k']}.{keys_text(result)} {measured[0]['device']}, {result['processor']}. Medians of "
            f"{span([row['steps'] for row in measured], 0)} steps; stages by events. Measured in the same run: pinned memcpy "
            f"{span([row['memcpy_gb_s'] for row in measured], 1)} GB/s, copy in HBM {span([row['hbm_copy_gb_s'] for row in measured], 0)} GB/s "
            "(read and written). Link GB/s are over the stages gather and rows, HBM GB/s over the step.")
    sections = [setting_section(setting, rows) for setting, rows in settings.items()]
    return path.stem, "\n".join(sections) + "\n" + note + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="+", type=Path)
    parser.add_argument("--doc", type=Path)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    if args.check and not args.doc:
        parser.error("--check needs --doc")
    old = text = args.doc.read_text(encoding="utf-8") if args.doc else ""
    for path in args.results:
        name, new = report(path)
        if args.doc:
            text = bench_report.fill(args.doc, text, name, new)
        else:
            print(f"{name}\n\n{new}")
    if args.check and text != old:
        sys.exit(f"{args.doc} is not what the results say; run tools/step_report.py without --check")
    if args.doc and not args.check:
        args.doc.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
