/* test_ulp.c - the elementwise functions against long double, in ulp.
 *
 *     build/test_ulp ./gemma4 [STRIDE [NAME]]     every STRIDE-th float32 of each range (of NAME alone); 1 is all of them: half an hour in all
 *
 * An ulp is the spacing of float32 at the exact value (of the subnormals below FLT_MIN), so a correctly rounded result is at most 0.5 away. The
 * reference is the C library's long double function: 64 bits of mantissa on x86, 2^-40 ulp. Its double function tells first which inputs cannot be
 * the worst. Where long double is no wider than double, only the inputs that were found to be the worst are looked at.
 */
#include "gemma4.h"
#include "test.h"

#include <float.h>
#include <math.h>

#define MIN(a, b) ((a) < (b) ? (a) : (b))

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
static double double_pow_1e4(double e) { return pow(1e4, e); }
static double double_pow_1e6(double e) { return pow(1e6, e); }
static long double gelu(long double x) {
    return 0.5L * x * (1 + tanhl(sqrtl(2 / 3.14159265358979323846264338327950288L) * (x + 0.044715L * x * x * x)));
}
static double double_gelu(double x) { return 0.5 * x * (1 + tanh(0.79788456080286536 * (x + 0.044715 * x * x * x))); }

/* |y - exact| in ulp of `of`. */
static double ulps(float y, long double exact, long double of) {
    int e;
    long double size = fabsl(of);
    if (size < FLT_MIN) size = FLT_MIN;
    frexpl(size, &e);
    return (double)(fabsl(y - exact) / ldexpl(1, e - 24));
}

/* An ulp of x. */
static double spacing(double x) {
    uint64_t bits;
    memcpy(&bits, &x, 8);
    bits &= 0x7ff0000000000000u;
    memcpy(&x, &bits, 8);
    return x < FLT_MIN ? 0x1p-149 : x * 0x1p-23;
}

static const struct range {
    const char *name;
    float (*f)(float);
    long double (*exact)(long double);
    double (*nearly)(double); /* the same, quicker */
    float low, high; /* 0 <= low: by bit pattern; sign -1 takes the negative of both */
    int sign;
    int of_x;        /* in ulp of the argument */
    double worst;    /* of all inputs, as the comment beside the function says */
    float at, y;     /* where, and the result there */
} ranges[] = {
    {"exp", g4_expf, expl, exp, 0, 88.7228f, 1, 0, 0.499999994917, 0x1.fdff02p-17f, 0x1.0001p+0f},
    {"exp", g4_expf, expl, exp, 0, 104, -1, 0, 0.499999997644, -0x1.d2259ap+3f, 0x1.fa6636p-22f},
    {"tanh", g4_tanhf, tanhl, tanh, 0, 12, 1, 0, 0.499999990619, 0x1.86fbc4p-10f, 0x1.86fbb2p-10f},
    {"tanh", g4_tanhf, tanhl, tanh, 0, 12, -1, 0, 0.499999990619, -0x1.86fbc4p-10f, -0x1.86fbb2p-10f},
    {"sin", sin_of, sinl, sin, 0, 262144, 1, 0, 0.500000000657, 0x1.33333p+13f, -0x1.63f4bcp-2f},
    {"sin", sin_of, sinl, sin, 262144, 4e7f, 1, 0, 0.499999994068, 0x1.cf9736p+19f, 0x1.93bf0ap-2f},
    {"cos", cos_of, cosl, cos, 0, 262144, 1, 0, 0.499999998306, 0x1.20ffccp-7f, 0x1.fffae8p-1f},
    {"cos", cos_of, cosl, cos, 262144, 4e7f, 1, 0, 0.499999994254, 0x1.03b948p+21f, 0x1.61663p-1f},
    {"log", g4_logf, logl, log, 0x1p-149f, FLT_MAX, 1, 0, 0.500000000851, 0x1.6351d8p+95f, 0x1.08b51p+6f},
    {"pow(1e4, x)", pow_1e4, powl_1e4, double_pow_1e4, 0, 1, 1, 0, 0.499999996115, 0x1.62623ep-22f, 0x1.000032p+0f},
    {"pow(1e6, x)", pow_1e6, powl_1e6, double_pow_1e6, 0, 1, 1, 0, 0.499999996649, 0x1.5d0024p-7f, 0x1.2894d6p+0f},
    {"gelu_tanh", g4_gelu_tanh, gelu, double_gelu, 0, 100, 1, 1, 1.621210348622, 0x1.fff298p-1f, 0x1.aea236p-1f},
    {"gelu_tanh", g4_gelu_tanh, gelu, double_gelu, 0, 100, -1, 1, 0.924423148995, -0x1.fc0d48p-2f, -0x1.3aebc6p-3f},
};

