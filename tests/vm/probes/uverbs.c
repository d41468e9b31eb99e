#include "uverbs.h"

#include <fcntl.h>
#include <rdma/ib_user_ioctl_cmds.h>
#include <rdma/ib_user_ioctl_verbs.h>
#include <rdma/rdma_user_ioctl.h>
#include <stddef.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "verdict.h"

/* The rings' indices are shared with the kernel. */
#define LOAD(index) __atomic_load_n(&(index), __ATOMIC_ACQUIRE)
#define STORE(index, value) __atomic_store_n(&(index), value, __ATOMIC_RELEASE)

/* ---- commands ---------------------------------------------------------------------------------------------------- */

static int by_write(int fd, unsigned number, const void *in, unsigned in_all, unsigned out_all)
{
	struct {
		struct ib_uverbs_cmd_hdr header;
		uint8_t body[512];
	} message = {
		.header = {
			.command = number,
			.in_words = (sizeof(message.header) + in_all) / 4,
			.out_words = out_all / 4,
		},
	};
	ssize_t length = sizeof(message.header) + in_all;

	memcpy(message.body, in, in_all);
	return write(fd, &message, length) == length ? 0 : errno;
}

static void add(struct ib_uverbs_ioctl_hdr *header, unsigned id, const void *at, unsigned length)
{
	struct ib_uverbs_attr *attribute = &header->attrs[header->num_attrs++];

	*attribute = (struct ib_uverbs_attr){
		.attr_id = id,
		.len = length,
		.flags = UVERBS_ATTR_F_MANDATORY,
		.data = (uintptr_t)at,
	};
	/* What is small lies in the attribute itself, on the way in. */
	if (length <= sizeof(attribute->data) && id != UVERBS_ATTR_CORE_OUT && id != UVERBS_ATTR_UHW_OUT) {
		attribute->data = 0;
		memcpy(&attribute->data, at, length);
	}
}

static int by_ioctl(int fd, unsigned number, const void *in, unsigned in_core, unsigned in_all, void *out,
		    unsigned out_core, unsigned out_all)
{
	struct {
		struct ib_uverbs_ioctl_hdr header;
		struct ib_uverbs_attr room[5];
	} message = {
		.header = {
			.object_id = UVERBS_OBJECT_DEVICE,
			.method_id = UVERBS_METHOD_INVOKE_WRITE,
			.driver_id = RDMA_DRIVER_RXE,
		},
	};
	uint64_t command_number = number;

	add(&message.header, UVERBS_ATTR_WRITE_CMD, &command_number, sizeof(command_number));
	add(&message.header, UVERBS_ATTR_CORE_IN, in, in_core);
	if (out_core)
		add(&message.header, UVERBS_ATTR_CORE_OUT, out, out_core);
	if (in_all > in_core)
		add(&message.header, UVERBS_ATTR_UHW_IN, (const uint8_t *)in + in_core, in_all - in_core);
	if (out_all > out_core)
		add(&message.header, UVERBS_ATTR_UHW_OUT, (uint8_t *)out + out_core, out_all - out_core);
	message.header.length = sizeof(message.header) + message.header.num_attrs * sizeof(message.room[0]);
	return ioctl(fd, RDMA_VERBS_IOCTL, &message) ? errno : 0;
}

int command(const struct device *device, unsigned number, const void *in, unsigned in_core, unsigned in_all, void *out,
	    unsigned out_core, unsigned out_all)
{
	if (device->way == BY_WRITE)
		return by_write(device->fd, number, in, in_all, out_all);
	return by_ioctl(device->fd, number, in, in_core, in_all, out, out_core, out_all);
}

/* A command that must succeed. */
static void must(const char *what, int error)
{
	if (error) {
		errno = error;
		trouble("%s", what);
	}
}

/* ---- the device -------------------------------------------------------------------------------------------------- */

