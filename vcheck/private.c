#include "private.h"

#include <string.h>
#include <sys/mman.h>

enum { PAGE = 4096, WORDS = PAGE / 8 };
enum { CHANGING_PART = 64 };			/* one page of so many */
enum { STEP_NS = 2 * 1000 * 1000 };

/* The finaliser of SplitMix64 (Steele, Lea, Flood: "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014). */
static uint64_t mix(uint64_t value)
{
	value = (value ^ value >> 30) * 0xbf58476d1ce4e5b9ull;
	value = (value ^ value >> 27) * 0x94d049bb133111ebull;
	return value ^ value >> 31;
}

static uint64_t word_of(const struct private_memory *memory, uint64_t page, uint64_t version, unsigned word)
{
	return mix(memory->seed ^ mix(page << 32 ^ version) ^ (uint64_t)word * 0x9e3779b97f4a7c15ull);
}

static uint64_t version_of(const struct private_memory *memory, uint64_t page)
{
	if (page >= memory->changing)
		return 0;
	return memory->writes / memory->changing + (page < memory->writes % memory->changing);
}

static void fill(struct private_memory *memory, uint64_t page)
{
	uint64_t words[WORDS], version = version_of(memory, page);

	for (unsigned word = 0; word < WORDS; word++)
		words[word] = word_of(memory, page, version, word);
	memcpy(memory->bytes + page * PAGE, words, PAGE);
}

static void verify(const struct private_memory *memory, uint64_t page, struct report *report)
{
	uint64_t words[WORDS], version = version_of(memory, page);

	memcpy(words, memory->bytes + page * PAGE, PAGE);
	for (unsigned word = 0; word < WORDS; word++) {
		if (words[word] == word_of(memory, page, version, word))
			continue;
		report_defect(report, &report->totals.corrupted, "private memory: page %llu is not its version %llu from "
			      "byte %u on", (unsigned long long)page, (unsigned long long)version, word * 8);
		return;
	}
}

bool private_create(struct private_memory *memory, uint64_t mebibytes, uint64_t seed, struct report *report)
{
	void *bytes;

	if (!mebibytes)
		return true;
	bytes = mmap(NULL, mebibytes << 20, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (bytes == MAP_FAILED)
		return report_setup_error(report, "no memory for --private %llu: give less",
					  (unsigned long long)mebibytes);
	*memory = (struct private_memory){
		.bytes = bytes,
		.pages = (mebibytes << 20) / PAGE,
		.changing = (mebibytes << 20) / PAGE / CHANGING_PART,
		.seed = seed,
	};
	for (uint64_t page = 0; page < memory->pages; page++)
		fill(memory, page);
	return true;
}

void private_step(struct private_memory *memory, int64_t now_ns, struct report *report)
{
	uint64_t page, quiet;

	if (!memory->bytes || now_ns < memory->next_ns)
		return;
	memory->next_ns = now_ns + STEP_NS;
	quiet = memory->pages - memory->changing;
	verify(memory, memory->changing + memory->writes % quiet, report);
	page = memory->writes % memory->changing;
	verify(memory, page, report);
	memory->writes++;
	fill(memory, page);
}

void private_verify(const struct private_memory *memory, struct report *report)
{
	for (uint64_t page = 0; memory->bytes && page < memory->pages; page++)
		verify(memory, page, report);
}

void private_destroy(struct private_memory *memory)
{
	if (memory->bytes)
		munmap(memory->bytes, memory->pages * PAGE);
	memory->bytes = NULL;
}
