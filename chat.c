/* chat.c - a chat request to the text of the prompt, and that text to ids. (What the model answers is answer.c.)
 *
 * Google publishes two chat templates for Gemma 4 (2026-07-09), in Jinja: one for the small models, one for the large. This is the same rendering
 * written in C, byte for byte what transformers' apply_chat_template gives. It is not a Jinja interpreter: a checkpoint that brings another template
 * is told from these two by the hash of its text (part 5), and its user is warned.
 *
 * Both templates print whatever types they are given, by the rules of Jinja and Python: a member that is not there prints as nothing, a list as Python
 * spells it. Those rules are part 2. What the template refuses is refused here, and a little that it would render is refused too: see `refuse`.
 *
 * Reading order: render at the end of part 3 follows the template from top to bottom; put_parameter above it is the template's largest macro. Then:
 *     1. text      2. values, as Jinja and Python see them      3. the template      4. the prompt's ids
 *     5. which template a checkpoint has
 */
#include "gemma4.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- 1. Text ---------------------------------------------------------------------------------------------------------- */

/* Something from a request, a file or a model, for a message: one line, cut when it is long. */
typedef struct shown {
    char text[96];
} shown;

static shown show(const char *s, size_t n) {
    shown out;
    size_t most = sizeof out.text - 4, m = n < most ? n : most;
    for (size_t i = 0; i < m; i++) out.text[i] = (unsigned char)s[i] < 0x20 || s[i] == 0x7f ? '?' : s[i];
    if (n > most) {
        while (m > 0 && ((unsigned char)s[m] & 0xc0) == 0x80) m--; /* not inside a character */
        memcpy(out.text + m, "...", 3);
        m += 3;
    }
    out.text[m] = 0;
    return out;
}

/* A growing text. Once memory was refused it grows no more, and whoever takes it looks at no_memory. */
typedef struct text {
    char *s; /* [n], then NUL as soon as anything was appended, be it 0 bytes */
    size_t n, room;
    int no_memory;
} text;

static void append(text *t, const char *s, size_t n) {
    if (t->no_memory) return;
    if (t->room - t->n <= n) {
        size_t room = n < SIZE_MAX / 4 && t->n < SIZE_MAX / 4 ? 2 * (t->n + n) + 64 : 0;
        char *more = room ? realloc(t->s, room) : NULL;
        if (!more) {
            t->no_memory = 1;
            return;
        }
        t->s = more;
        t->room = room;
    }
    if (n) memcpy(t->s + t->n, s, n);
    t->n += n;
    t->s[t->n] = 0;
}

/* Where what [m] begins in s [n], n: nowhere. */
static size_t find(const char *s, size_t n, const char *what, size_t m) {
    for (size_t at = 0; m <= n && at <= n - m; at++) {
        const char *hit = memchr(s + at, what[0], n - m - at + 1);
        if (!hit) break;
        at = (size_t)(hit - s);
        if (!memcmp(hit, what, m)) return at;
    }
    return n;
}

/* The character at s < end and its bytes. The text is UTF-8, as g4_json_parse gives it. */
static uint32_t character(const char *s, const char *end, size_t *bytes) {
    const unsigned char *p = (const unsigned char *)s;
    size_t n = p[0] < 0x80 ? 1 : p[0] < 0xe0 ? 2 : p[0] < 0xf0 ? 3 : 4;
    if (n > (size_t)(end - s)) n = (size_t)(end - s);
    uint32_t c = n == 1 ? p[0] : p[0] & (0x7fu >> n);
    for (size_t i = 1; i < n; i++) c = c << 6 | (p[i] & 0x3f);
    *bytes = n;
    return c;
}

/* What Python's str.strip() takes away. */
static int is_space(uint32_t c) {
    return (c >= 0x09 && c <= 0x0d) || (c >= 0x1c && c <= 0x20) || c == 0x85 || c == 0xa0 || c == 0x1680 || (c >= 0x2000 && c <= 0x200a) ||
           c == 0x2028 || c == 0x2029 || c == 0x202f || c == 0x205f || c == 0x3000;
}

static void strip(const char **s, size_t *n) {
    const char *begin = *s, *end = begin + *n;
    size_t bytes;
    while (begin < end && is_space(character(begin, end, &bytes))) begin += bytes;
    while (begin < end) {
        const char *last = end - 1;
        while (last > begin && ((unsigned char)*last & 0xc0) == 0x80) last--;
        if (!is_space(character(last, end, &bytes))) break;
        end = last;
    }
    *s = begin;
    *n = (size_t)(end - begin);
}

/* The character c in UTF-8; its bytes. */
static size_t spell_character(uint32_t c, char out[4]) {
    size_t n = c < 0x80 ? 1 : c < 0x800 ? 2 : c < 0x10000 ? 3 : 4;
    for (size_t i = n - 1; i > 0; i--, c >>= 6) out[i] = (char)(0x80 | (c & 0x3f));
    out[0] = (char)(n == 1 ? c : (0xf00u >> n & 0xf0u) | c);
    return n;
}

/* What Python's strings know of Unicode (14), as `reference/chats.py --tables` prints it. First, characters beyond ASCII that str.lower() changes: from
 * first to last, each step-th, by delta. U+0130 becomes two characters, and is not in it. */