static void find_gid(struct device *device)
{
	static const uint8_t ipv4[12] = { [10] = 0xff, [11] = 0xff };

	for (int index = 0; index < 16; index++) {
		char path[96], text[64];
		unsigned word[8];
		FILE *file;

		snprintf(path, sizeof(path), "/sys/class/infiniband/rxe0/ports/%d/gids/%d", PORT, index);
		file = fopen(path, "re");
		if (!file || !fgets(text, sizeof(text), file))
			trouble("%s", path);
		fclose(file);
		sscanf(text, "%x:%x:%x:%x:%x:%x:%x:%x", &word[0], &word[1], &word[2], &word[3], &word[4], &word[5],
		       &word[6], &word[7]);
		for (int i = 0; i < 8; i++) {
			device->gid[2 * i] = word[i] >> 8;
			device->gid[2 * i + 1] = word[i];
		}
		device->gid_index = index;
		if (!memcmp(device->gid, ipv4, sizeof(ipv4)))
			return;
	}
	errno = ENODEV;
	trouble("rxe0 has no GID of an IPv4 address");
}

struct device device_of(int fd, enum way way)
{
	struct device device = { .fd = fd, .way = way };

	find_gid(&device);
	return device;
}

struct device device_open(void)
{
	struct ib_uverbs_get_context in = { 0 };
	struct ib_uverbs_get_context_resp out;
	int fd = open("/dev/infiniband/uverbs0", O_RDWR | O_CLOEXEC);
	struct device device;

	if (fd < 0)
		trouble("/dev/infiniband/uverbs0");
	device = device_of(fd, BY_WRITE);
	in.response = (uintptr_t)&out;
	must("GET_CONTEXT", command(&device, IB_USER_VERBS_CMD_GET_CONTEXT, &in, sizeof(in), sizeof(in), &out, sizeof(out),
				    sizeof(out)));
	return device;
}

/* ---- objects ----------------------------------------------------------------------------------------------------- */

uint32_t pd_make(const struct device *device)
{
	struct ib_uverbs_alloc_pd in = { 0 };
	struct ib_uverbs_alloc_pd_resp out;

	in.response = (uintptr_t)&out;
	must("ALLOC_PD", command(device, IB_USER_VERBS_CMD_ALLOC_PD, &in, sizeof(in), sizeof(in), &out, sizeof(out),
				 sizeof(out)));
	return out.pd_handle;
}

int mr_try(const struct device *device, uint32_t pd, void *at, uint64_t length, unsigned access, struct mr *mr)
{
	struct ib_uverbs_reg_mr in = {
		.start = (uintptr_t)at,
		.length = length,
		.hca_va = (uintptr_t)at,
		.pd_handle = pd,
		.access_flags = access,
	};
	struct ib_uverbs_reg_mr_resp out;
	int error;

	in.response = (uintptr_t)&out;
	error = command(device, IB_USER_VERBS_CMD_REG_MR, &in, sizeof(in), sizeof(in), &out, sizeof(out), sizeof(out));
	if (!error)
		*mr = (struct mr){ out.mr_handle, out.lkey, out.rkey };
	return error;
}

struct mr mr_make(const struct device *device, uint32_t pd, void *at, uint64_t length, unsigned access)
{
	struct mr mr;

	must("REG_MR", mr_try(device, pd, at, length, access, &mr));
	return mr;
}

struct cq cq_make(const struct device *device, unsigned entries)
{
	struct ib_uverbs_create_cq in = { .cqe = entries, .comp_channel = -1 };
	struct {
		struct ib_uverbs_create_cq_resp core;
		struct rxe_create_cq_resp driver;
	} out;

	in.response = (uintptr_t)&out;
	must("CREATE_CQ", command(device, IB_USER_VERBS_CMD_CREATE_CQ, &in, sizeof(in), sizeof(in), &out, sizeof(out.core),
				  sizeof(out)));
	return (struct cq){ .handle = out.core.cq_handle, .ring.where = out.driver.mi };
}

struct qp qp_make(const struct device *device, uint32_t pd, const struct cq *cq, enum ibv_qp_type type, unsigned entries)
{
	struct ib_uverbs_create_qp in = {
		.pd_handle = pd,
		.send_cq_handle = cq->handle,
		.recv_cq_handle = cq->handle,
		.max_send_wr = entries,
		.max_recv_wr = entries,
		.max_send_sge = 1,
		.max_recv_sge = 1,
		.qp_type = type,
	};
	struct {
		struct ib_uverbs_create_qp_resp core;
		struct rxe_create_qp_resp driver;
	} out;

