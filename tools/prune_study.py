#!/usr/bin/env python3
"""Counts the cache lines that a scan would read if it stopped reading blocks that cannot hold winners any more. Needs only numpy.

usage: prune_study.py CAPTURE.safetensors [...] [-k 512] [--bits 28] [--plan measured|common] [--positions 16] [--layers 1,4] [--json]

Captures are what `fathom capture` writes (docs/format.md). Of every layer and KV head the index is made of the blocks that are finished
before the first measured position, as docs/design.md, section 3.1, says: means of 4 bits, measured ranges, least-squares decoders,
float weights. Every measured position (the last --positions of the capture) is a step: plan, partial sums of all tokens after every
plane, winners. One more position before them only gives its thresholds to the first. A block is alive while for some query head of the group

    largest partial sum of its candidates + what the unread planes can add >= threshold;

exact bounds add the sum of the magnitudes of the unread planes' weights, rms bounds c times the root of the sum of their squares.
A dead block stays dead, and a line is read while one of its blocks is alive. Lines of the means are read by all variants.

  order       planes by falling largest |weight| over the heads; other layouts: lines by falling largest sum of |weight|, a check after each
  checks      every 1, 4 or 8 planes; `once`: after the means, before any plane
  thresholds  oracle: of the last winner; carried: the last position's, per query head; scaled: that, in units of the spread of the head's
              scores; first: the last winner's among the first 1/16 of the blocks, read in full; running: the last winner's among all blocks
              before, after each 1/16 of them; best first: running, groups of 8 blocks in the order of their bounds by means
"""
import argparse
import json
import mmap
import struct
import sys

import numpy as np

BLOCK, SINKS, WINDOW, PLANES, LINE = 64, 4, 32, 4, 8  # LINE: words of 64 bits in a cache line
MULTIPLES = (2, 3, 4, 6, 8, 11)
COST = np.array([0, 1 / 16, 1 + 1 / 16, 2 + 1 / 16, 3 + 1 / 16, 4 + 1 / 16])
SIGN = np.array([[(c >> (3 - p) & 1) * 2 - 1 for p in range(PLANES)] for c in range(16)], float)
NOTHING = -1e30


def tensors(path):
    """A function from a tensor's name to its float32 array, and the names."""
    with open(path, "rb") as f:
        raw = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)
    size = struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8:8 + size])

    def get(name, head):
        t = header[name]
        kind = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}[t["dtype"]]
        x = np.frombuffer(raw, kind, int(np.prod(t["shape"])), 8 + size + t["data_offsets"][0]).reshape(t["shape"])[:, head]
        return (x.astype(np.uint32) << 16).view(np.float32) if t["dtype"] == "BF16" else x.astype(np.float32)
    return get, header


def cells(y, a):
    """Codes of y [n, D] at ranges a [D]; how many of each code and the sum of y there, [D, 16]."""
    code = np.clip(np.floor(y / (a / 8)), -8, 7).astype(np.int64) + 8
    d = y.shape[1]
    at = (code + 16 * np.arange(d)).ravel()
    count = np.bincount(at, minlength=16 * d).reshape(d, 16).astype(float)
    return code.astype(np.uint8), count, np.bincount(at, y.ravel(), 16 * d).reshape(d, 16)


def decoders(count, total, square):
    """Least-squares weights [D, depth - 1, plane] and what they leave of the sum of squares, [4, D]."""
    gram = np.einsum("dc,ca,cb->dab", count, SIGN, SIGN)
    gram += 1e-6 * gram * np.eye(PLANES)
    right = total @ SIGN
    weight = np.zeros((len(count), PLANES, PLANES))
    left = []
    for t in range(1, PLANES + 1):
        w = np.linalg.solve(gram[:, :t, :t], right[:, :t, None])[..., 0]
        weight[:, t - 1, :t] = w
        left.append(np.maximum(square - (w * right[:, :t]).sum(1), 1e-12 * square))
    return weight, np.array(left)


