/*
 * A libibverbs with two devices that exist in memory only, for tests of whoever calls it. Whoever loads it finds its knobs
 * and what it has seen in `fake`.
 *
 * A send that is signaled completes when it is posted, or, while `hold` is set, when `fake_release` is called. RECVs wait
 * for `fake_receive`, or, while `carry` is set, for the SENDs of the queue pair that is connected with theirs: then what is sent or
 * written is there. With a `carry` of 2 its last byte is another one, with 3 that of datagrams only, and with 4 they are of somebody
 * else. What destroys or changes an object is a command, a byte that is written to the context's `cmd_fd`; where that
 * fails so does the verb, but for the EIO of an RNIC that was unplugged, which is success if the caller says so.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <infiniband/verbs.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define LOG 64
#define RING 256

struct seen {
	struct ibv_send_wr wr;
	struct ibv_sge sge[4];
	char inline_data[64];
	/* how many requests were posted together, and which of them this was */
	int of, index;
};

struct fake {
	/* knobs */
	int refuse_at, refuse_errno, hold;
	unsigned status;
	int keep_errno, carry;
	/* messages invalidate this key, which is told by these flags */
	unsigned invalidates, invalidation;
	/* what happened */
	int live, posted, binds, acked_cq, acked_async, closed;
	unsigned mw_rkey_seen;
	/* the states to which queue pairs were taken, one a digit, the last one lowest */
	unsigned long states;
	unsigned long registered;
	struct seen log[LOG];
};

struct fake fake = { .refuse_at = -1 };

struct cq {
	struct ibv_cq base;
	struct ibv_wc ring[RING];
	unsigned head, tail;
	int armed;
};

struct qp {
	struct ibv_qp base;
	struct ibv_recv_wr recvs[RING];
	struct ibv_sge recv_sges[RING];
	struct ibv_wc held[RING];
	unsigned recv_head, recv_tail, held_count;
	struct ibv_qp_attr attr;
	struct ibv_qp_cap cap;
};

struct srq {
	struct ibv_srq base;
	struct ibv_recv_wr recvs[RING];
	struct ibv_sge recv_sges[RING];
	unsigned recv_head, recv_tail;
	struct ibv_srq_attr attr;
};

struct channel {
	struct ibv_comp_channel base;
	int write_end;
};

struct context {
	struct ibv_context base;
	int async_write_end;
};

static struct ibv_device devices[2];
static int next_number = 17;

static void *made(size_t bytes)
{
	fake.live++;
	return calloc(1, bytes);
}

static int command(struct ibv_context *context)
{
	return write(context->cmd_fd, "c", 1) == 1 ? 0 : errno;
}

static int gone(void *object)
{
	fake.live--;
	free(object);
	return 0;
}

/* As `verbs_is_destroy_err` of rdma-core has it. */
static int destroyed(struct ibv_context *context, void *object)
{
	int error = command(context);
	if (error == EIO && getenv("RDMAV_ALLOW_DISASSOC_DESTROY"))
		error = 0;
	return error ? error : gone(object);
}

/* Calls between exported functions, as the real library has them. */
int ibv_fake_mark(void) { return 1; }
int fake_mark_by_itself(void) { return ibv_fake_mark(); }

int fake_mark_by_driver(const char *path)
{
	void *driver = dlopen(path, RTLD_NOW);
	int (*mark)(void) = driver ? (int (*)(void))dlsym(driver, "driver_mark") : NULL;
	return mark ? mark() : -1;
}

struct ibv_device **ibv_get_device_list(int *count)
{
	struct ibv_device **list = calloc(3, sizeof *list);
	for (int i = 0; i < 2; i++) {
		strcpy(devices[i].name, i ? "fake1" : "fake0");
		list[i] = &devices[i];
	}
	*count = 2;
	return list;
}

void ibv_free_device_list(struct ibv_device **list) { free(list); }
__be64 ibv_get_device_guid(struct ibv_device *device) { return 0x0807060504030201 + (device != devices); }

static void complete(struct cq *cq, const struct ibv_wc *wc)
{
	cq->ring[cq->tail++ % RING] = *wc;
	if (cq->armed && cq->base.channel) {
		struct ibv_cq *named = &cq->base;
		cq->armed = 0;
		if (write(((struct channel *)cq->base.channel)->write_end, &named, sizeof named) < 0)
			abort();
	}
}

static int poll_cq(struct ibv_cq *base, int most, struct ibv_wc *wc)
{
	struct cq *cq = (struct cq *)base;
	int found = 0;
	while (found < most && cq->head != cq->tail)
		wc[found++] = cq->ring[cq->head++ % RING];
	return found;
}

