/* Sorts numbers, and says how long that took: quicksort, alone, with nothing but the numbers in memory.
 *
 *   sort MIB SEED
 *
 * The numbers have 64 bits of which 32 are used, so that half of each page says nothing. It ends with 0 if they are in order in the end, and the
 * same numbers as before by their sum and by the sum of a function of each; with 1 if not. */
#include "work.h"

enum { SMALL = 16 };

static void insertion_sort(uint64_t *first, uint64_t *end)
{
    for (uint64_t *next = first + 1; next < end; next++) {
        uint64_t number = *next, *at = next;
        for (; at > first && at[-1] > number; at--)
            *at = at[-1];
        *at = number;
    }
}

static uint64_t middle(uint64_t a, uint64_t b, uint64_t c)
{
    if (a > b) {
        uint64_t other = a;
        a = b, b = other;
    }
    return c < a ? a : c > b ? b : c;
}

/* The larger part is done by the loop: so the stack has 64 frames at most. */
static void quicksort(uint64_t *first, uint64_t *end)
{
    while (end - first > SMALL) {
        uint64_t pivot = middle(*first, first[(end - first) / 2], end[-1]);
        uint64_t *low = first, *high = end - 1;
        for (;;) {
            while (*low < pivot)
                low++;
            while (*high > pivot)
                high--;
            if (low >= high)
                break;
            uint64_t other = *low;
            *low++ = *high, *high-- = other;
        }
        /* Numbers before `low` are not above the pivot, from there on not below it; where both have met, that one is either. */
        if (low == first)
            low++;
        if (low - first < end - low) {
            quicksort(first, low);
            first = low;
        } else {
            quicksort(low, end);
            end = low;
        }
    }
    insertion_sort(first, end);
}

struct sums {
    uint64_t plain, mixed;
};

static struct sums sums_of(const uint64_t *numbers, size_t count)
{
    struct sums sums = { 0, 0 };
    for (size_t at = 0; at < count; at++)
        sums.plain += numbers[at], sums.mixed += mix(numbers[at]);
    return sums;
}

int main(int argc, char **argv)
{
    if (argc != 3)
        return fputs("sort MIB SEED\n", stderr), 2;
    size_t bytes = strtoull(argv[1], NULL, 0) << 20, count = bytes / sizeof(uint64_t);
    uint64_t seed = mix(strtoull(argv[2], NULL, 0)), *numbers = memory(bytes);
    struct sums before = { 0, 0 };
    for (size_t at = 0; at < count; at++) {
        numbers[at] = mix(seed ^ at) >> 32;
        before.plain += numbers[at], before.mixed += mix(numbers[at]);
    }
    struct stretch from = begin();
    quicksort(numbers, numbers + count);
    end(from);
    for (size_t at = 1; at < count; at++)
        if (numbers[at - 1] > numbers[at])
            return fprintf(stderr, "number %zu of %zu is out of order\n", at, count), 1;
    struct sums after = sums_of(numbers, count);
    if (before.plain != after.plain || before.mixed != after.mixed)
        return fputs("the numbers are others than before\n", stderr), 1;
    return 0;
}