	in.response = (uintptr_t)&out;
	must("CREATE_QP", command(device, IB_USER_VERBS_CMD_CREATE_QP, &in, sizeof(in), sizeof(in), &out, sizeof(out.core),
				  sizeof(out)));
	return (struct qp){
		.handle = out.core.qp_handle,
		.number = out.core.qpn,
		.sends.where = out.driver.sq_mi,
		.recvs.where = out.driver.rq_mi,
	};
}

uint32_t ah_make(const struct device *device, uint32_t pd)
{
	struct ib_uverbs_create_ah in = {
		.pd_handle = pd,
		.attr = {
			.grh = { .sgid_index = device->gid_index, .hop_limit = 64 },
			.is_global = 1,
			.port_num = PORT,
		},
	};
	struct {
		struct ib_uverbs_create_ah_resp core;
		struct rxe_create_ah_resp driver;
	} out;

	in.response = (uintptr_t)&out;
	memcpy(in.attr.grh.dgid, device->gid, sizeof(device->gid));
	must("CREATE_AH", command(device, IB_USER_VERBS_CMD_CREATE_AH, &in, sizeof(in), sizeof(in), &out, sizeof(out.core),
				  sizeof(out)));
	return out.driver.ah_num;
}

void *ring_try_map(const struct device *device, const struct ring *ring)
{
	void *at = mmap(NULL, ring->where.size, PROT_READ | PROT_WRITE, MAP_SHARED, device->fd, ring->where.offset);

	return at == MAP_FAILED ? NULL : at;
}

void ring_map(const struct device *device, struct ring *ring)
{
	ring->at = ring_try_map(device, ring);
	if (!ring->at)
		trouble("mmap of a ring");
}

/* ---- states ------------------------------------------------------------------------------------------------------ */

int qp_modify(const struct device *device, const struct qp *qp, const struct ibv_qp_attr *attr, int mask)
{
	struct ib_uverbs_modify_qp in = {
		.dest = {
			.sgid_index = device->gid_index,
			.hop_limit = 64,
			.is_global = 1,
			.port_num = PORT,
		},
		.qp_handle = qp->handle,
		.attr_mask = mask,
		.qkey = attr->qkey,
		.rq_psn = attr->rq_psn,
		.sq_psn = attr->sq_psn,
		.dest_qp_num = attr->dest_qp_num,
		.qp_access_flags = attr->qp_access_flags,
		.qp_state = attr->qp_state,
		.path_mtu = attr->path_mtu,
		.max_rd_atomic = attr->max_rd_atomic,
		.max_dest_rd_atomic = attr->max_dest_rd_atomic,
		.min_rnr_timer = attr->min_rnr_timer,
		.port_num = attr->port_num,
		.timeout = attr->timeout,
		.retry_cnt = attr->retry_cnt,
		.rnr_retry = attr->rnr_retry,
	};

	memcpy(in.dest.dgid, device->gid, sizeof(device->gid));
	return command(device, IB_USER_VERBS_CMD_MODIFY_QP, &in, sizeof(in), sizeof(in), NULL, 0, 0);
}

void qp_state(const struct device *device, const struct qp *qp, enum ibv_qp_state state)
{
	struct ibv_qp_attr attr = { .qp_state = state };

	must("MODIFY_QP", qp_modify(device, qp, &attr, IBV_QP_STATE));
}