static int req_notify_cq(struct ibv_cq *cq, int solicited_only)
{
	(void)solicited_only;
	((struct cq *)cq)->armed = 1;
	return 0;
}

static int receive(struct ibv_qp *base, unsigned bytes, int newest, unsigned from);
struct ibv_qp *fake_qp(unsigned number);

static void carry(const struct qp *from, const struct ibv_send_wr *wr)
{
	int datagram = from->base.qp_type == IBV_QPT_UD;
	struct qp *to = (struct qp *)fake_qp(datagram ? wr->wr.ud.remote_qpn : from->attr.dest_qp_num);
	struct srq *srq = (struct srq *)to->base.srq;
	const struct ibv_sge *sge = wr->sg_list;
	unsigned long place = wr->wr.rdma.remote_addr;
	unsigned grh = datagram ? 40 : 0;
	if (wr->opcode == IBV_WR_SEND)
		place = srq ? srq->recv_sges[srq->recv_head % RING].addr : to->recv_sges[to->recv_head % RING].addr;
	memcpy((void *)(place + grh), (void *)sge->addr, sge->length);
	if (fake.carry == 2 || (fake.carry == 3 && datagram))
		((char *)place)[grh + sge->length - 1] ^= 1;
	unsigned number = fake.carry == 4 ? 99 : from->base.qp_num;
	if (wr->opcode == IBV_WR_SEND && receive(&to->base, grh + sge->length, 0, number))
		abort();
}

static int post_send(struct ibv_qp *base, struct ibv_send_wr *wr, struct ibv_send_wr **bad)
{
	struct qp *qp = (struct qp *)base;
	int of = 0, index = 0;
	for (struct ibv_send_wr *one = wr; one; one = one->next)
		of++;
	for (; wr; wr = wr->next, index++) {
		if (fake.refuse_at == index) {
			*bad = wr;
			return fake.refuse_errno;
		}
		/* as librxe has it */
		if (wr->opcode == IBV_WR_BIND_MW && (wr->imm_data || wr->num_sge)) {
			*bad = wr;
			return EINVAL;
		}
		struct seen *seen = &fake.log[fake.posted++ % LOG];
		memset(seen, 0, sizeof *seen);
		seen->wr = *wr;
		seen->of = of;
		seen->index = index;
		for (int i = 0; i < wr->num_sge && i < 4; i++)
			seen->sge[i] = wr->sg_list[i];
		if (wr->send_flags & IBV_SEND_INLINE && wr->num_sge)
			memcpy(seen->inline_data, (void *)wr->sg_list->addr, wr->sg_list->length);
		if (wr->opcode == IBV_WR_BIND_MW)
			fake.mw_rkey_seen = wr->bind_mw.mw->rkey;
		if (fake.carry)
			carry(qp, wr);
		if (!(wr->send_flags & IBV_SEND_SIGNALED))
			continue;
		struct ibv_wc wc = { .wr_id = wr->wr_id, .qp_num = base->qp_num, .opcode = IBV_WC_SEND, .status = fake.status };
		if (fake.hold)
			qp->held[qp->held_count++] = wc;
		else
			complete((struct cq *)base->send_cq, &wc);
	}
	return 0;
}

void fake_release(struct ibv_qp *base)
{
	struct qp *qp = (struct qp *)base;
	for (unsigned i = 0; i < qp->held_count; i++)
		complete((struct cq *)base->send_cq, &qp->held[i]);
	qp->held_count = 0;
}

/* Queue pairs by number, for the tests. */
static struct qp *qps[64];

struct ibv_qp *fake_qp(unsigned number) { return number < 64 ? &qps[number]->base : NULL; }

void fake_renumber(void) { next_number = 17; }

void fake_reset(void)
{
	fake = (struct fake){ .refuse_at = -1 };
	fake_renumber();
}

static int keep(struct ibv_recv_wr *wr, struct ibv_recv_wr **bad, struct ibv_recv_wr *ring, struct ibv_sge *sges,
		unsigned *tail)
{
	for (int index = 0; wr; wr = wr->next, index++) {
		if (fake.refuse_at == index) {
			*bad = wr;
			return fake.refuse_errno;
		}
		if (wr->num_sge)
			sges[*tail % RING] = *wr->sg_list;
		ring[(*tail)++ % RING] = *wr;
	}
	return 0;
}

static int post_recv(struct ibv_qp *base, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad)
{
	struct qp *qp = (struct qp *)base;
	return keep(wr, bad, qp->recvs, qp->recv_sges, &qp->recv_tail);
}

