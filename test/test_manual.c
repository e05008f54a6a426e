/* test_manual.c - what is written about the command line is so: gemma4.1 and the completions have the commands and options that the program
 * has, no more and no fewer, and every example works.
 *
 *     build/test_manual ./gemma4          checks
 *     build/test_manual ./gemma4 fix      first brings gemma4.1 up to date: the commands of each option, and for a new command or option what its
 *                                         help says, for somebody to put into sentences and in its place
 *
 * The program's side is `gemma4 help` and `gemma4 help COMMAND`, which print its tables. mandoc, groff, bash and zsh look at their files where they are
 * installed. Needs a POSIX shell. Reading order: read_tables, then the tests.
 */
#define _POSIX_C_SOURCE 200809L
#define _XOPEN_SOURCE 700
#include "gemma4.h"
#include "test.h"

#ifdef _WIN32
int main(void) {
    SKIP("test_manual needs a POSIX shell");
    return test_done("test_manual");
}
#else
#include <sys/wait.h>
#include <unistd.h>

static char gemma4[4096], here[4096], dir[] = "/tmp/gemma4-manual-XXXXXX";
static char out[1 << 18], page[1 << 17]; /* what the last run printed; gemma4.1 */

enum { MOST = 60 }; /* commands */

typedef struct option {
    char letter[4], name[64], value[64]; /* "-p", "--prompt", "TEXT"; "" where there is none */
    char help[256];
    int optional;                        /* --name[=value] */
    uint64_t commands;                   /* bit i: command i takes it */
} option;

static struct command {
    char name[32], help[512], usage[256], examples[2048];
} commands[MOST];
static option options[2 * MOST];
static int n_commands, n_options;

/* Runs a shell line, `out` gets what it prints on both streams. $G is the program, $D a folder for files, which is not the current one. */
static int sh(const char *format, ...) {
    static char line[8192];
    va_list args;
    int n = snprintf(line, sizeof line, "G='%s' D='%s'; { ", gemma4, dir);
    va_start(args, format);
    n += vsnprintf(line + n, sizeof line - (size_t)n, format, args);
    va_end(args);
    snprintf(line + n, sizeof line - (size_t)n, "\n} 2>&1 < /dev/null");
    fflush(stdout);
    FILE *p = popen(line, "r");
    size_t size = p ? fread(out, 1, sizeof out - 1, p) : 0;
    out[size] = 0;
    int status = p ? pclose(p) : -1;
    return WIFEXITED(status) ? WEXITSTATUS(status) : 1000;
}

/* A formatted text, valid until the eighth next call. */
static const char *text(const char *format, ...) {
    static char room[8][4096];
    static int turn;
    va_list args;
    va_start(args, format);
    vsnprintf(room[turn = (turn + 1) % 8], sizeof *room, format, args);
    va_end(args);
    return room[turn];
}

static int have(const char *program) { return !sh("command -v %s", program); }

static int occurrences(const char *in, const char *what) {
    int n = 0;
    for (; (in = strstr(in, what)); in++) n++;
    return n;
}

/* The next line of *from into line, and *from behind it; 0 at the end. */
static int next_line(const char **from, char line[1024]) {
    if (!**from) return 0;
    size_t n = strcspn(*from, "\n");
    snprintf(line, 1024, "%.*s", (int)n, *from);
    *from += n + ((*from)[n] == '\n');
    return 1;
}

/* ---- The program's tables ------------------------------------------------------------------------------------------------ */

/* "  -p, --prompt TEXT        the text": a value follows one blank after the name, the help two or more. */
static void read_option(const char *line, int command) {
    option o = {.commands = (uint64_t)1 << command};
    const char *p = line + 6;
    size_t n = strcspn(p, " [");
    if (line[2] == '-') snprintf(o.letter, sizeof o.letter, "%.2s", line + 2);
    snprintf(o.name, sizeof o.name, "%.*s", (int)n, p);
    if (p[n] == '[') o.optional = 1, snprintf(o.value, sizeof o.value, "%.*s", (int)strcspn(p + n + 2, "]"), p + n + 2);
    else if (p[n] && p[n + 1] != ' ') snprintf(o.value, sizeof o.value, "%.*s", (int)strcspn(p + n + 1, " "), p + n + 1);
    const char *help = strstr(p + n + strlen(o.value), "  ");
    if (help) snprintf(o.help, sizeof o.help, "%.*s", (int)sizeof o.help - 1, help + strspn(help, " "));
    CHECK(help, "help %s: two blanks part the help from the option: %s", commands[command].name, line);
    for (option *known = options; known < options + n_options; known++)
        if (!strcmp(known->name, o.name)) {
            known->commands |= o.commands;
            return;
        }
    if (n_options < 2 * MOST) options[n_options++] = o;
}