static const struct {
    uint32_t first, last;
    int step, delta;
} lower_case[] = {
    {0xc0, 0xd6, 1, 32}, {0xd8, 0xde, 1, 32}, {0x100, 0x12e, 2, 1}, {0x132, 0x136, 2, 1}, {0x139, 0x147, 2, 1}, {0x14a, 0x176, 2, 1},
    {0x178, 0x178, 1, -121}, {0x179, 0x17d, 2, 1}, {0x181, 0x181, 1, 210}, {0x182, 0x184, 2, 1}, {0x186, 0x186, 1, 206}, {0x187, 0x187, 1, 1},
    {0x189, 0x18a, 1, 205}, {0x18b, 0x18b, 1, 1}, {0x18e, 0x18e, 1, 79}, {0x18f, 0x18f, 1, 202}, {0x190, 0x190, 1, 203}, {0x191, 0x191, 1, 1},
    {0x193, 0x193, 1, 205}, {0x194, 0x194, 1, 207}, {0x196, 0x196, 1, 211}, {0x197, 0x197, 1, 209}, {0x198, 0x198, 1, 1}, {0x19c, 0x19c, 1, 211},
    {0x19d, 0x19d, 1, 213}, {0x19f, 0x19f, 1, 214}, {0x1a0, 0x1a4, 2, 1}, {0x1a6, 0x1a6, 1, 218}, {0x1a7, 0x1a7, 1, 1}, {0x1a9, 0x1a9, 1, 218},
    {0x1ac, 0x1ac, 1, 1}, {0x1ae, 0x1ae, 1, 218}, {0x1af, 0x1af, 1, 1}, {0x1b1, 0x1b2, 1, 217}, {0x1b3, 0x1b5, 2, 1}, {0x1b7, 0x1b7, 1, 219},
    {0x1b8, 0x1b8, 1, 1}, {0x1bc, 0x1bc, 1, 1}, {0x1c4, 0x1c4, 1, 2}, {0x1c5, 0x1c5, 1, 1}, {0x1c7, 0x1c7, 1, 2}, {0x1c8, 0x1c8, 1, 1},
    {0x1ca, 0x1ca, 1, 2}, {0x1cb, 0x1db, 2, 1}, {0x1de, 0x1ee, 2, 1}, {0x1f1, 0x1f1, 1, 2}, {0x1f2, 0x1f4, 2, 1}, {0x1f6, 0x1f6, 1, -97},
    {0x1f7, 0x1f7, 1, -56}, {0x1f8, 0x21e, 2, 1}, {0x220, 0x220, 1, -130}, {0x222, 0x232, 2, 1}, {0x23a, 0x23a, 1, 10795}, {0x23b, 0x23b, 1, 1},
    {0x23d, 0x23d, 1, -163}, {0x23e, 0x23e, 1, 10792}, {0x241, 0x241, 1, 1}, {0x243, 0x243, 1, -195}, {0x244, 0x244, 1, 69}, {0x245, 0x245, 1, 71},
    {0x246, 0x24e, 2, 1}, {0x370, 0x372, 2, 1}, {0x376, 0x376, 1, 1}, {0x37f, 0x37f, 1, 116}, {0x386, 0x386, 1, 38}, {0x388, 0x38a, 1, 37},
    {0x38c, 0x38c, 1, 64}, {0x38e, 0x38f, 1, 63}, {0x391, 0x3a1, 1, 32}, {0x3a3, 0x3ab, 1, 32}, {0x3cf, 0x3cf, 1, 8}, {0x3d8, 0x3ee, 2, 1},
    {0x3f4, 0x3f4, 1, -60}, {0x3f7, 0x3f7, 1, 1}, {0x3f9, 0x3f9, 1, -7}, {0x3fa, 0x3fa, 1, 1}, {0x3fd, 0x3ff, 1, -130}, {0x400, 0x40f, 1, 80},
    {0x410, 0x42f, 1, 32}, {0x460, 0x480, 2, 1}, {0x48a, 0x4be, 2, 1}, {0x4c0, 0x4c0, 1, 15}, {0x4c1, 0x4cd, 2, 1}, {0x4d0, 0x52e, 2, 1},
    {0x531, 0x556, 1, 48}, {0x10a0, 0x10c5, 1, 7264}, {0x10c7, 0x10c7, 1, 7264}, {0x10cd, 0x10cd, 1, 7264}, {0x13a0, 0x13ef, 1, 38864},
    {0x13f0, 0x13f5, 1, 8}, {0x1c90, 0x1cba, 1, -3008}, {0x1cbd, 0x1cbf, 1, -3008}, {0x1e00, 0x1e94, 2, 1}, {0x1e9e, 0x1e9e, 1, -7615},
    {0x1ea0, 0x1efe, 2, 1}, {0x1f08, 0x1f0f, 1, -8}, {0x1f18, 0x1f1d, 1, -8}, {0x1f28, 0x1f2f, 1, -8}, {0x1f38, 0x1f3f, 1, -8},
    {0x1f48, 0x1f4d, 1, -8}, {0x1f59, 0x1f5f, 2, -8}, {0x1f68, 0x1f6f, 1, -8}, {0x1f88, 0x1f8f, 1, -8}, {0x1f98, 0x1f9f, 1, -8},
    {0x1fa8, 0x1faf, 1, -8}, {0x1fb8, 0x1fb9, 1, -8}, {0x1fba, 0x1fbb, 1, -74}, {0x1fbc, 0x1fbc, 1, -9}, {0x1fc8, 0x1fcb, 1, -86},
    {0x1fcc, 0x1fcc, 1, -9}, {0x1fd8, 0x1fd9, 1, -8}, {0x1fda, 0x1fdb, 1, -100}, {0x1fe8, 0x1fe9, 1, -8}, {0x1fea, 0x1feb, 1, -112},
    {0x1fec, 0x1fec, 1, -7}, {0x1ff8, 0x1ff9, 1, -128}, {0x1ffa, 0x1ffb, 1, -126}, {0x1ffc, 0x1ffc, 1, -9}, {0x2126, 0x2126, 1, -7517},
    {0x212a, 0x212a, 1, -8383}, {0x212b, 0x212b, 1, -8262}, {0x2132, 0x2132, 1, 28}, {0x2160, 0x216f, 1, 16}, {0x2183, 0x2183, 1, 1},
    {0x24b6, 0x24cf, 1, 26}, {0x2c00, 0x2c2f, 1, 48}, {0x2c60, 0x2c60, 1, 1}, {0x2c62, 0x2c62, 1, -10743}, {0x2c63, 0x2c63, 1, -3814},
    {0x2c64, 0x2c64, 1, -10727}, {0x2c67, 0x2c6b, 2, 1}, {0x2c6d, 0x2c6d, 1, -10780}, {0x2c6e, 0x2c6e, 1, -10749}, {0x2c6f, 0x2c6f, 1, -10783},
    {0x2c70, 0x2c70, 1, -10782}, {0x2c72, 0x2c72, 1, 1}, {0x2c75, 0x2c75, 1, 1}, {0x2c7e, 0x2c7f, 1, -10815}, {0x2c80, 0x2ce2, 2, 1},
    {0x2ceb, 0x2ced, 2, 1}, {0x2cf2, 0x2cf2, 1, 1}, {0xa640, 0xa66c, 2, 1}, {0xa680, 0xa69a, 2, 1}, {0xa722, 0xa72e, 2, 1}, {0xa732, 0xa76e, 2, 1},
    {0xa779, 0xa77b, 2, 1}, {0xa77d, 0xa77d, 1, -35332}, {0xa77e, 0xa786, 2, 1}, {0xa78b, 0xa78b, 1, 1}, {0xa78d, 0xa78d, 1, -42280},
    {0xa790, 0xa792, 2, 1}, {0xa796, 0xa7a8, 2, 1}, {0xa7aa, 0xa7aa, 1, -42308}, {0xa7ab, 0xa7ab, 1, -42319}, {0xa7ac, 0xa7ac, 1, -42315},
    {0xa7ad, 0xa7ad, 1, -42305}, {0xa7ae, 0xa7ae, 1, -42308}, {0xa7b0, 0xa7b0, 1, -42258}, {0xa7b1, 0xa7b1, 1, -42282}, {0xa7b2, 0xa7b2, 1, -42261},
    {0xa7b3, 0xa7b3, 1, 928}, {0xa7b4, 0xa7c2, 2, 1}, {0xa7c4, 0xa7c4, 1, -48}, {0xa7c5, 0xa7c5, 1, -42307}, {0xa7c6, 0xa7c6, 1, -35384},
    {0xa7c7, 0xa7c9, 2, 1}, {0xa7d0, 0xa7d0, 1, 1}, {0xa7d6, 0xa7d8, 2, 1}, {0xa7f5, 0xa7f5, 1, 1}, {0xff21, 0xff3a, 1, 32},
    {0x10400, 0x10427, 1, 40}, {0x104b0, 0x104d3, 1, 40}, {0x10570, 0x1057a, 1, 39}, {0x1057c, 0x1058a, 1, 39}, {0x1058c, 0x10592, 1, 39},
    {0x10594, 0x10595, 1, 39}, {0x10c80, 0x10cb2, 1, 64}, {0x118a0, 0x118bf, 1, 32}, {0x16e40, 0x16e5f, 1, 32}, {0x1e900, 0x1e921, 1, 34},
};

/* What str.upper() makes of the character in front, where that is not the first character with this small letter. */
static const char *const upper_case[] = {
    "µΜ", "ßSS", "ıI", "ŉʼN", "ſS", "ǅǄ", "ǈǇ", "ǋǊ", "ǰJ̌", "ǲǱ", "ͅΙ", "ΐΪ́", "ΰΫ́", "ςΣ", "ϐΒ", "ϑΘ", "ϕΦ", "ϖΠ", "ϰΚ", "ϱΡ", "ϵΕ", "ևԵՒ",
    "ᲀВ", "ᲁД", "ᲂО", "ᲃС", "ᲄТ", "ᲅТ", "ᲆЪ", "ᲇѢ", "ᲈꙊ", "ẖH̱", "ẗT̈", "ẘW̊", "ẙY̊", "ẚAʾ", "ẛṠ", "ὐΥ̓", "ὒΥ̓̀", "ὔΥ̓́", "ὖΥ̓͂", "ᾀἈΙ", "ᾁἉΙ",
    "ᾂἊΙ", "ᾃἋΙ", "ᾄἌΙ", "ᾅἍΙ", "ᾆἎΙ", "ᾇἏΙ", "ᾈἈΙ", "ᾉἉΙ", "ᾊἊΙ", "ᾋἋΙ", "ᾌἌΙ", "ᾍἍΙ", "ᾎἎΙ", "ᾏἏΙ", "ᾐἨΙ", "ᾑἩΙ", "ᾒἪΙ", "ᾓἫΙ", "ᾔἬΙ", "ᾕἭΙ",
    "ᾖἮΙ", "ᾗἯΙ", "ᾘἨΙ", "ᾙἩΙ", "ᾚἪΙ", "ᾛἫΙ", "ᾜἬΙ", "ᾝἭΙ", "ᾞἮΙ", "ᾟἯΙ", "ᾠὨΙ", "ᾡὩΙ", "ᾢὪΙ", "ᾣὫΙ", "ᾤὬΙ", "ᾥὭΙ", "ᾦὮΙ", "ᾧὯΙ", "ᾨὨΙ", "ᾩὩΙ",
    "ᾪὪΙ", "ᾫὫΙ", "ᾬὬΙ", "ᾭὭΙ", "ᾮὮΙ", "ᾯὯΙ", "ᾲᾺΙ", "ᾳΑΙ", "ᾴΆΙ", "ᾶΑ͂", "ᾷΑ͂Ι", "ᾼΑΙ", "ιΙ", "ῂῊΙ", "ῃΗΙ", "ῄΉΙ", "ῆΗ͂", "ῇΗ͂Ι", "ῌΗΙ", "ῒΪ̀",
    "ΐΪ́", "ῖΙ͂", "ῗΪ͂", "ῢΫ̀", "ΰΫ́", "ῤΡ̓", "ῦΥ͂", "ῧΫ͂", "ῲῺΙ", "ῳΩΙ", "ῴΏΙ", "ῶΩ͂", "ῷΩ͂Ι", "ῼΩΙ", "ﬀFF", "ﬁFI", "ﬂFL", "ﬃFFI", "ﬄFFL",
    "ﬅST", "ﬆST", "ﬓՄՆ", "ﬔՄԵ", "ﬕՄԻ", "ﬖՎՆ", "ﬗՄԽ",
};

/* From first to last: characters that repr() escapes. Those that Unicode has not assigned, which it escapes too, are not listed, and are printed. */
static const struct {
    uint32_t first, last;
} unprintable[] = {
    {0x80, 0xa0}, {0xad, 0xad}, {0x600, 0x605}, {0x61c, 0x61c}, {0x6dd, 0x6dd}, {0x70f, 0x70f}, {0x890, 0x891}, {0x8e2, 0x8e2}, {0x1680, 0x1680},
    {0x180e, 0x180e}, {0x2000, 0x200f}, {0x2028, 0x202f}, {0x205f, 0x2064}, {0x2066, 0x206f}, {0x3000, 0x3000}, {0xe000, 0xf8ff}, {0xfeff, 0xfeff},
    {0xfff9, 0xfffb}, {0x110bd, 0x110bd}, {0x110cd, 0x110cd}, {0x13430, 0x13438}, {0x1bca0, 0x1bca3}, {0x1d173, 0x1d17a}, {0xe0001, 0xe0001},
    {0xe0020, 0xe007f}, {0xf0000, 0xffffd}, {0x100000, 0x10fffd},
};

