#!/usr/bin/env python3
"""Makes texts that tokenizers get wrong, with what the package `tokenizers` makes of them: JSON lines for `test_tokenizer compare`.

    python reference/tokenizer_strings.py models/austen/tokenizer.json OUT.jsonl [--count 20000] [--seed 0]

test/tokens_austen.jsonl was made with --seed 1 --max-bytes 60000 --max-line 700. A line is one of
    {"text": ..., "ids": ..., "decoded": ..., "decoded_skip": ...}     decoded with special tokens, and without them
    {"hex": ..., ...}       as above, for bytes that are not UTF-8; each byte that is no part of a character counts as one U+FFFD
    {"ids": ..., "decoded": ..., "decoded_skip": ...}                  ids that no text gives
and has "plain_ids" too, special tokens encoded as ordinary text, where that may differ. No BOS is added anywhere.

Reading order: KINDS, then main.
"""
import argparse
import json
import random

import tokenizers

WORDS = "the of and Linus Schröder Hannes naïve ΑΒΓ привет мир 서울 깰 日本語 中文 ไทย हिन्दी עברית العربية Café déjà vu".split()
EMOJI = ["👩\u200d👩\u200d👧\u200d👦", "😊", "🦙", "🏳\ufe0f\u200d🌈", "☺", "☺\ufe0f", "🇫🇷", "👍🏽", "1\ufe0f\u20e3"]
CODE = ["def f(x):\n    return x\n", "if (a[i] != 0) { b->c++; }\n", "\t\tfor (;;)\n", "#include <stdio.h>\n", "{\"a\": [1, 2.5e-3]}", "<br/></s><div>",
        "x = \"<0x41>\"; ", "a\\nb", "// ------\n", "SELECT * FROM t;", "<0x0A>", "</s>", "<unused1>", "0x7FFFFFFF", "    " * 5]
ALMOST = ["<", "<|", "<|tu", "<|turn", "|>", "<turn|", "<bos", "<eos>>", "<<bos>", "<|tool_", "<|\"", "<|image", "<|image|", "<|turn|>", "<pad>>"]


def code_point(rng):
    low, high = rng.choice([(0, 0x7f), (0x80, 0x24f), (0x300, 0x36f), (0x370, 0x6ff), (0x900, 0xdff), (0x1100, 0x11ff), (0x2000, 0x206f),
                            (0x2500, 0x25ff), (0x3040, 0x30ff), (0x4e00, 0x9fff), (0xac00, 0xd7a3), (0xe000, 0xf8ff), (0xfe00, 0xffff),
                            (0x10000, 0x1ffff), (0x1f300, 0x1faff), (0x20000, 0x2ffff), (0xe0000, 0x10ffff)])
    return chr(rng.randint(low, high))