static int post_srq_recv(struct ibv_srq *base, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad)
{
	struct srq *srq = (struct srq *)base;
	return keep(wr, bad, srq->recvs, srq->recv_sges, &srq->recv_tail);
}

/* A message arrives; `newest` takes the RECV that was posted last, as queue pairs of a shared queue do now and then. */
static int receive(struct ibv_qp *base, unsigned bytes, int newest, unsigned from)
{
	struct qp *qp = (struct qp *)base;
	struct srq *srq = (struct srq *)base->srq;
	struct ibv_recv_wr *ring = srq ? srq->recvs : qp->recvs;
	unsigned *head = srq ? &srq->recv_head : &qp->recv_head, *tail = srq ? &srq->recv_tail : &qp->recv_tail;
	if (*head == *tail)
		return -1;
	struct ibv_recv_wr wr = newest ? ring[--*tail % RING] : ring[(*head)++ % RING];
	struct ibv_wc wc = {
		.wr_id = wr.wr_id, .qp_num = base->qp_num, .opcode = IBV_WC_RECV, .byte_len = bytes,
		.imm_data = 0x12345678, .wc_flags = IBV_WC_WITH_IMM | IBV_WC_GRH, .src_qp = from, .sl = 3, .vendor_err = 7,
	};
	if (fake.invalidates) {
		wc.wc_flags = fake.invalidation;
		wc.invalidated_rkey = fake.invalidates;
	}
	complete((struct cq *)base->recv_cq, &wc);
	return 0;
}

int fake_receive(struct ibv_qp *base, unsigned bytes, int newest) { return receive(base, bytes, newest, 99); }

static struct ibv_mw *alloc_mw(struct ibv_pd *pd, enum ibv_mw_type type)
{
	struct ibv_mw *mw = made(sizeof *mw);
	*mw = (struct ibv_mw){ .context = pd->context, .pd = pd, .rkey = next_number++ << 8, .type = type };
	return mw;
}

static int bind_mw(struct ibv_qp *qp, struct ibv_mw *mw, struct ibv_mw_bind *bind)
{
	struct ibv_wc wc = { .wr_id = bind->wr_id, .qp_num = qp->qp_num, .opcode = IBV_WC_BIND_MW };
	fake.binds++;
	mw->rkey = ibv_inc_rkey(mw->rkey);
	fake.mw_rkey_seen = mw->rkey;
	if (bind->send_flags & IBV_SEND_SIGNALED)
		complete((struct cq *)qp->send_cq, &wc);
	return 0;
}

static int dealloc_mw(struct ibv_mw *mw) { return destroyed(mw->context, mw); }

struct ibv_context *ibv_open_device(struct ibv_device *device)
{
	struct context *context = made(sizeof *context);
	int ends[2];
	if (pipe(ends))
		return NULL;
	context->base.device = device;
	context->base.cmd_fd = memfd_create("commands", MFD_CLOEXEC);
	context->base.async_fd = ends[0];
	context->async_write_end = ends[1];
	context->base.num_comp_vectors = 1;
	context->base.ops.poll_cq = poll_cq;
	context->base.ops.req_notify_cq = req_notify_cq;
	context->base.ops.post_send = post_send;
	context->base.ops.post_recv = post_recv;
	context->base.ops.post_srq_recv = post_srq_recv;
	context->base.ops.alloc_mw = alloc_mw;
	context->base.ops.bind_mw = bind_mw;
	context->base.ops.dealloc_mw = dealloc_mw;
	return &context->base;
}

int ibv_close_device(struct ibv_context *base)
{
	struct context *context = (struct context *)base;
	close(base->cmd_fd);
	close(base->async_fd);
	close(context->async_write_end);
	fake.closed++;
	return gone(context);
}

int ibv_query_device(struct ibv_context *context, struct ibv_device_attr *attr)
{
	(void)context;
	*attr = (struct ibv_device_attr){
		.fw_ver = "1.2.3", .max_qp = 1000, .max_qp_wr = 128, .max_sge = 64, .max_cq = 10, .max_cqe = 200,
		.max_mr = 5, .max_pd = 6, .max_qp_rd_atom = 300, .max_srq = 7, .phys_port_cnt = 1,
	};
	return 0;
}

