/* Two queue pairs of one program, connected to each other through the RNIC. */

#pragma once

#include <errno.h>
#include <infiniband/verbs.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CHECK(condition)                                                                       \
	do {                                                                                   \
		if (!(condition)) {                                                            \
			fprintf(stderr, "%s:%d: not so: %s (errno %d)\n", __FILE__, __LINE__, \
				#condition, errno);                                            \
			exit(1);                                                               \
		}                                                                              \
	} while (0)

enum { BUFFER_BYTES = 1 << 20, DEPTH = 16, INLINE_BYTES = 64 };

struct setup {
	struct ibv_device **devices;
	struct ibv_context *context;
	struct ibv_pd *pd;
	struct ibv_cq *cq;
	struct ibv_qp *qp[2];
	unsigned char *buffer[2];
	struct ibv_mr *mr[2];
};

static inline struct ibv_qp *make_qp(struct setup *s)
{
	struct ibv_qp_init_attr_ex init = {
		.send_cq = s->cq,
		.recv_cq = s->cq,
		.cap = { DEPTH, DEPTH, 4, 4, INLINE_BYTES },
		.qp_type = IBV_QPT_RC,
		.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
		.pd = s->pd,
		.send_ops_flags = IBV_QP_EX_WITH_RDMA_WRITE | IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM |
				  IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_SEND_WITH_IMM |
				  IBV_QP_EX_WITH_RDMA_READ | IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP |
				  IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD | IBV_QP_EX_WITH_LOCAL_INV |
				  IBV_QP_EX_WITH_BIND_MW | IBV_QP_EX_WITH_SEND_WITH_INV,
	};
	struct ibv_qp *qp = ibv_create_qp_ex(s->context, &init);
	CHECK(qp);
	CHECK(init.cap.max_send_wr >= DEPTH && init.cap.max_inline_data >= INLINE_BYTES);
	return qp;
}

static inline void connect_qp(struct setup *s, struct ibv_qp *qp, uint32_t dest)
{
	struct ibv_qp_attr attr = {
		.qp_state = IBV_QPS_INIT,
		.port_num = 1,
		.qp_access_flags = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC,
	};
	CHECK(!ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS));
	struct ibv_qp_attr rtr = {
		.qp_state = IBV_QPS_RTR,
		.path_mtu = IBV_MTU_1024,
		.dest_qp_num = dest,
		.rq_psn = 0x123456,
		.max_dest_rd_atomic = 4,
		.min_rnr_timer = 12,
		.ah_attr = { .is_global = 1, .port_num = 1, .grh = { .hop_limit = 64 } },
	};
	CHECK(!ibv_query_gid(s->context, 1, 0, &rtr.ah_attr.grh.dgid));
	CHECK(!ibv_modify_qp(qp, &rtr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN |
			     IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER));
	struct ibv_qp_attr rts = {
		.qp_state = IBV_QPS_RTS,
		.sq_psn = 0x123456,
		.timeout = 14,
		.retry_cnt = 7,
		.rnr_retry = 7,
		.max_rd_atomic = 4,
	};
	CHECK(!ibv_modify_qp(qp, &rts, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
			     IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC));
	CHECK(qp->state == IBV_QPS_RTS);
}

static inline void open_device(struct setup *s)
{
	int count = -1;
	s->devices = ibv_get_device_list(&count);
	CHECK(s->devices && count == 1 && !s->devices[1]);
	s->context = ibv_open_device(s->devices[0]);
	CHECK(s->context);
	s->pd = ibv_alloc_pd(s->context);
	CHECK(s->pd && s->pd->context == s->context);
}

static inline void close_device(struct setup *s)
{
	CHECK(!ibv_dealloc_pd(s->pd));
	CHECK(!ibv_close_device(s->context));
	ibv_free_device_list(s->devices);
}

