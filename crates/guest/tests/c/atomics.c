/* Compare-and-swap and fetch-and-add, posted both ways, and what they are refused for. */

#include "check.h"

#include <pthread.h>

enum { ROUNDS = 1000 };

static struct setup s;

static uint64_t *remote(void)
{
	return (uint64_t *)s.buffer[1];
}

/* The value that was there. */
static uint64_t atomic(int opcode, uint64_t compare_add, uint64_t swap, int call_by_call)
{
	struct ibv_sge sge = { (uintptr_t)s.buffer[0] + 512, 8, s.mr[0]->lkey };
	uint64_t *result = (uint64_t *)(s.buffer[0] + 512);
	*result = UINT64_MAX;
	if (call_by_call) {
		struct ibv_qp_ex *qp = ibv_qp_to_qp_ex(s.qp[0]);
		ibv_wr_start(qp);
		qp->wr_id = 1;
		qp->wr_flags = IBV_SEND_SIGNALED;
		if (opcode == IBV_WR_ATOMIC_CMP_AND_SWP)
			ibv_wr_atomic_cmp_swp(qp, s.mr[1]->rkey, (uintptr_t)remote(), compare_add, swap);
		else
			ibv_wr_atomic_fetch_add(qp, s.mr[1]->rkey, (uintptr_t)remote(), compare_add);
		ibv_wr_set_sge(qp, sge.lkey, sge.addr, sge.length);
		CHECK(!ibv_wr_complete(qp));
	} else {
		struct ibv_send_wr wr = {
			.wr_id = 1,
			.sg_list = &sge,
			.num_sge = 1,
			.opcode = opcode,
			.send_flags = IBV_SEND_SIGNALED,
			.wr.atomic = { (uintptr_t)remote(), compare_add, swap, s.mr[1]->rkey },
		};
		post(&s, &wr);
	}
	struct ibv_wc wc = good(&s, 1);
	CHECK(wc.opcode == (opcode == IBV_WR_ATOMIC_CMP_AND_SWP ? IBV_WC_COMP_SWAP : IBV_WC_FETCH_ADD));
	return *result;
}

/* The other side's own atomics count as well. */
static void *add_here(void *unused)
{
	(void)unused;
	for (int i = 0; i < ROUNDS; i++)
		__atomic_fetch_add(remote(), 1ull << 32, __ATOMIC_SEQ_CST);
	return NULL;
}

int main(void)
{
	set_up(&s);
	for (int call_by_call = 0; call_by_call < 2; call_by_call++) {
		*remote() = 5;
		CHECK(atomic(IBV_WR_ATOMIC_FETCH_AND_ADD, 7, 0, call_by_call) == 5 && *remote() == 12);
		CHECK(atomic(IBV_WR_ATOMIC_CMP_AND_SWP, 12, 100, call_by_call) == 12 && *remote() == 100);
		CHECK(atomic(IBV_WR_ATOMIC_CMP_AND_SWP, 12, 0, call_by_call) == 100 && *remote() == 100);
		CHECK(atomic(IBV_WR_ATOMIC_FETCH_AND_ADD, -1, 0, call_by_call) == 100 && *remote() == 99);
	}

	*remote() = 0;
	pthread_t thread;
	CHECK(!pthread_create(&thread, NULL, add_here, NULL));
	for (int i = 0; i < ROUNDS; i++)
		CHECK((uint32_t)atomic(IBV_WR_ATOMIC_FETCH_AND_ADD, 1, 0, i % 2) == (uint32_t)i);
	pthread_join(thread, NULL);
	CHECK(*remote() == ((uint64_t)ROUNDS << 32) + ROUNDS);

	/* an address that is no multiple of 8, and a region that does not allow it */
	struct ibv_sge sge = { (uintptr_t)s.buffer[0], 8, s.mr[0]->lkey };
	struct ibv_send_wr wr = {
		.wr_id = 2,
		.sg_list = &sge,
		.num_sge = 1,
		.opcode = IBV_WR_ATOMIC_FETCH_AND_ADD,
		.send_flags = IBV_SEND_SIGNALED,
		.wr.atomic = { (uintptr_t)remote() + 4, 1, 0, s.mr[1]->rkey },
	};
	post(&s, &wr);
	CHECK(completion(&s).status == IBV_WC_REM_INV_REQ_ERR);
	reconnect(&s);
	struct ibv_mr *mr = ibv_reg_mr(s.pd, s.buffer[1], 4096, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
	CHECK(mr);
	wr.wr.atomic.remote_addr = (uintptr_t)remote();
	wr.wr.atomic.rkey = mr->rkey;
	post(&s, &wr);
	CHECK(completion(&s).status == IBV_WC_REM_ACCESS_ERR);
	CHECK(!ibv_dereg_mr(mr));
	/* nor can they be inline */
	struct ibv_send_wr *bad = NULL;
	wr.send_flags |= IBV_SEND_INLINE;
	CHECK(ibv_post_send(s.qp[0], &wr, &bad) == EINVAL && bad == &wr);
	clear_away(&s);
	puts("done");
	return 0;
}