static void read_tables(void) {
    char line[1024];
    CHECK(!sh("$G help"), "help: %s", out);
    for (const char *rest = out; next_line(&rest, line);)
        if (!strncmp(line, "  ", 2) && n_commands < MOST) sscanf(line, "%31s %511[^\n]", commands[n_commands].name, commands[n_commands].help), n_commands++;
    CHECK(n_commands >= 11, "help lists %d commands", n_commands);
    for (int c = 0; c < n_commands; c++) {
        int examples = 0;
        struct command *k = &commands[c];
        CHECK(!sh("$G help %s", k->name), "help %s: %s", k->name, out);
        snprintf(k->usage, sizeof k->usage, "%.*s", (int)strcspn(out, "\n"), out);
        for (const char *rest = out; next_line(&rest, line);) {
            if (!strcmp(line, "Examples:")) examples = 1;
            else if (examples && !strncmp(line, "  ", 2) && strlen(k->examples) + strlen(line) < sizeof k->examples) strcat(strcat(k->examples, line + 2), "\n");
            else if (!strncmp(line, "  ", 2)) read_option(line, c);
        }
        CHECK(strstr(k->examples, k->name), "help %s has an example of it: %s", k->name, k->examples);
    }
    CHECK(n_options >= 29, "there are %d options", n_options);
}

static int is_for_all(const option *o) { return o->commands == ((uint64_t)1 << n_commands) - 1; }

/* ---- gemma4.1 ------------------------------------------------------------------------------------------------------------ */

/* The two lines of an option, after a newline: how it is written, and the commands that take it. */
static const char *lines_of(const option *o) {
    const char *lines = text("\n.It Fl %s%s%s%s%s\n.Pq Cm", *o->letter ? o->letter + 1 : "", *o->letter ? " , Fl " : "", o->name + 1,
                             o->optional ? " Ns Op = Ns Ar " : *o->value ? " Ar " : "", o->value);
    for (int c = 0; c < n_commands && !is_for_all(o); c++)
        if (o->commands >> c & 1) lines = text("%s %s", lines, commands[c].name);
    return text(is_for_all(o) ? "%s every command\n" : "%s\n", lines);
}

static int has_command(int c) {
    return strstr(page, text("\n.It Cm %s\n", commands[c].name)) || strstr(page, text("\n.It Cm %s ", commands[c].name));
}

static void read_page(void) {
    FILE *f = fopen("gemma4.1", "rb");
    size_t n = f ? fread(page, 1, sizeof page - 1, f) : 0;
    page[n] = 0;
    if (f) fclose(f);
    CHECK(n > 5000 && n < sizeof page - 1, "gemma4.1 has %zu bytes", n);
}

static void put_escaped(FILE *f, const char *p) {
    for (; *p; p++) fprintf(f, *p == '\\' ? "\\e" : "%c", *p);
    fprintf(f, "\n");
}

static void fix_page(void) {
    FILE *f = fopen("gemma4.1", "wb");
    char line[1024];
    if (!f) return;
    for (const char *rest = page; next_line(&rest, line);) {
        if (!strcmp(line, ".It Cm help Op Ar command"))
            for (int c = 0; c < n_commands; c++)
                if (!has_command(c)) fprintf(f, ".It Cm %s\n", commands[c].name), put_escaped(f, commands[c].help);
        if (!strcmp(line, ".It Fl q , Fl -quiet"))
            for (const option *o = options; o < options + n_options; o++)
                if (!strstr(page, text("%.*s\n", (int)strcspn(lines_of(o) + 1, "\n") + 1, lines_of(o)))) fprintf(f, "%s", lines_of(o) + 1), put_escaped(f, o->help);
        const option *o = options;
        while (o < options + n_options && (strncmp(lines_of(o) + 1, line, strlen(line)) || lines_of(o)[strlen(line) + 1] != '\n')) o++;
        if (o < options + n_options && !strncmp(rest, ".Pq Cm ", 7)) {
            fprintf(f, "%s", lines_of(o) + 1);
            next_line(&rest, line);
        } else {
            fprintf(f, "%s\n", line);
        }
    }
    fclose(f);
    read_page();
}

