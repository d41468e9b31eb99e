/* The first virtio disk, by the legacy interface (Virtual I/O Device 1.1, §4.1.4.8, §2.6 and §5.2), polled. */
enum {
    REQUEST_PAGES = 16,           /* that one request moves */
    BLOCK = REQUEST_PAGES * 4096, /* the same in bytes */
    BATCH = 8,                    /* requests under way at once */
};

/* Whether there is one. */
int disk_found(void);

/* Reads (or writes) this many blocks, at most BATCH, into (or from) as many pages for each; returns when all are done, 0 if the disk failed. */
int disk_move(int writes, u32 count, const u32 *blocks, void *const *memory);
