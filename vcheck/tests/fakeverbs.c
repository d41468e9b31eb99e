/* The verbs that vcheck calls. What moves the data: fakewire.c. */
#include "fakeverbs.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct fake_mr {
	struct ibv_mr base;
	struct fake_mr *next;
};

enum { GID_ROCE_V1, GID_ROCE_V2_IPV6, GID_ROCE_V2_IPV4, GID_COUNT };

struct fake_qp *fake_qps;
static struct fake_mr *regions;
static struct ibv_device fake_device = {
	.node_type = IBV_NODE_CA,
	.transport_type = IBV_TRANSPORT_IB,
	.name = "fake0",
};

static void die(const char *text)
{
	fprintf(stderr, "fakeverbs: %s\n", text);
	abort();
}

void fake_check_memory(uint32_t key, uint64_t address, uint64_t length)
{
	for (struct fake_mr *mr = regions; mr; mr = mr->next)
		if (mr->base.lkey == key && address >= (uintptr_t)mr->base.addr &&
		    address + length <= (uintptr_t)mr->base.addr + mr->base.length)
			return;
	die("access outside a registered region");
}

struct ibv_device **ibv_get_device_list(int *count)
{
	struct ibv_device **list = calloc(2, sizeof(*list));

	list[0] = &fake_device;
	if (count)
		*count = 1;
	return list;
}

void ibv_free_device_list(struct ibv_device **list)
{
	free(list);
}

const char *ibv_get_device_name(struct ibv_device *device)
{
	return device->name;
}

static int fake_post_send(struct ibv_qp *base, struct ibv_send_wr *wr, struct ibv_send_wr **bad)
{
	struct fake_qp *qp = (struct fake_qp *)base;

	for (; wr; wr = wr->next) {
		struct send_request *request = &qp->sends[qp->send_tail % qp->cap.max_send_wr];
		bool inlined = wr->send_flags & IBV_SEND_INLINE;

		*bad = wr;
		if (base->state != IBV_QPS_RTS || wr->num_sge != 1 || wr->sg_list->length > FAKE_MAX_MESSAGE ||
		    (inlined && wr->sg_list->length > FAKE_MAX_INLINE))
			return EINVAL;
		if (qp->send_tail - qp->send_head == qp->cap.max_send_wr)
			return ENOMEM;
		memset(request, 0, sizeof(*request));
		request->wr = *wr;
		request->sge = *wr->sg_list;
		if (inlined)
			memcpy(request->inlined, (void *)(uintptr_t)wr->sg_list->addr, wr->sg_list->length);
		else
			fake_check_memory(request->sge.lkey, request->sge.addr, request->sge.length);
		qp->send_tail++;
	}
	return 0;
}

static int fake_post_recv(struct ibv_qp *base, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad)
{
	struct fake_qp *qp = (struct fake_qp *)base;

	for (; wr; wr = wr->next) {
		*bad = wr;
		if (wr->num_sge != 1)
			return EINVAL;
		if (qp->recv_tail - qp->recv_head == qp->cap.max_recv_wr)
			return ENOMEM;
		fake_check_memory(wr->sg_list->lkey, wr->sg_list->addr, wr->sg_list->length);
		qp->recvs[qp->recv_tail++ % qp->cap.max_recv_wr] = (struct recv_request){ wr->wr_id, *wr->sg_list };
	}
	return 0;
}

static int fake_poll_cq(struct ibv_cq *base, int room, struct ibv_wc *wc)
{
	struct fake_cq *cq = (struct fake_cq *)base;
	int count = 0;

	for (struct fake_qp *qp = fake_qps; qp; qp = qp->next)
		fake_progress(qp);
	while (count < room && cq->head < cq->tail)
		wc[count++] = cq->ring[cq->head++ % cq->capacity];
	return count;
}

struct ibv_context *ibv_open_device(struct ibv_device *device)
{
	struct ibv_context *context = calloc(1, sizeof(*context));

	/* abi_compat stays NULL: verbs.h then calls the plain functions below instead of a verbs_context's. */
	context->device = device;
	context->ops.post_send = fake_post_send;
	context->ops.post_recv = fake_post_recv;
	context->ops.poll_cq = fake_poll_cq;
	return context;
}

int ibv_close_device(struct ibv_context *context)
{
	free(context);
	return 0;
}

int ibv_query_device(struct ibv_context *context, struct ibv_device_attr *attr)
{
	(void)context;
	*attr = (struct ibv_device_attr){
		.max_qp = 1024,
		.max_qp_wr = 16384,
		.max_cqe = 1 << 20,
		.max_qp_rd_atom = 16,
		.max_qp_init_rd_atom = 16,
		.phys_port_cnt = 1,
	};
	return 0;
}

int ibv_query_port(struct ibv_context *context, uint8_t number, struct _compat_ibv_port_attr *compat)
{
	struct ibv_port_attr *attr = (struct ibv_port_attr *)compat;

	(void)context;
	if (number != 1)
		return EINVAL;
	attr->state = IBV_PORT_ACTIVE;
	attr->max_mtu = attr->active_mtu = IBV_MTU_4096;
	attr->gid_tbl_len = GID_COUNT;
	attr->link_layer = IBV_LINK_LAYER_ETHERNET;
	return 0;
}

static const struct ibv_gid_entry gid_table[GID_COUNT] = {
	[GID_ROCE_V1] = { .gid.raw = { 0xfe, 0x80, [15] = 1 }, .gid_type = IBV_GID_TYPE_ROCE_V1 },
	[GID_ROCE_V2_IPV6] = { .gid.raw = { 0xfe, 0x80, [15] = 1 }, .gid_type = IBV_GID_TYPE_ROCE_V2 },
	[GID_ROCE_V2_IPV4] = {
		.gid.raw = { [10] = 0xff, [11] = 0xff, [12] = 127, [15] = 1 },
		.gid_type = IBV_GID_TYPE_ROCE_V2,
	},
};

