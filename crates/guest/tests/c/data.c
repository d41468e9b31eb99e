/* Every way to post, between two queue pairs. */

#include "check.h"

#include <arpa/inet.h>

static struct setup s;

/* The two completions of a two-sided request come in any order. */
static struct ibv_wc good_recv(uint64_t send_id, uint64_t recv_id)
{
	struct ibv_wc received = { 0 };
	for (int seen = 0; seen < 2; seen++) {
		struct ibv_wc wc = completion(&s);
		CHECK(wc.status == IBV_WC_SUCCESS);
		CHECK(wc.wr_id == send_id || wc.wr_id == recv_id);
		if (wc.wr_id == recv_id)
			received = wc;
	}
	CHECK(received.opcode & IBV_WC_RECV);
	CHECK(received.qp_num == s.qp[1]->qp_num);
	return received;
}

static void extended(void)
{
	struct ibv_qp_ex *qp = ibv_qp_to_qp_ex(s.qp[0]);
	CHECK(qp);
	uint64_t remote = (uintptr_t)s.buffer[1];
	uint32_t rkey = s.mr[1]->rkey, lkey = s.mr[0]->lkey;
	uint64_t local = (uintptr_t)s.buffer[0];

	/* a batch: a long WRITE, an unsignaled inline WRITE, and a READ of what they wrote */
	memset(s.buffer[0], 0xa1, 100000);
	char text[] = "written in line";
	ibv_wr_start(qp);
	qp->wr_id = 1;
	qp->wr_flags = IBV_SEND_SIGNALED;
	ibv_wr_rdma_write(qp, rkey, remote);
	ibv_wr_set_sge(qp, lkey, local, 100000);
	qp->wr_id = 2;
	qp->wr_flags = 0;
	ibv_wr_rdma_write(qp, rkey, remote + 10);
	ibv_wr_set_inline_data(qp, text, sizeof(text));
	memset(text, 0, sizeof(text)); /* it was copied */
	qp->wr_id = 3;
	qp->wr_flags = IBV_SEND_SIGNALED;
	ibv_wr_rdma_read(qp, rkey, remote);
	struct ibv_sge scatter[2] = { { local + 200000, 10, lkey }, { local + 300000, 99990, lkey } };
	ibv_wr_set_sge_list(qp, 2, scatter);
	CHECK(!ibv_wr_complete(qp));
	CHECK(good(&s, 1).opcode == IBV_WC_RDMA_WRITE);
	CHECK(good(&s, 3).opcode == IBV_WC_RDMA_READ);
	CHECK(!memcmp(s.buffer[1] + 10, "written in line", 16));
	CHECK(!memcmp(s.buffer[0] + 300000, "written in line", 16));
	CHECK(s.buffer[0][200000] == 0xa1 && s.buffer[0][300000 + 99989] == 0xa1);

	/* what is aborted never was */
	ibv_wr_start(qp);
	qp->wr_id = 4;
	ibv_wr_rdma_write(qp, rkey, remote);
	ibv_wr_set_inline_data(qp, "never", 5);
	ibv_wr_abort(qp);
	CHECK(s.buffer[1][0] == 0xa1);

	/* nor what comes with something that cannot be */
	ibv_wr_start(qp);
	qp->wr_id = 5;
	ibv_wr_rdma_write(qp, rkey, remote);
	ibv_wr_set_inline_data(qp, "never", 5);
	ibv_wr_rdma_write(qp, rkey, remote);
	static char long_text[100000];
	ibv_wr_set_inline_data(qp, long_text, sizeof(long_text));
	CHECK(ibv_wr_complete(qp) == EINVAL);

	/* two-sided, with immediate data, from a list of pieces */
	post_recv_one(&s, 60, 500000, 100);
	struct ibv_data_buf pieces[2] = { { "two ", 4 }, { "pieces", 7 } };
	ibv_wr_start(qp);
	qp->wr_id = 6;
	qp->wr_flags = IBV_SEND_SIGNALED;
	ibv_wr_send_imm(qp, htonl(0xcafe));
	ibv_wr_set_inline_data_list(qp, 2, pieces);
	CHECK(!ibv_wr_complete(qp));
	struct ibv_wc wc = good_recv(6, 60);
	CHECK(wc.byte_len == 11 && (wc.wc_flags & IBV_WC_WITH_IMM) && wc.imm_data == htonl(0xcafe));
	CHECK(!memcmp(s.buffer[1] + 500000, "two pieces", 11));

	/* no data at all, and a WRITE that consumes a RECV */
	post_recv_one(&s, 70, 500000, 0);
	post_recv_one(&s, 80, 500000, 0);
	ibv_wr_start(qp);
	qp->wr_id = 7;
	ibv_wr_send(qp);
	CHECK(!ibv_wr_complete(qp));
	CHECK(good_recv(7, 70).byte_len == 0);
	ibv_wr_start(qp);
	qp->wr_id = 8;
	ibv_wr_rdma_write_imm(qp, rkey, remote + 600000, htonl(7));
	ibv_wr_set_sge(qp, lkey, local, 1234);
	CHECK(!ibv_wr_complete(qp));
	wc = good_recv(8, 80);
	CHECK(wc.opcode == IBV_WC_RECV_RDMA_WITH_IMM && wc.imm_data == htonl(7) && wc.byte_len == 1234);
	CHECK(s.buffer[1][600000] == 0xa1 && s.buffer[1][601233] == 0xa1 && s.buffer[1][601234] == 1);
}

