/* Conventions of the control verbs: what they return, what they leave alone. */

#include "check.h"

#include <arpa/inet.h>
#include <dlfcn.h>
#include <stdbool.h>
#include <sys/wait.h>
#include <unistd.h>

static struct setup s;

static void errors_in_each_convention(void)
{
	errno = 0;
	CHECK(!ibv_alloc_pd(NULL) && errno == EINVAL);
	CHECK(ibv_dealloc_pd(NULL) == EINVAL);
	CHECK(ibv_destroy_qp(NULL) == EINVAL);
	CHECK(ibv_dealloc_pd(s.pd) == EBUSY);
	CHECK(ibv_destroy_cq(s.cq) == EBUSY);
	union ibv_gid gid;
	errno = 0;
	CHECK(ibv_query_gid(s.context, 1, 1000, &gid) == -1 && errno == EINVAL);
	CHECK(ibv_query_gid(s.context, 2, 0, &gid) == -1);
	struct ibv_port_attr port;
	CHECK(ibv_query_port(s.context, 2, &port) == EINVAL);

	errno = 0;
	CHECK(!ibv_create_comp_channel(s.context) && errno == EOPNOTSUPP);
	struct ibv_srq_init_attr srq = { .attr = { 1, 1, 0 } };
	errno = 0;
	CHECK(!ibv_create_srq(s.pd, &srq) && errno == EOPNOTSUPP);
	struct ibv_cq_init_attr_ex cq = { .cqe = 1 };
	errno = 0;
	CHECK(!ibv_create_cq_ex(s.context, &cq) && errno == EOPNOTSUPP);
	CHECK(ibv_req_notify_cq(s.cq, 0) == EOPNOTSUPP);
	struct ibv_qp_init_attr qp = { .send_cq = s.cq, .recv_cq = s.cq, .cap = { 1, 1, 1, 1, 0 }, .qp_type = IBV_QPT_UD };
	errno = 0;
	CHECK(!ibv_create_qp(s.pd, &qp) && errno == EOPNOTSUPP);
	CHECK(!ibv_reg_mr(s.pd, s.buffer[0], 4096, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_ON_DEMAND));
}

static void errno_is_left_alone(void)
{
	errno = 12345;
	struct ibv_pd *pd = ibv_alloc_pd(s.context);
	CHECK(pd && errno == 12345);
	CHECK(!ibv_dealloc_pd(pd) && errno == 12345);
	struct ibv_wc wc;
	CHECK(ibv_poll_cq(s.cq, 1, &wc) == 0 && errno == 12345);
}

static void tables(void)
{
	struct ibv_device_attr_ex device;
	memset(&device, 0xff, sizeof(device));
	CHECK(!ibv_query_device_ex(s.context, NULL, &device));
	CHECK(device.orig_attr.max_qp > 0 && device.orig_attr.phys_port_cnt == 1 && !device.odp_caps.general_caps);
	struct ibv_port_attr port;
	memset(&port, 0xff, sizeof(port));
	CHECK(!ibv_query_port(s.context, 1, &port));
	CHECK(port.state == IBV_PORT_ACTIVE && port.link_layer == IBV_LINK_LAYER_ETHERNET && !port.port_cap_flags2);
	struct ibv_gid_entry entry, table[8];
	CHECK(!ibv_query_gid_ex(s.context, 1, 0, &entry, 0));
	CHECK(entry.gid_type == IBV_GID_TYPE_ROCE_V2 && entry.port_num == 1 && entry.ndev_ifindex > 0);
	CHECK(ibv_query_gid_table(s.context, table, 8, 0) == port.gid_tbl_len);
	CHECK(!memcmp(&table[0], &entry, sizeof(entry)));
	CHECK(ibv_query_gid_ex(s.context, 1, 1000, &entry, 0) == EINVAL);
	__be16 pkey;
	CHECK(!ibv_query_pkey(s.context, 1, 0, &pkey) && pkey == htons(0xffff));
	CHECK(ibv_get_pkey_index(s.context, 1, pkey) == 0 && ibv_get_pkey_index(s.context, 1, 3) == -1);
	CHECK(ibv_fork_init() == 0);
	CHECK(!strcmp(ibv_get_device_name(s.devices[0]), "verbatim0") && ibv_get_device_guid(s.devices[0]));
}

/* Provider libraries look behind the device for their own mark. */
static void not_a_providers_device(void)
{
	void *mlx5 = dlopen("libmlx5.so.1", RTLD_NOW);
	if (!mlx5)
		return;
	bool (*is_supported)(struct ibv_device *) = (bool (*)(struct ibv_device *))dlsym(mlx5, "mlx5dv_is_supported");
	CHECK(is_supported && !is_supported(s.devices[0]));
	void *efa = dlopen("libefa.so.1", RTLD_NOW);
	int (*query)(struct ibv_context *, void *, uint32_t) =
		efa ? (int (*)(struct ibv_context *, void *, uint32_t))dlsym(efa, "efadv_query_device") : NULL;
	char attr[64];
	if (query)
		CHECK(query(s.context, attr, sizeof(attr)) == EOPNOTSUPP);
}

/* Registered memory is shared with the RNIC, but not with a child. */
static void a_child_has_its_own_copy(void)
{
	memset(s.buffer[0], 7, BUFFER_BYTES);
	pid_t child = fork();
	CHECK(child >= 0);
	if (!child) {
		int as_it_was = s.buffer[0][0] == 7 && s.buffer[0][BUFFER_BYTES - 1] == 7;
		memset(s.buffer[0], 8, BUFFER_BYTES);
		_exit(as_it_was ? 0 : 1);
	}
	int status;
	CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && !WEXITSTATUS(status));
	CHECK(s.buffer[0][0] == 7 && s.buffer[0][BUFFER_BYTES - 1] == 7);

	/* and the RNIC still sees the parent's */
	struct ibv_sge sge = { (uintptr_t)s.buffer[0], 5000, s.mr[0]->lkey };
	struct ibv_send_wr wr = {
		.wr_id = 1,
		.sg_list = &sge,
		.num_sge = 1,
		.opcode = IBV_WR_RDMA_WRITE,
		.send_flags = IBV_SEND_SIGNALED,
		.wr.rdma = { (uintptr_t)s.buffer[1], s.mr[1]->rkey },
	};
	struct ibv_send_wr *bad;
	CHECK(!ibv_post_send(s.qp[0], &wr, &bad));
	good(&s, 1);
	CHECK(s.buffer[1][0] == 7 && s.buffer[1][4999] == 7 && s.buffer[1][5000] == 1);
}

int main(void)
{
	set_up(&s);
	errors_in_each_convention();
	errno_is_left_alone();
	tables();
	not_a_providers_device();
	a_child_has_its_own_copy();
	clear_away(&s);
	puts("done");
	return 0;
}
