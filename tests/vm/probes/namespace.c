/*
 * A namespace of dlmopen(3) whose first object is ours: whether libibverbs, its providers and that C library's own calls of
 * `malloc` bind to it. Arguments: the first object, and libibverbs.
 */
#include <dlfcn.h>
#include <gnu/libc-version.h>
#include <infiniband/verbs.h>
#include <limits.h>
#include <locale.h>
#include <link.h>
#include <unistd.h>

#include "namespace.h"
#include "verdict.h"

static void *find(void *handle, const char *name)
{
	void *at = dlsym(handle, name);

	if (!at) {
		errno = ENOENT;
		trouble("%s", dlerror());
	}
	return at;
}

/* The file that has this address. */
static void file_of(const void *address, char *name, size_t room)
{
	FILE *maps = fopen("/proc/self/maps", "re");
	char line[PATH_MAX + 128];

	snprintf(name, room, "?");
	while (maps && fgets(line, sizeof(line), maps)) {
		unsigned long start, end;
		int path = 0;

		if (sscanf(line, "%lx-%lx %*s %*s %*s %*s %n", &start, &end, &path) >= 2 && path &&
		    (unsigned long)address >= start && (unsigned long)address < end) {
			const char *slash = strrchr(line + path, '/');

			snprintf(name, room, "%.*s", (int)strcspn(slash ? slash + 1 : line + path, "\n"),
				 slash ? slash + 1 : line + path);
			break;
		}
	}
	if (maps)
		fclose(maps);
}

/* How often this function was called from a file whose name begins so. */
static unsigned count(const struct call *calls, unsigned length, enum function function, const char *prefix)
{
	unsigned found = 0;
	const void *last = NULL;
	bool last_is = false;

	for (unsigned i = 0; i < length; i++) {
		if (calls[i].function != function)
			continue;
		if (calls[i].from != last) {
			char name[256];

			file_of(calls[i].from, name, sizeof(name));
			last = calls[i].from;
			last_is = !strncmp(name, prefix, strlen(prefix));
		}
		found += last_is;
	}
	return found;
}

int main(int argument_count, char **arguments)
{
	void *first, *verbs;
	Lmid_t space;

	if (argument_count != 3) {
		errno = EINVAL;
		trouble("namespace FIRST LIBIBVERBS");
	}
	seen("glibc %s", gnu_get_libc_version());
	first = dlmopen(LM_ID_NEWLM, arguments[1], RTLD_NOW);
	if (!first || dlinfo(first, RTLD_DI_LMID, &space)) {
		errno = ENOEXEC;
		trouble("%s", dlerror());
	}
	verbs = dlmopen(space, arguments[2], RTLD_NOW);
	if (!verbs) {
		errno = ENOEXEC;
		trouble("%s", dlerror());
	}

	/* uselocale(3) prepares that C library's character tables for this thread. */
	((locale_t (*)(locale_t))find(verbs, "uselocale"))(LC_GLOBAL_LOCALE);

	struct ibv_device **list = ((struct ibv_device **(*)(int *))find(verbs, "ibv_get_device_list"))(NULL);
	struct ibv_context *context =
		list && list[0] ? ((struct ibv_context *(*)(struct ibv_device *))find(verbs, "ibv_open_device"))(list[0]) : NULL;

	if (!context) {
		errno = ENODEV;
		trouble("no device was opened");
	}

	struct ibv_pd *pd = ((struct ibv_pd *(*)(struct ibv_context *))find(verbs, "ibv_alloc_pd"))(context);
	struct ibv_cq *cq = ((struct ibv_cq *(*)(struct ibv_context *, int, void *, void *, int))find(verbs, "ibv_create_cq"))(
		context, 16, NULL, NULL, 0);
	struct ibv_qp_init_attr init = {
		.send_cq = cq,
		.recv_cq = cq,
		.cap = { .max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = 1, .max_recv_sge = 1 },
		.qp_type = IBV_QPT_UD,
	};
	struct ibv_qp *qp = ((struct ibv_qp *(*)(struct ibv_pd *, struct ibv_qp_init_attr *))find(verbs, "ibv_create_qp"))(pd, &init);

	if (!pd || !cq || !qp) {
		errno = EIO;
		trouble("objects: %p %p %p", (void *)pd, (void *)cq, (void *)qp);
	}

	/* A doorbell: to a queue pair in RTS, with a datagram that no address handle helps on its way. */
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = 1, .qkey = 1 };
	int (*modify)(struct ibv_qp *, struct ibv_qp_attr *, int) = find(verbs, "ibv_modify_qp");

	if (modify(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY) ||
	    (attr.qp_state = IBV_QPS_RTR, modify(qp, &attr, IBV_QP_STATE)) ||
	    (attr.qp_state = IBV_QPS_RTS, modify(qp, &attr, IBV_QP_STATE | IBV_QP_SQ_PSN)))
		trouble("ibv_modify_qp");

	union ibv_gid gid;
	struct ibv_ah_attr to = { .is_global = 1, .port_num = 1, .grh = { .sgid_index = 1, .hop_limit = 64 } };

	if (((int (*)(struct ibv_context *, uint8_t, int, union ibv_gid *))find(verbs, "ibv_query_gid"))(context, 1, 1, &gid))
		trouble("ibv_query_gid");
	to.grh.dgid = gid;

	struct ibv_ah *ah = ((struct ibv_ah *(*)(struct ibv_pd *, struct ibv_ah_attr *))find(verbs, "ibv_create_ah"))(pd, &to);
	struct ibv_send_wr request = { .opcode = IBV_WR_SEND, .wr.ud = { .ah = ah, .remote_qpn = 0xfedc, .remote_qkey = 1 } };
	struct ibv_send_wr *bad;

	if (!ah)
		trouble("ibv_create_ah");
	if (ibv_post_send(qp, &request, &bad))
		trouble("ibv_post_send");

	unsigned length;
	const struct call *calls = ((const struct call *(*)(unsigned *))find(first, "namespace_calls"))(&length);
	const struct {
		const char *name;
		enum function function;
		const char *file;
	} expected[] = {
		{ "libibverbs-calls-our-ioctl", IOCTL, "libibverbs" },
		{ "the-provider-calls-our-write-for-a-doorbell", WRITE, "librxe" },
		{ "the-provider-calls-our-mmap", MMAP, "librxe" },
		{ "libibverbs-calls-our-malloc", MALLOC, "libibverbs" },
		{ "the-provider-calls-our-malloc", MALLOC, "librxe" },
		{ "the-namespaces-c-library-calls-our-malloc", MALLOC, "libc" },
	};

	for (unsigned i = 0; i < sizeof(expected) / sizeof(expected[0]); i++) {
		unsigned times = count(calls, length, expected[i].function, expected[i].file);

		claim(expected[i].name, times > 0, "no such call");
		seen("%u calls", times);
	}

	unsigned foreign = count(calls, length, FOREIGN_FREE, "");

	claim("what-is-freed-there-was-allocated-there", foreign == 0, "%u calls of free with memory of others", foreign);
	return verdict_worst;
}