static void test_page(void) {
    char line[1024];
    CHECK(strstr(page, "\n.Os gemma4 " G4_VERSION "\n"), "gemma4.1 is of version " G4_VERSION);
    for (int c = 0; c < n_commands; c++) CHECK(has_command(c), "gemma4.1 has the command %s", commands[c].name);
    CHECK(occurrences(page, "\n.It Cm ") == n_commands, "gemma4.1 has %d commands, the program %d", occurrences(page, "\n.It Cm "), n_commands);
    for (const option *o = options; o < options + n_options; o++)
        CHECK(strstr(page, lines_of(o)), "gemma4.1 has these lines of %s; run `build/test_manual ./gemma4 fix`:%s", o->name, lines_of(o));
    CHECK(occurrences(page, "\n.It Fl ") == n_options, "gemma4.1 has %d options, the program %d", occurrences(page, "\n.It Fl "), n_options);

    CHECK(!sh("grep -ho 'getenv(\"GEMMA4_[A-Z0-9_]*' *.c | sed 's/.*\"//' | sort -u") && *out, "the sources read the environment");
    for (const char *rest = out; next_line(&rest, line);) {
        CHECK(strstr(page, text("\n.It Ev %s\n", line)), "gemma4.1 has the environment variable %s", line);
    }
    if (have("mandoc")) CHECK(!sh("mandoc -Tlint -W warning gemma4.1") && !*out, "mandoc: %s", out);
    else SKIP("mandoc is not installed");
    if (have("groff")) CHECK(!sh("groff -mdoc -ww -z gemma4.1") && !*out, "groff: %s", out);
    else SKIP("groff is not installed");
}

/* ---- Examples ------------------------------------------------------------------------------------------------------------ */

/* In $D, where the program is found by its name. What would not end, or take long, is only asked whether the options are right. */
static void run_example(const char *where, const char *line) {
    static const char *const slow[] = {"gemma4 bench", "gemma4 serve", "gemma4 chat"};
    int help = 0;
    for (int i = 0; i < 3; i++) help |= strstr(line, slow[i]) != NULL;
    int status = sh("PATH=\"$(dirname $G):$PATH\"; cd $D; %s%s", line, help ? " --help" : "");
    CHECK(status == 0 && !strstr(out, "gemma4: ") && !strstr(out, "not found"), "%s: %s: status %d: %.500s", where, line, status, out);
    CHECK(*out || !strncmp(line, "test ", 5), "%s: %s prints nothing", where, line);
}

static void test_examples(void) {
    char line[1024], plain[1024];
    int found = 0;
    for (int c = 0; c < n_commands; c++)
        for (const char *rest = commands[c].examples; next_line(&rest, line);) run_example(commands[c].name, line);
    for (const char *rest = page; next_line(&rest, line);) {
        if (strncmp(line, ".Dl ", 4)) continue;
        char *to = plain;
        for (const char *p = line + 4; *p; p++) {
            if (!strncmp(p, "\\(dq", 4)) *to++ = '"', p += 3;
            else if (!strncmp(p, "\\(aq", 4)) *to++ = '\'', p += 3;
            else if (*p == '\\' && p[1] == 'e') *to++ = '\\', p++;
            else *to++ = *p;
        }
        *to = 0;
        run_example("gemma4.1", plain);
        found++;
    }
    CHECK(found >= 5, "gemma4.1 has %d examples", found);
}

/* ---- Completion ---------------------------------------------------------------------------------------------------------- */

/* The words that bash's completion offers after `words`, one a line. */
static void expect_bash(const char *words, const char *expected) {
    int status = sh("bash --norc -c 'source completion/gemma4.bash; COMP_WORDS=(\"$@\"); COMP_CWORD=$(($# - 1)); _gemma4; printf \"%%s\\n\" \"${COMPREPLY[@]}\"' bash $G %s", words);
    CHECK(status == 0 && !strcmp(out, expected), "bash: gemma4 %s: status %d, offers %s, expected %s", words, status, out, expected);
}

static void test_bash(void) {
    static char expected[8192];
    if (!have("bash")) {
        SKIP("bash is not installed");
        return;
    }
    *expected = 0;
    for (int c = 0; c < n_commands; c++) strcat(strcat(expected, commands[c].name), "\n");
    expect_bash("''", expected);
    expect_bash("help ''", expected);
    for (int c = 0; c < n_commands; c++) {
        *expected = 0;
        CHECK(!sh("$G help %s | grep -o '^  \\(-[a-z],\\|   \\) --[a-z0-9-]*' | cut -c7-", commands[c].name), "the options of %s", commands[c].name);
        strcpy(expected, out);
        expect_bash(text("%s -", commands[c].name), expected);
    }
    expect_bash("detok", "detokenize\n");
    expect_bash("run --prec", "--precision\n");
    expect_bash("run models", "models\n");
    expect_bash("run models models", "\n");
    expect_bash("run -f gemma4.1", "gemma4.1\n");
    expect_bash("run --file = gemma4.1", "gemma4.1\n");
    expect_bash("run --profile gemma4.1", "\n");
    expect_bash("run --profile = gemma4.1", "gemma4.1\n");
    expect_bash("run --seed gemma4.1", "\n");
    expect_bash("run models --seed 3 --qui", "--quiet\n");
    expect_bash("diff gemma4.1 gemma4.1", "gemma4.1\n");
    expect_bash("info --backend sc", "scalar\n");
    expect_bash("info --backend = sc", "scalar\n");
    expect_bash("nosuch -", "\n");
    expect_bash("run --precision ''", "f32\nbf16\nq16\n");
    expect_bash("run --speculate ''", "off\n");
}