#undef ibv_query_port
int ibv_query_port(struct ibv_context *context, uint8_t port, struct _compat_ibv_port_attr *compat)
{
	struct ibv_port_attr *attr = (struct ibv_port_attr *)compat;
	attr->state = IBV_PORT_ACTIVE;
	attr->active_mtu = IBV_MTU_1024;
	attr->max_mtu = IBV_MTU_4096;
	attr->gid_tbl_len = 4;
	attr->max_msg_sz = 1 << 30;
	attr->link_layer = context->device == devices ? IBV_LINK_LAYER_ETHERNET : IBV_LINK_LAYER_INFINIBAND;
	return port == 1 ? 0 : EINVAL;
}

ssize_t _ibv_query_gid_table(struct ibv_context *context, struct ibv_gid_entry *entries, size_t most, uint32_t flags,
			     size_t entry_bytes)
{
	(void)context;
	if (flags || most < 1 || entry_bytes != sizeof *entries)
		return -EINVAL;
	entries[0] = (struct ibv_gid_entry){ .gid.raw = { 0xfe, 0x80, [15] = 1 }, .gid_index = 1, .port_num = 1,
					     .gid_type = IBV_GID_TYPE_ROCE_V2, .ndev_ifindex = 1 };
	return 1;
}

int fake_async_event(struct ibv_context *context, struct ibv_async_event *event)
{
	return write(((struct context *)context)->async_write_end, event, sizeof *event) < 0;
}

int ibv_get_async_event(struct ibv_context *context, struct ibv_async_event *event)
{
	return read(context->async_fd, event, sizeof *event) == sizeof *event ? 0 : -1;
}

void ibv_ack_async_event(struct ibv_async_event *event) { (void)event; fake.acked_async++; }

struct ibv_pd *ibv_alloc_pd(struct ibv_context *context)
{
	struct ibv_pd *pd = made(sizeof *pd);
	pd->context = context;
	return pd;
}

int ibv_dealloc_pd(struct ibv_pd *pd) { return destroyed(pd->context, pd); }

struct ibv_mr *ibv_reg_mr_iova2(struct ibv_pd *pd, void *addr, size_t length, uint64_t iova, unsigned access)
{
	if (access & IBV_ACCESS_ZERO_BASED || (access & IBV_ACCESS_REMOTE_WRITE && !(access & IBV_ACCESS_LOCAL_WRITE))) {
		errno = EINVAL;
		return NULL;
	}
	fake.registered = (unsigned long)addr;
	struct ibv_mr *mr = made(sizeof *mr);
	unsigned key = next_number++ << 8;
	*mr = (struct ibv_mr){ .context = pd->context, .pd = pd, .addr = addr, .length = length,
			       .handle = iova, .lkey = key, .rkey = key | 1 };
	return mr;
}

int ibv_rereg_mr(struct ibv_mr *mr, int flags, struct ibv_pd *pd, void *addr, size_t length, int access)
{
	(void)access;
	if (flags & IBV_REREG_MR_CHANGE_PD)
		mr->pd = pd;
	if (flags & IBV_REREG_MR_CHANGE_TRANSLATION) {
		mr->addr = addr;
		mr->length = length;
		if (!length) {
			errno = EINVAL;
			return IBV_REREG_MR_ERR_INPUT;
		}
	}
	return 0;
}

int ibv_dereg_mr(struct ibv_mr *mr)
{
	return fake.keep_errno ? fake.keep_errno : destroyed(mr->context, mr);
}

struct ibv_comp_channel *ibv_create_comp_channel(struct ibv_context *context)
{
	struct channel *channel = made(sizeof *channel);
	int ends[2];
	if (pipe(ends))
		return NULL;
	channel->base.context = context;
	channel->base.fd = ends[0];
	channel->write_end = ends[1];
	return &channel->base;
}

int ibv_destroy_comp_channel(struct ibv_comp_channel *channel)
{
	close(channel->fd);
	close(((struct channel *)channel)->write_end);
	return gone(channel);
}

struct ibv_cq *ibv_create_cq(struct ibv_context *context, int cqe, void *cq_context, struct ibv_comp_channel *channel,
			     int vector)
{
	if (cqe > 200 || vector) {
		errno = EINVAL;
		return NULL;
	}
	struct cq *cq = made(sizeof *cq);
	cq->base.context = context;
	cq->base.channel = channel;
	cq->base.cq_context = cq_context;
	cq->base.cqe = cqe + 1;
	return &cq->base;
}

int ibv_resize_cq(struct ibv_cq *cq, int cqe)
{
	if (cqe < (int)(((struct cq *)cq)->tail - ((struct cq *)cq)->head))
		return EINVAL;
	cq->cqe = cqe;
	return 0;
}

