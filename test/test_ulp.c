/* test_ulp.c - the elementwise functions against long double, in ulp.
 *
 *     build/test_ulp ./gemma4 [STRIDE]     every STRIDE-th float32 of each range; 1 is all of them (some minutes)
 *
 * The reference is the C library's long double function (64 bits of mantissa on x86: its own error is below 1e-3 ulp of float32 / 2^30). Where long
 * double is no wider than double the test is skipped.
 */
#include "gemma4.h"
#include "test.h"

#include <float.h>
#include <math.h>

/* |y - exact| in units of the spacing of float32 at exact (of the subnormals below FLT_MIN). */
static double ulp_error(float y, long double exact) {
    int e;
    long double size = fabsl(exact);
    if (size < FLT_MIN) size = FLT_MIN;
    frexpl(size, &e);
    return (double)(fabsl(y - exact) / ldexpl(1, e - 24));
}

static float sin_of(float x) {
    float s, c;
    g4_sincosf(x, &s, &c);
    return s;
}
static float cos_of(float x) {
    float s, c;
    g4_sincosf(x, &s, &c);
    return c;
}
static float pow_1e4(float e) { return g4_powf(1e4f, e); }
static float pow_1e6(float e) { return g4_powf(1e6f, e); }
static long double powl_1e4(long double e) { return powl(1e4L, e); }
static long double powl_1e6(long double e) { return powl(1e6L, e); }

static const struct range {
    const char *name;
    float (*f)(float);
    long double (*exact)(long double);
    float low, high; /* 0 <= low: by bit pattern; sign -1 takes the negative of both */
    int sign;
    double bar;      /* what the comment beside the function promises */
} ranges[] = {
    {"exp", g4_expf, expl, 0, 88.72f, 1, 0.5000001},
    {"exp", g4_expf, expl, 0, 104, -1, 0.5000001},
    {"tanh", g4_tanhf, tanhl, 0, 12, 1, 0.5000001},
    {"tanh", g4_tanhf, tanhl, 0, 12, -1, 0.5000001},
    {"sin", sin_of, sinl, 0, 262144, 1, 0.5000001},
    {"cos", cos_of, cosl, 0, 262144, 1, 0.5000001},
    {"log", g4_logf, logl, 0x1p-149f, FLT_MAX, 1, 0.5000001},
    {"pow(1e4, x)", pow_1e4, powl_1e4, 0, 1, 1, 0.5000001},
    {"pow(1e6, x)", pow_1e6, powl_1e6, 0, 1, 1, 0.5000001},
};

static uint32_t bits_of(float x) {
    uint32_t b;
    memcpy(&b, &x, 4);
    return b;
}

int main(int argc, char **argv) {
    int64_t stride = argc > 2 ? atoll(argv[2]) : 20011;
    if (LDBL_MANT_DIG < 64) {
        SKIP("long double has %d bits here", LDBL_MANT_DIG);
        return test_done("ulp");
    }
    if (stride < 1) stride = 1;
    for (size_t i = 0; i < sizeof ranges / sizeof *ranges; i++) {
        const struct range *r = &ranges[i];
        int64_t first = bits_of(r->low), last = bits_of(r->high), n = (last - first) / stride + 1;
        double worst = 0;
        float at = 0;
#pragma omp parallel for schedule(static)
        for (int64_t part = 0; part < 64; part++) {
            double part_worst = 0;
            float part_at = 0;
            for (int64_t k = n * part / 64; k < n * (part + 1) / 64; k++) {
                uint32_t b = (uint32_t)(first + k * stride);
                float x;
                memcpy(&x, &b, 4);
                x *= (float)r->sign;
                double error = ulp_error(r->f(x), r->exact(x));
                if (!(error <= part_worst)) part_worst = error, part_at = x;
            }
#pragma omp critical
            if (!(part_worst <= worst)) worst = part_worst, at = part_at;
        }
        CHECK(worst <= r->bar, "%s at %a: %.9f ulp, promised %.7f", r->name, at, worst, r->bar);
        if (argc > 2) printf("%-12s %s%g .. %g: %lld inputs, worst %.9f ulp at %a\n", r->name, r->sign < 0 ? "-" : "", r->low, r->high, (long long)n, worst, at);
    }
    return test_done("ulp");
}
