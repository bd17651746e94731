#!/usr/bin/env python3
"""Write documents with hidden facts and questions about them, for `fathom eval answers`.

The documents hold the questions of the model card in the densities of evaluate.py (tables are smaller), but many
questions share one document, so that one prefill serves them all.  Two sorts of document alternate: one holds "one
number", "one of many", "variables" or "trace" and "new sentences", the other "all values", "several at once" and "table".
Equal arguments and haystack give equal files.  Tokens are counted with the vocabulary in the model's GGUF file.
"""
import argparse, hashlib, json, os, random, re
import numpy as np
import bpe, questions as Q, tasks

HERE = os.path.dirname(os.path.abspath(__file__))
ATTRIBUTES = ["access code", "locker number", "serial number", "secret number", "badge number"]     # as in evaluate.py
ROOM = 320      # tokens kept free for the chat template, a question and its answer


def scattered(b, length, number):
    """[(task, unit)] of a document of facts; every unit has its own attribute, so no question has two answers."""
    w, attrs = b.w, b.r.sample(ATTRIBUTES, 4)
    chains = max(2, length // 1024)
    last = ("trace", Q.unit_variables(w, chains, 3, hops=3, ask="trace")) if number // 2 % 2 else \
        ("variables", Q.unit_variables(w, chains, 3, hops=4, ask="all"))
    return [("one number", Q.unit_facts(w, 1, 1, kind="num7", attr=attrs[0])),
            ("one number", Q.unit_facts(w, 1, 1, kind="num7", attr=attrs[1])),
            ("one of many", Q.unit_facts(w, length // 128, 3, kind="num7", attr=attrs[2])),
            ("new sentences", Q.unit_facts(w, max(4, length // 512), 3, kind="num7", attr=attrs[3], held=True)), last]


def gathered(b, length, _):
    """[(task, unit)] of a document whose questions have several values, and of a table."""
    w, attrs = b.w, b.r.sample(ATTRIBUTES, 2)
    return [("all values", Q.unit_multi_value(w, max(2, length // 1024), 3, k=4, kind="num7", attr=attrs[0])),
            ("several at once", Q.unit_multi_query(w, max(8, length // 256), 3, k=4, kind="num7", attr=attrs[1])),
            ("table", Q.unit_records(w, length // 5, 4, kind="num7"))]


def expected(task, answer):
    """What an answer must contain to be right, as in evaluate.py."""
    if task == "several at once":
        return [part.rsplit(": ", 1)[1] for part in answer.split("; ")]
    if task in ("all values", "variables"):
        return answer.split(", ")
    if task == "trace":
        return [answer.rsplit(" = ", 1)[1]]
    return [answer]


def document(b, length, number, seed):
    """(text, {task: [question]}) of one document that fits `length` tokens with any of its questions."""
    b.r.seed(f"{seed}/{length}/{number}")
    for _ in range(60):
        units = (gathered if number % 2 else scattered)(b, length, number)
        made = b.document([u for _, u in units], length - ROOM, "prose")
        if made is None:
            continue
        text = b.tok.decode(made[0]).strip() + "\n"
        asked = {}
        for task, unit in units:
            for _, question, _, answer in unit.qas:
                asked.setdefault(task, []).append({"question": question, "expected": expected(task, answer)})
        if all(x in text for qs in asked.values() for q in qs for x in q["expected"]):
            return text, asked
    raise SystemExit(f"no document of {length} tokens could be made; the facts do not fit")


def haystack(tok, source):
    """Token arrays of the haystack, chapters separated as in training."""
    if source == "auto":
        import novel
        parts = novel.download()
    else:
        with open(source, encoding="utf-8", errors="replace") as f:
            parts = [f.read().replace("\r\n", "\n").strip()]
    print("haystack:", sum(map(len, parts)), "characters, SHA-256", hashlib.sha256("\0".join(parts).encode()).hexdigest())
    ids = []
    for part in parts:
        ids += tok.encode(part) + [tok.eot]
    return {"prose": np.array(ids, dtype=np.uint16)}


def parse_plan(text):
    """[(tokens, documents)] of "16k:6,32k:4"."""
    plan = []
    for item in text.split(","):
        m = re.fullmatch(r"(\d+)(k?):(\d+)", item.strip())
        if not m or int(m[3]) < 1 or int(m[1]) * (1024 if m[2] else 1) < 4096:
            raise argparse.ArgumentTypeError(f"'{item}' is not LENGTH:COUNT with at least 4k tokens, such as 16k:6")
        plan.append((int(m[1]) * (1024 if m[2] else 1), int(m[3])))
    return plan


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("out", help="folder for the documents and questions.json")
    ap.add_argument("--haystack", default="auto", metavar="FILE",
                    help="plain text to hide the facts in; auto: the novel Persuasion, fetched with apt-get (Debian)")
    ap.add_argument("--documents", type=parse_plan, default="16k:6,32k:4,64k:4", metavar="LENGTH:COUNT,...",
                    help="lengths in tokens and how many documents of each (default: %(default)s)")
    ap.add_argument("--model", default=os.path.join(HERE, "..", "fathom-recall-15m-q8_0.gguf"), metavar="GGUF",
                    help="whose vocabulary counts the tokens; a GGUF file of export_gguf.py")
    ap.add_argument("--seed", type=int, default=1)
    a = ap.parse_args()
    tok = bpe.Tokenizer.load_gguf(a.model)
    arrays = haystack(tok, a.haystack)
    longest = max(length for length, _ in a.documents)
    if len(arrays["prose"]) < longest + 1024:
        ap.error(f"the haystack has {len(arrays['prose'])} tokens; documents of {longest} need {longest + 1024}")
    with open(os.path.join(HERE, "words.json")) as f:
        words = json.load(f)
    b = tasks.Builder(tok, words, tasks.Haystack(tok, arrays), a.seed)
    os.makedirs(a.out, exist_ok=True)
    index, n_questions = [], 0
    for length, count in a.documents:
        for number in range(count):
            text, asked = document(b, length, number, a.seed)
            name = f"{length // 1024}k-{number + 1}.txt"
            with open(os.path.join(a.out, name), "w", encoding="utf-8") as f:
                f.write(text)
            n_tokens = len(tok.encode(text))
            for task, items in asked.items():
                index.append({"document": name, "task": task, "tokens": n_tokens, "questions": items})
                n_questions += len(items)
    with open(os.path.join(a.out, "questions.json"), "w", encoding="utf-8") as f:
        json.dump(index, f, indent=1)
        f.write("\n")
    print(sum(c for _, c in a.documents), "documents,", n_questions, "questions")


if __name__ == "__main__":
    main()
