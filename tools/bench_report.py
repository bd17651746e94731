#!/usr/bin/env python3
"""Turns results of `fathom bench scan|select|attend|prefill|decode --json` into tables and pictures.

usage: bench_report.py [--doc PAGE [--check]] [--svg FOLDER] RESULT.json...

Without --doc the tables are printed. With it, the text of PAGE between the markers
<!-- NAME --> and <!-- /NAME -->, where NAME is the result's file name without .json, is replaced;
results without markers are an error. --check writes nothing and fails when PAGE is not what the
results say. --svg makes FOLDER/NAME.svg of each result: of scan, select and prefill the rate
against threads, of attend the times of a step as bars, of decode the step against context where there are two.
"""
import argparse
import json
import math
import re
import sys
from pathlib import Path

import decode_report

COLOURS = decode_report.COLOURS
WIDTH = 820


def number(value, decimals=0):
    return "–" if value is None else f"{value:,.{decimals}f}"


def milliseconds(value):
    return number(value, 3 if value < 1 else 2 if value < 100 else 0)


def rate(value):
    return number(value, 1 if value is None or value >= 10 else 2)


def percent(value):
    return "–" if value is None else f"{100 * value:.0f} %"


def times(value):
    return "–" if value is None else f"{value:.2f}" if value < 10 else f"{value:.1f}"


# Columns of a row: header, and how to write the row's value.
SHAPE = [("tokens", lambda r: f"{r['n_tokens']:,}"), ("group", lambda r: str(r["group"])), ("threads", lambda r: str(r["threads"])),
         ("read", lambda r: f"`{r['name']}`" if ":" in r["name"] else r["name"]), ("ms", lambda r: milliseconds(r["median_ms"]))]
READ = [("GB/s", lambda r: rate(r.get("gb_s"))), ("of read bandwidth", lambda r: percent(r.get("read_share")))]
RATIO = [("times faster", lambda r: times(r.get("ratio")))]
COLUMNS = {
    "scan": SHAPE + [("read bits", lambda r: number(r.get("read_bits"))), ("planes", lambda r: number(r.get("planes"), 1)),
                     ("Mkeys/s", lambda r: number(r.get("mkeys_s")))] + READ + RATIO,
    "select": SHAPE + [("rows/head", lambda r: number(r.get("rows_per_head")))] + READ + RATIO,
    "attend": SHAPE + [("rows/head", lambda r: number(r.get("rows_per_head"))), ("read bits", lambda r: number(r.get("read_bits"), 1))] + READ +
              RATIO + [("than flash attention", lambda r: times(r.get("flash_ratio")))],
    "prefill": SHAPE + [("tokens/s", lambda r: number(r.get("tokens_s"))), ("GFLOP/s", lambda r: number(r.get("gflop_s"))),
                        ("of FMA peak", lambda r: percent(r.get("fma_share")))] + RATIO,
}
BASELINE = {"scan": "exact scores", "select": "std::nth_element", "attend": "the fastest of ggml's three", "prefill": "the fastest of ggml's three"}
# Picture: field of the rows, title, and the field of `machine` that bounds it.
PICTURE = {"scan": ("gb_s", "Scan, GB/s against threads", "read_gb_s"), "select": ("gb_s", "Selection, GB/s of scores against threads", "read_gb_s"),
           "prefill": ("gflop_s", "Prefill attention, GFLOP/s against threads", "fma_gflop_s")}


MOST_ROWS = 100


def shown_rows(result):
    """Rows of the least and most threads; where those are too many for a page, of the most tokens and the least and most heads in a group."""
    counts = [speed["threads"] for speed in result["machine"]]
    rows = [row for row in result["rows"] if row["threads"] in (counts[0], counts[-1])]
    if len(rows) <= MOST_ROWS:
        return rows
    groups = {min(row["group"] for row in rows), max(row["group"] for row in rows)}
    most = max(row["n_tokens"] for row in rows)
    return [row for row in rows if row["n_tokens"] == most and row["group"] in groups]


def table(result):
    columns = COLUMNS[result["bench"]]
    lines = ["| " + " | ".join(header for header, _ in columns) + " |", "|" + "---|" * len(columns)]
    for row in shown_rows(result):
        lines.append("| " + " | ".join(write(row) for _, write in columns) + " |")
    speeds = "; ".join(f"{s['threads']} thread{'s' if s['threads'] > 1 else ''}: {s['read_gb_s']:.1f} GB/s read, "
                       f"{s['fma_gflop_s']:,.0f} GFLOP/s of fp32 multiply-adds" for s in result["machine"])
    note = (f"{result['processor']}, {result['backend']}, one layer of {result['n_kv_heads']} KV heads, D = {result['head_dim']}; medians; "
            f"times faster than {BASELINE[result['bench']]}. Measured in the same run: {speeds}.")
    return "\n".join(lines) + "\n\n" + note + "\n"


class Svg:
    """A picture that grows by pieces."""

    def __init__(self, height, title):
        self.height = height
        self.pieces = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" '
                       'font-family="sans-serif" font-size="12">', f'<rect width="{WIDTH}" height="{height}" fill="white"/>']
        self.text(16, 20, title, size=13)

    def text(self, x, y, text, anchor="start", colour="black", size=12):
        text = text.replace("&", "&amp;").replace("<", "&lt;")
        self.pieces.append(f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}" font-size="{size}">{text}</text>')

    def line(self, points, colour, dashed=False):
        path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self.pieces.append(f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>')
        if not dashed:
            self.pieces += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in points]

    def grid(self, y, left, right, label):
        self.pieces.append(f'<path d="M{left} {y:.1f}H{right}" stroke="#d0d7de"/>')
        self.text(left - 8, y + 4, label, "end")

    def bar(self, x, y, width, height, colour):
        self.pieces.append(f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 1):.1f}" height="{height}" fill="{colour}"/>')

    def finish(self):
        return "\n".join(self.pieces + ["</svg>"]) + "\n"


