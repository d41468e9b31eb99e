// What functions that take plain numbers and memory answer, line by line; the first line is the library that they are of.

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <infiniband/sa.h>
#include <infiniband/verbs.h>
#include <rdma/ib_user_sa.h>
#include <rdma/ib_user_verbs.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

const char *ibv_get_sysfs_path(void);
int ibv_read_sysfs_file(const char *dir, const char *file, char *buf, size_t size);
int ibv_dontfork_range(void *base, size_t size);
int ibv_dofork_range(void *base, size_t size);
void ibv_copy_ah_attr_from_kern(struct ibv_ah_attr *dst, struct ib_uverbs_ah_attr *src);
void ibv_copy_qp_attr_from_kern(struct ibv_qp_attr *dst, struct ib_uverbs_qp_attr *src);
void ibv_copy_path_rec_from_kern(struct ibv_sa_path_rec *dst, struct ib_user_path_rec *src);
void ibv_copy_path_rec_to_kern(struct ib_user_path_rec *dst, struct ibv_sa_path_rec *src);

static void bytes(const char *what, const void *at, size_t length) {
    printf("%s", what);
    for (size_t index = 0; index < length; index++)
        printf(" %02x", ((const unsigned char *)at)[index]);
    printf("\n");
}

// Each byte of the source is another one, and what is not written of the target stays.
#define COPY(function, to, from)                                                                                       \
    do {                                                                                                               \
        union {                                                                                                        \
            from it;                                                                                                   \
            unsigned char bytes[sizeof(from)];                                                                         \
        } source;                                                                                                      \
        to target;                                                                                                     \
        for (size_t index = 0; index < sizeof(from); index++)                                                          \
            source.bytes[index] = 3 * index + 1;                                                                       \
        memset(&target, 0xee, sizeof(target));                                                                         \
        function(&target, &source.it);                                                                                 \
        bytes(#function, &target, sizeof(target));                                                                     \
    } while (0)

static void file(const char *folder, const char *content, size_t size) {
    char path[512], buffer[64];
    memset(buffer, 'x', sizeof(buffer));
    snprintf(path, sizeof(path), "%s/file", folder);
    int fd = open(path, O_CREAT | O_TRUNC | O_WRONLY, 0600);
    if (write(fd, content, strlen(content)) < 0)
        printf("write failed\n");
    close(fd);
    printf("read %d", ibv_read_sysfs_file(folder, "file", buffer, size));
    bytes("", buffer, size);
}

int main(int count, char **arguments) {
    Dl_info info;
    void *function = dlsym(RTLD_DEFAULT, "ibv_wc_status_str");
    if (count != 2 || !function || !dladdr(function, &info))
        return 2;
    printf("%s\n", strrchr(info.dli_fname, '/') + 1);
    for (int number = -2; number < 40; number++) {
        printf("%d: %s, %s, %s, %s", number, ibv_node_type_str(number), ibv_port_state_str(number),
               ibv_event_type_str(number), ibv_wc_status_str(number));
        printf(", %d %d\n", ibv_rate_to_mbps(number), ibv_rate_to_mult(number));
    }
    for (int number = -2; number < 2000000; number++)
        if (mbps_to_ibv_rate(number) || mult_to_ibv_rate(number))
            printf("%d: %d %d\n", number, mbps_to_ibv_rate(number), mult_to_ibv_rate(number));
    COPY(ibv_copy_ah_attr_from_kern, struct ibv_ah_attr, struct ib_uverbs_ah_attr);
    COPY(ibv_copy_qp_attr_from_kern, struct ibv_qp_attr, struct ib_uverbs_qp_attr);
    COPY(ibv_copy_path_rec_from_kern, struct ibv_sa_path_rec, struct ib_user_path_rec);
    COPY(ibv_copy_path_rec_to_kern, struct ib_user_path_rec, struct ibv_sa_path_rec);
    printf("sysfs %s\n", ibv_get_sysfs_path());
    file(arguments[1], "some\n", 16);
    file(arguments[1], "some", 16);
    file(arguments[1], "some\n\n", 16);
    file(arguments[1], "0123456\n", 8);
    file(arguments[1], "01234567", 8);
    file(arguments[1], "0123456789\n", 8);
    file(arguments[1], "", 8);
    errno = 0;
    int missing = ibv_read_sysfs_file(arguments[1], "none", (char[8]){0}, 8);
    printf("missing %d %d\n", missing, errno);
    static char pages[1 << 16] __attribute__((aligned(1 << 12)));
    printf("fork %d %d\n", ibv_dontfork_range(pages, sizeof(pages)), ibv_dofork_range(pages, sizeof(pages)));
    return 0;
}
