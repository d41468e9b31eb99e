#include "run.h"

#include <signal.h>
#include <stdio.h>
#include <time.h>

#include "hold.h"
#include "ops.h"
#include "queues.h"
#include "verify.h"

enum {
	POLL_BATCH = 32,
	EMPTY_POLLS_BEFORE_NAP = 64,
	/* Only the timer's slack: some 50 us. */
	SHORT_NAP_NS = 1,
	/* After this long without a completion the naps are longer: the software RNICs need the processors. */
	LONG_NAPS_AFTER_NS = 10 * 1000 * 1000,
	LONG_NAP_NS = 100 * 1000,
	PEER_LOOK_NS = 100 * 1000 * 1000,
	PROGRESS_NS = 1000 * 1000 * 1000,
};

/*
 * Time as this process lives it. A program that is frozen and restored elsewhere may see CLOCK_MONOTONIC jump, so a
 * long step between two looks counts as a short one for timeouts; the gap between completions is measured as it is.
 */
struct stopwatch {
	int64_t now_ns, start_ns;
	int64_t last_completion_ns;
	int64_t idle_ns;		/* lived since the last completion */
	int64_t longest_gap_ns;
	unsigned empty_polls;
	int64_t next_peer_look_ns;
	int64_t next_progress_ns;
};

static volatile sig_atomic_t interrupted;

static void interrupt(int number)
{
	(void)number;
	interrupted = 1;
}

static int64_t monotonic_ns(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return now.tv_sec * 1000000000ll + now.tv_nsec;
}

static void tick(struct stopwatch *watch, bool completed)
{
	const int64_t longest_step_ns = 1000000000;
	int64_t now = monotonic_ns(), step = now - watch->now_ns;

	watch->now_ns = now;
	if (completed) {
		if (watch->last_completion_ns && now - watch->last_completion_ns > watch->longest_gap_ns)
			watch->longest_gap_ns = now - watch->last_completion_ns;
		watch->last_completion_ns = now;
		watch->idle_ns = 0;
		watch->empty_polls = 0;
		return;
	}
	watch->idle_ns += step < 0 ? 0 : step > longest_step_ns ? longest_step_ns : step;
	watch->empty_polls++;
}

/* With --nap: completions are taken until there is none, and then it sleeps before it posts again. */
static bool rest(const struct run *run, bool any, bool *worked)
{
	unsigned ms = run->options->nap_ms;

	if (!ms)
		return false;
	*worked = *worked || any;
	if (!any && *worked) {
		nanosleep(&(struct timespec){ .tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000l }, NULL);
		*worked = false;
	}
	return any;
}

/*
 * A nap, not sched_yield: whoever yields stays runnable, so the group of a host whose programs wait never leaves its
 * processor, and Linux 6.18 then lets other groups starve there for seconds: each time that the weight of the running
 * group changes its lag is scaled up once more.
 */
static void give_way(const struct stopwatch *watch)
{
	struct timespec nap = { .tv_nsec = watch->idle_ns > LONG_NAPS_AFTER_NS ? LONG_NAP_NS : SHORT_NAP_NS };

	if (watch->empty_polls > EMPTY_POLLS_BEFORE_NAP)
		nanosleep(&nap, NULL);
}

static bool give_up(struct run *run, const char *text)
{
	report_defect(run->report, &run->report->totals.failed, "%s", text);
	return false;
}

static bool take_completion(struct run *run, const struct ibv_wc *wc, bool receive)
{
	unsigned index = completion_lane(wc, run->load->qps);
	struct report *report = run->report;

	if (index == run->load->qps) {
		report_defect(report, &report->totals.corrupted, "completion of qp_num 0x%x with unknown wr_id 0x%llx, "
			      "status %s", wc->qp_num, (unsigned long long)wc->wr_id, ibv_wc_status_str(wc->status));
		return true;
	}
	if (wc->status != IBV_WC_SUCCESS) {
		report_defect(report, &report->totals.failed, "qp %u (qp_num 0x%x): %s completed with: %s (status %d, "
			      "vendor_err 0x%x)", index, wc->qp_num, receive ? "a RECV" : "a send request",
			      ibv_wc_status_str(wc->status), wc->status, wc->vendor_err);
		return false;
	}
	if (receive)
		return responder_receive(&run->lanes[index], wc);
	sendq_complete(&run->lanes[index], wc, requester_retire);
	return true;
}

