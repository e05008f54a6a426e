#!/usr/bin/env python3
"""`gemma4 serve` as its clients see it: the official openai package, raw sockets, hostile and impatient ones.

    python3 test/server.py [--program ./gemma4] [--requests 300] [--hostile 400] [--seed N] [--only queue,key]

--requests and --hostile say how many of each the endurance parts send (10000 and 2000 for the figures in README.md). What an answer should be is asked
of `gemma4 run --ids`, which computes it alone. The last line is "server: N passed, N failed, N skipped".

No check may depend on how fast this machine is, or on how long it lets one of the processes wait: what comes in its own time is waited for (eventually),
and where a client must act while an answer is computed, the answer is a long one of the slow backend (SLOW).
"""
import argparse
import concurrent.futures
import http.client
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import struct
import sys
import tempfile
import threading
import time

parser = argparse.ArgumentParser()
parser.add_argument("--program", default="./gemma4")
parser.add_argument("--requests", type=int, default=300)
parser.add_argument("--hostile", type=int, default=400)
parser.add_argument("--seed", type=int, default=None)
parser.add_argument("--only", default=None)
options = parser.parse_args()
seed = options.seed if options.seed is not None else random.randrange(1 << 30)
rng = random.Random(seed)
print("seed %d" % seed)

passed = failed = skipped = 0
CTX = 256
PATIENCE = 300  # seconds
SLOW = ["--backend", "scalar", "--ctx", "16384"]
AUSTEN = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "models", "austen")


def check(condition, text):
    global passed, failed
    if condition:
        passed += 1
    else:
        failed += 1
        print("FAILED", text)


def eventually(condition):
    """Whether it holds at last."""
    end = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


class Server:
    def __init__(self, *more, env=None, model=AUSTEN, threads=("--threads", "2")):
        # a sanitizer keeps what was freed for a while; that little of it, so that it does not look like a leak, nor does a heap for each of the threads
        self.process = subprocess.Popen([options.program, "serve", model, "--port", "0", *threads, *more], stderr=subprocess.PIPE, text=True,
                                        env={**os.environ, "OMP_WAIT_POLICY": "passive", "ASAN_OPTIONS": "quarantine_size_mb=1:thread_local_quarantine_size_kb=64", "MALLOC_ARENA_MAX": "1",
                                             **(env or {})})
        self.lines = []
        self.port = None
        for line in self.process.stderr:
            self.lines.append(line)
            found = re.match(r"listening on http://(?:127\.0\.0\.1|0\.0\.0\.0):(\d+)$", line)
            if found:
                self.port = int(found[1])
                break
        if self.port is None:
            raise SystemExit("the server did not begin: " + "".join(self.lines))
        threading.Thread(target=lambda: self.lines.extend(self.process.stderr), daemon=True).start()

    def request(self, method, path, body=None, headers=None, timeout=PATIENCE):
        c = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        c.request(method, path, body if isinstance(body, (bytes, str, type(None))) else json.dumps(body),
                  {"Content-Type": "application/json", **(headers or {})} if method == "POST" else headers or {})
        r = c.getresponse()
        data = r.read()
        c.close()
        return r.status, r.headers, data

    def post(self, path, body, **more):
        status, headers, data = self.request("POST", path, body, **more)
        return status, json.loads(data)

    def metric(self, name):
        return float(re.search(r"^gemma4_%s (\S+)$" % name, self.request("GET", "/metrics")[2].decode(), re.M)[1])

    def descriptors(self):
        return len(os.listdir("/proc/%d/fd" % self.process.pid))

    def memory(self):
        return int(re.search(r"RssAnon:\s+(\d+)", open("/proc/%d/status" % self.process.pid).read())[1])

    def idle(self):
        return eventually(lambda: self.metric("answers_in_flight") == 0)

    def said(self, text):
        return eventually(lambda: any(text in line for line in self.lines))

    def stop(self, seconds=PATIENCE):
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return "killed"


def run(ids, n, seed, temp=None):
    command = [options.program, "run", "--ids", ",".join(map(str, ids)), "-n", str(n), "--seed", str(seed), "-q", "--ctx", str(CTX)]
    return subprocess.run(command + (["--temp", str(temp)] if temp is not None else []), capture_output=True, text=True, check=True).stdout.split()


def events(data):
    return [json.loads(line[6:]) for line in data.decode().split("\n\n") if line.startswith("data: {")]


def before_stop(text, stops):
    """The text before the stop string that ends first, the longest of those that end there; None: there is none."""
    for end in range(1, len(text) + 1):
        found = [s for s in stops if text[:end].endswith(s)]
        if found:
            return text[:end - max(map(len, found))]


def error_of(answer):
    return answer.get("error", {})


def test_plain(s):
    status, headers, data = s.request("GET", "/health")
    check(status == 200 and json.loads(data) == {"status": "ok"}, "health")
    check(s.request("HEAD", "/health")[::2] == (200, b""), "HEAD /health")
    status, headers, data = s.request("GET", "/v1/models")
    models = json.loads(data)
    check(status == 200 and [m["id"] for m in models["data"]] == ["austen"], "models: %s" % models)
    check(s.request("GET", "/v1/models/austen")[0] == 200 and s.request("GET", "/v1/models/other")[0] == 404, "one model")
    status, headers, data = s.request("GET", "/")
    check(status == 200 and b"<title>gemma4.c</title>" in data and "default-src 'none'" in headers["Content-Security-Policy"], "the page")
    check(not re.search(rb"(?:src|href)=[\"']?https?:|@import|url\(", data), "the page takes something from elsewhere")
    for method, path, expected in [("GET", "/v1/chat/completions", 405), ("POST", "/health", 405), ("GET", "/nothing", 404), ("PUT", "/v1/completions", 405), ("DELETE", "/", 405)]:
        check(s.request(method, path, b"{}")[0] == expected, "%s %s: not %d" % (method, path, expected))
    check(s.request("GET", "/v1/completions")[1]["Allow"] == "POST", "405 names the method")
    status, answer = s.post("/tokenize", {"content": "It is a truth", "with_pieces": True})
    check("".join(t["piece"] for t in answer["tokens"]) == "It is a truth", "pieces: %s" % answer)
    ids = s.post("/tokenize", {"content": "h\u00e9llo \U0001f600\n\x00x", "add_special": True})[1]["tokens"]
    check(ids[0] == 2 and s.post("/detokenize", {"tokens": ids[1:]})[1] == {"content": "h\u00e9llo \U0001f600\n\x00x"}, "there and back")
    check(len(s.post("/tokenize", {"content": "<bos>", "parse_special": False})[1]["tokens"]) > 1 and s.post("/tokenize", {"content": "<bos>"})[1]["tokens"] == [2], "parse_special")
    check(s.post("/tokenize", {"content": "<bos>a", "add_special": True})[1]["tokens"].count(2) == 1, "never two <bos>")


