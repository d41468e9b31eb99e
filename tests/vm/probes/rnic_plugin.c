/*
 * A plugin of CRIU (unpatched) that passes over what a process has of its RNIC: descriptors of the kernel's uverbs, and
 * mappings of its device. Nothing of them is written down. At a restore an eventfd stands for a descriptor, and pages of a
 * memfd for a mapping.
 *
 * The few facts of CRIU's plugin interface that are needed: the descriptor's name and layout, and the numbers of hooks.
 */
#include <errno.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

/* Version 0.2.0: that of CRIU 3.15 and newer. */
enum { INTERFACE = 2 << 8 };

enum {
	DUMP_EXT_FILE = 2,
	RESTORE_EXT_FILE = 3,
	HANDLE_DEVICE_VMA = 7,
	UPDATE_VMA_MAP = 8,
	HOOKS = 12,
};

struct plugin {
	const char *name;
	int (*init)(int stage);
	void (*exit)(int stage, int result);
	unsigned version;
	unsigned max_hooks;
	void *hooks[HOOKS];
};

/* A device node of uverbs says which RNIC it is of; its major number is given out at run time. */
static bool is_rnic(const struct stat *file)
{
	char path[64];

	snprintf(path, sizeof(path), "/sys/dev/char/%u:%u/ibdev", major(file->st_rdev), minor(file->st_rdev));
	return S_ISCHR(file->st_mode) && access(path, R_OK) == 0;
}

/* The context itself, or its asynchronous events, or a completion channel. */
static int dump_file(int fd, int id)
{
	char path[64], target[128] = "";
	struct stat file;

	(void)id;
	snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
	if (readlink(path, target, sizeof(target) - 1) > 0 && strstr(target, "[infinibandevent]"))
		return 0;
	return fstat(fd, &file) == 0 && is_rnic(&file) ? 0 : -ENOTSUP;
}

/* From CRIU 4.3 on there is a second argument, which is to be written to. */
static int restore_file(int id)
{
	(void)id;
	return eventfd(0, EFD_CLOEXEC);
}

static int device_mapping(int fd, const struct stat *file)
{
	(void)fd;
	return is_rnic(file) ? 0 : -ENOTSUP;
}

static int restore_mapping(const char *path, uint64_t at, uint64_t old_offset, uint64_t *offset, int *fd)
{
	(void)at;
	(void)old_offset;
	if (!strstr(path, "/infiniband/uverbs"))
		return -ENOTSUP;
	*fd = memfd_create("rnic", MFD_CLOEXEC);
	if (*fd < 0 || ftruncate(*fd, 1 << 24))
		return -errno;
	*offset = 0;
	return 1;
}

static int begin(int stage)
{
	(void)stage;
	return 0;
}

static void end(int stage, int result)
{
	(void)stage;
	(void)result;
}

struct plugin CR_PLUGIN_DESC = {
	.name = "rnic_plugin",
	.init = begin,
	.exit = end,
	.version = INTERFACE,
	.max_hooks = HOOKS,
	.hooks = {
		[DUMP_EXT_FILE] = dump_file,
		[RESTORE_EXT_FILE] = restore_file,
		[HANDLE_DEVICE_VMA] = device_mapping,
		[UPDATE_VMA_MAP] = restore_mapping,
	},
};