void qp_connect(const struct device *device, const struct qp *qp, enum ibv_qp_type type, uint32_t other, uint32_t sq_psn,
		uint32_t rq_psn, unsigned access)
{
	struct ibv_qp_attr attr = {
		.qp_state = IBV_QPS_INIT,
		.port_num = PORT,
		.qkey = QKEY,
		.qp_access_flags = access,
		.path_mtu = IBV_MTU_1024,
		.dest_qp_num = other,
		.rq_psn = rq_psn,
		.sq_psn = sq_psn,
		.max_dest_rd_atomic = 8,
		.max_rd_atomic = 8,
		.min_rnr_timer = 12,
		.timeout = 16,
		.retry_cnt = 7,
		.rnr_retry = 7,
	};
	bool datagrams = type == IBV_QPT_UD;
	int init = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT, rtr = IBV_QP_STATE, rts = IBV_QP_STATE | IBV_QP_SQ_PSN;

	init |= datagrams ? IBV_QP_QKEY : IBV_QP_ACCESS_FLAGS;
	if (!datagrams)
		rtr |= IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN;
	if (type == IBV_QPT_RC) {
		rtr |= IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER;
		rts |= IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC;
	}
	must("MODIFY_QP to INIT", qp_modify(device, qp, &attr, init));
	attr.qp_state = IBV_QPS_RTR;
	must("MODIFY_QP to RTR", qp_modify(device, qp, &attr, rtr));
	attr.qp_state = IBV_QPS_RTS;
	must("MODIFY_QP to RTS", qp_modify(device, qp, &attr, rts));
}

struct ib_uverbs_query_qp_resp qp_query(const struct device *device, const struct qp *qp)
{
	struct ib_uverbs_query_qp in = { .qp_handle = qp->handle, .attr_mask = IBV_QP_SQ_PSN | IBV_QP_RQ_PSN | IBV_QP_STATE };
	struct ib_uverbs_query_qp_resp out = { 0 };

	in.response = (uintptr_t)&out;
	must("QUERY_QP", command(device, IB_USER_VERBS_CMD_QUERY_QP, &in, sizeof(in), sizeof(in), &out, sizeof(out),
				 sizeof(out)));
	return out;
}

/* ---- rings ------------------------------------------------------------------------------------------------------- */

static void *slot(struct rxe_queue_buf *ring, uint32_t index)
{
	return ring->data + ((size_t)(index & ring->index_mask) << ring->log2_elem_size);
}

/* The slot that the next entry takes; the probe ends if the ring is full. */
static void *next_free(struct rxe_queue_buf *ring)
{
	uint32_t producer = ring->producer_index;

	if (((producer + 1 - LOAD(ring->consumer_index)) & ring->index_mask) == 0) {
		errno = ENOBUFS;
		trouble("a ring is full");
	}
	return slot(ring, producer);
}

static void advance(struct rxe_queue_buf *ring)
{
	STORE(ring->producer_index, (ring->producer_index + 1) & ring->index_mask);
}

/* The scatter list of one element, or of none. */
static void scatter(struct rxe_dma_info *dma, uint64_t local, uint32_t length, uint32_t lkey)
{
	*dma = (struct rxe_dma_info){ .length = length, .resid = length, .num_sge = length ? 1 : 0 };
	if (length)
		dma->sge[0] = (struct rxe_sge){ .addr = local, .length = length, .lkey = lkey };
}

void put_send(struct qp *qp, const struct request *request)
{
	struct rxe_send_wqe *wqe = next_free(qp->sends.at);

	memset(wqe, 0, sizeof(*wqe));
	wqe->wr.wr_id = request->id;
	wqe->wr.opcode = request->opcode;
	wqe->wr.send_flags = request->flags;
	if (request->ah) {
		wqe->wr.wr.ud.remote_qpn = request->qpn;
		wqe->wr.wr.ud.remote_qkey = QKEY;
		wqe->wr.wr.ud.ah_num = request->ah;
	} else if (request->opcode == IBV_WR_ATOMIC_FETCH_AND_ADD) {
		wqe->wr.wr.atomic.remote_addr = request->remote;
		wqe->wr.wr.atomic.compare_add = request->add;
		wqe->wr.wr.atomic.rkey = request->rkey;
		wqe->iova = request->remote;
	} else {
		wqe->wr.wr.rdma.remote_addr = request->remote;
		wqe->wr.wr.rdma.rkey = request->rkey;
		wqe->iova = request->remote;
	}
	wqe->ssn = qp->posted++;
	scatter(&wqe->dma, request->local, request->length, request->lkey);
	advance(qp->sends.at);
}