static float float_of(uint32_t bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

static uint32_t bits_of(float x) {
    uint32_t b;
    memcpy(&b, &x, 4);
    return b;
}

/* The largest error so far, where it was, and how many were above one half. */
typedef struct tally {
    double worst;
    float at;
    long long n, above;
} tally;

static void count(tally *t, double error, float at) {
    if (!(error <= t->worst)) t->worst = error, t->at = at;
    if (!(error <= 0.5)) t->above++;
}

static void add(tally *t, const tally *part) {
    long long n = t->n + part->n, above = t->above + part->above;
    if (!(part->worst <= t->worst)) *t = *part;
    t->n = n, t->above = above;
}

static tally measure(const struct range *r, int64_t stride) {
    int64_t first = bits_of(r->low), last = bits_of(r->high), n = (last - first) / stride + 1;
    tally all = {0};
#pragma omp parallel for schedule(dynamic)
    for (int64_t part = 255; part >= 0; part--) { /* from the top: the errors of small arguments grow with each */
        tally mine;
#pragma omp critical
        mine = all;
        mine.n = mine.above = 0;
        for (int64_t k = n * part / 256; k < n * (part + 1) / 256; k++) {
            float x = (float)r->sign * float_of((uint32_t)(first + k * stride)), y = r->f(x);
            double d = r->nearly(x);
            mine.n++;
            if (fabs(y - d) < (MIN(mine.worst, 0.5) - 1e-5) * spacing(r->of_x ? (double)x : d)) continue; /* neither the worst nor above one half */
            long double exact = r->exact(x);
            count(&mine, ulps(y, exact, r->of_x ? x : exact), x);
        }
#pragma omp critical
        add(&all, &mine);
    }
    return all;
}

/* The angles of RoPE: position * inv_freq in float32, for both thetas and both head_dims of the published models. The exact value is that of
 * the float32 angle. */
static void rope(int64_t stride, int aloud) {
    static const float theta[] = {1e4f, 1e6f};
    static const int head_dim[] = {256, 512};
    for (int k = 0; k < 4; k++) {
        int half = head_dim[k / 2] / 2;
        tally sines = {0}, cosines = {0};
#pragma omp parallel for schedule(dynamic)
        for (int i = 0; i < half; i++) {
            float inv_freq = 1.0f / g4_powf(theta[k % 2], (float)(2 * i) / (float)head_dim[k / 2]), s, c;
            tally my_sines = {0}, my_cosines = {0};
            for (int64_t pos = 0; pos < 262144; pos += stride) {
                float angle = (float)pos * inv_freq;
                g4_sincosf(angle, &s, &c);
                long double exact_sin = sinl(angle), exact_cos = cosl(angle);
                count(&my_sines, ulps(s, exact_sin, exact_sin), angle);
                count(&my_cosines, ulps(c, exact_cos, exact_cos), angle);
                my_sines.n++;
            }
#pragma omp critical
            add(&sines, &my_sines), add(&cosines, &my_cosines);
        }
        CHECK(sines.worst <= 0.5000001 && cosines.worst <= 0.5000001, "RoPE, theta %g, head_dim %d: sin %.9f ulp at %a, cos %.9f ulp at %a", theta[k % 2],
              head_dim[k / 2], sines.worst, sines.at, cosines.worst, cosines.at);
        if (aloud)
            printf("RoPE, theta %g, head_dim %d: %lld angles, sin %.12f ulp at %a, cos %.12f ulp at %a\n", theta[k % 2], head_dim[k / 2], sines.n,
                   sines.worst, sines.at, cosines.worst, cosines.at);
        fflush(stdout);
    }
}

/* g4_exp and g4_log, whose arguments are too many to try them all: relative errors of about n samples. */
static void doubles(int64_t n, int aloud) {
    double worst_exp = 0, worst_log = 0, at_exp = 0, at_log = 0;
    uint64_t state = 1;
    for (int64_t i = 0; i < n; i++) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        double x = ((double)(state >> 11) * 0x1p-53 - 0.5) * 1400, y;
        double error = (double)fabsl(g4_exp(x) / expl(x) - 1);
        if (!(error <= worst_exp)) worst_exp = error, at_exp = x;
        uint64_t bits = (state ^ state >> 31) * 0x9e3779b97f4a7c15u;
        bits = (bits >> 1) % (((uint64_t)2046 << 52) - 1) + ((uint64_t)1 << 52); /* the normal ones */
        if (i % 2) bits = 0x3ff0000000000000u - (bits >> 11) + (bits >> 12); /* near 1, where the logarithm is small */
        memcpy(&y, &bits, 8);
        long double exact = logl(y);
        error = exact == 0 ? g4_log(y) != 0 : (double)fabsl(g4_log(y) / exact - 1);
        if (!(error <= worst_log)) worst_log = error, at_log = y;
    }
    CHECK(worst_exp <= 1e-14 && worst_log <= 1e-14, "in double: exp(%a) is off by %g, log(%a) by %g", at_exp, worst_exp, at_log, worst_log);
    if (aloud) printf("in double, %lld samples: exp %.2e at %a, log %.2e at %a\n", (long long)n, worst_exp, at_exp, worst_log, at_log);
}

