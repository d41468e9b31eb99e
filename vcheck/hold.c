#include "hold.h"

#include <dlfcn.h>
#include <string.h>
#include <time.h>

#include "../include/verbatim.h"

enum { STILL_NS = 20 * 1000 * 1000 };

static __typeof__(ibv_dump_context) *dump_context;
static __typeof__(ibv_restore_object) *restore_object;
static __typeof__(verbatim_set_qp_secret) *set_qp_secret;

bool hold_possible(unsigned every_ms)
{
	if (!every_ms)
		return false;
	dump_context = (__typeof__(dump_context))dlsym(RTLD_DEFAULT, "ibv_dump_context");
	restore_object = (__typeof__(restore_object))dlsym(RTLD_DEFAULT, "ibv_restore_object");
	set_qp_secret = (__typeof__(set_qp_secret))dlsym(RTLD_DEFAULT, "verbatim_set_qp_secret");
	return dump_context && restore_object && set_qp_secret;
}

bool hold_begin(struct hold *hold, unsigned every_ms, bool secrets, struct lane *lanes, struct report *report)
{
	if (!hold_possible(every_ms))
		return true;
	for (uint64_t i = 0; secrets && i < report->load.qps; i++) {
		/* Both sides know it, and nobody has reason to forge anything here. */
		uint64_t key[4] = { 0x766368656b, report->load.seed, i, 1 };
		int error = set_qp_secret(lanes[i].qp, (const uint8_t *)key, !report->server);

		if (error)
			return report_setup_error(report, "verbatim_set_qp_secret: %s", strerror(error));
	}
	hold->every_ns = every_ms * 1000000ll;
	return true;
}

bool hold_step(struct hold *hold, int64_t now_ns, struct device *device, struct report *report)
{
	int count, error;

	if (!hold->every_ns)
		return true;
	if (!hold->next_ns)
		hold->next_ns = now_ns + hold->every_ns;
	if (now_ns < hold->next_ns)
		return true;
	hold->next_ns = now_ns + hold->every_ns;
	error = dump_context(device->context, &count, NULL, 0);
	if (error) {
		report_defect(report, &report->totals.failed, "ibv_dump_context: %s", strerror(error));
		return false;
	}
	nanosleep(&(struct timespec){ .tv_nsec = STILL_NS }, NULL);
	error = restore_object(device->context, NULL, IBV_OBJECT_CONTEXT, IBV_RESTORE_RESUME, NULL, 0);
	if (error) {
		report_defect(report, &report->totals.failed, "IBV_RESTORE_RESUME: %s", strerror(error));
		return false;
	}
	report->holds++;
	return true;
}
