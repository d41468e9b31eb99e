/*
 * Sends RoCE packets that pretend to be those of somebody else's queue pair, in the ways that there are on a host.
 *
 * forger udp ADDRESS QPN COUNT: by a UDP socket.
 * forger raw ADDRESS QPN COUNT: by a raw socket.
 * forger frames LINK SOURCE ADDRESS QPN COUNT: by a packet socket, with headers of its own.
 * forger qp GID QPN COUNT: by queue pairs of its own that name that one.
 *
 * Says as JSON how many it tried to send, and how many of those were refused to it.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <linux/if_ether.h>
#include <linux/if_packet.h>
#include <net/if.h>
#include <netinet/ip.h>
#include <netinet/udp.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/socket.h>

#include "../../../bench/programs/common.h"

enum { ROCE_PORT = 4791, BTH = 12, PAYLOAD = 4, ICRC = 4, QPS = 16, DEPTH = 64, LONGEST_S = 30 };

/* SEND Only of a reliable connection; the PSN goes over all there are. The ICRC is wrong, which nobody finds out before the border. */
static size_t roce(uint8_t *packet, uint32_t qpn, uint32_t psn)
{
	uint8_t bth[BTH] = { 0x04, 0, 0xff, 0xff, 0, qpn >> 16, qpn >> 8, qpn, 0x80, psn >> 16, psn >> 8, psn };

	memset(packet, 0, BTH + PAYLOAD + ICRC);
	memcpy(packet, bth, BTH);
	return BTH + PAYLOAD + ICRC;
}

static void report(unsigned tried, unsigned refused)
{
	printf("{\"tried\": %u, \"refused\": %u}\n", tried, refused);
}

static int by_socket(int type, const char *address, uint32_t qpn, unsigned count)
{
	struct sockaddr_in to = { .sin_family = AF_INET, .sin_port = htons(ROCE_PORT) };
	int socket_fd = socket(AF_INET, type, type == SOCK_RAW ? IPPROTO_UDP : 0);
	unsigned refused = 0;

	if (inet_pton(AF_INET, address, &to.sin_addr) != 1)
		fail("the address %s", address);
	if (socket_fd < 0) {
		if (errno != EPERM)
			fail("socket");
		report(count, count);
		return 0;
	}
	for (unsigned i = 0; i < count; i++) {
		uint8_t packet[64];
		struct udphdr header = { .source = htons(ROCE_PORT), .dest = htons(ROCE_PORT) };
		size_t before = type == SOCK_RAW ? sizeof(header) : 0;
		size_t bytes = before + roce(packet + before, qpn, i * 16);

		header.len = htons(bytes);
		memcpy(packet, &header, before);
		if (sendto(socket_fd, packet, bytes, 0, (void *)&to, sizeof(to)) < 0) {
			if (errno != EPERM)
				fail("sendto");
			refused++;
		}
	}
	report(count, refused);
	return 0;
}

static int by_frames(const char *link, const char *source, const char *address, uint32_t qpn, unsigned count)
{
	struct sockaddr_ll to = {
		.sll_family = AF_PACKET,
		.sll_protocol = htons(ETH_P_IP),
		.sll_ifindex = if_nametoindex(link),
		.sll_halen = ETH_ALEN,
		.sll_addr = { 0xff, 0xff, 0xff, 0xff, 0xff, 0xff },
	};
	/* The link's own Ethernet address is put before it. */
	int socket_fd = socket(AF_PACKET, SOCK_DGRAM, htons(ETH_P_IP));
	unsigned refused = 0;

	if (socket_fd < 0 || !to.sll_ifindex)
		fail("a packet socket at %s", link);
	for (unsigned i = 0; i < count; i++) {
		struct {
			struct iphdr ip;
			struct udphdr udp;
			uint8_t roce[64];
		} __attribute__((packed)) packet = {
			.ip = { .ihl = 5, .version = 4, .ttl = 64, .protocol = IPPROTO_UDP, .frag_off = htons(0x4000) },
			.udp = { .source = htons(ROCE_PORT), .dest = htons(ROCE_PORT) },
		};
		size_t bytes = sizeof(packet.ip) + sizeof(packet.udp) + roce(packet.roce, qpn, i * 16);
		uint32_t sum = 0;

		if (inet_pton(AF_INET, source, &packet.ip.saddr) != 1 || inet_pton(AF_INET, address, &packet.ip.daddr) != 1)
			fail("the addresses");
		packet.ip.tot_len = htons(bytes);
		packet.udp.len = htons(bytes - sizeof(packet.ip));
		for (int at = 0; at < 10; at++) {
			uint16_t word;

			memcpy(&word, (uint8_t *)&packet + 2 * at, sizeof(word));
			sum += word;
		}
		sum = (sum & 0xffff) + (sum >> 16);
		packet.ip.check = ~(sum + (sum >> 16));
		if (sendto(socket_fd, &packet, bytes, 0, (void *)&to, sizeof(to)) < 0) {
			if (errno != ENOBUFS && errno != EPERM)
				fail("sendto");
			refused++;
		}
	}
	report(count, refused);
	return 0;
}

