/* test_readme.c - keeps README.md true: each link [`text`](file#Lnnn) must point at a line of that file that contains text.
 *
 *     build/test_readme ./gemma4          checks
 *     build/test_readme ./gemma4 fix      writes README.md anew with the line numbers that hold now
 */
#include "test.h"

static char *slurp(const char *path) {
    FILE *f = fopen(path, "rb");
    if (!f) return NULL;
    size_t size = 0, got;
    char *text = malloc(1);
    char part[4096];
    while (text && (got = fread(part, 1, sizeof part, f)) > 0) {
        char *more = realloc(text, size + got + 1);
        if (!more) break;
        text = more;
        memcpy(text + size, part, got);
        size += got;
    }
    fclose(f);
    if (text) text[size] = 0;
    return text;
}

/* The number of the only line of `file` that contains text[n]; 0 none, -1 several. */
static int find_line(const char *file, const char *text, size_t n) {
    char *all = slurp(file);
    int found = 0, line = 1;
    for (char *p = all; p && *p; line++) {
        char *end = strchr(p, '\n');
        size_t length = end ? (size_t)(end - p) : strlen(p);
        for (size_t i = 0; i + n <= length; i++)
            if (!strncmp(p + i, text, n)) {
                found = found ? -1 : line;
                break;
            }
        p = end ? end + 1 : p + length;
    }
    free(all);
    return found;
}

int main(int argc, char **argv) {
    char *readme = slurp("README.md");
    int fix = argc > 2 && !strcmp(argv[2], "fix"), links = 0;
    FILE *out = fix && readme ? fopen("README.md", "wb") : NULL;
    for (char *p = readme; p && *p;) {
        char file[200];
        int line;
        char *end = !strncmp(p, "[`", 2) ? strstr(p + 2, "`](") : NULL;
        char *eol = strchr(p, '\n');
        if (end && (!eol || end < eol) && sscanf(end, "`](%199[^#)]#L%d)", file, &line) == 2) {
            int found = find_line(file, p + 2, (size_t)(end - p - 2));
            links++;
            CHECK(found == line || fix, "README.md: %.*s stands in line %d of %s (0: nowhere, -1: more than once), not %d; run `build/test_readme ./gemma4 fix`",
                  (int)(end - p - 2), p + 2, found, file, line);
            if (out) fprintf(out, "%.*s`](%s#L%d)", (int)(end - p), p, file, found);
            p = strchr(end, ')') + 1;
            continue;
        }
        if (out) fputc(*p, out);
        p++;
    }
    if (out) fclose(out);
    CHECK(readme && links >= 15, "README.md: %d links into the source", links);
    free(readme);
    return test_done("readme");
}