int doorbell(const struct device *device, const struct qp *qp)
{
	struct ib_uverbs_post_send in = { .qp_handle = qp->handle, .wqe_size = sizeof(struct ib_uverbs_send_wr) };
	struct ib_uverbs_post_send_resp out;

	in.response = (uintptr_t)&out;
	return command(device, IB_USER_VERBS_CMD_POST_SEND, &in, sizeof(in), sizeof(in), &out, sizeof(out), sizeof(out));
}

void send_request(const struct device *device, struct qp *qp, const struct request *request)
{
	put_send(qp, request);
	must("POST_SEND", doorbell(device, qp));
}

void put_recv(struct qp *qp, uint64_t id, uint64_t local, uint32_t length, uint32_t lkey)
{
	struct rxe_recv_wqe *wqe = next_free(qp->recvs.at);

	wqe->wr_id = id;
	scatter(&wqe->dma, local, length, lkey);
	advance(qp->recvs.at);
}

bool cq_take(struct cq *cq, struct ib_uverbs_wc *wc)
{
	struct rxe_queue_buf *ring = cq->ring.at;
	uint32_t consumer = ring->consumer_index;

	if (LOAD(ring->producer_index) == consumer)
		return false;
	memcpy(wc, slot(ring, consumer), sizeof(*wc));
	STORE(ring->consumer_index, (consumer + 1) & ring->index_mask);
	return true;
}

bool cq_wait(struct cq *cq, struct ib_uverbs_wc *wc, unsigned limit_ms)
{
	struct timespec start, now;

	clock_gettime(CLOCK_MONOTONIC, &start);
	do {
		if (cq_take(cq, wc))
			return true;
		sched_yield();
		clock_gettime(CLOCK_MONOTONIC, &now);
	} while ((now.tv_sec - start.tv_sec) * 1000 + (now.tv_nsec - start.tv_nsec) / 1000000 < limit_ms);
	return false;
}

struct ib_uverbs_wc cq_next(struct cq *cq)
{
	struct ib_uverbs_wc wc;

	if (!cq_wait(cq, &wc, PATIENCE_MS)) {
		errno = ETIMEDOUT;
		trouble("a completion");
	}
	return wc;
}

/* ---- between processes -------------------------------------------------------------------------------------------- */

void give(int socket, const void *bytes, unsigned length, int fd)
{
	struct iovec vector = { (void *)bytes, length };
	union {
		struct cmsghdr header;
		char room[CMSG_SPACE(sizeof(int))];
	} control = { 0 };
	struct msghdr message = { .msg_iov = &vector, .msg_iovlen = 1 };

	if (fd >= 0) {
		message.msg_control = &control;
		message.msg_controllen = sizeof(control);
		control.header.cmsg_level = SOL_SOCKET;
		control.header.cmsg_type = SCM_RIGHTS;
		control.header.cmsg_len = CMSG_LEN(sizeof(int));
		memcpy(CMSG_DATA(&control.header), &fd, sizeof(fd));
	}
	if (sendmsg(socket, &message, MSG_NOSIGNAL) != (ssize_t)length)
		trouble("sendmsg");
}

int get(int socket, void *bytes, unsigned length)
{
	struct iovec vector = { bytes, length };
	union {
		struct cmsghdr header;
		char room[CMSG_SPACE(sizeof(int))];
	} control;
	struct msghdr message = {
		.msg_iov = &vector,
		.msg_iovlen = 1,
		.msg_control = &control,
		.msg_controllen = sizeof(control),
	};
	struct cmsghdr *header;
	int fd = -1;

	if (recvmsg(socket, &message, MSG_CMSG_CLOEXEC | MSG_WAITALL) != (ssize_t)length)
		trouble("recvmsg");
	header = CMSG_FIRSTHDR(&message);
	if (header && header->cmsg_type == SCM_RIGHTS)
		memcpy(&fd, CMSG_DATA(header), sizeof(fd));
	return fd;
}