/* After an empty line, what zsh's completion gives to _describe and _arguments, one a line; they stand for zsh's own, which need a terminal. */
static int zsh(const char *words) {
    return sh("zsh -f -c 'setopt extendedglob; _arguments() { print -rl -- \"$@\" }; _describe() { print -rl -- \"${(@P)4}\" }; echo; words=(\"$@\"); CURRENT=$#; source completion/_gemma4' zsh $G %s",
              words);
}

static void test_zsh(void) {
    if (!have("zsh")) {
        SKIP("zsh is not installed");
        return;
    }
    CHECK(!zsh("''"), "zsh: %s", out);
    for (int c = 0; c < n_commands; c++) {
        CHECK(strstr(out, text("\n%s:", commands[c].name)), "zsh offers the command %s: %s", commands[c].name, out);
    }
    CHECK(occurrences(out, "\n") == n_commands + 1, "zsh offers %d commands", occurrences(out, "\n"));
    for (int c = 0; c < n_commands; c++) {
        CHECK(!zsh(text("%s ''", commands[c].name)), "zsh: %s: %s", commands[c].name, out);
        int n = 0;
        for (const option *o = options; o < options + n_options; o++) {
            if (!(o->commands >> c & 1)) continue;
            const char *letter = *o->letter ? o->letter : o->name;
            int again = strstr(o->help, "more than once") != NULL; /* else an option excludes itself */
            const char *expected = text("\n%s%s%s[", again ? "*" : text("(%s %s)", letter, o->name), o->name, o->optional ? "=-" : *o->value ? "=" : "");
            CHECK(strstr(out, expected), "zsh: %s:%s in %s", commands[c].name, expected, out);
            const char *colon = strchr(o->value, ':'); /* zsh wants a backslash before it */
            expected = colon ? text("]:%.*s\\%s:", (int)(colon - o->value), o->value, colon) : text("]%s:%s:", o->optional ? ":" : "", o->value);
            CHECK(!*o->value || strstr(out, expected), "zsh: %s: %s in %s", commands[c].name, expected, out);
            n++;
            if (!*o->letter) continue;
            expected = text("\n(%s %s)%s[", letter, o->name, o->letter);
            CHECK(strstr(out, expected), "zsh: %s:%s in %s", commands[c].name, expected, out);
            n++;
        }
        CHECK(occurrences(out, "\n(") + occurrences(out, "\n*--") == n, "zsh: %s has %d options, the program %d: %s", commands[c].name, occurrences(out, "\n("), n, out);
        CHECK(!!strstr(commands[c].usage, "[MODEL]") == !!strstr(out, "\n1:model:_files\n"), "zsh: %s: a model comes first: %s", commands[c].name, out);
    }
    CHECK(!zsh("diff ''") && strstr(out, "\n*:file:_files\n"), "zsh: diff takes files: %s", out);
    CHECK(!zsh("help ''") && strstr(out, "\n:command:(run tokenize "), "zsh: help takes commands: %s", out);
    CHECK(!zsh("info ''") && strstr(out, "]:NAME:(") && strstr(out, "scalar") && strstr(out, "]:f32|bf16|q16:(f32 bf16 q16)\n"), "zsh: values: %s", out);
    CHECK(!zsh("chat ''") && strstr(out, "]:N|off:(  off)\n"), "zsh: words in capitals are no values: %s", out);
    CHECK(!zsh("run ''") && strstr(out, "]::FILE:_files\n") && strstr(out, "]:FILE:_files\n"), "zsh: files: %s", out);
}

int main(int argc, char **argv) {
    if (!realpath(argc > 1 ? argv[1] : "./gemma4", gemma4) || !getcwd(here, sizeof here) || !mkdtemp(dir)) {
        printf("FAILED: usage: test_manual GEMMA4, in the directory that holds gemma4.1\n");
        return 1;
    }
    unsetenv("GEMMA4_BACKEND");
    setenv("GEMMA4_THREADS", "1", 1);
    CHECK(!sh("ln -s '%s/models' $D/models", here), "%s", out); /* for a program that is not beside it */
    read_tables();
    read_page();
    if (argc > 2 && !strcmp(argv[2], "fix")) fix_page();
    test_page();
    test_examples();
    test_bash();
    test_zsh();
    if (sh("rm -rf $D")) printf("%s is left\n", dir);
    return test_done("test_manual");
}
#endif
