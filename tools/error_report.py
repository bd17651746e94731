#!/usr/bin/env python3
"""Fills the tables of docs/results/error.md and error-tables.md from bench/results.

usage: error_report.py [--check]

Each table stands between <!-- table:NAME --> and <!-- end -->. Sources are the JSON files of
scripts/bench-errors (error-CAPTURE.json, error-CAPTURE-frozen.json) and of `fathom eval answers`.
--check writes nothing and fails when a page is not what the files say.
"""
import argparse
import json
import math
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench/results"
PAGES = [ROOT / "docs/results/error.md", ROOT / "docs/results/error-tables.md"]
CAPTURES = {  # file name -> name in the tables
    "bundled-8k": "bundled 8k", "bundled-32k": "bundled 32k", "bundled-130k": "bundled 130k", "smollm2-2k": "SmolLM2 2k",
    "smollm2-8k": "SmolLM2 8k", "qwen-8k-code": "Qwen code 8k", "qwen-8k-prose": "Qwen prose 8k"}
DEFAULT = "fathom:bits=28"
PAPER = "fathom:preset=paper,budget=48,basis="
OUR_SCAN = r"fathom:bits=\d+,residual=off"
OURS = r"fathom:bits=\d+"
SHORT = [  # of the tables on the main page
    "exact", "exact:residual=block", "double-sparsity", "sparq", "loki", "thumbnail", "landmark", "quest", "h2o", "streaming", PAPER + "raw",
    PAPER + "klt", "fathom:bits=19,residual=off", "fathom:bits=27,residual=off", "fathom:bits=13", "fathom:bits=19", DEFAULT]
MODELS = {  # name in the GGUF file -> name in the tables
    "Fathom Recall 15M": "bundled, Q8_0", "Smollm2 135M 8k Lc100K Mix1 Ep2": "SmolLM2-135M-Instruct, Q4_1",
    "Qwen2.5 Coder 1.5B Instruct GGUF": "Qwen2.5-Coder-1.5B-Instruct, Q4_K_M"}
REFERENCES = {  # header -> method; what goals and equal bits compare with
    "Double Sparsity, 136 b": "double-sparsity", "SparQ r=32, 136 b": "sparq", "SparQ r=32, klt, 136 b": "sparq:basis=klt",
    "published read, raw": PAPER + "raw", "published read, klt": PAPER + "klt"}


class Capture:
    """One capture's fresh and frozen runs."""

    def __init__(self, name):
        self.title = CAPTURES[name]
        report = json.loads((RESULTS / f"error-{name}.json").read_text(encoding="utf-8"))
        late = json.loads((RESULTS / f"error-{name}-frozen.json").read_text(encoding="utf-8"))
        if report["interrupted"] or late["interrupted"] or late["options"]["freeze"] != 0.5:
            sys.exit(f"error-{name}*.json: interrupted, or not frozen at half of the context")
        self.run, late_run = report["runs"][0], late["runs"][0]
        self.shape = self.run["geometry"]
        self.fresh = {(row["method"], row["k"]): row for row in self.run["rows"]}
        self.frozen = {(row["method"], row["k"]): row for row in late_run["rows"]}
        self.methods = list(dict.fromkeys(row["method"] for row in self.run["rows"]))
        self.late_methods = list(dict.fromkeys(row["method"] for row in late_run["rows"]))
        shares = [float(text.rstrip("%")) for text in report["options"]["k"]]
        self.ks = {}  # share in percent -> tokens
        for k in sorted({k for _, k in self.fresh}):
            self.ks[min(shares, key=lambda share: abs(share / 100 * self.shape["n_tokens"] - k))] = k
        self.main_share = 1.6 if 1.6 in self.ks else min(self.ks)
        self.own_basis = "raw" if self.shape["qk_norm"] else "klt"  # the basis rule of the published read

    def cases(self):
        """(share, k, "capture, share") of all measured k."""
        return [(share, k, f"{self.title}, {share:g} %") for share, k in self.ks.items()]

    def curve(self, pattern, k):
        """(read bits, mean error) of the methods that match, by bits."""
        return sorted((row["read_bits"], row["mean"]) for (method, at), row in self.fresh.items() if at == k and re.fullmatch(pattern, method))