enum {
    N_LOWER_CASE = sizeof lower_case / sizeof lower_case[0],
    N_UPPER_CASE = sizeof upper_case / sizeof upper_case[0],
    N_UNPRINTABLE = sizeof unprintable / sizeof unprintable[0],
    CAPITAL_I_WITH_DOT = 0x130,
    DOT_ABOVE = 0x307,
    CAPITAL_SIGMA = 0x3a3,
    FINAL_SIGMA = 0x3c2
};

static uint32_t lower(uint32_t c) {
    if (c < 0x80) return c >= 'A' && c <= 'Z' ? c + 32 : c;
    int low = 0, high = N_LOWER_CASE; /* the first row that begins after c */
    while (low < high) {
        int middle = (low + high) / 2;
        if (lower_case[middle].first <= c) low = middle + 1;
        else high = middle;
    }
    if (!low) return c;
    const uint32_t first = lower_case[low - 1].first;
    if (c > lower_case[low - 1].last || (c - first) % (uint32_t)lower_case[low - 1].step) return c;
    return (uint32_t)((int32_t)c + lower_case[low - 1].delta);
}

/* The first character beyond ASCII that c is the small letter of, or c. */
static uint32_t capital(uint32_t c) {
    for (int i = 0; i < N_LOWER_CASE; i++) {
        uint32_t up = (uint32_t)((int32_t)c - lower_case[i].delta);
        if (up >= lower_case[i].first && up <= lower_case[i].last && lower(up) == c) return up;
    }
    return c;
}

static int is_letter_with_case(uint32_t c) { return (c >= 'a' && c <= 'z') || lower(c) != c || capital(c) != c; }

static int is_printable(uint32_t c) {
    for (int i = 0; i < N_UNPRINTABLE && c >= unprintable[i].first; i++)
        if (c <= unprintable[i].last) return 0;
    return c >= 0x20 && c != 0x7f;
}

/* A key on its way through str.lower(). */
typedef struct lowering {
    const char *begin, *p, *end;
    uint32_t second; /* of a character that became two; 0: none */
} lowering;

/* The next character, -1 at the end. A capital sigma at the end of a word becomes another small letter than elsewhere; where a word ends is
 * simplified: punctuation in front of or after the sigma is not looked through. */
static int64_t next_lower(lowering *l) {
    size_t bytes, more;
    if (l->second) {
        uint32_t c = l->second;
        l->second = 0;
        return c;
    }
    if (l->p == l->end) return -1;
    uint32_t c = character(l->p, l->end, &bytes);
    const char *here = l->p, *before = here - 1;
    l->p += bytes;
    if (c == CAPITAL_I_WITH_DOT) {
        l->second = DOT_ABOVE;
        return 'i';
    }
    if (c == CAPITAL_SIGMA && here > l->begin) {
        while (before > l->begin && ((unsigned char)*before & 0xc0) == 0x80) before--;
        int after_letter = is_letter_with_case(character(before, here, &more));
        if (after_letter && !(l->p < l->end && is_letter_with_case(character(l->p, l->end, &more)))) return FINAL_SIGMA;
    }
    return lower(c);
}

/* ---- 2. Values, as Jinja and Python see them -------------------------------------------------------------------------- */

enum {
    UNDEFINED = 100,            /* beside g4_json_kind: a member that is not there, which prints as nothing, is false, and is an empty sequence */
    MOST_MESSAGES = 100000,     /* Jinja's sandbox counts no further */
    MOST_DIGITS = 4300,         /* of an integer that Python reads */
    MOST_TEXT = 256 << 20       /* bytes of a prompt: some times what the largest context holds */
};

typedef struct value {
    int kind;
    uint32_t node;  /* UNDEFINED: the node that it was looked for in */
    const char *s;  /* STRING: [n]; UNDEFINED: the name of the member [n] */
    size_t n;
} value;

typedef struct renderer {
    const g4_json *j;
    uint32_t request;     /* the node that paths in messages begin at */
    const g4_chat_settings *settings;
    text out;
    g4_chat_prompt *prompt;
    size_t marker_room;
    int failed;           /* err is filled, and nothing is rendered any more */
    g4_error *err;
} renderer;

static const char *kind_name(int kind) {
    static const char *const names[] = {"null", "false", "true", "a number", "a string", "an array", "an object"};
    return kind == UNDEFINED ? "nothing" : names[kind];
}

/* Where a node is in the request: messages[2].content[0].text. Nodes are numbered in the order of the text, so the child that holds it is the last
 * one that does not begin after it. */
static void path_of(const renderer *r, uint32_t node, char *path, size_t room) {
    const g4_json_node *nodes = r->j->nodes;
    size_t n = 0;
    path[0] = 0;
    for (uint32_t at = r->request; at != node && nodes[at].kind >= G4_JSON_ARRAY && nodes[at].first && n + 40 < room;) {
        uint32_t index = 0, child = nodes[at].first;
        for (uint32_t next; (next = nodes[child].next) && next <= node; child = next) index++;
        if (nodes[at].kind == G4_JSON_ARRAY) n += (size_t)snprintf(path + n, room - n, "[%u]", (unsigned)index);
        else n += (size_t)snprintf(path + n, room - n, "%s%s", n ? "." : "", show(r->j->text + nodes[child].key, nodes[child].key_size).text);
        if (n >= room) n = room - 1;
        at = child;
    }
    if (!n) snprintf(path, room, "the request");
}

/* Fills err, once. Besides what the template refuses (or Python inside it), these are refused although they could be rendered: duplicate keys, lone
 * surrogates and nesting beyond 64 (by g4_json_parse), a number too large for a double, messages that are an empty object or string, and a tool call's id that
 * is an array or object. */
G4_PRINTF(3, 4) static void refuse(renderer *r, uint32_t node, const char *format, ...) {
    char path[512], what[400];
    va_list args;
    if (r->failed) return;
    r->failed = 1;
    va_start(args, format);
    vsnprintf(what, sizeof what, format, args);
    va_end(args);
    path_of(r, node, path, sizeof path);
    g4_fail(r->err, "%s: %s", path, what);
}

/* `v` is not what is needed. */
static void refuse_value(renderer *r, value v, const char *expected) {
    if (v.kind == UNDEFINED) refuse(r, v.node, "has no member \"%s\"; expected %s", show(v.s, v.n).text, expected);
    else refuse(r, v.node, "expected %s, found %s", expected, kind_name(v.kind));
}

static value value_of(const renderer *r, uint32_t node) {
    const g4_json_node *x = &r->j->nodes[node];
    value v = {.kind = x->kind, .node = node};
    if (v.kind == G4_JSON_STRING) v.s = r->j->text + x->first, v.n = x->size;
    return v;
}

static value key_of(const renderer *r, uint32_t node) {
    const g4_json_node *x = &r->j->nodes[node];
    return (value){.kind = G4_JSON_STRING, .node = node, .s = r->j->text + x->key, .n = x->key_size};
}

/* v["name"]: nothing has members but an object, and asking nothing for one is an error. */
static value get(renderer *r, value v, const char *name) {
    uint32_t node = v.kind == G4_JSON_OBJECT ? g4_json_get(r->j, v.node, name) : 0;
    if (v.kind == UNDEFINED) refuse_value(r, v, "an object");
    if (node) return value_of(r, node);
    return (value){.kind = UNDEFINED, .node = v.node, .s = name, .n = strlen(name)};
}

/* v.get("name"), which only objects have. */
static value get_of_object(renderer *r, value v, const char *name) {
    if (v.kind != G4_JSON_OBJECT) refuse_value(r, v, "an object");
    return get(r, v, name);
}

/* A member of a message. transformers drops those that are null before the template sees them. */
static value field(renderer *r, value message, const char *name) {
    value v = get(r, message, name);
    if (v.kind == G4_JSON_NULL) return (value){.kind = UNDEFINED, .node = message.node, .s = name, .n = strlen(name)};
    return v;
}

static int is(value v, const char *s) { return v.kind == G4_JSON_STRING && v.n == strlen(s) && !memcmp(v.s, s, v.n); }

/* A JSON number that Python reads as int. */
static int is_integer(const g4_json *j, uint32_t node) { return !g4_json_string(j, node)[strcspn(g4_json_string(j, node), ".eE")]; }

static int truthy(const renderer *r, value v) {
    double x = 1;
    switch (v.kind) {
    case G4_JSON_TRUE: return 1;
    case G4_JSON_NUMBER: return g4_json_double(r->j, v.node, &x) || x != 0; /* too large for a double is not 0 either */
    case G4_JSON_STRING: return v.n > 0;
    case G4_JSON_ARRAY:
    case G4_JSON_OBJECT: return r->j->nodes[v.node].size > 0;
    default: return 0;
    }
}

/* Going through a value: the elements of an array, the keys of an object, the characters of a string. */
typedef struct iterator {
    value of;
    uint32_t node; /* array, object: the next child */
    size_t at;     /* string: the next byte */
} iterator;

