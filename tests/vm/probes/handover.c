/*
 * A context that one process builds and another one uses: what a move of the provider's state rests on (the remote kernel).
 *
 * The executor opens the device, maps a file of tmpfs, registers it, makes a pair of queue pairs that are connected with each
 * other, maps none of their rings, hands the descriptor over and ends. The receiver, a program of its own, maps the rings
 * and works with them.
 */
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <linux/capability.h>
#include <unistd.h>

#include "uverbs.h"
#include "verdict.h"

enum { LENGTH = 1 << 20, HALF = LENGTH / 2, SOCKET = 3, ENTRIES = 16 };

static const unsigned ACCESS = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ;

/* What the executor tells of what it made. */
struct made {
	struct cq cq;
	struct qp qps[2];
	struct mr mr;
	uint64_t at;
	uint32_t pd;
};

static void *map_file(int file)
{
	void *at = mmap(NULL, LENGTH, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);

	if (at == MAP_FAILED)
		trouble("mmap of the file");
	return at;
}

/* Makes everything, and ends when it has been told to. */
static int executor(void)
{
	char nothing;
	int file = get(SOCKET, &nothing, 1);
	struct device device = device_open();
	struct made made = { .pd = pd_make(&device), .cq = cq_make(&device, 64) };
	void *at = map_file(file);

	made.at = (uintptr_t)at;
	made.mr = mr_make(&device, made.pd, at, LENGTH, ACCESS);
	for (int i = 0; i < 2; i++)
		made.qps[i] = qp_make(&device, made.pd, &made.cq, IBV_QPT_RC, ENTRIES);
	for (int i = 0; i < 2; i++)
		qp_connect(&device, &made.qps[i], IBV_QPT_RC, made.qps[!i].number, 100, 100, ACCESS);
	give(SOCKET, &made, sizeof(made), device.fd);
	get(SOCKET, &nothing, 1);
	return 0;
}

/* Starts this program again in another part, with a socket as descriptor 3. */
static pid_t start(const char *part, int *socket)
{
	int ends[2];
	pid_t pid;

	if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends))
		trouble("socketpair");
	pid = fork();
	if (pid < 0)
		trouble("fork");
	if (pid == 0) {
		if (ends[1] == SOCKET)
			fcntl(SOCKET, F_SETFD, 0);
		else
			dup2(ends[1], SOCKET);
		execl("/proc/self/exe", "handover", part, NULL);
		_exit(127);
	}
	close(ends[1]);
	*socket = ends[0];
	return pid;
}

static int query_device(const struct device *device)
{
	struct ib_uverbs_query_device in = { 0 };
	struct ib_uverbs_query_device_resp out;

	in.response = (uintptr_t)&out;
	return command(device, IB_USER_VERBS_CMD_QUERY_DEVICE, &in, sizeof(in), sizeof(in), &out, sizeof(out), sizeof(out));
}

/* Who may write(2): the process that opened, as long as its credentials are the very same object. */
static void credentials(void)
{
	struct device device = device_open();
	struct __user_cap_header_struct header = { .version = _LINUX_CAPABILITY_VERSION_3 };
	struct __user_cap_data_struct capabilities[2];
	int status, before = query_device(&device), after;
	pid_t child = fork();

	if (child == 0)
		_exit(query_device(&device));
	waitpid(child, &status, 0);
	claim("write-by-a-forked-child-is-refused", before == 0 && WEXITSTATUS(status) == EACCES,
	      "the opener got errno %d, its child %d", before, WEXITSTATUS(status));
	/* Nothing changes but the object. */
	if (syscall(SYS_capget, &header, capabilities) || syscall(SYS_capset, &header, capabilities))
		trouble("capset");
	after = query_device(&device);
	claim("write-after-the-openers-credentials-were-set-anew-is-refused", after == EACCES, "errno %d", after);
	device.way = BY_IOCTL;
	after = query_device(&device);
	claim("invoke-write-then-goes-on", after == 0, "errno %d", after);
	close(device.fd);
}