int _ibv_query_gid_ex(struct ibv_context *context, uint32_t port, uint32_t index, struct ibv_gid_entry *entry,
		      uint32_t flags, size_t size)
{
	(void)context;
	if (port != 1 || index >= GID_COUNT || flags || size != sizeof(*entry))
		return EINVAL;
	*entry = gid_table[index];
	return 0;
}

int ibv_query_gid(struct ibv_context *context, uint8_t port, int index, union ibv_gid *gid)
{
	(void)context;
	if (port != 1 || index < 0 || index >= GID_COUNT) {
		errno = EINVAL;
		return -1;
	}
	*gid = gid_table[index].gid;
	return 0;
}

struct ibv_pd *ibv_alloc_pd(struct ibv_context *context)
{
	struct ibv_pd *pd = calloc(1, sizeof(*pd));

	pd->context = context;
	return pd;
}

int ibv_dealloc_pd(struct ibv_pd *pd)
{
	free(pd);
	return 0;
}

struct ibv_mr *ibv_reg_mr(struct ibv_pd *pd, void *addr, size_t length, int access)
{
	static uint32_t next_key = 0x100;
	struct fake_mr *mr = calloc(1, sizeof(*mr));

	(void)access;
	mr->base = (struct ibv_mr){
		.context = pd->context, .pd = pd, .addr = addr, .length = length, .lkey = next_key, .rkey = next_key,
	};
	next_key += 0x100;
	mr->next = regions;
	regions = mr;
	return &mr->base;
}

struct ibv_mr *ibv_reg_mr_iova2(struct ibv_pd *pd, void *addr, size_t length, uint64_t iova, unsigned int access)
{
	if (iova != (uintptr_t)addr)
		die("iova is not supported");
	return ibv_reg_mr(pd, addr, length, access);
}

int ibv_dereg_mr(struct ibv_mr *mr)
{
	for (struct fake_mr **at = &regions; *at; at = &(*at)->next) {
		if (&(*at)->base == mr) {
			*at = (*at)->next;
			free(mr);
			return 0;
		}
	}
	return EINVAL;
}

struct ibv_cq *ibv_create_cq(struct ibv_context *context, int entries, void *cq_context,
			     struct ibv_comp_channel *channel, int vector)
{
	struct fake_cq *cq = calloc(1, sizeof(*cq));

	(void)vector;
	cq->base = (struct ibv_cq){ .context = context, .cq_context = cq_context, .channel = channel, .cqe = entries };
	cq->capacity = entries + 8;	/* room for completions that are duplicated */
	cq->ring = calloc(cq->capacity, sizeof(*cq->ring));
	return &cq->base;
}

int ibv_destroy_cq(struct ibv_cq *base)
{
	struct fake_cq *cq = (struct fake_cq *)base;

	free(cq->ring);
	free(cq);
	return 0;
}

struct ibv_qp *ibv_create_qp(struct ibv_pd *pd, struct ibv_qp_init_attr *attr)
{
	static uint32_t count;
	struct fake_qp *qp;

	/* As drivers do: too much inline data is refused, not cut. */
	if (attr->qp_type != IBV_QPT_RC || attr->sq_sig_all || attr->cap.max_inline_data > 2 * FAKE_MAX_INLINE) {
		errno = EINVAL;
		return NULL;
	}
	attr->cap.max_inline_data = FAKE_MAX_INLINE;
	qp = calloc(1, sizeof(*qp));
	qp->base = (struct ibv_qp){
		.context = pd->context, .pd = pd, .send_cq = attr->send_cq, .recv_cq = attr->recv_cq,
		.qp_num = (getpid() & 0x3fff) << 10 | (count++ & 0x3ff), .qp_type = attr->qp_type,
	};
	((struct fake_cq *)attr->recv_cq)->receives = true;
	qp->cap = attr->cap;
	qp->sends = calloc(attr->cap.max_send_wr, sizeof(*qp->sends));
	qp->recvs = calloc(attr->cap.max_recv_wr, sizeof(*qp->recvs));
	qp->outbox_end = &qp->outbox;
	if (!fake_open_socket(qp))
		die("no socket");
	qp->next = fake_qps;
	fake_qps = qp;
	return &qp->base;
}

int ibv_modify_qp(struct ibv_qp *base, struct ibv_qp_attr *attr, int mask)
{
	struct fake_qp *qp = (struct fake_qp *)base;

	if (mask & IBV_QP_AV &&
	    (attr->ah_attr.grh.sgid_index != GID_ROCE_V2_IPV4 || !attr->ah_attr.is_global ||
	     memcmp(&attr->ah_attr.grh.dgid, &gid_table[GID_ROCE_V2_IPV4].gid, sizeof(union ibv_gid))))
		return EHOSTUNREACH;
	if (mask & IBV_QP_DEST_QPN)
		qp->peer = attr->dest_qp_num;
	base->state = attr->qp_state;
	return 0;
}

int ibv_destroy_qp(struct ibv_qp *base)
{
	struct fake_qp **at = &fake_qps, *qp = (struct fake_qp *)base;

	while (*at != qp)
		at = &(*at)->next;
	*at = qp->next;
	close(qp->socket);
	while (qp->outbox) {
		struct packet *packet = qp->outbox;

		qp->outbox = packet->next;
		free(packet);
	}
	free(qp->held);
	free(qp->sends);
	free(qp->recvs);
	free(qp);
	return 0;
}