static iterator iterate(renderer *r, value v) {
    iterator i = {.of = v};
    if (v.kind == G4_JSON_ARRAY || v.kind == G4_JSON_OBJECT) i.node = r->j->nodes[v.node].first;
    else if (v.kind != G4_JSON_STRING && v.kind != UNDEFINED) refuse_value(r, v, "an array");
    return i;
}

static int next(renderer *r, iterator *i, value *item) {
    if (r->failed) return 0;
    if (i->of.kind == G4_JSON_STRING && i->at < i->of.n) {
        size_t bytes;
        const char *s = i->of.s + i->at;
        character(s, i->of.s + i->of.n, &bytes);
        *item = (value){.kind = G4_JSON_STRING, .node = i->of.node, .s = s, .n = bytes};
        i->at += bytes;
        return 1;
    }
    if (!i->node) return 0;
    *item = i->of.kind == G4_JSON_ARRAY ? value_of(r, i->node) : key_of(r, i->node);
    i->node = r->j->nodes[i->node].next;
    return 1;
}

static int is_last(const iterator *i) { return i->of.kind == G4_JSON_STRING ? i->at == i->of.n : !i->node; }

/* What came with the request: nothing in it is a special token. */
static void put(renderer *r, const char *s, size_t n) {
    if (r->failed) return;
    if (n > MOST_TEXT - r->out.n) refuse(r, r->request, "the prompt would have more than %d bytes", MOST_TEXT);
    else append(&r->out, s, n);
    if (r->out.no_memory) refuse(r, r->request, "out of memory after %llu bytes of the prompt", (unsigned long long)r->out.n);
}

/* Words of the template. */
static void literal(renderer *r, const char *s) { put(r, s, strlen(s)); }

/* A special token of the template. */
static void special(renderer *r, const char *s) {
    g4_chat_prompt *p = r->prompt;
    if (r->failed) return;
    if (p->n_markers == r->marker_room) {
        size_t room = 2 * r->marker_room + 64;
        g4_chat_marker *more = room < SIZE_MAX / 2 / sizeof *more ? realloc(p->markers, room * sizeof *more) : NULL;
        if (!more) {
            refuse(r, r->request, "out of memory after %llu special tokens of the prompt", (unsigned long long)p->n_markers);
            return;
        }
        p->markers = more;
        r->marker_room = room;
    }
    p->markers[p->n_markers++] = (g4_chat_marker){r->out.n, strlen(s)};
    literal(r, s);
}

static void quote(renderer *r) { special(r, "<|\"|>"); }

/* d [n] digits and an exponent, D.DDD x 10^exponent, as a double. */
static double read_digits(const char *d, int n, int exponent) {
    char spelled[64];
    double x = 0;
    int length = snprintf(spelled, sizeof spelled, "%.*se%d", n, d, exponent - (n - 1));
    g4_json_node node = {.kind = G4_JSON_NUMBER, .size = (uint32_t)length};
    return g4_json_double(&(g4_json){.nodes = &node, .text = spelled, .n_nodes = 1}, 0, &x) ? INFINITY : x;
}

/* The n digits nearest to x > 0, or, where only that reads back as x, one more in the last place: at a power of two the doubles below lie closer
 * than those above. Gives whether the digits read back as x. */
static int try_digits(double x, int n, char d[24], int *exponent) {
    char spelled[48];
    int k = 0;
    snprintf(spelled, sizeof spelled, "%.*e", n - 1, x);
    const char *p = spelled;
    for (; *p != 'e'; p++)
        if (*p >= '0' && *p <= '9') d[k++] = *p; /* all but the point, which the locale may spell otherwise */
    *exponent = (int)strtol(p + 1, NULL, 10);
    d[k] = 0;
    if (read_digits(d, n, *exponent) == x) return 1;
    while (k > 0 && d[k - 1] == '9') d[--k] = '0';
    if (k > 0) {
        d[k - 1]++;
    } else {
        d[0] = '1';
        ++*exponent;
    }
    return read_digits(d, n, *exponent) == x;
}

enum { SPELLED = 64 };

/* A double as Python's repr spells it: the fewest digits that read back as the same number, fixed from 1e-4 to below 1e16, always with a point or an
 * exponent. */
static void spell_double(double x, char out[SPELLED]) {
    static const char zeros[] = "0000000000000000";
    const char *minus = signbit(x) ? "-" : "";
    char d[24] = "0";
    int exponent = 0, least = 1, most = 17;
    x = fabs(x);
    while (x != 0 && least < most) { /* more digits never fit worse */
        int middle = (least + most) / 2;
        if (try_digits(x, middle, d, &exponent)) most = middle;
        else least = middle + 1;
    }
    if (x != 0) try_digits(x, most, d, &exponent);
    int n = (int)strlen(d);
    if (exponent >= 16 || exponent < -4) {
        snprintf(out, SPELLED, "%s%c%s%se%c%02d", minus, d[0], n > 1 ? "." : "", d + 1, exponent < 0 ? '-' : '+', abs(exponent));
    } else if (exponent < 0) {
        snprintf(out, SPELLED, "%s0.%.*s%s", minus, -exponent - 1, zeros, d);
    } else if (n <= exponent + 1) {
        snprintf(out, SPELLED, "%s%s%.*s.0", minus, d, exponent + 1 - n, zeros);
    } else {
        snprintf(out, SPELLED, "%s%.*s.%s", minus, exponent + 1, d, d + exponent + 1);
    }
}

static void put_number(renderer *r, value v) {
    const char *s = g4_json_string(r->j, v.node);
    size_t n = r->j->nodes[v.node].size;
    char spelled[SPELLED];
    double x;
    if (is_integer(r->j, v.node)) {
        if (n - (*s == '-') > MOST_DIGITS) refuse(r, v.node, "an integer of more than %d digits", MOST_DIGITS);
        else if (!strcmp(s, "-0")) literal(r, "0");
        else put(r, s, n);
    } else if (g4_json_double(r->j, v.node, &x)) {
        refuse(r, v.node, "%s is too large for a double", show(s, n).text);
    } else {
        spell_double(x, spelled);
        literal(r, spelled);
    }
}

/* repr() of a string: in single quotes, or in double ones where that saves escapes. */
static void put_python_string(renderer *r, value v) {
    const char *mark = memchr(v.s, '\'', v.n) && !memchr(v.s, '"', v.n) ? "\"" : "'", *p = v.s, *end = p + v.n;
    literal(r, mark);
    for (size_t bytes; p < end && !r->failed; p += bytes) {
        uint32_t c = character(p, end, &bytes);
        char escape[16] = "";
        if (c == '\\' || c == (unsigned char)*mark) snprintf(escape, sizeof escape, "\\%c", (int)c);
        else if (c == '\n' || c == '\r' || c == '\t') snprintf(escape, sizeof escape, "\\%c", c == '\n' ? 'n' : c == '\r' ? 'r' : 't');
        else if (!is_printable(c)) snprintf(escape, sizeof escape, c < 0x100 ? "\\x%02x" : c < 0x10000 ? "\\u%04x" : "\\U%08x", (unsigned)c);
        if (*escape) literal(r, escape);
        else put(r, p, bytes);
    }
    literal(r, mark);
}

/* repr(v). Recursion ends where g4_json_parse ended it, at 64. */
static void put_python(renderer *r, value v) {
    value item;
    switch (v.kind) {
    case UNDEFINED: return;
    case G4_JSON_NULL: literal(r, "None"); return;
    case G4_JSON_FALSE: literal(r, "False"); return;
    case G4_JSON_TRUE: literal(r, "True"); return;
    case G4_JSON_NUMBER: put_number(r, v); return;
    case G4_JSON_STRING: put_python_string(r, v); return;
    }
    int is_object = v.kind == G4_JSON_OBJECT;
    literal(r, is_object ? "{" : "[");
    for (iterator i = iterate(r, v); next(r, &i, &item);) {
        if (is_object) {
            put_python_string(r, item);
            literal(r, ": ");
            item = value_of(r, item.node);
        }
        put_python(r, item);
        if (!is_last(&i)) literal(r, ", ");
    }
    literal(r, is_object ? "}" : "]");
}

/* {{ v }}: str(v) */
static void print(renderer *r, value v) {
    if (v.kind == G4_JSON_STRING) put(r, v.s, v.n);
    else put_python(r, v);
}

/* {{ v | upper }} */
static void print_upper(renderer *r, value v) {
    size_t begin = r->out.n, bytes;
    text plain = {0};
    print(r, v);
    if (r->failed || r->out.n == begin) return;
    append(&plain, r->out.s + begin, r->out.n - begin);
    if (plain.no_memory) refuse(r, v.node, "out of memory");
    r->out.n = begin;
    for (size_t at = 0; at < plain.n && !r->failed; at += bytes) {
        uint32_t c = character(plain.s + at, plain.s + plain.n, &bytes), up = c < 0x80 ? (c >= 'a' && c <= 'z' ? c - 32 : c) : capital(c);
        char spelled[4];
        int i = c < 0x80 ? N_UPPER_CASE : 0;
        while (i < N_UPPER_CASE && memcmp(upper_case[i], plain.s + at, bytes)) i++;
        if (i < N_UPPER_CASE) literal(r, upper_case[i] + bytes);
        else put(r, spelled, spell_character(up, spelled));
    }
    free(plain.s);
}