class Maker:
    def __init__(self, path, seed):
        self.tok = tokenizers.Tokenizer.from_file(path)
        self.rng = random.Random(seed)
        spec = json.load(open(path, encoding="utf-8"))
        self.added = [t["content"] for t in spec["added_tokens"]]
        self.pieces = [p.replace("\u2581", " ") for p in spec["model"]["vocab"]]
        self.byte_ids = [spec["model"]["vocab"][f"<0x{b:02X}>"] for b in range(256)]
        self.ids = sorted(self.tok.get_vocab().values())

    def many(self, make, most, between=""):
        return between.join(make() for _ in range(self.rng.randint(1, most)))

    def pick(self, *lists):
        return self.rng.choice(self.rng.choice(lists))

    # Each kind of text is one method; KINDS names them.
    def unicode(self):
        return self.many(lambda: code_point(self.rng), 60)

    def words(self):
        return self.many(lambda: self.rng.choice(WORDS), 12, self.rng.choice([" ", "  ", "", "\n", "\u2581", "\u00a0"]))

    def glued_pieces(self):  # tokens side by side that may not stay tokens
        return self.many(lambda: self.rng.choice(self.pieces), 12)

    def prefixes(self):  # of pieces: what is left when a merge just does not happen
        def cut():
            p = self.rng.choice(self.pieces)
            return p[:self.rng.randint(1, len(p))] if p else ""
        return self.many(cut, 12)

    def blanks(self):
        return self.many(lambda: self.rng.choice([" ", " ", "\n", "\t", "\r\n", "\u2581", "\u00a0", "\u3000", "\u200b", "a", "  ", "\n\n\n"]), 60)

    def run(self):  # of one character, around the lengths that pieces have
        return self.rng.choice(["", "a", " ", "\n"]) + self.rng.choice(["\n", " ", "\t", "=", "a", "!", "ha", "3", "깰", "\u0001", "-\n", " \n"]) \
            * self.rng.choice([self.rng.randint(1, 70), self.rng.randint(1, 400)]) + self.rng.choice(["", "a", " ", "\n"])

    def long_word(self):  # no place to cut
        letters = self.rng.choice(["ab", "abcdefghijklmnopqrstuvwxyz", "etaoin", "ACGT", "アイウエオ", "0123456789abcdef", "ha", "aà"])
        return self.many(lambda: self.rng.choice(letters), 500)

    def special(self):
        return self.many(lambda: self.pick(self.added, self.added, ALMOST, WORDS, [" ", "\n", "<", "|>", ""]), 12)

    def code(self):
        return self.many(lambda: self.pick(CODE, CODE, WORDS, [" ", "\n", "\t"]), 10)

    def emoji(self):
        return self.many(lambda: self.pick(EMOJI, EMOJI, WORDS, [" "]), 12)

    def unknown(self):  # byte fallback, between known characters
        return self.many(lambda: self.rng.choice([chr(self.rng.randint(0xe000, 0xf8ff)), chr(self.rng.randint(0x40000, 0x4ffff)), "\0", "\x01", "\x7f",
                                                  "\ufffd", "\ufeff", "\u0378", "a", " ", "the", "깰", "<bos>"]), 30)

    def mixed(self):
        return "".join(getattr(self, self.rng.choice(KINDS[:-1]))() for _ in range(3))

    def invalid(self):
        data = bytearray(self.mixed().encode())
        for _ in range(self.rng.randint(1, 6)):
            at = self.rng.randint(0, len(data))
            data[at:at + self.rng.choice([0, 0, 1, 2])] = self.rng.choice([
                bytes([self.rng.randint(0x80, 0xff)]), b"\xff\xfe", b"\xc3\x28", b"\xe2\x96", b"\xc0\x80", b"\xed\xa0\x80", b"\xed\xbf\xbf", b"\xf4\x90\x80\x80",
                b"\xf0\x9f\x98", b"\xe0\x80\x80", b"\xf8\x88\x80\x80\x80", b"\x80", b"\xf0\x80\x80\x80", b"\xe2\x96\x81", b""])
        return bytes(data)

    def random_ids(self):
        def part():
            kind = self.rng.randrange(4)
            if kind == 0:
                return [self.byte_ids[b] for b in code_point(self.rng).encode()]
            if kind == 1:
                return [self.byte_ids[self.rng.randint(0x80, 0xff)] for _ in range(self.rng.randint(1, 3))]
            if kind == 2:
                return [self.tok.token_to_id(self.rng.choice(self.added))]
            return [self.rng.choice(self.ids)]
        return [i for _ in range(self.rng.randint(1, 12)) for i in part()]

    def both_decodings(self, line):
        line["decoded"] = self.tok.decode(line["ids"], skip_special_tokens=False)
        line["decoded_skip"] = self.tok.decode(line["ids"], skip_special_tokens=True)
        return line

    def line(self, number):
        if number % 10 == 9:
            return self.both_decodings({"ids": self.random_ids()})
        if number % 10 == 8:
            data = self.invalid()
            text, line = one_each(data), {"hex": data.hex()}
        else:
            text = getattr(self, KINDS[number % len(KINDS)])()
            line = {"text": text}
        self.tok.encode_special_tokens = False
        line["ids"] = self.tok.encode(text, add_special_tokens=False).ids
        self.tok.encode_special_tokens = True
        plain = self.tok.encode(text, add_special_tokens=False).ids
        if plain != line["ids"] or "<" in text:
            line["plain_ids"] = plain
        return self.both_decodings(line)


KINDS = ["unicode", "words", "glued_pieces", "prefixes", "blanks", "run", "long_word", "special", "code", "emoji", "unknown", "mixed"]


def one_each(data):
    """The text of bytes; each that is no part of a UTF-8 character becomes one U+FFFD (Python's "replace" takes several at once)."""
    out, at = [], 0
    while at < len(data):
        for size in range(1, 5):
            try:
                out.append(data[at:at + size].decode("utf-8"))
                break
            except UnicodeDecodeError:
                pass
        else:
            out.append("\ufffd")
            size = 1
        at += size
    return "".join(out)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("tokenizer")
    parser.add_argument("out")
    parser.add_argument("--count", type=int, default=20000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-bytes", type=int, default=1 << 40, help="stop before the file is larger than this")
    parser.add_argument("--max-line", type=int, default=1 << 40, help="leave out lines of more bytes than this")
    args = parser.parse_args()
    maker, written = Maker(args.tokenizer, args.seed), 0
    with open(args.out, "w", encoding="ascii", newline="\n") as f:
        for number in range(args.count):
            line = json.dumps(maker.line(number), separators=(",", ":")) + "\n"
            if len(line) > args.max_line:
                continue
            if written + len(line) > args.max_bytes:
                break
            written += len(line)
            f.write(line)


if __name__ == "__main__":
    main()
