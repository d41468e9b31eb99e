#include "options.h"

#include <errno.h>
#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "pattern.h"

enum {
	OPT_OP = 256, OPT_SEED, OPT_DEPTH, OPT_MTU, OPT_PORT, OPT_RANDOM, OPT_BIDIRECTIONAL, OPT_STALL, OPT_ACK_TIMEOUT,
	OPT_PRIVATE, OPT_HOLD_EVERY, OPT_NAP, OPT_VERBOSE, OPT_HELP,
};

static const struct option long_options[] = {
	{ "device", required_argument, NULL, 'd' },
	{ "gid-index", required_argument, NULL, 'x' },
	{ "qps", required_argument, NULL, 'q' },
	{ "size", required_argument, NULL, 's' },
	{ "duration", required_argument, NULL, 'D' },
	{ "count", required_argument, NULL, 'n' },
	{ "op", required_argument, NULL, OPT_OP },
	{ "seed", required_argument, NULL, OPT_SEED },
	{ "depth", required_argument, NULL, OPT_DEPTH },
	{ "mtu", required_argument, NULL, OPT_MTU },
	{ "port", required_argument, NULL, OPT_PORT },
	{ "random-size", no_argument, NULL, OPT_RANDOM },
	{ "bidirectional", no_argument, NULL, OPT_BIDIRECTIONAL },
	{ "stall-timeout", required_argument, NULL, OPT_STALL },
	{ "ack-timeout", required_argument, NULL, OPT_ACK_TIMEOUT },
	{ "private", required_argument, NULL, OPT_PRIVATE },
	{ "hold-every", required_argument, NULL, OPT_HOLD_EVERY },
	{ "nap", required_argument, NULL, OPT_NAP },
	{ "verbose", no_argument, NULL, OPT_VERBOSE },
	{ "help", no_argument, NULL, OPT_HELP },
	{ 0 },
};

static void print_help(void)
{
	puts("vcheck: checks that RDMA operations arrive once, in order and unchanged\n"
	     "\n"
	     "usage: vcheck [options]         server: waits for one client\n"
	     "       vcheck [options] HOST    client: names the workload, the server adopts it\n"
	     "\n"
	     "connection:\n"
	     "  -d, --device NAME      RDMA device (default: the first)\n"
	     "  -x, --gid-index N      GID index (default: a RoCEv2 IPv4 GID, else 0)\n"
	     "      --port N           TCP port of the server (default 18516)\n"
	     "      --mtu BYTES        256, 512, 1024, 2048 or 4096 (default: the port's, the smaller of both sides)\n"
	     "      --ack-timeout N    RC acknowledge timeout, 4.096 us * 2^N (default 19: 2.1 s, seven retries)\n"
	     "      --stall-timeout S  fail when nothing completes for S seconds (default 30)\n"
	     "workload (the client's counts):\n"
	     "      --op OP            send, write, write-imm, read, atomic, mix (all of these but atomic) or all\n"
	     "                         (default send)\n"
	     "  -q, --qps N            queue pairs (default 1)\n"
	     "  -s, --size BYTES       message size, 32 to 16 MiB (default 4096)\n"
	     "      --random-size      seeded lengths from 32 bytes up to --size\n"
	     "      --depth N          messages in flight per queue pair (default 64)\n"
	     "  -n, --count N          messages per queue pair and direction (default 1000 without -D)\n"
	     "  -D, --duration S       run for S seconds\n"
	     "      --seed N           seed of operations, lengths and content (default 1)\n"
	     "      --bidirectional    the server sends too\n"
	     "\n"
	     "      --private MIB      hold so much private memory, change 1/64 of it all the time, and verify it\n"
	     "      --hold-every MS    stand still for 20 ms each MS, by ibv_dump_context, where the library has it\n"
	     "      --nap MS           sleep so long before each round of posts, as a program that computes in between\n"
	     "      --verbose          progress and each defect on stderr\n"
	     "\n"
	     "One JSON line on stdout per side: what this side posted, saw completed, received and found. READs and ATOMICs count\n"
	     "as received where they were posted, so the two sides' \"received\" add up to their \"posted\". longest_gap_ms is the\n"
	     "longest time between two completions (CLOCK_MONOTONIC).\n"
	     "\n"
	     "exit status: 0 all right; 1 a defect, on either side; 2 wrong usage or the setup failed\n"
	     "\n"
	     "example:\n"
	     "  a$ vcheck\n"
	     "  b$ vcheck --op mix -q 4 -s 65536 --random-size -D 10 --seed 7 10.0.0.1");
}