/* v | upper == type */
static int is_type(value v, const char *type) {
    if (v.kind != G4_JSON_STRING || v.n != strlen(type)) return 0;
    for (size_t i = 0; i < v.n; i++)
        if (v.s[i] != type[i] && !(v.s[i] >= 'a' && v.s[i] <= 'z' && v.s[i] - 'a' + 'A' == type[i])) return 0;
    return 1;
}

/* Takes the white space off both ends of what was printed since `begin`. */
static void strip_printed(renderer *r, size_t begin) {
    if (r->failed || r->out.n == begin) return;
    const char *s = r->out.s + begin;
    size_t n = r->out.n - begin;
    strip(&s, &n);
    memmove(r->out.s + begin, s, n);
    r->out.n = begin + n;
    r->out.s[r->out.n] = 0;
}

/* {{ v | trim }} */
static void print_stripped(renderer *r, value v) {
    size_t begin = r->out.n;
    print(r, v);
    strip_printed(r, begin);
}

/* Members of an object by their keys; those with equal ones stay in their order, which is that of their numbers. */
static int compare_keys(const void *context, uint32_t x, uint32_t y) {
    const g4_json *j = context;
    const g4_json_node *a = &j->nodes[x], *b = &j->nodes[y];
    const char *s = j->text + a->key, *t = j->text + b->key;
    lowering l = {s, s, s + a->key_size, 0}, m = {t, t, t + b->key_size, 0};
    for (;;) {
        int64_t c = next_lower(&l), d = next_lower(&m);
        if (c != d) return c < d ? -1 : 1;
        if (c < 0) return x < y ? -1 : x > y;
    }
}

/* v | dictsort: the members [n] by their keys, without regard to case. Free it; NULL: none. */
static uint32_t *sorted(renderer *r, value v, uint32_t *n) {
    *n = 0;
    if (v.kind != G4_JSON_OBJECT) refuse_value(r, v, "an object");
    if (r->failed) return NULL;
    uint32_t size = r->j->nodes[v.node].size, *order = size ? malloc(size * sizeof *order) : NULL; /* less than its nodes take */
    if (!size) return NULL;
    if (!order) {
        refuse(r, v.node, "out of memory for %u members", (unsigned)size);
        return NULL;
    }
    for (uint32_t i = r->j->nodes[v.node].first; i; i = r->j->nodes[i].next) order[(*n)++] = i;
    g4_sort(order, size, compare_keys, r->j);
    return order;
}

/* ---- 3. The template -------------------------------------------------------------------------------------------------- */

/* format_argument: a value in Gemma's own notation. quoted_keys: keys are strings too, as in a schema's enum; in calls and responses they are bare. */
static void put_argument(renderer *r, value v, int quoted_keys) {
    value item;
    uint32_t n, *order;
    switch (v.kind) {
    case G4_JSON_NULL: literal(r, "null"); return;
    case G4_JSON_FALSE: literal(r, "false"); return;
    case G4_JSON_TRUE: literal(r, "true"); return;
    case G4_JSON_NUMBER: put_number(r, v); return;
    case G4_JSON_STRING:
        quote(r);
        put(r, v.s, v.n);
        quote(r);
        return;
    case G4_JSON_OBJECT:
        literal(r, "{");
        order = sorted(r, v, &n);
        for (uint32_t i = 0; i < n && !r->failed; i++) {
            if (i) literal(r, ",");
            if (quoted_keys) quote(r);
            print(r, key_of(r, order[i]));
            if (quoted_keys) quote(r);
            literal(r, ":");
            put_argument(r, value_of(r, order[i]), quoted_keys);
        }
        free(order);
        literal(r, "}");
        return;
    default: /* an array, or a response that is not there */
        literal(r, "[");
        for (iterator i = iterate(r, v); next(r, &i, &item);) {
            put_argument(r, item, quoted_keys);
            if (!is_last(&i)) literal(r, ",");
        }
        literal(r, "]");
    }
}

/* required:["a","b"], in Gemma's quotes */
static void put_required(renderer *r, value list) {
    value item;
    literal(r, "required:[");
    for (iterator i = iterate(r, list); next(r, &i, &item);) {
        quote(r);
        print(r, item);
        quote(r);
        if (!is_last(&i)) literal(r, ",");
    }
    literal(r, "]");
}

/* "STRING", in Gemma's quotes */
static void put_type(renderer *r, value type) {
    quote(r);
    print_upper(r, type);
    quote(r);
}

static void put_comma(renderer *r, int *needed) {
    if (*needed) literal(r, ",");
    *needed = 1;
}

static void put_parameters(renderer *r, value properties, int skip_standard_keys);

/* The schema of an array's elements. */
static void put_items(renderer *r, value items) {
    int comma = 0;
    uint32_t n, *order = sorted(r, items, &n);
    literal(r, "items:{");
    for (uint32_t i = 0; i < n && !r->failed; i++) {
        value key = key_of(r, order[i]), v = value_of(r, order[i]), item;
        if (v.kind == G4_JSON_NULL) continue;
        put_comma(r, &comma);
        if (is(key, "properties")) {
            literal(r, "properties:{");
            if (v.kind == G4_JSON_OBJECT) put_parameters(r, v, 0);
            literal(r, "}");
        } else if (is(key, "required")) {
            put_required(r, v);
        } else if (is(key, "type")) {
            literal(r, "type:");
            if (v.kind == G4_JSON_STRING) {
                put_type(r, v);
            } else {
                literal(r, "[");
                value types = truthy(r, v) ? v : (value){.kind = UNDEFINED}; /* map() does not look at what is false */
                for (iterator each = iterate(r, types); next(r, &each, &item);) {
                    put_type(r, item);
                    if (!is_last(&each)) literal(r, ",");
                }
                literal(r, "]");
            }
        } else {
            print(r, key);
            literal(r, ":");
            put_argument(r, v, 1);
        }
    }
    free(order);
    literal(r, "}");
}

/* One parameter's schema, from "{" on. */
static void put_parameter(renderer *r, value v) {
    int comma = 0;
    value description = get(r, v, "description"), type = get(r, v, "type");
    literal(r, "{");
    if (truthy(r, description)) {
        put_comma(r, &comma);
        literal(r, "description:");
        quote(r);
        print(r, description);
        quote(r);
    }
    if (is_type(type, "STRING") && truthy(r, get(r, v, "enum"))) {
        put_comma(r, &comma);
        literal(r, "enum:");
        put_argument(r, get(r, v, "enum"), 1);
    }
    value items = get(r, v, "items");
    if (is_type(type, "ARRAY") && items.kind == G4_JSON_OBJECT && truthy(r, items)) {
        put_comma(r, &comma);
        put_items(r, items);
    }
    if (truthy(r, get(r, v, "nullable"))) {
        put_comma(r, &comma);
        literal(r, "nullable:true");
    }
    if (is_type(type, "OBJECT")) {
        value properties = get(r, v, "properties"), required = get(r, v, "required");
        int has_properties = properties.kind == G4_JSON_OBJECT;
        put_comma(r, &comma);
        literal(r, "properties:{");
        put_parameters(r, has_properties ? properties : v, !has_properties); /* without properties, its other members are taken for them */
        literal(r, "}");
        if (truthy(r, required)) {
            put_comma(r, &comma);
            put_required(r, required);
        }
    }
    put_comma(r, &comma);
    literal(r, "type:");
    put_type(r, type);
    literal(r, "}");
}

/* format_parameters. Recursion ends where g4_json_parse ended it, at 64. */
static void put_parameters(renderer *r, value properties, int skip_standard_keys) {
    int comma = 0;
    uint32_t n, *order = sorted(r, properties, &n);
    for (uint32_t i = 0; i < n && !r->failed; i++) {
        value key = key_of(r, order[i]);
        if (skip_standard_keys && (is(key, "description") || is(key, "type") || is(key, "properties") || is(key, "required") || is(key, "nullable"))) continue;
        put_comma(r, &comma);
        print(r, key);
        literal(r, ":");
        put_parameter(r, value_of(r, order[i]));
    }
    free(order);
}

/* 'response' in function */
static int holds_response(renderer *r, value function) {
    value item;
    switch (function.kind) {
    case G4_JSON_OBJECT: return g4_json_get(r->j, function.node, "response") != 0;
    case G4_JSON_STRING: return find(function.s, function.n, "response", 8) < function.n;
    case G4_JSON_ARRAY:
        for (iterator i = iterate(r, function); next(r, &i, &item);)
            if (is(item, "response")) return 1;
        return 0;
    default: refuse_value(r, function, "an object"); return 0;
    }
}