def equal_bits(curve, error):
    """(bits, is a bound) at which the curve has the error, by the rule of src/eval/equal_error.cc; (None, False): worse everywhere."""
    for i, (bits, value) in enumerate(curve):
        if value <= error:
            if value == error:
                return bits, False
            if i == 0:
                return bits, True
            before_bits, before = curve[i - 1]
            return before_bits + math.log(before / error) / math.log(before / value) * (bits - before_bits), False
    return None, False


def error_at(curve, bits):
    """The curve's error at these read bits: the error's logarithm is linear between points and beyond the ends."""
    i = next((i for i in range(1, len(curve) - 1) if bits <= curve[i][0]), len(curve) - 1)
    (b0, e0), (b1, e1) = curve[i - 1], curve[i]
    return math.exp(math.log(e0) + (bits - b0) / (b1 - b0) * (math.log(e1) - math.log(e0)))


def check_against_report(capture):
    """The program's own equal-error bits must be what equal_bits() finds."""
    patterns = {"fathom:residual=off": OUR_SCAN, "fathom": OURS}
    for match in capture.run["equal_error"]:
        if match["curve"] in patterns:
            bits, bound = equal_bits(capture.curve(patterns[match["curve"]], match["k"]), match["reference_error"])
            theirs = match["below"] if bound else match["bits"]
            if (bits is None) != (theirs is None) or (bits is not None and abs(bits - theirs) > 1e-6):
                sys.exit(f"{capture.title}, {match['reference']}, k = {match['k']}: equal error at {bits}, the report says {theirs}")


def err(value):
    return f"{value:.4f}".lstrip("0")


def table(head, rows):
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows]) + "\n"


def named(method):
    return f"**`{method}`**" if method == DEFAULT else f"`{method}`"


def captures_table(captures):
    rows = []
    for c in captures:
        s = c.shape
        ks = ", ".join(f"{k:,} ({share:g} %)" for share, k in c.ks.items())
        rows.append([c.title, MODELS[s["model"]], {"novel.txt": "novel", "code.txt": "source code"}[s["text"]], f"{s['n_tokens']:,}", str(s["head_dim"]),
                     f"{len(c.run['layers'])} x {s['n_heads']} / {s['n_kv_heads']}", "yes" if s["qk_norm"] else "no", ks,
                     f"{c.run['n_positions']}", f"{c.run['rows'][0]['samples']:,}"])
    return table(["capture", "model", "text", "tokens n", "D", "layers x heads / KV heads", "QK-norm", "k", "positions", "errors averaged"], rows)


def method_table(c, methods):
    """All columns at the capture's main k."""
    rows = []
    for method in methods:
        r = c.fresh[method, c.ks[c.main_share]]
        rows.append([named(method), f"{r['read_bits']:.1f}" if r["read_bits"] else "–",
                     f"{r['stored_bytes']:.1f}", f"{r['rows']:,.0f}", f"{err(r['mean'])} ± {err(r['mean_se'])}", err(r["median"]),
                     f"{r['p99']:.3f}", f"{r['recall']:.3f}", f"{r['mass']:.3f}"])
    head = ["method", "read bits", "bytes/token", "rows/step", "mean error", "median", "p99", "recall", "mass"]
    return f"k = {c.ks[c.main_share]:,} ({c.main_share:g} % of {c.shape['n_tokens']:,}):\n\n" + table(head, rows)


def means_table(captures, methods):
    rows = [[named(method)] + [" / ".join(err(c.fresh[method, k]["mean"]) for k in c.ks.values()) for c in captures] for method in methods]
    head = ["method"] + [f"{c.title}, " + " / ".join(f"{share:g}" for share in c.ks) + " %" for c in captures]
    return table(head, rows)