def test_parameters(s):
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    wrong = {"temperature": [-1, "1", 1e999, [], 101], "top_p": [-0.1, 1.5, "x"], "top_k": [-1, 1.5], "min_p": [2], "frequency_penalty": [-3, 3], "presence_penalty": [2.5],
             "n": [0, 17, 1.5, "2"], "max_tokens": [-1, 1.5, "5", 1 << 40], "max_completion_tokens": [-1], "seed": [1.5, "x", 1e30], "stop": ["", [""], 5, [5], ["a"] * 17, "a\x00b"],
             "logit_bias": [[], {"x": 1}, {"-1": 1}, {"5": 101}, {"5": "x"}, {"99999999": 1}, {"99999999999999999999999": 1}], "stream": ["yes", 1], "logprobs": [2, "x"],
             "top_logprobs": [21, -1, 5], "response_format": [{"type": "json_object"}, {"type": "json_schema", "json_schema": {}}, "text", {}], "tool_choice": ["required", {"type": "function"}],
             "parallel_tool_calls": [False], "messages": [[], {}, "x", [5], [{"role": "nobody", "content": "x"}][:0]], "modalities": [["audio"], []],
             "stream_options": [{"include_usage": True}], "functions": [[{}]], "chat_template_kwargs": [[], {"enable_thinking": 1}, {"preserve_thinking": "yes"}], "reasoning_effort": [5]}
    for name, values in wrong.items():
        for value in values:
            status, answer = s.post("/v1/chat/completions", json.dumps({**chat, name: value}).replace("Infinity", "1e999"))
            check(status == 400 and error_of(answer).get("message") and error_of(answer).get("param") in (name, None) and (error_of(answer).get("param") or name in ("temperature", "messages")),
                  "%s %r: %d %s" % (name, value, status, answer))
    status, answer = s.post("/v1/chat/completions", {**chat, "model": "gpt-4"})
    check(status == 404 and error_of(answer)["code"] == "model_not_found", "another model: %s" % answer)
    for name, value in [("temperature", None), ("stop", None), ("response_format", {"type": "text"}), ("user", "me"), ("store", False), ("model", "austen"), ("logit_bias", {}), ("never_heard_of", 1),
                        ("temperature", 0), ("temperature", 1e-7), ("temperature", -0.0), ("temperature", 1e-45), ("seed", -1), ("seed", 0), ("reasoning_effort", "none"), ("tools", []), ("chat_template_kwargs", {"enable_thinking": False, "preserve_thinking": True, "nor_of_this": 1})]:
        status, answer = s.post("/v1/chat/completions", {**chat, name: value})
        check(status == 200, "%s %r: %d %s" % (name, value, status, answer))
    check(s.said("never_heard_of") and s.said("nor_of_this"), "an unknown parameter is warned of")
    # what a function's own arguments are called is nobody's business: only tool_calls[].function.arguments is JSON in a string
    for arguments, expected in [({"arguments": "not JSON"}, 200), ("{\"arguments\": \"not JSON\"}", 200), ("not JSON", 400), ("[1]", 400)]:
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
        status, answer = s.post("/v1/chat/completions", {**chat, "messages": [*chat["messages"], {"role": "assistant", "content": "", "tool_calls": [call]}]})
        check(status == expected, "arguments %r: %d %s" % (arguments, status, answer))
    for kind, expected in [("application/json", 200), ("Application/JSON; charset=utf-8", 200), ("application/jsonl", 415), ("application/json\t;x", 200)]:
        check(s.request("POST", "/tokenize", b"{\"content\":\"a\"}", {"Content-Type": kind})[0] == expected, "Content-Type: %s: not %d" % (kind, expected))
    for wrong in [{"prompt": 5}, {}, {"prompt": []}, {"prompt": [[]]}, {"prompt": [99999999]}, {"prompt": ["a", 5]}, {"prompt": ["a"] * 17}, {"prompt": [-1]}, {"prompt": "a", "suffix": "b"},
                  {"prompt": "a", "best_of": 3}, {"prompt": "a", "echo": True, "logprobs": 1}, {"prompt": "a", "response_format": {"type": "json_object"}}]:
        status, answer = s.post("/v1/completions", wrong)
        check(status == 400, "completions %s: %d %s" % (wrong, status, answer))
    for content in ["x", [{"type": "text", "text": "x"}], [{"type": "text", "text": "x"}, {"type": "text", "text": "y"}], None, []]:
        for role in ["system", "user", "assistant"]:
            status, answer = s.post("/v1/chat/completions", {**chat, "messages": [{"role": role, "content": content}, {"role": "user", "content": "go"}]})
            check(status == 200, "content %r of %s: %s" % (content, role, answer))
    for part in [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}, {"type": "input_audio"}, {"type": "nonsense"}]:
        status, answer = s.post("/v1/chat/completions", {**chat, "messages": [{"role": "user", "content": [part]}]})
        check(status == 400 and error_of(answer)["param"] == "messages", "part %s: %d %s" % (part, status, answer))


