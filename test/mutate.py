#!/usr/bin/env python3
"""Can the tests fail? Applies the changes of test/mutations.txt one by one, and requires that a test turns red for each.

    python3 test/mutate.py [-j JOBS] [-x NAME] [WORD ...]     WORD: only the changes whose file or title contains one of them

Each job works in a copy of the tree under build/mutate, where everything is built once (gcc -O1, no threads). A change rebuilds what
includes its file and runs that file's own test programs, up to the first failure; one that they do not notice meets all the others
too. What no program notices survived, and is a hole in the tests. A crash, and a program that does not end, count as noticed. A
change whose old text does not stand in its file exactly once, or that does not compile, is an error of the list.

Exit status 0: every change was noticed. The last line is "mutate: N passed, N failed, N skipped".
"""
import argparse
import glob
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
SCRATCH = os.path.join(ROOT, "build", "mutate")
CC = os.environ.get("CC", "cc").split()
FLAGS = "-std=gnu11 -O1 -ffp-contract=off -w -I.".split()
BLIND = ["readme", "manual", "bench"]  # two look at texts, and one would notice that a line moved; the other takes its time to measure speed
LATE = "does not end"
# The programs that look at a file most closely, the quickest first. All others come after them, the quickest first.
CLOSEST = {"gemma4.c": ["gemma4", "quants"], "quants.c": ["quants", "gemma4"], "checkpoint.c": ["json", "checkpoint"], "gguf.c": ["gguf"], "tokenizer.c": ["tokenizer", "gguf"], "sampler.c": ["sampler"],
           "backend_cpu.c": ["backend"], "chat.c": ["chat"], "answer.c": ["chat"], "engine.c": ["engine"], "statefile.c": ["engine"]}


class Change:
    """file, line (in the list), title, hunks [(old, new)]."""

    def __init__(self, file, title, line):
        self.file, self.title, self.line, self.hunks = file, title, line, []

    def apply(self, text):
        """The changed text, or None and why there is none."""
        for old, new in self.hunks:
            n = text.count(old)
            if n != 1:
                return None, "the old text stands %d times in %s: %s" % (n, self.file, old.strip().split("\n")[0])
            text = text.replace(old, new)
        return text, None


def read_list(path):
    """'@ FILE  TITLE' begins a change; '- ' lines are its old text, '+ ' lines after them the new one; several such pairs may follow."""
    changes, last = [], ""
    for number, line in enumerate(open(path, encoding="utf-8"), 1):
        line = line.rstrip("\n")
        if not line.strip() or line.startswith("#"):
            continue
        kind, text = line[0], line[2:]
        if kind == "@":
            file, title = text.split(None, 1)
            changes.append(Change(file, title, number))
        elif kind in "-+" and changes:
            hunks = changes[-1].hunks
            if kind == "-" and last != "-":
                hunks.append([None, None])
            side = 0 if kind == "-" else 1
            hunks[-1][side] = text if hunks[-1][side] is None else hunks[-1][side] + "\n" + text
        else:
            sys.exit("%s:%d: expected a line that begins with '@ ', '- ', '+ ' or '#'" % (path, number))
        last = kind
    for change in changes:
        if not change.hunks or any(old is None for old, _ in change.hunks):
            sys.exit("%s:%d: a change without old text" % (path, change.line))
        change.hunks = [(old, new or "") for old, new in change.hunks]
    return changes


class Tree:
    """A copy of the project with its objects and programs in o/."""

    def __init__(self, path):
        self.path = path

    def run(self, command, **more):
        return subprocess.run(command, cwd=self.path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **more)

    def compile(self, source):
        done = self.run(CC + FLAGS + ["-DG4_MODEL_DIR=\"models/austen\"", "-MMD", "-c", source, "-o", self.object(source)])
        return done.stdout if done.returncode else None

    @staticmethod
    def object(source):
        return "o/" + os.path.basename(source)[:-2] + ".o"

    def sources(self):
        return sorted(os.path.relpath(s, self.path) for s in glob.glob(self.path + "/*.c") + glob.glob(self.path + "/test/test_*.c"))

    def programs(self):
        names = [os.path.basename(s)[5:-2] for s in self.sources() if s.startswith("test/")]
        return [name for name in names if name not in BLIND]

    def users(self, file):
        """The sources whose objects depend on file."""
        found = []
        for source in self.sources():
            with open(os.path.join(self.path, self.object(source)[:-1] + "d")) as f:
                if file in f.read().replace("\\\n", " ").split():
                    found.append(source)
        return found

    def link(self, name):
        """The program of test/test_NAME.c, or for "gemma4" without a test_ the command line itself."""
        main = "main.c" if name is None else "test/test_%s.c" % name
        with open(os.path.join(self.path, main), encoding="utf-8") as f:
            text = f.read()
        # a test may include a source file whole, to reach what is local to it
        library = [s for s in self.sources() if "/" not in s and s != "main.c" and '#include "%s"' % s not in text]
        out = "gemma4" if name is None else "o/test_" + name
        if os.path.exists(self.path + "/o/all.a"):
            os.remove(self.path + "/o/all.a")
        done = self.run(["ar", "rcs", "o/all.a"] + [self.object(s) for s in library])
        if not done.returncode:
            done = self.run(CC + [self.object(main), "o/all.a", "-lm", "-o", out])
        return done.stdout if done.returncode else None

    def test(self, name, limit):
        """None if the test program passes, else its first complaint."""
        process = subprocess.Popen(["o/test_" + name, "./gemma4"], cwd=self.path, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL,
                                   env=dict(os.environ, SHARED="", MALLOC_PERTURB_="165"), start_new_session=True, text=True, errors="replace")
        late = threading.Timer(limit, kill, [process])
        late.start()
        complaint = None
        for line in process.stdout:
            if line.startswith("FAILED"):
                complaint = line.strip()
                kill(process)
                break
        process.stdout.close()
        status = process.wait()
        late.cancel()
        if complaint or not status:
            return complaint
        return LATE if status == -signal.SIGKILL else "status %d" % status


