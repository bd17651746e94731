#!/usr/bin/env python3
"""Turns a result of `fathom bench decode --json` into the README's table and picture.

usage: decode_report.py RESULT.json [--contexts 4096,16384,32768] [--readme README.md] [--svg docs/results/decode.svg]

Without --readme the table is printed; with it, the text between the markers
<!-- decode-table --> and <!-- /decode-table --> is replaced.
"""
import argparse
import json
import math
import re
import sys
from pathlib import Path

COLOURS = ["#57606a", "#8250df", "#1f6feb", "#0f9d8a", "#cf222e", "#fb8f44"]


def byte_text(number):
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024 or unit == "GiB":
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024


def table(result, contexts):
    lines = ["| context | runner | prefill tok/s | decode tok/s | attention ms/token | read bits | index read/step | rows read/step |",
             "|---|---|---|---|---|---|---|---|"]
    for context in contexts:
        for s in result["samples"]:
            if s["context"] != context:
                continue
            ours = not s["runner"].startswith("libllama")
            name = f"`{s['runner']}`" if ours else s["runner"]
            cells = [f"{context:,}", name, f"{s['prefill_tokens_per_second']:,.0f}", f"{s['tokens_per_second']:,.0f}",
                     f"{s['attention_ms']:.2f}"]
            sparse = ours and s["read_bits"] > 0
            cells += [f"{s['read_bits']:.0f}" if sparse else "–",
                      byte_text(s["index_bytes_per_step"]) if sparse else "–",
                      byte_text(s["row_bytes_per_step"]) if ours else "–"]
            lines.append("| " + " | ".join(cells) + " |")
    name = Path(result["model"]).stem
    model = "Bundled model" if name.startswith("fathom-recall") else name
    note = (f"{model}, {result['threads']} threads of {result['processor']}, {result['backend']}, median of {result['steps']} steps. "
            "Prefill is the rate from the context before (or 64 tokens) to this one. libllama's attention is its step less its step at "
            "64 tokens.")
    return "\n".join(lines) + "\n\n" + note + "\n"


def svg(result):
    """Step time against context, both axes logarithmic."""
    series = {}
    for s in result["samples"]:
        if s["context"] >= 2048:
            series.setdefault(s["runner"], []).append((s["context"], s["step_ms"]))
    xs = sorted({x for points in series.values() for x, _ in points})
    ys = [y for points in series.values() for _, y in points]
    low, high = math.floor(math.log2(min(ys))), math.ceil(math.log2(max(ys)))
    left, right, top, bottom, width, height = 60, 290, 30, 45, 800, 340

    def px(x):
        return left + (math.log2(x) - math.log2(xs[0])) / (math.log2(xs[-1]) - math.log2(xs[0])) * (width - left - right)

    def py(y):
        return height - bottom - (math.log2(y) - low) / (high - low) * (height - top - bottom)

    out = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
           'font-family="sans-serif" font-size="12">', f'<rect width="{width}" height="{height}" fill="white"/>',
           f'<text x="{left}" y="18" font-size="13">Decode step, ms per token, against context ({result["threads"]} threads)</text>']
    for e in range(low, high + 1):
        y = py(2.0 ** e)
        out.append(f'<path d="M{left} {y:.1f}H{width - right}" stroke="#d0d7de"/>'
                   f'<text x="{left - 8}" y="{y + 4:.1f}" text-anchor="end">{2.0 ** e:g}</text>')
    for x in xs:
        out.append(f'<text x="{px(x):.1f}" y="{height - bottom + 18}" text-anchor="middle">{x // 1024}k</text>')
    labels = []
    for i, (name, points) in enumerate(series.items()):
        colour = COLOURS[i % len(COLOURS)]
        path = "M" + "L".join(f"{px(x):.1f} {py(y):.1f}" for x, y in points)
        out.append(f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        out += [f'<circle cx="{px(x):.1f}" cy="{py(y):.1f}" r="3" fill="{colour}"/>' for x, y in points]
        labels.append([py(points[-1][1]), name, colour])
    labels.sort()
    for i, label in enumerate(labels):  # keep labels apart
        if i and label[0] < labels[i - 1][0] + 15:
            label[0] = labels[i - 1][0] + 15
        out.append(f'<text x="{width - right + 10}" y="{label[0] + 4:.1f}" fill="{label[2]}">{label[1]}</text>')
    out.append(f'<text x="{(left + width - right) / 2}" y="{height - 8}" text-anchor="middle">context, tokens</text></svg>')
    return "\n".join(out) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result")
    parser.add_argument("--contexts", default="4096,16384,32768")
    parser.add_argument("--readme")
    parser.add_argument("--svg")
    args = parser.parse_args()
    result = json.loads(Path(args.result).read_text(encoding="utf-8"))
    text = table(result, [int(x) for x in args.contexts.split(",")])
    if args.readme:
        readme = Path(args.readme)
        old = readme.read_text(encoding="utf-8")
        new, count = re.subn(r"(<!-- decode-table -->\n).*?(<!-- /decode-table -->)", lambda m: m[1] + text + m[2], old, flags=re.S)
        if count != 1:
            sys.exit(f"{args.readme} needs the markers <!-- decode-table --> and <!-- /decode-table --> exactly once")
        readme.write_text(new, encoding="utf-8")
    else:
        print(text, end="")
    if args.svg:
        Path(args.svg).write_text(svg(result), encoding="utf-8")


if __name__ == "__main__":
    main()
