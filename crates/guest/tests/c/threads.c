/* Two threads post batches to one queue pair while a third polls: nothing is lost, and each thread's order is kept. */

#include "check.h"

#include <pthread.h>
#include <sched.h>

enum { THREADS = 2, ROUNDS = 3000 };

static struct setup s;

static void *post_batches(void *argument)
{
	uint64_t thread = (uintptr_t)argument;
	struct ibv_qp_ex *qp = ibv_qp_to_qp_ex(s.qp[0]);
	for (uint64_t round = 0; round < ROUNDS; round++) {
		int outcome;
		do {
			ibv_wr_start(qp);
			qp->wr_id = thread << 32 | round;
			qp->wr_flags = IBV_SEND_SIGNALED;
			ibv_wr_rdma_write(qp, s.mr[1]->rkey, (uintptr_t)s.buffer[1] + 8 * thread);
			ibv_wr_set_inline_data(qp, &round, sizeof(round));
			outcome = ibv_wr_complete(qp);
			if (outcome == ENOMEM)
				sched_yield();
		} while (outcome == ENOMEM);
		CHECK(!outcome);
	}
	return NULL;
}

int main(void)
{
	set_up(&s);
	pthread_t threads[THREADS];
	for (uintptr_t i = 0; i < THREADS; i++)
		CHECK(!pthread_create(&threads[i], NULL, post_batches, (void *)i));
	uint64_t next[THREADS] = { 0 };
	for (int i = 0; i < THREADS * ROUNDS; i++) {
		struct ibv_wc wc = completion(&s);
		CHECK(wc.status == IBV_WC_SUCCESS && wc.wr_id >> 32 < THREADS);
		CHECK((uint32_t)wc.wr_id == next[wc.wr_id >> 32]++);
	}
	for (int i = 0; i < THREADS; i++) {
		pthread_join(threads[i], NULL);
		CHECK(((uint64_t *)s.buffer[1])[i] == ROUNDS - 1);
	}
	clear_away(&s);
	puts("done");
	return 0;
}
