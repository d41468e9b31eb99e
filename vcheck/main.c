/*
 * vcheck: do RDMA operations arrive once, in order and unchanged?
 *
 * Plain libibverbs on RC queue pairs, polling; knows nothing of what is below. A client and a server agree over TCP
 * (exchange.c), make the same plan (plan.c), keep every queue pair busy (run.c: ops.c posts, verify.c verifies),
 * compare their counts and print a JSON line each (report.c).
 */
#include <stdio.h>
#include <stdlib.h>

#include "device.h"
#include "exchange.h"
#include "hold.h"
#include "lane.h"
#include "options.h"
#include "pattern.h"
#include "report.h"
#include "run.h"

struct hello {
	uint64_t version;
	struct workload load;
};

/* What came over TCP is believed no more than a command line. */
static bool workload_is_possible(const struct workload *load)
{
	return load->op <= OP_ALL && load->size >= MESSAGE_MIN && load->size <= MAX_SIZE && load->qps >= 1 &&
	       load->qps <= MAX_QPS && load->depth >= 1 && load->depth <= MAX_DEPTH && load->count <= MAX_COUNT &&
	       load->seconds <= MAX_SECONDS && (load->count || load->seconds);
}

static bool agree_on_workload(struct run *run)
{
	struct hello mine = { EXCHANGE_VERSION, run->report->load }, theirs;

	if (!exchange_swap(run->exchange, &mine, &theirs, sizeof(mine), "the workload", run->report))
		return false;
	if (theirs.version != EXCHANGE_VERSION || !workload_is_possible(&theirs.load))
		return report_setup_error(run->report, "the other side is another version of vcheck, or not vcheck: use "
					  "the same on both");
	if (run->report->server)
		run->report->load = theirs.load;
	return true;
}

static bool create_lanes(struct run *run)
{
	const struct workload *load = run->load;

	run->lanes = calloc(load->qps, sizeof(*run->lanes));
	if (!run->lanes)
		return report_setup_error(run->report, "no memory for %llu queue pairs: lower -q",
					  (unsigned long long)load->qps);
	if (!device_create_queues(run->device, load->qps * lane_send_entries(load), load->qps * lane_recv_entries(load),
				  run->report))
		return false;
	for (uint64_t i = 0; i < load->qps; i++)
		if (!lane_create(&run->lanes[i], i, load, run->report->server, run->device, run->report))
			return false;
	return true;
}

static bool connect_lanes(struct run *run)
{
	uint64_t ready = hold_possible(run->options->hold_every_ms) ? 2 : 1, peer_ready;

	for (uint64_t i = 0; i < run->load->qps; i++) {
		struct lane *lane = &run->lanes[i];
		struct lane_address mine = lane_address(lane, run->device);

		if (!exchange_swap(run->exchange, &mine, &lane->peer, sizeof(mine), "addresses", run->report) ||
		    !lane_connect(lane, &mine, run->device, run->options->ack_timeout))
			return false;
	}
	if (!exchange_swap(run->exchange, &ready, &peer_ready, sizeof(ready), "\"ready\"", run->report))
		return false;
	run->share_secrets = ready == 2 && peer_ready == 2;
	return true;
}

/* From here on what goes wrong is a defect: messages may be lost by it. */
static void compare_totals(struct run *run)
{
	struct totals mine = run->report->totals, peer;
	struct report scratch = { 0 };

	report_check_completed(run->report);
	if (exchange_swap(run->exchange, &mine, &peer, sizeof(mine), "the totals", &scratch))
		report_compare(run->report, &peer);
	else
		report_defect(run->report, &run->report->totals.failed, "%s", scratch.error);
}

static void destroy(struct run *run)
{
	for (uint64_t i = 0; run->lanes && i < run->load->qps; i++)
		lane_destroy(&run->lanes[i]);
	free(run->lanes);
	device_close(run->device);
	exchange_close(run->exchange);
	private_destroy(run->private_memory);
}

int main(int argc, char **argv)
{
	struct options options;
	struct report report = { 0 };
	struct device device = { 0 };
	struct exchange exchange = { .fd = -1 };
	struct private_memory private_memory = { 0 };
	struct run run = {
		.options = &options,
		.load = &report.load,
		.device = &device,
		.exchange = &exchange,
		.private_memory = &private_memory,
		.report = &report,
	};

	switch (options_parse(argc, argv, &options)) {
	case OPTIONS_EXIT_OK:
		return 0;
	case OPTIONS_EXIT_USAGE:
		return 2;
	case OPTIONS_RUN:
		break;
	}
	report.server = !options.host;
	report.load = options.load;
	report.verbose = options.verbose;
	if (private_create(&private_memory, options.private_mebibytes, options.load.seed, &report) &&
	    device_open(&device, &options, &report) && exchange_open(&exchange, &options, &report) &&
	    agree_on_workload(&run) && create_lanes(&run) && connect_lanes(&run)) {
		run_lanes(&run);
		compare_totals(&run);
	}
	destroy(&run);
	return report_print(&report);
}