def kill(process):
    try:
        os.killpg(process.pid, signal.SIGKILL)  # test_cli starts programs of its own
    except ProcessLookupError:
        pass


def build(tree):
    os.makedirs(os.path.join(tree.path, "o"))
    for source in tree.sources():
        fault = tree.compile(source)
        if fault:
            sys.exit("%s does not compile:\n%s" % (source, fault))
    for name in [None] + tree.programs():
        fault = tree.link(name)
        if fault:
            sys.exit("test_%s does not link:\n%s" % (name, fault))


def judge(tree, change, limits):
    """(verdict, why): "killed", "survived" or "error"."""
    path = os.path.join(tree.path, change.file)
    with open(path, encoding="utf-8") as f:
        text = f.read()
    changed, fault = change.apply(text)
    if fault:
        return "error", fault
    close = CLOSEST.get(change.file, [])
    others = sorted((name for name in tree.programs() if name not in close), key=limits.get)
    including = [source for source in tree.users(change.file) if source.startswith("test/")]
    compiled = {source: os.path.join(tree.path, tree.object(source)) for source in [change.file] + including}
    for o in compiled.values():
        shutil.copy(o, o + ".unchanged")
    changed_ones, late = set(), None
    try:
        with open(path, "w", encoding="utf-8") as f:
            f.write(changed)
        for name in close + others:
            source = "test/test_%s.c" % name
            source = source if source in including else change.file
            if source not in changed_ones:
                fault = tree.compile(source)
                if fault:
                    return "error", "does not compile: " + fault.strip().split("\n")[0]
                changed_ones.add(source)
            fault = tree.link(name) or (tree.link(None) if name == "cli" else None)
            if fault:
                return "error", "does not link: " + fault.strip().split("\n")[0]
            fault = tree.test(name, limits[name])
            if fault == LATE:  # on a busy machine that may not be the change's doing
                late = late or name
            elif fault:
                return "killed", "%s: %s" % (name, fault)
        return ("killed", "%s: %s" % (late, LATE)) if late else ("survived", "no test program notices")
    finally:
        with open(path, "w", encoding="utf-8") as f:
            f.write(text)
        for o in compiled.values():
            shutil.copy(o + ".unchanged", o)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("-j", type=int, default=2, metavar="JOBS")
    parser.add_argument("-x", action="append", default=[], metavar="NAME", help="leave out test_NAME")
    parser.add_argument("words", nargs="*", metavar="WORD")
    args = parser.parse_args()
    BLIND.extend(args.x)
    os.nice(5)

    everything = read_list(os.path.join(ROOT, "test", "mutations.txt"))
    changes = [c for c in everything if not args.words or any(w in c.file + " " + c.title for w in args.words)]
    shutil.rmtree(SCRATCH, ignore_errors=True)
    trees = [Tree(os.path.join(SCRATCH, str(i))) for i in range(max(1, args.j))]
    for tree in trees[:1]:
        os.makedirs(tree.path)
        for source in glob.glob(ROOT + "/*.[ch]") + glob.glob(ROOT + "/*.md"):
            shutil.copy(source, tree.path)
        for folder in ("test", "models", "reference"):
            if os.path.isdir(os.path.join(ROOT, folder)):
                shutil.copytree(os.path.join(ROOT, folder), os.path.join(tree.path, folder))
        build(tree)
    for tree in trees[1:]:
        shutil.copytree(trees[0].path, tree.path)

    # Unchanged, all must pass; how long each takes tells when a changed one will not end.
    limits = {}
    for name in trees[0].programs():
        begin = time.time()
        fault = trees[0].test(name, 600)
        if fault:
            print("FAILED mutate: test_%s is red before any change: %s" % (name, fault))
            print("mutate: 0 passed, 1 failed, 0 skipped")
            return 1
        limits[name] = 20 + 10 * (time.time() - begin)

    queue, verdicts, lock = list(enumerate(changes)), {}, threading.Lock()

    def work(tree):
        while True:
            with lock:
                if not queue:
                    return
                number, change = queue.pop(0)
            begin = time.time()
            verdict, why = judge(tree, change, limits)
            with lock:
                verdicts[number] = (verdict, why)
                print("%-8s %-13s %s  [%.1f s; %s]" % (verdict, change.file, change.title, time.time() - begin, why[:150]), flush=True)

    workers = [threading.Thread(target=work, args=[tree], daemon=True) for tree in trees]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()

    failed = [n for n in verdicts if verdicts[n][0] != "killed"]
    for n in sorted(failed):
        print("FAILED mutations.txt:%d: %s: %s: %s" % (changes[n].line, changes[n].file, changes[n].title, verdicts[n][1]))
    print("mutate: %d passed, %d failed, %d skipped" % (len(verdicts) - len(failed), len(failed), len(everything) - len(changes)))
    return 1 if failed or not verdicts else 0


if __name__ == "__main__":
    sys.exit(main())