def test_limits(s):
    for n, expected in [(CTX - 1, 200), (CTX, 200), (CTX + 1, 400), (10000, 400)]:
        status, answer = s.post("/v1/completions", {"prompt": [2] * n, "max_tokens": 5, "ignore_eos": True})
        check(status == expected, "a prompt of %d: %d %s" % (n, status, answer))
        if status == 400:
            check("n_prompt %d" % n in error_of(answer)["message"] and "n_ctx %d" % CTX in error_of(answer)["message"] and error_of(answer)["code"] == "context_length_exceeded", "figures: %s" % answer)
    status, answer = s.post("/v1/completions", {"prompt": [2] * (CTX - 4), "max_tokens": 100, "ignore_eos": True})
    check(answer["usage"]["completion_tokens"] in (4, 5) and answer["choices"][0]["finish_reason"] == "length", "up to the end of the context: %s" % answer)
    for n in [0, 1, 1000000000]:
        status, answer = s.post("/v1/completions", {"prompt": [2, 5], "max_tokens": n, "ignore_eos": True})
        expected = min(n, CTX - 2)
        check(status == 200 and answer["usage"]["completion_tokens"] in (expected, expected + 1) and answer["choices"][0]["finish_reason"] == "length", "max_tokens %d: %d %s" % (n, status, answer))
    check(s.request("POST", "/v1/completions", b"x" * 190000)[0] == 413, "a long body")
    try:
        check(s.request("POST", "/v1/completions", b"x" * (1 << 20))[0] == 413, "a body of ten times what is taken")
    except ConnectionError:  # the server does not wait for all of it, and this client, still sending, does not look for the answer
        check(s.request("GET", "/health")[0] == 200, "alive after a body of ten times what is taken")


def test_answers(s):
    ids = s.post("/tokenize", {"content": "It is a truth", "add_special": True})[1]["tokens"]
    for temp, n in [(0, 20), (None, 20)]:
        alone = run(ids, n, 7, temp)
        body = {"prompt": "It is a truth", "max_tokens": n, "seed": 7, "logprobs": 0, "ignore_eos": False}
        if temp is not None:
            body["temperature"] = temp
        text = s.post("/v1/completions", body)[1]["choices"][0]["text"]
        check(text == s.post("/detokenize", {"tokens": list(map(int, alone))})[1]["content"], "as `run` does, --temp %s: %r" % (temp, text))
        streamed = events(s.request("POST", "/v1/completions", {**body, "stream": True})[2])
        check("".join(e["choices"][0]["text"] for e in streamed) == text, "streamed as whole")
        lp = [x for e in streamed for x in e["choices"][0]["logprobs"]["token_logprobs"]]
        check(lp == s.post("/v1/completions", body)[1]["choices"][0]["logprobs"]["token_logprobs"] and len(lp) == n, "streamed log-probabilities")
    # stop strings that cross tokens: what is before them, nothing of them, streamed as whole
    base = s.post("/v1/completions", {"prompt": "It is a truth", "max_tokens": 60, "seed": 3, "ignore_eos": True})[1]["choices"][0]["text"]
    for i in range(40):
        begin = rng.randrange(0, len(base) - 8)
        stops = [base[begin:begin + rng.randrange(1, 8)]] + [base[k:k + 5] for k in [rng.randrange(len(base) - 5)] * rng.randrange(2)]
        cut = len(before_stop(base, stops))
        body = {"prompt": "It is a truth", "max_tokens": 60, "seed": 3, "stop": stops, "ignore_eos": True}
        answer = s.post("/v1/completions", body)[1]["choices"][0]
        check(answer["text"] == base[:cut] and answer["finish_reason"] == "stop", "stop %r: %r" % (stops, answer["text"]))
        check("".join(e["choices"][0]["text"] for e in events(s.request("POST", "/v1/completions", {**body, "stream": True})[2])) == base[:cut], "stop %r, streamed" % stops)
    chat = {"messages": [{"role": "user", "content": "My dear Mr. Bennet"}], "max_tokens": 60, "seed": 3, "ignore_eos": True}
    whole = s.post("/v1/chat/completions", chat)[1]["choices"][0]["message"]["content"]
    for i in range(20):
        begin = rng.randrange(0, len(whole) - 8)
        stop = whole[begin:begin + rng.randrange(1, 8)]
        answer = s.post("/v1/chat/completions", {**chat, "stop": stop})[1]["choices"][0]
        check(answer["message"]["content"] == whole[:whole.index(stop)] and answer["finish_reason"] == "stop", "chat stop %r: %s" % (stop, answer))
        deltas = [e["choices"][0]["delta"].get("content", "") for e in events(s.request("POST", "/v1/chat/completions", {**chat, "stop": stop, "stream": True})[2])]
        check("".join(deltas) == whole[:whole.index(stop)], "chat stop %r, streamed" % stop)
    # one stop string inside the beginning of another, which the text does or does not go on with
    for i in range(20):
        begin = len(whole) - 20 if i < 2 else rng.randrange(0, len(whole) - 20)
        stops = [whole[begin:begin + 20 if i < 2 else begin + rng.randrange(4, 16)] + rng.choice(["", "zz"]) * (i > 1) + "zz" * (i < 2), whole[begin + 1:begin + 19 if i < 2 else begin + 3]]
        expected = before_stop(whole, stops)
        answer = s.post("/v1/chat/completions", {**chat, "stop": rng.sample(stops, 2)})[1]["choices"][0]
        check(answer["message"]["content"] == expected and answer["finish_reason"] == "stop", "chat stops %r: %s" % (stops, answer))
        text = s.post("/v1/completions", {"prompt": "It is a truth", "max_tokens": 60, "seed": 3, "ignore_eos": True, "stop": stops})[1]["choices"][0]["text"]
        check(text == (base if before_stop(base, stops) is None else before_stop(base, stops)), "stops %r: %r" % (stops, text))
    # text_offset counts characters
    pound = s.post("/tokenize", {"content": "\u00a3"})[1]["tokens"]
    answer = s.post("/v1/completions", {"prompt": "It is", "max_tokens": 4, "temperature": 0, "logprobs": 0, "logit_bias": {str(pound[0]): 100}})[1]["choices"][0]
    check(len(pound) == 1 and answer["text"] == 4 * "\u00a3" and answer["logprobs"]["text_offset"] == [0, 1, 2, 3], "text_offset: %s" % answer)
    # the older format's candidates: the chosen token is one of them however bad it is, and a byte that is no character has a name of its own
    answer = s.post("/v1/completions", {"prompt": "It is a truth", "max_tokens": 20, "seed": 7, "logprobs": 1, "temperature": 3})[1]["choices"][0]["logprobs"]
    check({len(top) for top in answer["top_logprobs"]} == {1, 2} and all(top[t] == p for t, p, top in zip(answer["tokens"], answer["token_logprobs"], answer["top_logprobs"])), "top_logprobs: %s" % answer)
    answer = s.post("/v1/completions", {"prompt": "It is", "max_tokens": 1, "logprobs": 0, "temperature": 0})[1]["choices"][0]["logprobs"]
    check(answer["top_logprobs"] == [{answer["tokens"][0]: answer["token_logprobs"][0]}], "logprobs 0: %s" % answer)
    byte = {piece: i for piece, i in json.load(open(os.path.join(AUSTEN, "tokenizer.json")))["model"]["vocab"].items() if piece in ("<0xE2>", "<0x41>")}
    for piece, i in byte.items():
        answer = s.post("/v1/completions", {"prompt": "It is", "max_tokens": 1, "logprobs": 0, "temperature": 0, "logit_bias": {str(i): 100}})[1]["choices"][0]["logprobs"]
        check(answer["tokens"] == ["bytes:\\x" + piece[3:5].lower()] and answer["text_offset"] == [0], "a byte: %s" % answer)
    a, b = (s.post("/v1/chat/completions", chat)[1]["choices"][0]["message"]["content"] for _ in range(2))
    check(a == b == whole, "one seed, one text")
    check(s.post("/v1/chat/completions", {**chat, "seed": 4})[1]["choices"][0]["message"]["content"] != whole, "another seed, another text")
    check(len({s.post("/v1/chat/completions", {**chat, "seed": None})[1]["choices"][0]["message"]["content"] for _ in range(3)}) > 1, "no seed: another text each time")
    several = s.post("/v1/chat/completions", {**chat, "n": 3})[1]
    check(len({c["message"]["content"] for c in several["choices"]}) == 3 and several["choices"][0]["message"]["content"] == whole and several["usage"]["completion_tokens"] == 180, "n 3: %s" % several)
    both = s.post("/v1/completions", {"prompt": ["It is", "My dear"], "max_tokens": 8, "seed": 1, "echo": True})[1]["choices"]
    check([c["index"] for c in both] == [0, 1] and both[0]["text"].startswith("It is") and both[1]["text"].startswith("My dear"), "two prompts: %s" % both)
    cached = s.post("/v1/chat/completions", chat)[1]["usage"]["prompt_tokens_details"]["cached_tokens"]
    check(cached > 5, "a known prompt is not computed again: %s" % cached)


