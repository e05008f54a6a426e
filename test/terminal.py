#!/usr/bin/env python3
"""`gemma4 chat` as one who types sees it, through a pseudo-terminal, and as a script does, through pipes.

    python3 test/terminal.py [--program ./gemma4]

What the model is asked is seen in what /save writes and in the figures on stderr; what it answers is asked of `gemma4 chat` with pipes, and that of
`gemma4 template` and `gemma4 run`. The last line is "terminal: N passed, N failed, N skipped".

No check may depend on how fast this machine is: whatever comes is waited for, and where Ctrl-C is to find the program at work, it has a long answer of the
slow backend to give (SLOW).
"""
import argparse
import json
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import time

parser = argparse.ArgumentParser()
parser.add_argument("--program", default="./gemma4")
options = parser.parse_args()
os.environ["OMP_WAIT_POLICY"] = "passive"
passed = failed = 0
PATIENCE = 300  # seconds
SLOW = ["--backend", "scalar", "--ctx", "16384", "-n", "100000"]


def check(condition, text):
    global passed, failed
    if condition:
        passed += 1
    else:
        failed += 1
        print("FAILED", text)


def chat(*arguments, typed=None):
    return subprocess.run([options.program, "chat", "--seed", "3", "-n", "12", *arguments], input=typed, capture_output=True, text=True, timeout=PATIENCE)


class Terminal:
    """A chat in a terminal of its own."""

    def __init__(self, *arguments):
        import pty
        self.pid, self.fd = pty.fork()
        if not self.pid:
            os.execv(options.program, [options.program, "chat", "--seed", "3", *arguments])
        self.seen = ""

    def read(self, seconds):
        """What comes next, None at the end."""
        if not select.select([self.fd], [], [], seconds)[0]:
            return ""
        try:
            data = os.read(self.fd, 65536)
        except OSError:  # Linux: the other side is closed
            return None
        return data.decode("utf-8", "replace").replace("\r\n", "\n") if data else None

    def until(self, pattern):
        """Reads on to where it matches, and gives what was read up to there; None: it never did."""
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            found = re.search(pattern, self.seen)
            if found:
                text, self.seen = self.seen[:found.end()], self.seen[found.end():]
                return text
            more = self.read(1)
            if more is None:
                return None
            self.seen += more
        return None

    def type(self, text):
        os.write(self.fd, text.encode())

    def end(self):
        """Its status."""
        limit = time.monotonic() + PATIENCE
        while time.monotonic() < limit:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                os.close(self.fd)
                return os.waitstatus_to_exitcode(status)
            if self.read(0.05) is None:
                time.sleep(0.05)
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        return "killed"


def saved(path):
    request = json.load(open(path))
    return [(m["role"], m["content"]) for m in request["messages"]]