static inline void set_up(struct setup *s)
{
	open_device(s);
	s->cq = ibv_create_cq(s->context, 4 * DEPTH, s, NULL, 0);
	CHECK(s->cq && s->cq->cqe >= 4 * DEPTH && s->cq->cq_context == s);
	for (int i = 0; i < 2; i++) {
		s->buffer[i] = aligned_alloc(4096, BUFFER_BYTES);
		memset(s->buffer[i], i, BUFFER_BYTES);
		s->mr[i] = ibv_reg_mr(s->pd, s->buffer[i], BUFFER_BYTES,
				      IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ |
					      IBV_ACCESS_REMOTE_ATOMIC | IBV_ACCESS_MW_BIND |
					      IBV_ACCESS_RELAXED_ORDERING);
		CHECK(s->mr[i] && s->mr[i]->addr == s->buffer[i] && s->mr[i]->length == BUFFER_BYTES);
		CHECK(s->buffer[i][0] == i && s->buffer[i][BUFFER_BYTES - 1] == i);
		s->qp[i] = make_qp(s);
	}
	for (int i = 0; i < 2; i++)
		connect_qp(s, s->qp[i], s->qp[1 - i]->qp_num);
}

static inline void clear_away(struct setup *s)
{
	for (int i = 0; i < 2; i++) {
		CHECK(!ibv_destroy_qp(s->qp[i]));
		CHECK(!ibv_dereg_mr(s->mr[i]));
		free(s->buffer[i]);
	}
	CHECK(!ibv_destroy_cq(s->cq));
	close_device(s);
}

/* Waits for the next completion. */
static inline struct ibv_wc completion(struct setup *s)
{
	struct ibv_wc wc;
	int found;
	while (!(found = ibv_poll_cq(s->cq, 1, &wc)))
		;
	CHECK(found == 1);
	return wc;
}

/* Waits for a completion that is well. */
static inline struct ibv_wc good(struct setup *s, uint64_t wr_id)
{
	struct ibv_wc wc = completion(s);
	if (wc.status != IBV_WC_SUCCESS || wc.wr_id != wr_id)
		fprintf(stderr, "%s, wr_id %llu\n", ibv_wc_status_str(wc.status), (unsigned long long)wc.wr_id);
	CHECK(wc.status == IBV_WC_SUCCESS && wc.wr_id == wr_id);
	return wc;
}

/* Takes both queue pairs back to RTS, after one of them has failed. */
static inline void reconnect(struct setup *s)
{
	for (int i = 0; i < 2; i++) {
		struct ibv_qp_attr reset = { .qp_state = IBV_QPS_RESET };
		CHECK(!ibv_modify_qp(s->qp[i], &reset, IBV_QP_STATE));
	}
	for (int i = 0; i < 2; i++)
		connect_qp(s, s->qp[i], s->qp[1 - i]->qp_num);
}

/* Posts one request to the first queue pair. */
static inline void post(struct setup *s, struct ibv_send_wr *wr)
{
	struct ibv_send_wr *bad = NULL;
	CHECK(!ibv_post_send(s->qp[0], wr, &bad) && !bad);
}

/* WRITEs the first bytes of one buffer to an address under a key; what came of it. */
static inline enum ibv_wc_status try_write(struct setup *s, uint64_t remote, uint32_t rkey, uint32_t length)
{
	struct ibv_sge sge = { (uintptr_t)s->buffer[0], length, s->mr[0]->lkey };
	struct ibv_send_wr wr = {
		.wr_id = 77,
		.sg_list = &sge,
		.num_sge = 1,
		.opcode = IBV_WR_RDMA_WRITE,
		.send_flags = IBV_SEND_SIGNALED,
		.wr.rdma = { remote, rkey },
	};
	post(s, &wr);
	struct ibv_wc wc = completion(s);
	CHECK(wc.wr_id == 77);
	return wc.status;
}

static inline void post_recv_one(struct setup *s, uint64_t wr_id, size_t offset, uint32_t length)
{
	struct ibv_sge sge = { (uintptr_t)s->buffer[1] + offset, length, s->mr[1]->lkey };
	struct ibv_recv_wr wr = { .wr_id = wr_id, .sg_list = &sge, .num_sge = 1 }, *bad = NULL;
	CHECK(!ibv_post_recv(s->qp[1], &wr, &bad) && !bad);
}
