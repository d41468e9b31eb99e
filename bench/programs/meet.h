/* How two programs of a bench find each other and tell each other what they have. */
#ifndef MEET_H
#define MEET_H

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include "common.h"

enum { TCP_PORT = 18520 };

/* The socket on which the ends find each other. */
static inline int meet(const char *address)
{
	struct sockaddr_in at = { .sin_family = AF_INET, .sin_port = htons(TCP_PORT) };
	int one = 1, listener = socket(AF_INET, SOCK_STREAM, 0), fd;

	if (listener < 0)
		fail("socket");
	if (address) {
		if (inet_pton(AF_INET, address, &at.sin_addr) != 1)
			fail("%s is no address", address);
		if (connect(listener, (struct sockaddr *)&at, sizeof(at)))
			fail("connect to %s", address);
		return listener;
	}
	setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one));
	if (bind(listener, (struct sockaddr *)&at, sizeof(at)) || listen(listener, 1))
		fail("listen");
	fd = accept(listener, NULL, NULL);
	if (fd < 0)
		fail("accept");
	close(listener);
	return fd;
}

static inline void swap(int fd, const void *mine, void *theirs, size_t size)
{
	if (send(fd, mine, size, 0) != (ssize_t)size || recv(fd, theirs, size, MSG_WAITALL) != (ssize_t)size)
		fail("the other end");
}

#endif
