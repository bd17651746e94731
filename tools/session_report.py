#!/usr/bin/env python3
"""Medians of the reports that scripts/bench-sessions collects, as JSON.

usage: session_report.py FIRST WARM [COLD]

FIRST: the report of `fathom run --session --json` that prefilled the session; WARM, COLD: files with one report after the other of
runs that resumed it. A file that does not exist is left out.
"""
import json
import statistics
import sys
from pathlib import Path


def reports(path):
    text, decoder, at, found = Path(path).read_text(encoding="utf-8"), json.JSONDecoder(), 0, []
    while at < len(text.rstrip()):
        report, end = decoder.raw_decode(text[at:].lstrip())
        found.append(report)
        at = len(text) - len(text[at:].lstrip()) + end
    return found


def summary(runs):
    def median(value):
        return round(statistics.median(value(run) for run in runs), 4)
    return {"runs": len(runs),
            "reused_tokens": int(median(lambda r: r["session"]["reused_tokens"])),
            "resume_s": median(lambda r: r["session"]["resume_seconds"]),
            "first_token_s": median(lambda r: r["session"]["first_token_seconds"]),
            "question_prefill_s": median(lambda r: r["runs"][0]["answers"][0]["question_prefill_seconds"]),
            "save_s": median(lambda r: r["session"]["save_seconds"])}


def main():
    if len(sys.argv) not in (3, 4):
        sys.exit(__doc__)
    first = reports(sys.argv[1])[0]
    result = {"backend": first["backend"], "threads": first["threads"], "method": first["runs"][0]["method"],
              "n_tokens": first["session"]["saved_tokens"], "bytes": first["session"]["bytes"],
              "prefill_s": round(first["prefill"]["seconds"], 2), "index_s": round(first["runs"][0]["index_seconds"], 3),
              "save_s": round(first["session"]["save_seconds"], 3)}
    for name, path in zip(("warm", "cold"), sys.argv[2:]):
        if Path(path).exists():
            result[name] = summary(reports(path))
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