static bool poll_queue(struct run *run, struct ibv_cq *cq, bool receive, bool *any)
{
	struct ibv_wc completions[POLL_BATCH];
	int count = ibv_poll_cq(cq, POLL_BATCH, completions);

	if (count < 0)
		return give_up(run, "ibv_poll_cq failed");
	*any |= count > 0;
	for (int i = 0; i < count; i++)
		if (!take_completion(run, &completions[i], receive))
			return false;
	return true;
}

/* False when the run is over: *done says whether because everything is done. */
static bool pump_lanes(struct run *run, bool stop, bool *done)
{
	*done = true;
	for (uint64_t i = 0; i < run->load->qps; i++) {
		struct lane *lane = &run->lanes[i];

		/* With -D either side may end both: at its time, or interrupted. */
		bool over = stop || (lane->rx.fin && run->load->seconds);

		if (!responder_pump(lane) || !requester_pump(lane, over)) {
			*done = false;
			return false;
		}
		*done = *done && lane_is_done(lane);
	}
	return !*done;
}

static void say_progress(struct run *run, struct stopwatch *watch)
{
	const struct totals *totals = &run->report->totals;
	uint64_t completed = 0, received = 0;

	if (!run->options->verbose || watch->now_ns < watch->next_progress_ns)
		return;
	watch->next_progress_ns = watch->now_ns + PROGRESS_NS;
	for (int op = 0; op < OP_COUNT; op++) {
		completed += totals->completed[op];
		received += totals->received[op];
	}
	fprintf(stderr, "vcheck: %.0f s: %llu completed, %llu received, %.1f MB, longest gap %.1f ms\n",
		(watch->now_ns - watch->start_ns) / 1e9, (unsigned long long)completed, (unsigned long long)received,
		totals->bytes / 1e6, watch->longest_gap_ns / 1e6);
}

static bool keep_waiting(struct run *run, struct stopwatch *watch)
{
	bool stalled = watch->idle_ns > run->options->stall_seconds * 1000000000ll;

	/* A stall whose cause is known goes by that. Looks are timed, not counted: a nap may last much longer than asked. */
	if (stalled || (watch->idle_ns > LONG_NAPS_AFTER_NS && watch->now_ns >= watch->next_peer_look_ns)) {
		watch->next_peer_look_ns = watch->now_ns + PEER_LOOK_NS;
		if (exchange_peer_gone(run->exchange))
			return give_up(run, "the other side closed the TCP connection in the middle of the run");
	}
	if (stalled) {
		report_defect(run->report, &run->report->totals.failed, "stalled: nothing completed for %u s "
			      "(--stall-timeout)", run->options->stall_seconds);
		return false;
	}
	if (interrupted && run->report->server && !run->load->bidirectional)
		return give_up(run, "interrupted");
	return true;
}

static void run_loop(struct run *run, struct stopwatch *watch)
{
	int64_t end_ns = watch->start_ns + (int64_t)run->load->seconds * 1000000000;
	bool done = false, stop = false, worked = false, any;
	struct hold hold = { 0 };

	if (!hold_begin(&hold, run->options->hold_every_ms, run->share_secrets, run->lanes, run->report))
		return;

	do {
		any = false;
		if (!poll_queue(run, run->device->recv_cq, true, &any) ||
		    !poll_queue(run, run->device->send_cq, false, &any))
			return;
		tick(watch, any);
		private_step(run->private_memory, watch->now_ns, run->report);
		if (!hold_step(&hold, watch->now_ns, run->device, run->report))
			return;
		if (!any) {
			if (!keep_waiting(run, watch))
				return;
			give_way(watch);
		}
		stop = stop || interrupted || (run->load->seconds && watch->now_ns >= end_ns);
		say_progress(run, watch);
	} while ((!stop && rest(run, any, &worked)) || pump_lanes(run, stop, &done));
}

void run_lanes(struct run *run)
{
	struct stopwatch watch = { .start_ns = monotonic_ns() };
	struct sigaction action = { .sa_handler = interrupt, .sa_flags = SA_RESTART | SA_RESETHAND };

	watch.now_ns = watch.start_ns;
	watch.next_progress_ns = watch.start_ns + PROGRESS_NS;
	sigaction(SIGINT, &action, NULL);
	run_loop(run, &watch);
	run->report->seconds = (monotonic_ns() - watch.start_ns) / 1e9;
	run->report->longest_gap_ms = watch.longest_gap_ns / 1e6;
	for (uint64_t i = 0; i < run->load->qps; i++)
		lane_finish(&run->lanes[i]);
	private_verify(run->private_memory, run->report);
}