/* format_function_declaration. A schema without a type stays without its closing brace, as in the template. */
static void put_tool(renderer *r, value tool) {
    value function = get(r, tool, "function"), name = get(r, function, "name"), description = get(r, function, "description");
    value parameters = get(r, function, "parameters");
    literal(r, "declaration:");
    print(r, name);
    literal(r, "{description:");
    quote(r);
    print(r, description);
    quote(r);
    if (truthy(r, parameters)) {
        value properties = get(r, parameters, "properties"), required = get(r, parameters, "required"), type = get(r, parameters, "type");
        literal(r, ",parameters:{");
        if (truthy(r, properties)) {
            literal(r, "properties:{");
            put_parameters(r, properties, 0);
            literal(r, "},");
        }
        if (truthy(r, required)) {
            put_required(r, required);
            literal(r, ",");
        }
        if (truthy(r, type)) {
            literal(r, "type:");
            put_type(r, type);
            literal(r, "}");
        }
    }
    if (!r->failed && holds_response(r, function)) {
        value response = get(r, function, "response"), about = get(r, response, "description"), type = get(r, response, "type");
        literal(r, ",response:{");
        if (truthy(r, about)) {
            literal(r, "description:");
            quote(r);
            print(r, about);
            quote(r);
            literal(r, ",");
        }
        if (is_type(type, "OBJECT")) {
            literal(r, "type:");
            put_type(r, type);
            literal(r, "}");
        }
    }
    literal(r, "}");
}

/* strip_thinking: the text without what stands between <|channel> and <channel|>, or after a <|channel>. */
static void print_without_thinking(renderer *r, value v) {
    static const char open[] = "<|channel>", close[] = "<channel|>";
    enum { SIZE = sizeof open - 1 };
    size_t begin = r->out.n;
    if (v.kind != G4_JSON_STRING) {
        refuse_value(r, v, "a string");
        return;
    }
    for (size_t at = 0;;) {
        size_t left = v.n - at, part = find(v.s + at, left, close, SIZE);
        put(r, v.s + at, find(v.s + at, part, open, SIZE));
        if (part == left) break;
        at += part + SIZE;
    }
    strip_printed(r, begin);
}

/* A placeholder if the part is media; whether it is. */
static int put_media(renderer *r, value type) {
    const char *token = is(type, "image") || is(type, "image_url")   ? "<|image|>"
                        : is(type, "audio") || is(type, "input_audio") ? "<|audio|>"
                        : is(type, "video")                            ? "<|video|>"
                                                                       : NULL;
    if (!token) return 0;
    special(r, token);
    r->prompt->n_media++;
    return 1;
}

static void put_content(renderer *r, value content, int by_model) {
    value item;
    if (content.kind == G4_JSON_STRING) {
        if (by_model) print_without_thinking(r, content);
        else print_stripped(r, content);
    } else if (content.kind == G4_JSON_ARRAY || content.kind == G4_JSON_OBJECT) {
        for (iterator i = iterate(r, content); next(r, &i, &item);) {
            value type = get_of_object(r, item, "type");
            if (is(type, "text")) {
                if (by_model) print_without_thinking(r, get(r, item, "text"));
                else print_stripped(r, get(r, item, "text"));
            } else if (!put_media(r, type)) {
                r->prompt->n_unknown++;
            }
        }
    }
}

/* The system message has its own rules: a blank after each part, whatever its type. */
static void put_system_content(renderer *r, value content) {
    value item;
    if (content.kind == G4_JSON_STRING) {
        print_stripped(r, content);
    } else if (content.kind == G4_JSON_ARRAY || content.kind == G4_JSON_OBJECT) {
        for (iterator i = iterate(r, content); next(r, &i, &item);) {
            value part = get(r, item, "text");
            if (part.kind == UNDEFINED) r->prompt->n_unknown++;
            print_stripped(r, part);
            literal(r, " ");
        }
    }
}

static void put_tool_calls(renderer *r, value calls) {
    value call;
    for (iterator i = iterate(r, calls); next(r, &i, &call);) {
        value function = get(r, call, "function"), name = get(r, function, "name"), arguments = get(r, function, "arguments");
        uint32_t n = 0, *order = NULL;
        if (name.kind != G4_JSON_STRING) refuse_value(r, name, "the name of a function");
        if (arguments.kind == G4_JSON_OBJECT) order = sorted(r, arguments, &n);
        else if (arguments.kind != G4_JSON_NULL) refuse_value(r, arguments, "an object (arguments that are JSON in a string must be parsed first)");
        special(r, "<|tool_call>");
        literal(r, "call:");
        print(r, name);
        literal(r, "{");
        for (uint32_t k = 0; k < n && !r->failed; k++) {
            if (k) literal(r, ",");
            print(r, key_of(r, order[k]));
            literal(r, ":");
            put_argument(r, value_of(r, order[k]), 0);
        }
        free(order);
        literal(r, "}");
        special(r, "<tool_call|>");
    }
}

/* The head of a response, and its end; between them stands a value, or the members of an object. */
static void open_response(renderer *r, value name) {
    if (name.kind != G4_JSON_STRING) refuse_value(r, name, "the name of a function");
    special(r, "<|tool_response>");
    literal(r, "response:");
    print(r, name);
    literal(r, "{");
}

static void close_response(renderer *r) {
    literal(r, "}");
    special(r, "<tool_response|>");
}

/* format_tool_response_block */
static void put_response(renderer *r, value name, value response) {
    open_response(r, name);
    if (response.kind == G4_JSON_OBJECT) {
        uint32_t n, *order = sorted(r, response, &n);
        for (uint32_t i = 0; i < n && !r->failed; i++) {
            if (i) literal(r, ",");
            print(r, key_of(r, order[i]));
            literal(r, ":");
            put_argument(r, value_of(r, order[i]), 0);
        }
        free(order);
    } else {
        literal(r, "value:");
        put_argument(r, response, 0);
    }
    close_response(r);
}

/* The content of a tool's message: text parts become one string, media follow behind the response. */
static void put_tool_content(renderer *r, value name, value content) {
    value part;
    if (content.kind == UNDEFINED) content.kind = G4_JSON_NULL; /* .get() gives None */
    if (content.kind != G4_JSON_ARRAY && content.kind != G4_JSON_OBJECT) {
        put_response(r, name, content);
        return;
    }
    open_response(r, name);
    literal(r, "value:");
    quote(r);
    for (iterator i = iterate(r, content); next(r, &i, &part);) {
        value words = get_of_object(r, part, "text");
        if (!is(get(r, part, "type"), "text")) continue;
        if (words.kind != G4_JSON_STRING) refuse_value(r, words, "a string");
        print(r, words);
    }
    quote(r);
    close_response(r);
    for (iterator i = iterate(r, content); next(r, &i, &part);) {
        value type = get(r, part, "type");
        if (!put_media(r, type) && !is(type, "text")) r->prompt->n_unknown++;
    }
}

/* Which of two ids of tool calls comes first: none, then numbers, then strings. Numbers are equal as in Python, where true is 1. */
static int compare_ids(const g4_json *j, uint32_t a, uint32_t b) {
    const uint32_t node[2] = {a, b};
    int rank[2];
    double x[2] = {0, 0};
    for (int i = 0; i < 2; i++) {
        int kind = node[i] ? j->nodes[node[i]].kind : G4_JSON_NULL;
        rank[i] = kind == G4_JSON_NULL ? 0 : kind == G4_JSON_STRING ? 2 : 1;
        if (kind == G4_JSON_TRUE) x[i] = 1;
        if (kind == G4_JSON_NUMBER && g4_json_double(j, node[i], &x[i])) x[i] = INFINITY;
    }
    if (rank[0] != rank[1]) return rank[0] < rank[1] ? -1 : 1;
    if (x[0] != x[1]) return x[0] < x[1] ? -1 : 1;
    int by_text = rank[0] == 2 || (rank[0] == 1 && j->nodes[a].kind == G4_JSON_NUMBER && j->nodes[b].kind == G4_JSON_NUMBER && x[0] != 0 &&
                                is_integer(j, a) && is_integer(j, b)); /* large integers may be one double, and two ids */
    if (!by_text) return 0;
    uint32_t n = j->nodes[a].size, m = j->nodes[b].size;
    return n != m ? (n < m ? -1 : 1) : memcmp(g4_json_string(j, a), g4_json_string(j, b), n);
}

static int compare_calls(const void *j, uint32_t a, uint32_t b) {
    int order = compare_ids(j, g4_json_get(j, a, "id"), g4_json_get(j, b, "id"));
    return order ? order : a < b ? -1 : a > b;
}

/* The node of an id, 0: none. */
static uint32_t id_of(renderer *r, value v) {
    if (v.kind == G4_JSON_ARRAY || v.kind == G4_JSON_OBJECT) refuse_value(r, v, "a string");
    return v.kind == UNDEFINED || v.kind == G4_JSON_NULL ? 0 : v.node;
}

/* The tool messages that follow a message with calls, each under the name of the call that it answers. Sorted calls, because calls times messages
 * would be a long time for a request that was made to take it. Gives how many there were. */