static struct ibv_qp *aim(struct ibv_pd *pd, struct ibv_cq *cq, const union ibv_gid *gid, uint32_t qpn, uint32_t psn)
{
	struct ibv_qp_init_attr init = {
		.send_cq = cq,
		.recv_cq = cq,
		.qp_type = IBV_QPT_RC,
		.cap = { DEPTH, 1, 1, 1, 8 },
	};
	struct ibv_qp *qp = ibv_create_qp(pd, &init);
	/* As impatient as a program can be. */
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_RTS, .timeout = 1, .retry_cnt = 7, .max_rd_atomic = 1, .sq_psn = psn };

	if (!qp)
		fail("ibv_create_qp");
	to_init(qp);
	to_rtr(qp, qpn, gid, IBV_MTU_1024);
	modify(qp, &attr, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |
	       IBV_QP_MAX_QP_RD_ATOMIC, "RTS");
	return qp;
}

static int by_queue_pairs(const char *text, uint32_t qpn, unsigned count)
{
	struct ibv_context *context = open_device(NULL);
	struct ibv_pd *pd = ibv_alloc_pd(context);
	struct ibv_cq *cq = ibv_create_cq(context, QPS * DEPTH, NULL, NULL, 0);
	uint64_t word = 0x6465676f6f66;
	union ibv_gid gid;
	unsigned posted = 0, failed = 0;
	double start = now();

	if (!pd || !cq || inet_pton(AF_INET6, text, gid.raw) != 1)
		fail("PD, CQ or GID");
	while (posted < count && now() < start + LONGEST_S) {
		struct ibv_qp *qp[QPS];
		unsigned open = 0;

		for (int i = 0; i < QPS; i++) {
			qp[i] = aim(pd, cq, &gid, qpn, (posted * 16) & 0xffffff);
			for (int n = 0; n < DEPTH; n++) {
				struct ibv_sge sge = { (uintptr_t)&word, 8, 0 };
				struct ibv_send_wr *bad, wr = {
					.sg_list = &sge,
					.num_sge = 1,
					.opcode = IBV_WR_SEND,
					.send_flags = IBV_SEND_SIGNALED | IBV_SEND_INLINE,
				};

				if (ibv_post_send(qp[i], &wr, &bad))
					fail("ibv_post_send");
				posted++, open++;
			}
		}
		/* Each ends, one way or the other. */
		while (open) {
			struct ibv_wc wc[64];
			int polled = ibv_poll_cq(cq, 64, wc);

			if (polled < 0)
				fail("ibv_poll_cq");
			for (int i = 0; i < polled; i++)
				failed += wc[i].status != IBV_WC_SUCCESS;
			open -= polled;
		}
		for (int i = 0; i < QPS; i++)
			ibv_destroy_qp(qp[i]);
	}
	report(posted, failed);
	return 0;
}

int main(int argc, char **argv)
{
	bool is = argc > 1;

	if (is && argc == 5 && !strcmp(argv[1], "udp"))
		return by_socket(SOCK_DGRAM, argv[2], number(argv[3], 0, 0xffffff), number(argv[4], 1, 1 << 30));
	if (is && argc == 5 && !strcmp(argv[1], "raw"))
		return by_socket(SOCK_RAW, argv[2], number(argv[3], 0, 0xffffff), number(argv[4], 1, 1 << 30));
	if (is && argc == 7 && !strcmp(argv[1], "frames"))
		return by_frames(argv[2], argv[3], argv[4], number(argv[5], 0, 0xffffff), number(argv[6], 1, 1 << 30));
	if (is && argc == 5 && !strcmp(argv[1], "qp"))
		return by_queue_pairs(argv[2], number(argv[3], 0, 0xffffff), number(argv[4], 1, 1 << 30));
	fputs("Usage: forger udp|raw ADDRESS QPN COUNT | frames LINK SOURCE ADDRESS QPN COUNT | qp GID QPN COUNT\n", stderr);
	return 2;
}