def bits_text(found, reference_bits):
    bits, bound = found
    if bits is None:
        return "never"
    return f"{'<' if bound else ''}{bits:.1f} ({'>' if bound else ''}{reference_bits / bits:.1f}x)"


def equal_table(captures):
    rows = []
    for c in captures:
        for _, k, title in c.cases():
            row = [title]
            for method in REFERENCES.values():
                reference = c.fresh[method, k]
                row.append(bits_text(equal_bits(c.curve(OUR_SCAN, k), reference["mean"]), reference["read_bits"]))
            best = min(c.fresh[method, k]["mean"] for method in REFERENCES.values())
            row.append(f"{c.fresh['fathom:bits=13', k]['mean'] / best:.2f}")
            rows.append(row)
    return table(["capture, k"] + list(REFERENCES) + ["ours with residual at 13 bits: error / the best of these"], rows)


def verdict(found, limit):
    """found: (case, value, met) of each case."""
    missed = [f"{case}: {value}" for case, value, met in found if not met]
    return f"met in {len(found) - len(missed)} of {len(found)} ({limit})" + (f"; missed: {'; '.join(missed)}" if missed else "")


def bit_goal(captures, method_of, pattern, limit):
    found = []
    for c in captures:
        for _, k, title in c.cases():
            bits, _ = equal_bits(c.curve(pattern, k), c.fresh[method_of(c), k]["mean"])
            found.append((title, "never" if bits is None else f"{bits:.1f}", bits is not None and bits <= limit))
    return verdict(found, f"at most {limit} bits")


def late_ratio(c, k, residual):
    """Error frozen at half over error made at the end, the same spec and k; and both at equal read bits."""
    late = c.frozen[DEFAULT if residual else DEFAULT + ",residual=off", k]
    curve = c.curve(OURS if residual else OUR_SCAN, k)
    bits = c.fresh[DEFAULT, k]["read_bits"]  # a residual changes no read bits
    fresh = c.fresh[DEFAULT, k]["mean"] if residual else error_at(curve, bits)
    return late["mean"] / fresh, late["mean"] / error_at(curve, late["read_bits"])


def goals_table(captures):
    wide = [c for c in captures if c.shape["head_dim"] == 128]
    narrow = [c for c in captures if c.shape["head_dim"] == 64]
    rows = []
    for group, name, limits in ((wide, "a, D = 128", (27, 27)), (narrow, "b, D = 64", (70, 27))):
        targets = [(title, lambda c, m=method: m, limits[0]) for title, method in REFERENCES.items() if "136" in title]
        targets.append(("published read (56 b) in its own basis", lambda c: PAPER + c.own_basis, limits[1]))
        for title, method_of, limit in targets:
            rows.append([name, f"error of {title}", bit_goal(group, method_of, OUR_SCAN, limit), bit_goal(group, method_of, OURS, limit)])
    ratios, late = [], {True: [], False: []}
    for c in captures:
        for _, k, title in c.cases():
            ratio = c.fresh[DEFAULT, k]["mean"] / c.fresh["exact", k]["mean"]
            ratios.append((title, f"{ratio:.3f}", ratio <= 0.7))
            for residual, found in late.items():
                ratio, _ = late_ratio(c, k, residual)
                found.append((title, f"{ratio:.3f}", ratio <= 1.03))
    rows.append(["c", "28 bits: error / exact top-k's", "–", verdict(ratios, "at most 0.70")])
    rows.append(["d", "28 bits, frozen at 50 % / fresh", verdict(late[False], "at most 1.03"), verdict(late[True], "at most 1.03")])
    rows.append(["e", "answers: points against dense, against SparQ at 136 bits", "–", answer_goal()])
    return table(["goal", "what", "scan alone (`residual=off`)", "default (with residual)"], rows)