def test_pipes():
    one = chat("-p", "My dear Mr. Bennet")
    check(one.returncode == 0 and one.stdout.strip() and "12 written" in one.stderr and "cut off" in one.stderr, "-p: %s" % (one,))
    same = chat(typed="My dear Mr. Bennet\n")
    check(same.stdout == one.stdout and ">" not in same.stdout + same.stderr, "the same through a pipe: %r" % same.stdout)
    check(chat(typed="My dear Mr. Bennet").stdout == one.stdout and chat(typed="My dear Mr. Bennet\r\n").stdout == one.stdout, "the last line's end, or a \\r, makes no difference")
    check(chat("-q", typed="My dear Mr. Bennet\n").stderr == "", "-q says nothing")
    # alone: the template's text, continued by run; the seed is that of the first answer
    request = json.dumps({"messages": [{"role": "user", "content": "My dear Mr. Bennet"}], "add_generation_prompt": True})
    prompt = subprocess.run([options.program, "template", "-q"], input=request, capture_output=True, text=True).stdout
    alone = subprocess.run([options.program, "run", "-p", prompt, "-n", "12", "--seed", "3", "-q"], capture_output=True, text=True).stdout
    check(one.stdout.rstrip("\n") == alone[len(prompt):].rstrip("\n") or one.stdout.rstrip("\n") == alone.rstrip("\n"), "as `run` goes on from `template`: %r %r" % (one.stdout, alone))
    check(chat(typed="").returncode == 0 and chat(typed="").stdout == "" and chat(typed="\n\n\n").stdout == "", "nothing said, nothing answered")
    check(chat("-p", "").returncode == 0 and chat("-f", "/dev/null").returncode == 0, "an empty message with -p or -f is one")
    two = chat(typed="My dear\nMr. Bennet\n")
    check(len(re.findall(r"tokens read, \d+ of them known", two.stderr)) == 2 and int(re.findall(r"(\d+) of them known", two.stderr)[1]) > 5, "the second answer knows the first: %s" % two.stderr)
    with tempfile.TemporaryDirectory() as folder:
        file = os.path.join(folder, "saved.json")
        many = chat("-q", typed="/system Be brief.\na \\\nb\n\"\"\"\nc\n/save d\\\n\n\"\"\"\n /slash\n/nonsense\n/save %s\n/save %s\n" % (file, file))
        check(many.returncode == 0 and "no command /nonsense" in many.stderr and "cannot be created" in many.stderr, "commands: %s" % (many,))
        check([m for m in saved(file) if m[0] != "assistant"] == [("system", "Be brief."), ("user", "a \nb"), ("user", "c\n/save d\\\n"), ("user", " /slash")], "messages: %s" % saved(file))
        check("".join(m[1].rstrip("\n") + "\n" for m in saved(file) if m[0] == "assistant") == many.stdout, "what is kept of the answers is what was printed: %s, %r" % (saved(file), many.stdout))
        check(subprocess.run([options.program, "template", "-q"], input=open(file).read(), capture_output=True, text=True).returncode == 0, "`template` renders what /save wrote")
        os.remove(file)
        chat(typed="a\n/reset\nb\n/save %s\n" % file)
        check([m[1] for m in saved(file) if m[0] == "user"] == ["b"], "/reset: %s" % saved(file))
        os.remove(file)
        chat("--system", "x", typed="a\n/system\n/save %s\n/quit\nnever read\n" % file)
        check(saved(file) == [], "/system with nothing, /quit: %s" % saved(file))
    full = chat("--ctx", "64", typed="a\n" + "word " * 200 + "\nc\n")
    check(full.returncode == 2 and "n_ctx 64" in full.stderr and full.stderr.count("gemma4: ") == 1 and len(full.stdout) > 0, "context full: %s" % (full,))
    cut = chat("--ctx", "32", "-n", "1000", typed="a\n")
    check(cut.returncode == 0 and "cut off" in cut.stderr, "the context ends an answer: %s" % (cut,))
    with open("/dev/full", "w") if os.path.exists("/dev/full") else tempfile.TemporaryFile("w") as sink:
        r = subprocess.run([options.program, "chat", "-p", "a", "-n", "3"], stdout=sink, stderr=subprocess.PIPE, text=True)
        check(not os.path.exists("/dev/full") or (r.returncode == 2 and r.stderr.count("gemma4: ") == 1), "a full disk: %s" % (r,))
    # who sends a file in can end it all with Ctrl-C
    p = subprocess.Popen([options.program, "chat", *SLOW], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                         preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    p.stdin.write(b"a\nb\nc\n")
    p.stdin.flush()
    p.stdout.read(1)
    p.send_signal(signal.SIGINT)
    check(p.wait(PATIENCE) == -signal.SIGINT, "Ctrl-C with a pipe: %s" % p.returncode)


def test_terminal():
    """Ctrl-C stops the answer and not the program; a message that does not fit leaves the conversation as it was."""
    with tempfile.TemporaryDirectory() as folder:
        file = os.path.join(folder, "saved.json")
        t = Terminal(*SLOW)
        check(t.until("/help lists the commands.\n") and t.until("> $"), "prompt sign: %r" % t.seen)
        t.type("My dear\n")
        check(t.until("My dear\n") is not None and t.until(r"\S+ \S+ \S+") is not None, "an answer begins")
        t.type("\x03")
        check(t.until(r"\[stopped; .* written.*\]\n> $"), "Ctrl-C stops it: %r" % t.seen[-300:])
        t.type("half a li\x03")
        check(t.until(r"\[/quit or Ctrl-D ends\]\n> $"), "Ctrl-C drops what was typed: %r" % t.seen)
        for line in ["\"\"\"\n", "one\n"]:
            t.type(line)
            check(t.until(re.escape(line) + r"\. $"), "a long message: %r" % t.seen)
        t.type("\x03")
        check(t.until(r"ends\]\n> $"), "Ctrl-C inside a long message: %r" % t.seen)
        t.type("two \\\n")
        check(t.until(r"two \\\n\. $"), "a line that goes on: %r" % t.seen)
        t.type("three\n")
        t.until("three\n")
        t.until(r"\S+ \S+ \S+")
        t.type("\x03")
        check(t.until(r"\[stopped; .*\]\n> $"), "Ctrl-C stops the second: %r" % t.seen)
        t.type("/save %s\n" % file)
        check(t.until(r"\[saved: .*\]\n> $"), "/save: %r" % t.seen)
        check([m[0] for m in saved(file)] == ["user", "assistant"] * 2 and [m[1] for m in saved(file)[::2]] == ["My dear", "two \nthree"] and saved(file)[1][1], "the conversation: %s" % saved(file))
        t.type("/help\n")
        check(t.until("(?s)/system TEXT.*/quit.*> $"), "/help")
        t.type("\x04")
        check(t.end() == 0, "Ctrl-D ends")
        os.remove(file)
        t = Terminal("-n", "5", "--ctx", "512")
        t.until("> $")
        t.type("My dear\n")
        check(t.until(r"\[cut off; .* 5 written.*\]\n> $"), "an answer: %r" % t.seen)
        t.type("word " * 600 + "\n")
        check(t.until(r"longer than the context: n_prompt \d+, n_ctx 512; /reset .*\n> $"), "a message that does not fit: %r" % t.seen[-300:])
        t.type("/save %s\n" % file)
        check(t.until(r"\[saved: .*\]\n> $") and [m[0] for m in saved(file)] == ["user", "assistant"], "and leaves the conversation as it was: %s" % saved(file))
        t.type("/quit\n")
        check(t.end() == 0, "/quit ends")
        # Ctrl-C before the answer's first token stops it; where the line is not even read, it is dropped
        t = Terminal(*SLOW)
        t.until("> $")
        t.type("My dear\n")
        t.until("My dear\n")
        t.type("\x03")
        check(t.until(r"\[(stopped; .*|/quit or Ctrl-D ends)\]\n> $"), "Ctrl-C at the beginning: %r" % t.seen)
        t.type("\x04")
        check(t.end() == 0, "Ctrl-D after it")
    t = Terminal("-p", "a", *SLOW)
    check(t.until(r"template for the small models\n") and t.until(r"(\S+\s+){9}"), "an answer to -p begins: %r" % t.seen)
    t.type("\x03")
    check(t.until(r"\[stopped; .*\]\n") and t.end() == 0, "Ctrl-C with -p: %r" % t.seen[-300:])


for test in [test_pipes] + ([test_terminal] if os.name == "posix" else []):
    try:
        test()
    except Exception as e:
        check(False, "%s: %s: %s" % (test.__name__, type(e).__name__, e))
print("terminal: %d passed, %d failed, 0 skipped" % (passed, failed))
sys.exit(1 if failed or not passed else 0)
