/* A Fourier transformation of three dimensions, there and back, and how long both took.
 *
 *   fft X Y Z SEED
 *
 * X, Y and Z are powers of two; a point is a complex number of 16 bytes. As in the benchmark FT of NAS all is in one array, and each dimension is
 * transformed in place, some lines at a time, by way of a buffer. It ends with 0 if some of the frequencies are what they are by definition, and all points are
 * what they were in the end; with 1 if not. */
#include "work.h"
#include <complex.h>
#include <math.h>

/* Lines that are transformed together. A smaller dimension is not allowed. */
enum { LINES = 16, PROBES = 4 };

typedef double complex point;

struct grid {
    size_t x, y, z;
    point *points;
};

/* The roots of one, and two buffers for LINES lines. */
struct plan {
    size_t length;
    point *roots, *buffer, *other;
};

static struct plan plan_of(size_t length, int sign)
{
    struct plan plan = { length, memory(length * sizeof(point)), memory(length * LINES * sizeof(point)), memory(length * LINES * sizeof(point)) };
    for (size_t at = 0; at < length; at++)
        plan.roots[at] = cexp(sign * 2 * M_PI * I * at / length);
    return plan;
}

static void forget(struct plan plan)
{
    munmap(plan.roots, plan.length * sizeof(point));
    munmap(plan.buffer, plan.length * LINES * sizeof(point));
    munmap(plan.other, plan.length * LINES * sizeof(point));
}

/* Stockham's way: what is in `buffer`, point by point of all lines, is transformed; where the outcome is. */
static point *transform(struct plan plan)
{
    point *from = plan.buffer, *to = plan.other;
    for (size_t length = plan.length, step = LINES; length > 1; length /= 2, step *= 2) {
        size_t half = length / 2;
        for (size_t at = 0; at < half; at++) {
            double c = creal(plan.roots[at * (plan.length / length)]), s = cimag(plan.roots[at * (plan.length / length)]);
            const point *a = from + step * at, *b = from + step * (at + half);
            point *sum = to + step * 2 * at, *difference = sum + step;
            for (size_t line = 0; line < step; line++) {
                double re = creal(a[line]) - creal(b[line]), im = cimag(a[line]) - cimag(b[line]);
                sum[line] = a[line] + b[line];
                difference[line] = CMPLX(re * c - im * s, re * s + im * c);
            }
        }
        point *swap = from;
        from = to, to = swap;
    }
    return from;
}

/* LINES lines, whose first points are `between` apart, and the points of each `along`. */
static void lines(struct plan plan, point *first, size_t between, size_t along)
{
    for (size_t at = 0; at < plan.length; at++)
        for (size_t line = 0; line < LINES; line++)
            plan.buffer[at * LINES + line] = first[line * between + at * along];
    const point *done = transform(plan);
    for (size_t at = 0; at < plan.length; at++)
        for (size_t line = 0; line < LINES; line++)
            first[line * between + at * along] = done[at * LINES + line];
}

static void all_dimensions(struct grid grid, int sign)
{
    size_t plane = grid.x * grid.y;
    struct plan plan = plan_of(grid.x, sign);
    for (size_t row = 0; row < grid.y * grid.z; row += LINES)
        lines(plan, grid.points + row * grid.x, grid.x, 1);
    forget(plan);
    plan = plan_of(grid.y, sign);
    for (size_t z = 0; z < grid.z; z++)
        for (size_t x = 0; x < grid.x; x += LINES)
            lines(plan, grid.points + z * plane + x, 1, grid.x);
    forget(plan);
    plan = plan_of(grid.z, sign);
    for (size_t y = 0; y < grid.y; y++)
        for (size_t x = 0; x < grid.x; x += LINES)
            lines(plan, grid.points + y * grid.x + x, 1, plane);
    forget(plan);
}

static point original(uint64_t seed, size_t at)
{
    uint64_t random = mix(seed ^ at);
    return CMPLX((random >> 32) / 4294967296.0 - 0.5, (random & 0xffffffff) / 4294967296.0 - 0.5);
}

/* A frequency, and what it is by definition. */
struct probe {
    size_t x, y, z;
    point value;
};

static int is_near(point a, point b, double by)
{
    return cabs(a - b) <= by;
}

int main(int argc, char **argv)
{
    struct grid grid = { 0 };
    if (argc == 5)
        grid.x = strtoull(argv[1], NULL, 0), grid.y = strtoull(argv[2], NULL, 0), grid.z = strtoull(argv[3], NULL, 0);
    for (int at = 0; at < 3; at++) {
        size_t size = at == 0 ? grid.x : at == 1 ? grid.y : grid.z;
        if (size < LINES || (size & (size - 1)) != 0)
            return fprintf(stderr, "fft X Y Z SEED, each of the first a power of two, and at least %d\n", LINES), 2;
    }
    uint64_t seed = mix(strtoull(argv[4], NULL, 0));
    size_t plane = grid.x * grid.y, count = plane * grid.z;
    grid.points = memory(count * sizeof(point));

    struct probe probes[PROBES];
    struct plan x = plan_of(grid.x, -1), y = plan_of(grid.y, -1), z = plan_of(grid.z, -1);
    for (int at = 0; at < PROBES; at++) {
        uint64_t random = mix(seed + at);
        probes[at] = (struct probe){ random % grid.x, (random >> 20) % grid.y, (random >> 40) % grid.z, 0 };
    }
    for (size_t row = 0; row < grid.y * grid.z; row++) {
        point sums[PROBES] = { 0 };
        for (size_t at = 0; at < grid.x; at++) {
            point value = original(seed, row * grid.x + at);
            grid.points[row * grid.x + at] = value;
            for (int probe = 0; probe < PROBES; probe++)
                sums[probe] += value * x.roots[at * probes[probe].x % grid.x];
        }
        for (int probe = 0; probe < PROBES; probe++)
            probes[probe].value += sums[probe] * y.roots[row % grid.y * probes[probe].y % grid.y] * z.roots[row / grid.y * probes[probe].z % grid.z];
    }
    forget(x), forget(y), forget(z);

    struct stretch from = begin();
    all_dimensions(grid, -1);
    int is_right = 1;
    for (int at = 0; at < PROBES; at++)
        is_right &= is_near(grid.points[probes[at].z * plane + probes[at].y * grid.x + probes[at].x], probes[at].value, 1e-11 * count);
    all_dimensions(grid, 1);
    end(from);
    if (!is_right)
        return fputs("a frequency is not what it should be\n", stderr), 1;
    for (size_t at = 0; at < count; at++)
        if (!is_near(grid.points[at] / count, original(seed, at), 1e-12))
            return fprintf(stderr, "point %zu of %zu is not what it was\n", at, count), 1;
    return 0;
}
