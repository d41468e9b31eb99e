/* On-chip memory, regions whose addresses are offsets, parent domains and thread domains. */

#include "check.h"

#include <sys/wait.h>
#include <unistd.h>

static struct setup s;

static void *no_memory(struct ibv_pd *pd, void *context, size_t size, size_t alignment, uint64_t type)
{
	(void)pd, (void)context, (void)size, (void)alignment, (void)type;
	return IBV_ALLOCATOR_USE_DEFAULT;
}

static void no_free(struct ibv_pd *pd, void *context, void *memory, uint64_t type)
{
	(void)pd, (void)context, (void)memory, (void)type;
}

static void zero_based(void)
{
	struct ibv_mr *mr = ibv_reg_mr(s.pd, s.buffer[1] + 4096, 4096,
				       IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_ZERO_BASED |
					       IBV_ACCESS_HUGETLB);
	CHECK(mr && mr->addr == s.buffer[1] + 4096);
	memset(s.buffer[0], 0x31, 8);
	CHECK(try_write(&s, 16, mr->rkey, 8) == IBV_WC_SUCCESS && s.buffer[1][4096 + 16] == 0x31);
	CHECK(!ibv_dereg_mr(mr));

	mr = ibv_reg_mr_iova(s.pd, s.buffer[1], 4096, 0x10000, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
	CHECK(mr && try_write(&s, 0x10000 + 100, mr->rkey, 8) == IBV_WC_SUCCESS && s.buffer[1][100] == 0x31);
	CHECK(!ibv_dereg_mr(mr));
}

static void on_chip(void)
{
	struct ibv_device_attr_ex device;
	CHECK(!ibv_query_device_ex(s.context, NULL, &device) && device.max_dm_size >= 4096);
	struct ibv_alloc_dm_attr too_much = { .length = device.max_dm_size + 1 };
	CHECK(!ibv_alloc_dm(s.context, &too_much));
	struct ibv_alloc_dm_attr unknown = { .length = 64, .comp_mask = 1 };
	errno = 0;
	CHECK(!ibv_alloc_dm(s.context, &unknown) && errno == EOPNOTSUPP);

	struct ibv_alloc_dm_attr attr = { .length = 1000, .log_align_req = 6 };
	struct ibv_dm *dm = ibv_alloc_dm(s.context, &attr);
	CHECK(dm && dm->context == s.context);
	char there[1000], back[1000];
	memset(there, 0x44, sizeof(there));
	CHECK(!ibv_memcpy_to_dm(dm, 0, there, 1000) && !ibv_memcpy_from_dm(back, dm, 0, 1000));
	CHECK(!memcmp(there, back, 1000));
	CHECK(ibv_memcpy_to_dm(dm, 1, there, 4) && ibv_memcpy_to_dm(dm, 0, there, 3));
	CHECK(ibv_memcpy_to_dm(dm, 1000, there, 4) && ibv_memcpy_from_dm(back, dm, 0, 1004));

	unsigned int access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC;
	CHECK(!ibv_reg_dm_mr(s.pd, dm, 0, 1000, access));
	access |= IBV_ACCESS_ZERO_BASED;
	CHECK(!ibv_reg_dm_mr(s.pd, dm, 4, 1000, access));
	struct ibv_mr *mr = ibv_reg_dm_mr(s.pd, dm, 100, 500, access);
	CHECK(mr && mr->length == 500);
	CHECK(ibv_free_dm(dm) == EBUSY);
	CHECK(ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_ACCESS, NULL, NULL, 0, IBV_ACCESS_LOCAL_WRITE) == -1);
	memset(s.buffer[0], 0x32, 8);
	CHECK(try_write(&s, 20, mr->rkey, 8) == IBV_WC_SUCCESS);
	CHECK(!ibv_memcpy_from_dm(back, dm, 120, 8) && back[0] == 0x32 && back[7] == 0x32);

	/* and it can be sent from */
	struct ibv_sge sge = { 20, 8, mr->lkey };
	struct ibv_send_wr wr = {
		.wr_id = 1,
		.sg_list = &sge,
		.num_sge = 1,
		.opcode = IBV_WR_RDMA_WRITE,
		.send_flags = IBV_SEND_SIGNALED,
		.wr.rdma = { (uintptr_t)s.buffer[1] + 200, s.mr[1]->rkey },
	};
	post(&s, &wr);
	good(&s, 1);
	CHECK(s.buffer[1][200] == 0x32 && s.buffer[1][207] == 0x32);

	/* a child may have some of its own */
	pid_t child = fork();
	CHECK(child >= 0);
	if (!child) {
		struct ibv_alloc_dm_attr mine = { .length = 64 };
		struct ibv_dm *own = ibv_alloc_dm(s.context, &mine);
		_exit(own && !ibv_memcpy_to_dm(own, 0, there, 64) ? 0 : 1);
	}
	int status;
	CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && !WEXITSTATUS(status));
	CHECK(!ibv_dereg_mr(mr) && !ibv_free_dm(dm));
}