def rate_picture(result):
    """Rates against threads, both axes logarithmic; the machine's limit dashed. The first group at the most tokens."""
    field, title, limit = PICTURE[result["bench"]]
    n_tokens, group = max(r["n_tokens"] for r in result["rows"]), result["rows"][0]["group"]
    series = {}
    for row in result["rows"]:
        if (row["n_tokens"], row["group"]) == (n_tokens, group) and field in row:
            series.setdefault(row["name"], []).append((row["threads"], row[field]))
    bound = [(s["threads"], s[limit]) for s in result["machine"]]
    series["limit measured in this run"] = bound
    ys = [y for points in series.values() for _, y in points]
    low, high = math.floor(math.log2(min(ys))), math.ceil(math.log2(max(ys)))
    first, last = math.log2(bound[0][0]), math.log2(bound[-1][0])
    left, right, top, bottom = 70, WIDTH - 270, 40, 320
    svg = Svg(365, f"{title} ({n_tokens:,} tokens, group {group})")

    def at(x, y):
        across = (math.log2(x) - first) / (last - first) if last > first else 0.5
        return left + across * (right - left), bottom - (math.log2(y) - low) / (high - low) * (bottom - top)

    for e in range(low, high + 1):
        svg.grid(at(1, 2.0 ** e)[1], left, right, f"{2.0 ** e:g}")
    for x, _ in bound:
        svg.text(at(x, 2.0 ** low)[0], bottom + 18, str(x), "middle")
    svg.text((left + right) / 2, bottom + 36, "threads", "middle")
    labels = []
    for i, (name, points) in enumerate(series.items()):
        colour = COLOURS[i % len(COLOURS)]
        svg.line([at(x, y) for x, y in points], colour, dashed=points is bound)
        labels.append((at(*points[-1])[1], name, colour))
    below = -math.inf
    for y, name, colour in sorted(labels):  # keep labels apart
        below = max(y, below + 15)
        svg.text(right + 10, below + 4, name, colour=colour)
    return svg.finish()


def bar_picture(result):
    """Times of a step with all threads, logarithmic bars, a panel per context."""
    threads = max(row["threads"] for row in shown_rows(result))
    group = result["rows"][0]["group"]
    rows = [r for r in result["rows"] if r["threads"] == threads and r["group"] == group]
    contexts = sorted({r["n_tokens"] for r in rows})
    low = math.floor(math.log10(min(r["median_ms"] for r in rows)))
    high = math.log10(max(r["median_ms"] for r in rows))
    left, right, step = 270, WIDTH - 150, 22
    svg = Svg(50 + step * len(rows) + 34 * len(contexts), f"A decode step of one layer, ms (logarithmic), {threads} threads, group {group}")
    y = 40
    for context in contexts:
        svg.text(16, y + 12, f"{context:,} tokens", size=13)
        y += 22
        for i, row in enumerate(r for r in rows if r["n_tokens"] == context):
            length = (math.log10(row["median_ms"]) - low) / (high - low) * (right - left)
            svg.text(left - 8, y + 13, row["name"], "end")
            svg.bar(left, y + 2, length, 15, COLOURS[i % len(COLOURS)])
            ratio = f", {times(row['ratio'])} times" if row.get("ratio") else ""
            svg.text(left + max(length, 1) + 6, y + 13, milliseconds(row["median_ms"]) + ratio)
            y += step
        y += 12
    return svg.finish()


def report(path):
    """Name, table and picture (or None) of a result."""
    result = json.loads(path.read_text(encoding="utf-8"))
    decode = "samples" in result
    if result["interrupted"] and not decode:
        sys.exit(f"{path} is of an interrupted run")
    if decode:  # a sample is there only when all of its steps are
        contexts = sorted({s["context"] for s in result["samples"] if s["context"] >= 1024})
        picture = decode_report.svg(result) if len([c for c in contexts if c >= 2048]) > 1 else None
        note = "The run was interrupted: what is not in the table was not measured.\n" if result["interrupted"] else ""
        return path.stem, decode_report.table(result, contexts) + note, picture
    if not result["rows"]:
        sys.exit(f"{path} has no rows")
    return path.stem, table(result), bar_picture(result) if result["bench"] == "attend" else rate_picture(result)


def fill(page, text, name, new):
    pattern = rf"(<!-- {re.escape(name)} -->\n).*?(<!-- /{re.escape(name)} -->)"
    text, count = re.subn(pattern, lambda m: m[1] + new + m[2], text, flags=re.S)
    if count != 1:
        sys.exit(f"{page} needs the markers <!-- {name} --> and <!-- /{name} --> exactly once")
    return text


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="+", type=Path)
    parser.add_argument("--doc", type=Path)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--svg", type=Path)
    args = parser.parse_args()
    old = text = args.doc.read_text(encoding="utf-8") if args.doc else ""
    for path in args.results:
        name, new, picture = report(path)
        if args.doc:
            text = fill(args.doc, text, name, new)
        else:
            print(f"{name}\n\n{new}")
        if args.svg and picture and not args.check:
            (args.svg / f"{name}.svg").write_text(picture, encoding="utf-8")
    if args.check and text != old:
        sys.exit(f"{args.doc} is not what the results say; run tools/bench_report.py without --check")
    if args.doc and not args.check:
        args.doc.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