def aging_table(captures):
    rows = []
    for c in captures:
        for _, k, title in c.cases():
            fresh, late = c.fresh[DEFAULT, k], c.frozen[DEFAULT, k]
            (on, on_equal), (off, off_equal) = late_ratio(c, k, True), late_ratio(c, k, False)
            rows.append([title, f"{err(fresh['mean'])} → {err(late['mean'])}", f"{fresh['read_bits']:.1f} → {late['read_bits']:.1f}",
                         f"{fresh['recall']:.3f} → {late['recall']:.3f}", f"{on:.3f}", f"{on_equal:.3f}", f"{off:.3f}", f"{off_equal:.3f}",
                         f"{fresh['mean'] / c.fresh['exact', k]['mean']:.2f}"])
    return table(["capture, k", "default: error fresh → frozen", "read bits", "recall", "ratio, default", "at equal bits", "ratio, `residual=off`", "at equal bits",
                  "fresh default / exact top-k"], rows)


def late_table(captures):
    rows = []
    for method in captures[0].late_methods:
        row = [named(method)]
        for c in captures:
            k = c.ks[c.main_share]
            value, fresh = c.frozen[method, k]["mean"], c.fresh.get((method, k))
            row.append(err(value) + (f" ({value / fresh['mean']:.2f})" if fresh else ""))
        rows.append(row)
    return table(["method"] + [f"{c.title}, {c.main_share:g} %" for c in captures], rows)


def choices_table(captures):
    """Ratios to the default of the same run, at the read bits that the spec really had."""
    rows = []
    for late, options in ((False, ["plan=measured", "residual=mean", "basis=balanced"]),
                          (True, ["plan=measured", "residual=mean", "basis=balanced", "basis=klt", "range=rms", "meanbits=8"])):
        for option in options:
            row = ["frozen" if late else "fresh", f"`{option}`"]
            for c in captures:
                rows_of = c.frozen if late else c.fresh
                first = rows_of[f"{DEFAULT},{option}", c.ks[c.main_share]]
                ratios = [rows_of[f"{DEFAULT},{option}", k]["mean"] / rows_of[DEFAULT, k]["mean"] for k in c.ks.values()]
                row.append(" / ".join(f"{ratio:.2f}" for ratio in ratios) + f" ({first['read_bits']:.0f} b)")
            rows.append(row)
        row = ["frozen" if late else "fresh", "read bits of the default"]
        rows.append(row + [f"{(c.frozen if late else c.fresh)[DEFAULT, c.ks[c.main_share]]['read_bits']:.1f}" for c in captures])
    return table(["", "instead of the default"] + [f"{c.title}, " + " / ".join(f"{share:g}" for share in c.ks) + " %" for c in captures], rows)


def answer_name(canonical):
    name, _, text = canonical.partition(":")
    o = dict(item.split("=") for item in text.split(",") if item)
    parts = {"fathom": ["preset=paper", f"budget={o.get('budget')}"] if o.get("preset") == "paper" else [f"bits={o.get('bits')}"]}.get(name, [])
    parts += [f"r={o['r']}"] if "r" in o else []
    parts += [f"k={o['k']}"] if "k" in o else []
    if name == "fathom" and o.get("preset") == "own":
        parts += ["plan=measured"] if o["plan"] == "measured" else []
        parts += [f"residual={o['residual']}"] if o["residual"] != "block" else []
    return name + (":" + ",".join(parts) if parts else "")


def read_answers(file):
    """name -> (list of (question, right), read bits, rows per step), by the canonical spec."""
    result = json.loads((RESULTS / file).read_text(encoding="utf-8"))
    by_label, found = {}, {}
    for answer in result["answers"]:
        question = (answer["document"], tuple(answer["expected"]))
        by_label.setdefault(answer["spec"], []).append((question, answer["right"]))
    for method in result["methods"]:
        found[answer_name(method["method"])] = (by_label[method["spec"]], method["read_bits"], method["rows_per_step"])
    return found


