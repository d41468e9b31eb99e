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

	CHECK(ibv_destroy_comp_channel(NULL) == EINVAL && ibv_destroy_srq(NULL) == EINVAL);
	CHECK(ibv_destroy_ah(NULL) == EINVAL && ibv_dereg_mr(NULL) == EINVAL);
	CHECK(ibv_rereg_mr(NULL, 0, NULL, NULL, 0, 0) == IBV_REREG_MR_ERR_INPUT);
	errno = 0;
	CHECK(!ibv_create_cq(s.context, 1, NULL, NULL, s.context->num_comp_vectors) && errno == EINVAL);
	CHECK(!ibv_create_cq(s.context, 0, NULL, NULL, 0));
	CHECK(!ibv_create_ah(s.pd, &(struct ibv_ah_attr){ .port_num = 1 }) && errno == EINVAL);
}

#define REFUSED(call) (errno = 0, !(call) && errno == EOPNOTSUPP)

/* What the device lacks is refused in a way that programs know, and nothing else happens. */
static void refused(void)
{
	struct ibv_srq_init_attr_ex srq = {
		.attr = { 1, 1, 0 },
		.comp_mask = IBV_SRQ_INIT_ATTR_TYPE | IBV_SRQ_INIT_ATTR_PD | IBV_SRQ_INIT_ATTR_XRCD | IBV_SRQ_INIT_ATTR_CQ,
		.srq_type = IBV_SRQT_XRC,
		.pd = s.pd,
		.cq = s.cq,
	};
	CHECK(REFUSED(ibv_create_srq_ex(s.context, &srq)));
	struct ibv_xrcd_init_attr xrcd = { .comp_mask = IBV_XRCD_INIT_ATTR_FD, .fd = -1 };
	CHECK(REFUSED(ibv_open_xrcd(s.context, &xrcd)));
	struct ibv_cq_init_attr_ex cq = { .cqe = 1, .wc_flags = IBV_WC_EX_WITH_CVLAN };
	CHECK(REFUSED(ibv_create_cq_ex(s.context, &cq)));
	cq = (struct ibv_cq_init_attr_ex){
		.cqe = 1,
		.comp_mask = IBV_CQ_INIT_ATTR_MASK_FLAGS,
		.flags = IBV_CREATE_CQ_ATTR_IGNORE_OVERRUN,
	};
	CHECK(REFUSED(ibv_create_cq_ex(s.context, &cq)));
	struct ibv_qp_init_attr_ex qp = {
		.send_cq = s.cq,
		.recv_cq = s.cq,
		.cap = { 1, 1, 1, 1, 0 },
		.qp_type = IBV_QPT_RAW_PACKET,
		.comp_mask = IBV_QP_INIT_ATTR_PD,
		.pd = s.pd,
	};
	CHECK(REFUSED(ibv_create_qp_ex(s.context, &qp)));
	qp.qp_type = IBV_QPT_RC;
	qp.comp_mask |= IBV_QP_INIT_ATTR_CREATE_FLAGS;
	qp.create_flags = IBV_QP_CREATE_BLOCK_SELF_MCAST_LB;
	CHECK(REFUSED(ibv_create_qp_ex(s.context, &qp)));
	qp.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
	qp.send_ops_flags = IBV_QP_EX_WITH_TSO;
	CHECK(REFUSED(ibv_create_qp_ex(s.context, &qp)));
	qp.qp_type = IBV_QPT_UD;
	qp.send_ops_flags = IBV_QP_EX_WITH_RDMA_READ;
	CHECK(REFUSED(ibv_create_qp_ex(s.context, &qp)));
	/* no flags for creation are none that we lack */
	qp.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_CREATE_FLAGS;
	qp.create_flags = 0;
	struct ibv_qp *plain = ibv_create_qp_ex(s.context, &qp);
	CHECK(plain && !ibv_qp_to_qp_ex(plain) && !ibv_destroy_qp(plain));

	CHECK(REFUSED(ibv_reg_mr(s.pd, s.buffer[0], 4096, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_ON_DEMAND)));
	CHECK(REFUSED(ibv_reg_dmabuf_mr(s.pd, 0, 4096, 0, 0, IBV_ACCESS_LOCAL_WRITE)));
	CHECK(REFUSED(ibv_alloc_null_mr(s.pd)));
	int fd = dup(s.context->cmd_fd);
	CHECK(fd >= 0 && REFUSED(ibv_import_device(fd)) && !close(fd));
	uint8_t mac[ETHERNET_LL_SIZE];
	struct ibv_ah_attr ah = { .is_global = 1, .port_num = 1 };
	CHECK(ibv_resolve_eth_l2_from_gid(s.context, &ah, mac, NULL) == -EOPNOTSUPP);
	struct ibv_ece ece = { 0 };
	CHECK(ibv_set_ece(s.qp[0], &ece) == EOPNOTSUPP && ibv_query_ece(s.qp[0], &ece) == EOPNOTSUPP && !ece.vendor_id);
	CHECK(ibv_query_qp_data_in_order(s.qp[0], IBV_WR_SEND, 0) == 0);
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
	CHECK(device.orig_attr.vendor_id && device.orig_attr.atomic_cap == IBV_ATOMIC_HCA && device.phys_port_cnt_ex == 1);
	CHECK(device.orig_attr.max_srq > 0 && device.orig_attr.max_ah > 0 && device.orig_attr.max_mw > 0);
	CHECK((uint32_t)device.device_cap_flags_ex == device.orig_attr.device_cap_flags);
	/* IBV_DEVICE_ATOMIC_WRITE, which the header of rdma-core 44 does not name. */
	CHECK(device.device_cap_flags_ex >> 32 == 1u << 8);
	CHECK(!(device.device_cap_flags_ex & (IBV_DEVICE_XRC | IBV_DEVICE_SRQ_RESIZE | IBV_DEVICE_MANAGED_FLOW_STEERING)));
	struct ibv_port_attr port;
	memset(&port, 0xff, sizeof(port));
	CHECK(!ibv_query_port(s.context, 1, &port));
	CHECK(port.state == IBV_PORT_ACTIVE && port.link_layer == IBV_LINK_LAYER_ETHERNET && !port.port_cap_flags2);
	CHECK(port.flags & IBV_QPF_GRH_REQUIRED);
	struct ibv_gid_entry entry, table[64];
	CHECK(!ibv_query_gid_ex(s.context, 1, 0, &entry, 0));
	CHECK(entry.gid_type == IBV_GID_TYPE_ROCE_V2 && entry.port_num == 1 && entry.ndev_ifindex > 0);
	int gids = ibv_query_gid_table(s.context, table, 64, 0);
	CHECK(gids > 0 && gids < port.gid_tbl_len && !memcmp(&table[0], &entry, sizeof(entry)));
	CHECK(ibv_query_gid_table(s.context, table, gids - 1, 0) == -EINVAL);
	/* behind the last address the table is empty */
	union ibv_gid gid, zero = { 0 };
	CHECK(ibv_query_gid_ex(s.context, 1, gids, &entry, 0) == ENODATA);
	CHECK(!ibv_query_gid(s.context, 1, gids, &gid) && !memcmp(&gid, &zero, sizeof(gid)));
	CHECK(ibv_query_gid_ex(s.context, 1, 1000, &entry, 0) == EINVAL);
	__be16 pkey;
	CHECK(!ibv_query_pkey(s.context, 1, 0, &pkey) && pkey == htons(0xffff));
	CHECK(ibv_get_pkey_index(s.context, 1, pkey) == 0 && ibv_get_pkey_index(s.context, 1, 3) == -1);
	CHECK(ibv_fork_init() == 0 && ibv_is_fork_initialized() == IBV_FORK_UNNEEDED);
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
	refused();
	errno_is_left_alone();
	tables();
	not_a_providers_device();
	a_child_has_its_own_copy();
	clear_away(&s);
	puts("done");
	return 0;
}
