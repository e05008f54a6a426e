/* test.h - the few lines that every test program shares. A program includes it once, calls CHECK for each fact, SKIP for each
 * fact that it could not look at, and ends with `return test_done("name");`. test/run.sh adds up the last lines. */
#ifndef TEST_H
#define TEST_H

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int test_passed, test_failed, test_skipped;

/* CHECK(condition, "what is checked, with the values", ...): counted; printed when it fails. A NaN must make the condition false. */
#define CHECK(condition, ...) \
    do { \
        if (condition) { \
            test_passed++; \
        } else { \
            test_failed++; \
            printf("FAILED %s:%d: %s: ", __FILE__, __LINE__, #condition); \
            printf(__VA_ARGS__); \
            printf("\n"); \
            fflush(stdout); \
        } \
    } while (0)

#define SKIP(...) \
    do { \
        test_skipped++; \
        printf("skipped: "); \
        printf(__VA_ARGS__); \
        printf("\n"); \
    } while (0)

static int test_done(const char *name) {
    if (!test_passed && !test_failed && !test_skipped) {
        printf("FAILED %s: no check was made\n", name);
        test_failed++;
    }
    printf("%s: %d passed, %d failed, %d skipped\n", name, test_passed, test_failed, test_skipped);
    return test_failed != 0;
}

#endif