static int put_answers(renderer *r, value calls, uint32_t first_message) {
    uint32_t n = 0, *order, messages = 0, size = r->j->nodes[calls.node].size;
    value call;
    if (r->failed || !first_message || !is(get(r, value_of(r, first_message), "role"), "tool")) return 0;
    order = malloc(size * sizeof *order); /* less than its nodes take */
    if (!order) {
        refuse(r, calls.node, "out of memory for %u calls", (unsigned)size);
        return 0;
    }
    for (iterator i = iterate(r, calls); next(r, &i, &call);) {
        id_of(r, get(r, call, "id"));
        order[n++] = call.node;
    }
    g4_sort(order, n, compare_calls, r->j);
    for (uint32_t node = first_message; node && !r->failed; node = r->j->nodes[node].next, messages++) {
        value message = value_of(r, node), name = field(r, message, "name"), unknown = {.kind = G4_JSON_STRING, .s = "unknown", .n = 7};
        if (!is(field(r, message, "role"), "tool")) break;
        uint32_t id = id_of(r, field(r, message, "tool_call_id")), low = 0, high = n;
        while (low < high) { /* the first call whose id is larger */
            uint32_t middle = low + (high - low) / 2;
            if (compare_ids(r->j, g4_json_get(r->j, order[middle], "id"), id) <= 0) low = middle + 1;
            else high = middle;
        }
        int found = low > 0 && !compare_ids(r->j, g4_json_get(r->j, order[low - 1], "id"), id); /* of several, the last */
        if (found) name = get(r, get(r, value_of(r, order[low - 1]), "function"), "name");
        put_tool_content(r, found || truthy(r, name) ? name : unknown, field(r, message, "content"));
    }
    free(order);
    return messages > 0;
}

/* Older form: responses inside the message that called. */
static void put_embedded_responses(renderer *r, value responses) {
    value item;
    for (iterator i = iterate(r, responses); next(r, &i, &item);) {
        value name = get(r, item, "name");
        put_response(r, truthy(r, name) ? name : (value){.kind = G4_JSON_STRING, .s = "unknown", .n = 7}, get(r, item, "response"));
    }
}

/* transformers fills reasoning_content from older names for it, and the template looks at reasoning first. */
static value reasoning_of(renderer *r, value message) {
    value reasoning = field(r, message, "reasoning"), content = field(r, message, "reasoning_content"), thinking = field(r, message, "thinking");
    if (truthy(r, reasoning)) return reasoning;
    return content.kind != UNDEFINED ? content : thinking.kind != UNDEFINED ? thinking : reasoning;
}

/* The tools' list as transformers takes it: null, or something that holds objects only. */
static int has_tools(renderer *r, value tools) {
    value tool;
    int any = 0;
    if (tools.kind == UNDEFINED || tools.kind == G4_JSON_NULL) return 0;
    for (iterator i = iterate(r, tools); next(r, &i, &tool); any = 1)
        if (tool.kind != G4_JSON_OBJECT || tools.kind != G4_JSON_ARRAY) refuse_value(r, tools.kind == G4_JSON_ARRAY ? tool : tools, "an array of objects");
    return any;
}

static int flag(renderer *r, int setting, const char *name) { return setting >= 0 ? setting : truthy(r, get(r, value_of(r, r->request), name)); }

typedef enum last_part { LAST_OTHER, LAST_TOOL_CALL, LAST_TOOL_RESPONSE } last_part;

static void render(renderer *r, g4_chat_family family) {
    value request = value_of(r, r->request), messages, tools, message, tool;
    if (request.kind != G4_JSON_OBJECT) refuse_value(r, request, "an object with messages");
    messages = get(r, request, "messages");
    if (messages.kind != G4_JSON_ARRAY) refuse_value(r, messages, "an array of messages");
    else if (!truthy(r, messages)) refuse(r, messages.node, "expected one message at least, found none");
    if (r->failed) return;
    for (iterator i = iterate(r, messages); next(r, &i, &message);)
        if (message.kind != G4_JSON_OBJECT) refuse_value(r, message, "an object");
    const g4_chat_settings *how = r->settings;
    tools = how->no_tools ? (value){.kind = UNDEFINED, .node = r->request, .s = "tools", .n = 5} : get(r, request, "tools");
    int any_tools = has_tools(r, tools), think = flag(r, how->enable_thinking, "enable_thinking"), preserve = flag(r, how->preserve_thinking, "preserve_thinking");

    special(r, "<bos>");
    uint32_t first = r->j->nodes[messages.node].first, n_messages = r->j->nodes[messages.node].size;
    message = value_of(r, first);
    value role = field(r, message, "role");
    int has_system = is(role, "system") || is(role, "developer");
    if (think || any_tools || has_system) {
        special(r, "<|turn>");
        literal(r, "system\n");
        if (think) {
            special(r, "<|think|>");
            literal(r, "\n");
        }
        if (has_system) {
            put_system_content(r, field(r, message, "content"));
            first = r->j->nodes[first].next;
            n_messages--;
        }
        iterator i = any_tools ? iterate(r, tools) : (iterator){.of = tools};
        while (next(r, &i, &tool)) {
            special(r, "<|tool>");
            put_tool(r, tool);
            special(r, "<tool|>");
        }
        special(r, "<turn|>");
        literal(r, "\n");
    }
    if (n_messages > MOST_MESSAGES) refuse(r, messages.node, "expected at most %d messages, found %u", MOST_MESSAGES, (unsigned)n_messages);

    uint32_t last_user = 0; /* the node; reasoning before it is left out */
    for (uint32_t node = first; node; node = r->j->nodes[node].next)
        if (is(get(r, value_of(r, node), "role"), "user")) last_user = node;

    int after_assistant = 0; /* the last message that is not a tool's was an assistant's: this one continues its turn */
    last_part last = LAST_OTHER;
    for (uint32_t node = first; node && !r->failed; node = r->j->nodes[node].next) {
        message = value_of(r, node);
        role = field(r, message, "role");
        if (is(role, "tool")) continue; /* it was rendered with the call that it answers */
        int by_model = is(role, "assistant") || is(role, "model"), responded = 0;
        last = LAST_OTHER;
        if (!(by_model && after_assistant)) {
            if (role.kind != G4_JSON_STRING) refuse_value(r, role, "a string");
            special(r, "<|turn>");
            if (by_model) literal(r, "model");
            else print(r, role);
            literal(r, "\n");
        }
        value reasoning = reasoning_of(r, message), calls = field(r, message, "tool_calls"), responses = field(r, message, "tool_responses");
        int any_calls = truthy(r, calls);
        if (truthy(r, reasoning) && (node > last_user || (preserve && any_calls))) {
            if (reasoning.kind != G4_JSON_STRING) refuse_value(r, reasoning, "a string");
            special(r, "<|channel>");
            literal(r, "thought\n");
            print(r, reasoning);
            literal(r, "\n");
            special(r, "<channel|>");
        }
        if (any_calls) {
            put_tool_calls(r, calls);
            last = LAST_TOOL_CALL;
        }
        if (truthy(r, responses)) {
            put_embedded_responses(r, responses);
            responded = 1;
        } else if (any_calls) {
            responded = put_answers(r, calls, r->j->nodes[node].next);
        }
        if (responded) last = LAST_TOOL_RESPONSE;

        size_t begin = r->out.n;
        put_content(r, field(r, message, "content"), by_model);
        if (r->failed) break;
        const char *printed = r->out.s + begin;
        size_t n_printed = r->out.n - begin;
        strip(&printed, &n_printed);

        uint32_t following = r->j->nodes[node].next; /* the next message that is not a tool's */
        while (following && is(get(r, value_of(r, following), "role"), "tool")) following = r->j->nodes[following].next;
        int continued = by_model && following && is(get(r, value_of(r, following), "role"), "assistant") && (!any_calls || responded);
        if (last == LAST_TOOL_CALL) {
            special(r, "<|tool_response>"); /* the model stopped here, for the answers to come */
        } else if (!continued && !(responded && !n_printed && !following)) {
            special(r, "<turn|>");
            literal(r, "\n");
        }
        after_assistant = is(role, "assistant");
    }

    if (!flag(r, how->add_generation_prompt, "add_generation_prompt")) return;
    if (last == LAST_OTHER) {
        special(r, "<|turn>");
        literal(r, "model\n");
        if (family == G4_CHAT_LARGE && !think) { /* the one difference between the two templates: an empty thought says that there is to be none */
            special(r, "<|channel>");
            literal(r, "thought\n");
            special(r, "<channel|>");
        }
    } else if (last == LAST_TOOL_RESPONSE && think) {
        special(r, "<|channel>");
        literal(r, "thought\n");
        r->prompt->in_reasoning = 1;
    }
}

int g4_chat_render_json(const g4_json *j, uint32_t request, g4_chat_family family, const g4_chat_settings *settings, g4_chat_prompt *prompt, g4_error *err) {
    static const g4_chat_settings as_requested = {-1, -1, -1, 0};
    *prompt = (g4_chat_prompt){0};
    renderer r = {.j = j, .request = request, .settings = settings ? settings : &as_requested, .prompt = prompt, .err = err};
    render(&r, family);
    prompt->text = r.out.s;
    prompt->n = r.out.n;
    if (r.failed) g4_chat_prompt_free(prompt);
    return r.failed ? -1 : 0;
}

int g4_chat_render(const char *request, size_t n, g4_chat_family family, g4_chat_prompt *prompt, g4_error *err) {
    g4_json j;
    *prompt = (g4_chat_prompt){0};
    if (g4_json_parse(&j, request, n, "the request", err)) return -1;
    int failed = g4_chat_render_json(&j, 0, family, NULL, prompt, err);
    g4_json_free(&j);
    return failed;
}

void g4_chat_prompt_free(g4_chat_prompt *prompt) {
    free(prompt->text);
    free(prompt->markers);
    *prompt = (g4_chat_prompt){0};
}

/* ---- 4. The prompt's ids ---------------------------------------------------------------------------------------------- */