static void lists(void)
{
	/* inline data gathered from unregistered memory */
	char one[] = "gathered ", two[] = "in line";
	struct ibv_sge pieces[2] = { { (uintptr_t)one, 9, 0 }, { (uintptr_t)two, 8, 0 } };
	struct ibv_send_wr wr = {
		.wr_id = 20,
		.sg_list = pieces,
		.num_sge = 2,
		.opcode = IBV_WR_RDMA_WRITE,
		.send_flags = IBV_SEND_INLINE | IBV_SEND_SIGNALED,
		.wr.rdma = { (uintptr_t)s.buffer[1], s.mr[1]->rkey },
	};
	struct ibv_send_wr *bad = NULL;
	CHECK(!ibv_post_send(s.qp[0], &wr, &bad) && !bad);
	good(&s, 20);
	CHECK(!strcmp((char *)s.buffer[1], "gathered in line"));

	/* more than fit: those before the one that is refused are posted */
	struct ibv_qp_attr attr;
	struct ibv_qp_init_attr init;
	CHECK(!ibv_query_qp(s.qp[0], &attr, IBV_QP_CAP, &init));
	CHECK(attr.qp_state == IBV_QPS_RTS && init.qp_type == IBV_QPT_RC && init.send_cq == s.cq);
	int depth = init.cap.max_send_wr;
	struct ibv_send_wr *many = calloc(depth + 2, sizeof(*many));
	for (int i = 0; i < depth + 2; i++) {
		many[i] = wr;
		many[i].wr_id = 100 + i;
		many[i].next = i + 1 < depth + 2 ? &many[i + 1] : NULL;
	}
	CHECK(ibv_post_send(s.qp[0], many, &bad) == ENOMEM);
	CHECK(bad == &many[depth]);
	for (int i = 0; i < depth; i++)
		good(&s, 100 + i);
	free(many);

	/* what no queue pair takes */
	wr.opcode = IBV_WR_TSO;
	CHECK(ibv_post_send(s.qp[0], &wr, &bad) == EOPNOTSUPP && bad == &wr);
	wr.opcode = IBV_WR_RDMA_WRITE;
	wr.num_sge = 1000;
	wr.send_flags = IBV_SEND_SIGNALED;
	CHECK(ibv_post_send(s.qp[0], &wr, &bad) == EINVAL && bad == &wr);
	struct ibv_recv_wr recv = { .num_sge = 1000, .sg_list = pieces }, *bad_recv = NULL;
	CHECK(ibv_post_recv(s.qp[1], &recv, &bad_recv) == EINVAL && bad_recv == &recv);
	struct ibv_wc wc;
	CHECK(ibv_poll_cq(s.cq, 1, &wc) == 0);
}

/* A key that does not allow it: the error comes as a completion, and the queue pair is in ERR. */
static void refused_by_the_other_end(void)
{
	struct ibv_sge sge = { (uintptr_t)s.buffer[0], 16, s.mr[0]->lkey };
	struct ibv_send_wr wr = {
		.wr_id = 30,
		.sg_list = &sge,
		.num_sge = 1,
		.opcode = IBV_WR_RDMA_WRITE,
		.send_flags = IBV_SEND_SIGNALED,
		.wr.rdma = { (uintptr_t)s.buffer[1], s.mr[1]->rkey ^ 0x55 },
	};
	struct ibv_send_wr *bad;
	CHECK(!ibv_post_send(s.qp[0], &wr, &bad));
	struct ibv_wc wc = completion(&s);
	CHECK(wc.wr_id == 30 && wc.status == IBV_WC_REM_ACCESS_ERR && wc.qp_num == s.qp[0]->qp_num);
	struct ibv_qp_attr attr;
	struct ibv_qp_init_attr init;
	CHECK(!ibv_query_qp(s.qp[0], &attr, IBV_QP_STATE, &init) && attr.qp_state == IBV_QPS_ERR);
	CHECK(s.qp[0]->state == IBV_QPS_ERR);
}

int main(void)
{
	set_up(&s);
	extended();
	lists();
	refused_by_the_other_end();
	clear_away(&s);
	puts("done");
	return 0;
}