static void mappings(struct device *device, struct made *made)
{
	struct ring *ring = &made->cq.ring;
	struct rxe_queue_buf *again;
	void *moved;
	int error;

	ring->at = ring_try_map(device, ring);
	claim("a-ring-is-mapped-by-who-did-not-make-it", ring->at != NULL, "%s", strerror(errno));
	if (!ring->at)
		trouble("mmap of the completion queue");
	seen("a fresh completion queue: log2_elem_size %u, index_mask %u", ring->at->log2_elem_size, ring->at->index_mask);
	/* A provider reads it right after mapping, so a placeholder must have it. */
	claim("the-kernel-fills-in-the-rings-geometry",
	      1u << ring->at->log2_elem_size >= sizeof(struct ib_uverbs_wc) && ring->at->index_mask >= 63,
	      "log2_elem_size %u, index_mask %u", ring->at->log2_elem_size, ring->at->index_mask);
	errno = 0;
	again = ring_try_map(device, ring);
	error = errno;
	claim("a-second-mapping-of-a-ring-fails", !again && error == EINVAL, "%p, errno %d", (void *)again, error);
	/* A placeholder can be mapped over, so a mapping has to reach its place in one way or the other. */
	moved = mmap(NULL, ring->where.size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	moved = mremap(ring->at, ring->where.size, ring->where.size, MREMAP_MAYMOVE | MREMAP_FIXED, moved);
	claim("a-mapped-ring-can-be-moved-by-mremap", moved != MAP_FAILED, "%s", strerror(errno));
	if (moved != MAP_FAILED)
		ring->at = moved;

	/* Of a completion queue that nobody needs. */
	struct cq spare = cq_make(device, 64);

	ring_map(device, &spare.ring);
	munmap(spare.ring.at, spare.ring.where.size);
	errno = 0;
	again = ring_try_map(device, &spare.ring);
	error = errno;
	claim("after-munmap-there-is-no-way-back", !again && error == EINVAL, "%p, errno %d", (void *)again, error);

	/* A mapping goes to a child at fork, so somebody can keep it alive. */
	struct cq kept = cq_make(device, 64);
	int status;
	pid_t child;

	ring_map(device, &kept.ring);
	child = fork();
	if (child == 0)
		_exit(kept.ring.at->index_mask >= 63 ? 0 : 1);
	waitpid(child, &status, 0);
	claim("a-forked-child-has-the-mapping", WIFEXITED(status) && WEXITSTATUS(status) == 0, "status %x", status);
}

/* A WRITE from the first half of the memory into the second, through rings and descriptor that were handed over. */
static void transfer(const char *name, struct device *device, struct made *made, uint8_t *memory, uint8_t value)
{
	enum { SIZE = 5000 };
	struct request request = {
		.opcode = IBV_WR_RDMA_WRITE,
		.id = value,
		.flags = IBV_SEND_SIGNALED,
		.local = made->at,
		.length = SIZE,
		.lkey = made->mr.lkey,
		.remote = made->at + HALF,
		.rkey = made->mr.rkey,
	};
	struct ib_uverbs_wc wc = { 0 };
	int error;

	memset(memory, value, SIZE);
	put_send(&made->qps[0], &request);
	error = doorbell(device, &made->qps[0]);
	bool completed = !error && cq_wait(&made->cq, &wc, PATIENCE_MS);
	bool landed = memory[HALF] == value && !memcmp(memory + HALF, memory + HALF + 1, SIZE - 1) && !memory[HALF + SIZE];

	claim(name, completed && wc.status == IBV_WC_SUCCESS && wc.wr_id == value && landed,
	      "errno %d, completed %d with status %d, landed %d", error, completed, wc.status, landed);
}

/* The process that the kernel says has made a queue pair, as `rdma resource show qp` has it; 0 if it names none, -1 without the queue pair. */
static int owner(const struct qp *qp)
{
	char command[96], line[512];
	unsigned pid = 0;
	bool found;
	FILE *said;

	snprintf(command, sizeof(command), "rdma resource show qp link rxe0/1 lqpn %u", qp->number);
	said = popen(command, "re");
	if (!said)
		trouble("rdma");
	found = fgets(line, sizeof(line), said);
	if (found && strstr(line, " pid "))
		sscanf(strstr(line, " pid "), " pid %u", &pid);
	pclose(said);
	return found ? (int)pid : -1;
}

static double now_ms(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return now.tv_sec * 1e3 + now.tv_nsec / 1e6;
}

/* What could be done before a blackout, and what is left for it: making and connecting against mapping. */
static void cost(const struct device *device, int count, uint64_t length)
{
	uint32_t pd = pd_make(device);
	void *at = mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
	struct qp *qps = calloc(count, sizeof(*qps));
	double begun = now_ms(), registered, made, connected, mapped;
	struct cq cq = cq_make(device, 1024);

	if (at == MAP_FAILED || !qps)
		trouble("memory");
	mr_make(device, pd, at, length, ACCESS);
	registered = now_ms();
	for (int i = 0; i < count; i++)
		qps[i] = qp_make(device, pd, &cq, IBV_QPT_RC, 128);
	made = now_ms();
	for (int i = 0; i < count; i++)
		qp_connect(device, &qps[i], IBV_QPT_RC, qps[i ^ 1].number, 100, 100, ACCESS);
	connected = now_ms();
	ring_map(device, &cq.ring);
	for (int i = 0; i < count; i++)
		qp_map(device, &qps[i]);
	mapped = now_ms();
	seen("%d queue pairs and %llu MiB: registered in %.1f ms, made in %.1f, connected in %.1f; mapped in %.1f", count,
	     (unsigned long long)length >> 20, registered - begun, made - registered, connected - made, mapped - connected);
	munmap(at, length);
	free(qps);
}

int main(int count, char **arguments)
{
	if (count > 1 && !strcmp(arguments[1], "executor"))
		return executor();

	int socket, status, file = open("/dev/shm/handover", O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
	struct made made;
	struct device device;
	uint8_t *memory;
	pid_t pid;

	if (file < 0 || ftruncate(file, LENGTH) || unlink("/dev/shm/handover"))
		trouble("a file in /dev/shm");
	credentials();
	pid = start("executor", &socket);
	give(socket, "", 1, file);
	device = device_of(get(socket, &made, sizeof(made)), BY_WRITE);

	int error = query_device(&device);

	claim("write-on-a-passed-descriptor-is-refused", error == EACCES, "errno %d", error);
	device.way = BY_IOCTL;
	mappings(&device, &made);
	for (int i = 0; i < 2; i++)
		qp_map(&device, &made.qps[i]);
	/* Elsewhere than the executor, so that what is seen came through the file. */
	memory = map_file(file);
	transfer("invoke-write-post-send-works-on-a-passed-descriptor", &device, &made, memory, 0x11);

	struct qp own = qp_make(&device, made.pd, &made.cq, IBV_QPT_RC, ENTRIES);
	struct mr mr;

	qp_map(&device, &own);
	error = mr_try(&device, made.pd, memory, LENGTH, ACCESS, &mr);
	claim("objects-are-made-on-a-passed-descriptor-by-invoke-write", error == 0 && own.number != made.qps[0].number,
	      "REG_MR: errno %d", error);

	int named = owner(&made.qps[0]);

	claim("the-kernel-names-the-executor-as-who-made-it", named == pid, "it names %d instead of %d", named, pid);
	give(socket, "", 1, -1);
	if (waitpid(pid, &status, 0) != pid || status)
		trouble("the executor ended with status %x", status);
	named = owner(&made.qps[0]);
	claim("and-nobody-after-its-end", named == 0, "it names %d", named);
	transfer("when-the-executor-has-exited-its-memory-is-written", &device, &made, memory, 0x22);
	/* Nor is the receiver's mapping of the file needed: the pages are pinned. */
	munmap(memory, LENGTH);
	memory = map_file(file);
	transfer("nor-is-any-mapping-of-the-file-needed", &device, &made, memory, 0x33);

	struct device measured = device_open();

	cost(&measured, 2, 16 << 20);
	cost(&measured, 64, 16 << 20);
	cost(&measured, 256, 256 << 20);
	return verdict_worst;
}
