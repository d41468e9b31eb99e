#include "exchange.h"

#include <endian.h>
#include <errno.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

static int connect_to(const struct addrinfo *addresses)
{
	int error = EADDRNOTAVAIL;

	for (; addresses; addresses = addresses->ai_next) {
		int fd = socket(addresses->ai_family, addresses->ai_socktype | SOCK_CLOEXEC, addresses->ai_protocol);

		if (fd >= 0 && !connect(fd, addresses->ai_addr, addresses->ai_addrlen))
			return fd;
		error = errno;
		if (fd >= 0)
			close(fd);
	}
	errno = error;
	return -1;
}

static bool open_client(struct exchange *exchange, const struct options *options, struct report *report)
{
	struct addrinfo hints = { .ai_socktype = SOCK_STREAM }, *addresses;
	char port[8];
	int error;

	snprintf(port, sizeof(port), "%u", options->port);
	error = getaddrinfo(options->host, port, &hints, &addresses);
	if (error)
		return report_setup_error(report, "host %s: %s: check the name", options->host, gai_strerror(error));
	exchange->fd = connect_to(addresses);
	error = errno;
	freeaddrinfo(addresses);
	if (exchange->fd < 0)
		return report_setup_error(report, "connecting to %s port %s: %s: start vcheck without HOST there first, "
					  "with the same --port", options->host, port, strerror(error));
	return true;
}

/* An IPv6 socket that takes IPv4 too; where there is no IPv6, an IPv4 one. */
static int listen_on(uint16_t port)
{
	struct sockaddr_in6 any6 = { .sin6_family = AF_INET6, .sin6_port = htons(port), .sin6_addr = in6addr_any };
	struct sockaddr_in any4 = { .sin_family = AF_INET, .sin_port = htons(port) };
	const struct { struct sockaddr *address; socklen_t size; } tries[] = {
		{ (struct sockaddr *)&any6, sizeof(any6) },
		{ (struct sockaddr *)&any4, sizeof(any4) },
	};
	int error = 0;

	for (size_t i = 0; i < 2; i++) {
		int fd = socket(tries[i].address->sa_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
		int on = 1, off = 0;

		if (fd >= 0) {
			setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
			if (tries[i].address == (struct sockaddr *)&any6)
				setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof(off));
			if (!bind(fd, tries[i].address, tries[i].size) && !listen(fd, 1))
				return fd;
		}
		error = errno;
		if (fd >= 0)
			close(fd);
		if (error == EADDRINUSE)
			break;
	}
	errno = error;
	return -1;
}

static bool open_server(struct exchange *exchange, const struct options *options, struct report *report)
{
	int listener = listen_on(options->port);

	if (listener < 0)
		return report_setup_error(report, "listening on TCP port %u: %s: choose another --port", options->port,
					  strerror(errno));
	if (options->verbose)
		fprintf(stderr, "vcheck: waiting for a client on TCP port %u\n", options->port);
	do
		exchange->fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
	while (exchange->fd < 0 && errno == EINTR);
	close(listener);
	if (exchange->fd < 0)
		return report_setup_error(report, "accepting a client: %s", strerror(errno));
	return true;
}

bool exchange_open(struct exchange *exchange, const struct options *options, struct report *report)
{
	int on = 1;

	exchange->fd = -1;
	exchange->patience_seconds = options->stall_seconds * 2 + 10;
	if (!(options->host ? open_client : open_server)(exchange, options, report))
		return false;
	setsockopt(exchange->fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
	return true;
}

void exchange_close(struct exchange *exchange)
{
	if (exchange->fd >= 0)
		close(exchange->fd);
	exchange->fd = -1;
}

static bool send_all(struct exchange *exchange, const void *data, size_t size)
{
	const char *at = data;

	while (size) {
		ssize_t sent = send(exchange->fd, at, size, MSG_NOSIGNAL);

		if (sent < 0 && errno == EINTR)
			continue;
		if (sent < 0)
			return false;
		at += sent;
		size -= sent;
	}
	return true;
}

static bool receive_all(struct exchange *exchange, void *data, size_t size)
{
	time_t deadline = time(NULL) + exchange->patience_seconds;
	char *at = data;

	while (size) {
		struct pollfd wait = { .fd = exchange->fd, .events = POLLIN };
		ssize_t got;

		if (time(NULL) > deadline) {
			errno = ETIMEDOUT;
			return false;
		}
		if (poll(&wait, 1, 1000) <= 0)
			continue;
		got = recv(exchange->fd, at, size, 0);
		if (got < 0 && errno == EINTR)
			continue;
		if (got == 0)
			errno = ECONNRESET;
		if (got <= 0)
			return false;
		at += got;
		size -= got;
	}
	return true;
}

bool exchange_swap(struct exchange *exchange, const void *mine, void *theirs, size_t size, const char *what,
		   struct report *report)
{
	const uint64_t *values = mine;
	size_t count = size / sizeof(*values);
	uint64_t *wire = malloc(size);
	uint64_t *received = theirs;
	bool fine;

	if (!wire)
		return report_setup_error(report, "no memory to exchange %s", what);
	for (size_t i = 0; i < count; i++)
		wire[i] = htobe64(values[i]);
	fine = send_all(exchange, wire, size) && receive_all(exchange, wire, size);
	if (!fine)
		report_setup_error(report, "exchanging %s over TCP: %s: look at what the other side printed", what,
				   strerror(errno));
	for (size_t i = 0; fine && i < count; i++)
		received[i] = be64toh(wire[i]);
	free(wire);
	return fine;
}

bool exchange_peer_gone(const struct exchange *exchange)
{
	char byte;
	ssize_t got = recv(exchange->fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT);

	return got == 0 || (got < 0 && errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR);
}