static void domains(void)
{
	struct ibv_td_init_attr td_attr = { 0 };
	struct ibv_td *td = ibv_alloc_td(s.context, &td_attr);
	CHECK(td && td->context == s.context);
	struct ibv_parent_domain_init_attr attr = { .pd = s.pd, .td = td, .comp_mask = 1 << 20 };
	errno = 0;
	CHECK(!ibv_alloc_parent_domain(s.context, &attr) && errno == EOPNOTSUPP);
	attr.comp_mask = IBV_PARENT_DOMAIN_INIT_ATTR_ALLOCATORS | IBV_PARENT_DOMAIN_INIT_ATTR_PD_CONTEXT;
	attr.alloc = no_memory;
	attr.free = no_free;
	struct ibv_pd *parent = ibv_alloc_parent_domain(s.context, &attr);
	CHECK(parent && parent != s.pd && parent->context == s.context);
	CHECK(ibv_dealloc_td(td) == EBUSY);

	/* what is made on it works with what is made on its protection domain */
	struct ibv_mr *mr = ibv_reg_mr(parent, s.buffer[1], 4096, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
	CHECK(mr && mr->pd == parent && ibv_dealloc_pd(parent) == EBUSY);
	memset(s.buffer[0], 0x33, 8);
	CHECK(try_write(&s, (uintptr_t)s.buffer[1], mr->rkey, 8) == IBV_WC_SUCCESS && s.buffer[1][0] == 0x33);
	struct ibv_cq_init_attr_ex cq_attr = {
		.cqe = DEPTH,
		.comp_mask = IBV_CQ_INIT_ATTR_MASK_FLAGS | IBV_CQ_INIT_ATTR_MASK_PD,
		.flags = IBV_CREATE_CQ_ATTR_SINGLE_THREADED,
		.parent_domain = parent,
	};
	struct ibv_cq_ex *cq = ibv_create_cq_ex(s.context, &cq_attr);
	CHECK(cq);
	struct ibv_qp_init_attr init = {
		.send_cq = ibv_cq_ex_to_cq(cq),
		.recv_cq = ibv_cq_ex_to_cq(cq),
		.cap = { DEPTH, DEPTH, 1, 1, 0 },
		.qp_type = IBV_QPT_RC,
	};
	struct ibv_qp *qp = ibv_create_qp(parent, &init);
	CHECK(qp && qp->pd == parent);
	CHECK(!ibv_dereg_mr(mr));
	CHECK(ibv_dealloc_pd(parent) == EBUSY);
	CHECK(!ibv_destroy_qp(qp) && !ibv_destroy_cq(ibv_cq_ex_to_cq(cq)));
	CHECK(!ibv_dealloc_pd(parent) && !ibv_dealloc_td(td));
}

int main(void)
{
	set_up(&s);
	zero_based();
	on_chip();
	domains();
	clear_away(&s);
	puts("done");
	return 0;
}