def test_openai(s):
    global skipped
    try:
        import openai
    except ImportError:
        skipped += 1
        print("skipped: the openai package is not installed")
        return
    client = openai.OpenAI(base_url="http://127.0.0.1:%d/v1" % s.port, api_key="none", max_retries=0)
    check([m.id for m in client.models.list()] == ["austen"], "openai: models")
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who is Elizabeth?"}]
    answer = client.chat.completions.create(model="austen", messages=messages, max_tokens=30, seed=5, logprobs=True, top_logprobs=3)
    content = answer.choices[0].message.content
    check(answer.usage.completion_tokens == len(answer.choices[0].logprobs.content) and all(len(t.top_logprobs) == 3 for t in answer.choices[0].logprobs.content), "openai: logprobs")
    check(all(t.logprob <= 0 and t.top_logprobs[0].logprob >= t.logprob - 1e-9 for t in answer.choices[0].logprobs.content), "openai: the best is not worse")
    chunks = list(client.chat.completions.create(model="austen", messages=messages, max_tokens=30, seed=5, stream=True, stream_options={"include_usage": True}))
    check("".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == content, "openai: streamed as whole")
    check(chunks[-1].usage.completion_tokens == answer.usage.completion_tokens and chunks[0].choices[0].delta.role == "assistant", "openai: usage at the end")
    text = client.completions.create(model="austen", prompt="It is a truth", max_tokens=10, seed=1, logprobs=2)
    check(len(text.choices[0].logprobs.tokens) == text.usage.completion_tokens, "openai: completions")
    streamed = list(client.completions.create(model="austen", prompt="It is a truth", max_tokens=10, seed=1, stream=True))
    check("".join(c.choices[0].text for c in streamed) == text.choices[0].text, "openai: completions streamed")
    tools = [{"type": "function", "function": {"name": "weather", "description": "The weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}]
    with_tools = client.chat.completions.create(model="austen", messages=messages, tools=tools, max_tokens=5, seed=1)
    check(with_tools.usage.prompt_tokens > answer.usage.prompt_tokens + 20, "openai: tools are in the prompt")
    without = client.chat.completions.create(model="austen", messages=messages, tools=tools, tool_choice="none", max_tokens=5, seed=1)
    check(without.usage.prompt_tokens == answer.usage.prompt_tokens, "openai: tool_choice none")
    history = messages + [{"role": "assistant", "content": None, "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "weather", "arguments": "{\"city\": \"Bath\"}"}}]},
                          {"role": "tool", "tool_call_id": "c1", "content": "rain"}]
    check(client.chat.completions.create(model="austen", messages=history, tools=tools, max_tokens=5).choices, "openai: a tool's answer")
    for exception, arguments in [(openai.BadRequestError, {"temperature": -1}), (openai.NotFoundError, {"model": "x"}), (openai.BadRequestError, {"response_format": {"type": "json_object"}}),
                                 (openai.BadRequestError, {"messages": []})]:
        try:
            client.chat.completions.create(**{"model": "austen", "messages": messages, "max_tokens": 2, **arguments})
            check(False, "openai: %s was taken" % arguments)
        except exception as e:
            check(e.body and e.body["message"], "openai: %s" % e)


def test_concurrent(s):
    prompts = [s.post("/tokenize", {"content": t, "add_special": True})[1]["tokens"] for t in
               ["It is a truth", "My dear Mr. Bennet", "Emma", "She was", "The carriage", "He replied that", "Indeed", "To be sure, said"]]
    alone = [run(p, 40, i) for i, p in enumerate(prompts)]
    expected = [s.post("/detokenize", {"tokens": list(map(int, a))})[1]["content"] for a in alone]

    def ask(i):
        body = {"prompt": prompts[i % 8], "max_tokens": 40, "seed": i % 8, "stream": i % 3 == 0}
        time.sleep(rng.random() * 0.05)
        status, headers, data = s.request("POST", "/v1/completions", body)
        return "".join(e["choices"][0]["text"] for e in events(data)) if body["stream"] else json.loads(data)["choices"][0]["text"]

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        got = list(pool.map(ask, range(48)))
    check(all(text == expected[i % 8] for i, text in enumerate(got)), "8 at once: %d of 48 differ from being alone" % sum(text != expected[i % 8] for i, text in enumerate(got)))


def test_leaving(s):
    """Clients that go away during the prompt or the answer: their places become free, nothing leaks."""
    check(s.idle(), "idle before")
    before = s.descriptors()
    for i in range(50):
        c = socket.create_connection(("127.0.0.1", s.port))
        body = json.dumps({"prompt": [2] + [rng.randrange(5, 500) for _ in range(100)], "max_tokens": 1000, "ignore_eos": True, "stream": i % 2 == 0}).encode()
        c.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        if i % 4 == 0:
            c.recv(200)
        c.close()
    check(s.idle(), "50 clients left: %d answers are still computed" % s.metric("answers_in_flight"))
    check(s.request("GET", "/health")[0] == 200, "alive")
    check(eventually(lambda: s.descriptors() <= before + 2), "descriptors: %d before, %d after" % (before, s.descriptors()))


HOSTILE = [b"", b"{", b"[]", b"null", b"5", b"\"x\"", b"{}}", b"{\"messages\":}", b"[" * 1000, b"{\"a\":" * 1000, b"\xff\xfe", b"{\"prompt\":\"\\ud800\"}", b"{\"prompt\":\"\xc3\"}", b"{\"prompt\":\"a\",\"prompt\":\"b\"}",
           b"{\"prompt\":1e999}", b"{\"prompt\":\"a\",\"temperature\":1e999}", b"{\"prompt\":\"a\",\"max_tokens\":1e999}", b"\x00" * 100, b"{\"prompt\":\"a\",\"n\":999999999999999999999}",
           b"{\"messages\":[{\"role\":\"user\"}]}", b"{\"messages\":[{\"content\":\"x\"}]}", b"{\"messages\":[{\"role\":5,\"content\":\"x\"}]}", b"{\"messages\":[[]]}", b"{\"messages\":[null]}",
           b"{\"messages\":[{\"role\":\"user\",\"content\":{\"a\":1}}]}", b"{\"messages\":[{\"role\":\"user\",\"content\":[[]]}]}", b"{\"messages\":[{\"role\":\"tool\"}],\"tools\":5}", b"{\"messages\":[{\"role\":\"user\",\"content\":\"x\"}],\"tools\":[5]}"]


def test_hostile(s):
    for path in ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"]:
        for body in HOSTILE:
            status, headers, data = s.request("POST", path, body)
            check((400 <= status < 500 and error_of(json.loads(data)).get("message")) or (status == 200 and body.startswith(b"{\"messages\"")), "%s %r: %d %r" % (path, body[:60], status, data[:200]))
    check(s.request("POST", "/v1/completions", b"{}", {"Content-Type": "text/plain"})[0] == 415, "another type")
    seeds = [json.dumps(x).encode() for x in [
        {"messages": [{"role": "system", "content": "a"}, {"role": "user", "content": [{"type": "text", "text": "b"}]}], "max_tokens": 1, "stop": ["x"], "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"x": {"type": "string"}}}}}]},
        {"prompt": ["a", "b"], "max_tokens": 1, "logprobs": 1, "logit_bias": {"5": 1}, "n": 2}, {"content": "abc"}, {"tokens": [1, 2, 3]}]]
    served = []
    stop = threading.Event()

    def other():
        statuses = []

        def taken():  # the queue may be full: a request that is still valid may ask for many answers, and long ones
            statuses.append(s.request("POST", "/v1/completions", {"prompt": [2, 5, 6], "max_tokens": 3, "temperature": 0})[0])
            return statuses[-1] != 429

        eventually(taken)
        served.append(statuses[-1])

    def others():
        while not stop.is_set():
            other()
            time.sleep(0.02)

    friend = threading.Thread(target=others)
    friend.start()
    slow = []
    kinds = {}
    for i in range(options.hostile):
        if i % 50 == 49:  # how often the friend gets its turn is a matter of the machine; these come in the midst, whatever it is
            other()
        body = bytearray(rng.choice(seeds))
        for _ in range(rng.randrange(1, 6)):
            at = rng.randrange(len(body))
            kind = rng.randrange(4)
            if kind == 0:
                body[at] = rng.randrange(256)
            elif kind == 1:
                del body[at:at + rng.randrange(1, 8)]
            elif kind == 2:
                body[at:at] = bytes(rng.choice(b"{}[]\",:0123456789eE-\\u\x00\xff") for _ in range(rng.randrange(1, 8)))
            else:
                body[at:at] = body[at:at + 20]
            body = body or bytearray(b"{")
        path = rng.choice(["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize", "/v1/models", "/%ff%00", "/" + "a" * 3000]).encode()
        length = rng.choice([str(len(body)), str(len(body)), str(len(body)), str(len(body) + 10), "0", "-1", "x", "99999999999999999999", "18446744073709551616"]).encode()
        head = b"POST " + path + b" HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: " + length + b"\r\nConnection: close\r\n\r\n"
        way = rng.randrange(8)
        if way == 0:
            head = bytes(rng.randrange(256) for _ in range(rng.randrange(1, 200)))
        if way == 1:
            head = head.replace(b"Content-Length: " + length, b"Transfer-Encoding: chunked") + b"%x\r\n" % len(body) + bytes(body) + rng.choice([b"\r\n0\r\n\r\n", b"\r\nzz\r\n", b""])
            body = b""
        if way == 2:
            head = head.replace(b"Host", b"X-" + b"h" * rng.randrange(70000) + b": 1\r\nHost")
        c = socket.create_connection(("127.0.0.1", s.port), timeout=PATIENCE)
        try:
            c.sendall(head + bytes(body))
            if way == 3:  # it is cut off
                c.close()
                continue
            if way == 4 and len(slow) < 20:  # it dawdles
                slow.append(c)
                continue
            if length != str(len(body)).encode() or way in (0, 1):
                c.shutdown(socket.SHUT_WR)
            c.settimeout(PATIENCE)
            answer = c.recv(65536)
            found = re.match(rb"HTTP/1\.[01] (\d)", answer)
            word = found[1].decode() + "xx" if found else "closed" if not answer else "strange"
        except OSError as e:
            word = "timeout" if isinstance(e, TimeoutError) else "closed"
        kinds[word] = kinds.get(word, 0) + 1
        c.close()
    stop.set()
    friend.join()
    for c in slow:
        c.close()
    check(s.process.poll() is None and not kinds.get("5xx") and not kinds.get("strange") and not kinds.get("timeout"), "%d hostile requests: %s" % (options.hostile, kinds))
    check(len(served) > options.hostile // 50 and set(served) == {200}, "others were served meanwhile: %d, %s" % (len(served), set(served)))
    check(s.idle(), "idle after")


def test_endurance(s):
    def ask(i):
        status, headers, data = s.request("POST", rng.choice(["/v1/completions", "/v1/chat/completions"]),
                                          {"prompt": [2, 5 + i % 200], "messages": [{"role": "user", "content": str(i)}], "max_tokens": 3, "stream": i % 5 == 0, "logprobs": 0 if i % 2 else None} if i % 2 else
                                          {"prompt": [2, 5 + i % 200], "messages": [{"role": "user", "content": str(i)}], "max_tokens": 3})
        return status

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(ask, range(200)))  # what the allocator keeps
        memory, descriptors = s.memory(), s.descriptors()
        start = time.time()
        statuses = list(pool.map(ask, range(options.requests)))
    seconds = time.time() - start
    check(eventually(lambda: s.descriptors() <= descriptors + 2 and s.memory() < memory + 4096), "%d requests leave memory or descriptors behind" % options.requests)
    print("%d requests in %.1f s; memory %d KB before, %d after; descriptors %d, %d" % (options.requests, seconds, memory, s.memory(), descriptors, s.descriptors()))
    check(set(statuses) <= {200, 400}, "%d requests: statuses %s" % (options.requests, set(statuses)))


def test_queue():
    """A full queue refuses; SIGTERM lets answers in progress come to their end, or with --grace 0 cancels them."""
    s = Server("--parallel", "1", "--queue", "2", "--grace", "3000", *SLOW)
    over = threading.Event()

    def crowd():  # six for three places: mostly all are taken
        while not over.is_set():
            s.request("POST", "/v1/completions", {"prompt": [2, 5], "max_tokens": 50, "ignore_eos": True})

    refused = []

    def turned_away():
        refused.append(s.request("POST", "/v1/completions", {"prompt": [2, 5], "max_tokens": 1}))
        return refused[-1][0] == 429

    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        crowds = [pool.submit(crowd) for _ in range(6)]
        eventually(turned_away)
        over.set()
        for c in crowds:
            c.result()
    status, headers, data = refused[-1]
    check(status == 429 and headers["Retry-After"] and error_of(json.loads(data))["type"] == "rate_limit_error", "a full queue: %d" % status)
    check(s.idle(), "idle again")
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        running = [pool.submit(s.request, "POST", "/v1/completions", {"prompt": [2, 5], "max_tokens": 500, "ignore_eos": True}, timeout=3000) for _ in range(3)]
        eventually(lambda: s.metric("answers_in_flight") + sum(f.done() for f in running) >= 3)
        s.process.send_signal(signal.SIGTERM)
        statuses = [f.result()[0] for f in running]
        check(statuses == [200, 200, 200], "answers in progress are finished after SIGTERM: %s" % statuses)
        check(s.process.wait(PATIENCE) == 0, "status after SIGTERM")
    for grace in ["0", "3000"]:
        s = Server("--parallel", "1", "--grace", grace, *SLOW)
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            running = pool.submit(s.request, "POST", "/v1/completions", {"prompt": [2, 5], "max_tokens": 16000, "ignore_eos": True})
            eventually(lambda: s.metric("answers_in_flight") == 1)
            s.process.send_signal(signal.SIGTERM)
            if grace != "0":
                check(s.said("no new requests") and s.process.poll() is None, "the answer has its time")
                s.process.send_signal(signal.SIGTERM)
            check(s.process.wait(PATIENCE) == 0, "status after SIGTERM without grace, or after a second")
            check(running.result()[0] == 503, "its client is told")


def test_long_answer_left():
    """A client that does not stream and goes while tokens come: the answer is not computed to its end."""
    s = Server("--parallel", "1", *SLOW)
    body = json.dumps({"prompt": [2, 5], "max_tokens": 16000, "ignore_eos": True}).encode()
    c = socket.create_connection(("127.0.0.1", s.port))
    c.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    eventually(lambda: s.metric("new_tokens_total") >= 5)
    c.close()
    check(s.idle() and s.metric("new_tokens_total") < 15900 and s.metric("clients_gone_total") == 1, "%d tokens for a client that left" % s.metric("new_tokens_total"))
    s.stop()


def test_silence():
    """A connection on which nothing comes, or half a request, is closed after --timeout."""
    s = Server("--timeout", "1")
    for begin in [b"", b"POST /tokenize HTTP/1.1\r\nHo", b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 15\r\n\r\n{\"con"]:
        c = socket.create_connection(("127.0.0.1", s.port), timeout=PATIENCE)
        try:
            c.sendall(begin)
            while c.recv(65536):
                pass
        except ConnectionError:  # closed before it was sent
            pass
        c.close()
    check(s.stop() == 0, "status")


def test_small():
    """A server that takes little: bodies of 1024 bytes, one answer at a time and none that waits."""
    s = Server("--max-body", "1024", "--parallel", "1", "--queue", "0", model=AUSTEN + "/")
    check([m["id"] for m in json.loads(s.request("GET", "/v1/models")[2])["data"]] == ["austen"], "the name of a model that was given with a slash behind it")
    for body in [{"prompt": "a", "n": 2}, {"prompt": ["a", "b"]}]:
        status, answer = s.post("/v1/completions", body)
        check(status == 400 and "at most 1" in error_of(answer)["message"], "more answers than ever fit: %d %s" % (status, answer))
    small = b"{\"prompt\":\"a\",\"max_tokens\":1}"
    for first, expected in [(b" " * 100, b"200"), (b" " * 2000, b"413"), (b"x" * 1024, b"413")]:
        c = socket.create_connection(("127.0.0.1", s.port), timeout=PATIENCE)
        c.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n")
        for part in (first, small, b""):
            c.sendall(b"%x\r\n%s\r\n" % (len(part), part))
        check(c.recv(65536)[9:12] == expected, "a body in parts, the first of %d bytes: not %s" % (len(first), expected))
        c.close()
    check(s.stop() == 0, "status")


def test_less_than_the_vocabulary():
    """A model whose per-layer embeddings have fewer rows than the vocabulary, and whose tokenizer lacks the last token: an id that one part has not is the client's fault."""
    with tempfile.TemporaryDirectory() as folder:
        config, tokenizer = (json.load(open(os.path.join(AUSTEN, name))) for name in ("config.json", "tokenizer.json"))
        V = config["vocab_size"]
        config["vocab_size_per_layer_input"] = V - 8
        vocabulary = tokenizer["model"]["vocab"]
        last = next(piece for piece, id in vocabulary.items() if id == V - 1)
        del vocabulary[last]
        tokenizer["model"]["merges"] = [m for m in tokenizer["model"]["merges"] if last not in ("".join(m), *m)]
        data = open(os.path.join(AUSTEN, "model.safetensors"), "rb").read()
        size = struct.unpack("<Q", data[:8])[0]
        header = json.loads(data[8:8 + size])
        tensors, at = [], 0
        for name, t in header.items():
            if name == "__metadata__":
                continue
            begin, end = t["data_offsets"]
            part = data[8 + size + begin:8 + size + end]
            if name.endswith("embed_tokens_per_layer.weight"):
                part = part[:len(part) // V * (V - 8)]
                t["shape"][0] = V - 8
            t["data_offsets"] = [at, at + len(part)]
            at += len(part)
            tensors.append(part)
        head = json.dumps(header).encode()
        head += b" " * (-len(head) % 8)
        with open(os.path.join(folder, "model.safetensors"), "wb") as f:
            f.write(struct.pack("<Q", len(head)) + head + b"".join(tensors))
        for name, value in [("config.json", config), ("tokenizer.json", tokenizer)]:
            json.dump(value, open(os.path.join(folder, name), "w"))
        s = Server("--ctx", "64", "--name", "less", model=folder)
        status, answer = s.post("/detokenize", {"tokens": [5, V - 1]})
        check(status == 400 and error_of(answer)["param"] == "tokens" and "item 2" in error_of(answer)["message"], "detokenize: %d %s" % (status, answer))
        for n, prompts in [(1, [[2, 5], [2, V - 8], [2, 6]]), (3, [[2, V - 8]]), (1, [[2, V - 8], [2, 5]])]:
            status, answer = s.post("/v1/completions", {"prompt": prompts, "n": n, "max_tokens": 60, "ignore_eos": True})
            check(status == 400 and "outside the vocabulary" in error_of(answer)["message"], "one of several prompts is refused: %d %s" % (status, answer))
            data = s.request("POST", "/v1/completions", {"prompt": prompts, "n": n, "max_tokens": 60, "ignore_eos": True, "stream": True})[2]
            check(data.count(b"\"error\"") == 1 and data.endswith(b"}}\n\n"), "one of several prompts is refused, streamed: %r" % data[-200:])
        check(s.idle() and s.post("/v1/completions", {"prompt": [2, 5], "max_tokens": 2})[0] == 200, "the server goes on")
        check(s.stop() == 0, "status")


def test_key():
    s = Server("--api-key", "secret")
    body = {"prompt": "a", "max_tokens": 1}
    for key, expected in [(None, 401), ("Bearer wrong", 401), ("secret", 401), ("Bearer secret2", 401), ("Bearer secre", 401), ("Bearer ", 401), ("Bearer secret", 200), ("bearer secret", 200)]:
        status = s.request("POST", "/v1/completions", body, {"Authorization": key} if key else None)[0]
        check(status == expected, "key %r: %d" % (key, status))
    check(s.request("GET", "/v1/models")[0] == 401 and s.request("GET", "/health")[0] == 200, "what needs the key")
    check(s.stop() == 0, "status")
    s = Server(env={"GEMMA4_API_KEY": "secret"})
    check(s.request("POST", "/v1/completions", body)[0] == 401, "the key from the environment")
    s.stop()


def test_host():
    """A foreign page may have its name stand for 127.0.0.1, and would be given answers to read: other names than this machine's are refused. Not where a key is asked
    for, or where others are to connect anyway, by whatever name."""
    def asked(s, host, path="/v1/models"):
        c = http.client.HTTPConnection("127.0.0.1", s.port, timeout=PATIENCE)
        c.putrequest("GET", path, skip_host=True)
        if host is not None:
            c.putheader("Host", host)
        c.endheaders()
        r = c.getresponse()
        data = r.read()
        c.close()
        return r.status, data

    s = Server()
    for host, expected in [("localhost", 200), ("LocalHost:8080", 200), ("127.0.0.1", 200), ("127.0.0.1:%d" % s.port, 200), ("[::1]:80", 200), ("192.168.0.7:80", 200), ("me.localhost", 200),
                           ("evil.example", 403), ("evil.example:%d" % s.port, 403), ("localhost.evil.example", 403), ("127.0.0.1.evil.example", 403), ("notlocalhost", 403), (".localhost", 403),
                           ("a" * 300, 403), (":80", 403)]:
        for path in ["/v1/models", "/", "/metrics", "/health", "/none"]:
            status, data = asked(s, host, path)
            check(status == (404 if path == "/none" and expected == 200 else expected), "Host: %s, %s: %d" % (host, path, status))
            check(status != 403 or (error_of(json.loads(data))["code"] == "host_not_allowed" and "--api-key" in error_of(json.loads(data))["message"]), "Host: %s: %s" % (host, data))
    status, headers, data = s.request("POST", "/v1/completions", {"prompt": "a", "max_tokens": 1}, {"Host": "evil.example"})
    check(status == 403, "a post for another host: %d" % status)
    c = socket.create_connection(("127.0.0.1", s.port), timeout=PATIENCE)
    c.sendall(b"GET /health HTTP/1.0\r\n\r\n")
    check(c.recv(65536)[9:12] == b"200", "HTTP/1.0 without Host")
    c.close()
    check(s.stop() == 0, "status")
    for how, status in [(["--api-key", "secret"], 401), (["--host", "0.0.0.0"], 200)]:
        s = Server(*how)
        check(asked(s, "proxy.example")[0] == status, "any name with %s" % how)
        s.stop()


def test_beginning():
    s = Server(threads=(), env={"OMP_NUM_THREADS": "4"})  # OpenMP is asked for its threads then, which are older than the server's
    check(s.stop() == 0, "status after SIGTERM, threads not given")
    s = Server()
    second = subprocess.run([options.program, "serve", "--port", str(s.port)], capture_output=True, text=True)
    check(second.returncode == 2 and "cannot listen" in second.stderr, "a port that is taken: %s" % second.stderr)
    s.stop()
    for arguments in [["--host", "not an address"], ["--port", "65536"], ["--parallel", "0"], ["--queue", "x"], ["--api-key", ""]]:
        r = subprocess.run([options.program, "serve", *arguments], capture_output=True, text=True, timeout=PATIENCE)
        check(r.returncode == 2 and r.stderr.count("gemma4: ") == 1, "%s: %d %s" % (arguments, r.returncode, r.stderr))


def test_page():
    """The page in a browser: a chat, a token's candidates, text that is no HTML, a text continued, an error shown."""
    global skipped
    try:
        from selenium import webdriver
        from selenium.webdriver.common.by import By
        from selenium.webdriver.support.ui import Select
        browser, driver = shutil.which("chromium"), shutil.which("chromedriver")
        if not browser or not driver:
            raise ImportError
    except ImportError:
        skipped += 1
        print("skipped: the page in a browser: chromium, chromedriver and the selenium package are not all installed")
        return
    s = Server()
    how = webdriver.ChromeOptions()
    how.binary_location = browser
    for argument in ["--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=1000,800", "--disable-dev-shm-usage"]:
        how.add_argument(argument)
    how.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    d = webdriver.Chrome(options=how, service=webdriver.ChromeService(driver))

    def by(name):
        return d.find_element(By.ID, name)

    def say(text):
        by("status").get_attribute("textContent")
        d.execute_script("document.getElementById('status').textContent = ''")
        by("input").send_keys(text + "\n")
        eventually(lambda: by("status").text)
        return by("status").text

    try:
        d.get("http://127.0.0.1:%d/" % s.port)
        by("tokens").clear()
        by("tokens").send_keys("40")
        by("seed").send_keys("3")
        status = say("My dear <b>Mr. Bennet</b>, said his lady")
        tokens = d.find_elements(By.CSS_SELECTOR, ".answer .token")
        expected = s.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "My dear <b>Mr. Bennet</b>, said his lady"}], "max_tokens": 40, "seed": 3})[1]
        text = expected["choices"][0]["message"]["content"]
        check("".join(t.get_attribute("textContent") for t in tokens) == text and "%d written" % expected["usage"]["completion_tokens"] in status, "page: the answer %s" % status)
        check(by("log").text.startswith("My dear <b>Mr. Bennet</b>") and not d.find_elements(By.CSS_SELECTOR, "#log b"), "page: text is not HTML")
        check(by("model").text == "austen", "page: the model's name")
        tokens[5].click()
        rows = d.find_elements(By.CSS_SELECTOR, "#candidates tr")
        check(len(rows) >= 8 and "chosen" in rows[0].text and "%" in rows[7].text, "page: candidates")
        by("reset").click()
        Select(by("mode")).select_by_value("text")
        say("It is a truth")
        check(by("log").text.startswith("It is a truth") and len(d.find_elements(By.CSS_SELECTOR, ".token")) == 40, "page: a text continued")
        by("temperature").send_keys("-1")
        d.execute_script("document.getElementById('temperature').min = ''")
        say("x")
        check(d.find_elements(By.CSS_SELECTOR, ".error") and "temperature" in d.find_elements(By.CSS_SELECTOR, ".error")[-1].text, "page: an error is shown")
        severe = [e for e in d.get_log("browser") if e["level"] == "SEVERE" and "400" not in e["message"]]
        check(not severe, "page: %s" % severe)

        # "new" while an answer comes, and a question that was refused: neither is part of the conversation after it
        def read(text):
            return "; %d tokens read" % s.post("/v1/chat/completions", {"messages": [{"role": "user", "content": text}], "max_tokens": 1})[1]["usage"]["prompt_tokens"]

        s.stop()
        s = Server(*SLOW)
        d.get("http://127.0.0.1:%d/" % s.port)
        by("tokens").clear()
        by("tokens").send_keys("10000")
        by("input").send_keys("My dear\n")
        check(eventually(lambda: d.find_elements(By.CSS_SELECTOR, ".answer .token")), "page: a long answer begins")
        by("reset").click()
        check(eventually(lambda: by("send").text == "send"), "page: new stops the answer")
        by("tokens").clear()
        by("tokens").send_keys("5")
        status = say("Emma")
        check(read("Emma") in status, "page: new forgets the answer that it stopped: %s, not %s" % (status, read("Emma")))
        by("reset").click()
        by("temperature").send_keys("-1")
        d.execute_script("document.getElementById('temperature').min = ''")
        say("Refused")
        by("temperature").clear()
        status = say("Emma")
        check(read("Emma") in status, "page: a question that was refused is not asked again: %s, not %s" % (status, read("Emma")))
    finally:
        d.quit()
        s.stop()


