/* What the first object of the namespace tells. */
#ifndef NAMESPACE_H
#define NAMESPACE_H

enum { CALLS = 1 << 16 };

enum function { IOCTL, WRITE, MMAP, MALLOC, FOREIGN_FREE };

struct call {
	enum function function;
	void *from;
};

#endif