int main(int argc, char **argv) {
    int64_t stride = argc > 2 ? atoll(argv[2]) : 20011;
    const char *only = argc > 3 ? argv[3] : NULL;
    if (stride < 1) stride = 1;
    for (size_t i = 0; i < sizeof ranges / sizeof *ranges; i++)
        CHECK(ranges[i].f(ranges[i].at) == ranges[i].y, "%s at %a: %a, expected %a", ranges[i].name, ranges[i].at, ranges[i].f(ranges[i].at), ranges[i].y);
    if (LDBL_MANT_DIG < 64) {
        SKIP("long double has %d bits here", LDBL_MANT_DIG);
        return test_done("ulp");
    }
    for (size_t i = 0; i < sizeof ranges / sizeof *ranges; i++) {
        const struct range *r = &ranges[i];
        if (only && strcmp(only, r->name)) continue;
        long double exact = r->exact(r->at);
        double there = ulps(r->y, exact, r->of_x ? r->at : exact);
        CHECK(fabs(there - r->worst) < 1e-9, "%s at %a: %.12f ulp, expected %.12f", r->name, r->at, there, r->worst);
        tally t = measure(r, stride);
        CHECK(t.worst < r->worst + 1e-9, "%s at %a: %.12f ulp, promised %.12f", r->name, t.at, t.worst, r->worst);
        if (argc > 2)
            printf("%-12s %s%g .. %g: %lld inputs, worst %.12f ulp at %a, %lld above one half\n", r->name, r->sign < 0 ? "-" : "", r->low, r->high, t.n, t.worst,
                   t.at, t.above);
        fflush(stdout);
    }
    if (!only || !strcmp(only, "rope")) rope(argc > 2 ? stride : 1009, argc > 2);
    if (!only || !strcmp(only, "double")) doubles(stride == 1 ? 100000000 : 200000, argc > 2);
    return test_done("ulp");
}