def main():
    if "was built without it" in subprocess.run([options.program, "serve", "--host", "256.0.0.1"], capture_output=True, text=True).stderr:
        print("skipped: the program was built without the server")
        print("server: 0 passed, 0 failed, 1 skipped")
        return 0
    one_server = [test_plain, test_parameters, test_limits, test_answers, test_openai, test_concurrent, test_leaving, test_hostile, test_endurance]
    own_server = [test_queue, test_long_answer_left, test_silence, test_small, test_less_than_the_vocabulary, test_key, test_host, test_beginning, test_page]
    if options.only:
        one_server, own_server = ([test for test in tests if test.__name__[5:] in options.only.split(",")] for tests in (one_server, own_server))
    s = Server("--ctx", str(CTX), "--parallel", "8", "--queue", "64", "--max-body", "100000")
    for test in one_server:
        try:
            test(s)
        except Exception as e:
            check(False, "%s: %s: %s" % (test.__name__, type(e).__name__, e))
        if s.process.poll() is not None:
            check(False, "the server ended with status %s after %s: %s" % (s.process.returncode, test.__name__, "".join(s.lines[-3:])))
            break
    else:
        check(s.stop() == 0, "status after SIGTERM")
    for test in own_server:
        try:
            test()
        except Exception as e:
            check(False, "%s: %s: %s" % (test.__name__, type(e).__name__, e))
    print("server: %d passed, %d failed, %d skipped" % (passed, failed, skipped))
    return 1 if failed or not passed else 0


sys.exit(main())