static bool parse_number(const char *option, const char *text, uint64_t low, uint64_t high, uint64_t *number)
{
	char *end;

	errno = 0;
	*number = strtoull(text, &end, 0);
	if (errno || end == text || *end || *text == '-' || *number < low || *number > high) {
		fprintf(stderr, "vcheck: %s %s: give a number from %llu to %llu\n", option, text,
			(unsigned long long)low, (unsigned long long)high);
		return false;
	}
	return true;
}

static bool parse_op(const char *text, uint64_t *op)
{
	for (*op = 0; *op <= OP_ALL; ++*op)
		if (!strcmp(text, op_name(*op)))
			return true;
	fprintf(stderr, "vcheck: --op %s: give one of send, write, write-imm, read, atomic, mix, all\n", text);
	return false;
}

static bool parse_mtu(const char *text, unsigned *mtu)
{
	uint64_t number;

	if (!parse_number("--mtu", text, 256, 4096, &number))
		return false;
	if (number & (number - 1)) {
		fprintf(stderr, "vcheck: --mtu %s: give 256, 512, 1024, 2048 or 4096\n", text);
		return false;
	}
	*mtu = number;
	return true;
}

static bool parse_option(int option, const char *text, struct options *options)
{
	struct workload *load = &options->load;
	uint64_t number;

	switch (option) {
	case 'd':
		options->device = text;
		return true;
	case 'x':
		if (!parse_number("-x", text, 0, 65535, &number))
			return false;
		options->gid_index = number;
		return true;
	case 'q':
		return parse_number("-q", text, 1, MAX_QPS, &load->qps);
	case 's':
		return parse_number("-s", text, MESSAGE_MIN, MAX_SIZE, &load->size);
	case 'D':
		return parse_number("-D", text, 1, MAX_SECONDS, &load->seconds);
	case 'n':
		return parse_number("-n", text, 1, MAX_COUNT, &load->count);
	case OPT_OP:
		return parse_op(text, &load->op);
	case OPT_SEED:
		return parse_number("--seed", text, 0, UINT64_MAX, &load->seed);
	case OPT_DEPTH:
		return parse_number("--depth", text, 1, MAX_DEPTH, &load->depth);
	case OPT_MTU:
		return parse_mtu(text, &options->mtu);
	case OPT_PORT:
		if (!parse_number("--port", text, 1, 65535, &number))
			return false;
		options->port = number;
		return true;
	case OPT_RANDOM:
		load->random_size = true;
		return true;
	case OPT_BIDIRECTIONAL:
		load->bidirectional = true;
		return true;
	case OPT_STALL:
		if (!parse_number("--stall-timeout", text, 1, 86400, &number))
			return false;
		options->stall_seconds = number;
		return true;
	case OPT_ACK_TIMEOUT:
		if (!parse_number("--ack-timeout", text, 0, 31, &number))
			return false;
		options->ack_timeout = number;
		return true;
	case OPT_PRIVATE:
		return parse_number("--private", text, 1, MAX_PRIVATE_MEBIBYTES, &options->private_mebibytes);
	case OPT_HOLD_EVERY:
		if (!parse_number("--hold-every", text, 1, 86400000, &number))
			return false;
		options->hold_every_ms = number;
		return true;
	case OPT_NAP:
		if (!parse_number("--nap", text, 1, 10000, &number))
			return false;
		options->nap_ms = number;
		return true;
	case OPT_VERBOSE:
		options->verbose = true;
		return true;
	default:
		fputs("vcheck: see vcheck --help\n", stderr);
		return false;
	}
}

enum options_result options_parse(int argc, char **argv, struct options *options)
{
	int option;

	*options = (struct options){
		.port = 18516,
		.gid_index = -1,
		.stall_seconds = 30,
		.ack_timeout = 19,
		.load = { .op = OP_SEND, .size = 4096, .seed = 1, .qps = 1, .depth = 64 },
	};
	while ((option = getopt_long(argc, argv, "d:x:q:s:D:n:h", long_options, NULL)) != -1) {
		if (option == OPT_HELP || option == 'h') {
			print_help();
			return OPTIONS_EXIT_OK;
		}
		if (!parse_option(option, optarg, options))
			return OPTIONS_EXIT_USAGE;
	}
	if (argc - optind > 1) {
		fprintf(stderr, "vcheck: one HOST at most, got also %s: see vcheck --help\n", argv[optind + 1]);
		return OPTIONS_EXIT_USAGE;
	}
	if (optind < argc)
		options->host = argv[optind];
	if (options->load.count && options->load.seconds) {
		fputs("vcheck: -n and -D exclude each other: give one\n", stderr);
		return OPTIONS_EXIT_USAGE;
	}
	if (!options->load.seconds && !options->load.count)
		options->load.count = 1000;
	return OPTIONS_RUN;
}