class Store:
    """The index of one KV head: block means, codes, decoders, distortions and the hull of every channel."""

    def __init__(self, keys, built):
        n = len(keys) // BLOCK * BLOCK
        built = built // BLOCK * BLOCK
        keys = keys.astype(np.float16).astype(np.float32)
        x = keys[:n] - keys[16:built].mean(0)
        d = x.shape[1]
        mean = x.reshape(-1, BLOCK, d).mean(1)
        step = 4 * np.sqrt((mean[:built // BLOCK] ** 2).mean(0)) / 7 + 1e-9
        self.mean = np.clip(np.rint(mean / step), -7, 7) * step
        y = x - np.repeat(self.mean, BLOCK, 0)
        rms = np.sqrt((y[:built] ** 2).mean(0))
        some = y[:built].reshape(-1, BLOCK, d)[::(built // BLOCK + 255) // 256].reshape(-1, d)
        logs = [np.log(decoders(*cells(some, m * rms + 1e-9)[1:], (some ** 2).sum(0))[1][1:]).sum(0) for m in MULTIPLES]
        a = np.array(MULTIPLES)[np.argmin(logs, 0)] * rms + 1e-9
        square = (y[:built].astype(float) ** 2).sum(0)
        _, count, total = cells(y[:built], a)
        self.weight, left = decoders(count, total, square)
        self.dist = np.vstack([(x[:built].astype(float) ** 2).sum(0), square, left]) / built
        self.code = np.ascontiguousarray(cells(y, a)[0].T)
        self.step, self.rate, self.cost = self.hull()

    def hull(self):
        """(levels, gain per bit, cost) of the steps of every channel's lower convex hull, [steps, D]; rate 0 where there is none."""
        d = self.dist.shape[1]
        level, rate, cost = np.zeros((5, d), int), np.zeros((5, d)), np.zeros((5, d))
        for j in range(d):
            at, s = 0, 0
            while at < 5:
                gain = (self.dist[at, j] - self.dist[at + 1:, j]) / (COST[at + 1:] - COST[at])
                best = int(np.argmax(gain))
                if gain[best] <= 0:
                    break
                to = at + 1 + best
                level[s, j], rate[s, j], cost[s, j] = to, gain[best], COST[to] - COST[at]
                at, s = to, s + 1
        return level, rate, cost

    def rates(self, q, common):
        spread = np.maximum((q.astype(float) ** 2 * self.dist[0]).sum(1, keepdims=True), 1e-20)
        return (q ** 2 / (np.sqrt(spread) if common else spread)).sum(0) * self.rate

    def plan(self, q, bits, multiplier):
        """Levels [D]: every step above the multiplier, or by falling rate what fits into `bits`."""
        rate = self.rates(q, multiplier is not None)
        if multiplier is not None:
            taken = (rate > multiplier).sum(0)
        else:
            taken, spent = np.zeros(rate.shape[1], int), 0.0
            for i in np.argsort(-rate, axis=None, kind="stable"):
                s, j = divmod(int(i), rate.shape[1])
                if rate[s, j] > 0 and taken[j] == s and spent + self.cost[s, j] <= bits:
                    taken[j] += 1
                    spent += self.cost[s, j]
        return np.where(taken > 0, self.step[np.maximum(taken - 1, 0), np.arange(len(taken))], 0)


def fit_multiplier(stores, queries, bits):
    """The least multiplier at which the queries read `bits` on average."""
    rate = np.concatenate([s.rates(q, True).ravel() for s, qs in zip(stores, queries) for q in qs])
    cost = np.concatenate([s.cost.ravel() for s, qs in zip(stores, queries) for _ in qs])
    order = np.argsort(-rate)
    spent = np.cumsum(cost[order])
    return rate[order][np.searchsorted(spent, bits * sum(len(qs) for qs in queries), "right")]


class Step:
    """One step of one KV head: its planes, partial sums and winners."""

    def __init__(self, store, q, tokens, keep, level):
        self.store, self.level = store, level
        self.blocks = tokens // BLOCK
        self.planes = [(j, p) for j in np.flatnonzero(level > 1) for p in range(level[j] - 1)]
        self.w = np.array([q[:, j] * store.weight[j, level[j] - 2, p] for j, p in self.planes]).T.reshape(len(q), -1)
        active = np.flatnonzero(level)
        self.base = (q[:, active] @ store.mean[:self.blocks, active].T).astype(np.float32)
        self.mean_lines = len(set(active // 2)) * -(-self.blocks // BLOCK)  # rows of 32 bytes, 64 blocks each
        self.first, self.end = SINKS, min(self.blocks * BLOCK, tokens - WINDOW)
        self.spread = np.sqrt((q.astype(float) ** 2 * store.dist[0]).sum(1))
        self.run = self.runs([[i] for i in np.argsort(-np.abs(self.w).max(0))])
        scores = self.run["scores"]
        cand = scores[:, self.first:self.end]
        self.winners = np.argpartition(-cand, keep - 1)[:, :keep] + self.first
        self.threshold = np.take_along_axis(scores, self.winners, 1).min(1)
        self.keep = keep

    def runs(self, groups):
        """Largest partial sums [reads + 1, G, blocks] and remaining magnitudes, when groups of planes are read in this order."""
        s = np.repeat(self.base, BLOCK, 1)
        out = np.pad(np.zeros(self.end - self.first, np.float32), (self.first, s.shape[1] - self.end), constant_values=NOTHING)
        largest = [(s + out).reshape(len(s), -1, BLOCK).max(2)]
        unread = np.ones(len(self.planes), bool)
        rest, square = [np.abs(self.w).sum(1)], [(self.w ** 2).sum(1)]
        for group in groups:
            for i in group:
                j, p = self.planes[i]
                sign = (self.store.code[j, :s.shape[1]] >> (3 - p) & 1).astype(np.float32) * 2 - 1
                s += self.w[:, i, None].astype(np.float32) * sign
                unread[i] = False
            largest.append((s + out).reshape(len(s), -1, BLOCK).max(2))
            rest.append(np.abs(self.w[:, unread]).sum(1))
            square.append((self.w[:, unread] ** 2).sum(1))
        return {"scores": s + out, "largest": np.array(largest), "sum": np.array(rest), "rms": np.sqrt(square)}

    def lines(self, key):
        """Groups of planes that share a line of a block-major layout, by falling largest sum of |weight|."""
        found = {}
        for i, (j, p) in enumerate(self.planes):
            found.setdefault(key(j, p), []).append(i)
        return sorted(found.values(), key=lambda g: -np.abs(self.w[:, g]).sum(1).max())


def alive(run, threshold, every, c=None):
    """[reads, blocks]: whether a block is read. threshold [G] or [G, blocks]; every 0: one check before the first read."""
    threshold = threshold[:, None] if threshold.ndim == 1 else threshold
    threshold = threshold - 1e-4 * (1 + np.abs(threshold))
    more = run["sum"] if c is None else c * run["rms"]
    live = np.ones(run["largest"].shape[2], bool)
    out = []
    for r in range(len(run["largest"]) - 1):
        if r % every == 0 if every else r == 0:
            live = live & (run["largest"][r] + more[r][:, None] >= threshold).any(0)
        out.append(live)
    return np.array(out)


def together(live, blocks=LINE):
    """[reads, groups of so many blocks]: whether one is alive."""
    return np.pad(live, ((0, 0), (0, -live.shape[1] % blocks))).reshape(len(live), -1, blocks).any(2)


def running(step, order, once):
    """Thresholds [G, blocks] of groups of 8 blocks read in this order, known after each sixteenth of them (once: after the first)."""
    n_groups, group = -(-step.blocks // LINE), len(step.w)
    out = np.full((group, n_groups, LINE), NOTHING, np.float32)
    scores = np.pad(step.run["scores"], ((0, 0), (0, (n_groups * LINE - step.blocks) * BLOCK)), constant_values=NOTHING)
    scores = scores.reshape(group, n_groups, -1)
    best = np.full((group, step.keep), NOTHING, np.float32)
    for i, piece in enumerate(np.array_split(order, 16)):
        out[:, piece] = best.min(1)[:, None, None]
        if i == 0 or not once:
            best = -np.partition(-np.hstack([best, scores[:, piece].reshape(group, -1)]), step.keep - 1)[:, :step.keep]
    return out.reshape(group, -1)[:, :step.blocks]


def all_thresholds(step, last):
    """{name: [G] or [G, blocks]}."""
    n_groups = -(-step.blocks // LINE)
    bound = ((step.run["largest"][0] + step.run["sum"][0][:, None] - last[1][:, None] * step.spread[:, None]) / step.spread[:, None]).max(0)
    best = np.argsort(-np.pad(bound, (0, n_groups * LINE - step.blocks), constant_values=NOTHING).reshape(-1, LINE).max(1))
    return {"oracle": step.threshold, "carried": last[0], "scaled": last[1] * step.spread, "first": running(step, np.arange(n_groups), True),
            "running": running(step, np.arange(n_groups), False), "best first": running(step, best, False)}


def layouts(step):
    """(name, which planes share a line, how many blocks of them): all lines hold 8 words."""
    rank, half = np.argsort(np.argsort(-step.store.use, kind="stable")), step.store.code.shape[0] // 2
    return (("plane of 8 blocks", lambda j, p: (j, p), 8),
            ("2 planes of 4 blocks", lambda j, p: (j, p // 2), 4),
            ("plane of 2 channels of 4 blocks", lambda j, p: (p, j // 2), 4),
            ("plane of a rotary pair (j, j + D/2) of 4 blocks", lambda j, p: (p, j % half), 4),
            ("4 planes of 2 blocks", lambda j, p: j, 2),
            ("plane of 4 channels of 2 blocks", lambda j, p: (p, j // 4), 2),
            ("plane of 2 rotary pairs of 2 blocks", lambda j, p: (p, j % half // 2), 2),
            ("4 planes of 2 channels of a block", lambda j, p: j // 2, 1),
            ("plane of 8 channels of a block", lambda j, p: (p, j // 8), 1),
            ("the same, channels by how often they are read", lambda j, p: (p, rank[j] // 8), 1))


def variants(step, last):
    """Yields (table, name, exact, lines of planes, alive [reads, blocks])."""
    run, thresholds = step.run, all_thresholds(step, last)
    holds = np.zeros(step.blocks, bool)
    holds[step.winners.ravel() // BLOCK] = True
    full = np.ones((len(step.planes), step.blocks), bool)
    out = [("full scan", True, full), ("blocks with a winner only", True, np.tile(holds, (len(full), 1)))]
    for name, threshold in thresholds.items():
        out += [(f"{name}, {f'every {e}' if e else 'once'}", name not in ("carried", "scaled"), alive(run, threshold, e))
                for e in ((1, 4, 8, 0) if name in ("oracle", "best first") else (1, 4, 0) if name == "carried" else (4,))]
    out += [(f"{name}, {c} rms, {f'every {e}' if e else 'once'}", False, alive(run, thresholds[name], e, c))
            for name in ("oracle", "carried", "best first") for c in (3, 4) for e in (4, 0)]
    for name, exact, live in out:
        yield "bounds", name, exact, together(live).sum(), live
    for layout, key, blocks in layouts(step):
        lines = step.lines(key)
        line_run = step.runs(lines)
        yield "layouts", f"{layout}: full", True, len(lines) * -(-step.blocks // blocks), full
        for name, c in (("oracle", None), ("best first", None), ("carried", 3)):
            live = alive(line_run, thresholds[name], 1, c)
            yield "layouts", f"{layout}: {name}{f', {c} rms' if c else ''}", c is None, together(live, blocks).sum(), live


def study(path, args):
    """Rows of one capture: sums over layers, KV heads and positions."""
    get, header = tensors(path)
    layers = [int(x) for x in args.layers.split(",")] if args.layers else sorted({int(x.split(".")[1]) for x in header if x.startswith("layers")})
    n, kv_heads, _ = header[f"layers.{layers[0]}.k"]["shape"]
    p, heads, _ = header[f"layers.{layers[0]}.q"]["shape"]
    positions, group = min(args.positions, p - 1), heads // kv_heads
    stores, queries = [], []
    for l in layers:
        for h in range(kv_heads):
            store = Store(get(f"layers.{l}.k", h), n - p)
            at = slice(h * group, (h + 1) * group)
            stats = get(f"layers.{l}.q_stats", at)[-16:]
            store.use = sum(np.maximum(store.plan(q, args.bits, None) - 1, 0) for q in stats)  # planes of every channel
            stores.append(store)
            queries.append((stats, get(f"layers.{l}.q", at)[-positions - 1:]))
            print(f"{path}: layer {l} head {h} stored", file=sys.stderr)
    multiplier = fit_multiplier(stores, [s for s, _ in queries], args.bits) if args.plan == "common" else None
    rows, bits, late = {}, [], []
    for store, (_, qs) in zip(stores, queries):
        last = None
        for i, q in enumerate(qs):
            level = store.plan(q, args.bits, multiplier)
            step = Step(store, q, n - positions + i, args.k - SINKS - WINDOW, level)
            if last is not None:
                bits.append(COST[level].sum())
                late.append(last[0] > step.threshold)
                count(step, last, rows)
            last = (step.threshold, step.threshold / step.spread)
    return {"capture": path, "tokens": n, "positions": positions, "steps": len(bits), "k": args.k, "plan": args.plan, "bits": float(np.mean(bits)),
            "carried_too_high": float(np.mean(late)), "rows": summary(rows)}


def count(step, last, rows):
    for table, name, exact, lines, live in variants(step, last):
        lost = (~live[-1][step.winners // BLOCK]).mean() if name != "blocks with a winner only" else 0
        if exact and lost > 0:
            sys.exit(f"prune_study.py: {name} is not exact")
        words = live.sum() / live.size
        rows.setdefault((table, name), []).append((exact, lines, step.mean_lines, live[-1].mean(), together(live[-1:]).mean(), words, lost, lost > 0))


def summary(rows):
    full = np.array(rows["bounds", "full scan"], float).mean(0)
    out = []
    for (table, name), r in rows.items():
        m = np.array(r, float).mean(0)
        out.append({"table": table, "variant": name, "exact": bool(m[0]), "lines": m[1] + m[2], "mean_lines": m[2],
                    "times_fewer": (full[1] + full[2]) / (m[1] + m[2]), "times_fewer_of_planes": full[1] / m[1], "blocks_alive": m[3],
                    "groups_alive": m[4], "words_read": m[5], "winners_lost": m[6], "steps_with_loss": m[7]})
    return out


def show(report):
    print(f"\n{report['capture']}: {report['tokens']:,} tokens, k = {report['k']}, plan={report['plan']}, {report['bits']:.1f} read bits, "
          f"{report['steps']} steps, carried threshold too high for {report['carried_too_high']:.0%} of the query heads\n")
    print("| bounds: threshold, checks | lines per step | times fewer | blocks alive | groups of 8 alive | words read | winners lost | steps that lose |")
    print("|" + "---|" * 8)
    for r in (r for r in report["rows"] if r["table"] == "bounds"):
        lost = "– | –" if r["exact"] else f"{r['winners_lost']:.2%} | {r['steps_with_loss']:.0%}"
        print(f"| {r['variant']} | {r['lines']:,.0f} | {r['times_fewer']:.2f} | {r['blocks_alive']:.0%} | {r['groups_alive']:.0%} | "
              f"{r['words_read']:.0%} | {lost} |")
    lines = {r["variant"]: r for r in report["rows"] if r["table"] == "layouts"}
    names = list(dict.fromkeys(x.split(": ")[0] for x in lines))
    kinds = list(dict.fromkeys(x.split(": ")[1] for x in lines))
    print("\n| a line holds | " + " | ".join(f"lines, {x} | times fewer" for x in kinds) + " |\n|" + "---|" * (1 + 2 * len(kinds)))
    for name in names:
        row = (lines[f"{name}: {kind}"] for kind in kinds)
        print(f"| {name} | " + " | ".join(f"{r['lines']:,.0f} | {r['times_fewer']:.2f}" for r in row) + " |")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("captures", nargs="+")
    parser.add_argument("-k", type=int, default=512)
    parser.add_argument("--bits", type=float, default=28)
    parser.add_argument("--plan", choices=("measured", "common"), default="measured")
    parser.add_argument("--positions", type=int, default=16, help="last positions to measure (16)")
    parser.add_argument("--layers", default="", help="comma-separated; all by default")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    args = parser.parse_args()
    reports = [study(path, args) for path in args.captures]
    if args.json:
        print(json.dumps(reports, indent=1))
        return
    for report in reports:
        show(report)


if __name__ == "__main__":
    main()