/* Text between two special tokens is encoded in one piece, whoever it came from: a merge may join the template's words with the user's. So where
 * nothing in the request looks like a special token, these are the ids of the whole text. */
int g4_chat_encode(const g4_tokenizer *tok, const g4_chat_prompt *prompt, int flags, int32_t **ids, size_t *n_ids, g4_error *err) {
    if (flags & G4_CHAT_PARSE_REQUEST) return g4_encode(tok, prompt->text, prompt->n, 0, ids, n_ids, err);
    int32_t *all = NULL;
    size_t n = 0, room = 0, at = 0;
    for (size_t i = 0; i <= prompt->n_markers; i++) {
        g4_chat_marker m = i < prompt->n_markers ? prompt->markers[i] : (g4_chat_marker){prompt->n, 0};
        if (m.at < at || m.at > prompt->n || m.n > prompt->n - m.at) {
            free(all);
            return g4_fail(err, "marker %llu of the prompt: bytes %llu to %llu of %llu; expected them inside the text, and behind the marker before", (unsigned long long)i,
                           (unsigned long long)m.at, (unsigned long long)m.at + m.n, (unsigned long long)prompt->n);
        }
        char name[32] = "";
        if (m.n < sizeof name) memcpy(name, prompt->text + m.at, m.n);
        int32_t id = m.n ? g4_token_id(tok, name) : -1, *piece;
        if (m.n && id < 0) continue; /* a tokenizer without this token: its text is text */
        size_t n_piece;
        if (g4_encode(tok, prompt->text + at, m.at - at, G4_PLAIN_TEXT, &piece, &n_piece, err)) {
            free(all);
            return -1;
        }
        if (n_piece + 1 > room - n) {
            size_t more = n < SIZE_MAX / 16 && n_piece < SIZE_MAX / 16 ? 2 * (n + n_piece) + 64 : 0;
            int32_t *larger = more ? realloc(all, more * sizeof *all) : NULL;
            if (!larger) {
                free(piece);
                free(all);
                return g4_fail(err, "out of memory after %llu ids of a prompt", (unsigned long long)n);
            }
            all = larger;
            room = more;
        }
        if (n_piece) memcpy(all + n, piece, n_piece * sizeof *all);
        free(piece);
        n += n_piece;
        if (id >= 0) all[n++] = id;
        at = m.at + m.n;
    }
    *ids = all;
    *n_ids = n;
    return 0;
}

/* ---- 5. Which template a checkpoint has ------------------------------------------------------------------------------- */

static const struct {
    const char *name;
    uint64_t hash; /* FNV-1a 64 of the text, its line ends \n, without the last of them (as Jinja reads it) */
    size_t n;
} canonical[] = {[G4_CHAT_SMALL] = {"small", 0xb5a7c4713578081c, 18567}, [G4_CHAT_LARGE] = {"large", 0x49328c5f218b677f, 18680}};

/* What a template is known by. Nobody has to be kept from forging one: whatever hashes alike is rendered by the C above all the same. */
static uint64_t hash_template(const char *s, size_t n, size_t *n_hashed) {
    uint64_t hash = 0xcbf29ce484222325;
    *n_hashed = 0;
    for (size_t i = 0; i < n; i++) {
        int last = i + 1 == n, line_end = s[i] == '\r' && !last && s[i + 1] == '\n';
        if (line_end || (last && s[i] == '\n')) continue;
        hash = (hash ^ (unsigned char)s[i]) * 0x100000001b3;
        ++*n_hashed;
    }
    return hash;
}

int g4_chat_recognise(const char *template_text, size_t n, g4_chat_family *family) {
    size_t n_hashed;
    uint64_t hash = hash_template(template_text, n, &n_hashed);
    for (int i = 0; i < 2; i++) {
        if (hash != canonical[i].hash || n_hashed != canonical[i].n) continue;
        *family = (g4_chat_family)i;
        return 1;
    }
    return 0;
}

/* DIRECTORY/NAME; free it. */
static char *path_in(const char *directory, const char *name, g4_error *err) {
    size_t n = strlen(directory), m = strlen(name);
    char *path = malloc(n + m + 2);
    if (path) sprintf(path, "%s%s%s", directory, n && directory[n - 1] == '/' ? "" : "/", name);
    else g4_fail(err, "%s: out of memory", directory);
    return path;
}

/* What a checkpoint says about its chats. */
typedef struct origin {
    char *text;         /* [n] the template, malloc'd; NULL: none */
    size_t n;
    const char *where;  /* the file or key that it is in */
    int64_t per_layer;  /* hidden_size_per_layer_input; -1: not read */
} origin;

static int keep_template(origin *o, const char *s, size_t n, const char *where, g4_error *err) {
    o->text = malloc(n + 1);
    if (!o->text) return g4_fail(err, "%s: out of memory", where);
    if (n) memcpy(o->text, s, n);
    o->n = n;
    o->where = where;
    return 0;
}

static int read_gguf(origin *o, const char *path, g4_error *err) {
    static const char key[] = "tokenizer.chat_template";
    g4_gguf *g = g4_gguf_open(path, 1, 0, err);
    if (!g) return -1;
    const g4_gguf_key *k = g4_gguf_find(g, key), *width = g4_gguf_find(g, "gemma4.embedding_length_per_layer_input");
    int failed = 0;
    if (k && k->type == G4_GGUF_STRING && !k->is_array) {
        const unsigned char *p = k->data;
        size_t n;
        const char *s = g4_gguf_string(&p, &n);
        failed = keep_template(o, s, n, key, err);
    }
    if (!width || g4_gguf_int(width, 0, &o->per_layer)) o->per_layer = 0;
    g4_gguf_close(g);
    return failed;
}

/* The template in tokenizer_config.json, which may hold several under names. 0: none. */
static uint32_t find_template(const g4_json *j) {
    uint32_t all = g4_json_get(j, 0, "chat_template");
    if (!all || j->nodes[all].kind == G4_JSON_STRING) return all;
    for (uint32_t i = j->nodes[all].kind == G4_JSON_ARRAY ? j->nodes[all].first : 0; i; i = j->nodes[i].next) {
        uint32_t name = g4_json_get(j, i, "name"), node = g4_json_get(j, i, "template");
        if (name && j->nodes[name].kind == G4_JSON_STRING && !strcmp(g4_json_string(j, name), "default"))
            return node && j->nodes[node].kind == G4_JSON_STRING ? node : 0;
    }
    return 0;
}

/* A file of a checkpoint's directory if it is there, parsed if it is JSON. */
static int read_directory_file(origin *o, const char *directory, const char *name, g4_error *err) {
    char *path = path_in(directory, name, err);
    g4_file f;
    g4_json j = {0};
    int failed = path ? 0 : -1, is_json = strstr(name, ".json") != NULL;
    if (!failed && g4_path_is_file(path) && !(failed = g4_file_open(&f, path, 0, err))) {
        if (!is_json) failed = keep_template(o, (const char *)f.data, f.size, name, err);
        else failed = g4_json_parse(&j, (const char *)f.data, f.size, path, err);
        uint32_t node = is_json && !failed ? find_template(&j) : 0;
        if (node) failed = keep_template(o, g4_json_string(&j, node), j.nodes[node].size, name, err);
        g4_json_free(&j);
        g4_file_close(&f);
    }
    free(path);
    return failed;
}

static int read_config(origin *o, const char *directory, const g4_options *options, g4_error *err) {
    char *path = path_in(directory, "config.json", err);
    g4_config config = {0};
    g4_file f;
    int failed = path ? g4_file_open(&f, path, 0, err) : -1;
    if (!failed) {
        failed = g4_config_parse(&config, (const char *)f.data, f.size, path, options, err);
        o->per_layer = config.hidden_size_per_layer_input;
        free(config.layers);
        g4_file_close(&f);
    }
    free(path);
    return failed;
}

int g4_chat_family_of(const char *path, const g4_config *config, const g4_options *options, g4_chat_family *family, g4_error *err) {
    origin o = {.per_layer = config ? config->hidden_size_per_layer_input : -1};
    int failed = 0, known = 0;
    if (g4_path_is_file(path)) {
        failed = read_gguf(&o, path, err);
    } else {
        failed = read_directory_file(&o, path, "chat_template.jinja", err); /* it goes first, as in transformers */
        if (!failed && !o.text) failed = read_directory_file(&o, path, "tokenizer_config.json", err);
    }
    if (!failed && o.text) known = g4_chat_recognise(o.text, o.n, family);
    if (!failed && !known && o.per_layer < 0) failed = read_config(&o, path, options, err);
    if (!failed && !known) {
        *family = o.per_layer ? G4_CHAT_SMALL : G4_CHAT_LARGE;
        const char *name = canonical[*family].name;
        unsigned long long used = canonical[*family].hash;
        size_t n;
        if (!o.text) g4_warn(options, "%s: has no chat template; Google's for the %s Gemma 4 models (2026-07-09, %016llx) is used", path, name, used);
        else g4_warn(options, "%s: the template in %s (%016llx) is not known here; Google's for the %s Gemma 4 models (2026-07-09, %016llx) is used", path, o.where,
                     (unsigned long long)hash_template(o.text, o.n, &n), name, used);
    }
    free(o.text);
    return failed;
}