def answer_goal():
    """The default may be 2 points behind dense, and not behind SparQ."""
    right = {}
    for file in ("answers-16k-32k.json", "answers-64k.json"):
        for name, (answers, _, _) in read_answers(file).items():
            right.setdefault(name, []).extend(value for _, value in answers)
    share = {name: 100 * sum(values) / len(values) for name, values in right.items()}
    dense, sparq = (share[DEFAULT + ",k=512"] - share[name] for name in ("dense", "sparq:r=32,k=512"))
    met = dense >= -2 and sparq >= 0
    return f"{'met' if met else 'missed'}: {dense:+.1f} (at least -2), {sparq:+.1f} (at least 0)"


def answers_table():
    first, second = read_answers("answers-16k-32k.json"), read_answers("answers-64k.json")
    later = read_answers("answers-16k-32k-common.json")
    for name, value in later.items():
        if name in first and [right for _, right in first[name][0]] != [right for _, right in value[0]]:
            sys.exit(f"{name} answers differently in the two runs at 16k and 32k")
    first.update(later)
    rows = []
    for name in sorted(first, key=lambda n: (n.startswith("fathom:bits"), "plan=measured" in n)):
        parts = [part[name] for part in (first, second) if name in part]
        base = [part["dense"][0] for part in (first, second)]
        difference = []
        for part, dense in zip(parts, base):
            if [q for q, _ in part[0]] != [q for q, _ in dense]:
                sys.exit(f"{name} was not asked the questions of dense")
            difference += [right - reference for (_, right), (_, reference) in zip(part[0], dense)]
        n, mean = len(difference), sum(difference) / len(difference)
        se = math.sqrt(sum((d - mean) ** 2 for d in difference) / (n - 1) / n)
        right = [sum(r for _, r in part[0]) for part in parts]
        shown = [f"{r} of {len(part[0])}" for r, part in zip(right, parts)] + ["–"] * (2 - len(parts))
        total = f"{sum(right)} of {n} ({100 * sum(right) / n:.1f} %)" if len(parts) == 2 else "–"
        rows.append([f"**`{name}`**" if name == DEFAULT + ",k=512" else f"`{name}`", *shown, total,
                     "–" if name == "dense" else f"{100 * mean:+.1f} ± {100 * se:.1f}",
                     " / ".join(f"{part[1]:.1f}" for part in parts) if parts[0][1] else "–", " / ".join(f"{part[2]:,.0f}" for part in parts)])
    return table(["method", "16k and 32k", "64k", "all", "points against dense, paired ± s.e.", "read bits", "rows/step"], rows)


def make_tables():
    captures = {name: Capture(name) for name in CAPTURES}
    every = list(captures.values())
    for c in every:
        check_against_report(c)
    tables = {"captures": captures_table(every), "means": means_table(every, SHORT), "full-means": means_table(every, every[0].methods), "equal": equal_table(every), "goals": goals_table(every),
              "aging": aging_table(every), "late": late_table(every), "choices": choices_table(every), "answers": answers_table()}
    for name, c in captures.items():
        tables[f"short-{name}"] = method_table(c, SHORT)
        tables[f"full-{name}"] = method_table(c, c.methods)
    return tables


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when a page is not up to date")
    args = parser.parse_args()
    tables = make_tables()
    marker = re.compile(r"(<!-- table:([\w-]+) -->\n).*?(<!-- end -->)", flags=re.S)
    for page in PAGES:
        old = page.read_text(encoding="utf-8")
        names = [m[2] for m in marker.finditer(old)]
        unknown = [name for name in names if name not in tables]
        if unknown or not names or len(re.findall(r"<!-- (?:table:.*?|end) -->", old)) != 2 * len(names):
            sys.exit(f"{page.name}: markers must be pairs of known tables; unknown: {', '.join(unknown) or 'none'}")
        new = marker.sub(lambda m: m[1] + tables[m[2]] + m[3], old)
        if new != old and args.check:
            sys.exit(f"{page.name} is not what bench/results says: run tools/error_report.py")
        if new != old:
            page.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