int ibv_destroy_cq(struct ibv_cq *cq)
{
	for (int i = 0; i < 64; i++)
		if (qps[i] && (qps[i]->base.send_cq == cq || qps[i]->base.recv_cq == cq))
			return EBUSY;
	return destroyed(cq->context, cq);
}

int ibv_get_cq_event(struct ibv_comp_channel *channel, struct ibv_cq **cq, void **cq_context)
{
	if (read(channel->fd, cq, sizeof *cq) != sizeof *cq)
		return -1;
	*cq_context = (*cq)->cq_context;
	return 0;
}

void ibv_ack_cq_events(struct ibv_cq *cq, unsigned count) { (void)cq; fake.acked_cq += count; }

struct ibv_srq *ibv_create_srq(struct ibv_pd *pd, struct ibv_srq_init_attr *init)
{
	struct srq *srq = made(sizeof *srq);
	srq->base.context = pd->context;
	srq->base.pd = pd;
	srq->base.srq_context = init->srq_context;
	srq->attr = init->attr;
	return &srq->base;
}

int ibv_modify_srq(struct ibv_srq *srq, struct ibv_srq_attr *attr, int mask)
{
	if (mask != IBV_SRQ_LIMIT)
		return EINVAL;
	((struct srq *)srq)->attr.srq_limit = attr->srq_limit;
	return 0;
}

int ibv_query_srq(struct ibv_srq *srq, struct ibv_srq_attr *attr)
{
	*attr = ((struct srq *)srq)->attr;
	return 0;
}

int ibv_destroy_srq(struct ibv_srq *srq) { return destroyed(srq->context, srq); }

struct ibv_qp *ibv_create_qp(struct ibv_pd *pd, struct ibv_qp_init_attr *init)
{
	if (init->cap.max_send_wr > 128) {
		errno = EINVAL;
		return NULL;
	}
	int number = next_number++;
	if (number >= 64) {
		errno = ENOMEM;
		return NULL;
	}
	struct qp *qp = made(sizeof *qp);
	qp->base.context = pd->context;
	qp->base.pd = pd;
	qp->base.send_cq = init->send_cq;
	qp->base.recv_cq = init->recv_cq;
	qp->base.srq = init->srq;
	qp->base.qp_type = init->qp_type;
	qp->base.qp_num = number;
	qp->cap = init->cap;
	qps[number] = qp;
	return &qp->base;
}

int ibv_modify_qp(struct ibv_qp *qp, struct ibv_qp_attr *attr, int mask)
{
	struct qp *own = (struct qp *)qp;
	int again = own->attr.qp_state == IBV_QPS_RTS && mask == (IBV_QP_STATE | IBV_QP_ACCESS_FLAGS);
	if (attr->qp_state == IBV_QPS_RTS && !(mask & IBV_QP_SQ_PSN) && !again)
		return EINVAL;
	int error = command(qp->context);
	if (error)
		return error;
	fake.states = fake.states * 10 + attr->qp_state;
	if (attr->qp_state == IBV_QPS_RESET)
		own->recv_head = own->recv_tail;
	own->attr = *attr;
	return 0;
}

int ibv_query_qp(struct ibv_qp *qp, struct ibv_qp_attr *attr, int mask, struct ibv_qp_init_attr *init)
{
	(void)mask;
	*attr = ((struct qp *)qp)->attr;
	init->cap = ((struct qp *)qp)->cap;
	return 0;
}

int ibv_destroy_qp(struct ibv_qp *qp)
{
	unsigned number = qp->qp_num;
	int error = destroyed(qp->context, qp);
	if (!error)
		qps[number] = NULL;
	return error;
}

struct ibv_ah *ibv_create_ah(struct ibv_pd *pd, struct ibv_ah_attr *attr)
{
	if (!attr->is_global) {
		errno = EINVAL;
		return NULL;
	}
	struct ibv_ah *ah = made(sizeof *ah);
	ah->context = pd->context;
	ah->pd = pd;
	ah->handle = attr->grh.dgid.raw[15];
	return ah;
}

int ibv_destroy_ah(struct ibv_ah *ah) { return destroyed(ah->context, ah); }

int ibv_attach_mcast(struct ibv_qp *qp, const union ibv_gid *gid, uint16_t lid)
{
	return qp->qp_type == IBV_QPT_UD && gid->raw[0] == 0xff && !lid ? 0 : EINVAL;
}

int ibv_detach_mcast(struct ibv_qp *qp, const union ibv_gid *gid, uint16_t lid)
{
	return ibv_attach_mcast(qp, gid, lid);
}
